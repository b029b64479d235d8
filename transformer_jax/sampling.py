"""Drawing the next token at random: temperature, the k likeliest, the nucleus.

Each sentence has a key of its own, made from the caller's key and a number that the caller gives the sentence. What
is drawn for a sentence follows from these and the step alone, not from its place in a batch or its neighbours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from transformer_jax.array_types import Array, Float, Int
from transformer_jax.errors import UserError


@dataclass(frozen=True)
class Sampling:
    """From which distribution to draw. Applied in the order of the fields."""

    temperature: float = 1.0
    """Log-probabilities are divided by it: below 1 likely tokens gain, above 1 unlikely ones do."""
    top_k: int = 0
    """Only the k likeliest tokens, and what is as likely as the k-th; 0 keeps all."""
    top_p: float = 1.0
    """Only the nucleus: the likeliest tokens that together reach this probability, and what is as likely as the
    last of them (Holtzman et al. 2020); 1 keeps all."""

    def __post_init__(self) -> None:
        if not 0 < self.temperature < math.inf:
            raise UserError(
                f"temperature is {self.temperature}; it must be above 0 (for the likeliest output, do not sample)."
            )
        if self.top_k < 0:
            raise UserError(f"top_k is {self.top_k}; it must be 0 (keep all) or more.")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p is {self.top_p}; it must be above 0 and at most 1 (keep all).")


def sentence_keys(key: Array, sentence_ids_B: Int[Array, "B"]) -> Array:
    """(B,): a key per sentence, from one key and a number per sentence."""
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, sentence_ids_B)


def kept_log_probs(log_probs_BV: Float[Array, "B V"], sampling: Sampling) -> Float[Array, "B V"]:
    """Log-probabilities (up to a constant per row) of what is drawn from, -inf for what is left out."""
    log_probs_BV = log_probs_BV / sampling.temperature
    V = log_probs_BV.shape[-1]
    if 0 < sampling.top_k < V:
        lowest_B1 = jax.lax.top_k(log_probs_BV, sampling.top_k)[0][:, -1:]
        log_probs_BV = jnp.where(log_probs_BV >= lowest_B1, log_probs_BV, -jnp.inf)
    if sampling.top_p < 1:
        sorted_BV = -jnp.sort(-log_probs_BV, axis=-1)
        probs_BV = jax.nn.softmax(sorted_BV, axis=-1)
        likelier_BV = jnp.cumsum(probs_BV, axis=-1) - probs_BV  # the probability of the tokens before each
        inside_BV = (likelier_BV < sampling.top_p).at[:, 0].set(True)
        lowest_B1 = jnp.min(jnp.where(inside_BV, sorted_BV, jnp.inf), axis=-1, keepdims=True)
        log_probs_BV = jnp.where(log_probs_BV >= lowest_B1, log_probs_BV, -jnp.inf)
    return log_probs_BV


def draw_tokens(
    log_probs_BV: Float[Array, "B V"], keys_B: Array, t: Int[Array, ""], sampling: Sampling
) -> Int[Array, "B"]:
    """One token per row at step t."""
    step_keys_B = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys_B, t)
    tokens_B = jax.vmap(jax.random.categorical)(step_keys_B, kept_log_probs(log_probs_BV, sampling))
    return tokens_B.astype(jnp.int32)
