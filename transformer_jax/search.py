"""Searching for a likely output. Knows scores and a step function; knows no model.

A step function takes a state (any pytree) and the last token of each row, and gives the log-probabilities of the
next token with the state after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from transformer_jax.array_types import Array, Bool, Float, Int

Step = Callable[[Any, Array], tuple[Array, Any]]
"""(state, tokens_B) -> (log_probs_BV, state)"""


class Hypotheses(NamedTuple):
    """One output per row."""

    tokens_BT: Int[Array, "B T"]
    """Without the start token; the end token, where there is one, is the last; `end_id` also fills what follows."""
    lengths_B: Int[Array, "B"]
    """Tokens of each row, the end token included."""
    log_probs_B: Float[Array, "B"]
    """Sum of the tokens' log-probabilities."""


class _Progress(NamedTuple):
    t: Int[Array, ""]
    state: Any
    last_B: Int[Array, "B"]
    tokens_BT: Int[Array, "B T"]
    lengths_B: Int[Array, "B"]
    log_probs_B: Float[Array, "B"]
    finished_B: Bool[Array, "B"]


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
    """
    B = start_B.shape[0]
    limits_B = jnp.minimum(limits_B, length)

    def going_on(p: _Progress) -> Array:
        return (p.t < length) & ~p.finished_B.all()

    def extend(p: _Progress) -> _Progress:
        log_probs_BV, state = step(p.state, p.last_B)
        if suppressed:
            log_probs_BV = log_probs_BV.at[:, jnp.asarray(suppressed)].set(-jnp.inf)
        best_B = jnp.argmax(log_probs_BV, axis=-1).astype(jnp.int32)
        best_B = jnp.where(p.finished_B, end_id, best_B)
        gained_B = jnp.take_along_axis(log_probs_BV, best_B[:, None], axis=-1)[:, 0]
        lengths_B = p.lengths_B + ~p.finished_B
        return _Progress(
            t=p.t + 1,
            state=state,
            last_B=best_B,
            tokens_BT=p.tokens_BT.at[:, p.t].set(best_B),
            lengths_B=lengths_B,
            log_probs_B=p.log_probs_B + jnp.where(p.finished_B, 0.0, gained_B),
            finished_B=p.finished_B | (best_B == end_id) | (lengths_B >= limits_B),
        )

    end = jax.lax.while_loop(
        going_on,
        extend,
        _Progress(
            t=jnp.zeros((), jnp.int32),
            state=state,
            last_B=start_B,
            tokens_BT=jnp.full((B, length), end_id, jnp.int32),
            lengths_B=jnp.zeros((B,), jnp.int32),
            log_probs_B=jnp.zeros((B,), jnp.float32),
            finished_B=limits_B <= 0,
        ),
    )
    return Hypotheses(end.tokens_BT, end.lengths_B, end.log_probs_B)
