"""Searching for a likely output: beam search, greedy search and sampling. Knows scores and a step function, no model.

A step function takes a state (any pytree) and the last token of each row, and gives the log-probabilities of the
next token (float32, normalised) with the state after it. `reorder` gathers the rows of a state. Row b * W + w is
beam w of sentence b.

    beams = start_beams(state, start_B, limits_B, options, length)
    while not finished(beams).all():                       # or beam_search(...), which is all of this
        beams = advance(step, reorder, beams, options, n_steps=16)
        ... take_sentences(beams, those_left, take) ...
    found = hypotheses(beams, n)

Shapes are static and nothing a sentence gets depends on the others, so that a batch may be cut between chunks. What
the rules compute, and why each may stop when it does: docs/decoding.md and `search_rules`. Several models: `ensemble`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from transformer_jax.array_types import Array, Bool, Float, Int
from transformer_jax.best import best, best_of_beams
from transformer_jax.sampling import Sampling, draw_tokens, sentence_keys
from transformer_jax.search_rules import (
    Asked,
    SearchOptions,
    hypothesis_scores,
    length_divisors,
    next_token_scores,
    settled,
)

Step = Callable[[Any, Array], tuple[Array, Any]]
"""(state, tokens_R) -> (log_probs_RV, state)"""
Reorder = Callable[[Any, Array], Any]
"""(state, rows_R) -> the state whose row r is the given one's rows_R[r]"""


class NBest(NamedTuple):
    """The n best outputs of each sentence, best first. Where there are fewer than n: score -inf, length 0."""

    tokens_BNT: Int[Array, "B N T"]
    """Without the start token; the end token, where there is one, is the last; `end_id` also fills what follows."""
    lengths_BN: Int[Array, "B N"]
    """Tokens of each output, the end token included."""
    log_probs_BN: Float[Array, "B N"]
    """Sum of `token_log_probs_BNT`."""
    scores_BN: Float[Array, "B N"]
    """By the length rule, of what the search added up: with penalties and a free forced end, where asked for."""
    token_log_probs_BNT: Float[Array, "B N T"]
    """The step function's own, natural logarithm, whatever rules were on; 0 after the last token."""
    finished_BN: Bool[Array, "B N"]
    """Ended with the end token; False for an output cut at its limit."""


class Hypotheses(NamedTuple):
    """One output per row."""

    tokens_BT: Int[Array, "B T"]
    """Without the start token; the end token, where there is one, is the last; `end_id` also fills what follows."""
    lengths_B: Int[Array, "B"]
    """Tokens of each row, the end token included."""
    log_probs_B: Float[Array, "B"]
    """Sum of the tokens' log-probabilities."""


class Paths(NamedTuple):
    """Tokens with the step function's log-probabilities of them, and their sum."""

    tokens_BWT: Int[Array, "B W T"]
    token_log_probs_BWT: Float[Array, "B W T"]
    log_probs_BW: Float[Array, "B W"]


class Sentences(NamedTuple):
    """The search so far. The leading axis of every array is the sentence."""

    asked: Asked
    live: Paths
    sums_BW: Float[Array, "B W"]
    """What the search adds up for the live hypotheses, best first; -inf: no such hypothesis."""
    done: Paths
    lengths_BW: Int[Array, "B W"]
    scores_BW: Float[Array, "B W"]
    """Of the finished hypotheses, best first; -inf: no such hypothesis."""
    ended_BW: Bool[Array, "B W"]


class BeamState(NamedTuple):
    """Beams between two steps: a value that goes in and comes back."""

    t: Int[Array, ""]
    """Steps so far, the same for all sentences."""
    decoder: Any
    """The state of the step function; `reorder` and `take` know its axes."""
    sentences: Sentences


class _Candidates(NamedTuple):
    """Continuations of one step, best first."""

    parents_BC: Int[Array, "B C"]
    tokens_BC: Int[Array, "B C"]
    sums_BC: Float[Array, "B C"]
    log_probs_BC: Float[Array, "B C"]


