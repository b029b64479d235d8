"""Parallel text from files: what a line is, which pairs are kept, and how many each rule removed.

A line ends at ``\\n`` and nowhere else. Python's text mode also splits at a lone ``\\r``, and
``str.splitlines`` at U+0085, U+2028 and U+2029 too; one such character inside a sentence would shift every
later pair by one line.
"""

import gzip
import hashlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BufferedIOBase
from pathlib import Path
from typing import Literal

from transformer_jax.errors import AbsentError, UserError

TokenIds = list[int]
LengthRule = Literal["drop", "cut"]

# What becomes of bytes that are not UTF-8: "surrogateescape" keeps them, so that they can be written back as
# they came (translation); "replace" puts U+FFFD in their place (training text).
DecodeErrors = Literal["surrogateescape", "replace"]

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_GZIP_MAGIC = b"\x1f\x8b"


# --- lines --------------------------------------------------------------------------------------------------


def iterate_lines(stream: Iterable[bytes], errors: DecodeErrors = "surrogateescape") -> Iterator[str]:
    """Yields the lines of a binary stream (`sys.stdin.buffer`, say) as they arrive, without their line ends.

    One ``\\r`` before the ``\\n`` is dropped, and so is a byte-order mark at the start of the stream. A last
    line without ``\\n`` counts; the end of the stream right after a ``\\n`` is not one more line.
    """
    at_start = True
    for raw in stream:  # binary streams split at \n only
        if at_start:
            at_start = False
            raw = raw.removeprefix(_BYTE_ORDER_MARK)
            if not raw:  # the stream holds a byte-order mark and nothing else
                continue
        if raw.endswith(b"\n"):
            raw = raw[:-1].removesuffix(b"\r")
        yield raw.decode("utf-8", errors)


@contextmanager
def _opened(path: Path) -> Iterator[BufferedIOBase]:
    """The content of a file, unpacked where it is gzip, whatever the file is called."""
    try:
        with path.open("rb") as file:
            compressed = file.peek(len(_GZIP_MAGIC)).startswith(_GZIP_MAGIC)  # peek: a pipe cannot go back
            yield gzip.GzipFile(fileobj=file) if compressed else file
    except FileNotFoundError as error:
        raise AbsentError(f"There is no file {path}: check the name and the folder.") from error
    except IsADirectoryError as error:
        raise UserError(f"{path} is a folder: name a text file in it.") from error
    except PermissionError as error:
        raise UserError(f"{path} may not be read: check its permissions.") from error
    except NotADirectoryError as error:
        raise UserError(f"There is no file {path}: a part of its folder's name is a file.") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{path} is a damaged gzip file ({error}): copy or download it again.") from error


def iterate_file(path: Path, errors: DecodeErrors = "surrogateescape") -> Iterator[str]:
    """Yields the lines of a plain or gzipped text file, by the line rules of `iterate_lines`."""
    with _opened(path) as stream:
        yield from iterate_lines(stream, errors)


def scan_file(path: Path) -> tuple[int, str]:
    """The number of lines that `iterate_file` gives, and a digest (sha256) of the unpacked content. Reads the file
    once, in pieces: hundreds of megabytes a second."""
    digest, n_lines, n_bytes, last = hashlib.sha256(), 0, 0, b""
    with _opened(path) as stream:
        while piece := stream.read(1 << 20):
            digest.update(piece)
            n_lines += piece.count(b"\n")
            n_bytes += len(piece)
            last = piece
    only_a_mark = n_bytes == len(_BYTE_ORDER_MARK) and last == _BYTE_ORDER_MARK
    has_open_line = n_bytes > 0 and not last.endswith(b"\n") and not only_a_mark
    return n_lines + has_open_line, digest.hexdigest()


def read_lines(path: Path, errors: DecodeErrors = "surrogateescape") -> list[str]:
    """Returns all lines of a plain or gzipped text file, by the line rules of `iterate_lines`."""
    return list(iterate_file(path, errors))


# --- pairs --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ParallelText:
    """Sentence pairs: line i of `target` translates line i of `source`.

    `removed` counts the pairs that were left out, by the name of the rule that removed them.
    """

    source: list[str]
    target: list[str]
    removed: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.source) != len(self.target):
            raise UserError(
                f"The source has {len(self.source)} lines and the target {len(self.target)}: "
                "parallel text needs as many lines on both sides."
            )

    def __len__(self) -> int:
        return len(self.source)


