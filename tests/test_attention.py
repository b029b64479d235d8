"""§3.2: attention against the paper's equation, hand-made numbers and PyTorch."""

from __future__ import annotations

import copy
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_numpy

from transformer_jax.attention import (
    ATTENTION_WEIGHTS,
    MultiHeadAttention,
    attention_weights,
    causal_mask,
    dot_product_attention,
    init_linear,
    linear,
    merge_heads,
    padding_mask,
    segment_mask,
    split_heads,
)
from transformer_jax.config import ModelConfig


def everywhere(n_queries: int, n_keys: int) -> jax.Array:
    return jnp.ones((1, 1, n_queries, n_keys), bool)


def one_head(rows: list[tuple[float, float]]) -> jax.Array:
    """Vectors of width 2 as (B, H, T, K) of one row and one head."""
    return jnp.array(rows, jnp.float32)[None, None]


Q = one_head([(1, 0), (0, 1), (1, 1)])
K = one_head([(2, 0), (0, 2), (1, 1)])
V = one_head([(10, 0), (0, 10), (5, 5)])


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# --- Eq. 1


def test_equation_1_gives_the_weights_and_the_output_of_the_worked_example() -> None:
    weights = attention_weights(Q, K, everywhere(3, 3))[0, 0]
    third = 1 / 3
    golden = [[0.5760, 0.1400, 0.2840], [0.1400, 0.5760, 0.2840], [third, third, third]]
    np.testing.assert_allclose(weights, golden, atol=5e-5)
    output = dot_product_attention(Q, K, V, everywhere(3, 3))[0, 0]
    np.testing.assert_allclose(output, [[7.1797, 2.8203], [2.8203, 7.1797], [5, 5]], atol=5e-5)


def torch_attention_function(torch: Any, qkv: list[np.ndarray], dtype: Any, causal: bool) -> np.ndarray:
    tensors = [torch.from_numpy(x).to(dtype) for x in qkv]
    return torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=causal).numpy()


@pytest.mark.parametrize("causal", [False, True])
def test_attention_equals_torch_scaled_dot_product_attention(causal: bool) -> None:
    torch = pytest.importorskip("torch")
    mask = causal_mask(10)[None, None] if causal else everywhere(10, 10)

    qkv = [np.random.default_rng(seed).uniform(-1, 1, (2, 8, 10, 64)).astype(np.float32) for seed in range(3)]
    golden = torch_attention_function(torch, qkv, torch.float32, causal)
    ours = dot_product_attention(*map(jnp.array, qkv), mask)
    difference = float(np.abs(ours - golden).max())
    print(f"difference from torch SDPA, causal={causal}, uniform: {difference:.3g}")
    assert difference <= 4e-7
    assert np.abs(golden).max() > 0.5  # there is something to compare

    # Values of a standard normal reach 4, where torch's own float32 kernels may round further away than 4e-7
    # (9e-7 seen, AVX-512): the exact result is torch's in float64.
    qkv = [normal(seed, 2, 8, 10, 64) for seed in range(3)]
    exact = torch_attention_function(torch, qkv, torch.float64, causal)
    torch_error = float(np.abs(torch_attention_function(torch, qkv, torch.float32, causal) - exact).max())
    our_error = float(np.abs(dot_product_attention(*map(jnp.array, qkv), mask) - exact).max())
    print(f"error, causal={causal}, normal: ours {our_error:.3g}, torch {torch_error:.3g}")
    assert our_error <= max(4e-7, torch_error)


def test_a_forbidden_place_weighs_exactly_zero_and_the_rest_is_a_softmax_over_the_allowed_ones() -> None:
    mask = jnp.array([[True, True, False]] * 3)[None, None]
    weights = np.asarray(attention_weights(Q, K, mask)[0, 0])
    assert (weights[:, 2] == 0).all()
    # Scores of the first query: 2/sqrt(2) and 0.
    right = 1 / (1 + math.exp(-math.sqrt(2)))
    np.testing.assert_allclose(weights[0, :2], [right, 1 - right], atol=1e-6)


