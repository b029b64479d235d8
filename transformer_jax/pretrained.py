"""A model with its tokenizer from wherever it is: a run, a model folder, native Marian, or the Hugging Face hub."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformer_jax.config import ModelConfig, Positions
from transformer_jax.errors import UserError
from transformer_jax.hf_marian import without_start_row
from transformer_jax.model_folder import LoadedModel, load_model, save_model
from transformer_jax.native_folder import is_native, load_native
from transformer_jax.native_marian import EPSILON
from transformer_jax.tokenizer import SentencePieceTokenizer, Tokenizer, load_tokenizer
from transformer_jax.weight_table import Account, Params

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ("*.json", "*.spm")
_WEIGHTS = ("model.safetensors*", "model-*.safetensors", "pytorch_model.bin*", "pytorch_model-*.bin")


@dataclass(frozen=True)
class Pretrained:
    """A model that is ready to use."""

    config: ModelConfig
    params: Params
    tokenizer: Tokenizer
    suppressed: tuple[int, ...]
    """Ids that it must never generate."""
    search: dict[str, Any]
    """Fields of DecodeConfig that its source sets."""
    account: Account
    """What became of the tensors that it was read from."""
    source: Path
    """The folder or file that it was read from."""

    def save(self, folder: Path) -> None:
        """Writes a model folder: the model and its tokenizer."""
        save_model(folder, self.config, self.params, self.suppressed, self.search)
        self.tokenizer.save(folder)


def load_pretrained(name: str | Path, *, positions: Positions | None = None, revision: str | None = None) -> Pretrained:
    """Loads a model folder (ours or of transformers), a run folder, a native Marian folder or .npz, or a model of the
    Hugging Face hub by its name, such as Helsinki-NLP/opus-mt-en-de, of which `revision` is a branch, tag or commit.

    `positions` reads the weights with another table than their source has. "marian" on a folder that Hugging Face's
    converter made is the model as it was trained: Marian's positions and epsilon, and no `<pad>` in the softmax.
    """
    path = find_model(name, revision)
    if is_native(path) and not (path / "config.json").is_file():
        loaded, tokenizer = load_native(path)
    else:
        loaded, tokenizer = load_model(path), load_tokenizer(path)
    if positions is not None:
        loaded = with_positions(loaded, positions)
    check_vocabulary(loaded.config, tokenizer)
    return Pretrained(loaded.config, loaded.params, tokenizer, loaded.suppressed, loaded.search, loaded.account, path)


def find_model(name: str | Path, revision: str | None = None) -> Path:
    """The folder or file that holds the model of this name; one of the hub is downloaded."""
    path = Path(name)
    if path.is_file() and is_native(path):
        return path
    if path.is_dir():
        if (path / "model").is_dir():
            return path / "model"
        if (path / "checkpoints").is_dir():
            raise UserError(f"The run {path} has no model yet; it is written at the first evaluation.")
        return path
    if path.exists():
        raise UserError(f"{path} is a file; name a model folder, a run folder, or a Marian .npz.")
    if _HUB_NAME.fullmatch(str(name)):
        return download(str(name), revision)
    raise UserError(
        f"There is no folder {path}; name a model folder, a run folder, a Marian .npz or a model of the hub."
    )


def download(name: str, revision: str | None = None) -> Path:
    """A model of the Hugging Face hub, out of the local cache where it is there already."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    # The bases are the errors of the HTTP library, which is not the same one in all versions of huggingface_hub.
    unreachable: Any = (*HfHubHTTPError.__bases__, OSError, ValueError)
    try:
        files = _files_of(name, revision)
        return Path(snapshot_download(name, revision=revision, allow_patterns=files))
    except UserError:
        raise
    except RepositoryNotFoundError as error:
        raise UserError(
            f"There is no folder {name}, and the hub has no model of this name (or it is private)."
        ) from error
    except RevisionNotFoundError as error:
        raise UserError(f"The hub's {name} has no revision {revision}; name a branch, tag or commit of it.") from error
    except unreachable as error:
        cached = _cached(name, revision)
        if cached is not None:
            return cached
        reason = " ".join(str(error).split()).rstrip(". ")
        raise UserError(
            f"There is no folder {name}, and the hub gives no model of this name ({reason}); "
            "go online, or name a folder."
        ) from error


def _files_of(name: str, revision: str | None) -> list[str]:
    """The files that a model consists of; of the formats of its weights only the best."""
    from fnmatch import fnmatch

    from huggingface_hub import HfApi

    # One request, not tried again and again: without a network, the cached copy is used at once.
    info = HfApi().model_info(name, revision=revision, timeout=30)
    files = [file.rfilename for file in info.siblings or [] if "/" not in file.rfilename]
    chosen = [file for file in files if any(fnmatch(file, pattern) for pattern in _HUB_FILES)]
    for patterns in (_WEIGHTS[:2], _WEIGHTS[2:]):
        weights = [file for file in files if any(fnmatch(file, pattern) for pattern in patterns)]
        if weights:
            return sorted({*chosen, *weights})
    raise UserError(f"The hub's {name} has neither model.safetensors nor pytorch_model.bin; it is no model to read.")


def _cached(name: str, revision: str | None) -> Path | None:
    """What an earlier download left of it."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, OSError, ValueError):
        return None
    return folder if (folder / "config.json").is_file() else None


def with_positions(model: LoadedModel, positions: Positions) -> LoadedModel:
    """The same weights read with another table of positions; see `load_pretrained`."""
    config, params = model.config, model.params
    if "learned" in (positions, config.positions) or config.positions == "interleaved" != positions:
        raise UserError(
            f"The model has {config.positions} positions, which cannot be read as {positions}: "
            "sin_then_cos and marian can stand for each other."
        )
    if positions == config.positions:
        return model
    changes: dict[str, Any] = {"positions": positions, "norm_epsilon": 1e-5}
    if positions == "marian":
        config, params = without_start_row(config, params)
        changes["norm_epsilon"] = EPSILON
    return dataclasses.replace(model, config=dataclasses.replace(config, **changes), params=params)


def check_vocabulary(config: ModelConfig, tokenizer: Tokenizer) -> None:
    """The tokenizer's ids must be the model's; only padding may have an id one past the model's table."""
    sides = {
        "target": (config.vocab_size, tokenizer.vocab_size, tokenizer.pad_id),
        "source": (config.source_vocab_size or config.vocab_size, tokenizer.source_vocab_size, tokenizer.source_pad_id),
    }
    for side, (rows, size, pad_id) in sides.items():
        if rows != size and not (rows == size - 1 == pad_id):
            raise UserError(
                f"The model has {rows} {side} tokens, but the tokenizer has {size}; they do not belong together."
            )
    if config.end_id != tokenizer.end_id:
        raise UserError(
            f"end_id is {config.end_id} in the model, but {tokenizer.end_id} in the tokenizer; "
            "they do not belong together."
        )
    if not isinstance(tokenizer, SentencePieceTokenizer) and config.pad_id != tokenizer.pad_id:
        raise UserError(
            f"pad_id is {config.pad_id} in the model, but {tokenizer.pad_id} in the tokenizer; "
            "they do not belong together."
        )
