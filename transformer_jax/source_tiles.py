"""Sources of a batch packed side by side for the encoder, which so hardly ever sees padding.

Decoding needs every sentence in a row of its own, padded to the longest; the encoder does not. Its work is done in
tiles of a fixed shape whose rows hold several sentences each, told apart by segments. How many tiles are filled
depends on the text, so the encoder loops over just so many: one program, whatever the sentences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.array_types import Array, Float
from transformer_jax.model import Transformer

TILE_TOKENS = 640
"""Of a tile, about: enough for a CPU's matrix products to run at full speed, few enough that the last is not missed."""
TILE_LENGTH = 64
"""Of a tile's rows, at least, where a batch takes more than one."""


class SourceTiles(NamedTuple):
    """N tiles of R rows and L places, and where in them the tokens of B sentences are. Where several devices share
    the work, each has its own sentences, in tiles of its own: N, B and the counts are those of all devices together."""

    ids_NRL: Any
    segments_NRL: Any
    positions_NRL: Any
    filled: Any
    """How many of a device's tiles hold sentences, one number per device."""
    places_BS: Any
    """Which place of the device's tiles, counted through, holds token s of sentence b; 0 on padding."""
    segments_BS: Any
    """1 for the sentence's tokens, 0 for padding."""


def tile_shape(rows: int, length: int) -> tuple[int, int, int]:
    """Tiles, rows and places of a row that are sure to hold `rows` sentences of up to `length` tokens."""
    if rows * length <= TILE_TOKENS:
        return 1, rows, length
    L = max(length, TILE_LENGTH)
    R = max(1, TILE_TOKENS // L)
    filled_rows = -(-rows // (L // length))  # no row but the last is left with room for one more
    return -(-filled_rows // R), R, L


def pack_sources(
    sources: Sequence[Sequence[int]], rows: int, length: int, pad_id: int, n_devices: int = 1
) -> SourceTiles:
    """Packs the sources, and empty ones up to `rows`, which `n_devices` divides, for a batch of this length."""
    of_device = rows // n_devices
    N, R, L = tile_shape(of_device, length)
    ids = np.full((n_devices, N * R, L), pad_id, np.int32)
    segments, positions = np.zeros_like(ids), np.zeros_like(ids)
    filled = np.zeros(n_devices, np.int32)
    places = np.zeros((rows, length), np.int32)
    used = np.zeros((rows, length), np.int32)
    for device in range(n_devices):
        room = np.full(N * R, L)
        count = np.zeros(N * R, np.int32)
        first = device * of_device
        mine = range(first, min(first + of_device, len(sources)))
        for b in sorted(mine, key=lambda i: -len(sources[i])):  # first fit, the longest first
            size = len(sources[b])
            row = int(np.argmax(room >= size))
            start = L - room[row]
            count[row] += 1
            ids[device, row, start : start + size] = sources[b]
            segments[device, row, start : start + size] = count[row]
            positions[device, row, start : start + size] = np.arange(size)
            places[b, :size] = row * L + start + np.arange(size)
            used[b, :size] = 1
            room[row] -= size
        filled[device] = -(-np.count_nonzero(count) // R)
    shape = (n_devices * N, R, L)
    return SourceTiles(ids.reshape(shape), segments.reshape(shape), positions.reshape(shape), filled, places, used)


def encode_tiles(model: Transformer, params: Any, tiles: SourceTiles) -> Float[Array, "B S D"]:
    """The encoder output of each sentence; on padding that of some token, which must be masked."""

    def encode(n: Array, memory_NRLD: Array) -> Array:
        memory_RLD = model.apply(
            {"params": params}, tiles.ids_NRL[n], tiles.segments_NRL[n], tiles.positions_NRL[n], method="encode"
        )
        return memory_NRLD.at[n].set(memory_RLD)  # type: ignore[arg-type]

    D = model.config.d_model
    memory_NRLD = jnp.zeros((*tiles.ids_NRL.shape, D), model.config.dtype)
    memory_NRLD = jax.lax.fori_loop(0, tiles.filled[0], encode, memory_NRLD)
    return memory_NRLD.reshape(-1, D).at[tiles.places_BS].get(mode="promise_in_bounds")
