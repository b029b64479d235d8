"""§5.3: Eq. 3, the other schedules, Adam and clipping, against hand-made numbers and torch."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from transformer_jax.config import TrainConfig
from transformer_jax.optimizer import adam, learning_rate, paper_rate

CONSTANT = {"schedule": "constant", "warmup_steps": 1, "peak_rate": 1e-3}


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def adam_moments(state: Any) -> Any:
    """Adam's m and v (`mu`, `nu`), wherever the chain of transformations keeps them."""
    leaves = jax.tree.leaves(state, is_leaf=lambda inner: hasattr(inner, "mu"))
    return next(leaf for leaf in leaves if hasattr(leaf, "mu"))


# --- learning rates


@pytest.mark.parametrize(
    ("step", "base", "big"),
    [
        (1_000, 0.0001747, 0.0001235),
        (4_000, 0.0006988, 0.0004941),
        (16_000, 0.0003494, 0.0002471),
        (100_000, 0.0001398, 0.0000988),
        (300_000, 0.0000807, 0.0000571),
    ],
)
def test_equation_3_of_the_papers_models(step: int, base: float, big: float) -> None:
    for rate in (paper_rate, lambda d, w: learning_rate(TrainConfig(warmup_steps=w), d)):
        assert float(rate(512, 4000)(step)) == pytest.approx(base, abs=5.1e-8)
        assert float(rate(1024, 4000)(step)) == pytest.approx(big, abs=5.1e-8)


def test_equation_3_of_the_small_models() -> None:
    dates = paper_rate(128, 400)
    rates = [float(dates(step)) for step in range(1, 1001)]
    assert max(rates) == rates[399] == pytest.approx(0.00442, abs=5.1e-6)
    assert rates[400] == pytest.approx(0.004414, abs=5.1e-7)
    reversal = paper_rate(64, 200)
    for step, golden in [(1, 0.00004), (50, 0.00221), (200, 0.00884), (1000, 0.00395)]:
        assert float(reversal(step)) == pytest.approx(golden, abs=5.1e-6)


def test_the_first_update_has_a_rate_above_zero() -> None:
    """Adam's first step is the rate itself, whatever the gradient: here Eq. 3's of step 1, not of step 0."""
    optimizer = adam(TrainConfig(warmup_steps=4000), 512)
    params = {"w": jnp.array([1.0])}
    update, _ = optimizer.update({"w": jnp.array([0.3])}, optimizer.init(params), params)
    assert float(update["w"][0]) == pytest.approx(-(512**-0.5) * 4000**-1.5, rel=1e-4)


def test_the_nth_update_has_the_rate_of_step_n() -> None:
    optimizer = adam(TrainConfig(warmup_steps=3), 16)
    params = jnp.array([1.0])
    state = optimizer.init(params)
    # A constant gradient keeps m_hat / sqrt(v_hat) at 1: every update is minus the rate.
    for step in (1, 2, 3, 4, 5):
        update, state = optimizer.update(jnp.array([0.7]), state, params)
        golden = 0.25 * min(step**-0.5, step * 3**-1.5)
        assert float(update[0]) == pytest.approx(-golden, rel=1e-4), step


def test_rsqrt_has_the_shape_of_equation_3_and_peaks_at_peak_rate() -> None:
    rate = learning_rate(TrainConfig(schedule="rsqrt", warmup_steps=100, peak_rate=0.005), 512)
    # Linear up to 100, then sqrt(100 / step).
    for step, golden in [(1, 0.00005), (50, 0.0025), (100, 0.005), (400, 0.0025), (10_000, 0.0005)]:
        assert float(rate(step)) == pytest.approx(golden, rel=1e-5), step


def test_cosine_falls_from_the_peak_to_zero_at_the_last_step() -> None:
    rate = learning_rate(TrainConfig(schedule="cosine", steps=300, warmup_steps=100, peak_rate=0.01), 512)
    # A quarter of the way down: (1 + cos 45 degrees) / 2.
    quarter = 0.01 * (1 + math.sqrt(0.5)) / 2
    for step, golden in [(1, 0.0001), (100, 0.01), (150, quarter), (200, 0.005), (300, 0.0), (400, 0.0)]:
        assert float(rate(step)) == pytest.approx(golden, rel=1e-5, abs=1e-9), step


def test_constant_rises_over_the_warm_up_and_stays() -> None:
    rate = learning_rate(TrainConfig(schedule="constant", warmup_steps=10, peak_rate=0.01), 512)
    for step, golden in [(1, 0.001), (5, 0.005), (10, 0.01), (11, 0.01), (100_000, 0.01)]:
        assert float(rate(step)) == pytest.approx(golden, rel=1e-5), step


def test_without_a_peak_rate_the_peak_is_equation_3s() -> None:
    rate = learning_rate(TrainConfig(schedule="constant", warmup_steps=4000), 512)
    assert float(rate(4000)) == pytest.approx(0.0006988, abs=5.1e-8)


