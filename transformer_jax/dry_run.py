"""`train.py --dry-run`: what a run would take - parameters, memory, arithmetic, days, and padding where its text is."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from transformer_jax.batching import Batch, padding_share, rows_within
from transformer_jax.config import ModelConfig, RunConfig, replace
from transformer_jax.errors import AbsentError
from transformer_jax.model import Transformer
from transformer_jax.optimizer import adam
from transformer_jax.packing import make_layout
from transformer_jax.pretrained import Pretrained
from transformer_jax.rewritten_text import new_sides
from transformer_jax.run_data import find_task, find_tokenizer, read_texts, training_pairs
from transformer_jax.run_folder import RunFolder
from transformer_jax.run_model import (
    check_backward,
    check_devices,
    check_lengths,
    fit_model,
    load_initial,
    model_line,
    within_the_model,
)
from transformer_jax.sharding import data_mesh
from transformer_jax.tokenizer import CharacterTokenizer, load_tokenizer
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
(§5.2: on eight P100, 0.4 s a step of base is 29% and 1.0 s of big 39%); small models on fast devices reach less."""

SAMPLE_PAIRS = 100_000
"""Padding is measured on so many pairs at most, the first of the text."""


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
    if data.batch_tokens is None:
        return data.batch_size, length
    return rows_within(data.batch_tokens, length, data.rows_multiple), length


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


def resolve(config: RunConfig, n_devices: int, initial: Pretrained | None) -> RunConfig:
    """The run with its model as it will be, and with the checks that a run of so many devices makes; `initial` is
    the model that it starts from. A vocabulary that is to be trained is taken to have as many entries as it may."""
    data = config.data
    if initial is not None:
        config = dataclasses.replace(within_the_model(config, initial.config), model=initial.config)
    elif data.tokenizer is not None:
        config = dataclasses.replace(config, model=fit_model(config.model, load_tokenizer(data.tokenizer)))
    elif data.task is not None:
        alphabet = CharacterTokenizer(find_task(data.task).characters)
        config = dataclasses.replace(config, model=fit_model(config.model, alphabet))
    elif not config.model.vocab_size:
        config = replace(config, **{"model.vocab_size": data.vocab_size})
    check_lengths(config.data, config.model)
    check_devices(config, n_devices)
    check_backward(config)
    return config


def describe(
    config: RunConfig, accelerator: str = "H100", n_devices: int = 8, *, compiled: bool = True, padding: bool = True
) -> list[str]:
    """The lines that a dry run prints. Two of them take a while and can be left out: memory, which is that of the
    `compiled` step, and `padding`, which is measured on the text."""
    initial = load_initial(config)
    config = resolve(config, n_devices, initial)
    m, data, train = config.model, config.data, config.train
    rows, length = batch_shape(config)
    tokens = rows * length
    # R-Drop reads a batch twice; a layer that is computed again makes four products of three.
    flops = training_flops(m, tokens, tokens, length, length) * (2 if train.r_drop else 1) * (4 / 3 if m.remat else 1)
    peak, number = ACCELERATORS[accelerator]
    seconds = flops / (n_devices * peak * UTILISATION)
    total = f"{flops * train.steps:.2e} FLOP for {train.steps:,} steps"
    time = f"{_duration(seconds * train.steps)} for all"
    if train.epochs is not None:
        total = f"as many steps as {train.epochs} epochs of the text have"
        time = f"{_duration(seconds * 1000)} for 1,000"
    one_program = data.batching == "packed" or data.n_buckets == 1
    lines = [
        model_line(m),
        *([_teacher_line(config)] if config.teacher.weight else []),
        f"batch      {rows:,} rows of {length:,} slots a side, {tokens:,} + {tokens:,} in all ({data.batching}), over "
        f"{n_devices} devices",
        *([padding_line(config, initial)] if padding else []),
        f"programs   {1 if one_program else f'at most {data.n_buckets}'} for training",
        f"arithmetic {flops / 1e12:.3g} TFLOP a step, {total}",
        f"time       {seconds:.2g} s a step, {time} on {n_devices} {accelerator} (peak {peak / 1e12:,.0f} TFLOP/s each "
        f"in {number}, of which {UTILISATION:.0%} is assumed; the run is in {m.dtype})",
    ]
    return [*lines, memory_line(config, n_devices)] if compiled else lines


def padding_line(config: RunConfig, initial: Pretrained | None = None) -> str:
    """What share of a batch's slots would hold no token; where the text is not there, the line tells that.

    The tokenizer is that of `initial`, the model that the run starts from, or one trained on a sample of the text where
    the run would train one. Nothing is left behind on the disk.
    """
    limit = min(SAMPLE_PAIRS, config.data.limit or SAMPLE_PAIRS)
    data = dataclasses.replace(config.data, limit=limit, vocab_lines=min(limit, config.data.vocab_lines), cache=None)
    with tempfile.TemporaryDirectory() as name:
        folder = RunFolder(Path(name) / "run")
        try:
            texts = read_texts(data, download=False)
            tokenizer = find_tokenizer(data, texts, progress=False) if initial is None else initial.tokenizer
            folder.create()
            tokenizer.save(folder.tokenizer)
            pairs, _ = training_pairs(data, texts, tokenizer, tokenizer.start_id, folder)
        except AbsentError as error:
            return f"padding    not measured: {error}"
        layout = make_layout(pairs, data)
        share, n = padding_share(pairs, layout), len(pairs)
        shapes = "1 shape" if len(layout.shapes) == 1 else f"{len(layout.shapes)} shapes"
    return f"padding    {share:.1%} of all slots ({data.batching}, {shapes}; of {n:,} pairs)"


def _teacher_line(config: RunConfig) -> str:
    """What comes before the run; the other lines are of the run itself, and of the text as it is."""
    sides = " and once more to ".join(side + "s" for side in new_sides(config.data))
    train, epochs = config.train, config.teacher.epochs or config.train.epochs
    length = f"{train.steps:,} steps" if epochs is None else f"{epochs} epochs of the text as it is"
    return f"teacher    first a run of {length}, then the text translated once to {sides}; not counted below"


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.2g} seconds"


def memory_line(config: RunConfig, n_devices: int) -> str:
    analysis = device_step(config, n_devices).memory_analysis()
    kept, temporary = (x / 2**30 for x in (analysis.argument_size_in_bytes, analysis.temp_size_in_bytes))
    parts = f", {config.train.accumulation} parts a step" if config.train.accumulation > 1 else ""
    return (
        f"memory     {kept:.2f} GiB of parameters, optimizer and batch and {temporary:.2f} GiB for a step, on each "
        f"device (as compiled for {jax.default_backend()}, {config.model.dtype}"
        f"{', remat' if config.model.remat else ''}{parts})"
    )
