"""Several models searching as one: a step function made of theirs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from transformer_jax.array_types import Array
from transformer_jax.search import Reorder, Step


def average_log_probs(
    steps: Sequence[Step],
    weights: Sequence[float] | None = None,
    mean: Literal["log_probs", "probs"] = "log_probs",
) -> Step:
    """The step function of several models, over the tuple of their states.

    "log_probs": the weighted mean of the log-probabilities, as in Marian (which adds without dividing by the sum of
    the weights; the order of outputs is the same but for a word penalty). The models' probabilities are so averaged
    geometrically, and not renormalised: they add up to at most 1. "probs": the logarithm of the weighted mean of the
    probabilities, as in fairseq. Weights are relative; without them all models count alike.
    """
    weights = [1.0] * len(steps) if weights is None else list(weights)
    if len(weights) != len(steps) or not steps or min(weights) <= 0:
        raise ValueError(f"{len(steps)} models need as many weights above 0, not {weights}")
    shares = [weight / math.fsum(weights) for weight in weights]

    def step(states: tuple[Any, ...], tokens_R: Array) -> tuple[Array, tuple[Any, ...]]:
        outputs = [step(state, tokens_R) for step, state in zip(steps, states, strict=True)]
        if mean == "log_probs":
            log_probs_RV = sum(share * log_probs_RV for share, (log_probs_RV, _) in zip(shares, outputs, strict=True))
        else:
            weighted = [
                math.log(share) + log_probs_RV for share, (log_probs_RV, _) in zip(shares, outputs, strict=True)
            ]
            # The logarithm of a rounded sum can come out above 0; a log-probability never is.
            log_probs_RV = jnp.minimum(jax.nn.logsumexp(jnp.stack(weighted), axis=0), 0.0)
        return jnp.asarray(log_probs_RV), tuple(state for _, state in outputs)

    return step


def reorder_each(reorders: Sequence[Reorder]) -> Reorder:
    """The `reorder` (or the `take`) of an ensemble's tuple of states."""
    return lambda states, rows: tuple(f(state, rows) for f, state in zip(reorders, states, strict=True))