def start_beams(
    state: Any,
    start_B: Int[Array, "B"],
    limits_B: Int[Array, "B"],
    options: SearchOptions,
    length: int,
    *,
    min_lengths_B: Int[Array, "B"] | None = None,
    prefix_BP: Int[Array, "B P"] | None = None,
    prefix_lengths_B: Int[Array, "B"] | None = None,
    key: Array | None = None,
    sentence_ids_B: Int[Array, "B"] | None = None,
) -> BeamState:
    """Beams before the first step; `state` has B * beam_size rows.

    `length` is the static room for tokens: limits beyond it end at it. A sentence with limit 0 is finished at once,
    with an empty output of probability 1. `key` and `sentence_ids_B` are for sampling.
    """
    if (prefix_BP is None) != (prefix_lengths_B is None):
        raise ValueError("prefix_BP and prefix_lengths_B come together")
    if (options.sampling is None) != (key is None) or (key is None) != (sentence_ids_B is None):
        raise ValueError("key and sentence_ids_B come with options that sample, and with no others")
    B, W = start_B.shape[0], options.beam_size
    none_B = jnp.zeros((B,), jnp.int32)
    limits_B = jnp.clip(limits_B, 0, length)
    asked = Asked(
        start_B=start_B,
        limits_B=limits_B,
        min_lengths_B=none_B if min_lengths_B is None else min_lengths_B,
        prefix_BP=jnp.zeros((B, 0), jnp.int32) if prefix_BP is None else prefix_BP,
        prefix_lengths_B=none_B if prefix_lengths_B is None else prefix_lengths_B,
        keys_B=None if key is None or sentence_ids_B is None else sentence_keys(key, sentence_ids_B),
    )
    empty = Paths(
        tokens_BWT=jnp.full((B, W, length), options.end_id, jnp.int32),
        token_log_probs_BWT=jnp.zeros((B, W, length), jnp.float32),
        log_probs_BW=jnp.zeros((B, W), jnp.float32),
    )
    # One beam to begin with: W alike would fill the beam with copies.
    first_BW = jnp.broadcast_to(jnp.arange(W) == 0, (B, W))
    open_B1 = (limits_B > 0)[:, None]
    zero = jnp.zeros((), jnp.float32)  # of a fixed type: the state before the first step compiles like any other
    sentences = Sentences(
        asked=asked,
        live=empty,
        sums_BW=jnp.where(first_BW & open_B1, zero, -jnp.inf),
        done=empty,
        lengths_BW=jnp.zeros((B, W), jnp.int32),
        scores_BW=jnp.where(first_BW & ~open_B1, zero, -jnp.inf),
        ended_BW=jnp.zeros((B, W), bool),
    )
    return BeamState(jnp.zeros((), jnp.int32), state, sentences)


def finished(beams: BeamState) -> Bool[Array, "B"]:
    """Sentences whose search is over: a finished search has no live hypothesis."""
    return jnp.all(beams.sentences.sums_BW == -jnp.inf, axis=-1)


def advance(
    step: Step, reorder: Reorder, beams: BeamState, options: SearchOptions, n_steps: int | Int[Array, ""]
) -> BeamState:
    """At most `n_steps` steps further; none more once every sentence is finished."""
    end = beams.t + n_steps

    def going_on(beams: BeamState) -> Array:
        return (beams.t < end) & ~finished(beams).all()

    def extend(beams: BeamState) -> BeamState:
        return _extend(step, reorder, beams, options)

    # A finished sentence does not mind the time, so it is as if all had gone the whole way: devices that each run
    # their own sentences agree on t, and these may then change places.
    return jax.lax.while_loop(going_on, extend, beams)._replace(t=end)


def advance_until(
    step: Step,
    reorder: Reorder,
    beams: BeamState,
    options: SearchOptions,
    few: int | Int[Array, ""],
    total: Callable[[Array], Array] = lambda count: count,
) -> BeamState:
    """Steps until at most `few` sentences are not finished.

    Where each device runs its own sentences, `total` adds a count up over all of them: they go on together and stop
    together, so that sentences may change places afterwards.
    """

    def left(beams: BeamState) -> Array:
        return total(jnp.sum(~finished(beams)))

    def extend(carry: tuple[BeamState, Array]) -> tuple[BeamState, Array]:
        beams = _extend(step, reorder, carry[0], options)
        return beams, left(beams)

    return jax.lax.while_loop(lambda carry: carry[1] > few, extend, (beams, left(beams)))[0]


def take_sentences(
    beams: BeamState, index_X: Int[Array, "X"], take: Callable[[Any, Array], Any] | None = None
) -> BeamState:
    """The beams of these sentences only, in this order.

    An index of -1 fills a place: that sentence is finished and costs nothing, and what `hypotheses` says of it means
    nothing. `take(decoder, index_X)` gathers sentences of the decoder state, which may keep some arrays by sentence
    and some by row (`beam_rows` gives the rows); without it the decoder state stays as it is.
    """
    filled_X = jnp.maximum(index_X, 0)
    sentences = jax.tree.map(lambda x: x[filled_X], beams.sentences)
    sums_XW = jnp.where((index_X >= 0)[:, None], sentences.sums_BW, -jnp.inf)
    decoder = beams.decoder if take is None else take(beams.decoder, filled_X)
    return BeamState(beams.t, decoder, sentences._replace(sums_BW=sums_XW))


def beam_rows(index_X: Int[Array, "X"], beam_size: int) -> Int[Array, "rows"]:
    """The rows of the decoder state that belong to these sentences."""
    return (index_X[:, None] * beam_size + jnp.arange(beam_size)).reshape(-1)