def read_parallel(source: Path | Sequence[Path], target: Path | Sequence[Path]) -> ParallelText:
    """Reads one or several pairs of files as training text; a pair with a blank side is dropped as a pair.

    Each pair of files is checked on its own: two wrong line counts must not add up to a right one.
    """
    source_paths, target_paths = _as_paths(source), _as_paths(target)
    if len(source_paths) != len(target_paths):
        raise UserError(
            f"There are {len(source_paths)} source files and {len(target_paths)} target files: "
            "name them in pairs, in the same order."
        )
    if not source_paths:
        raise UserError("No file is named: name at least one source file and one target file.")
    kept_source: list[str] = []
    kept_target: list[str] = []
    blank = 0
    for source_path, target_path in zip(source_paths, target_paths, strict=True):
        for source_line, target_line in read_file_pair(source_path, target_path):
            if source_line.strip() and target_line.strip():
                kept_source.append(source_line)
                kept_target.append(target_line)
            else:
                blank += 1
    if not kept_source:
        raise UserError(
            f"No pair of lines in {_names(source_paths)} and {_names(target_paths)} has text on both sides: "
            "check that these are the right files."
        )
    return ParallelText(kept_source, kept_target, removed={"blank": blank})


def read_file_pair(source_path: Path, target_path: Path) -> Iterator[tuple[str, str]]:
    """The lines of two files side by side, blank ones included, after both were read whole and counted."""
    source_lines = read_lines(source_path, errors="replace")
    target_lines = read_lines(target_path, errors="replace")
    check_line_counts(source_path, len(source_lines), target_path, len(target_lines))
    return zip(source_lines, target_lines, strict=True)


def check_line_counts(source_path: Path, n_source: int, target_path: Path, n_target: int) -> None:
    """Two files are parallel text only if both have lines, and as many."""
    for path, n_lines in ((source_path, n_source), (target_path, n_target)):
        if not n_lines:
            raise UserError(f"{path} is empty: name a file with one sentence per line.")
    if n_source != n_target:
        raise UserError(
            f"{source_path} has {n_source} lines and {target_path} has {n_target}: "
            "line i of one must translate line i of the other, so the counts must be equal."
        )


def _as_paths(paths: Path | Sequence[Path]) -> list[Path]:
    return [Path(paths)] if isinstance(paths, (str, Path)) else [Path(path) for path in paths]


def _names(paths: Sequence[Path]) -> str:
    return ", ".join(str(path) for path in paths)


def split_files(folder: Path, split: str, source_lang: str, target_lang: str) -> tuple[Path, Path]:
    """Finds the two files of a split, such as `train.en` and `train.de`, each plain or else with `.gz`."""
    if not folder.is_dir():
        raise AbsentError(f"There is no folder {folder}: name the folder that holds {split}.{source_lang}.")

    def find(language: str) -> Path:
        candidates = [folder / f"{split}.{language}", folder / f"{split}.{language}.gz"]
        for candidate in candidates:
            if candidate.is_file():
                return candidate
        raise AbsentError(
            f"{folder} holds neither {candidates[0].name} nor {candidates[1].name}: put one of them there."
        )

    return find(source_lang), find(target_lang)


# --- lengths ------------------------------------------------------------------------------------------------


def limit_length(
    source_ids: Sequence[TokenIds],
    target_ids: Sequence[TokenIds],
    max_source: int,
    max_target: int,
    rule: LengthRule,
) -> tuple[list[TokenIds], list[TokenIds], int]:
    """Applies a limit in tokens, the end token included, to encoded pairs.

    `drop` leaves out a pair with a side that is too long; `cut` shortens the side and keeps the end token as
    its last id, for a sentence without one would teach the model not to stop.

    Returns:
        The source ids, the target ids, and the number of pairs that were dropped or cut.
    """
    shorten: Callable[[TokenIds, int], TokenIds | None] = {"drop": _drop, "cut": _cut}[rule]
    if min(max_source, max_target) < 1:
        raise UserError(f"The length limits are {max_source} and {max_target} tokens: both must be 1 or more.")
    kept_source: list[TokenIds] = []
    kept_target: list[TokenIds] = []
    affected = 0
    for source, target in zip(source_ids, target_ids, strict=True):
        affected += len(source) > max_source or len(target) > max_target
        short_source = shorten(source, max_source)
        short_target = shorten(target, max_target)
        if short_source is not None and short_target is not None:
            kept_source.append(short_source)
            kept_target.append(short_target)
    return kept_source, kept_target, affected


def _drop(ids: TokenIds, limit: int) -> TokenIds | None:
    return ids if len(ids) <= limit else None


def _cut(ids: TokenIds, limit: int) -> TokenIds:
    return ids if len(ids) <= limit else ids[: limit - 1] + ids[-1:]
