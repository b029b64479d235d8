"""Searching on step functions whose best paths are known: by hand, by trying everything, or from other software."""

from __future__ import annotations

import itertools
import json
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import load_program

from transformer_jax.best import best, best_of_beams
from transformer_jax.ensemble import average_log_probs, reorder_each
from transformer_jax.errors import UserError
from transformer_jax.sampling import Sampling
from transformer_jax.search import (
    BeamState,
    Hypotheses,
    NBest,
    Step,
    advance,
    beam_rows,
    beam_search,
    finished,
    greedy,
    hypotheses,
    sample,
    start_beams,
    take_sentences,
)
from transformer_jax.search_rules import SearchOptions

A, B, C, END = 0, 1, 2, 3
START = 4
# Rows: the last token; columns: the next one. From the start A; A -> B, B -> C, C -> END.
CHAIN = np.array(
    [
        [0.10, 0.60, 0.20, 0.09, 0.01],
        [0.10, 0.20, 0.50, 0.19, 0.01],
        [0.30, 0.10, 0.15, 0.44, 0.01],
        [0.25, 0.25, 0.25, 0.24, 0.01],
        [0.70, 0.10, 0.10, 0.09, 0.01],
    ]
)


def follow(table: jax.Array, tokens_B: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A step of the chain whose table of log-probabilities is the state."""
    return table[tokens_B], table


search_program = jax.jit(greedy, static_argnums=0, static_argnames=("end_id", "length", "suppressed"))


def search(
    limits: list[int],
    starts: list[int] | None = None,
    chain: np.ndarray = CHAIN,
    step: Step = follow,
    length: int = 8,
    suppressed: tuple[int, ...] = (),
) -> Hypotheses:
    table = jnp.log(jnp.asarray(chain, jnp.float32))
    start_B, limits_B = jnp.asarray(starts or [START] * len(limits), jnp.int32), jnp.asarray(limits, jnp.int32)
    found = search_program(step, table, start_B, limits_B, end_id=END, length=length, suppressed=suppressed)
    return jax.device_get(found)


def test_the_likeliest_path_of_a_known_chain_and_its_probability() -> None:
    found = search([8])
    assert found.tokens_BT[0].tolist() == [A, B, C, END, END, END, END, END]
    assert found.lengths_B.tolist() == [4]
    assert found.log_probs_B[0] == pytest.approx(np.log(0.70 * 0.60 * 0.50 * 0.44), abs=1e-6)


def test_each_row_stops_at_its_own_limit() -> None:
    found = search([1, 2, 3, 4, 8])
    assert found.lengths_B.tolist() == [1, 2, 3, 4, 4]
    assert found.tokens_BT[:, :4].tolist() == [
        [A, END, END, END],
        [A, B, END, END],
        [A, B, C, END],
        [A, B, C, END],
        [A, B, C, END],
    ]
    by_hand = np.log(np.cumprod([0.70, 0.60, 0.50, 0.44]))
    np.testing.assert_allclose(found.log_probs_B, by_hand[[0, 1, 2, 3, 3]], atol=1e-6)


def test_a_row_with_limit_0_has_no_token_and_probability_1() -> None:
    found = search([0, 8])
    assert found.lengths_B.tolist() == [0, 4]
    assert found.log_probs_B[0] == 0.0
    assert found.tokens_BT[0].tolist() == [END] * 8


def test_rows_that_are_all_at_limit_0_cost_no_step() -> None:
    def step(state: Any, tokens_B: jax.Array) -> tuple[jax.Array, Any]:
        jax.debug.callback(lambda: calls.append(1))
        return follow(state, tokens_B)

    calls: list[int] = []
    search([0, 0], step=step)
    jax.effects_barrier()
    assert calls == []
    search([2, 1], step=step)
    jax.effects_barrier()
    assert len(calls) == 2  # and no step after the last row has ended


def test_limits_beyond_the_room_end_at_the_room() -> None:
    found = search([100], length=3)
    assert found.tokens_BT.tolist() == [[A, B, C]]
    assert found.lengths_B.tolist() == [3]


def test_an_end_token_first_is_an_output_of_one_token() -> None:
    ends_at_once = CHAIN.copy()
    ends_at_once[START] = [0.1, 0.1, 0.1, 0.69, 0.01]
    found = search([8], chain=ends_at_once)
    assert found.lengths_B.tolist() == [1]
    assert found.tokens_BT[0].tolist() == [END] * 8
    assert found.log_probs_B[0] == pytest.approx(np.log(0.69), abs=1e-6)


def test_suppressed_ids_are_never_chosen_and_others_keep_their_probability() -> None:
    found = search([8], suppressed=(B, START))
    # A -> C (0.20, as B is forbidden), C -> END
    assert found.tokens_BT[0, :3].tolist() == [A, C, END]
    assert found.log_probs_B[0] == pytest.approx(np.log(0.70 * 0.20 * 0.44), abs=1e-6)


def test_a_chain_that_never_ends_is_cut_at_the_limit() -> None:
    loop = np.full((5, 5), 0.05)
    loop[:, B] = 0.8
    found = search([5], chain=loop)
    assert found.tokens_BT[0, :5].tolist() == [B] * 5
    assert found.lengths_B.tolist() == [5]
    assert found.log_probs_B[0] == pytest.approx(5 * np.log(0.8), abs=1e-5)


def test_the_state_is_handed_from_step_to_step() -> None:
    """The n-th token is n: only a state that comes back can count."""

    def step(state: jax.Array, tokens_B: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.log(0.01 + 0.9 * jax.nn.one_hot(jnp.full(tokens_B.shape, state), 8)), state + 1

    found = greedy(step, jnp.asarray(0), jnp.zeros(1, jnp.int32), jnp.asarray([7]), end_id=6, length=7)
    assert found.tokens_BT.tolist() == [[0, 1, 2, 3, 4, 5, 6]]


def test_rows_do_not_influence_one_another() -> None:
    """A row alone gives what it gives in company, bit for bit, in any place of the batch."""
    rng = np.random.default_rng(0)
    chain = rng.dirichlet(np.ones(5), 5)
    starts, limits = rng.integers(0, 5, 12).tolist(), rng.integers(0, 9, 12).tolist()
    together = search(limits, starts, chain)
    for row in range(12):
        alone = search([limits[row]], [starts[row]], chain)
        assert alone.tokens_BT[0].tolist() == together.tokens_BT[row].tolist()
        assert alone.lengths_B[0] == together.lengths_B[row]
        assert alone.log_probs_B[0] == together.log_probs_B[row]
    order = rng.permutation(12)
    moved = search([limits[i] for i in order], [starts[i] for i in order], chain)
    np.testing.assert_array_equal(moved.tokens_BT, together.tokens_BT[order])


def test_scores_equal_a_loop_written_in_python() -> None:
    rng = np.random.default_rng(1)
    for _ in range(5):
        chain = rng.dirichlet(np.ones(5), 5)
        limit = int(rng.integers(1, 9))
        token, tokens, log_prob = START, [], 0.0
        while len(tokens) < limit and token != END:
            following = int(np.argmax(chain[token]))
            log_prob += float(np.log(chain[token][following]))
            token = following
            tokens.append(token)
        found = search([limit], chain=chain)
        assert found.tokens_BT[0, : found.lengths_B[0]].tolist() == tokens
        assert found.log_probs_B[0] == pytest.approx(log_prob, abs=1e-5)


# Beam search on toys


class Rows(NamedTuple):
    """State of a toy: what it knows of the rows, in arrays of which each row has an entry, and what all share."""

    shared: jax.Array
    by_row: tuple[jax.Array, ...]


def pick_rows(state: Rows, rows_R: jax.Array) -> Rows:
    return Rows(state.shared, tuple(x[rows_R] for x in state.by_row))


def pick_sentences(W: int) -> Any:
    return lambda state, index_X: pick_rows(state, beam_rows(index_X, W))


def follow_chain(state: Rows, tokens_R: jax.Array) -> tuple[jax.Array, Rows]:
    """A chain for each sentence and step: log-probabilities shared[sentence, step, last token]."""
    sentence_R, t_R = state.by_row
    return state.shared[sentence_R, t_R, tokens_R], Rows(state.shared, (sentence_R, t_R + 1))


def chain_state(log_probs: np.ndarray, B: int, W: int, sentences: list[int] | None = None) -> Rows:
    """`log_probs` is (B, T, V, V), or (V, V) for one chain at all times."""
    if log_probs.ndim == 2:
        log_probs = np.broadcast_to(log_probs, (B, 12, *log_probs.shape))
    sentence_R = jnp.repeat(jnp.asarray(sentences or list(range(B)), jnp.int32), W)
    return Rows(jnp.asarray(log_probs, jnp.float32), (sentence_R, jnp.zeros(B * W, jnp.int32)))


beam_program = jax.jit(beam_search, static_argnums=(0, 1, 5), static_argnames="length")
start_program = jax.jit(start_beams, static_argnames=("options", "length"))
advance_program = jax.jit(advance, static_argnums=(0, 1, 3))


def beam(
    log_probs: np.ndarray,
    limits: list[int],
    *,
    starts: list[int] | None = None,
    length: int = 8,
    min_lengths: list[int] | None = None,
    prefixes: list[list[int]] | None = None,
    step: Step = follow_chain,
    **options: Any,
) -> NBest:
    choices = SearchOptions(end_id=0, **options)
    B = len(limits)
    asked: dict[str, Any] = {}
    if min_lengths is not None:
        asked["min_lengths_B"] = jnp.asarray(min_lengths, jnp.int32)
    if prefixes is not None:
        P = max(map(len, prefixes))
        asked["prefix_BP"] = jnp.asarray([p + [9] * (P - len(p)) for p in prefixes], jnp.int32)
        asked["prefix_lengths_B"] = jnp.asarray(list(map(len, prefixes)), jnp.int32)
    found = beam_program(
        step,
        pick_rows,
        chain_state(log_probs, B, choices.beam_size),
        jnp.asarray(starts or [1] * B, jnp.int32),
        jnp.asarray(limits, jnp.int32),
        choices,
        length=length,
        **asked,
    )
    return jax.device_get(found)


def outputs(found: NBest, b: int) -> list[list[int]]:
    """Token lists of one sentence, best first; checks what must hold of every result on the way."""
    lists = []
    exists_N = found.scores_BN[b] > -np.inf
    assert exists_N.tolist() == sorted(exists_N.tolist(), reverse=True)
    assert (np.diff(found.scores_BN[b][exists_N]) <= 0).all()
    for n, exists in enumerate(exists_N):
        L = found.lengths_BN[b, n]
        if not exists:
            assert (L, found.log_probs_BN[b, n], bool(found.finished_BN[b, n])) == (0, -np.inf, False)
            continue
        tokens = found.tokens_BNT[b, n]
        assert (tokens[L:] == 0).all()
        assert (found.token_log_probs_BNT[b, n, L:] == 0).all()
        assert found.log_probs_BN[b, n] == pytest.approx(found.token_log_probs_BNT[b, n].sum(), abs=1e-4)
        assert found.finished_BN[b, n] == (L > 0 and tokens[L - 1] == 0)
        assert 0 not in tokens[: max(0, L - 1)]
        lists.append(tokens[:L].tolist())
    assert len({tuple(tokens) for tokens in lists}) == len(lists)
    return lists


# Ends at 0; from the start, token 1, to 2 with 0.6 and to 3 with 0.4; 2 -> 2 0, 3 0.35, 1 0.4, end 0.25.
BY_HAND = np.log(
    np.array(
        [
            [1.00, 1e-9, 1e-9, 1e-9],
            [1e-9, 1e-9, 0.60, 0.40],
            [0.25, 0.40, 1e-9, 0.35],
            [0.90, 0.05, 0.05, 1e-9],
        ]
    )
)


def test_the_best_paths_of_a_chain_worked_out_by_hand() -> None:
    """Greedy goes to 2, 1, 2, 1, ..; the likeliest outputs are 3 end (0.36), 2 3 end (0.189), 2 end (0.15)."""
    found = beam(BY_HAND, [8], beam_size=4, n_best=3, length_penalty=0.0)
    assert outputs(found, 0) == [[3, 0], [2, 3, 0], [2, 0]]
    np.testing.assert_allclose(np.exp(found.scores_BN[0]), [0.36, 0.6 * 0.35 * 0.9, 0.15], rtol=1e-5)
    # divided by the length, 2 3 end (0.574 a token) comes before 2 end (0.387), and behind 3 end (0.6)
    by_length = beam(BY_HAND, [8], beam_size=4, n_best=3, length_penalty=1.0)
    assert outputs(by_length, 0)[:2] == [[3, 0], [2, 3, 0]]
    np.testing.assert_allclose(np.exp(by_length.scores_BN[0, :2]), [0.6, 0.189 ** (1 / 3)], rtol=1e-5)
    assert outputs(beam(BY_HAND, [5], beam_size=1), 0) == [[2, 1, 2, 1, 2]]


def enumerate_outputs(log_probs: np.ndarray, start: int, limit: int) -> list[tuple[list[int], float, list[float]]]:
    """Every output of one sentence's chain: tokens, sum, and log-probability of each token."""
    V = log_probs.shape[-1]
    found: list[tuple[list[int], float, list[float]]] = []

    def extend(tokens: list[int], gains: list[float]) -> None:
        if len(tokens) == limit or (tokens and tokens[-1] == 0):
            found.append((tokens, sum(gains), gains))
            return
        for v in range(V):
            gain = float(log_probs[len(tokens), tokens[-1] if tokens else start, v])
            extend([*tokens, v], [*gains, gain])

    extend([], [])
    return found


def rule_score(rule: str, alpha: float, total: float, length: int) -> float:
    return total / (((5 + length) / 6) if rule == "gnmt" else length) ** alpha


LIMITS = [6, 6, 5, 3, 1]
ALL = 1100  # there are 3^0 + 3^1 + .. + 3^5 outputs that end and 3^6 that do not, 1093 in all
CHAINS = np.log(np.random.default_rng(3).dirichlet(np.full(4, 0.8), (5, 6, 4)) + 1e-4)


def expected_nbest(rule: str, alpha: float, b: int, keep: Any = lambda tokens: True) -> list[tuple[float, list[int]]]:
    every = enumerate_outputs(CHAINS[b], 1 + b % 3, LIMITS[b])
    scored = [(rule_score(rule, alpha, total, len(tokens)), tokens) for tokens, total, _ in every if keep(tokens)]
    return sorted(scored, key=lambda pair: -pair[0])


def agree(found: NBest, b: int, expected: list[tuple[float, list[int]]]) -> None:
    """Same scores in order, and the same outputs but for the order of near ties."""
    n = found.scores_BN.shape[1]
    lists = outputs(found, b)
    assert len(lists) == min(n, len(expected))
    scores = np.array([score for score, _ in expected[: len(lists)]])
    np.testing.assert_allclose(found.scores_BN[b, : len(lists)], scores, rtol=2e-5, atol=2e-5)
    by_tokens = {tuple(tokens): score for score, tokens in expected}
    for tokens, score in zip(lists, found.scores_BN[b], strict=False):
        assert by_tokens[tuple(tokens)] == pytest.approx(score, rel=2e-5, abs=2e-5)
    assert lists[0] == expected[0][1]


STARTS = [1 + b % 3 for b in range(5)]


@pytest.mark.parametrize("alpha", [-1.0, 0.0, 0.6, 1.0, 2.0])
@pytest.mark.parametrize("rule", ["hf", "gnmt", "marian"])
def test_a_beam_that_holds_everything_finds_what_trying_everything_finds(rule: str, alpha: float) -> None:
    """gnmt stops as soon as 20 are safe; hf (its beam is never full) and marian search to the end."""
    found = beam(
        CHAINS, LIMITS, starts=STARTS, length=6, beam_size=ALL, n_best=20, length_rule=rule, length_penalty=alpha
    )
    for b in range(5):
        agree(found, b, expected_nbest(rule, alpha, b))


def test_all_1093_outputs_are_listed_and_no_more() -> None:
    found = beam(
        CHAINS, LIMITS, starts=STARTS, length=6, beam_size=ALL, n_best=ALL, length_rule="gnmt", length_penalty=0.6
    )
    for b in range(5):
        agree(found, b, expected_nbest("gnmt", 0.6, b))
    assert [len(outputs(found, b)) for b in range(5)] == [1093, 1093, 364, 40, 4]


def test_prefixes_and_least_lengths_leave_the_best_of_what_they_allow() -> None:
    least, prefixes = [5, 3, 0, 9, 0], [[], [2, 0], [3, 3], [1], [2, 2, 2]]
    found = beam(
        CHAINS,
        LIMITS,
        starts=STARTS,
        length=6,
        min_lengths=least,
        prefixes=prefixes,
        beam_size=ALL,
        n_best=20,
        length_penalty=0.6,
    )
    for b in range(5):

        def allowed(tokens: list[int], b: int = b) -> bool:
            given = prefixes[b][: LIMITS[b]]
            # an end that is given is not too early
            long_enough = tokens[-1] != 0 or len(tokens) >= least[b] or tokens == given
            return tokens[: len(given)] == given and long_enough

        expected = expected_nbest("hf", 0.6, b, allowed)
        assert expected
        agree(found, b, expected)


@pytest.mark.parametrize(("rule", "alpha"), [("gnmt", -1.0), ("gnmt", 1.5), ("hf", -1.0), ("hf", 0.0), ("hf", 1.5)])
def test_a_safe_stop_comes_before_the_limit_and_not_before_the_winner(rule: str, alpha: float) -> None:
    early: Any = {"early_stopping": "never"} if rule == "hf" else {}
    options = SearchOptions(end_id=0, beam_size=ALL, n_best=3, length_rule=rule, length_penalty=alpha, **early)
    state = chain_state(CHAINS, 5, ALL)
    start = SearchOptions(end_id=0, beam_size=ALL)  # the rest does not matter before the first step
    beams = start_program(state, jnp.asarray(STARTS), jnp.asarray(LIMITS), options=start, length=6)
    stopped = {}
    for t in range(1, 7):
        beams = advance_program(follow_chain, pick_rows, beams, options, 1)
        for b in np.flatnonzero(finished(beams)).tolist():
            stopped.setdefault(b, t)
    assert sorted(stopped) == [0, 1, 2, 3, 4]
    found = jax.device_get(hypotheses(beams, 3))
    for b in range(5):
        expected = expected_nbest(rule, alpha, b)
        agree(found, b, expected)
        # not later than needed: at the first step at which no open output can still enter the best three
        assert stopped[b] == first_safe_step(rule, alpha, b, [score for score, _ in expected[:3]])


def first_safe_step(rule: str, alpha: float, b: int, best: list[float]) -> int:
    every = enumerate_outputs(CHAINS[b], STARTS[b], LIMITS[b])
    for t in range(1, LIMITS[b]):
        done = sorted((rule_score(rule, alpha, s, len(o)) for o, s, _ in every if len(o) <= t), reverse=True)
        live = max((sum(gains[:t]) for o, _, gains in every if len(o) > t), default=-np.inf)
        bound = rule_score(rule, alpha, live, LIMITS[b] if alpha > 0 else t + 1)
        if len(done) >= len(best) and bound <= done[len(best) - 1]:
            return t
    return LIMITS[b]


def test_a_long_winner_that_only_a_safe_stop_waits_for() -> None:
    """Outputs: end (0.5); 1 end (0.3 * 0.9); 2 2 2 2 2 end (0.15, sure from there), which wins by its length."""
    chain = np.full((6, 4, 4), 0.25)
    chain[0, :] = [0.5, 0.3, 0.15, 0.05]
    chain[1, 1] = [0.9, 0.02, 0.03, 0.05]
    chain[1:5, 2] = [1e-9, 1e-9, 1.0, 1e-9]
    chain[5, :] = [1.0, 1e-9, 1e-9, 1e-9]
    chain = np.log(chain)[None]
    common: Any = {"length": 6, "beam_size": 2, "n_best": 1}
    never = beam(chain, [6], early_stopping="never", length_penalty=1.0, **common)
    assert outputs(never, 0) == [[2, 2, 2, 2, 2, 0]]
    assert never.scores_BN[0, 0] == pytest.approx(np.log(0.15) / 6, abs=1e-5)
    # After two steps two outputs are there, at -0.69 and -0.65 a token; the open one, at -0.95, looks worse.
    hasty = beam(chain, [6], early_stopping=False, length_penalty=1.0, **common)
    assert outputs(hasty, 0) == [[1, 0]]
    assert hasty.scores_BN[0, 0] == pytest.approx(np.log(0.27) / 2, abs=1e-5)
    gnmt = beam(chain, [6], length_rule="gnmt", length_penalty=2.0, **common)
    assert outputs(gnmt, 0) == [[2, 2, 2, 2, 2, 0]]
    assert gnmt.scores_BN[0, 0] == pytest.approx(np.log(0.15) / (11 / 6) ** 2, abs=1e-5)


@pytest.mark.parametrize("rule", ["hf", "gnmt", "marian"])
def test_a_beam_of_one_is_greedy(rule: str) -> None:
    chain = np.log(np.random.default_rng(5).dirichlet(np.ones(5), 5))
    found = beam(chain, [8, 5, 2, 1], starts=[1, 2, 3, 4], beam_size=1, length_rule=rule, length_penalty=1.5)
    for b, limit in enumerate([8, 5, 2, 1]):
        tokens, last = [], b + 1
        while len(tokens) < limit and last != 0:
            last = int(np.argmax(chain[last]))
            tokens.append(last)
        assert outputs(found, b) == [tokens]


@pytest.mark.parametrize("rule", ["hf", "gnmt", "marian"])
def test_a_beam_wider_than_the_vocabulary_and_than_all_outputs(rule: str) -> None:
    chain = np.log(np.array([[0.5, 0.5], [0.3, 0.7]]))
    found = beam(chain, [2, 0, 1], beam_size=8, n_best=8, length_rule=rule, length_penalty=0.0)
    assert outputs(found, 0) == [[1, 1], [0], [1, 0]]  # 0.49, 0.3, 0.21
    assert outputs(found, 1) == [[]]
    assert outputs(found, 2) == [[1], [0]]
    assert found.finished_BN[0, :3].tolist() == [False, True, True]
    np.testing.assert_allclose(np.exp(found.log_probs_BN[0, :3]), [0.49, 0.3, 0.21], rtol=1e-5)


def test_limit_0_costs_no_step_with_beams() -> None:
    def step(state: Any, tokens_R: jax.Array) -> tuple[jax.Array, Any]:
        jax.debug.callback(lambda: calls.append(1))
        return follow_chain(state, tokens_R)

    calls: list[int] = []
    found = beam(BY_HAND, [0, 0], step=step, beam_size=3, n_best=2)
    jax.effects_barrier()
    assert calls == []
    assert found.scores_BN.tolist() == [[0.0, -np.inf]] * 2
    assert found.log_probs_BN.tolist() == [[0.0, -np.inf]] * 2


def test_suppressed_tokens_leave_the_probabilities_of_the_others() -> None:
    found = beam(BY_HAND, [8], beam_size=3, n_best=2, length_penalty=0.0, suppressed=(3, 17))
    assert outputs(found, 0)[0] == [2, 0]
    np.testing.assert_allclose(np.exp(found.token_log_probs_BNT[0, 0, :2]), [0.6, 0.25], rtol=1e-5)
    assert not (found.tokens_BNT == 3).any()


def test_log_probs_stay_the_models_own_under_penalties_and_a_forced_end() -> None:
    """Scores count the penalty and the free end; log-probabilities are those that scoring the text would give."""
    chain = np.log(np.random.default_rng(8).dirichlet(np.ones(5), 5))
    found = beam(chain, [3], beam_size=4, n_best=4, length_penalty=0.0, repetition_penalty=1.5, forced_end=True)
    for n, tokens in enumerate(outputs(found, 0)):
        own = [chain[a, b] for a, b in itertools.pairwise([1, *tokens])]
        np.testing.assert_allclose(found.token_log_probs_BNT[0, n, : len(tokens)], own, atol=1e-5)
        searched = [
            0.0 if i == 2 else gain * (1.5 if token in [1, *tokens[:i]] else 1.0)
            for i, (token, gain) in enumerate(zip(tokens, own, strict=True))
        ]
        assert found.scores_BN[0, n] == pytest.approx(sum(searched), abs=1e-5)
        assert tokens[-1] == 0


# Chunks and company

MANY = np.log(np.random.default_rng(11).dirichlet(np.full(6, 0.5), (6, 9, 6)) + 1e-4)
MANY_LIMITS, MANY_STARTS = [9, 4, 0, 7, 9, 1], [1, 2, 3, 4, 5, 1]
COMPANY = SearchOptions(end_id=0, beam_size=3, n_best=3, length_rule="gnmt", length_penalty=0.7, no_repeat_ngram_size=3)


def many_beams(sentences: list[int]) -> BeamState:
    return start_program(
        chain_state(MANY, len(sentences), 3, sentences),
        jnp.asarray([MANY_STARTS[b] for b in sentences]),
        jnp.asarray([MANY_LIMITS[b] for b in sentences]),
        options=COMPANY,
        length=9,
    )


def n_best_in_chunks(sentences: list[int], n_steps: int, sizes: tuple[int, ...]) -> dict[int, tuple[Any, ...]]:
    """What each sentence gets when, between chunks, those that are finished leave for a smaller batch."""
    beams, places, results = many_beams(sentences), list(sentences), {}
    while places:
        beams = advance_program(follow_chain, pick_rows, beams, COMPANY, n_steps)
        over, found = np.asarray(finished(beams)), jax.device_get(hypotheses(beams, 3))
        for i, b in enumerate(places):
            if over[i] and b >= 0:
                results[b] = tuple(x[i] for x in found)
        left = [i for i, b in enumerate(places) if not over[i] and b >= 0]
        size = min(size for size in sizes if size >= len(left))
        if size < len(places):
            index = left + [-1] * (size - len(left))
            beams = take_sentences(beams, jnp.asarray(index, jnp.int32), pick_sentences(3))
            places = [places[i] if i >= 0 else -1 for i in index]
    return results


def test_results_do_not_depend_on_chunks_batches_or_neighbours() -> None:
    """Bit for bit: at once, in chunks of 1 and 3 steps with those that are finished leaving, alone, in other order."""
    every = list(range(6))
    at_once = n_best_in_chunks(every, 9, (0, 6))
    others = [
        n_best_in_chunks(every, 1, (0, 1, 3, 6)),
        n_best_in_chunks(every, 3, (0, 1, 3, 6)),
        n_best_in_chunks([4, 2, 0], 3, (0, 3)),
        n_best_in_chunks([1, 3, 5], 2, (0, 1, 3)),
        *(n_best_in_chunks([b], 9, (0, 1)) for b in every),
    ]
    assert sorted(at_once) == every
    assert len({len(row) for tokens in at_once.values() for row in tokens[0]}) == 1
    for other in others:
        for b, parts in other.items():
            for one, another in zip(parts, at_once[b], strict=True):
                np.testing.assert_array_equal(one, another)
    # and the sentences do differ in when they are finished, so that some did leave early
    beams = advance_program(follow_chain, pick_rows, many_beams(every), COMPANY, 3)
    assert 0 < np.asarray(finished(beams)).sum() < 6


def test_chunks_share_one_program() -> None:
    """Before the first step, between chunks and after a batch was cut, the state has the same types."""
    traced: list[int] = []

    def step(state: Rows, tokens_R: jax.Array) -> tuple[jax.Array, Rows]:
        traced.append(1)
        return follow_chain(state, tokens_R)

    beams = advance_program(step, pick_rows, many_beams([0, 1, 3]), COMPANY, 1)
    once = len(traced)
    assert once > 0
    beams = advance_program(step, pick_rows, beams, COMPANY, 2)
    left = np.asarray(finished(beams))
    assert not left[0]
    beams = take_sentences(beams, jnp.asarray([2, 0, -1], jnp.int32), pick_sentences(3))
    assert np.asarray(finished(beams)).tolist() == [left[2], False, True]  # a place that is only filled costs nothing
    advance_program(step, pick_rows, beams, COMPANY, 9)
    assert len(traced) == once


# Several models


def test_an_ensemble_searches_the_mean_of_its_models() -> None:
    rng = np.random.default_rng(2)
    one, two = (np.log(rng.dirichlet(np.ones(5), 5)) for _ in range(2))
    common: Any = {"beam_size": 3, "n_best": 3}
    options, starts, limits = SearchOptions(end_id=0, **common), jnp.asarray([1, 2]), jnp.asarray([8, 6])
    geometric = 0.75 * one + 0.25 * two
    arithmetic = np.log(0.75 * np.exp(one) + 0.25 * np.exp(two))
    for mean, table in (("log_probs", geometric), ("probs", arithmetic)):
        step = average_log_probs([follow_chain, follow_chain], weights=[3.0, 1.0], mean=mean)
        states = (chain_state(one, 2, 3), chain_state(two, 2, 3))
        found = beam_program(step, reorder_each([pick_rows, pick_rows]), states, starts, limits, options, length=8)
        expected = beam(table, [8, 6], starts=[1, 2], **common)
        np.testing.assert_array_equal(found.tokens_BNT, expected.tokens_BNT)
        np.testing.assert_allclose(found.scores_BN, expected.scores_BN, atol=1e-5)
    assert not np.allclose(geometric, arithmetic, atol=0.01)


# Sampling

sample_program = jax.jit(sample, static_argnums=(0, 6), static_argnames=("length", "temperature", "top_k", "top_p"))
DRAWN = np.array(  # no two alike in a row: what is as likely as the last one kept is kept too
    [
        [1.00, 0.00, 0.00, 0.00, 0.00],
        [0.20, 0.30, 0.10, 0.25, 0.15],
        [0.50, 0.12, 0.08, 0.20, 0.10],
        [0.60, 0.13, 0.05, 0.12, 0.10],
        [0.10, 0.13, 0.15, 0.22, 0.40],
    ]
)


def draw(ids: list[int] | np.ndarray, limit: int = 2, seed: int = 0, **filters: Any) -> NBest:
    rows, end = len(ids), SearchOptions(end_id=0)
    table = jnp.log(jnp.asarray(DRAWN, jnp.float32))
    one, limits = jnp.ones(rows, jnp.int32), jnp.full(rows, limit)
    key, ids_B = jax.random.key(seed), jnp.asarray(ids, jnp.int32)
    return jax.device_get(sample_program(follow, table, one, limits, key, ids_B, end, length=2, **filters))


def filtered(probs: np.ndarray, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> np.ndarray:
    """The distribution drawn from, in plain words: sharpen, keep the likeliest, keep the nucleus."""
    probs = probs ** (1 / temperature) / (probs ** (1 / temperature)).sum()
    order = sorted(range(len(probs)), key=lambda i: -probs[i])[: top_k or None]
    kept = np.zeros_like(probs)
    total = sum(probs[i] for i in order)
    reached = 0.0
    for i in order:
        if reached < top_p:
            kept[i] = probs[i]
        reached += probs[i] / total
    return kept / kept.sum()


@pytest.mark.parametrize(
    "filters",
    [{}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.6}, {"temperature": 1.5, "top_k": 4, "top_p": 0.8}],
    ids=str,
)
def test_samples_follow_the_exact_distribution(filters: dict[str, Any]) -> None:
    """Two tokens at a time: 5 + 4 * 5 outputs, their frequencies within 5 standard deviations of what they must be."""
    n = 20_000
    found = draw(np.arange(n), **filters)
    first, second = found.tokens_BNT[:, 0, 0], found.tokens_BNT[:, 0, 1]
    expected = filtered(DRAWN[1], **filters)
    assert (expected > 0).sum() < 5 or not {"top_k", "top_p"} & set(filters)
    for a in range(5):
        following = filtered(DRAWN[a], **filters) if a else np.eye(5)[0]
        for b in range(5):
            p = expected[a] * following[b]
            counted = ((first == a) & (second == b)).sum()
            assert abs(counted - n * p) <= 5 * np.sqrt(n * p * (1 - p)), (a, b)
            assert p > 0 or counted == 0
    # the log-probabilities are the model's, not those of what was drawn from
    own = np.log(DRAWN[1][first]) + np.where(first == 0, 0.0, np.log(DRAWN[first, second] + 1e-30))
    np.testing.assert_allclose(found.log_probs_BN[:, 0], own, atol=1e-5)


def test_a_sentence_draws_the_same_in_any_company_and_another_with_another_id_or_key() -> None:
    ids = np.arange(50)
    all_50 = draw(ids).tokens_BNT
    np.testing.assert_array_equal(draw(ids[::-1]).tokens_BNT, all_50[::-1])
    np.testing.assert_array_equal(draw([17]).tokens_BNT[0], all_50[17])
    assert not (draw(ids + 50).tokens_BNT == all_50).all()
    # cut between the steps: the last 20, then in reverse order
    drawing = SearchOptions(end_id=0, beam_size=1, sampling=Sampling())
    table = jnp.log(jnp.asarray(DRAWN, jnp.float32))
    one, key, ids_B = jnp.ones(50, jnp.int32), jax.random.key(0), jnp.asarray(ids)
    beams = start_beams(table, one, one * 2, drawing, 2, key=key, sentence_ids_B=ids_B)
    beams = advance_program(follow, pick_rows, beams, drawing, 1)
    beams = advance_program(follow, pick_rows, take_sentences(beams, ids_B[:-21:-1]), drawing, 1)
    np.testing.assert_array_equal(hypotheses(beams, 1).tokens_BNT, all_50[:-21:-1])
    assert not (draw(ids, seed=1).tokens_BNT == all_50).all()


# Options


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"beam_size": 0}, "beam_size is 0"),
        ({"n_best": 5}, "n_best is 5"),
        ({"end_id": -1}, "end_id is -1"),
        ({"length_rule": "google"}, "length_rule is 'google'"),
        ({"length_penalty": float("nan")}, "length_penalty is nan"),
        ({"early_stopping": "always"}, "early_stopping is 'always'"),
        ({"early_stopping": True, "length_rule": "gnmt"}, "early_stopping belongs to"),
        ({"word_penalty": 0.5}, "word_penalty belongs to"),
        ({"word_penalty": float("inf"), "length_rule": "marian"}, "word_penalty is inf"),
        ({"suppressed": (3, -1)}, "suppressed is"),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size is -1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"sampling": Sampling()}, "set beam_size to 1"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_options_that_make_no_sense_are_refused_in_one_sentence(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)) as refused:
        SearchOptions(**{"end_id": 0, "beam_size": 4, **options})
    assert str(refused.value).endswith(".")


