"""The attention weights that the model hands out."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.attention import ATTENTION_WEIGHTS
from transformer_jax.attention_maps import AttentionMaps, attention_maps, cached_attention_maps
from transformer_jax.config import ModelConfig
from transformer_jax.model import Transformer

SOURCE, TARGET = [5, 9, 4, 11, 7, 2], [6, 3, 8, 2]


@pytest.fixture(scope="module", params=["post", "pre", "remat", "marian"])
def model_and_params(request: pytest.FixtureRequest) -> tuple[Transformer, dict]:
    changes = {"pre": {"norm": "pre"}, "remat": {"remat": True}, "marian": {"start_embedding": "zero"}}
    config = ModelConfig(
        vocab_size=13, d_model=16, n_heads=4, d_ff=24, n_encoder_layers=3, n_decoder_layers=2, max_length=16
    )
    model = Transformer(ModelConfig(**{**vars(config), **changes.get(request.param, {})}))
    params = model.init(jax.random.key(3), jnp.ones((1, 3), jnp.int32), jnp.ones((1, 3), jnp.int32))["params"]
    # Larger projections: the weights of a fresh model are all but uniform, and uniform maps would hide mistakes.
    return model, jax.tree.map(lambda x: 3 * x if x.ndim == 2 else x, params)


def arrays(maps: AttentionMaps) -> list[np.ndarray]:
    return [maps.encoder_NHSS, maps.decoder_NHTT, maps.cross_NHTS]


def test_maps_have_a_weight_for_each_layer_head_query_and_key(model_and_params: tuple[Transformer, dict]) -> None:
    maps = attention_maps(*model_and_params, SOURCE, TARGET)
    assert [x.shape for x in arrays(maps)] == [(3, 4, 6, 6), (2, 4, 4, 4), (2, 4, 4, 6)]


def test_every_row_sums_to_one_and_nobody_looks_ahead(model_and_params: tuple[Transformer, dict]) -> None:
    maps = attention_maps(*model_and_params, SOURCE, TARGET)
    for weights in arrays(maps):
        np.testing.assert_allclose(weights.sum(axis=-1), 1.0, atol=1e-6)
        assert weights.min() >= 0
        assert weights.std() > 0.02
    assert np.all(np.triu(maps.decoder_NHTT, 1) == 0)


def test_cached_decoding_has_the_weights_of_teacher_forcing(model_and_params: tuple[Transformer, dict]) -> None:
    at_once = attention_maps(*model_and_params, SOURCE, TARGET)
    one_by_one = cached_attention_maps(*model_and_params, SOURCE, TARGET)
    for a, b in zip(arrays(at_once), arrays(one_by_one), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_pads_get_no_weight_and_change_none(model_and_params: tuple[Transformer, dict]) -> None:
    model, params = model_and_params
    source = jnp.asarray([[*SOURCE, 0, 0]])
    segments = jnp.asarray([[1] * len(SOURCE) + [0, 0]])
    inputs = jnp.asarray([[model.config.start_id, *TARGET[:-1]]])
    _, found = model.apply({"params": params}, source, inputs, segments, mutable=[ATTENTION_WEIGHTS])
    weights = found[ATTENTION_WEIGHTS]
    alone = attention_maps(model, params, SOURCE, TARGET)
    for n in range(3):
        encoder = np.asarray(weights["encoder"][f"layer_{n}"]["self_attention"]["BHTS"][0][0])
        assert np.all(encoder[:, : len(SOURCE), len(SOURCE) :] == 0)
        np.testing.assert_allclose(encoder[:, : len(SOURCE), : len(SOURCE)], alone.encoder_NHSS[n], atol=1e-5)
    for n in range(2):
        cross = np.asarray(weights["decoder"][f"layer_{n}"]["cross_attention"]["BHTS"][0][0])
        assert np.all(cross[:, :, len(SOURCE) :] == 0)
        np.testing.assert_allclose(cross[:, :, : len(SOURCE)], alone.cross_NHTS[n], atol=1e-5)


def test_parameters_hold_no_weights_of_attention(model_and_params: tuple[Transformer, dict]) -> None:
    ids = jnp.ones((1, 3), jnp.int32)
    assert set(model_and_params[0].init(jax.random.key(0), ids, ids)) == {"params"}
