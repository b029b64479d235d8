"""The best of very many candidates: greedy's one, and the 2W of a beam out of W times the vocabulary."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from transformer_jax.array_types import Array, Float, Int

BLOCK = 256
"""Candidates that are looked through together when the best of very many are sought."""


def best(values_BX: Float[Array, "B X"], n: int) -> tuple[Float[Array, "B N"], Int[Array, "B N"]]:
    """The n highest of each row with their places, highest first; of equals the first."""
    X = values_BX.shape[1]
    if n > 1:
        if 4 * n < X // BLOCK:
            return _best_by_blocks(values_BX, n)
        best_BN, places_BN = jax.lax.top_k(values_BX, n)
        return best_BN, places_BN
    # Two reductions, which a CPU does in half the time of one argmax. NaN equals nothing: its place is the last.
    best_B1 = jnp.max(values_BX, axis=1, keepdims=True)
    place_B1 = jnp.min(jnp.where(values_BX == best_B1, jnp.arange(X), X - 1), axis=1, keepdims=True)
    return best_B1, place_B1.astype(jnp.int32)


def best_of_beams(values_BWV: Float[Array, "B W V"], n: int) -> tuple[Float[Array, "B N"], Int[Array, "B N"]]:
    """The n highest of each sentence with their places in (W, V), highest first; of equals the first."""
    B, W, V = values_BWV.shape
    of_rows, places_RM = best(values_BWV.reshape(B * W, V), min(n, V))  # whatever is best is among its beam's best
    if W == 1:
        return of_rows, places_RM
    best_BN, chosen_BN = jax.lax.top_k(of_rows.reshape(B, -1), n)
    index_RM = places_RM + (jnp.arange(B * W) % W * V)[:, None]
    return best_BN, jnp.take_along_axis(index_RM.reshape(B, -1), chosen_BN, axis=1)


def _best_by_blocks(values_BX: Float[Array, "B X"], n: int) -> tuple[Float[Array, "B N"], Int[Array, "B N"]]:
    """`top_k`, to the place, in a fraction of its time: the n best stand in the n blocks with the highest maxima.

    For a value in another block there are n blocks before it, each with a maximum that is higher, or as high and
    further to the front. The places after the last whole block are a small block of their own.
    """
    B, X = values_BX.shape
    M = X // BLOCK
    values_BMZ = values_BX[:, : M * BLOCK].reshape(B, M, BLOCK)
    _, chosen_BN = jax.lax.top_k(values_BMZ.max(axis=2), n)
    chosen_BN = jnp.sort(chosen_BN, axis=1)  # so that of equals the first stays the first
    in_blocks = jnp.take_along_axis(values_BMZ, chosen_BN[:, :, None], axis=1, mode="promise_in_bounds")
    few_BY = jnp.concatenate([in_blocks.reshape(B, n * BLOCK), values_BX[:, M * BLOCK :]], axis=1)
    best_BN, places_BN = jax.lax.top_k(few_BY, n)
    block_BN = jnp.take_along_axis(chosen_BN, jnp.minimum(places_BN // BLOCK, n - 1), axis=1)
    in_block_BN = block_BN * BLOCK + places_BN % BLOCK
    after_BN = places_BN - n * BLOCK + M * BLOCK
    return best_BN, jnp.where(places_BN < n * BLOCK, in_block_BN, after_BN)
