"""The product with its own rule for gradients, against NumPy and against JAX's rule."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.products import product

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4)])
def test_values_and_gradients_are_those_of_the_product(shape: tuple[int, ...]) -> None:
    x, kernel = RNG.normal(size=shape).astype(np.float32), RNG.normal(size=(4, 5)).astype(np.float32)
    g = RNG.normal(size=(*shape[:-1], 5)).astype(np.float32)
    y, back = jax.vjp(product, x, kernel)
    of_x, of_kernel = back(jnp.asarray(g))
    np.testing.assert_allclose(y, x @ kernel, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(of_x, g @ kernel.T, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(of_kernel, x.reshape(-1, 4).T @ g.reshape(-1, 5), rtol=1e-5, atol=1e-6)


def test_transposed_weights_are_a_table_with_a_row_for_each_output() -> None:
    x, table = RNG.normal(size=(2, 3, 4)).astype(np.float32), RNG.normal(size=(5, 4)).astype(np.float32)
    g = RNG.normal(size=(2, 3, 5)).astype(np.float32)
    y, back = jax.vjp(lambda x, table: product(x, table, transposed=True), x, table)
    of_x, of_table = back(jnp.asarray(g))
    np.testing.assert_allclose(y, x @ table.T, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(of_x, g @ table, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(of_table, g.reshape(-1, 5).T @ x.reshape(-1, 4), rtol=1e-5, atol=1e-6)


def test_a_table_is_not_transposed_on_the_way_to_the_logits() -> None:
    """A step that writes one token would copy the whole of it."""
    x, table = jnp.ones((1, 1, 4)), jnp.ones((5, 4))
    program = jax.jit(lambda x, table: product(x, table, jnp.float32, transposed=True)).lower(x, table).as_text()
    assert "dot_general" in program
    assert "transpose" not in program


def test_half_precision_accumulates_in_the_type_that_is_asked_for() -> None:
    x, kernel = jnp.ones((1, 2, 4096), jnp.bfloat16), jnp.full((4096, 3), 1 + 2**-7, jnp.bfloat16)
    y, back = jax.vjp(lambda x, kernel: product(x, kernel, jnp.float32), x, kernel)
    np.testing.assert_array_equal(y, np.full((1, 2, 3), 4128.0, np.float32))  # which bfloat16 has not
    assert [g.dtype for g in back(jnp.ones_like(y))] == [jnp.bfloat16, jnp.bfloat16]
    assert product(x, kernel).dtype == jnp.bfloat16


def test_gradients_under_vmap_and_recomputation_are_jaxs_own() -> None:
    x, kernel = RNG.normal(size=(2, 3, 4)).astype(np.float32), RNG.normal(size=(2, 4, 4)).astype(np.float32)

    def loss(multiply: Any, x: Any, kernel: Any) -> Any:
        layer = jax.checkpoint(lambda y: jnp.tanh(multiply(y, kernel)))
        return jnp.square(layer(layer(x))).sum()

    def gradients(multiply: Any) -> Any:
        return jax.vmap(jax.grad(lambda x, kernel: loss(multiply, x, kernel), argnums=(0, 1)))(x, kernel)

    for ours, jaxs in zip(gradients(product), gradients(jnp.matmul), strict=True):
        np.testing.assert_allclose(ours, jaxs, rtol=1e-4, atol=1e-6)


def test_the_gradient_of_the_kernel_has_the_activations_on_the_left() -> None:
    """Of the other order XLA's CPU backend makes the gradient of the output again for a transposed copy."""
    x, kernel = jnp.ones((2, 3, 4)), jnp.ones((4, 5))
    traced = jax.make_jaxpr(jax.grad(lambda kernel: product(x, kernel).sum()))(kernel)
    shapes = [[v.aval.shape for v in e.invars] for e in traced.jaxpr.eqns if e.primitive.name == "dot_general"]
    assert shapes[-1] == [(4, 6), (6, 5)]
