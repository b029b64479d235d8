"""Sources packed for the encoder: every sentence gets the encoder output that it has alone."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.config import ModelConfig
from transformer_jax.model import Transformer
from transformer_jax.source_tiles import encode_tiles, pack_sources, tile_shape

CONFIG = ModelConfig(vocab_size=50, d_model=16, n_heads=2, d_ff=32, n_encoder_layers=2, n_decoder_layers=1)
PAD = CONFIG.pad_id


def sentences(lengths: list[int], seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 50, n).tolist() for n in lengths]


def of_device(tiles: Any, device: int, n_devices: int) -> Any:
    return jax.tree.map(lambda x: x[device * len(x) // n_devices : (device + 1) * len(x) // n_devices], tiles)


@pytest.mark.parametrize("n_devices", [1, 4])
def test_each_sentence_is_encoded_as_if_it_were_alone(n_devices: int) -> None:
    model = Transformer(CONFIG)
    params = model.init(jax.random.key(0), jnp.ones((1, 4), jnp.int32), jnp.ones((1, 4), jnp.int32))["params"]
    lengths = [40, 3, 17, 40, 1, 25, 38, 9, 12, 40, 40, 31, 5, 5, 22, 40, 33, 7, 40, 2]
    sources = sentences(lengths)
    tiles = pack_sources(sources, 24, 40, PAD, n_devices)
    assert len(tiles.ids_NRL) >= 2 or n_devices > 1
    encode = jax.jit(lambda tiles: encode_tiles(model, params, tiles))
    memory = np.concatenate([encode(of_device(tiles, n, n_devices)) for n in range(n_devices)])
    ids = np.full((24, 40), PAD, np.int32)
    for row, source in enumerate(sources):
        ids[row, : len(source)] = source
    alone = np.asarray(model.apply({"params": params}, jnp.asarray(ids), method="encode"))
    for row, source in enumerate(sources):
        np.testing.assert_allclose(memory[row, : len(source)], alone[row, : len(source)], atol=2e-6)
        assert tiles.segments_BS[row].tolist() == [1] * len(source) + [0] * (40 - len(source))
    assert not tiles.segments_BS[len(sources) :].any()


@pytest.mark.parametrize(
    ("rows", "length"), [(1, 16), (32, 16), (32, 48), (32, 80), (64, 128), (8, 512), (7, 300), (2, 700)]
)
def test_any_lengths_find_room(rows: int, length: int) -> None:
    N, R, L = tile_shape(rows, length)
    rng = np.random.default_rng(rows)
    for draw in ([length] * rows, [1] * rows, rng.integers(1, length + 1, rows).tolist(), [L // 2 + 1] * rows):
        sources = sentences([min(n, length) for n in draw])
        tiles = pack_sources(sources, rows, length, PAD)
        assert tiles.ids_NRL.shape == (N, R, L)
        flat = tiles.ids_NRL.reshape(-1)
        for row, source in enumerate(sources):
            assert flat[tiles.places_BS[row, : len(source)]].tolist() == source
        taken = np.concatenate([tiles.places_BS[row, : len(s)] for row, s in enumerate(sources)])
        assert len(set(taken.tolist())) == len(taken) == (tiles.segments_NRL > 0).sum()
        assert not tiles.segments_NRL[tiles.filled[0] :].any()


def test_only_as_many_tiles_as_the_text_fills_are_worked_on() -> None:
    """32 rows of 128 places are seven tiles of five rows; of 32 sentences of 20 tokens six go into a row: two tiles."""
    assert tile_shape(32, 128) == (7, 5, 128)
    tiles = pack_sources(sentences([20] * 32), 32, 128, PAD)
    assert tiles.filled.tolist() == [2]


def test_a_small_batch_is_one_tile_of_its_own_shape() -> None:
    tiles = pack_sources(sentences([5, 3]), 4, 16, PAD)
    assert tiles.ids_NRL.shape == (1, 4, 16)
    assert tiles.filled.tolist() == [1]
    assert pack_sources([], 4, 16, PAD).filled.tolist() == [0]
