"""The Transformer as a step function for `search`, in a few programs of static shapes.

When few sentences of a batch are left, they move together into a smaller shape, so that one long line does not hold
sixty-three short ones: two programs for each length of source, whatever the text. Keys and values stay where they are:
those of cross-attention are shared by a sentence's beams, and of self-attention each beam looks at its ancestors'.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from transformer_jax.array_types import Array, Float, Int
from transformer_jax.config import ModelConfig
from transformer_jax.model import DecoderState, Transformer
from transformer_jax.search import (
    BeamState,
    Hypotheses,
    NBest,
    Sentences,
    advance_until,
    greedy,
    hypotheses,
    start_beams,
    take_sentences,
)
from transformer_jax.search_rules import SearchOptions
from transformer_jax.sharding import DATA, replicate, to_host
from transformer_jax.source_tiles import SourceTiles, encode_tiles
from transformer_jax.stopwatch import Stopwatch

FUSED_ROWS = 64
"""Rows of logits up to which their product may be fused with their maximum."""
SHRINK = 4
"""When so many times fewer sentences are left, they move together into a shape with so many times fewer rows."""


def never_generated(config: ModelConfig, suppressed: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Padding, start and the given ids: what a search must not choose."""
    never = {config.pad_id, config.start_id, *suppressed} - {config.end_id}
    return tuple(sorted(i for i in never if i < config.vocab_size))


