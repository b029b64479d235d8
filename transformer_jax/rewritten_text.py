"""A training text of which a teacher wrote one side anew, as files: two for each corpus and side, line n of the one
the translation of line n of the other, and what text they were made from."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from transformer_jax.config import DataConfig, RunConfig
from transformer_jax.errors import UserError
from transformer_jax.files import read_json, write_whole, writing
from transformer_jax.pair_sources import Pair, PairSource, WeightedSource, open_files, times
from transformer_jax.training_text import TrainingText

Side = Literal["target", "source"]
MADE_FROM = "made_from.json"
"""The name of the file that tells which text was written anew, and how many lines each file has."""


def new_sides(data: DataConfig) -> tuple[Side, ...]:
    """What a teacher writes: targets, and sources too where it has learnt to translate back."""
    return ("target", "source") if data.reversed_weight else ("target",)


def pair_paths(folder: Path, corpus: int, side: Side) -> tuple[Path, Path]:
    """The two files of a corpus, counted from 0, with this side written anew."""
    stem = f"{corpus + 1}.new_{side}"
    return folder / f"{stem}.source.txt", folder / f"{stem}.target.txt"


@dataclass(frozen=True)
class RewrittenText:
    """What a teacher wrote for a run, in a folder."""

    folder: Path
    weight: float
    """How often it is seen beside a weight of 1 for the text as it is."""
    sides: tuple[Side, ...]

    @classmethod
    def of(cls, config: RunConfig, folder: Path) -> RewrittenText | None:
        """That of a run which has a teacher."""
        return cls(folder, config.teacher.weight, new_sides(config.data)) if config.teacher.weight else None

    def sources_for(self, text: TrainingText) -> list[WeightedSource]:
        """The corpora that come to those of a text: new targets of all of them, then new sources.

        Raises:
            UserError: they are not there, or were made from another text.
        """
        if not self.folder.is_dir():
            raise UserError(f"There is no text of a teacher in {self.folder}; start the run with train.py.")
        files = read_note(self.folder, text).get("files", {})
        found = []
        for side, (number, corpus) in itertools.product(self.sides, enumerate(text.sources)):
            paths = pair_paths(self.folder, number, side)
            if corpus.exchanged or files.get(paths[0].name) == 0:  # 0: the rules or the limit leave nothing of it
                continue
            weight = times(corpus.weight, self.weight)
            found.append(WeightedSource(self._open_whole(paths, files), weight, corpus.tag, rewritten=side))
        return found

    def _open_whole(self, paths: tuple[Path, Path], files: Mapping[str, Any]) -> PairSource:
        """A pair of files, which must have the lines that the teacher wrote."""
        name = paths[0].name
        if name not in files:
            raise UserError(f"The teacher wrote no {name}: data.reversed_weight was 0; {_again(self.folder)}")
        changed = f"{paths[0]} or {paths[1].name} is not as the teacher wrote it; {_again(self.folder)}"
        try:
            pairs = open_files(*paths)
        except (OSError, UserError) as error:
            raise UserError(changed) from error
        if len(pairs) != files[name]:
            raise UserError(changed)
        return pairs


def _again(folder: Path) -> str:
    return f"delete {folder} and start again: the teacher then writes it anew."


def write_note(folder: Path, text: TrainingText, **what: Any) -> None:
    """Writes down which text is written anew in this folder, and what else there is to know of it."""
    write_whole(folder / MADE_FROM, json.dumps({"text": _digest(text), **what}) + "\n")


def read_note(folder: Path, text: TrainingText) -> dict[str, Any]:
    """What was written down of this folder.

    Raises:
        UserError: it was made from another text than this, or does not say from which.
    """
    try:
        note = read_json(folder / MADE_FROM)
    except (OSError, UserError) as error:
        raise UserError(f"{folder / MADE_FROM} cannot be read; {_again(folder)}") from error
    if note.get("text") != _digest(text):
        raise UserError(
            f"{folder} was written from another training text, or by other rules of cleaning or another data.limit; go "
            f"on with those that the run was started with, or {_again(folder)}"
        )
    return note


def _digest(text: TrainingText) -> str:
    """Of the pairs that are written anew; how they are weighted does not change what is made of them, nor do held-out
    texts that nothing is left out for."""
    corpora = [[source.pairs.digest, source.tag] for source in text.sources if not source.exchanged]
    made_from = {**text.made_from(), "corpora": corpora}
    if text.rules.held_out == "keep":
        del made_from["held_out"]
    return hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()


class GrowingPairs:
    """Two files of lines that grow together; what an earlier start wrote into them is found again."""

    def __init__(self, paths: tuple[Path, Path]) -> None:
        self.paths = paths
        self.n_lines = min(sum(1 for _ in _whole_lines(path)) for path in paths)
        self._whole = False  # until the first are added: half a line may stand at the end

    def add(self, first: int, pairs: Sequence[Pair]) -> None:
        """Puts a line for each side of each pair after the first so many lines, in place of what is there."""
        if first != self.n_lines or not self._whole:
            self._cut(first)
        for path, lines in zip(self.paths, zip(*pairs, strict=True), strict=True):
            with writing(path), path.open("ab") as file:
                # A line break inside a line would be a line too many.
                file.write("".join(line.replace("\n", " ") + "\n" for line in lines).encode("utf-8", "replace"))
        self.n_lines, self._whole = first + len(pairs), True

    def _cut(self, n_lines: int) -> None:
        for path in self.paths:
            size = sum(len(line) for line in itertools.islice(_whole_lines(path), n_lines))
            with writing(path), path.open("ab") as file:
                file.truncate(size)


def _whole_lines(path: Path) -> Iterator[bytes]:
    """Those that end: a program that is killed may leave half a line."""
    if path.is_file():
        with path.open("rb") as file:
            yield from (line for line in file if line.endswith(b"\n"))