@pytest.mark.parametrize("filters", [{"temperature": 0.0}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5}], ids=str)
def test_filters_that_make_no_sense_are_refused(filters: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"{next(iter(filters))} is"):
        Sampling(**filters)


# The same as transformers

TOY_V, TOY_LIMITS, TOY_STARTS = 13, [9, 6, 9, 3], [1, 2, 3, 4]


def toy_tables(seed: int) -> np.ndarray:
    """(V, V, V) logits of the next token after the last two, with an end that is likely now and then."""
    logits = 1.5 * np.random.default_rng(seed).normal(size=(TOY_V,) * 3)
    logits[..., 0] += 1.0
    return logits.astype(np.float32)


def toy_step(state: Rows, tokens_R: jax.Array) -> tuple[jax.Array, Rows]:
    (before_R,) = state.by_row
    logits_RV = state.shared[before_R, tokens_R]
    return jax.nn.log_softmax(logits_RV), Rows(state.shared, (tokens_R,))


@pytest.fixture(scope="module")
def toy_generate() -> Any:
    """transformers' `generate` on a model that is a table: (table, start, limit, options) -> its output."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_outputs import CausalLMOutput

    class Toy(transformers.PreTrainedModel, transformers.GenerationMixin):
        config_class = transformers.PretrainedConfig

        def __init__(self, table: np.ndarray) -> None:
            super().__init__(transformers.PretrainedConfig(vocab_size=TOY_V))
            self.table = torch.nn.Parameter(torch.tensor(table))

        def prepare_inputs_for_generation(self, input_ids: Any, attention_mask: Any = None, **_: Any) -> dict[str, Any]:
            return {"input_ids": input_ids}

        def forward(self, input_ids: Any, attention_mask: Any = None, return_dict: bool = True) -> Any:
            before = input_ids[:, -2] if input_ids.shape[1] > 1 else torch.zeros_like(input_ids[:, -1])
            return CausalLMOutput(logits=self.table[before, input_ids[:, -1]][:, None])

    def generate(table: np.ndarray, start: int, limit: int, options: dict[str, Any]) -> Any:
        ids = torch.tensor([[start]])
        common = {"max_length": 1 + limit, "eos_token_id": 0, "pad_token_id": 0, "use_cache": False, "do_sample": False}
        with torch.no_grad():
            return Toy(table).generate(
                ids,
                attention_mask=torch.ones_like(ids),
                return_dict_in_generate=True,
                output_scores=True,
                **common,
                **options,
            )

    return generate


def toy_search(table: np.ndarray, min_length: int, options: SearchOptions) -> NBest:
    R = 4 * options.beam_size
    found = beam_program(
        toy_step,
        pick_rows,
        Rows(jnp.asarray(table), (jnp.zeros(R, jnp.int32),)),
        jnp.asarray(TOY_STARTS),
        jnp.asarray(TOY_LIMITS),
        options,
        length=9,
        min_lengths_B=jnp.full(4, min_length),
    )
    return jax.device_get(found)


def test_each_beam_goes_on_from_its_own_state() -> None:
    """The toy's state is the token before the last: what a step said must fit the output that it became part of."""
    table = toy_tables(0)
    log_probs = table - np.log(np.exp(table).sum(-1, keepdims=True))
    found = toy_search(table, 0, SearchOptions(end_id=0, beam_size=4, n_best=4, length_penalty=0.6))
    for b, start in enumerate(TOY_STARTS):
        for n, tokens in enumerate(outputs(found, b)):
            seen = [0, start, *tokens]
            own = [log_probs[tuple(seen[i : i + 3])] for i in range(len(tokens))]
            np.testing.assert_allclose(found.token_log_probs_BNT[b, n, : len(tokens)], own, atol=1e-5)


