"""Beam search on trained Marian models: the lists that native Marian and transformers gave for the same lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.model import Transformer
from transformer_jax.pretrained import load_pretrained
from transformer_jax.sharding import data_mesh
from transformer_jax.translator import Translator


@pytest.fixture
def native_dir(shared_dir: Path) -> Path:
    folder = shared_dir / "marian_native"
    if not folder.is_dir():
        pytest.skip("the native Marian models are not here")
    return folder


def lines(native_dir: Path) -> list[str]:
    return (native_dir / "corpus" / "test.en").read_text(encoding="utf-8").splitlines()


def test_four_best_lists_are_those_of_native_marian(native_dir: Path) -> None:
    """100 of 100 lists: ids, scores and word scores within 1e-4. The search is what decoder.yml says."""
    references: Any = json.loads((native_dir / "marian_dates" / "refs.json").read_text())["sentences"]
    translator = Translator.from_pretrained(native_dir / "marian_dates", mesh=data_mesh(1))
    found = translator.translate(lines(native_dir), n_best=4)
    assert len(found) == len(references) == 100
    for translation, reference in zip(found, references, strict=True):
        golden = reference["beam4"]["nbest"]
        assert translation.text == golden[0]["text"]
        ids = [list(h.tokens) for h in translation.n_best]
        assert ids == [h["ids"] + [0] * h["finished"] for h in golden]
        for hypothesis, expected in zip(translation.n_best, golden, strict=True):
            assert hypothesis.score == pytest.approx(expected["score"], abs=1e-4)
            np.testing.assert_allclose(hypothesis.token_scores, expected["word_scores"], atol=1e-4)


def test_beams_are_those_of_transformers(native_dir: Path) -> None:
    references: Any = json.loads((native_dir / "hf_refs.json").read_text())["sentences"]
    translator = Translator.from_pretrained(native_dir / "hf_dates", mesh=data_mesh(1))
    assert translator.config.beam_size == 4  # as generation_config.json says
    found = translator.translate(lines(native_dir), extra_length=None)
    for translation, reference in zip(found, references, strict=True):
        start, *ids = reference["beam4"]["ids"]
        assert start == translator.model.config.start_id
        assert list(translation.tokens) == ids
        assert translation.score == pytest.approx(reference["beam4"]["score"], abs=1e-5)


def test_encoder_output_and_logits_are_the_stored_ones_of_transformers(native_dir: Path) -> None:
    stored = np.load(native_dir / "hf_refs.npz")
    model = load_pretrained(native_dir / "hf_dates")
    variables = {"params": jax.device_put(model.params)}
    transformer = Transformer(model.config)
    for n in range(3):
        source = jnp.asarray(stored[f"input_ids_{n}"].reshape(1, -1), jnp.int32)
        target = jnp.asarray(stored[f"decoder_input_ids_{n}"].reshape(1, -1), jnp.int32)
        memory, logits = stored[f"encoder_{n}"], stored[f"logits_{n}"]
        found = np.asarray(transformer.apply(variables, source, method="encode"))
        assert np.abs(found.reshape(memory.shape) - memory).max() <= 2e-6 * np.abs(memory).max()
        found = np.asarray(transformer.apply(variables, source, target))
        np.testing.assert_allclose(found.reshape(logits.shape), logits, atol=3e-5)


def test_greedy_ids_are_the_stored_ones_of_transformers(native_dir: Path) -> None:
    references: Any = json.loads((native_dir / "hf_refs.json").read_text())["sentences"]
    translator = Translator.from_pretrained(native_dir / "hf_dates", mesh=data_mesh(1))
    for translation, reference in zip(translator.translate(lines(native_dir), beam_size=1), references, strict=True):
        assert list(translation.tokens) == reference["greedy"]["ids"][1:]
