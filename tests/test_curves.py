"""Curves: what is drawn is what a run has recorded, alone or over others; `transformer-jax plot`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from transformer_jax import cli
from transformer_jax.cli_watch import run_names
from transformer_jax.errors import UserError
from transformer_jax.plots import RunCurves, curves_figure, epochs_per_step
from transformer_jax.run_folder import RunFolder

Record = dict[str, Any]

TRAIN: list[Record] = [
    {"kind": "train", "step": 10, "loss": 3.0, "accuracy": 0.25, "rate": 1e-4, "epoch": 2.5},
    {"kind": "train", "step": 20, "loss": 2.0, "accuracy": 0.5, "rate": 2e-4, "epoch": 5.0},
]
VALIDATION: list[Record] = [{"kind": "validation", "step": 20, "loss": 1.5, "accuracy": 0.75, "score": 31.5}]
CONFIG = {
    # Half of the probability spread over both of two words leaves 3/4 and 1/4 for them.
    "model": {"vocab_size": 2},
    "train": {"label_smoothing": 0.5, "smoothing": "all"},
    "decode": {"metric": "bleu"},
}
FLOOR = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))


def curves(axis: Any) -> list[list[list[float]]]:
    """The points of each curve in a panel, without those of horizontal lines across it."""
    return [np.asarray(line.get_xydata()).tolist() for line in axis.lines if line.get_linestyle() != ":"]


def labels(legend: Any) -> list[str]:
    return [text.get_text() for text in legend.get_texts()]


def write_run(folder: Path, records: list[Record], config: Record | None = None) -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def plot(*arguments: object) -> int:
    return cli.run_command(lambda: cli._dispatch(["plot", *map(str, arguments)]))


# --- the picture --------------------------------------------------------------------------------------------


def test_a_runs_numbers_are_drawn_over_its_steps() -> None:
    figure = curves_figure([RunCurves("one", [*TRAIN, *VALIDATION], 0.5, "BLEU")])
    loss, accuracy, rate, score = figure.axes
    assert curves(loss) == [[[10, 3.0], [20, 2.0]], [[20, 1.5]]]
    assert curves(accuracy) == [[[10, 0.25], [20, 0.5]], [[20, 0.75]]]
    assert curves(rate) == [[[10, 1e-4], [20, 2e-4]]]
    assert curves(score) == [[[20, 31.5]]]
    assert labels(loss.get_legend()) == ["training", "validation", "lowest possible, 0.500"]
    (floor,) = [line for line in loss.lines if line.get_linestyle() == ":"]
    assert set(floor.get_ydata()) == {0.5}
    assert score.get_title().endswith("BLEU")
    training, validation = (line.get_color() for line in loss.lines[:2])
    assert training != validation


def test_several_runs_have_a_colour_each_and_each_floor_one_line() -> None:
    runs = [RunCurves(name, [*TRAIN, *VALIDATION], floor) for name, floor in zip("abc", (0.5, 0.7, 0.5), strict=True)]
    figure = curves_figure(runs)
    loss = figure.axes[0]
    drawn = [line for line in loss.lines if line.get_linestyle() != ":"]
    assert len({line.get_color() for line in drawn}) == 3
    for training, validation in zip(drawn[::2], drawn[1::2], strict=True):
        assert training.get_color() == validation.get_color()
        assert (training.get_marker(), validation.get_marker()) == ("None", "o")
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b", "c"]
    floors = [line.get_label() for line in loss.lines if line.get_linestyle() == ":"]
    assert floors == ["lowest possible, 0.500 (a, c)", "lowest possible, 0.700 (b)"]


def test_ten_runs_can_be_told_apart() -> None:
    figure = curves_figure([RunCurves(str(n), TRAIN) for n in range(10)])
    assert len({(line.get_color(), line.get_linestyle()) for line in figure.axes[0].lines}) == 10


def test_epochs_follow_from_what_the_records_say() -> None:
    """A step reads a quarter of an epoch, so step 20, of which validation tells, ends the fifth."""
    figure = curves_figure([RunCurves("one", [*TRAIN, *VALIDATION])], "epoch")
    assert curves(figure.axes[0]) == [[[2.5, 3.0], [5.0, 2.0]], [[5.0, 1.5]]]
    assert figure.axes[0].get_xlabel() == "epoch"
    assert epochs_per_step(VALIDATION) is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "2.5", True, [1]])
def test_what_is_no_number_is_left_out(value: Any) -> None:
    records = [*TRAIN, {"kind": "train", "step": 30, "loss": value}]
    assert curves(curves_figure([RunCurves("one", records)]).axes[0]) == [[[10, 3.0], [20, 2.0]]]


def test_the_floor_and_the_score_are_those_of_the_config(tmp_path: Path) -> None:
    run = RunFolder(write_run(tmp_path / "one", TRAIN, CONFIG))
    assert run.curves().lowest_loss == pytest.approx(FLOOR)
    assert run.curves().score_name == "BLEU"


@pytest.mark.parametrize("config", [None, {}, {"model": 3}, {"model": {"vocab_size": "2"}, "train": {}, "decode": []}])
def test_a_run_of_another_program_has_curves_without_a_floor(tmp_path: Path, config: Record | None) -> None:
    found = RunFolder(write_run(tmp_path / "one", TRAIN, config)).curves()
    assert (found.lowest_loss, found.score_name, found.records) == (None, "", TRAIN)


# --- the command --------------------------------------------------------------------------------------------


def test_plot_draws_runs_of_the_same_name_and_tells_where_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = write_run(tmp_path / "a" / "dates", [*TRAIN, *VALIDATION], CONFIG)
    second = write_run(tmp_path / "b" / "dates", TRAIN)
    assert plot(first, second, "--output", tmp_path / "both.png", "--x", "epoch") == 0
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out == (
        f"a/dates  20 steps, best BLEU 31.5 at step 20\nb/dates  20 steps\nwritten  {tmp_path}/both.png\n"
    )


def test_names_are_as_short_as_they_can_be() -> None:
    assert run_names([Path("runs/x"), Path("runs/y")]) == ["x", "y"]
    assert run_names([Path("m/runs/x"), Path("n/runs/x"), Path("n/runs/y")]) == ["m/runs/x", "n/runs/x", "n/runs/y"]
    with pytest.raises(UserError, match="named twice"):
        run_names([Path("runs/x"), Path("runs/x/")])


def test_mistakes_are_told_in_a_sentence_and_write_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = write_run(tmp_path / "good", VALIDATION)
    (tmp_path / "empty").mkdir()
    write_run(tmp_path / "bare", [])
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "metrics.jsonl").write_bytes(b"\x00\xff\xfe{]")
    (tmp_path / "folder.png").mkdir()
    output = tmp_path / "out.png"
    for arguments, sentence in (
        ((tmp_path / "absent", "--output", output), "There is no folder"),
        ((good / "metrics.jsonl", "--output", output), "There is no folder"),
        ((tmp_path / "empty", "--output", output), "holds no metrics.jsonl"),
        ((tmp_path / "bare", "--output", output), "holds no record of a loss"),
        ((tmp_path / "broken", "--output", output), "holds no record of a loss"),
        ((good, "--output", output, "--x", "epoch"), "do not say how long an epoch is"),
        ((good, "--output", tmp_path / "out.pdf"), "end it in .png"),
        ((good, "--output", tmp_path / "folder.png"), "is a folder; name a file"),
        ((good, "--output", tmp_path / "no" / "out.png"), "There is no folder"),
    ):
        assert plot(*arguments) == 2, arguments
        error = capsys.readouterr().err
        assert sentence in error
        assert error.startswith("error: ")
        assert error.count("\n") == 1
    assert not output.exists()
