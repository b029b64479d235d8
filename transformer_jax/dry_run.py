"""`train.py --dry-run`: what a run would take - parameters, memory, arithmetic, days - without reading its data."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from transformer_jax.batching import Batch
from transformer_jax.config import ModelConfig, RunConfig, replace
from transformer_jax.model import Transformer
from transformer_jax.optimizer import adam
from transformer_jax.sharding import data_mesh
from transformer_jax.training import init_state, make_train_step

ACCELERATORS = {
    "P100": (10.6e12, "float32"),
    "V100": (125e12, "float16"),
    "A100": (312e12, "bfloat16"),
    "H100": (989e12, "bfloat16"),
    "H200": (989e12, "bfloat16"),
    "TPUv4": (275e12, "bfloat16"),
    "TPUv5e": (197e12, "bfloat16"),
    "TPUv5p": (459e12, "bfloat16"),
}
"""Highest floating-point operations per second of one device for dense products, by its maker, and in which format."""
UTILISATION = 0.35
"""Share of that which training reaches: an assumption, told where it is used. It is what the paper's own times come to
(§5.2: 0.4 s a step of base and 1.0 s of big on eight P100); small models on fast devices reach less."""


def training_flops(config: ModelConfig, source: int, target: int, source_row: int, target_row: int) -> float:
    """Floating-point operations of one update: twice a product's multiplications forward, twice that again backward.

    `source` and `target` are tokens of a batch, in rows of so many. Embeddings, norms and softmax are left out.
    """
    D, V = config.d_model, config.vocab_size
    feed_forward = 2 * D * config.d_ff, 2 * D * (config.decoder_d_ff or config.d_ff)
    encoder = config.n_encoder_layers * source * (4 * D * D + feed_forward[0] + 2 * source_row * D)
    of_target = 4 * D * D + 2 * target_row * D + 2 * D * D + 2 * source_row * D + feed_forward[1]
    decoder = config.n_decoder_layers * (target * of_target + source * 2 * D * D)
    return 3.0 * 2.0 * (encoder + decoder + target * D * V)


def batch_shape(config: RunConfig) -> tuple[int, int]:
    """Rows of a batch and their length, both sides alike: packed rows, or the longest bucket's."""
    data = config.data
    length = data.row_tokens if data.batching == "packed" else data.max_tokens
    rows = data.batch_size if data.batch_tokens is None else data.batch_tokens // length
    return max(1, rows // data.rows_multiple) * data.rows_multiple, length


def device_step(config: RunConfig, n_devices: int) -> Any:
    """The compiled step of one of so many devices, from shapes alone: nothing is allocated or run."""
    rows, length = batch_shape(config)
    model = Transformer(config.model)
    optimizer = adam(config.train, config.model.d_model)
    state = jax.eval_shape(lambda: init_state(model, optimizer, 0, config.train.ema_decay))
    ids = jax.ShapeDtypeStruct((max(1, rows // n_devices), length), jnp.int32)
    batch = Batch(ids, ids, ids, ids, ids, ids, ids, jax.ShapeDtypeStruct(ids.shape, jnp.float32))
    step: Any = make_train_step(model, optimizer, config.train, data_mesh(1))
    return step.lower(state, batch).compile()


def describe(config: RunConfig, accelerator: str = "H100", n_devices: int = 8, compiled: bool = True) -> list[str]:
    """The lines that a dry run prints; the one on memory is of the `compiled` step, which takes a while."""
    if not config.model.vocab_size:
        config = replace(config, **{"model.vocab_size": config.data.vocab_size})
    m, data, steps = config.model, config.data, config.train.steps
    rows, length = batch_shape(config)
    state = jax.eval_shape(lambda: init_state(Transformer(m), adam(config.train, m.d_model), 0))
    n_params = sum(math.prod(x.shape) for x in jax.tree.leaves(state.params))
    tokens = rows * length
    flops = training_flops(m, tokens, tokens, length, length)
    peak, number = ACCELERATORS[accelerator]
    seconds = flops / (n_devices * peak * UTILISATION)
    lines = [
        f"model      {n_params:,} parameters: d_model {m.d_model}, {m.n_heads} heads, d_ff {m.d_ff}, "
        f"{m.n_encoder_layers}+{m.n_decoder_layers} layers, vocabulary {m.vocab_size:,}",
        f"batch      {rows:,} rows of {length:,} slots a side, {tokens:,} + {tokens:,} in all ({data.batching}), over "
        f"{n_devices} devices",
        f"programs   {1 if data.batching == 'packed' else f'at most {data.n_buckets}'} for training",
        f"arithmetic {flops / 1e12:,.1f} TFLOP a step, {flops * steps:.2e} FLOP for {steps:,} steps",
        f"time       {seconds:.3f} s a step, {_duration(seconds * steps)} on {n_devices} {accelerator} (peak "
        f"{peak / 1e12:,.0f} TFLOP/s each in {number}, of which {UTILISATION:.0%} is assumed)",
    ]
    return [*lines, memory_line(config, rows, n_devices)] if compiled else lines


def _duration(seconds: float) -> str:
    hours = seconds / 3600
    return f"{hours:.1f} hours" if hours < 48 else f"{hours / 24:.1f} days"


def memory_line(config: RunConfig, rows: int, n_devices: int) -> str:
    if rows % (n_devices * config.train.accumulation):
        return f"memory     not told: {rows} rows do not divide over {n_devices} devices"
    analysis = device_step(config, n_devices).memory_analysis()
    kept, temporary = (x / 2**30 for x in (analysis.argument_size_in_bytes, analysis.temp_size_in_bytes))
    parts = f", {config.train.accumulation} parts a step" if config.train.accumulation > 1 else ""
    return (
        f"memory     {kept:.2f} GiB of parameters, optimizer and batch and {temporary:.2f} GiB for a step, on each "
        f"device (as compiled for {jax.default_backend()}, {config.model.dtype}"
        f"{', remat' if config.model.remat else ''}{parts})"
    )