TRANSFORMERS_RUNS: list[dict[str, Any]] = [
    {"num_beams": 1, "bad_words_ids": [[5], [7]], "no_repeat_ngram_size": 2, "min_length": 4},
    {"num_beams": 3, "length_penalty": 1.0},
    {"num_beams": 4, "length_penalty": 0.6},
    {"num_beams": 5, "length_penalty": 0.0},
    {"num_beams": 5, "length_penalty": 1.0, "early_stopping": True},
    {"num_beams": 4, "length_penalty": 2.0, "early_stopping": "never"},
    {"num_beams": 3, "length_penalty": -0.5, "early_stopping": "never", "num_return_sequences": 2},
    {"num_beams": 4, "bad_words_ids": [[5], [7], [2]], "num_return_sequences": 1},
    {"num_beams": 4, "no_repeat_ngram_size": 2, "length_penalty": -1.0},
    {"num_beams": 4, "repetition_penalty": 1.4, "length_penalty": 0.6},
    {"num_beams": 4, "min_length": 5, "no_repeat_ngram_size": 1, "early_stopping": True},
    {"num_beams": 3, "forced_eos_token_id": 0},
    {
        "num_beams": 5,
        "length_penalty": 0.8,
        "early_stopping": "never",
        "bad_words_ids": [[4]],
        "no_repeat_ngram_size": 3,
        "repetition_penalty": 0.8,
        "min_length": 4,
        "forced_eos_token_id": 0,
    },
]


