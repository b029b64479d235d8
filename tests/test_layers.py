"""§3.3-3.5 and §5.4: embedding, positions, feed-forward, layer norm, dropout, add & norm."""

from __future__ import annotations

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_numpy

from transformer_jax.config import ModelConfig
from transformer_jax.layers import (
    ACTIVATIONS,
    Embedding,
    FeedForward,
    LayerNorm,
    PositionalEncoding,
    dropout,
    keep_mask,
    layer_norm,
    residual,
    sinusoids,
)


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# --- §3.4 embedding


def test_embedding_rows_start_at_std_d_to_the_minus_half_and_come_out_at_std_1() -> None:
    embedding = Embedding(ModelConfig.base(), 1000)
    ids = jnp.arange(1000)[None]
    params = embedding.init(jax.random.key(0), ids)
    table = np.asarray(params["params"]["table"])
    assert table.shape == (1000, 512)
    # 512,000 draws: their standard deviation is off by 0.1% (one sigma).
    assert table.std() == pytest.approx(0.0442, rel=0.005)
    output = np.asarray(embedding.apply(params, ids))
    assert output.std() == pytest.approx(1.0, rel=0.005)
    np.testing.assert_allclose(output[0], table * math.sqrt(512), rtol=1e-6)


def test_embedding_scale_can_be_left_out() -> None:
    embedding = Embedding(ModelConfig.base(d_model=16, scale_embedding=False), 5)
    table = jnp.array(normal(0, 5, 16))
    output = embedding.apply({"params": {"table": table}}, jnp.array([[3, 0]]))
    np.testing.assert_array_equal(output[0], table[jnp.array([3, 0])])


def test_the_transposed_table_is_the_output_projection_without_the_scale() -> None:
    table, x = normal(0, 5, 16), normal(1, 1, 3, 16)
    embedding = Embedding(ModelConfig.base(d_model=16), 5)
    logits = embedding.apply({"params": {"table": jnp.array(table)}}, jnp.array(x), method="logits")
    np.testing.assert_allclose(logits[0], x[0] @ table.T, atol=1e-5)


# --- §3.5 positions


def test_sinusoids_of_the_paper_alternate_sine_and_cosine() -> None:
    golden = [0.8415, 0.5403, 0.0998, 0.9950, 0.0100, 0.9999, 0.0010, 1.0000]
    np.testing.assert_allclose(sinusoids(2, 8, "interleaved")[1], golden, atol=5.1e-5)


def test_sinusoids_of_hugging_face_marian_are_sines_then_cosines() -> None:
    golden = [0.8415, 0.0998, 0.0100, 0.0010, 0.5403, 0.9950, 0.9999, 1.0000]
    np.testing.assert_allclose(sinusoids(2, 8, "sin_then_cos")[1], golden, atol=5.1e-5)


def test_sinusoids_of_native_marian_space_their_timescales_over_one_step_less() -> None:
    # Timescales 1, 21.544, 464.16, 10,000: the last is reached, where the paper's stops at 1,000.
    angles = [1, 1 / 21.5443469, 1 / 464.158883, 1 / 10_000]
    golden = [math.sin(a) for a in angles] + [math.cos(a) for a in angles]
    np.testing.assert_allclose(sinusoids(2, 8, "marian")[1], golden, atol=1e-7)


@pytest.mark.parametrize("layout", ["interleaved", "sin_then_cos", "marian"])
def test_sinusoids_equal_the_formula_at_every_position_and_channel(layout: Any) -> None:
    table = sinusoids(600, 32, layout)
    assert table.dtype == np.float32
    for position in (0, 1, 2, 17, 255, 599):
        golden = reference_numpy.position_vector(position, 32, layout)
        # Half a unit in the last place of float32: angles are computed in float64, also far out.
        np.testing.assert_allclose(table[position], golden, atol=6.1e-8)


def test_positions_are_looked_up_by_number_not_by_place_in_the_row() -> None:
    encoding = PositionalEncoding(ModelConfig.base(d_model=8, max_length=10))
    output = encoding.apply({}, jnp.ones((1, 4, 8)), jnp.array([[0, 1, 0, 7]]))
    golden = [1 + reference_numpy.position_vector(p, 8, "interleaved") for p in (0, 1, 0, 7)]
    np.testing.assert_allclose(output[0], golden, atol=1e-6)


def test_learned_positions_are_a_parameter_that_receives_gradients_where_it_is_used() -> None:
    encoding = PositionalEncoding(ModelConfig.base(d_model=8, max_length=5, positions="learned"))
    positions = jnp.array([[0, 3]])
    params = encoding.init(jax.random.key(0), jnp.zeros((1, 2, 8)), positions)
    assert params["params"]["table"].shape == (5, 8)
    gradient = jax.grad(lambda p: encoding.apply(p, jnp.zeros((1, 2, 8)), positions).sum())(params)
    assert gradient["params"]["table"].any(axis=-1).tolist() == [True, False, False, True, False]


