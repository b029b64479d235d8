"""§5.3: Adam with the paper's constants, and the learning rates, Eq. 3 first among them."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
import optax

from transformer_jax.array_types import Array
from transformer_jax.config import TrainConfig

Schedule = Callable[[Array | int | float], Array]


def paper_rate(d_model: int, warmup_steps: int) -> Schedule:
    """Eq. 3: d_model^-0.5 min(step^-0.5, step warmup_steps^-1.5). Steps count from 1."""

    def rate(step: Array | int | float) -> Array:
        step = jnp.asarray(step, jnp.float32)
        return d_model**-0.5 * jnp.minimum(step**-0.5, step * warmup_steps**-1.5)

    return rate


def learning_rate(config: TrainConfig, d_model: int) -> Schedule:
    """The rate of step 1, 2, ...: above 0 at the first, highest after warmup_steps.

    "paper" and "rsqrt" are Eq. 3's shape, the latter scaled to peak at peak_rate; "cosine" falls to 0 at the last
    step, "constant" stays. decay_fraction lets any of them fall linearly to 0 at the end of the run.
    """
    shape = paper_rate(d_model, config.warmup_steps)
    paper_peak = (d_model * config.warmup_steps) ** -0.5
    peak = paper_peak if config.peak_rate is None else config.peak_rate
    decay_steps = round(config.decay_fraction * config.steps)

    def rate(step: Array | int | float) -> Array:
        step = jnp.asarray(step, jnp.float32)
        if config.schedule in ("paper", "rsqrt"):
            value = shape(step) * (peak / paper_peak)
        else:
            value = peak * jnp.minimum(1.0, step / config.warmup_steps)
        if config.schedule == "cosine":
            after = jnp.clip((step - config.warmup_steps) / max(1, config.steps - config.warmup_steps), 0, 1)
            value *= 0.5 * (1 + jnp.cos(jnp.pi * after))
        if decay_steps:
            value *= jnp.clip((config.steps - step + 1) / decay_steps, 0, 1)
        return value

    return rate


def adam(config: TrainConfig, d_model: int) -> optax.GradientTransformation:
    """Adam (beta1 0.9, beta2 0.98, epsilon 1e-9), after clipping by global norm where it is asked for."""
    schedule = learning_rate(config, d_model)
    update = optax.adam(
        # optax counts updates from 0, Eq. 3 from 1: without the shift the first update would be lost.
        lambda count: schedule(jnp.asarray(count) + 1),
        b1=config.beta1,
        b2=config.beta2,
        eps=config.epsilon,
    )
    if config.clip_norm is None:
        return update
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), update)
