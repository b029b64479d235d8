"""Pictures of the site, drawn as SVG while it is built, with the package's own functions (see hooks.py).

Colours are those of site.css, so that a picture follows the page from light to dark.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

HERE = Path(__file__).parent
CELL, GAP = 22, 3
WIDTH, HEIGHT = 480, 240
LEFT, RIGHT, TOP, BOTTOM = 52, 16, 14, 44


def masks() -> str:
    """Who may look at whom, in the four uses of the masks."""
    import jax.numpy as jnp

    from transformer_jax.attention import segment_mask

    source, target, row = (jnp.array([row]) for row in ([1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 1, 2, 2, 0]))
    words, written = ["A", "frog", "end", "pad"], ["start", "Ein", "Frosch", "."]
    packed = ["start", "Ja", ".", "start", "Nein", "pad"]
    return _figure(
        "Filled: the token of the row may look at the token of the column.",
        _grid("encoder: all but padding", segment_mask(source, source), words, words),
        _grid("decoder: not ahead", segment_mask(target, target, causal=True), written, written),
        _grid("decoder to encoder", segment_mask(target, source), written, words),
        _grid("two sentences in a row", segment_mask(row, row, causal=True), packed, packed),
    )


def schedule() -> str:
    """Eq. 3 for three models, and with a linear fall at the end as configs/dates.py has it."""
    import jax.numpy as jnp

    from transformer_jax.config import TrainConfig
    from transformer_jax.optimizer import learning_rate, paper_rate

    steps = np.arange(1, 20_001, 40)
    lines = [
        Line(f"d_model {d_model}, {warmup:,} steps of warm-up", steps, paper_rate(d_model, warmup)(jnp.asarray(steps)))
        for d_model, warmup in ((512, 4_000), (512, 8_000), (1024, 4_000))
    ]
    falling = learning_rate(TrainConfig(steps=20_000, warmup_steps=4_000, decay_fraction=0.25), d_model=512)
    lines.append(Line("the first, falling over the last quarter", steps, falling(jnp.asarray(steps))))
    return _figure("Learning rate by step.", _chart(lines, "step", "rate"))


def embedding_start() -> str:
    """What benchmarks/embedding_start.py found."""
    found = json.loads((HERE / "embedding_start.json").read_text(encoding="utf-8"))
    losses = [Line(run["name"], np.array(run["steps"]), np.array(run["losses"])) for run in found["runs"]]
    scores = [Line(run["name"], np.array(run["steps"]), np.array(run["exact_match"])) for run in found["runs"]]
    floor = Line("lowest possible", losses[0].x[[0, -1]], np.full(2, found["lowest_loss"]), dashed=True)
    return _figure(
        "Smoothed loss of the held-out lists, in nats a token, by step.", _chart([*losses, floor], "step", "loss")
    ) + _figure(
        "Share of held-out lists that are reversed without a mistake, by step.", _chart(scores, "step", "exact")
    )


class Line(NamedTuple):
    name: str
    x: np.ndarray
    y: Any
    """As long as x, of numpy or jax."""
    dashed: bool = False


def _figure(caption: str, *parts: str) -> str:
    inside = "".join(parts)
    return f'<figure class="drawing"><div>{inside}</div><figcaption>{escape(caption)}</figcaption></figure>\n'


def _grid(title: str, mask: object, rows: Sequence[str], columns: Sequence[str]) -> str:
    """A mask of shape (1, 1, rows, columns) as squares."""
    may_look = np.asarray(mask)[0, 0]
    left, top, step = 48, 72, CELL + GAP
    width, height = left + step * len(columns) + 30, top + step * len(rows)
    cells = [
        f'<rect class="{"on" if may_look[r, c] else "off"}" x="{left + c * step}" y="{top + r * step}" '
        f'width="{CELL}" height="{CELL}" rx="3"/>'
        for r in range(len(rows))
        for c in range(len(columns))
    ]
    names = [
        f'<text x="{left - 6}" y="{top + r * step + 15}" text-anchor="end">{escape(name)}</text>'
        for r, name in enumerate(rows)
    ] + [
        f'<text transform="translate({left + c * step + 14} {top - 6}) rotate(-45)">{escape(name)}</text>'
        for c, name in enumerate(columns)
    ]
    label = f"Mask, {title}: " + "; ".join("".join("x" if v else "-" for v in line) for line in may_look)
    heading = f'<text class="title" x="0" y="14">{escape(title)}</text>'
    return (
        f'<svg role="img" aria-label="{escape(label)}" width="{max(width, 190)}" height="{height}" '
        f'viewBox="0 0 {max(width, 190)} {height}">{heading}{"".join(cells)}{"".join(names)}</svg>'
    )


def _chart(lines: Sequence[Line], x_name: str, y_name: str) -> str:
    """Lines over a common axis that begins at zero, each named in a legend below."""
    x_most = max(float(line.x.max()) for line in lines)
    y_most = max(float(line.y.max()) for line in lines) * 1.05
    rows = HEIGHT + 18 * len(lines)

    def x_at(x: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * x / x_most

    def y_at(y: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * y / y_most

    parts = []
    for y in _ticks(y_most):
        parts.append(f'<line class="rule" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y_at(y):.1f}" y2="{y_at(y):.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y_at(y) + 4:.1f}" text-anchor="end">{y:g}</text>')
    for x in _ticks(x_most):
        parts.append(f'<text x="{x_at(x):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{x:,g}</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 8}" text-anchor="end">{escape(x_name)}</text>')
    for n, line in enumerate(lines):
        points = " ".join(f"{x_at(x):.1f},{y_at(y):.1f}" for x, y in zip(line.x.tolist(), line.y.tolist(), strict=True))
        kind = "line dashed" if line.dashed else f"line line{n}"
        parts.append(f'<polyline class="{kind}" points="{points}"/>')
        y = HEIGHT + 18 * n + 6
        parts.append(f'<line class="{kind}" x1="{LEFT}" x2="{LEFT + 24}" y1="{y - 4}" y2="{y - 4}"/>')
        parts.append(f'<text x="{LEFT + 32}" y="{y}">{escape(line.name)}</text>')
    label = f"{y_name} by {x_name}: " + "; ".join(f"{line.name}, {line.y[-1]:.3g} at the end" for line in lines)
    return f'<svg role="img" aria-label="{escape(label)}" viewBox="0 0 {WIDTH} {rows}">{"".join(parts)}</svg>'


def _ticks(most: float) -> list[float]:
    """Four to eight round numbers from 0 up to the largest value."""
    power = 10 ** np.floor(np.log10(most))
    step = next(power * share for share in (0.1, 0.2, 0.25, 0.5, 1.0, 2.0) if most / (power * share) <= 6)
    return [float(step * n) for n in range(int(most / step) + 1)]
