"""The reversal task with embeddings that start at standard deviation d_model^-0.5, as here, and at 1.

    python benchmarks/embedding_start.py                          # prints a table
    python benchmarks/embedding_start.py --output docs/embedding_start.json

Both runs are configs/reverse.py, cut to --steps steps, with the same seed, batches and learning rates. The table is
multiplied by sqrt(d_model) on the way in and is, transposed, the output projection on the way out (§3.4 of the paper).
Each evaluation is the smoothed loss of all held-out lists, and the share of them that greedy search reverses exactly.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from transformer_jax.cli import run_command
from transformer_jax.config import RunConfig, replace

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "reverse.py"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--evaluate-every", type=int, default=40)
    parser.add_argument("--output", type=Path, help="JSON file for the curves")
    options = parser.parse_args()
    from transformer_jax.files import write_whole
    from transformer_jax.loss import lowest_loss
    from transformer_jax.run_options import load_config
    from transformer_jax.sharding import use_compilation_cache

    use_compilation_cache()
    config = replace(load_config(CONFIG), **{"train.steps": options.steps})
    d_model = config.model.d_model
    runs = []
    for name, factor in ((f"d_model^-0.5 = {d_model**-0.5:g}", 1.0), ("1", math.sqrt(d_model))):
        print(f"standard deviation {name}\n{'step':>6}{'loss':>10}{'exact':>9}")
        curve: list[tuple[int, float, float]] = []
        for point in train(config, factor, options.evaluate_every):
            print(f"{point[0]:>6}{point[1]:>10.4f}{point[2]:>9.3f}", flush=True)
            curve.append(point)
        steps, losses, exact = (list(column) for column in zip(*curve, strict=True))
        runs.append({"name": f"standard deviation {name}", "steps": steps, "losses": losses, "exact_match": exact})
    if options.output:
        floor = lowest_loss(13, config.train.label_smoothing)  # ten digits, pad, start and end
        found = {"command": "python benchmarks/embedding_start.py", "lowest_loss": floor, "runs": runs}
        write_whole(options.output, json.dumps(found, indent=1) + "\n")
    return 0


def train(config: RunConfig, factor: float, every: int) -> Iterator[tuple[int, float, float]]:
    """Trains with an embedding that starts `factor` times as large as ours; yields step, loss and exact match, before
    the first step too."""
    import jax

    from transformer_jax.batching import TrainingBatches, every_pair_once
    from transformer_jax.evaluation import exact_match, loss_of, per_token
    from transformer_jax.model import Transformer
    from transformer_jax.optimizer import adam
    from transformer_jax.packing import make_layout
    from transformer_jax.run_data import find_task, to_tokens
    from transformer_jax.run_model import fit_model
    from transformer_jax.sharding import data_mesh, shard_rows
    from transformer_jax.tokenizer import CharacterTokenizer
    from transformer_jax.training import init_params, make_loss_step, make_train_step, start_from
    from transformer_jax.translator import Translator

    task = find_task("reversal")
    tokenizer = CharacterTokenizer(task.characters)
    pairs, _ = to_tokens(task.train, tokenizer, config.data.max_tokens)
    held_out, _ = to_tokens(task.held_out, tokenizer, config.data.max_tokens)
    layout = make_layout(pairs, config.data)
    batches = TrainingBatches(pairs, layout, config.train.seed, config.train.steps)

    model_config = fit_model(config.model, tokenizer)
    model, mesh = Transformer(model_config), data_mesh(1)
    optimizer = adam(config.train, model_config.d_model)
    params: Any = init_params(model, config.train.seed)
    params = params | {"target_embedding": {"table": params["target_embedding"]["table"] * np.float32(factor)}}
    state = start_from(params, optimizer)
    step = make_train_step(model, optimizer, config.train, mesh)
    loss_step = make_loss_step(model, config.train, mesh)
    translator = Translator(model, params, tokenizer, config.decode, mesh)
    for n in range(config.train.steps + 1):
        if n % every == 0:
            # The step's state is donated to the next one: what is evaluated is a copy.
            params = jax.device_get(state.params)
            loss = per_token(loss_of(loss_step, params, every_pair_once(held_out, list(layout.shapes)), mesh))["loss"]
            found = [t.text for t in translator.with_params(params).translate(task.held_out.source)]
            yield n, round(loss, 5), exact_match(found, task.held_out.target)
        if n < config.train.steps:
            state, _ = step(state, shard_rows(batches[n], mesh))


if __name__ == "__main__":
    raise SystemExit(run_command(main))