# --- layer norm


def test_layer_norm_equals_torch() -> None:
    torch = pytest.importorskip("torch")
    x, scale, bias = normal(0, 2, 5, 512) * 3 + 1, normal(1, 512), normal(2, 512)
    golden = torch.nn.functional.layer_norm(
        *(torch.from_numpy(x), (512,), torch.from_numpy(scale), torch.from_numpy(bias)), eps=1e-5
    )
    ours = layer_norm({"scale": jnp.array(scale), "bias": jnp.array(bias)}, jnp.array(x), 1e-5)
    np.testing.assert_allclose(ours, golden.numpy(), atol=2e-6)


@pytest.mark.parametrize(("epsilon", "golden"), [(1e-5, 0.301511), (1e-6, 0.707107)])
def test_layer_norm_epsilon_is_the_configs(epsilon: float, golden: float) -> None:
    """1e-5 in torch and HF Marian, 1e-6 in native Marian: by hand, 0.001 / sqrt(1e-6 + epsilon)."""
    assert ModelConfig().norm_epsilon == 1e-5
    norm = LayerNorm(ModelConfig.base(d_model=2, n_heads=1, norm_epsilon=epsilon))
    output, _ = norm.init_with_output(jax.random.key(0), jnp.array([[[0.001, -0.001]]]))
    np.testing.assert_allclose(output[0, 0], [golden, -golden], rtol=1e-5)


def test_layer_norm_of_bfloat16_is_computed_in_float32() -> None:
    # In bfloat16, 256 and 257 are the same number, and so would be x and its mean.
    x = jnp.array([[[256.0, 258.0]]], jnp.bfloat16)
    output, params = LayerNorm(ModelConfig.base(d_model=2, n_heads=1)).init_with_output(jax.random.key(0), x)
    assert output.dtype == jnp.bfloat16
    np.testing.assert_allclose(output.astype(jnp.float32)[0, 0], [-1, 1], atol=0.004)
    assert params["params"]["scale"].dtype == jnp.float32


# --- §3.3 feed-forward


@pytest.mark.parametrize("name", ["relu", "swish", "gelu"])
def test_activations_equal_torch(name: str) -> None:
    torch = pytest.importorskip("torch")
    x = np.linspace(-6, 6, 101, dtype=np.float32)
    function = {"relu": "relu", "swish": "silu", "gelu": "gelu"}[name]
    golden = getattr(torch.nn.functional, function)(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(ACTIVATIONS[name](jnp.array(x)), golden, atol=1e-6)


@pytest.mark.parametrize("activation", ["relu", "swish", "gelu"])
def test_feed_forward_is_equation_2(activation: Any) -> None:
    config = ModelConfig.base(d_model=8, n_heads=1, d_ff=24, activation=activation)
    x = normal(0, 1, 3, 8)
    params = FeedForward(config, config.d_ff).init(jax.random.key(0), jnp.array(x))["params"]
    params = jax.tree.map(lambda p: p + 0.1, params)  # biases start at zero: move them off it
    golden = reference_numpy.feed_forward(config, params, x[0].astype(np.float64))
    found = FeedForward(config, config.d_ff).apply({"params": params}, jnp.array(x))[0]
    np.testing.assert_allclose(found, golden, atol=2e-6)


# --- §3.1 add & norm


def test_add_and_norm_by_hand() -> None:
    """x = (1, 3), Sublayer(y) = (2 y_1, 0), Dropout halves: post-norm (paper) and pre-norm differ."""
    x = jnp.array([[[1.0, 3.0]]])

    def run(norm: Any) -> np.ndarray:
        module = LayerNorm(ModelConfig.base(d_model=2, n_heads=1, norm=norm, norm_epsilon=1e-12))

        def call(bound: LayerNorm) -> jax.Array:
            return residual(x, lambda y: y * jnp.array([2.0, 0.0]), bound, lambda y: y / 2)

        return np.asarray(nn.apply(call, module)({"params": {"scale": jnp.ones(2), "bias": jnp.zeros(2)}}))[0, 0]

    # post: x + (2, 0)/2 = (2, 3), normalised. pre: norm(x) = (-1, 1), so x + (-2, 0)/2.
    np.testing.assert_allclose(run("post"), [-1, 1], atol=1e-5)
    np.testing.assert_allclose(run("pre"), [0, 3], atol=1e-5)


# --- §5.4 dropout


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.corrcoef(a.ravel(), b.ravel())[0, 1])


SIDE = 256
SIGMA = 1 / SIDE  # of a mean or correlation of SIDE x SIDE independent bits (times the bits' own deviation)


