"""§6.1: the average of a run's last checkpoints as a model, by `transformer-jax average` and at the end of a run."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from transformer_jax.checkpoint import Checkpoints, array_shapes, read_params
from transformer_jax.config import ModelConfig, model_from_json
from transformer_jax.errors import UserError
from transformer_jax.files import read_json
from transformer_jax.model import Transformer
from transformer_jax.model_folder import load_model, save_model
from transformer_jax.run_folder import RunFolder
from transformer_jax.tokenizer import load_tokenizer
from transformer_jax.training import Params, init_params

log = logging.getLogger("transformer_jax")


def average_params(folder: Path, steps: Sequence[int], *, leave_out_damaged: bool = False) -> tuple[Params, list[int]]:
    """The mean of the parameters of these checkpoints, added in float32, one checkpoint in memory at a time, and the
    steps that it is of: all, or with `leave_out_damaged` those that can be read; of the others a warning tells."""
    total: Params | None = None
    averaged: list[int] = []
    for step in steps:
        try:
            params = read_params(folder, step)
        except UserError as error:
            if not leave_out_damaged:
                raise
            log.warning("%s It is left out of the average.", error)
            continue
        if total is None:
            total = jax.tree.map(lambda x: np.array(x, np.float32), params)
        else:
            _check_alike(total, params, averaged[0], step)
            total = jax.tree.map(lambda sum_, x: np.add(sum_, x, out=sum_), total, params)
        averaged.append(step)
    if total is None:
        raise UserError(f"No checkpoint of {folder} that is to be averaged can be read; restore them from a copy.")
    return jax.tree.map(lambda x: x / np.float32(len(averaged)), total), averaged


def _check_alike(first: Params, other: Params, first_step: int, step: int) -> None:
    shapes = [array_shapes(params) for params in (first, other)]
    if shapes[0] != shapes[1]:
        name = next(n for n in sorted({*shapes[0], *shapes[1]}) if shapes[0].get(n) != shapes[1].get(n))
        raise UserError(
            f"The checkpoints of steps {first_step} and {step} differ in {name}: {shapes[0].get(name, 'absent')} and "
            f"{shapes[1].get(name, 'absent')}; only checkpoints of one model can be averaged."
        )


def last_steps(available: Sequence[int], last: int, folder: Path) -> list[int]:
    """The steps of the newest `last` checkpoints, in order; steps are compared as numbers."""
    if last < 1:
        raise UserError(f"--last is {last}; it must be at least 1.")
    if len(available) < last:
        raise UserError(
            f"{folder} holds {len(available)} checkpoints, fewer than the {last} to average; take fewer, or let the "
            "run keep more (train.keep_checkpoints)."
        )
    return sorted(available)[-last:]


def average_run(run: Path, output: Path, last: int | None = None, steps: Sequence[int] | None = None) -> list[int]:
    """Writes the model folder of the average of a run's checkpoints, the newest `last` or those of `steps`, and
    returns their steps."""
    folder = RunFolder(run)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"{output} exists; name a new folder.")
    chosen = kept_steps(run, steps)
    if not steps:
        chosen = last_steps(chosen, len(chosen) if last is None else last, run)
    config, tokenizer = trained_config(run), load_tokenizer(folder.tokenizer)
    params, _ = average_params(folder.checkpoints, chosen)
    check_shapes(run, config, params)
    suppressed, search = (), {}
    if (folder.model / "config.json").is_file():
        model = load_model(folder.model)
        suppressed, search = model.suppressed, model.search
    save_model(output, config, params, suppressed, search)
    tokenizer.save(output)
    return chosen


def check_shapes(run: Path, config: ModelConfig, params: Params) -> None:
    """That parameters of a run's checkpoints are those of the model that its config.json describes."""
    if array_shapes(params) != _shapes_of_model(config):
        raise UserError(f"The checkpoints of {run} are not of the model that its config.json describes.")


@functools.cache
def _shapes_of_model(config: ModelConfig) -> dict[str, list[int]]:
    return array_shapes(jax.eval_shape(lambda: init_params(Transformer(config), 0)))


def kept_steps(run: Path, wanted: Sequence[int] | None = None) -> list[int]:
    """The steps whose checkpoints a run holds, in order; with `wanted` those steps alone, which must all be there."""
    RunFolder(run).check_exists()
    folder = RunFolder(run).checkpoints
    if not folder.is_dir():
        raise UserError(f"{run} holds no checkpoints/; name the folder of a run.")
    with Checkpoints(folder) as checkpoints:
        available = checkpoints.steps
    if not available:
        raise UserError(f"{folder} holds no checkpoint yet.")
    missing = sorted(set(wanted or ()) - set(available))
    if missing:
        raise UserError(f"{run} holds no checkpoint of step {missing[0]}; it holds {', '.join(map(str, available))}.")
    return sorted(set(wanted)) if wanted else available


def trained_config(run: Path) -> ModelConfig:
    """The architecture that a run trains, vocabulary size filled in."""
    path = run / "config.json"
    described = read_json(path).get("model")
    try:
        return model_from_json(described)
    except UserError as error:
        raise UserError(
            f"{path} does not describe a model of this version, train or convert one anew: {error}"
        ) from error
