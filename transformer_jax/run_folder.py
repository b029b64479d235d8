"""The run folder: everything that a run leaves behind, readable without this package.

config.json     what was asked for            metrics.jsonl   one record a line, all numbers of the run
tokenizer/      the vocabulary                events.*        the same for TensorBoard
checkpoints/    training state (orbax)        curves.png      loss, accuracy, rate, score over the steps
model/          the best model, for use       samples.md      the same sentences after each evaluation
tokens/         the training text in tokens   data_report.json   what it is, and what was left out of it
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any, BinaryIO

from transformer_jax.config import RunConfig, to_json
from transformer_jax.errors import UserError
from transformer_jax.files import read_json, write_whole
from transformer_jax.loss import lowest_loss
from transformer_jax.plots import RunCurves, draw_curves, is_number
from transformer_jax.samples_page import samples_page
from transformer_jax.sharding import is_main_process

log = logging.getLogger("transformer_jax")
Record = dict[str, Any]
METRIC_NAMES = {"bleu": "BLEU", "exact": "exact match"}


class RunFolder:
    """Paths and records of one run. Only the main process writes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checkpoints = folder / "checkpoints"
        self.tokenizer = folder / "tokenizer"
        self.model = folder / "model"
        self.tokens = folder / "tokens"
        self.teacher = folder / "teacher"
        self.rewritten = folder / "rewritten"
        self.metrics = folder / "metrics.jsonl"
        self._events: Any = None

    @property
    def has_checkpoints(self) -> bool:
        """Whether there is a run to go on with."""
        return self.checkpoints.is_dir() and any(self.checkpoints.iterdir())

    def already_begun(self) -> UserError:
        """What a run that is to be a new one is told of this folder."""
        return UserError(
            f"{self.folder} already holds a run; go on with it (--resume auto), or name another folder with --output."
        )

    def check_exists(self) -> None:
        """That there is a folder of this name to read from."""
        if not self.folder.is_dir():
            if self.folder.exists():
                raise UserError(f"{self.folder} is a file; name the folder of a run.")
            raise UserError(f"There is no folder {self.folder}; name the folder of a run.")

    def create(self) -> None:
        if self.folder.exists() and not self.folder.is_dir():
            raise UserError(f"{self.folder} is a file; name a folder for the run.")
        if is_main_process():
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                (self.folder / ".writable").touch()
                (self.folder / ".writable").unlink()
            except OSError as error:
                raise UserError(f"The run folder {self.folder} cannot be written ({error.strerror}).") from error

    def read_config(self, without: str) -> Record:
        """What config.json says of an earlier start: nothing where there is none, or none that can be read; of that a
        warning tells, with what comes of it (`without`, a sentence)."""
        path = self.folder / "config.json"
        if not path.exists():
            return {}
        try:
            return read_json(path)
        except OSError as error:
            reason = f"{path} cannot be read ({error.strerror})."
        except UserError as error:
            reason = str(error)
        log.warning("%s %s", reason, without)
        return {}

    def write_config(self, config: RunConfig) -> None:
        if is_main_process():
            write_whole(self.folder / "config.json", json.dumps(to_json(config), indent=2) + "\n")

    def write_data_report(self, report: Record) -> None:
        if is_main_process():
            write_whole(self.folder / "data_report.json", json.dumps(report, ensure_ascii=False, indent=2) + "\n")

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Appends a record to metrics.jsonl and its numbers to the TensorBoard events."""
        if not is_main_process():
            return
        with self.metrics.open("a+b") as file:
            line = json.dumps({"kind": kind, "step": step, **values}, ensure_ascii=False) + "\n"
            file.write((b"" if self._ends_with_a_line(file) else b"\n") + line.encode("utf-8", "replace"))
        if self._events is None:
            self._events = _summary_writer()(str(self.folder), purge_step=step)
        for name, value in values.items():
            if isinstance(value, int | float):
                self._events.add_scalar(f"{kind}/{name}", value, step)

    def records(self, kind: str | None = None) -> list[Record]:
        if not self.metrics.is_file():
            return []
        records = []
        for line in self.metrics.read_bytes().split(b"\n"):
            # A run that is killed may leave its last line half-written, even in the middle of a letter.
            with contextlib.suppress(ValueError, RecursionError):
                records.append(json.loads(line))
        return [r for r in records if _is_record(r) and kind in (None, r["kind"])]

    @staticmethod
    def _ends_with_a_line(file: BinaryIO) -> bool:
        if file.seek(0, os.SEEK_END) == 0:
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"

    def forget_after(self, step: int) -> None:
        """Drops records beyond the step that a run goes on from: they are about to be made again."""
        if is_main_process() and self.metrics.is_file():
            kept = [json.dumps(r, ensure_ascii=False) + "\n" for r in self.records() if r["step"] <= step]
            write_whole(self.metrics, "".join(kept).encode("utf-8", "replace"))

    def curves(self, name: str = "") -> RunCurves:
        """What there is to draw of the run."""
        config = self.read_config("Its curves are drawn without the floor of the loss and the name of the score.")
        return RunCurves(name or self.folder.name, self.records(), _lowest_loss(config), _score_name(config))

    def draw(self) -> None:
        """Writes samples.md and curves.png anew from the records."""
        if not is_main_process():
            return
        page = samples_page(self.records("validation"))
        write_whole(self.folder / "samples.md", page.encode("utf-8", "replace"))
        draw_curves(self.folder / "curves.png", [self.curves()])

    def close(self) -> None:
        if self._events is not None:
            self._events.close()
            self._events = None


def _summary_writer() -> Any:
    """tensorboardX's writer, imported when it is first needed: that takes longer than all the rest.

    It imports PyTorch where it is installed, seconds for the name of a type; it does without where it is not.
    """
    hide = "torch" not in sys.modules
    if hide:
        sys.modules["torch"] = None  # type: ignore[assignment]  # an import of it now says that it is not there
    try:
        from tensorboardX import SummaryWriter
    finally:
        if hide:
            del sys.modules["torch"]
    return SummaryWriter


def _is_record(value: Any) -> bool:
    """Whether a line of metrics.jsonl is one of a run's; its other fields are looked at where they are used."""
    return (
        isinstance(value, dict) and "kind" in value and isinstance(value.get("step"), int) and is_number(value["step"])
    )


def _lowest_loss(config: Record) -> float | None:
    """The floor of the loss that a config.json asks for; None where it does not say, as one of another program."""
    try:
        vocab_size, train = config["model"]["vocab_size"], config["train"]
        if vocab_size <= 0:
            return None
        lowest = lowest_loss(vocab_size, train["label_smoothing"], train.get("smoothing", "all"))
    except (KeyError, TypeError, AttributeError, ArithmeticError):
        return None
    return lowest if is_number(lowest) else None


def _score_name(config: Record) -> str:
    try:
        return METRIC_NAMES[config["decode"]["metric"]]
    except (KeyError, TypeError):
        return ""
