"""The curves of one run, or of several in the same panels. matplotlib is imported when something is drawn."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import math
import re
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from transformer_jax.errors import UserError
from transformer_jax.files import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger("transformer_jax")
Record = dict[str, Any]
Across = Literal["step", "epoch"]

BLUE, ORANGE, GREY = "#3465a4", "#ce5c00", "#777777"
# Okabe and Ito's colours, which the colour-blind can tell apart, without the yellow that is lost on white.
RUN_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
# Beyond as many runs the colours come again, with other lines; dots are those of the floors.
RUN_LINES = ("-", "--", "-.")
MOST_RUNS = len(RUN_COLOURS) * len(RUN_LINES)
"""Whose curves can be told apart."""
LARGEST = 1e30
"""The largest number that is drawn: near the end of what a float holds, the length of an axis is infinite."""
DPI = 100
WIDTH, LINE, HANDLE = 10.0, 0.25, 0.8
"""Inches: of the picture, of a line of its legend from top to bottom, of a name's mark in it with the spaces."""
NAME_COLUMNS, FLOOR_COLUMNS = 60, 48
"""Characters of a line in the legend, and in that of the loss."""
FONTS = ("DejaVu Sans", "Noto Sans CJK JP", "Noto Sans CJK SC", "Noto Sans Arabic", "Noto Sans Devanagari")


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
    with one_warning_of_absent_glyphs():
        write_png(path, curves_figure(runs, across))


def curves_figure(runs: Sequence[RunCurves], across: Across = "step") -> Figure:
    """Loss with its floor, token accuracy, learning rate and score over the steps.

    One run: training and validation have a colour each. Several: each run has a colour, training is a thin line and
    validation a line with dots; scores of different metrics have a panel each. `across` "epoch" needs records that say
    how far into the text a step is.

    Raises:
        UserError: there are more than `MOST_RUNS` runs.
    """
    if len(runs) > MOST_RUNS:
        raise UserError(f"{len(runs)} runs are named; the curves of {MOST_RUNS} can be told apart, draw fewer at once.")
    runs = [dataclasses.replace(run, name=legible(run.name)) for run in runs]
    panels = [*PANELS, *_score_panels(runs)]
    n_rows = math.ceil(len(panels) / 2)
    names = [_folded(run.name, NAME_COLUMNS) for run in runs]
    n_columns = _legend_columns(names)
    n_lines = sum(name.count("\n") + 1 for name in names)
    legend_height = LINE * math.ceil(n_lines / n_columns) if len(runs) > 1 else 0
    figure = new_figure(WIDTH, 3.25 * n_rows + legend_height)
    axes = list(figure.subplots(n_rows, 2).flat)
    for axis in axes[len(panels) :]:
        axis.remove()
    for axis, panel in zip(axes, panels, strict=False):
        _draw_panel(axis, panel, runs, across)
    for floor, (colour, label) in _floors(runs).items():
        axes[0].axhline(floor, color=colour, linestyle=":", label=_folded(label, FLOOR_COLUMNS))
    _add_legend(figure, axes[0], names, n_columns)
    _write_texts_as_they_are(figure)
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
    line = RUN_LINES[n // len(RUN_COLOURS)]
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
    """Whether a value of a record is a number that can be drawn: neither NaN nor without end, nor near it."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


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


def _legend_columns(names: Sequence[str]) -> int:
    """How many names stand beside each other above the panels: three, or as many as there is room for."""
    lines = [line for name in names for line in name.split("\n")]
    room = int(WIDTH // (widest(lines, 10, DPI) + HANDLE))
    return max(1, min(3, len(names), room))


def _add_legend(figure: Any, loss_axis: Any, names: Sequence[str], n_columns: int) -> None:
    """In the loss panel; the names of several runs stand above all panels, for they may be long."""
    from matplotlib.lines import Line2D

    if len(names) == 1:
        if loss_axis.get_legend_handles_labels()[0]:
            loss_axis.legend()
        return
    marks = [Line2D([], [], **_styles(n, len(names))["validation"]) for n in range(len(names))]
    figure.legend(marks, names, loc="outside upper center", ncols=n_columns, frameon=False)
    kinds = [
        Line2D([], [], color=GREY, linewidth=0.9, label="training"),
        Line2D([], [], color=GREY, linewidth=1.6, marker="o", markersize=3.5, label="validation"),
    ]
    loss_axis.legend(handles=[*kinds, *loss_axis.get_legend_handles_labels()[0]], fontsize=8)


# --- texts --------------------------------------------------------------------------------------------------


def legible(text: str) -> str:
    """A text that can be drawn: a byte of a name that is no UTF-8 reads as \\xff, any other lone surrogate as ?."""
    text = re.sub("[\udc80-\udcff]", lambda byte: f"\\x{ord(byte[0]) - 0xDC00:02x}", text)
    return text.encode("utf-8", "replace").decode("utf-8")


def _folded(text: str, columns: int) -> str:
    """In lines of so many characters at most, between words where that is possible."""
    return "\n".join(textwrap.wrap(text, columns, replace_whitespace=False, break_on_hyphens=False)) or text


def _write_texts_as_they_are(figure: Any) -> None:
    """A $ in a name is no formula, and a name may be in any script."""
    from matplotlib.text import Text

    families = font_families()
    for text in figure.findobj(Text):
        text.set(parse_math=False, fontfamily=families)


def font_families() -> list[str]:
    """Fonts for texts in any script, of those that this machine has."""
    from matplotlib.font_manager import fontManager

    present = {font.name for font in fontManager.ttflist}
    return [name for name in FONTS if name in present]


def widest(texts: Iterable[str], size: float, dpi: float, weight: str = "normal") -> float:
    """The inches that the widest of these texts, a line each, takes when it is drawn in this size (in points)."""
    from matplotlib.backends.backend_agg import RendererAgg
    from matplotlib.font_manager import FontProperties

    renderer = RendererAgg(1, 1, dpi)
    font = FontProperties(family=font_families(), size=size, weight=weight)
    widths = [renderer.get_text_width_height_descent(text, font, ismath=False)[0] for text in set(texts)]
    return max(widths, default=0.0) / dpi


@contextlib.contextmanager
def one_warning_of_absent_glyphs(advice: str = "") -> Iterator[None]:
    """In the place of matplotlib's warnings of each character that no font has, one of ours for all; others stay."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    others = [warning for warning in caught if not str(warning.message).startswith("Glyph")]
    for other in others:
        warnings.warn_explicit(other.message, other.category, other.filename, other.lineno)
    if len(others) < len(caught):
        log.warning("No font of this machine has some of the characters: boxes stand for them.%s", advice)


# --- files --------------------------------------------------------------------------------------------------


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
    figure.savefig(content, format="png", dpi=DPI)
    write_whole(path, content.getvalue())
