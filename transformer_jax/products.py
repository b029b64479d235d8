"""The product of activations and weights, with its gradients in the order that suits XLA's CPU backend."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from transformer_jax.array_types import Array, Float


def product(x: Float[Array, "*B i"], kernel_io: Float[Array, "i o"], dtype: Any = None) -> Float[Array, "*B o"]:
    """x W, accumulated and returned in `dtype` (left out: x's).

    JAX's own rule makes the gradient of W as g^T x, for which XLA's CPU backend copies g transposed. It fuses that copy
    with what g is computed from, down the residual path of all layers above, so that each layer computes the whole
    chain again. Here it is x^T g: what is copied is x, which is at hand. A step of configs/multi30k.py takes two thirds
    of the time (docs/performance.md). As with every custom_vjp, there is no forward-mode derivative.
    """
    return _product(x, kernel_io, dtype)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _product(x: Any, kernel_io: Any, dtype: Any) -> Any:
    return jnp.matmul(x, kernel_io, preferred_element_type=dtype)


def _forward(x: Any, kernel_io: Any, dtype: Any) -> tuple[Any, tuple[Any, Any]]:
    return _product(x, kernel_io, dtype), (x, kernel_io)


def _backward(dtype: Any, saved: tuple[Any, Any], g: Any) -> tuple[Any, Any]:
    x, kernel_io = saved
    of_x = jnp.matmul(g, kernel_io.T)
    of_kernel = jnp.matmul(x.reshape(-1, x.shape[-1]).T, g.reshape(-1, g.shape[-1]))
    return of_x.astype(x.dtype), of_kernel.astype(kernel_io.dtype)


_product.defvjp(_forward, _backward)
