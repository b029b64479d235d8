"""The curves of one run, or of several in the same panels. matplotlib is imported when something is drawn."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from transformer_jax.files import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Record = dict[str, Any]
Across = Literal["step", "epoch"]

BLUE, ORANGE, GREY = "#3465a4", "#ce5c00", "#777777"
# Okabe and Ito's colours, which the colour-blind can tell apart, without the yellow that is lost on white.
RUN_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
# Beyond as many runs the colours come again, with other lines.
TRAINING_LINES = ("-", "-.")


@dataclass(frozen=True)
class RunCurves:
    """What a run has recorded."""

    name: str
    records: list[Record] = field(repr=False)
    lowest_loss: float | None = None
    """The floor of its smoothed loss; None where it is not known."""
    score_name: str = ""
    """What its score is, such as BLEU."""


@dataclass(frozen=True)
class Panel:
    """What one panel shows."""

    field: str
    """Of the records."""
    title: str
    what: str
    """The field in words."""
    metric: str | None = None
    """Shows only the runs whose score is this; None: all."""


PANELS = (
    Panel("loss", "smoothed loss, nats per token", "loss"),
    Panel("accuracy", "token accuracy", "token accuracy"),
    Panel("rate", "learning rate", "learning rate"),
)
"""Those before the score."""


def draw_curves(path: Path, runs: Sequence[RunCurves], across: Across = "step") -> None:
    """Writes the picture of `curves_figure` as a PNG file."""
    write_png(path, curves_figure(runs, across))


def curves_figure(runs: Sequence[RunCurves], across: Across = "step") -> Figure:
    """Loss with its floor, token accuracy, learning rate and score over the steps.

    One run: training and validation have a colour each. Several: each run has a colour, training is a thin line and
    validation a line with dots; scores of different metrics have a panel each. `across` "epoch" needs records that say
    how far into the text a step is.
    """
    panels = [*PANELS, *_score_panels(runs)]
    n_rows = math.ceil(len(panels) / 2)
    # Above many runs' curves the legend takes as many rows as there are names.
    legend_height = 0.25 * math.ceil(len(runs) / 3) if len(runs) > 1 else 0
    figure = new_figure(10, 3.25 * n_rows + legend_height)
    axes = list(figure.subplots(n_rows, 2).flat)
    for axis in axes[len(panels) :]:
        axis.remove()
    for axis, panel in zip(axes, panels, strict=False):
        _draw_panel(axis, panel, runs, across)
    for floor, (colour, label) in _floors(runs).items():
        axes[0].axhline(floor, color=colour, linestyle=":", label=label)
    _add_legend(figure, axes[0], runs)
    return figure


def _score_panels(runs: Sequence[RunCurves]) -> list[Panel]:
    """One for each metric that runs have been scored by: BLEU and exact match have no scale in common."""
    scored = [run for run in runs if any(is_number(r.get("score")) for r in run.records if r["kind"] == "validation")]
    metrics = sorted({run.score_name for run in scored or runs})
    title = "score on the validation text"
    if not scored or len(metrics) == 1:
        known = ", ".join(metric for metric in metrics if metric)
        return [Panel("score", f"{title}: {known}" if known else title, "score")]
    return [Panel("score", f"{title}: {metric or 'metric unknown'}", "score", metric) for metric in metrics]


def _draw_panel(axis: Any, panel: Panel, runs: Sequence[RunCurves], across: Across) -> None:
    """The curves of those runs that the panel is for; where there are none, it says so."""
    for n, run in enumerate(runs):
        if panel.metric not in (None, run.score_name):
            continue
        for kind, style in _styles(n, len(runs)).items():
            points = _points(run, kind, panel.field, across)
            if points:
                axis.plot(*zip(*points, strict=True), **style)
    axis.set_title(panel.title)
    axis.set_xlabel(across)
    axis.grid(alpha=0.3)
    if not axis.lines:
        # Numbers beside an empty panel would be of nothing.
        axis.set(xticks=[], yticks=[])
        axis.text(0.5, 0.5, f"no {panel.what} recorded", transform=axis.transAxes, ha="center", va="center", color=GREY)


def _styles(n: int, n_runs: int) -> dict[str, Record]:
    """How the curves of run n are drawn."""
    if n_runs == 1:
        return {
            "train": {"color": BLUE, "label": "training"},
            "validation": {"color": ORANGE, "label": "validation", "marker": "o", "markersize": 3},
        }
    colour = _colour(n)
    line = TRAINING_LINES[n // len(RUN_COLOURS) % len(TRAINING_LINES)]
    return {
        "train": {"color": colour, "linestyle": line, "linewidth": 0.9, "alpha": 0.6},
        "validation": {"color": colour, "linestyle": line, "linewidth": 1.6, "marker": "o", "markersize": 3.5},
    }


def _colour(n: int) -> str:
    return RUN_COLOURS[n % len(RUN_COLOURS)]


def _points(run: RunCurves, kind: str, name: str, across: Across) -> list[tuple[float, float]]:
    """The places of a curve, from left to right; what is no number is left out."""
    scale = epochs_per_step(run.records) if across == "epoch" else 1.0
    if scale is None:
        return []
    found = [(scale * r["step"], r[name]) for r in run.records if r["kind"] == kind and is_number(r.get(name))]
    return sorted(found)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def epochs_per_step(records: list[Record]) -> float | None:
    """How much of the training text a step reads; None where the records do not say."""
    said = [r["epoch"] / r["step"] for r in records if r["step"] > 0 and is_number(r.get("epoch"))]
    return said[-1] if said else None


def _floors(runs: Sequence[RunCurves]) -> dict[float, tuple[str, str]]:
    """Each floor of the loss once, with its colour and its label; where there are several, whose it is. Those that the
    label's three decimals do not tell apart are one."""
    floors: dict[str, float] = {}
    owners: dict[str, list[int]] = {}
    for n, run in enumerate(runs):
        if run.lowest_loss is not None:
            label = f"lowest possible, {run.lowest_loss:.3f}"
            floors.setdefault(label, run.lowest_loss)
            owners.setdefault(label, []).append(n)
    if len(owners) == 1 and all(run.lowest_loss is not None for run in runs):
        return {floor: (GREY, label) for label, floor in floors.items()}
    return {
        floors[label]: (_colour(of[0]), f"{label} ({', '.join(runs[n].name for n in of)})")
        for label, of in owners.items()
    }


def _add_legend(figure: Any, loss_axis: Any, runs: Sequence[RunCurves]) -> None:
    """In the loss panel; the names of several runs stand above all panels, for they may be long."""
    from matplotlib.lines import Line2D

    if len(runs) == 1:
        if loss_axis.get_legend_handles_labels()[0]:
            loss_axis.legend()
        return
    names = [Line2D([], [], label=run.name, **_styles(n, len(runs))["validation"]) for n, run in enumerate(runs)]
    figure.legend(handles=names, loc="outside upper center", ncols=min(3, len(runs)), frameon=False)
    kinds = [
        Line2D([], [], color=GREY, linewidth=0.9, label="training"),
        Line2D([], [], color=GREY, linewidth=1.6, marker="o", markersize=3.5, label="validation"),
    ]
    loss_axis.legend(handles=[*kinds, *loss_axis.get_legend_handles_labels()[0]], fontsize=8)


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of this size in inches, that needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def write_png(path: Path, figure: Figure) -> None:
    """Writes a figure so that the file is never seen half-written."""
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=100)
    write_whole(path, content.getvalue())
