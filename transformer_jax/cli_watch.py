"""`transformer-jax plot | heads`: what a run has learned and when, in pictures and numbers."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformer_jax.errors import UserError
from transformer_jax.files import check_writable


def add_plot(parser: argparse.ArgumentParser) -> None:
    parser.description = "Draw the curves of runs over each other: loss with its floor, accuracy, learning rate, score."
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="folders of runs")
    parser.add_argument("--output", type=Path, default=Path("curves.png"), help="a PNG file (curves.png)")
    parser.add_argument("--x", choices=("step", "epoch"), default="step", help="what goes from left to right (step)")
    parser.set_defaults(run=plot)


def add_heads(parser: argparse.ArgumentParser) -> None:
    parser.description = "What each head of a model of the dates task looks at: how often at what it writes from."
    parser.add_argument("model", metavar="RUN", help="a run folder, or a model folder of the dates task")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--steps", type=int, nargs="+", metavar="STEP", help="a run's checkpoints of these steps")
    which.add_argument("--all", action="store_true", help="all checkpoints that the run kept, side by side")
    parser.add_argument("--dates", type=int, default=500, help="held-out days to count over, 2000 at most (500)")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="of the shares (text)")
    parser.add_argument("--output", type=Path, help="also draw them, as a PNG file")
    parser.set_defaults(run=heads)


def plot(options: argparse.Namespace) -> int:
    from transformer_jax.plots import draw_curves, epochs_per_step

    _check_picture(options.output)
    curves = [_read_curves(run, name) for run, name in zip(options.runs, run_names(options.runs), strict=True)]
    if options.x == "epoch":
        for run in curves:
            if epochs_per_step(run.records) is None:
                raise UserError(f"The records of {run.name} do not say how long an epoch is; take --x step.")
    draw_curves(options.output, curves, options.x)
    width = max(len(run.name) for run in curves)
    lines = [f"{run.name:<{width}}  {_summary(run.records, run.score_name)}" for run in curves]
    print(*lines, f"written  {options.output}", sep="\n")
    return 0


def heads(options: argparse.Namespace) -> int:
    from transformer_jax.head_report import as_json, as_text, heads_figure, stage_of_model, stages_of_run
    from transformer_jax.plots import write_png
    from transformer_jax.sharding import use_compilation_cache

    if options.output is not None:
        _check_picture(options.output)
    use_compilation_cache()
    if options.steps or options.all:
        stages = stages_of_run(Path(options.model), options.steps, options.dates)
    else:
        stages = [stage_of_model(options.model, options.dates)]
    if options.format == "json":
        print(json.dumps(as_json(stages, options.dates), indent=2))
    else:
        print(f"{options.model}: {options.dates:,} held-out dates; how often the strongest weight of each head of the")
        print("decoder's attention to the encoder is where the answer stands, for these tokens:\n")
        print(as_text(stages))
    if options.output is not None:
        write_png(options.output, heads_figure(stages))
    return 0


def run_names(runs: Sequence[Path]) -> list[str]:
    """The runs' folder names, as they are spelled, or with as many of the folders above as it takes to tell them apart.

    A run that is named twice is refused, also where one of the names is a link to the other.
    """
    named: dict[str, Path] = {}
    for run in runs:
        place = os.path.realpath(run)
        if place in named:
            raise UserError(f"A run is named twice, as {named[place]} and as {run}; name each once.")
        named[place] = run
    # A name that ends in .. says nothing.
    whole = [(run.resolve() if run.name == ".." else run.absolute()).parts for run in runs]
    n = next(n for n in range(1, max(map(len, whole)) + 1) if len({parts[-n:] for parts in whole}) == len(whole))
    return [str(Path(*parts[-n:])) for parts in whole]


def _read_curves(run: Path, name: str) -> Any:
    """The run's records, which must hold something to draw."""
    from transformer_jax.plots import is_number
    from transformer_jax.run_folder import RunFolder

    folder = RunFolder(run)
    folder.check_exists()
    if not folder.metrics.is_file():
        raise UserError(f"{run} holds no metrics.jsonl; name the folder of a run that has begun to train.")
    curves = folder.curves(name)
    if not any(is_number(record.get("loss")) for record in curves.records if record["kind"] in ("train", "validation")):
        raise UserError(f"{folder.metrics} holds no record of a loss: the run has just begun, or the file is damaged.")
    return curves


def _summary(records: list[dict[str, Any]], score_name: str) -> str:
    """Where a run is, and its best score."""
    from transformer_jax.plots import is_number

    scored = [r for r in records if r["kind"] in ("validation", "average") and is_number(r.get("score"))]
    reached = f"{max(r['step'] for r in records):,} steps"
    if not scored:
        return reached
    best = max(scored, key=lambda r: r["score"])
    return f"{reached}, best {score_name or 'score'} {best['score']:.4g} at step {best['step']:,}"


def _check_picture(path: Path) -> None:
    """A mistake in the name, or a place that cannot be written, is told before the work."""
    if path.suffix.lower() != ".png":
        raise UserError(f"{path} is no name of a PNG file; end it in .png.")
    check_writable(path)
