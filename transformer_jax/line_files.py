"""Lines in and out of commands: files, .gz, standard input as it comes, outputs that appear whole or not at all."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import BinaryIO, TypeVar

from transformer_jax.errors import UserError
from transformer_jax.files import whole_file

CHUNK = 2048
"""Lines that are sorted and translated together where input comes from a file."""
GRACE = 0.05
"""Seconds to wait for more lines of a pipe before those that are there are translated."""

READER = "reads standard input"
"""The name of the thread that may still wait for a line when the program has nothing more to do."""
Item = TypeVar("Item")
Arrived = queue.Queue[str | BaseException | None]
"""Lines, then None at their end or the error that ended them."""


def input_chunks(path: Path | None) -> Iterator[list[str]]:
    """Lines in chunks: of a file as many as are sorted together, of standard input those that are there."""
    from transformer_jax.corpus import iterate_file, iterate_lines

    if path is None:
        return available(iterate_lines(sys.stdin.buffer))
    return fixed_chunks(iterate_file(path), CHUNK)


def fixed_chunks(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """So many at a time, and what is left at the end."""
    items = iter(items)
    while chunk := list(islice(items, size)):
        yield chunk


def available(lines: Iterator[str]) -> Iterator[list[str]]:
    """Chunks of what has arrived: a program that writes a line and waits for its translation gets it."""
    arrived: Arrived = queue.Queue(maxsize=2 * CHUNK)

    def read() -> None:
        try:
            for line in lines:
                arrived.put(line)
            arrived.put(None)
        except BaseException as error:  # raised again where the lines are wanted
            arrived.put(error)

    threading.Thread(target=read, daemon=True, name=READER).start()
    ended = False
    while not ended:
        chunk, ended = _gather(arrived)
        if chunk:
            yield chunk


def _gather(arrived: Arrived) -> tuple[list[str], bool]:
    """Waits for a line and takes those that follow at once; and whether the input has ended."""
    chunk: list[str] = []
    while len(chunk) < CHUNK:
        try:
            item = arrived.get(timeout=GRACE if chunk else None)
        except queue.Empty:
            break
        if item is None:
            return chunk, True
        if isinstance(item, BaseException):
            if not chunk:
                raise item
            arrived.put(item)  # after the lines that came before it
            break
        chunk.append(item)
    return chunk, False


@contextlib.contextmanager
def output_file(path: Path | None) -> Iterator[BinaryIO]:
    """Standard output, or a file that takes its name when it is complete."""
    if path is None:
        if sys.stdout is None:
            raise UserError("Standard output is closed; name a file with --output.")
        yield sys.stdout.buffer
        return
    with whole_file(path) as file:
        yield file