def row_sizes(full: int, n_devices: int) -> tuple[int, int]:
    """Rows of a full batch, and of the smaller one that is for what is left of it or for few sentences."""
    full_rows, few_rows = (-(-n // n_devices) * n_devices for n in (full, -(-full // SHRINK)))
    return full_rows, few_rows


class BatchDecoder:
    """The compiled programs of one model and one set of search options.

    Each device decodes its own sentences; all go on until few are left in the whole batch. A program is compiled once
    per shape: rows, source length, room for tokens.
    """

    def __init__(
        self, model: Transformer, mesh: Mesh, options: SearchOptions, stopwatch: Stopwatch | None = None
    ) -> None:
        self.model, self.mesh, self.options, self.stopwatch = model, mesh, options, stopwatch
        rows, everywhere = PartitionSpec(DATA), PartitionSpec()
        # What all devices have alike in a BeamState are the two step counters; all else goes by sentence.
        decoder: Any = DecoderState(rows, rows, rows, rows, step=everywhere)  # type: ignore[arg-type]
        beams = BeamState(t=everywhere, decoder=decoder, sentences=rows)  # type: ignore[arg-type]
        self._beams_sharding = jax.tree.map(
            lambda spec: NamedSharding(mesh, spec), beams, is_leaf=lambda x: isinstance(x, PartitionSpec)
        )

        def on_devices(f: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
            # check_vma: a search starts from constants, alike everywhere, and goes on with rows that differ.
            return jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

        def run(params: Any, state: BeamState, few: Array) -> BeamState:
            def total(count: Array) -> Array:
                return jax.lax.psum(count, DATA)

            step = step_function(model, params)
            return advance_until(step, reorder_beams, state, options, few, total)

        @functools.partial(jax.jit, static_argnames="length")
        def start(params: Any, seed: Array, few: Array, sources: SourceTiles, asked: Any, length: int):
            """The search of a batch until `few` sentences are left."""

            def begin(params: Any, seed: Array, few: Array, *batch: Any) -> BeamState:
                key = jax.random.key(seed)
                return run(params, start_search(model, options, params, key, *batch, length=length), few)

            specs = (everywhere, everywhere, everywhere, rows, rows)
            return on_devices(begin, specs, beams)(params, seed, few, sources, asked)

        @jax.jit
        def finish(params: Any, state: BeamState, index_X: Array) -> BeamState:
            """The rest of the search, for the sentences that are left."""
            state = take_sentences(state, index_X, take_decoder)
            # The specs of a BeamState are a prefix of its tree: the counters alike, the rest by sentence.
            state = jax.lax.with_sharding_constraint(state, _like(self._beams_sharding, state))
            return on_devices(run, (everywhere, beams, everywhere), beams)(params, state, jnp.asarray(0))

        self._start, self._finish = start, finish

    def n_programs(self) -> int:
        """How many programs have been compiled."""
        functions: tuple[Any, ...] = (self._start, self._finish)
        return sum(function._cache_size() for function in functions)

    def decode(
        self,
        params: Any,
        sources: SourceTiles,
        asked: dict[str, Array],
        length: int,
        few_rows: int,
        seed: int = 0,
    ) -> NBest:
        """Outputs of a batch, on the host. `asked` are the arguments of `search.start_beams` that go by sentence, at
        least limits_B; the batch shrinks to `few_rows` when so few are left (B: never); `seed` is for sampling."""
        B, n = len(sources.places_BS), self.options.n_best
        numbers = (np.asarray(seed), np.asarray(few_rows if few_rows < B else 0))
        with self._measure("decode"):
            state = self._start(params, *replicate(numbers, self.mesh), sources, asked, length=length)
            sentences = to_host(state.sentences)
            found = _n_best(sentences, n)
            left = np.flatnonzero(np.any(np.asarray(sentences.sums_BW) > -np.inf, axis=1))
            if len(left):
                index = np.full(few_rows, -1, np.int32)
                index[: len(left)] = left
                state = self._finish(params, state, replicate(index, self.mesh))
                for whole, part in zip(found, _n_best(to_host(state.sentences), n), strict=True):
                    np.asarray(whole)[left] = np.asarray(part)[: len(left)]
        return found

    def _measure(self, name: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.stopwatch is None else self.stopwatch.measure(name)


def _n_best(sentences: Sentences, n: int) -> NBest:
    """`search.hypotheses` of arrays on the host, to be written to."""
    state = BeamState(t=np.asarray(0), decoder=None, sentences=sentences)  # type: ignore[arg-type]
    return NBest(*(np.array(x) for x in hypotheses(state, n)))  # type: ignore[arg-type]


def _like(prefix: BeamState, state: BeamState) -> BeamState:
    """The shardings of a prefix of the tree, for every leaf."""
    return jax.tree.map(
        lambda sharding, part: jax.tree.map(lambda _: sharding, part),
        prefix,
        state,
        is_leaf=lambda x: isinstance(x, NamedSharding),
    )


def step_function(model: Transformer, params: Any) -> Callable[[DecoderState, Array], tuple[Array, DecoderState]]:
    """The model as the search sees it: (state, last tokens) -> (log-probabilities of the next, state)."""

    def step(state: DecoderState, tokens_R: Int[Array, "R"]) -> tuple[Array, DecoderState]:
        logits_R1V, state = model.apply({"params": params}, state, tokens_R[:, None], method="decode_step")  # type: ignore[misc]
        return log_softmax(logits_R1V[:, 0]), state

    return step


def log_softmax(logits_RV: Float[Array, "R V"]) -> Float[Array, "R V"]:
    """`jax.nn.log_softmax` of a step's logits.

    XLA's CPU backend fuses a maximum with the product before it. For many rows that product is then three times slower
    (docs/performance.md), so there the maximum is written as a comparison, which it leaves alone.
    """
    if len(logits_RV) <= FUSED_ROWS:
        return jax.nn.log_softmax(logits_RV)
    higher = jax.lax.reduce(logits_RV, -jnp.inf, lambda a, b: jax.lax.select(a > b, a, b), (1,))
    shifted_RV = logits_RV - higher[:, None]
    return shifted_RV - jnp.log(jnp.sum(jnp.exp(shifted_RV), axis=1, keepdims=True))


def start_search(
    model: Transformer,
    options: SearchOptions,
    params: Any,
    key: Array,
    sources: SourceTiles,
    asked: dict[str, Array],
    *,
    length: int,
) -> BeamState:
    """Encodes the sources, and the beams before the first step."""
    memory_BSD, segments_BS = encode_tiles(model, params, sources), sources.segments_BS
    state: Any = model.apply(
        {"params": params}, memory_BSD, segments_BS, length, options.beam_size, method="start_decoding"
    )
    start_B = jnp.full(segments_BS.shape[:1], model.config.start_id, jnp.int32)
    asked = dict(asked, **({} if options.sampling is None else {"key": key}))
    return start_beams(state, start_B, asked.pop("limits_B"), options, length, **asked)


def reorder_beams(state: DecoderState, rows_R: Int[Array, "R"]) -> DecoderState:
    """The state whose beams are these, each one of its own sentence's."""
    B, W, T = state.ancestors_BWT.shape
    ancestors_RT = state.ancestors_BWT.reshape(B * W, T).at[rows_R].get(mode="promise_in_bounds")
    return dataclasses.replace(state, ancestors_BWT=ancestors_RT.reshape(B, W, T))


def take_decoder(state: DecoderState, index_X: Int[Array, "X"]) -> DecoderState:
    """The state of these sentences."""
    taken = jax.tree.map(lambda x: x[index_X] if x.ndim else x, state)
    return dataclasses.replace(taken, step=state.step)


def make_decode(model: Transformer, mesh: Mesh, suppressed: tuple[int, ...] = ()) -> Callable[..., Hypotheses]:
    """Greedy translation of a batch in one program: (params, source ids, source segments, limits, length=room)."""
    never = never_generated(model.config, suppressed)
    rows, everywhere = PartitionSpec(DATA), PartitionSpec()

    def decode(params: Any, ids_BS: Array, segments_BS: Array, limits_B: Array, length: int) -> Hypotheses:
        variables = {"params": params}
        memory_BSD = model.apply(variables, ids_BS, segments_BS, method="encode")
        state = model.apply(variables, memory_BSD, segments_BS, length, method="start_decoding")
        start_B = jnp.full(limits_B.shape, model.config.start_id, jnp.int32)
        step = step_function(model, params)
        return greedy(step, state, start_B, limits_B, end_id=model.config.end_id, length=length, suppressed=never)

    @functools.partial(jax.jit, static_argnames="length")
    def decode_rows(params: Any, ids_BS: Array, segments_BS: Array, limits_B: Array, length: int) -> Hypotheses:
        return jax.shard_map(
            functools.partial(decode, length=length),
            mesh=mesh,
            in_specs=(everywhere, rows, rows, rows),
            out_specs=rows,
            check_vma=False,
        )(params, ids_BS, segments_BS, limits_B)

    return decode_rows


class Scorer:
    """The compiled program that scores given targets (teacher forcing)."""

    def __init__(self, model: Transformer, mesh: Mesh) -> None:
        rows, everywhere = PartitionSpec(DATA), PartitionSpec()

        def score(params: Any, ids_BS: Array, segments_BS: Array, inputs_BT: Array, outputs_BT: Array) -> Array:
            logits_BTV: Any = model.apply({"params": params}, ids_BS, inputs_BT, segments_BS)
            log_probs_BTV = jax.nn.log_softmax(logits_BTV)
            return jnp.take_along_axis(log_probs_BTV, outputs_BT[..., None], axis=-1)[..., 0]

        self.score = jax.jit(
            jax.shard_map(score, mesh=mesh, in_specs=(everywhere, rows, rows, rows, rows), out_specs=rows)
        )
        """(params, source ids, segments, target inputs, target outputs) -> log-probability of each output token"""
