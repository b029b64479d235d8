"""Folders of native Marian models: the .npz, a decoder.yml that names it with its vocabularies, and those files.

Two kinds of vocabulary: Marian's built-in SentencePiece (`vocab.spm`), whose own ids are the model's; and `vocab.yml`
with the ids, beside source.spm and target.spm that cut the text beforehand, as OPUS-MT packages have them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformer_jax.config import ModelConfig
from transformer_jax.errors import UserError
from transformer_jax.files import write_whole
from transformer_jax.model_folder import LoadedModel
from transformer_jax.native_marian import load_npz, save_npz
from transformer_jax.sentencepiece_training import vocabulary_of
from transformer_jax.tokenizer import END, PAD, UNKNOWN, SentencePieceTokenizer
from transformer_jax.weight_table import Params

DECODER, MODEL = "decoder.yml", "model.npz"


def is_native(path: Path) -> bool:
    """Whether a path is a native Marian model: an .npz, or a folder that holds one or the decoder.yml of one."""
    if path.name.startswith("pytorch_model"):
        return False
    return path.suffix in (".npz", ".bin") or (path / DECODER).is_file() or (path.is_dir() and any(path.glob("*.npz")))


def load_native(path: Path) -> tuple[LoadedModel, SentencePieceTokenizer]:
    """The model and the tokenizer of a Marian folder, or of an .npz with its vocabularies beside it."""
    folder = path if path.is_dir() else path.parent
    named = _read_decoder_yml(folder)
    model = load_npz(_model_file(folder, named) if path.is_dir() else path)
    tokenizer = _load_tokenizer(folder, _named_files(folder, named, "vocabs"))
    config = replace(model.config, end_id=tokenizer.end_id)
    suppressed = (tokenizer.unknown_id,)
    return replace(model, config=config, suppressed=suppressed, search=_search(named, folder)), tokenizer


def _search(named: dict[str, Any], folder: Path) -> dict[str, Any]:
    """How decoder.yml has it translate, with Marian's own settings for what it leaves out."""
    try:
        return {
            "length_rule": "marian",
            "beam_size": int(named.get("beam-size", 12)),
            "length_penalty": float(named.get("normalize", "0") or 1),  # named without a number, it is 1
            "word_penalty": float(named.get("word-penalty", "0") or 0),
            "max_length_factor": float(named.get("max-length-factor", 3)),
            "extra_length": None,
        }
    except (TypeError, ValueError) as error:
        raise UserError(f"{folder / DECODER}: an option of the search is not a number ({error}).") from error


def _read_decoder_yml(folder: Path) -> dict[str, Any]:
    path = folder / DECODER
    content = read_yaml(path) if path.is_file() else {}
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no options; it should name models and vocabs.")
    return content