@pytest.mark.parametrize("run", TRANSFORMERS_RUNS, ids=lambda run: "-".join(f"{k}={v}" for k, v in run.items()))
def test_hf_gives_the_ids_and_scores_of_transformers_generate(run: dict[str, Any], toy_generate: Any) -> None:
    """Four sentences in one batch here, one at a time there; with several random models."""
    W = run["num_beams"]
    n = run.get("num_return_sequences", W)
    options = SearchOptions(
        end_id=0,
        beam_size=W,
        n_best=n,
        length_penalty=run.get("length_penalty", 1.0),
        early_stopping=run.get("early_stopping", False),
        forced_end="forced_eos_token_id" in run,
        suppressed=tuple(i for (i,) in run.get("bad_words_ids", [])),
        no_repeat_ngram_size=run.get("no_repeat_ngram_size", 0),
        repetition_penalty=run.get("repetition_penalty", 1.0),
    )
    for seed in range(3):
        table = toy_tables(seed)
        found = toy_search(table, run.get("min_length", 0), options)
        for b in range(4):
            min_length = {"min_length": min(run["min_length"], 1 + TOY_LIMITS[b])} if "min_length" in run else {}
            theirs = toy_generate(table, TOY_STARTS[b], TOY_LIMITS[b], {**run, "num_return_sequences": n, **min_length})
            lists = []
            for ids in theirs.sequences[:, 1:].tolist():
                lists.append(ids[: ids.index(0) + 1] if 0 in ids else ids)
            assert outputs(found, b) == lists
            if W > 1:
                np.testing.assert_allclose(found.scores_BN[b], theirs.sequences_scores.numpy(), rtol=2e-6, atol=2e-6)


