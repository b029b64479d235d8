"""From one format of a model to another, exactly or not at all."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Literal

from transformer_jax import hf_marian, native_marian
from transformer_jax.config import Positions
from transformer_jax.errors import UserError
from transformer_jax.files import unfinished, writing
from transformer_jax.native_folder import save_native
from transformer_jax.pretrained import Pretrained, load_pretrained
from transformer_jax.tokenizer import SentencePieceTokenizer

Format = Literal["hf", "marian"]


def convert(
    source: str | Path,
    folder: Path,
    to: Format = "hf",
    *,
    positions: Positions | None = None,
    revision: str | None = None,
) -> Pretrained:
    """Writes the model of `source` (see `load_pretrained`) to a new folder, and returns it as it was read.

    hf: for transformers and CTranslate2. marian: for native Marian. What the other program could not run exactly is
    refused by name. The two have different tables of positions; `positions` asks for the other's, which changes
    translations a little in one direction and restores them in the other.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is there already; name a new folder.")
    model = load_pretrained(source, positions=positions, revision=revision)
    tokenizer = model.tokenizer
    if not isinstance(tokenizer, SentencePieceTokenizer):
        raise UserError(
            f"{source} has a vocabulary of characters, which neither transformers nor Marian reads; "
            "train on sub-words to hand a model on."
        )
    config, params = model.config, model.params
    part = unfinished(folder.resolve())
    try:
        with writing(folder):
            if to == "hf":
                _refuse("transformers", hf_marian.obstacles(config), config.positions, "marian", "sin_then_cos")
                model.save(part)
            else:
                config, params = hf_marian.without_start_row(config, params)
                reasons = native_marian.obstacles(config)
                if config.norm == "pre":
                    reasons.append("norm pre (Marian's decoder normalises its keys and values only when it scores)")
                _refuse("Native Marian", reasons, config.positions, "sin_then_cos", "marian")
                save_native(part, config, params, tokenizer, model.search)
            if folder.is_dir():  # an empty one, which may be where somebody stands
                for path in part.iterdir():
                    path.rename(folder / path.name)
            else:
                part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return model


def _refuse(program: str, reasons: list[str], positions: str, others: str, own: str) -> None:
    """An error that names what the program could not run; where only positions stand in the way, also the way out."""
    if not reasons:
        return
    way_out = ""
    if positions == others:
        way_out = f"; --positions {own} writes the nearest model that it runs, whose translations can differ"
    raise UserError(f"{program} cannot run this model exactly: {'; '.join(reasons)}{way_out}.")
