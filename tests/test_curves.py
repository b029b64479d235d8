"""Curves: what is drawn is what a run has recorded, alone or over others; `transformer-jax plot`."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_files import LONG

from transformer_jax import cli
from transformer_jax.cli_watch import run_names
from transformer_jax.errors import UserError
from transformer_jax.plots import MOST_RUNS, RunCurves, curves_figure, draw_curves, epochs_per_step, legible, widest
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
    assert set(np.asarray(floor.get_ydata())) == {0.5}
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


def test_floors_that_the_label_does_not_tell_apart_are_drawn_once() -> None:
    def drawn(*floors: float | None) -> list[tuple[float, str]]:
        runs = [RunCurves(name, TRAIN, floor) for name, floor in zip("abc", floors, strict=True)]
        lines: list[Any] = [line for line in curves_figure(runs).axes[0].lines if line.get_linestyle() == ":"]
        return [(line.get_ydata()[0], line.get_label()) for line in lines]

    assert drawn(0.5001, 0.5004, 0.4996) == [(0.5001, "lowest possible, 0.500")]
    assert drawn(0.5001, 0.5004, None) == [(0.5001, "lowest possible, 0.500 (a, b)")]
    assert drawn(0.5001, 0.5006, 0.4996) == [
        (0.5001, "lowest possible, 0.500 (a, c)"),
        (0.5006, "lowest possible, 0.501 (b)"),
    ]


def test_scores_of_different_metrics_have_a_panel_each() -> None:
    def scored(name: str, metric: str, score: float) -> RunCurves:
        return RunCurves(name, [*TRAIN, {"kind": "validation", "step": 20, "score": score}], score_name=metric)

    runs = [scored("a", "exact match", 0.5), scored("b", "BLEU", 30.0), scored("c", "exact match", 0.75)]
    figure = curves_figure(runs)
    assert [axis.get_title().split(": ")[-1] for axis in figure.axes[3:]] == ["BLEU", "exact match"]
    bleu, exact = figure.axes[3:]
    assert (curves(bleu), curves(exact)) == ([[[20, 30.0]]], [[[20, 0.5]], [[20, 0.75]]])
    # A run has its colour in all panels.
    assert bleu.lines[0].get_color() == figure.axes[1].lines[1].get_color()

    # What is not known is not taken for one of those that are; a run without a score needs no panel.
    figure = curves_figure([*runs[1:2], scored("d", "", 0.5), RunCurves("e", TRAIN, score_name="exact match")])
    assert [axis.get_title().split(": ")[-1] for axis in figure.axes[3:]] == ["metric unknown", "BLEU"]
    assert [curves(axis) for axis in figure.axes[3:]] == [[[[20, 0.5]]], [[[20, 30.0]]]]
    assert len(curves_figure([runs[0], runs[2]]).axes) == 4


def test_an_empty_panel_says_so() -> None:
    def said(records: list[Record]) -> list[list[str]]:
        axes = curves_figure([RunCurves("one", records, 0.5, "BLEU")]).axes
        return [[text.get_text() for text in axis.texts] for axis in axes]

    assert said([*TRAIN, *VALIDATION]) == [[], [], [], []]
    assert said(TRAIN) == [[], [], [], ["no score recorded"]]
    assert said([{"kind": "validation", "step": 20, "score": 1.0}]) == [
        ["no loss recorded"],
        ["no token accuracy recorded"],
        ["no learning rate recorded"],
        [],
    ]
    score = curves_figure([RunCurves("one", TRAIN, 0.5, "BLEU")]).axes[3]
    assert list(score.get_yticks()) == []
    assert score.get_title() == "score on the validation text: BLEU"


def test_runs_can_be_told_apart_and_too_many_are_refused() -> None:
    runs = [RunCurves(str(n), TRAIN) for n in range(MOST_RUNS + 1)]
    styles = {(line.get_color(), line.get_linestyle()) for line in curves_figure(runs[:-1]).axes[0].lines}
    assert len(styles) == MOST_RUNS == 21
    assert ":" not in {line for _, line in styles}  # which is a floor's
    with pytest.raises(UserError, match="22 runs are named; the curves of 21 can be told apart"):
        curves_figure(runs)


# --- names --------------------------------------------------------------------------------------------------

NAMES = ["a$b$c", "x$\\q$", "_x", "p\udcff", "\U00012000", "日本語", "a\nb"]


@pytest.mark.filterwarnings("ignore:Glyph")  # of a figure that is not drawn
def test_names_are_drawn_as_they_are(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Signs of TeX, bytes that are no text, characters that no font has: of these one line tells."""
    runs = [RunCurves(name, TRAIN, 0.5 + n, "$\\q$") for n, name in enumerate(NAMES)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw_curves(tmp_path / "out.png", runs)
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    (record,) = caplog.records
    assert record.getMessage() == "No font of this machine has some of the characters: boxes stand for them."

    figure = curves_figure(runs)
    of_loss: Any = figure.axes[0].get_legend()
    drawn = [*figure.legends[0].get_texts(), *of_loss.get_texts()[2:], figure.axes[3].title]
    shown = ["p\\xff" if name == "p\udcff" else name for name in NAMES]
    floors = [f"lowest possible, {n}.500 ({name})" for n, name in enumerate(shown)]
    title = "score on the validation text: $\\q$"
    assert [text.get_text() for text in drawn] == [*shown, *floors, title]
    assert not any(text.get_parse_math() for text in drawn)


def test_other_warnings_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformer_jax.plots.write_png", lambda *_: warnings.warn("a rainy day", stacklevel=1))
    with pytest.warns(UserWarning, match="a rainy day"):
        draw_curves(tmp_path / "out.png", [RunCurves("one", TRAIN)])


def test_lone_surrogates_are_legible() -> None:
    assert legible("ü\udcff\udc80") == "ü\\xff\\x80"
    assert legible("\ud800日") == "?日"


@pytest.mark.parametrize("length", [20, 45, 255])
def test_long_names_stay_inside_the_picture(length: int) -> None:
    runs = [RunCurves("W" * (length - 1) + str(n), TRAIN, 0.5 + n) for n in range(4)]
    figure = curves_figure(runs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a layout that has no room
        figure.draw_without_rendering()
    legend = figure.legends[0]
    box = legend.get_window_extent()
    assert 0 <= box.x0 < box.x1 <= figure.bbox.width
    assert [text.get_text().replace("\n", "") for text in legend.get_texts()] == [run.name for run in runs]


def test_the_widest_text_is_measured() -> None:
    """A monospaced sign would be as wide as another; in points of 1/72 inch a W of this font is 0.99 of its size."""
    assert widest(["iiii", "WWWW"], 72, 100) == pytest.approx(4 * 0.99, abs=0.1)
    assert widest([], 72, 100) == 0


def test_epochs_follow_from_what_the_records_say() -> None:
    """A step reads a quarter of an epoch, so step 20, of which validation tells, ends the fifth."""
    figure = curves_figure([RunCurves("one", [*TRAIN, *VALIDATION])], "epoch")
    assert curves(figure.axes[0]) == [[[2.5, 3.0], [5.0, 2.0]], [[5.0, 1.5]]]
    assert figure.axes[0].get_xlabel() == "epoch"
    assert epochs_per_step(VALIDATION) is None


NO_NUMBERS = [float("nan"), float("inf"), None, "2.5", True, [1], 10**400, -(10**400), 1e308, -1e308]


@pytest.mark.parametrize("value", NO_NUMBERS, ids=lambda value: str(value)[:9])
def test_what_is_no_number_is_left_out(value: Any) -> None:
    records = [*TRAIN, {"kind": "train", "step": 30, "loss": value, "epoch": value}]
    assert curves(curves_figure([RunCurves("one", records)]).axes[0]) == [[[10, 3.0], [20, 2.0]]]
    assert epochs_per_step(records) == 0.25


def test_what_is_no_number_is_no_step_and_no_score(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a file that was damaged, from which the rest is drawn."""
    records = [*TRAIN, *VALIDATION]
    for value in NO_NUMBERS:
        records += [{"kind": "train", "step": value, "loss": 1.0}, {"kind": "validation", "step": 20, "score": value}]
        records += [{"kind": "train", "step": 20, "loss": value, "epoch": value}]
    run = write_run(tmp_path / "one", records)
    with (run / "metrics.jsonl").open("a") as file:
        file.write("[" * 100_000 + "\n" + '{"kind": "train", "step": ' + "9" * 5000 + "}\n")
    for across in ("step", "epoch"):
        assert plot(run, "--output", tmp_path / "out.png", "--x", across) == 0
        assert capsys.readouterr().out.startswith("one  20 steps, best score 31.5 at step 20\n")


def test_the_largest_numbers_are_drawn(tmp_path: Path) -> None:
    records = [{"kind": "train", "step": 10**n, "loss": loss, "epoch": 1e30} for n, loss in ((0, 1e30), (30, -1e30))]
    for across in ("step", "epoch"):
        draw_curves(tmp_path / "out.png", [RunCurves("one", records)], across)


def test_the_floor_and_the_score_are_those_of_the_config(tmp_path: Path) -> None:
    run = RunFolder(write_run(tmp_path / "one", TRAIN, CONFIG))
    assert run.curves().lowest_loss == pytest.approx(FLOOR)
    assert run.curves().score_name == "BLEU"


@pytest.mark.parametrize(
    "config",
    [
        None,
        {},
        {"model": 3},
        {"model": {"vocab_size": "2"}, "train": {}, "decode": []},
        {"model": {"vocab_size": 2}, "train": [0.1], "decode": {"metric": ["bleu"]}},
        {"model": {"vocab_size": 10**400}, "train": {"label_smoothing": 0.5}},
        {"model": {"vocab_size": 3}, "train": {"label_smoothing": math.inf}},
    ],
)
def test_a_run_of_another_program_has_curves_without_a_floor(
    tmp_path: Path, config: Record | None, caplog: pytest.LogCaptureFixture
) -> None:
    found = RunFolder(write_run(tmp_path / "one", TRAIN, config)).curves()
    assert (found.lowest_loss, found.score_name, found.records) == (None, "", TRAIN)
    assert not caplog.records


@pytest.mark.parametrize("content", [b"", b'{"model": ', b"[]", b"\xff\xfe", b"[" * 100_000], ids=lambda c: repr(c[:9]))
def test_a_damaged_config_is_told_in_a_line_and_the_rest_is_drawn(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = write_run(tmp_path / "one", [*TRAIN, *VALIDATION])
    (run / "config.json").write_bytes(content)
    assert plot(run, "--output", tmp_path / "out.png") == 0
    assert (tmp_path / "out.png").is_file()
    (record,) = caplog.records
    message = record.getMessage()
    assert message.startswith(f"{run}/config.json ")
    assert message.endswith(" Its curves are drawn without the floor of the loss and the name of the score.")
    assert "\n" not in message


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


def test_names_that_are_no_text_are_printed_as_they_came(tmp_path: Path) -> None:
    """In a process of its own: standard output takes UTF-8 only, and the names hold a byte that is none."""
    run = os.fsencode(write_run(tmp_path / "r\udcfe", TRAIN))
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    command = [sys.executable, "-m", "transformer_jax", "plot", run, "--output", b"p\xff.png"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == b"r\xfe  20 steps\nwritten  p\xff.png\n"
    assert (tmp_path / "p\udcff.png").is_file()


def test_names_are_as_short_as_they_can_be() -> None:
    assert run_names([Path("runs/x"), Path("runs/y")]) == ["x", "y"]
    assert run_names([Path("m/runs/x"), Path("n/runs/x"), Path("n/runs/y")]) == ["m/runs/x", "n/runs/x", "n/runs/y"]
    assert run_names([Path("/x"), Path("/m/x")]) == ["/x", "m/x"]


def test_a_run_by_two_names_is_refused_and_names_are_as_they_are_spelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("runs/x", "runs/y", "deep/z"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "link").symlink_to("runs/x")
    (tmp_path / "others").symlink_to("runs")
    monkeypatch.chdir(tmp_path)
    for other in ("runs/x/", "./runs/x", "runs/../runs/x", tmp_path / "runs" / "x", "link", "others/x", "runs/x"):
        with pytest.raises(UserError) as caught:
            run_names([Path("runs/x"), Path("runs/y"), Path(other)])
        assert str(caught.value) == f"A run is named twice, as runs/x and as {Path(other)}; name each once."
    assert run_names([Path("link"), Path("runs/y")]) == ["link", "y"]
    monkeypatch.chdir(tmp_path / "runs" / "x")
    assert run_names([Path("."), Path("../y")]) == ["x", "y"]
    monkeypatch.chdir(tmp_path / "deep" / "z")
    assert run_names([Path(".."), Path("../../runs/y")]) == ["deep", "y"]


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
        ((good / "metrics.jsonl", "--output", output), "metrics.jsonl is a file; name the folder of a run"),
        ((tmp_path / "empty", "--output", output), "holds no metrics.jsonl"),
        ((tmp_path / "bare", "--output", output), "holds no record of a loss"),
        ((tmp_path / "broken", "--output", output), "holds no record of a loss"),
        ((good, "--output", output, "--x", "epoch"), "do not say how long an epoch is"),
        ((good, "--output", tmp_path / "out.pdf"), "end it in .png"),
        ((good, "--output", tmp_path / "folder.png"), "is a folder; name a file"),
        ((good, "--output", tmp_path / "no" / "out.png"), "There is no folder"),
        # Told before the work: the run, which is not there, is not asked for.
        ((tmp_path / "absent", "--output", tmp_path / LONG), f"{tmp_path / LONG} cannot be written (File name too"),
        ((good, good / ".." / "good", "--output", output), "named twice"),
    ):
        assert plot(*arguments) == 2, arguments
        error = capsys.readouterr().err
        assert sentence in error
        assert error.startswith("error: ")
        assert error.count("\n") == 1
    assert not output.exists()
