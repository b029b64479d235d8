"""The model folder: Hugging Face's Marian layout on disk, ours and other people's.

config.json, generation_config.json and model.safetensors; the tokenizer's files beside them are `tokenizer`'s.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformer_jax.config import DecodeConfig, ModelConfig
from transformer_jax.errors import UserError
from transformer_jax.files import read_json, write_whole
from transformer_jax.hf_marian import config_from_json, config_json, from_tensors, generation_config_json, to_tensors
from transformer_jax.tensor_files import read_tensors
from transformer_jax.weight_table import Account, Params


@dataclass(frozen=True)
class LoadedModel:
    """A model that was read, with what its source says of generating and of its tensors."""

    config: ModelConfig
    params: Params
    account: Account
    suppressed: tuple[int, ...] = ()
    """Ids that it must never generate."""
    search: dict[str, Any] = field(default_factory=dict)
    """Fields of DecodeConfig that its source sets."""


def save_model(
    folder: Path,
    config: ModelConfig,
    params: Params,
    suppressed: tuple[int, ...] = (),
    search: dict[str, Any] | None = None,
) -> None:
    """Writes the model; each file appears whole or not at all. `suppressed`: ids that it must never generate; `search`:
    fields of DecodeConfig that its source sets."""
    from safetensors.numpy import save

    folder.mkdir(parents=True, exist_ok=True)
    files = {
        "model.safetensors": save(to_tensors(config, params), {"format": "pt"}),
        "config.json": _json(config_json(config)),
        "generation_config.json": _json(generation_config_json(config, suppressed) | _as_generation(search or {})),
    }
    for name, content in files.items():
        write_whole(folder / name, content)


def load_model(folder: Path) -> LoadedModel:
    """Reads a model folder, ours or one of transformers."""
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} holds no config.json; name a model folder or a run folder.")
    config = config_from_json(read_json(folder / "config.json"), folder / "config.json")
    tensors = read_tensors(folder)
    try:
        params, account = from_tensors(config, tensors)
    except UserError as error:
        raise UserError(f"{folder}: {error}") from error
    described = _generation_config(folder)
    return LoadedModel(config, params, account, _suppressed(described, folder, config), _search(described, folder))


def _generation_config(folder: Path) -> dict[str, Any]:
    path = folder / "generation_config.json"
    return read_json(path if path.is_file() else folder / "config.json")  # where it stood until 2022


def _suppressed(described: dict[str, Any], folder: Path, config: ModelConfig) -> tuple[int, ...]:
    """bad_words_ids of one token each; those of several are not a matter of single ids, and Marian has none."""
    words: Any = described.get("bad_words_ids") or []
    if not isinstance(words, list) or not all(isinstance(word, list) and word for word in words):
        raise UserError(f"{folder}: bad_words_ids is not a list of lists of ids.")
    ids = {word[0] for word in words if len(word) == 1}
    if not all(type(i) is int and i >= 0 for i in ids):
        raise UserError(f"{folder}: bad_words_ids is not a list of lists of ids.")
    return tuple(sorted(ids - {config.pad_id, config.start_id, config.end_id}))


GENERATION = {
    "num_beams": ("beam_size", int),
    "length_penalty": ("length_penalty", int | float),
    "no_repeat_ngram_size": ("no_repeat_ngram_size", int),
    "repetition_penalty": ("repetition_penalty", int | float),
}
"""Settings of transformers' generation that are read and written, with the fields of DecodeConfig that they are."""


def _search(described: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The search that transformers' generation_config.json sets."""
    search: dict[str, Any] = {}
    for theirs, (ours, kinds) in GENERATION.items():
        value = described.get(theirs)
        if value is not None:
            if not isinstance(value, kinds) or isinstance(value, bool):
                raise UserError(f"{folder}: {theirs} is {value!r}; it must be a number.")
            search[ours] = value
    try:
        DecodeConfig(**search)
    except UserError as error:
        raise UserError(f"{folder}: the generation settings are impossible: {error}") from error
    return search


def _as_generation(search: dict[str, Any]) -> dict[str, Any]:
    """The other way. Marian's length rule is transformers' own, but for a word penalty, which it does not have."""
    return {theirs: search[ours] for theirs, (ours, _) in GENERATION.items() if ours in search}


def _json(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"