def test_decay_fraction_lets_the_rate_fall_linearly_over_the_end_of_the_run() -> None:
    options = {"schedule": "constant", "steps": 1000, "warmup_steps": 1, "peak_rate": 0.01}
    rate = learning_rate(TrainConfig(decay_fraction=0.2, **options), 512)
    # 200 steps from 801 on: 200/200 of the peak, ..., 1/200 in the last step, which still learns.
    for step, golden in [(700, 0.01), (801, 0.01), (802, 0.00995), (901, 0.005), (1000, 0.00005), (1001, 0.0)]:
        assert float(rate(step)) == pytest.approx(golden, rel=1e-4, abs=1e-9), step
    assert float(learning_rate(TrainConfig(**options), 512)(1000)) == pytest.approx(0.01)


# --- Adam


@pytest.mark.parametrize("gradient", [0.5, 50.0])
def test_the_first_adam_step_by_hand(gradient: float) -> None:
    optimizer = adam(TrainConfig(**CONSTANT), 512)
    params = jnp.array([2.0])
    update, state = optimizer.update(jnp.array([gradient]), optimizer.init(params), params)
    moments = adam_moments(state)
    m, v = float(moments.mu[0]), float(moments.nu[0])
    assert m == pytest.approx(0.1 * gradient, rel=1e-6)  # 0.05 for 0.5
    assert v == pytest.approx(0.02 * gradient**2, rel=1e-5)  # 0.005 for 0.5
    assert m / (1 - 0.9) == pytest.approx(gradient, rel=1e-5)  # m_hat 0.5
    assert v / (1 - 0.98) == pytest.approx(gradient**2, rel=1e-5)  # v_hat 0.25
    assert float(update[0]) == pytest.approx(-0.001, rel=1e-5)


@pytest.mark.parametrize("scale", [1.0, 1e-8])
def test_adam_equals_torch_over_5_steps(scale: float) -> None:
    """At a scale of 1e-8 the epsilon, 1e-9, is part of the result."""
    torch = pytest.importorskip("torch")
    weights, gradients = normal(0, 4, 3), normal(1, 5, 4, 3) * scale
    theirs = torch.nn.Parameter(torch.from_numpy(weights.copy()))
    their_adam = torch.optim.Adam([theirs], lr=1e-3, betas=(0.9, 0.98), eps=1e-9)
    optimizer = adam(TrainConfig(**CONSTANT), 512)
    ours = jnp.array(weights)
    state = optimizer.init(ours)
    for gradient in gradients:
        theirs.grad = torch.from_numpy(gradient.copy())
        their_adam.step()
        update, state = optimizer.update(jnp.array(gradient), state, ours)
        ours = optax.apply_updates(ours, update)
    difference = float(np.abs(ours - theirs.detach().numpy()).max())
    print(f"difference from torch Adam after 5 steps, gradients x {scale:g}: {difference:.3g}")
    assert difference <= 2.4e-7  # one unit in the last place of a weight between 1 and 4
    assert np.abs(ours - weights).max() > 1e-3


# --- clipping


def test_clipping_equals_torch_clip_grad_norm() -> None:
    """Adam's first step hides the size of a gradient: the moments show it."""
    torch = pytest.importorskip("torch")
    gradients = {"a": normal(0, 4, 3), "b": normal(1, 7) * 10}
    theirs = [torch.nn.Parameter(torch.zeros(g.shape)) for g in gradients.values()]
    for parameter, gradient in zip(theirs, gradients.values(), strict=True):
        parameter.grad = torch.from_numpy(gradient.copy())
    norm = float(torch.nn.utils.clip_grad_norm_(theirs, 1.0))
    assert norm > 10
    optimizer = adam(TrainConfig(clip_norm=1.0), 512)
    ours = jax.tree.map(jnp.array, gradients)
    _, state = optimizer.update(ours, optimizer.init(ours), ours)
    moments = adam_moments(state)
    for parameter, mu in zip(theirs, (moments.mu["a"], moments.mu["b"]), strict=True):
        np.testing.assert_allclose(mu / 0.1, parameter.grad.numpy(), rtol=2e-6, atol=1e-8)


@pytest.mark.parametrize("clip_norm", [None, 6.0])
def test_gradients_are_left_alone_without_clipping_or_below_the_norm(clip_norm: float | None) -> None:
    assert TrainConfig().clip_norm is None  # the paper has none
    optimizer = adam(TrainConfig(clip_norm=clip_norm), 512)
    gradient = jnp.array([3.0, 4.0])  # norm 5
    _, state = optimizer.update(gradient, optimizer.init(gradient), gradient)
    moments = adam_moments(state)
    np.testing.assert_allclose(moments.mu, [0.3, 0.4], rtol=1e-6)


def test_the_papers_constants_are_the_defaults() -> None:
    config = TrainConfig()
    assert (config.beta1, config.beta2, config.epsilon) == (0.9, 0.98, 1e-9)
    assert (config.schedule, config.warmup_steps, config.label_smoothing) == ("paper", 4000, 0.1)