# The same as Marian


@pytest.fixture(scope="module")
def marian(shared_dir: Path) -> Any:
    """A plain numpy reading of a small Marian model, with native Marian's own output."""
    pytest.importorskip("yaml")
    folder = shared_dir / "marian_native"
    module = load_program(folder / "scripts" / "marian_numpy.py")
    model = module.Marian(folder / "marian_dates" / "model.npz")
    return model, json.loads((folder / "marian_dates" / "refs.json").read_text(encoding="utf-8"))


def marian_search(model: Any, sources: list[list[int]], limits: list[int], options: SearchOptions) -> NBest:
    """Beams over the numpy model, which reads the whole prefix of each row at every step."""
    B, W, T, V = len(sources), options.beam_size, 15, model.outW.shape[0]
    memories = [model.encode(source) for source in sources]
    known: dict[tuple[int, ...], np.ndarray] = {}

    def log_probs(sentence_R: Any, prefix_RT: Any, t: Any) -> np.ndarray:
        rows = [(int(b), *map(int, prefix[: int(t)])) for b, prefix in zip(sentence_R, prefix_RT, strict=True)]
        for row in set(rows) - set(known):
            known[row] = model.lsm(model.logits(memories[row[0]], row[1:]))[-1].astype(np.float32)
        return np.stack([known[row] for row in rows])

    def step(state: Rows, tokens_R: jax.Array) -> tuple[jax.Array, Rows]:
        sentence_R, prefix_RT = state.by_row
        t = state.shared
        # the first step starts from no token at all
        prefix_RT = jnp.where(t > 0, prefix_RT.at[:, t - 1].set(tokens_R), prefix_RT)
        shape = jax.ShapeDtypeStruct((B * W, V), jnp.float32)
        found_RV = jax.pure_callback(log_probs, shape, sentence_R, prefix_RT, t)
        return found_RV, Rows(t + 1, (sentence_R, prefix_RT))

    state = Rows(jnp.asarray(0), (jnp.repeat(jnp.arange(B), W), jnp.zeros((B * W, T), jnp.int32)))
    return jax.device_get(
        beam_program(step, pick_rows, state, jnp.zeros(B, jnp.int32), jnp.asarray(limits), options, length=T)
    )


