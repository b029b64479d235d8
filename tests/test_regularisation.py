"""R-Drop, the moving average, word dropout and rematerialisation: each computes what its paper or name says."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from transformer_jax.batching import Batch, Bucket, Ragged, TokenPairs, make_batch
from transformer_jax.config import ModelConfig, TrainConfig
from transformer_jax.errors import UserError
from transformer_jax.layers import drop_words
from transformer_jax.loss import symmetric_divergence
from transformer_jax.model import Transformer
from transformer_jax.sharding import data_mesh, replicate, shard_rows
from transformer_jax.training import batch_logits, batch_loss, init_state, make_train_step, start_from

V = 17
MODEL = ModelConfig.tiny(
    V, d_model=16, n_heads=2, d_ff=32, n_encoder_layers=1, n_decoder_layers=1, dropout=0.2, max_length=32
)
TRAIN = TrainConfig(warmup_steps=4000)


def a_batch() -> Batch:
    rng = np.random.default_rng(0)
    sides = [Ragged.pack([rng.integers(3, V, n).tolist() for n in (9, 4, 7, 2)]) for _ in range(2)]
    return on_device(make_batch(TokenPairs(*sides, pad_id=0, start_id=1), np.arange(4), Bucket(4, 9, 9)))


def on_device(batch: Batch) -> Batch:
    return jax.tree.map(jnp.asarray, batch)


def params_of(model: Transformer) -> Any:
    return init_state(model, optax.sgd(0.0), 0).params


def test_divergence_of_two_predictions_by_hand() -> None:
    """p = (.5, .5), q = (.9, .1): KL(p||q) = .5 ln(.5/.9) + .5 ln(.5/.1) = .51083, KL(q||p) = .9 ln 1.8 + .1 ln .2 =
    .36806. A second token of weight 0 does not count, logits may be off by a constant."""
    first = jnp.log(jnp.array([[[0.5, 0.5], [0.2, 0.8]]])) + 3.0
    second = jnp.log(jnp.array([[[0.9, 0.1], [0.7, 0.3]]]))
    found = symmetric_divergence(first, second, jnp.array([[1.0, 0.0]]))
    assert float(found) == pytest.approx(0.51083 + 0.36806, abs=2e-5)


def test_r_drop_adds_the_divergence_of_two_readings_to_the_mean_of_their_losses() -> None:
    model, batch = Transformer(MODEL), a_batch()
    params, key = params_of(model), jax.random.key(5)
    found = batch_loss(model, params, batch, dataclasses.replace(TRAIN, r_drop=5.0), key)
    readings = [batch_logits(model, params, batch, k) for k in jax.random.split(key)]
    losses, log_probs = [], [np.asarray(jax.nn.log_softmax(x)) for x in readings]
    smooth = 0.9 * np.eye(V)[batch.target_outputs_BT] + 0.1 / V
    for log_p in log_probs:
        losses.append((-(smooth * log_p).sum(-1) * batch.weights_BT).sum())
    p, q = map(np.exp, log_probs)
    kl = ((p * (log_probs[0] - log_probs[1])).sum(-1) + (q * (log_probs[1] - log_probs[0])).sum(-1)) * batch.weights_BT
    assert kl.sum() > 0.01
    assert float(found.loss) == pytest.approx(float(np.mean(losses) + 5.0 / 4 * kl.sum()), rel=1e-5)
    assert float(found.tokens) == float(batch.weights_BT.sum())


def test_r_drop_is_nothing_without_dropout_and_in_validation() -> None:
    with_r_drop = dataclasses.replace(TRAIN, r_drop=5.0)
    still = Transformer(dataclasses.replace(MODEL, dropout=0.0))
    params, batch = params_of(still), a_batch()
    plain = batch_loss(still, params, batch, TRAIN, None)
    for key in (jax.random.key(0), None):
        np.testing.assert_allclose(batch_loss(still, params, batch, with_r_drop, key), plain, rtol=1e-6)


def test_the_moving_average_follows_its_rule_step_by_step() -> None:
    """It keeps min(decay, (1 + step) / (10 + step)): 0.1 of the start, then 2/11, 3/12, .. up to the decay."""
    config = dataclasses.replace(TRAIN, ema_decay=0.24, warmup_steps=1)
    model, mesh = Transformer(MODEL), data_mesh(2)
    optimizer = optax.sgd(0.5)
    state = replicate(init_state(model, optimizer, 0, config.ema_decay), mesh)
    average = jax.device_get(state.params)
    step = make_train_step(model, optimizer, config, mesh)
    for kept in (0.1, 2 / 11, 0.24, 0.24):
        state, _ = step(state, shard_rows(a_batch(), mesh))
        params = jax.device_get(state.params)
        average = jax.tree.map(lambda old, new, kept=kept: kept * old + (1 - kept) * new, average, params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), jax.device_get(state.used_params), average)
    assert any((np.abs(a - b) > 1e-4).any() for a, b in zip(*map(jax.tree.leaves, (average, params)), strict=True))


def test_without_a_decay_there_is_no_average_and_the_parameters_are_used() -> None:
    state = start_from(params_of(Transformer(MODEL)), optax.sgd(0.0))
    assert state.average is None
    assert state.used_params is state.params


def test_word_dropout_zeroes_whole_vectors_and_keeps_the_mean() -> None:
    dropped = np.asarray(drop_words(jnp.ones((200, 50, 4)), 0.2, jax.random.key(1)))
    zero = (dropped == 0).all(-1)
    assert (zero == (dropped == 0).any(-1)).all()
    assert zero.mean() == pytest.approx(0.2, abs=0.02)
    assert dropped.mean() == pytest.approx(1.0, abs=0.02)
    assert np.unique(dropped).tolist() == [0.0, 1.25]


@pytest.mark.parametrize("side", ["source", "target"])
def test_word_dropout_reaches_both_sides_in_training_only(side: str) -> None:
    model = Transformer(dataclasses.replace(MODEL, dropout=0.0, word_dropout=0.5))
    params, batch = params_of(model), a_batch()
    memory = model.apply({"params": params}, batch.source_ids_BS, batch.source_segments_BS, method="encode")

    def output(**training: Any) -> np.ndarray:
        """Of the encoder, or of the decoder with a memory that does not change."""
        if side == "source":
            inputs = (batch.source_ids_BS, batch.source_segments_BS)
            return np.asarray(model.apply({"params": params}, *inputs, method="encode", **training))
        inputs = (batch.target_inputs_BT, memory, batch.source_segments_BS)
        return np.asarray(model.apply({"params": params}, *inputs, method="decode", **training))

    drawn = [output(deterministic=False, rngs={"dropout": jax.random.key(k)}) for k in (0, 0, 1)]
    np.testing.assert_array_equal(drawn[0], drawn[1])
    assert (np.abs(drawn[0] - drawn[2]) > 1e-4).any()
    np.testing.assert_array_equal(output(), output())
    assert (np.abs(drawn[0] - output()) > 1e-4).any()


def test_rematerialised_layers_give_the_same_gradient() -> None:
    batch, key = a_batch(), jax.random.key(3)
    params = params_of(Transformer(MODEL))

    def gradient(config: ModelConfig) -> Any:
        model = Transformer(config)
        return jax.jit(jax.grad(lambda p: batch_loss(model, p, batch, TRAIN, key).loss))(params)

    plain, again = gradient(MODEL), gradient(dataclasses.replace(MODEL, remat=True))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), plain, again)


def test_rematerialisation_keeps_less_for_the_gradient() -> None:
    """What a vjp holds on to, in bytes. (XLA's CPU backend merges the second computation with the first, so what a
    compiled step takes does not show it there.)"""
    batch, config = a_batch(), dataclasses.replace(MODEL, n_encoder_layers=4, n_decoder_layers=4)

    def kept(config: ModelConfig) -> int:
        model = Transformer(config)
        params = params_of(model)
        _, vjp = jax.vjp(lambda p: batch_loss(model, p, batch, TRAIN, jax.random.key(0)).loss, params)
        return sum(x.nbytes for x in jax.tree.leaves(vjp)) - sum(x.nbytes for x in jax.tree.leaves(params))

    assert kept(dataclasses.replace(config, remat=True)) < 0.5 * kept(config)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"r_drop": -1.0}, "r_drop is -1.0; it must be 0"),
        ({"ema_decay": 1.0}, "ema_decay is 1.0; it must be above 0 and below 1"),
        ({"average_last": 0}, "average_last is 0; it must be at least 1"),
        ({"average_last": 9}, "average_last is 9, but keep_checkpoints is 5"),
        ({"average_last": 2, "ema_decay": 0.9}, "both average the parameters"),
    ],
)
def test_settings_that_cannot_be_are_told(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        dataclasses.replace(TRAIN, **change)
