"""A run with a teacher: it is trained first and writes the training text anew both ways; the run learns from all of it.

Data diversification (Nguyen et al., arXiv 1911.01986) with one teacher of both directions; no other text is used.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from transformer_jax.config import DecodeConfig, RunConfig, TeacherConfig, replace
from transformer_jax.corpus import scan_file
from transformer_jax.errors import UserError
from transformer_jax.files import PART, writing
from transformer_jax.line_files import CHUNK, fixed_chunks
from transformer_jax.long_lines import split_tag
from transformer_jax.pair_sources import Pair, WeightedSource, total_lines
from transformer_jax.progress import Progress
from transformer_jax.reranking import Backward, language_tags, tagged_line
from transformer_jax.rewritten_text import (
    MADE_FROM,
    GrowingPairs,
    Side,
    new_sides,
    pair_paths,
    read_note,
    write_note,
)
from transformer_jax.run_data import read_texts
from transformer_jax.run_folder import RunFolder
from transformer_jax.sharding import data_mesh, is_main_process, wait_for_main
from transformer_jax.signals import catch_signals
from transformer_jax.token_blocks import tag_is_known
from transformer_jax.token_cache import folder_digest
from transformer_jax.trainer import Outcome, Resume, Trainer
from transformer_jax.training_text import TrainingText
from transformer_jax.translator import Translator

_NOT_OF_THE_TEXT = ("metric", "limit", "n_best", "batch_tokens")
"""Settings of a search that may change while the text is being written."""


def train_run(config: RunConfig, folder: Path, resume: Resume = "auto") -> Outcome:
    """Trains a run, after its teacher where it has one; goes on where an earlier start ended, in whichever part."""
    if config.teacher.weight:
        run = RunFolder(folder)
        _check_start(run, resume)
        if not run.rewritten.is_dir():
            outcome = Trainer(teacher_run(config), run.teacher, resume).train()
            if outcome.caught and not outcome.stopped_by and is_main_process():
                # Too late to end the teacher's run, it is still to end this program.
                Progress.say(f"{outcome.caught}: the teacher is trained; the same command goes on from there.")
            stopped_by = outcome.caught or rewrite_text(config, run)
            if stopped_by:
                return dataclasses.replace(outcome, stopped_by=stopped_by)
    return Trainer(config, folder, resume).train()


def _check_start(run: RunFolder, resume: Resume) -> None:
    """What would otherwise be told only when the teacher has done its work."""
    teacher = RunFolder(run.teacher)
    begun = teacher.has_checkpoints or run.rewritten.exists() or _part(run).exists()
    if resume == "never" and (begun or run.has_checkpoints):
        raise run.already_begun()
    if run.has_checkpoints and not begun:
        raise UserError(
            f"{run.folder} holds a run that was started without a teacher; go on with it by --teacher.weight 0, or "
            "name another folder with --output."
        )


def _part(run: RunFolder) -> Path:
    """Where the text is while it is being written."""
    return run.rewritten.with_name(f".{run.rewritten.name}{PART}")


def teacher_run(config: RunConfig) -> RunConfig:
    """The run that makes the teacher: the same one on the text as it is. The test text is left for the run itself."""
    teacher = config.teacher
    changes = {"name": f"{config.name}_teacher", "teacher": TeacherConfig(), "train.skip_test": True}
    if teacher.epochs is not None:
        changes["train.epochs"] = teacher.epochs
    if teacher.dropout is not None:
        changes["model.dropout"] = teacher.dropout
    return replace(config, **changes)


def rewrite_text(config: RunConfig, run: RunFolder) -> str | None:
    """Lets the teacher write each side of the training text anew, into the run's folder `rewritten`. Returns the signal
    that ended it early; what was written until then is kept, and the next start goes on from there."""
    say = Progress.say if is_main_process() else lambda _: None
    text = read_texts(config.data).train
    sides, part = new_sides(config.data), _part(run)
    if is_main_process():
        _begin(part, text, config, run)
    wait_for_main((part / MADE_FROM).is_file, "start of the rewritten text")
    teacher = _Teacher(config, run.teacher)
    n_pairs = total_lines([source for source in text.sources if not source.exchanged])
    n_pairs = min(n_pairs, text.limit or n_pairs)
    what = " and ".join(f"{side}s" for side in sides)
    say(f"teacher    writes {what} of {n_pairs:,} pairs anew: {part}")
    began = told = time.monotonic()
    lines = 0
    with catch_signals() as caught:
        for side in sides:
            for lines in _rewrite_side(text, side, teacher, part, caught):
                if time.monotonic() - told >= Progress.LINE_EVERY_SECONDS:
                    told = time.monotonic()
                    say(f"teacher    {lines:,} of {n_pairs:,} new {side}s")
            if caught:
                say(f"{caught[0]}: {lines:,} new {side}s are kept; the same command goes on from there.")
                return caught[0]
    if is_main_process():
        files = {path.name: scan_file(path)[0] for path in part.glob("*.txt")}
        write_note(part, text, by=_written_by(config, run), files=files)
        with writing(run.rewritten):
            part.rename(run.rewritten)
    wait_for_main(run.rewritten.is_dir, "rewritten text")
    say(f"teacher    {lines:,} new {what} in {time.monotonic() - began:,.0f} s: {run.rewritten}")
    return None


def _begin(part: Path, text: TrainingText, config: RunConfig, run: RunFolder) -> None:
    """The folder, with what it is made from and by, and a file for each side of each corpus, however few pairs it has;
    or the one that an earlier start left, where it is of the same text and teacher."""
    if (part / MADE_FROM).is_file():
        if read_note(part, text).get("by") != _written_by(config, run):
            raise UserError(
                f"{part} was begun by another teacher, or with other options of decode; go on with those, or delete it "
                "and start again: the text is then written anew."
            )
        return
    with writing(part):
        part.mkdir(exist_ok=True)
        for number, source in enumerate(text.sources):
            for side in new_sides(config.data) if not source.exchanged else ():
                for path in pair_paths(part, number, side):
                    path.touch()
    write_note(part, text, by=_written_by(config, run))


def _written_by(config: RunConfig, run: RunFolder) -> list[Any]:
    """All that new lines follow from beside their text, as plain values."""
    search = dataclasses.asdict(config.decode)
    kept = {name: value for name, value in search.items() if name not in _NOT_OF_THE_TEXT}
    return [kept, list(new_sides(config.data)), folder_digest(run.teacher / "model")]


def _rewrite_side(
    text: TrainingText, side: Side, teacher: _Teacher, folder: Path, caught: Sequence[str]
) -> Iterator[int]:
    """Adds what is missing, a chunk of lines at a time, until there is a signal; yields how many lines there are. The
    chunks are the same ones however often it is stopped, and so are the translations."""
    before = 0
    for number, pairs in itertools.groupby(text.kept(text.new_counts(), text.new_filter()), key=itemgetter(0)):
        growing, done = GrowingPairs(pair_paths(folder, number, side)), 0
        for chunk in fixed_chunks((pair for _, pair in pairs), CHUNK):
            if growing.n_lines < done + len(chunk):
                if caught:
                    break
                new = teacher.rewrite(chunk, side, text.sources[number], first_line=done + 1)
                if is_main_process():
                    growing.add(done, new)
            done += len(chunk)
            yield before + done
        before += done


class _Teacher:
    """The trained model of a teacher's run, and how it translates."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        self.back_tag = f">>{config.data.source_lang}<<"
        mesh = data_mesh(config.train.n_devices)
        self.translator = Translator.from_pretrained(
            folder, config.decode, mesh=mesh, backward=Backward(tag=self.back_tag)
        )
        self.tags = language_tags(self.translator.tokenizer)

    def rewrite(self, pairs: Sequence[Pair], side: Side, corpus: WeightedSource, first_line: int) -> list[Pair]:
        """Pairs with this side written anew, blank where the vocabulary does not know the tag of the source."""
        asked = [corpus.tagged(x) if side == "target" else tagged_line(self.back_tag, y) for x, y in pairs]
        known = [tag_is_known(self.translator.tokenizer, corpus.tagged(x)) for x, _ in pairs]
        asked = [line if is_known else "" for line, is_known in zip(asked, known, strict=True)]
        search = search_changes(self.translator.config, side)
        found = [t.text for t in self.translator.translate(asked, first_line=first_line, **search)]
        if side == "target":
            return [(x, new) for (x, _), new in zip(pairs, found, strict=True)]
        # What a source says of its target's language stays.
        own_tags = [split_tag(x, self.tags)[0] for x, _ in pairs]
        return [
            (f"{tag} {new}" if tag and new else new, y) for (_, y), tag, new in zip(pairs, own_tags, found, strict=True)
        ]


def search_changes(search: DecodeConfig, side: Side) -> dict[str, Any]:
    """How the teacher translates: to targets as the run does; to sources by the beam alone, and then not with the
    length_penalty that a ranking is balanced by."""
    if side == "source" and search.rerank_weight:
        return {"n_best": 1, "rerank_weight": 0.0, "length_penalty": DecodeConfig.length_penalty}
    return {"n_best": 1}