def test_marian_gives_native_marians_4_best_lists_and_scores(marian: Any) -> None:
    model, refs = marian
    cases = [refs["sentences"][i] for i in (1, 3, 12, 17)]
    sources = [[*case["src_ids"], 0] for case in cases]
    limits = [3 * len(source) for source in sources]
    options = SearchOptions(end_id=0, beam_size=4, n_best=4, length_rule="marian", length_penalty=0.6, suppressed=(1,))
    found = marian_search(model, sources, limits, options)
    for b, case in enumerate(cases):
        native = case["beam4"]["nbest"]
        assert outputs(found, b) == [h["ids"] + [0] * h["finished"] for h in native]
        np.testing.assert_allclose(found.scores_BN[b], [h["score"] for h in native], atol=1e-4)
        np.testing.assert_allclose(found.log_probs_BN[b], [h["logprob"] for h in native], atol=1e-4)
        for n, h in enumerate(native):
            mine = found.token_log_probs_BNT[b, n, : len(h["word_scores"])]
            np.testing.assert_allclose(mine, h["word_scores"], atol=1e-4)


@pytest.mark.parametrize(
    ("flags", "factor", "options"),
    [
        ("-b 4 -n 0.6 --word-penalty 0.5", 3.0, {"word_penalty": 0.5}),
        ("-b 4 -n 0.6 --max-length-factor 0.5", 0.5, {}),
        ("-b 4 -n 0 ", 3.0, {"length_penalty": 0.0}),
    ],
)
def test_marian_follows_native_marians_flags(flags: str, factor: float, options: dict[str, Any], marian: Any) -> None:
    model, refs = marian
    cases = next(other for other in refs["other_flags"] if other["flags"].startswith(flags))["sentences"]
    cases = [case for case in cases if case["id"] in (1, 3, 12)]
    sources = [[*refs["sentences"][case["id"]]["src_ids"], 0] for case in cases]
    limits = [math.ceil(factor * len(source)) for source in sources]
    common: Any = {"beam_size": 4, "n_best": 4, "length_rule": "marian", "length_penalty": 0.6, "suppressed": (1,)}
    found = marian_search(model, sources, limits, SearchOptions(end_id=0, **{**common, **options}))
    for b, case in enumerate(cases):
        best = case["best"]
        assert outputs(found, b)[0] == best["ids"] + [0] * best["finished"]
        assert found.finished_BN[b, 0] == best["finished"]
        np.testing.assert_allclose(found.scores_BN[b], case["scores"], atol=1e-4)


@pytest.mark.parametrize("n", [2, 5, 8])
def test_the_best_of_many_are_those_of_a_full_sort_with_ties_in_order(n: int) -> None:
    """NumPy's stable sort is the golden value; few different values, so that most are tied, also over blocks."""
    rng = np.random.default_rng(n)
    values = rng.integers(0, 40, (6, 256 * 45 + 77)).astype(np.float32)
    values[0] = 3.0  # all equal: the first n places
    values[1, -3:] = 99.0  # the best stand after the last whole block
    values[2, ::2] = -np.inf
    values[3] = -np.inf
    found, places = best(jnp.asarray(values), n)
    golden = np.argsort(-values, axis=1, kind="stable")[:, :n]
    np.testing.assert_array_equal(places, golden)
    np.testing.assert_array_equal(found, np.take_along_axis(values, golden, axis=1))
    of_beams = values.reshape(2, 3, -1)
    _, places = best_of_beams(jnp.asarray(of_beams), n)
    golden = np.argsort(-of_beams.reshape(2, -1), axis=1, kind="stable")[:, :n]
    np.testing.assert_array_equal(places, golden)