def hypotheses(beams: BeamState, n: int) -> NBest:
    """The n best finished hypotheses; for a sentence whose search goes on, those so far."""
    s = beams.sentences
    W = s.scores_BW.shape[1]
    if not 1 <= n <= W:
        raise ValueError(f"{n} hypotheses asked of a beam of {W}")
    scores_BN = s.scores_BW[:, :n]
    return NBest(
        tokens_BNT=s.done.tokens_BWT[:, :n],
        lengths_BN=s.lengths_BW[:, :n],
        log_probs_BN=jnp.where(scores_BN > -jnp.inf, s.done.log_probs_BW[:, :n], -jnp.inf),
        scores_BN=scores_BN,
        token_log_probs_BNT=s.done.token_log_probs_BWT[:, :n],
        finished_BN=s.ended_BW[:, :n],
    )


def beam_search(
    step: Step,
    reorder: Reorder,
    state: Any,
    start_B: Int[Array, "B"],
    limits_B: Int[Array, "B"],
    options: SearchOptions,
    *,
    length: int,
    min_lengths_B: Int[Array, "B"] | None = None,
    prefix_BP: Int[Array, "B P"] | None = None,
    prefix_lengths_B: Int[Array, "B"] | None = None,
) -> NBest:
    """The `options.n_best` best outputs of each sentence; arguments as of `start_beams`."""
    beams = start_beams(
        state,
        start_B,
        limits_B,
        options,
        length,
        min_lengths_B=min_lengths_B,
        prefix_BP=prefix_BP,
        prefix_lengths_B=prefix_lengths_B,
    )
    return hypotheses(advance(step, reorder, beams, options, length), options.n_best)


def greedy(
    step: Step,
    state: Any,
    start_B: Int[Array, "B"],
    limits_B: Int[Array, "B"],
    *,
    end_id: int,
    length: int,
    suppressed: tuple[int, ...] = (),
) -> Hypotheses:
    """The likeliest token at each step, until every row has ended or is at its own limit.

    `length` is the static room for tokens; row b stops after `limits_B[b]` of them, end token or not. A row with
    limit 0 costs no step. Suppressed ids are never chosen; the log-probabilities of the others are left as they are.
    This is a beam of one, which reorders nothing; `beam_search` with beam_size 1 also gives the tokens'
    log-probabilities.
    """
    options = SearchOptions(end_id=end_id, beam_size=1, suppressed=suppressed)
    found = beam_search(step, _as_it_is, state, start_B, limits_B, options, length=length)
    return Hypotheses(found.tokens_BNT[:, 0], found.lengths_BN[:, 0], found.log_probs_BN[:, 0])


def sample(
    step: Step,
    state: Any,
    start_B: Int[Array, "B"],
    limits_B: Int[Array, "B"],
    key: Array,
    sentence_ids_B: Int[Array, "B"],
    options: SearchOptions,
    *,
    length: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_lengths_B: Int[Array, "B"] | None = None,
    prefix_BP: Int[Array, "B P"] | None = None,
    prefix_lengths_B: Int[Array, "B"] | None = None,
) -> NBest:
    """One output per row (N = 1), each token drawn at random from what `options` and the three filters leave.

    What a row draws follows from `key` and its sentence id: repeat a sentence with other ids for more samples. Of
    `options` the rules on tokens count; its beam is one. The log-probabilities given are the step function's own.
    """
    drawing = Sampling(temperature, top_k, top_p)
    options = dataclasses.replace(options, beam_size=1, n_best=1, sampling=drawing)
    beams = start_beams(
        state,
        start_B,
        limits_B,
        options,
        length,
        min_lengths_B=min_lengths_B,
        prefix_BP=prefix_BP,
        prefix_lengths_B=prefix_lengths_B,
        key=key,
        sentence_ids_B=sentence_ids_B,
    )
    return hypotheses(advance(step, _as_it_is, beams, options, length), 1)


# One step


