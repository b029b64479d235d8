"""Small files: read with an error that names them, written so that they are never seen half-written."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from transformer_jax.errors import UserError

PART = ".part"
"""How the names of unfinished files and folders end."""


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON ({error}): copy or download it again.") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds a {type(content).__name__}, not an object: it is not a file of this format.")
    return content


class WriteError(UserError):
    """A file or a folder cannot be written."""

    def __init__(self, path: Path, reason: object) -> None:
        super().__init__(f"{path} cannot be written ({reason}).")
        self.reason = reason


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """What goes wrong inside is told of `path`: the name that the user knows, not that of a temporary file."""
    try:
        yield
    except BrokenPipeError:  # whoever reads has gone, which is no mistake
        raise
    except WriteError as error:
        raise WriteError(path, error.reason) from error
    except OSError as error:
        raise WriteError(path, error.strerror or error) from error


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes a file so that it is never seen half-written; where that fails, it stays as it was."""
    with whole_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file that takes its name when it is complete; what is written fails with an error that names it.

    What a link points to is written, not the link; a pipe, a device or an open file is written to, never replaced.
    """
    with writing(path):
        place, part = _places(path)
        opened = _open_as_it_is(place) if part is None else _open_new(part, place)
        file = io.BufferedWriter(_Named(path, opened))
    try:
        yield file
        with writing(path):
            file.close()
            if part is not None:
                part.replace(place)
    finally:
        with contextlib.suppress(OSError, UserError):  # what could not be written has been told of
            file.close()
        if part is not None:
            part.unlink(missing_ok=True)


def check_writable(path: Path) -> None:
    """That a file can be written, so that a mistake is told before the work: what is there stays as it is."""
    with writing(path):
        if path.is_dir():
            raise UserError(f"{path} is a folder; name a file.")
        if not path.parent.is_dir():
            if path.parent.exists():
                raise UserError(f"{path.parent} is a file, so that {path.name} cannot be in it; name a folder.")
            raise UserError(f"There is no folder {path.parent} to write {path.name} in; make it, or name another.")
        place, part = _places(path)
        if part is not None:
            if place.exists():
                place.open("ab").close()  # one that is protected could be replaced, but is not meant to be
            os.close(_open_new(part, place))
            part.unlink()


class _Named(io.FileIO):
    """An open file whose errors name the path that the user knows."""

    def __init__(self, path: Path, opened: int) -> None:
        super().__init__(opened, "wb")
        self.path = path

    def write(self, data: Any, /) -> Any:
        with writing(self.path):
            return super().write(data)


def unfinished(place: Path) -> Path:
    """A new name beside a file or folder, for as long as it is being written: whoever else writes there has another."""
    return place.with_name(f".{place.name}.{secrets.token_hex(4)}{PART}")


def _places(path: Path) -> tuple[Path, Path | None]:
    """Where a file stands, and where it is written first, a name of its own; None where it is written to as it is."""
    place = Path(os.path.realpath(path))  # of links that lead in a circle, too
    if any(map(_is_opened, (path, place))):
        return path, None
    if place.exists() and not place.is_file():
        return place, None
    return place, unfinished(place)


def _is_opened(path: Path) -> bool:
    """Whether the name is one of something that is open, such as /dev/stdout; /dev/shm is a folder like others."""
    return str(path).startswith(("/dev/", "/proc/")) and not str(path).startswith("/dev/shm/")


def _open_new(part: Path, place: Path) -> int:
    """A new file, with the permissions of the one whose place it will take."""
    opened = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    if place.exists():
        with contextlib.suppress(OSError):
            os.fchmod(opened, stat.S_IMODE(place.stat().st_mode))
    return opened


def _open_as_it_is(path: Path) -> int:
    """A device or pipe, or what this process has open already, from where it stands: nothing is cut off."""
    name = {"/dev/stdout": "/dev/fd/1", "/dev/stderr": "/dev/fd/2"}.get(str(path), str(path))
    if found := re.fullmatch(r"(?:/dev|/proc/self)/fd/(\d+)", name):
        return os.dup(int(found[1]))
    return os.open(path, os.O_WRONLY)
