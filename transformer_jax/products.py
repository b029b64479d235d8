"""The product of activations and weights, with its gradients in the order that suits XLA's CPU backend."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from transformer_jax.array_types import Array, Float


def product(
    x: Float[Array, "*B i"], weights: Float[Array, "_ _"], dtype: Any = None, *, transposed: bool = False
) -> Float[Array, "*B o"]:
    """x W with W (i, o), or `transposed` x W^T with W (o, i); accumulated and returned in `dtype` (left out: x's).

    JAX's own rule makes the gradient of W as g^T x, for which XLA's CPU backend copies g transposed. It fuses that copy
    with what g is computed from, down the residual path of all layers above, so that each layer computes the whole
    chain again. Here it is x^T g: what is copied is x, which is at hand. A step of configs/multi30k.py takes two thirds
    of the time (docs/performance.md). As with every custom_vjp, there is no forward-mode derivative.
    """
    return _product(x, weights, dtype, transposed)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _product(x: Any, weights: Any, dtype: Any, transposed: bool) -> Any:
    if transposed:  # not of weights.T, which a product with a single row would copy
        return jnp.einsum("...i,oi->...o", x, weights, preferred_element_type=dtype)
    return jnp.matmul(x, weights, preferred_element_type=dtype)


def _forward(x: Any, weights: Any, dtype: Any, transposed: bool) -> tuple[Any, tuple[Any, Any]]:
    return _product(x, weights, dtype, transposed), (x, weights)


def _backward(dtype: Any, transposed: bool, saved: tuple[Any, Any], g: Any) -> tuple[Any, Any]:
    x, weights = saved
    of_x = jnp.matmul(g, weights if transposed else weights.T)
    of_weights = jnp.matmul(x.reshape(-1, x.shape[-1]).T, g.reshape(-1, g.shape[-1]))
    if transposed:
        of_weights = of_weights.T
    return of_x.astype(x.dtype), of_weights.astype(weights.dtype)


_product.defvjp(_forward, _backward)