def _extend(step: Step, reorder: Reorder, beams: BeamState, options: SearchOptions) -> BeamState:
    t, s = beams.t, beams.sentences
    B, W, T = s.live.tokens_BWT.shape
    divisors = jnp.asarray(length_divisors(options, T))
    before_BW = jax.lax.dynamic_index_in_dim(s.live.tokens_BWT, jnp.maximum(t - 1, 0), axis=2, keepdims=False)
    last_BW = jnp.where(t == 0, s.asked.start_B[:, None], before_BW)
    log_probs_RV, decoder = step(beams.decoder, last_BW.reshape(B * W))
    candidates = _candidates(log_probs_RV.reshape(B, W, -1), t, s, options)
    grown = _grow(s.live, candidates, t)

    exists_BC = candidates.sums_BC > -jnp.inf
    ended_BC = candidates.tokens_BC == options.end_id
    closes_BC = exists_BC & (ended_BC | (t + 1 >= s.asked.limits_B)[:, None])
    # Of the 2 W candidates of hf and gnmt the second half is there to keep the beam full, not to finish.
    enters_BC = closes_BC & (jnp.arange(closes_BC.shape[1]) < W)
    scores_BC = hypothesis_scores(candidates.sums_BC, t + 1, divisors, options)
    scores_BC = jnp.where(enters_BC, scores_BC, -jnp.inf)
    scores_BW, kept_BW = best(jnp.concatenate([s.scores_BW, scores_BC], axis=1), W)

    def keep(old_BW: Array, new_BC: Array) -> Array:
        return _pick(jnp.concatenate([old_BW, new_BC], axis=1), kept_BW)

    sums_BW, order_BW = best(jnp.where(exists_BC & ~closes_BC, candidates.sums_BC, -jnp.inf), W)
    over_B = settled(sums_BW[:, 0], scores_BW, t + 1, s.asked.limits_B, divisors, options)
    if W > 1:
        first_row_B1 = jnp.arange(B)[:, None] * W
        decoder = reorder(decoder, (first_row_B1 + _pick(candidates.parents_BC, order_BW)).reshape(B * W))
    sentences = Sentences(
        asked=s.asked,
        live=jax.tree.map(lambda x: _pick(x, order_BW), grown),
        sums_BW=jnp.where(over_B[:, None], -jnp.inf, sums_BW),
        done=jax.tree.map(keep, s.done, grown),
        lengths_BW=keep(s.lengths_BW, jnp.broadcast_to(t + 1, enters_BC.shape)),
        scores_BW=scores_BW,
        ended_BW=keep(s.ended_BW, ended_BC),
    )
    return BeamState(t + 1, decoder, sentences)


def _candidates(
    log_probs_BWV: Float[Array, "B W V"], t: Int[Array, ""], s: Sentences, options: SearchOptions
) -> _Candidates:
    """The best continuations of the live hypotheses; a sum of -inf means that there is none.

    A beam of one has one, marian as many as the beam is wide, hf and gnmt twice that: at most half of those end, so
    that a full beam goes on.
    """
    B, W, V = log_probs_BWV.shape
    gains_BWV = next_token_scores(log_probs_BWV, s.live.tokens_BWT, t, s.asked, options)
    if options.sampling is not None:
        index_BC = draw_tokens(gains_BWV[:, 0], s.asked.keys_B, t, options.sampling)[:, None]
        sums_BC = s.sums_BW + _pick(gains_BWV[:, 0], index_BC)
    else:
        n_candidates = W if W == 1 or options.length_rule == "marian" else min(2 * W, W * V)
        sums_BC, index_BC = best_of_beams(s.sums_BW[:, :, None] + gains_BWV, n_candidates)
    if options.length_rule == "marian":
        # The beam shrinks: a hypothesis that has ended takes its place along.
        width_B1 = W - jnp.sum(s.scores_BW > -jnp.inf, axis=1, keepdims=True)
        sums_BC = jnp.where(jnp.arange(sums_BC.shape[1]) < width_B1, sums_BC, -jnp.inf)
    log_probs_BC = _pick(log_probs_BWV.reshape(B, W * V), index_BC)
    parents_BC = jax.lax.div(index_BC, jnp.full_like(index_BC, V))
    return _Candidates(parents_BC, index_BC - parents_BC * V, sums_BC, log_probs_BC)


def _grow(live: Paths, candidates: _Candidates, t: Int[Array, ""]) -> Paths:
    """The candidates as paths: their parents' with one more token."""

    def append(x_BWT: Array, new_BC: Array) -> Array:
        return jax.lax.dynamic_update_index_in_dim(_pick(x_BWT, candidates.parents_BC), new_BC, t, axis=2)

    return Paths(
        append(live.tokens_BWT, candidates.tokens_BC),
        append(live.token_log_probs_BWT, candidates.log_probs_BC),
        _pick(live.log_probs_BW, candidates.parents_BC) + candidates.log_probs_BC,
    )


def _pick(x_BW: Array, index_BC: Int[Array, "B C"]) -> Array:
    """Of each sentence the entries at these places: (B, W, ..) -> (B, C, ..)."""
    if x_BW.shape[1] == index_BC.shape[1] == 1:
        return x_BW
    index = index_BC.reshape(index_BC.shape + (1,) * (x_BW.ndim - 2))
    return jnp.take_along_axis(x_BW, index, axis=1, mode="promise_in_bounds")


def _as_it_is(state: Any, rows_R: Array) -> Any:
    """The `reorder` of beams of one, which stay where they are."""
    return state
