"""A corpus in tokens on disk, mapped into memory when it is read: a folder named after what it was made from.

    KEY/source_ids.bin, target_ids.bin           uint16 where the vocabulary allows, else int32
    KEY/source_offsets.bin, target_offsets.bin   int64, one more than there are pairs
    KEY/meta.json                                sizes, the fingerprint of the tokens, the report of the cleaning

A folder is written under another name and renamed when it is whole, so one that a killed run leaves behind is never
read. All of it can be deleted at any time; it is made again when it is asked for.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from transformer_jax.batching import Ragged, TokenPairs
from transformer_jax.errors import UserError
from transformer_jax.files import PART, WriteError, unfinished, write_whole, writing
from transformer_jax.token_blocks import TokenBlock

FORMAT = 1
"""Part of every key: raised when the same text would give other tokens or other files."""
SIDES = ("source", "target")
META = "meta.json"
ABANDONED_SECONDS = 3600.0
"""A half-written folder that nothing was added to for so long belongs to a run that was killed."""


def cache_key(**made_from: Any) -> str:
    """A name for tokens that were made from these values, each of them plain JSON."""
    text = json.dumps({"format": FORMAT, **made_from}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def folder_digest(folder: Path) -> str:
    """sha256 of the names and contents of a folder's files, such as those of a tokenizer."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)} ".encode())
        digest.update(content)
    return digest.hexdigest()


def open_cache(folder: Path) -> tuple[TokenPairs, dict[str, Any]] | None:
    """The tokens of a cache folder and the report that was written with them; None: there is none that is whole."""
    try:
        meta = json.loads((folder / META).read_text(encoding="utf-8"))
        sides = [_map_side(folder, side, meta) for side in SIDES]
        pairs = TokenPairs(sides[0], sides[1], meta["pad_id"], meta["start_id"], meta["fingerprint"])
        if not isinstance(meta["report"]["corpora"], list):
            raise ValueError(f"{folder} has no report")
        return pairs, meta["report"]
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, KeyError, TypeError):  # of another size than was written, or no JSON: a damaged disk or copy
        return None


def _map_side(folder: Path, side: str, meta: dict[str, Any]) -> Ragged:
    n_tokens, n_offsets = meta["tokens"][side], meta["pairs"] + 1
    arrays = []
    for path, kind, size in (
        (folder / f"{side}_ids.bin", np.dtype(meta["dtype"]), n_tokens),
        (folder / f"{side}_offsets.bin", np.dtype(np.int64), n_offsets),
    ):
        if path.stat().st_size != size * kind.itemsize:
            raise ValueError(f"{path} has another size than was written")
        # As a plain array: numpy.memmap's own slices cost several times as much.
        arrays.append(np.memmap(path, kind, "r", shape=(size,)).view(np.ndarray))
    ids, offsets = arrays
    ends_fit = offsets[0] == 0 and offsets[-1] == n_tokens
    if not ends_fit or (np.diff(offsets) < 1).any() or (n_tokens and int(ids.max()) >= meta["vocab_size"]):
        raise ValueError(f"{folder} holds other numbers than were written")
    return Ragged(ids, offsets)


class CacheWriter:
    """Writes a cache folder block by block; with an error, or without `finish`, nothing of it is left.

    Use it as a context manager.
    """

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self.folder, self.vocab_size = folder, vocab_size
        self.dtype = np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.int32)
        self.pairs = 0
        self.tokens = dict.fromkeys(SIDES, 0)
        self._open = contextlib.ExitStack()

    def __enter__(self) -> CacheWriter:
        names = [f"{side}_{what}.bin" for side in SIDES for what in ("ids", "offsets")]
        with self._writing():
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            remove_abandoned(self.folder.parent)
            self._part = unfinished(self.folder)
            self._part.mkdir()
            self._files = {name: self._open.enter_context((self._part / name).open("wb")) for name in names}
        for side in SIDES:
            self._write(f"{side}_offsets.bin", np.zeros(1, np.int64))
        return self

    def _write(self, name: str, array: np.ndarray) -> None:
        with self._writing():
            self._files[name].write(np.ascontiguousarray(array).data)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """What goes wrong inside is told of the folder that the user can name."""
        try:
            with writing(self.folder.parent):
                yield
        except WriteError as error:
            raise UserError(
                f"The folder for tokens {self.folder.parent} cannot be written ({error.reason}); name another with "
                "--data.cache."
            ) from error

    def add(self, block: TokenBlock) -> None:
        """Appends a block's pairs."""
        for side, sequences in zip(SIDES, (block.source, block.target), strict=True):
            self._write(f"{side}_ids.bin", sequences.ids.astype(self.dtype))
            self._write(f"{side}_offsets.bin", sequences.offsets[1:].astype(np.int64) + self.tokens[side])
            self.tokens[side] += len(sequences.ids)
        self.pairs += len(block.source)

    def finish(self, pad_id: int, start_id: int, report: dict[str, Any]) -> None:
        """Puts the whole folder in its place."""
        with self._writing():
            for file in self._files.values():
                file.flush()
                os.fsync(file.fileno())
            self._open.close()
        meta: dict[str, Any] = {
            "dtype": self.dtype.name,
            "vocab_size": self.vocab_size,
            "pairs": self.pairs,
            "tokens": self.tokens,
            "pad_id": pad_id,
            "start_id": start_id,
        }
        source, target = (_map_side(self._part, side, meta) for side in SIDES)
        meta |= {"fingerprint": TokenPairs(source, target, pad_id, start_id).fingerprint(), "report": report}
        with self._writing():
            write_whole(self._part / "meta.json", json.dumps(meta, ensure_ascii=False, indent=2) + "\n")
        try:
            self._part.rename(self.folder)
        except OSError:
            if open_cache(self.folder) is None:  # damaged, since this one was begun
                shutil.rmtree(self.folder)
                self._part.rename(self.folder)
            # Else another run made the same in the meantime, which is as good.

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):  # what could not be written has been told of
            self._open.close()
        shutil.rmtree(self._part, ignore_errors=True)


def remove_abandoned(folder: Path) -> None:
    """Removes what runs that were killed have left half-written in a cache."""
    for part in folder.glob(f".*{PART}"):
        with contextlib.suppress(FileNotFoundError):  # another run may be removing it too
            touched = max((path.stat().st_mtime for path in _with_files(part)), default=0.0)
            if time.time() - touched > ABANDONED_SECONDS:
                shutil.rmtree(part, ignore_errors=True)


def _with_files(folder: Path) -> Iterator[Path]:
    yield folder
    yield from folder.iterdir()
