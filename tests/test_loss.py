"""§5.4: label smoothing in both readings, sums over real tokens, and gradients, against hand and torch."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax import loss
from transformer_jax.loss import LossSums, lowest_loss, smoothed_targets

# Compiled as in training, and quicker here than one operation at a time.
cross_entropy = jax.jit(loss.cross_entropy, static_argnames=("smoothing", "reading"))

LOGITS = jnp.array([[[4.0, 0.5, 0.0, -0.5, 0.2]]])
RIGHT = jnp.array([[0]])
ONE = jnp.ones((1, 1))


def random_batch(seed: int = 0, B: int = 3, T: int = 7, V: int = 11) -> tuple[Any, Any, Any]:
    """Logits, targets and weights with uneven padding."""
    random = np.random.default_rng(seed)
    logits = (random.standard_normal((B, T, V)) * 3).astype(np.float32)
    targets = random.integers(0, V, (B, T)).astype(np.int32)
    lengths = random.integers(1, T + 1, (B, 1))
    return jnp.array(logits), jnp.array(targets), jnp.array(np.arange(T) < lengths, jnp.float32)


# --- the two readings


def test_the_reading_all_spreads_over_the_whole_vocabulary_and_others_over_the_wrong_tokens() -> None:
    assert smoothed_targets(5, 0.1, "all") == pytest.approx((0.92, 0.02))
    assert smoothed_targets(5, 0.1, "others") == pytest.approx((0.9, 0.025))


@pytest.mark.parametrize(("reading", "golden"), [("all", 0.394805), ("others", 0.473805)])
def test_smoothed_loss_of_the_worked_example(reading: Any, golden: float) -> None:
    probabilities = jax.nn.softmax(LOGITS[0, 0])
    np.testing.assert_allclose(probabilities, [0.9242, 0.0279, 0.0169, 0.0103, 0.0207], atol=5.1e-5)
    sums = cross_entropy(LOGITS, RIGHT, ONE, smoothing=0.1, reading=reading)
    assert float(sums.loss) == pytest.approx(golden, abs=1e-6)


@pytest.mark.parametrize(
    ("right", "smoothed", "plain"), [(0.999, 0.6644, 0.0010), (0.92, 0.3897, 0.0834), (0.60, 0.6542, 0.5108)]
)
def test_smoothing_punishes_too_sure_a_model(right: float, smoothed: float, plain: float) -> None:
    logits = jnp.log(jnp.array([[[right] + 4 * [(1 - right) / 4]]]))
    assert float(cross_entropy(logits, RIGHT, ONE, smoothing=0.1).loss) == pytest.approx(smoothed, abs=5.1e-5)
    assert float(cross_entropy(logits, RIGHT, ONE).loss) == pytest.approx(plain, abs=5.1e-5)


@pytest.mark.parametrize(("vocab_size", "golden"), [(13, 0.537), (41, 0.680), (58_101, 1.422)])
def test_the_lowest_smoothed_loss(vocab_size: int, golden: float) -> None:
    assert lowest_loss(vocab_size, 0.1) == pytest.approx(golden, abs=5.1e-4)
    assert lowest_loss(vocab_size, 0.0) == 0.0


@pytest.mark.parametrize("reading", ["all", "others"])
def test_the_lowest_loss_is_reached_by_the_smoothed_targets_and_by_nothing_else(reading: Any) -> None:
    right, other = smoothed_targets(13, 0.1, reading)
    best = jnp.log(jnp.full((1, 1, 13), other).at[0, 0, 0].set(right))

    def loss_of(logits: jax.Array) -> float:
        return float(cross_entropy(logits, RIGHT, ONE, smoothing=0.1, reading=reading).loss)

    assert loss_of(best) == pytest.approx(lowest_loss(13, 0.1, reading), abs=1e-6)
    assert loss_of(best.at[0, 0, 0].add(0.5)) > loss_of(best) + 1e-3
    assert loss_of(best.at[0, 0, 0].add(-0.5)) > loss_of(best) + 1e-3


@pytest.mark.parametrize("reading", ["all", "others"])
def test_smoothed_loss_equals_the_cross_entropy_with_the_whole_target_distribution(reading: Any) -> None:
    """The three reductions against the definition, -sum(q log p), in float64."""
    logits, targets, weights = random_batch()
    z = np.asarray(logits, np.float64)
    log_p = z - np.log(np.exp(z).sum(-1, keepdims=True))
    epsilon, V = 0.1, z.shape[-1]
    one_hot = np.eye(V)[np.asarray(targets)]
    if reading == "all":
        q = (1 - epsilon) * one_hot + epsilon / V
    else:
        q = (1 - epsilon) * one_hot + epsilon * (1 - one_hot) / (V - 1)
    golden = -(q * log_p).sum(-1)
    sums = cross_entropy(logits, targets, weights, smoothing=epsilon, reading=reading)
    assert float(sums.loss) == pytest.approx((golden * np.asarray(weights)).sum(), rel=1e-6)


# --- against torch


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_and_gradient_equal_torch_cross_entropy(smoothing: float) -> None:
    torch = pytest.importorskip("torch")
    logits, targets, weights = random_batch()
    torch_logits = torch.from_numpy(np.array(logits)).requires_grad_()
    torch_targets = torch.from_numpy(np.where(np.asarray(weights) > 0, np.asarray(targets), -100)).long()
    golden = torch.nn.functional.cross_entropy(
        torch_logits.flatten(0, 1), torch_targets.flatten(), label_smoothing=smoothing, reduction="sum"
    )
    golden.backward()

    def summed_loss(logits: jax.Array) -> jax.Array:
        return cross_entropy(logits, targets, weights, smoothing=smoothing).loss

    value, gradient = jax.value_and_grad(summed_loss)(logits)
    assert float(value) == pytest.approx(golden.item(), rel=1e-6)
    difference = float(np.abs(gradient - torch_logits.grad.numpy()).max())
    print(f"loss {float(value) - golden.item():.3g}, gradient {difference:.3g} from torch cross_entropy")
    assert difference <= 1e-6
    assert not np.asarray(gradient)[np.asarray(weights) == 0].any()


# --- sums over real tokens


def test_five_more_pad_columns_change_nothing() -> None:
    logits, targets, weights = random_batch()

    def pad(x: jax.Array, value: float) -> jax.Array:
        return jnp.pad(x, [(0, 0), (0, 5)] + [(0, 0)] * (x.ndim - 2), constant_values=value)

    sums = cross_entropy(logits, targets, weights, smoothing=0.1)
    padded = cross_entropy(pad(logits, 9.0), pad(targets, 0), pad(weights, 0.0), smoothing=0.1)
    np.testing.assert_allclose(padded, sums, rtol=1e-6)
    assert float(padded.tokens) == np.asarray(weights).sum()


def test_sums_of_uneven_parts_add_up_to_the_whole() -> None:
    """Means of means would not: the parts hold different numbers of tokens."""
    logits, targets, weights = random_batch(seed=1)
    whole = cross_entropy(logits, targets, weights, smoothing=0.1)
    parts = [cross_entropy(logits[s], targets[s], weights[s], smoothing=0.1) for s in (slice(0, 1), slice(1, 3))]
    assert parts[0].tokens != parts[1].tokens / 2
    np.testing.assert_allclose(jax.tree.map(lambda a, b: a + b, *parts), whole, rtol=1e-6)


def test_log_likelihood_is_unsmoothed_and_correct_counts_the_tokens_ranked_first() -> None:
    logits = jnp.log(jnp.array([[[0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [0.2, 0.2, 0.6], [0.7, 0.2, 0.1]]]))
    sums = cross_entropy(logits, jnp.array([[0, 2, 2, 0]]), jnp.array([[1.0, 1.0, 1.0, 0.0]]), smoothing=0.1)
    assert isinstance(sums, LossSums)
    assert float(sums.log_likelihood) == pytest.approx(math.log(0.5 * 0.3 * 0.6), rel=1e-6)
    assert float(sums.correct) == 2  # the second is wrong, the fourth is padding
    assert float(sums.tokens) == 3


# --- numbers that do not fit


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_16_bit_logits_are_raised_to_float32_before_anything_is_summed(dtype: Any) -> None:
    logits, targets, weights = random_batch()
    low = logits.astype(dtype)
    sums = cross_entropy(low, targets, weights, smoothing=0.1)
    assert all(x.dtype == jnp.float32 for x in sums)
    np.testing.assert_array_equal(sums, cross_entropy(low.astype(jnp.float32), targets, weights, smoothing=0.1))
    # 1,000 logits of 100 add up to more than float16's largest number, 65,504; their loss is log(1000).
    flat = cross_entropy(jnp.full((1, 1, 1000), 100.0, dtype), RIGHT, ONE, smoothing=0.1)
    assert float(flat.loss) == pytest.approx(math.log(1000), rel=1e-4)


def test_extreme_logits_give_a_finite_loss_and_gradient() -> None:
    logits = jnp.array([[[1e4, -1e4, 0.0]]])
    value, gradient = jax.value_and_grad(lambda z: cross_entropy(z, jnp.array([[1]]), ONE).loss)(logits)
    assert float(value) == pytest.approx(2e4)
    np.testing.assert_allclose(gradient[0, 0], [1, -1, 0], atol=1e-6)
