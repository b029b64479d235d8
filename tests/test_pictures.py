"""The pictures of the pages: small, shown somewhere, and the README's true to the files that it names."""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import load_program

ROOT = Path(__file__).resolve().parents[1]
PICTURES = sorted((ROOT / "docs" / "images").iterdir())
LARGEST = 150_000  # bytes


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.name)
def test_a_picture_is_small_and_shown(picture: Path) -> None:
    assert picture.stat().st_size < LARGEST
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    assert any(f"images/{picture.name}" in page.read_text(encoding="utf-8") for page in pages)


def test_the_overview_names_files_of_the_package_that_hold_its_blocks() -> None:
    module = load_program(ROOT / "docs" / "make_pictures.py")
    held = {
        "self-attention": "class MultiHeadAttention",
        "masked self-attention": "def causal_mask",
        "attention to the encoder": "class MultiHeadAttention",
        "add & norm": "def residual",
        "feed-forward": "class FeedForward",
        "embedding + positions": "class PositionalEncoding",
        "embedding, transposed": "def logits",
        "softmax, smoothed loss": "def cross_entropy",
    }
    blocks = {*module.ENCODER, *module.DECODER, *module.OUTPUTS, module.EMBEDDING}
    assert {text for text, _ in blocks} == held.keys()
    for text, file in blocks:
        assert held[text] in (ROOT / "transformer_jax" / file).read_text(encoding="utf-8")
    assert "class Transformer" in (ROOT / "transformer_jax" / "model.py").read_text(encoding="utf-8")
