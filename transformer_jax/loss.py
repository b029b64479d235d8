"""§5.4: cross-entropy with label smoothing, summed over real tokens."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from transformer_jax.array_types import Array, Float, Int

Smoothing = Literal["all", "others"]


class LossSums(NamedTuple):
    """Sums over tokens. Sums add over devices, parts of a batch and batches; means of means would not."""

    loss: Float[Array, ""]
    """Smoothed cross-entropy, natural logarithm."""
    log_likelihood: Float[Array, ""]
    """Unsmoothed: exp(-log_likelihood / tokens) is the perplexity."""
    correct: Float[Array, ""]
    """Weight of the tokens that the model ranks first."""
    tokens: Float[Array, ""]
    """Sum of the weights."""


def smoothed_targets(vocab_size: int, smoothing: float, reading: Smoothing) -> tuple[float, float]:
    """The probability that label smoothing gives the right token, and each of the others.

    The paper does not say over what the mass is spread. "all": uniformly over the whole vocabulary, the right token
    included (Szegedy et al. 2016, PyTorch). "others": over the wrong ones only (tensor2tensor).
    """
    if reading == "all":
        return 1.0 - smoothing + smoothing / vocab_size, smoothing / vocab_size
    return 1.0 - smoothing, smoothing / max(1, vocab_size - 1)


def lowest_loss(vocab_size: int, smoothing: float, reading: Smoothing = "all") -> float:
    """The entropy of the smoothed targets, in nats per token: no model's smoothed loss is lower."""
    right, other = smoothed_targets(vocab_size, smoothing, reading)
    return -sum(n * p * math.log(p) for n, p in ((1, right), (vocab_size - 1, other)) if p > 0)


def cross_entropy(
    logits_BTV: Float[Array, "B T V"],
    targets_BT: Int[Array, "B T"],
    weights_BT: Float[Array, "B T"],
    *,
    smoothing: float = 0.0,
    reading: Smoothing = "all",
) -> LossSums:
    """Weighted sums of the loss over all target tokens; a weight of 0 leaves a token (padding) out.

    The smoothed loss is logsumexp(z) - right z_y - other (sum(z) - z_y): three reductions over the logits. The right
    token's logit is picked by comparison, not by index, so that its gradient is no scatter but one more term of the
    same pass over the logits.
    """
    V = logits_BTV.shape[-1]
    logits_BTV = logits_BTV.astype(jnp.float32)
    right, other = smoothed_targets(V, smoothing, reading)
    is_target_BTV = jax.lax.broadcasted_iota(jnp.int32, (1, 1, V), 2) == targets_BT[..., None]
    log_sum_BT = jax.nn.logsumexp(logits_BTV, axis=-1)
    target_logit_BT = jnp.where(is_target_BTV, logits_BTV, 0.0).sum(axis=-1)
    loss_BT = log_sum_BT - (right - other) * target_logit_BT
    if other > 0:  # without smoothing, a logit of -inf (a token that is ruled out) costs nothing
        loss_BT -= other * logits_BTV.sum(axis=-1)
    correct_BT = jax.lax.stop_gradient(target_logit_BT >= logits_BTV.max(axis=-1))
    return LossSums(
        loss=jnp.sum(loss_BT * weights_BT),
        log_likelihood=jnp.sum((target_logit_BT - log_sum_BT) * weights_BT),
        correct=jnp.sum(correct_BT * weights_BT),
        tokens=jnp.sum(weights_BT),
    )


def symmetric_divergence(
    first_BTV: Float[Array, "B T V"], second_BTV: Float[Array, "B T V"], weights_BT: Float[Array, "B T"]
) -> Float[Array, ""]:
    """KL(p||q) + KL(q||p) of the softmaxes of two logits, in nats, weighted and summed over tokens (R-Drop).

    The two together are sum((p - q) (log p - log q)), in which the normalisers cancel.
    """
    first_BTV, second_BTV = first_BTV.astype(jnp.float32), second_BTV.astype(jnp.float32)
    p_BTV, q_BTV = jax.nn.softmax(first_BTV), jax.nn.softmax(second_BTV)
    return jnp.sum(((p_BTV - q_BTV) * (first_BTV - second_BTV)).sum(axis=-1) * weights_BT)