def read_yaml(path: Path) -> Any:
    """A YAML file, every plain value as the string that it was written as (`no` and `1.0` are words)."""
    import yaml

    loader = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
    try:
        return yaml.load(path.read_text(encoding="utf-8"), loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid YAML ({' '.join(str(error).split())[:100]}); copy it again.") from error


def _named_files(folder: Path, named: dict[str, Any], key: str) -> list[Path]:
    """The files that decoder.yml lists under a key. Absolute paths are of the machine that it was written on: where
    they do not exist, the file is looked for in the folder."""
    files = named.get(key) or []
    if not isinstance(files, list) or not all(isinstance(file, str) for file in files):
        raise UserError(f"{folder / DECODER}: {key} is not a list of files.")
    return [Path(file) if Path(file).is_absolute() and Path(file).exists() else _in(folder, file) for file in files]


def _in(folder: Path, file: str) -> Path:
    return folder / file if (folder / file).exists() else folder / Path(file).name


def _model_file(folder: Path, named: dict[str, Any]) -> Path:
    models = _named_files(folder, named, "models") or sorted(folder.glob("*.npz"))
    if len(models) > 1:
        names = ", ".join(path.name for path in models)
        raise UserError(f"{folder} has {len(models)} models ({names}); name one of the files.")
    if not models:
        raise UserError(f"{folder} holds no .npz, and its {DECODER} names none; copy the whole folder.")
    if not models[0].is_file():
        raise UserError(f"{folder} lacks {models[0].name}, which its {DECODER} names; copy the whole folder.")
    return models[0]


def _load_tokenizer(folder: Path, vocabs: Sequence[Path]) -> SentencePieceTokenizer:
    source, target = _vocabulary_files(folder, vocabs)
    for path in (source, target):
        if not path.is_file():
            raise UserError(f"{folder} lacks the vocabulary {path.name}; copy the whole folder.")
    spm = [folder / "source.spm", folder / "target.spm"]
    if source.suffix == target.suffix == ".spm":
        spm = [source, target]
    elif missing := [path.name for path in spm if not path.is_file()]:
        raise UserError(
            f"{folder} lacks {' and '.join(missing)}; with {source.name} they are needed to cut text into pieces."
        )
    shared = source == target or source.read_bytes() == target.read_bytes()
    tables = [_vocabulary(path) for path in ((source,) if shared else (source, target))]
    return SentencePieceTokenizer(spm[0], spm[1], *tables)


def _vocabulary_files(folder: Path, vocabs: Sequence[Path]) -> tuple[Path, Path]:
    """Of source and target: those that decoder.yml names, or the one kind that is there."""
    if len(vocabs) == 2:
        return vocabs[0], vocabs[1]
    if vocabs:
        raise UserError(f"{folder / DECODER} names {len(vocabs)} vocabularies; a translation model has two.")
    shared = [folder / "vocab.spm", folder / "vocab.yml", *sorted(folder.glob("*.vocab.yml"))]
    found = [path for path in shared if path.is_file()]
    if not found:
        raise UserError(f"{folder} has no {DECODER} that names its vocabularies, nor a vocab.spm or vocab.yml.")
    return found[0], found[0]


def _vocabulary(path: Path) -> dict[str, int]:
    """The id of every piece; padding, which Marian does not have, gets the id one past the table."""
    table = vocabulary_of(path) if path.suffix == ".spm" else _read_table(path)
    for token in (END, UNKNOWN):
        if token not in table:
            raise UserError(f"{path} has no {token}; a Marian vocabulary does.")
    table.setdefault(PAD, len(table))
    return table


def _read_table(path: Path) -> dict[str, int]:
    if path.suffix not in (".yml", ".yaml", ".json"):
        raise UserError(f"{path} is a vocabulary of a kind that is not read; .spm and .yml are.")
    content = read_yaml(path)
    try:
        table = {str(piece): int(index) for piece, index in content.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise UserError(f"{path} is not a vocabulary: it must give every piece a number.") from error
    if sorted(table.values()) != list(range(len(table))):
        raise UserError(f"{path} is not a vocabulary: its ids do not run from 0 to {len(table) - 1}, each once.")
    return table


def save_native(
    folder: Path,
    config: ModelConfig,
    params: Params,
    tokenizer: SentencePieceTokenizer,
    search: dict[str, Any] | None = None,
) -> None:
    """Writes model.npz, the vocabularies and decoder.yml; `marian-decoder -c FOLDER/decoder.yml` reads them. `search`:
    fields of DecodeConfig that the model's source sets."""
    import yaml

    save_npz(folder / MODEL, config, params)
    vocabs = tokenizer.save_native(folder)
    search = search or {}
    options = {
        "relative-paths": True,
        "models": [MODEL],
        "vocabs": vocabs,
        "beam-size": search.get("beam_size", 4),
        "normalize": search.get("length_penalty", 0.6),
        "word-penalty": search.get("word_penalty", 0),
        "max-length-factor": search.get("max_length_factor", 3),
    }
    write_whole(folder / DECODER, yaml.safe_dump(options, sort_keys=False))