def test_a_fully_masked_row_gives_finite_output_and_gradients() -> None:
    mask = jnp.array([[True, True, True], [False, False, False], [True, False, False]])[None, None]

    def total(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.square(dot_product_attention(q, k, v, mask)).sum()

    assert np.isfinite(dot_product_attention(Q, K, V, mask)).all()
    for gradient in jax.grad(total, argnums=(0, 1, 2))(Q, K, V):
        assert np.isfinite(gradient).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_weights_of_16_bit_queries_and_keys_are_computed_in_float32(dtype: Any) -> None:
    q, k = (jnp.array(normal(seed, 1, 1, 4, 64), dtype) for seed in (0, 1))
    weights = attention_weights(q, k, everywhere(4, 4))
    assert weights.dtype == jnp.float32
    exact = np.stack(
        [
            reference_numpy.softmax(np.asarray(k[0, 0], np.float64) @ np.asarray(query, np.float64) / 8)
            for query in q[0, 0]
        ]
    )
    # Scores rounded to 16 bits would be off by about 2^-9 of their size (bfloat16), weights with them.
    np.testing.assert_allclose(weights[0, 0], exact, atol=1e-6)
    values = jnp.array(normal(2, 1, 1, 4, 64), dtype)
    assert dot_product_attention(q, k, values, everywhere(4, 4)).dtype == dtype


def test_large_scores_do_not_overflow() -> None:
    weights = attention_weights(Q * 1e4, K * 1e4, everywhere(3, 3))
    np.testing.assert_allclose(weights[0, 0, 0], [1, 0, 0], atol=0)


def test_attention_dropout_acts_on_the_weights() -> None:
    """Dropping the first key's weight takes its value out without rescaling what the others weigh."""

    def drop_first_key(weights: jax.Array) -> jax.Array:
        return weights.at[..., 0].set(0.0)

    output = dot_product_attention(Q, K, V, everywhere(3, 3), drop=drop_first_key)[0, 0]
    # By hand from the worked example: 0.1400 (0, 10) + 0.2840 (5, 5).
    np.testing.assert_allclose(output[0], [1.4200, 2.8203], atol=2e-4)


# --- masks


def test_the_causal_mask_is_a_lower_triangle_with_the_diagonal() -> None:
    golden = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    mask = causal_mask(4)
    assert mask.dtype == jnp.bool_
    assert mask.astype(int).tolist() == golden


def test_the_padding_mask_is_true_on_tokens() -> None:
    assert padding_mask(jnp.array([7, 8, 9, 0, 0]), 0).astype(int).tolist() == [1, 1, 1, 0, 0]
    # Marian's padding is the last id, and id 0 a token like any other.
    assert padding_mask(jnp.array([[7, 0, 9, 9]]), 9).astype(int).tolist() == [[1, 1, 0, 0]]


def test_segments_see_only_themselves_and_padding_is_seen_by_nobody() -> None:
    segments = jnp.array([[1, 1, 2, 2, 0]])
    golden = [[1, 1, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 1, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 0]]
    assert segment_mask(segments, segments)[0, 0].astype(int).tolist() == golden
    golden = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 0]]
    assert segment_mask(segments, segments, causal=True)[0, 0].astype(int).tolist() == golden


def test_a_segment_of_the_target_sees_the_segment_of_the_source_with_its_number() -> None:
    target, source = jnp.array([[1, 2, 2, 0]]), jnp.array([[1, 1, 2, 0, 0]])
    golden = [[1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 0, 0], [0, 0, 0, 0, 0]]
    assert segment_mask(target, source)[0, 0].astype(int).tolist() == golden


# --- projections and heads


def test_linear_is_x_w_plus_b_with_kernels_in_by_out() -> None:
    kernel = jnp.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    x = jnp.array([[1.0, 10.0]])
    assert linear({"kernel": kernel}, x).tolist() == [[41.0, 52.0, 63.0]]
    assert linear({"kernel": kernel, "bias": jnp.array([1.0, 0.0, -1.0])}, x).tolist() == [[42.0, 52.0, 62.0]]
    assert linear({"kernel": kernel}, x.astype(jnp.bfloat16)).dtype == jnp.bfloat16


def test_kernels_start_glorot_uniform_and_biases_zero() -> None:
    weights = init_linear(jax.random.key(0), 300, 500)
    limit = math.sqrt(6 / (300 + 500))
    kernel = np.asarray(weights["kernel"])
    assert kernel.shape == (300, 500)
    assert 0.99 * limit < np.abs(kernel).max() <= limit
    # Of a uniform distribution: limit / sqrt(3), here over 150,000 draws.
    assert kernel.std() == pytest.approx(limit / math.sqrt(3), rel=0.01)
    assert abs(kernel.mean()) < 0.01 * limit
    assert not weights["bias"].any()
    assert set(init_linear(jax.random.key(0), 3, 5, use_bias=False)) == {"kernel"}


def test_head_h_holds_the_hth_share_of_the_columns() -> None:
    x = jnp.array(normal(0, 2, 3, 12))
    heads = split_heads(x, 4)
    assert heads.shape == (2, 4, 3, 3)
    for head in range(4):
        np.testing.assert_array_equal(heads[:, head], x[:, :, 3 * head : 3 * head + 3])
    np.testing.assert_array_equal(merge_heads(heads), x)


# --- multi-head attention against torch.nn.MultiheadAttention


def torch_attention(torch: Any, d_model: int, n_heads: int, seed: int) -> tuple[Any, dict[str, Any]]:
    """A torch module with random biases, and the same weights for ours."""
    torch.manual_seed(seed)
    module = torch.nn.MultiheadAttention(d_model, n_heads, batch_first=True).eval()
    with torch.no_grad():
        module.in_proj_bias.normal_(std=0.1)
        module.out_proj.bias.normal_(std=0.1)
    kernels = module.in_proj_weight.detach().numpy().reshape(3, d_model, d_model)
    biases = module.in_proj_bias.detach().numpy().reshape(3, d_model)
    params = {
        name: {"kernel": jnp.array(kernels[i].T), "bias": jnp.array(biases[i])}
        for i, name in enumerate(("query", "key", "value"))
    }
    params["output"] = {
        "kernel": jnp.array(module.out_proj.weight.detach().numpy().T),
        "bias": jnp.array(module.out_proj.bias.detach().numpy()),
    }
    return module, params


