"""Greedy search on step functions whose best paths are known by hand. No model in here."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.search import Hypotheses, Step, greedy

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
