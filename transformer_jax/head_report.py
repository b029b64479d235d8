"""The head statistics of a model, or of a run's checkpoints side by side: as text, as JSON, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from transformer_jax.averaging import check_shapes, kept_steps, trained_config
from transformer_jax.checkpoint import read_params
from transformer_jax.head_statistics import (
    KINDS,
    HeadStatistics,
    check_task,
    check_training,
    head_statistics,
    held_out_dates,
)
from transformer_jax.model import Transformer
from transformer_jax.plots import new_figure
from transformer_jax.pretrained import load_pretrained
from transformer_jax.run_folder import RunFolder
from transformer_jax.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

UNKNOWN_TASK = "Whether the run was trained on the dates is told by the model's alphabet alone."
NUMBER_WIDTH, LABEL_WIDTH = 14, 16
SHORT = {"digits": "digits", "first_letter": "first letter", "month": "all letters", "rest": "spaces, end"}


@dataclass(frozen=True)
class Stage:
    """A model at some time of its training."""

    name: str
    step: int | None
    """None for a finished model, which need not know it."""
    statistics: HeadStatistics


def stage_of_model(name: str, n_dates: int) -> Stage:
    """The statistics of a run's best model, or of a model folder."""
    pairs, model = held_out_dates(n_dates), load_pretrained(name)
    source = model.source if model.source.name else model.source.absolute()  # of "." too
    if source.name == "model":  # of a run, whose folder says more than the model's
        check_training(str(source.parent), RunFolder(source.parent).read_config(UNKNOWN_TASK))
    return Stage("model", None, head_statistics(Transformer(model.config), model.params, model.tokenizer, pairs))


def stages_of_run(run: Path, steps: Sequence[int] | None, n_dates: int) -> list[Stage]:
    """Those of a run's checkpoints, all that it keeps or those of these steps, in order."""
    pairs, chosen = held_out_dates(n_dates), kept_steps(run, steps)
    folder, config = RunFolder(run), trained_config(run)
    model, tokenizer = Transformer(config), load_tokenizer(folder.tokenizer)
    check_training(str(run), folder.read_config(UNKNOWN_TASK))
    check_task(tokenizer)
    stages = []
    for step in chosen:
        params = read_params(folder.checkpoints, step)
        check_shapes(run, config, params)
        stages.append(Stage(f"step {step:,}", step, head_statistics(model, params, tokenizer, pairs)))
    return stages


def as_text(stages: Sequence[Stage]) -> str:
    """Of one stage a table of heads and questions; of several a table of heads and stages for each question."""
    if len(stages) == 1:
        statistics = stages[0].statistics
        columns = [(SHORT[kind], statistics.shares_NH[kind]) for kind in KINDS]
        legend = [f"{SHORT[kind]:<{LABEL_WIDTH}}{KINDS[kind]} ({statistics.counts[kind]:,})" for kind in KINDS]
        return "\n".join([*legend, "", *_table(columns)])
    blocks = []
    for kind, question in KINDS.items():
        columns = [(stage.name, stage.statistics.shares_NH[kind]) for stage in stages]
        blocks.append("\n".join([f"{question} ({stages[0].statistics.counts[kind]:,})", *_table(columns)]))
    return "\n\n".join(blocks)


def _table(columns: Sequence[tuple[str, np.ndarray]]) -> list[str]:
    """A row for each head with its shares in percent, and the best of each column below."""

    def row(label: str, cells: Sequence[str]) -> str:
        return f"{label:<{LABEL_WIDTH}}" + "".join(f"{cell:>{NUMBER_WIDTH}}" for cell in cells)

    N, H = columns[0][1].shape
    lines = [row("", [name for name, _ in columns])]
    for n in range(N):
        for h in range(H):
            lines.append(row(f"layer {n + 1} head {h + 1}", [f"{share_NH[n, h]:.1%}" for _, share_NH in columns]))
    lines.append(row("best", [f"{share_NH.max():.1%}" for _, share_NH in columns]))
    return lines


def as_json(stages: Sequence[Stage], n_dates: int) -> dict[str, Any]:
    """The same as plain values; layers and heads count from 1."""

    def of(stage: Stage) -> dict[str, Any]:
        statistics = stage.statistics
        best = {}
        for kind in KINDS:
            layer, head = statistics.best(kind)
            share = float(statistics.shares_NH[kind][layer, head])
            best[kind] = {"layer": layer + 1, "head": head + 1, "share": share}
        shares = {kind: statistics.shares_NH[kind].tolist() for kind in KINDS}
        return {"stage": stage.name, "step": stage.step, "shares": shares, "best": best}

    return {
        "dates": n_dates,
        "questions": dict(KINDS),
        "tokens": dict(stages[0].statistics.counts),
        "stages": [of(stage) for stage in stages],
    }


def heads_figure(stages: Sequence[Stage]) -> Figure:
    """A row of panels for each stage, a panel for each question: heads across, layers down."""
    N, H = stages[0].statistics.shares_NH["digits"].shape
    figure = new_figure(len(KINDS) * max(2.4, 0.55 * H + 0.6), len(stages) * (0.45 * N + 0.6) + 0.6)
    rows = figure.subplots(len(stages), len(KINDS), squeeze=False)
    for axes, stage in zip(rows, stages, strict=True):
        for axis, kind in zip(axes, KINDS, strict=True):
            _draw_shares(axis, stage.statistics.shares_NH[kind])
            if stage is stages[0]:
                axis.set_title(KINDS[kind].replace(", ", ",\n"), fontsize=9)
        axes[0].set_ylabel(f"{stage.name}\nlayer", fontsize=9)
    for axis in rows[-1]:
        axis.set_xlabel("head", fontsize=9)
    return figure


def _draw_shares(axis: Any, shares_NH: np.ndarray) -> None:
    N, H = shares_NH.shape
    axis.imshow(shares_NH, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    for n in range(N):
        for h in range(H):
            colour = "white" if shares_NH[n, h] > 0.6 else "black"
            axis.text(h, n, f"{100 * shares_NH[n, h]:.0f}", ha="center", va="center", color=colour, fontsize=8)
    axis.set_xticks(range(H), [str(h + 1) for h in range(H)], fontsize=8)
    axis.set_yticks(range(N), [str(n + 1) for n in range(N)], fontsize=8)