def run_ours(params: dict[str, Any], x: np.ndarray, memory: np.ndarray, mask: jax.Array) -> tuple[Any, Any]:
    """Output and per-head weights of our module at the paper's base size."""

    def call(module: MultiHeadAttention) -> jax.Array:
        return module(jnp.array(x), *module.keys_values(jnp.array(memory)), mask)

    attention = MultiHeadAttention(ModelConfig.base(d_model=x.shape[-1]))
    output, collections = attention.apply({"params": params}, method=call, mutable=[ATTENTION_WEIGHTS])
    return output, collections[ATTENTION_WEIGHTS]["BHTS"][0]


def run_torch(
    module: Any, torch: Any, dtype: Any, x: np.ndarray, memory: np.ndarray, is_token: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Output and per-head weights of the torch module, computed in this dtype."""
    tx, tm = (torch.from_numpy(a).to(dtype) for a in (x, memory))
    with torch.no_grad():
        output, weights = copy.deepcopy(module).to(dtype)(
            tx, tm, tm, key_padding_mask=torch.from_numpy(~is_token), average_attn_weights=False
        )
    return output.numpy(), weights.numpy()


def assert_equals_torch(kind: str, ours: Any, golden: np.ndarray, exact: np.ndarray, most: float) -> None:
    """Within `most` of torch's float32. With normal inputs torch itself may round further than `most` from the exact
    result, its own in float64 (weights: 1.2e-7 seen, AVX-512); there ours is at most half as far again from it."""
    difference = float(np.abs(ours - golden).max())
    our_error, torch_error = (float(np.abs(float32 - exact).max()) for float32 in (ours, golden))
    told = f"{kind}: difference from torch {difference:.3g}; errors: ours {our_error:.3g}, torch {torch_error:.3g}"
    print(told)
    assert difference <= most or (kind == "normal" and our_error <= 1.5 * torch_error), told


INPUTS = {
    "normal": normal,
    "uniform": lambda seed, *shape: np.float32(np.random.default_rng(seed).uniform(-1, 1, shape)),
}


@pytest.mark.parametrize("kind", INPUTS)
def test_multi_head_attention_equals_torch_with_padding(kind: str) -> None:
    torch = pytest.importorskip("torch")
    module, params = torch_attention(torch, 512, 8, seed=0)
    x = INPUTS[kind](1, 2, 10, 512)
    is_token = np.ones((2, 10), bool)
    is_token[1, 7:] = False  # 3 pads in one row
    golden, golden_weights = run_torch(module, torch, torch.float32, x, x, is_token)
    exact, exact_weights = run_torch(module, torch, torch.float64, x, x, is_token)
    output, weights = run_ours(params, x, x, jnp.array(is_token)[:, None, None, :])
    assert_equals_torch(kind, output, golden, exact, most=3e-7)
    assert_equals_torch(kind, weights, golden_weights, exact_weights, most=1e-7)
    assert np.abs(golden).max() > 0.3
    assert (np.asarray(weights)[1, :, :, 7:] == 0).all()


@pytest.mark.parametrize("kind", INPUTS)
def test_cross_attention_equals_torch(kind: str) -> None:
    torch = pytest.importorskip("torch")
    module, params = torch_attention(torch, 512, 8, seed=1)
    x, memory = INPUTS[kind](2, 2, 7, 512), INPUTS[kind](3, 2, 10, 512)
    is_token = np.ones((2, 10), bool)
    is_token[1, 7:] = False
    golden, _ = run_torch(module, torch, torch.float32, x, memory, is_token)
    exact, _ = run_torch(module, torch, torch.float64, x, memory, is_token)
    output, _ = run_ours(params, x, memory, jnp.array(is_token)[:, None, None, :])
    assert_equals_torch(kind, output, golden, exact, most=4e-7)
    assert np.abs(golden).max() > 0.3


@pytest.mark.parametrize("bias", [True, False])
def test_multi_head_attention_equals_one_head_at_a_time(bias: bool) -> None:
    """Against NumPy in float64, where every query sees only the keys that it may."""
    config = ModelConfig.base(d_model=12, n_heads=3, attention_bias=bias)
    x = normal(4, 1, 5, 12)

    def call(module: MultiHeadAttention) -> jax.Array:
        keys, values = module.keys_values(jnp.array(x))
        return module(jnp.array(x), keys, values, causal_mask(5)[None, None])

    attention = MultiHeadAttention(config)
    params = attention.init(jax.random.key(0), method=call)["params"]
    assert ("bias" in params["query"]) == bias
    golden = reference_numpy.attention(params, x[0].astype(np.float64), x[0].astype(np.float64), 3, causal=True)
    np.testing.assert_allclose(attention.apply({"params": params}, method=call)[0], golden, atol=1e-6)