@pytest.mark.parametrize("keep", [0.5, 0.7, 0.9, 0.999])
def test_the_share_of_kept_elements_is_the_probability(keep: float) -> None:
    bound = 5 * math.sqrt(keep * (1 - keep)) * SIGMA
    rates = [np.asarray(keep_mask(jax.random.key(seed), keep, (SIDE, SIDE))).mean() for seed in range(8)]
    assert max(abs(rate - keep) for rate in rates) < bound
    # And the keys scatter around it as independent draws do, neither more nor less.
    scatter = math.sqrt(np.square(np.array(rates) - keep).mean()) / (math.sqrt(keep * (1 - keep)) * SIGMA)
    assert 0.2 < scatter < 2.2


def test_masks_of_two_keys_are_uncorrelated_also_of_neighbouring_seeds_and_split_keys() -> None:
    keys = [jax.random.key(seed) for seed in range(6)] + list(jax.random.split(jax.random.key(0), 6))
    keys += [jax.random.fold_in(jax.random.key(1), n) for n in range(4)]
    masks = [np.asarray(keep_mask(key, 0.9, (SIDE, SIDE))) for key in keys]
    for i in range(len(masks)):
        for j in range(i):
            assert abs(correlation(masks[i], masks[j])) < 5 * SIGMA, (i, j)


@pytest.mark.parametrize("distance", [1, 2, 3, 4, 8, 16, 64, 128, SIDE, 2 * SIDE, 64 * SIDE])
def test_elements_at_any_distance_are_uncorrelated(distance: int) -> None:
    """No serial correlation: neither along a row nor down a column."""
    mask = np.asarray(keep_mask(jax.random.key(3), 0.9, (SIDE, SIDE))).ravel()
    n = mask.size - distance
    assert abs(correlation(mask[distance:], mask[:-distance])) < 5 / math.sqrt(n)


def test_triples_of_neighbours_are_kept_as_often_as_independence_says() -> None:
    mask = np.asarray(keep_mask(jax.random.key(4), 0.5, (2**17,))).astype(int)
    patterns = np.bincount(4 * mask[:-2:3][: 2**15] + 2 * mask[1:-1:3][: 2**15] + mask[2::3][: 2**15], minlength=8)
    expected = patterns.sum() / 8
    chi_square = float(np.square(patterns - expected).sum() / expected)
    assert chi_square < 30  # 7 degrees of freedom: 1e-4


@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_slices_along_every_axis_have_masks_of_their_own(axis: int) -> None:
    mask = np.moveaxis(np.asarray(keep_mask(jax.random.key(5), 0.5, (8, 8, 32, 32))), axis, 0)
    for i in range(len(mask)):
        for j in range(i):
            assert abs(correlation(mask[i], mask[j])) < 5 / math.sqrt(mask[0].size), (i, j)


def test_a_mask_follows_from_its_key_alone() -> None:
    first = keep_mask(jax.random.key(6), 0.9, (32, 32))
    np.testing.assert_array_equal(first, keep_mask(jax.random.key(6), 0.9, (32, 32)))
    jitted = jax.jit(lambda key: keep_mask(key, 0.9, (32, 32)))
    np.testing.assert_array_equal(first, jitted(jax.random.key(6)))
    assert (first != keep_mask(jax.random.key(7), 0.9, (32, 32))).any()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_dropout_zeroes_a_share_and_scales_the_others_so_that_the_mean_stays(dtype: Any) -> None:
    x = jnp.ones((SIDE, SIDE), dtype)
    output = dropout(x, 0.2, jax.random.key(0))
    assert output.dtype == dtype
    values = np.asarray(output, np.float32)
    assert sorted(set(values.ravel().tolist())) == [0.0, 1.25]
    assert (values == 0).mean() == pytest.approx(0.2, abs=5 * 0.4 * SIGMA)
    assert values.mean() == pytest.approx(1.0, abs=5 * 0.5 * SIGMA)


def test_the_gradient_of_dropout_is_the_mask_of_its_forward_pass() -> None:
    x, key = jnp.array(normal(0, 16, 16)) + 5, jax.random.key(1)
    output, gradient = dropout(x, 0.5, key), jax.grad(lambda x: dropout(x, 0.5, key).sum())(x)
    np.testing.assert_array_equal(gradient, np.where(np.asarray(output) != 0, 2.0, 0.0))
    assert 0 < (np.asarray(gradient) == 0).sum() < 256


def test_dropout_without_a_key_or_at_rate_0_changes_nothing() -> None:
    x = jnp.array(normal(0, 4, 4))
    np.testing.assert_array_equal(dropout(x, 0.5, None), x)
    np.testing.assert_array_equal(dropout(x, 0.0, jax.random.key(0)), x)
