"""Pictures of a run. matplotlib is imported when something is drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

BLUE, ORANGE, GREY = "#3465a4", "#ce5c00", "#777777"


def draw_curves(path: Path, records: list[dict[str, Any]], lowest_loss: float) -> None:
    """Loss with its floor, token accuracy, learning rate and score over the steps, from a run's records."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    train = [r for r in records if r["kind"] == "train"]
    validation = [r for r in records if r["kind"] == "validation"]
    figure = Figure(figsize=(10, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2)

    def plot(axis: Any, name: str, title: str) -> None:
        for kind, found, colour, marker in (
            ("training", train, BLUE, None),
            ("validation", validation, ORANGE, "o"),
        ):
            points = [(r["step"], r[name]) for r in found if name in r]
            if points:
                axis.plot(*zip(*points, strict=True), color=colour, label=kind, marker=marker, markersize=3)
        axis.set_title(title)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)

    plot(axes[0, 0], "loss", "smoothed loss, nats per token")
    axes[0, 0].axhline(lowest_loss, color=GREY, linestyle=":", label=f"lowest possible, {lowest_loss:.3f}")
    plot(axes[0, 1], "accuracy", "token accuracy")
    plot(axes[1, 0], "rate", "learning rate")
    plot(axes[1, 1], "score", "score on the validation text")
    axes[0, 0].legend()
    part = path.with_name(f".{path.name}.part")
    figure.savefig(part, format="png", dpi=100)
    part.replace(path)
