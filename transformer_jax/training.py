"""§5: the training step - loss, gradients over all devices, Adam - as one pure function of state and batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import Mesh, PartitionSpec

from transformer_jax.array_types import Array, Float
from transformer_jax.batching import Batch
from transformer_jax.config import TrainConfig
from transformer_jax.loss import LossSums, cross_entropy, symmetric_divergence
from transformer_jax.model import Transformer
from transformer_jax.optimizer import learning_rate
from transformer_jax.sharding import DATA

Params = dict[str, Any]


@struct.dataclass
class TrainState:
    """All that a step changes. The dropout key is not in it: it follows from the seed and the step."""

    step: Array
    """Updates made so far."""
    params: Params
    opt_state: optax.OptState
    average: Params | None = None
    """The moving average of the parameters, where `ema_decay` asks for one."""

    @property
    def used_params(self) -> Params:
        """What is evaluated and saved as the model."""
        return self.params if self.average is None else self.average


class StepLog(NamedTuple):
    """What a step reports: sums over its tokens, the norm of the mean gradient before clipping, and the rate."""

    sums: LossSums
    gradient_norm: Float[Array, ""]
    rate: Float[Array, ""]


TrainStep = Callable[[TrainState, Batch], tuple[TrainState, StepLog]]


def init_params(model: Transformer, seed: int) -> Params:
    """The parameters that a seed stands for, the same on every machine of a kind."""
    ids = jnp.ones((1, 1), jnp.int32)
    return jax.jit(model.init)(jax.random.key(seed), ids, ids)["params"]


def init_state(
    model: Transformer, optimizer: optax.GradientTransformation, seed: int, ema_decay: float | None = None
) -> TrainState:
    return start_from(init_params(model, seed), optimizer, ema_decay)


def start_from(params: Params, optimizer: optax.GradientTransformation, ema_decay: float | None = None) -> TrainState:
    """The state before the first step, with these parameters."""
    average = None if ema_decay is None else jax.tree.map(jnp.copy, params)  # the state is donated: no array twice
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), average)


def batch_logits(model: Transformer, params: Params, batch: Batch, dropout_key: Array | None) -> Float[Array, "B T V"]:
    """Logits for every target token of a batch; with dropout if there is a key."""
    return model.apply(  # type: ignore[return-value]
        {"params": params},
        batch.source_ids_BS,
        batch.target_inputs_BT,
        batch.source_segments_BS,
        batch.target_segments_BT,
        batch.source_positions_BS,
        batch.target_positions_BT,
        deterministic=dropout_key is None,
        rngs=None if dropout_key is None else {"dropout": dropout_key},
    )


def batch_loss(
    model: Transformer, params: Params, batch: Batch, config: TrainConfig, dropout_key: Array | None
) -> LossSums:
    """The loss of a batch, summed over its target tokens; with dropout if there is a key, and then with R-Drop where
    the configuration asks for it."""

    def loss_of(logits_BTV: Array) -> LossSums:
        return cross_entropy(
            logits_BTV,
            batch.target_outputs_BT,
            batch.weights_BT,
            smoothing=config.label_smoothing,
            reading=config.smoothing,
        )

    if dropout_key is None or config.r_drop == 0.0:
        return loss_of(batch_logits(model, params, batch, dropout_key))
    first_BTV, second_BTV = (batch_logits(model, params, batch, key) for key in jax.random.split(dropout_key))
    sums = jax.tree.map(lambda a, b: (a + b) / 2, loss_of(first_BTV), loss_of(second_BTV))
    divergence = symmetric_divergence(first_BTV, second_BTV, batch.weights_BT)
    return sums._replace(loss=sums.loss + config.r_drop / 4 * divergence)


def summed_gradients(
    model: Transformer, params: Params, batch: Batch, config: TrainConfig, dropout_key: Array
) -> tuple[Params, LossSums]:
    """The gradient of the batch's summed loss, computed in `config.accumulation` parts one after another."""

    def loss(params: Params, part: Batch, key: Array) -> tuple[Array, LossSums]:
        sums = batch_loss(model, params, part, config, key)
        return sums.loss, sums

    gradient = jax.grad(loss, has_aux=True)
    n = config.accumulation
    if n == 1:
        return gradient(params, batch, dropout_key)

    parts = jax.tree.map(lambda x: x.reshape(n, x.shape[0] // n, *x.shape[1:]), batch)
    keys = jax.random.split(dropout_key, n)
    total = gradient(params, jax.tree.map(lambda x: x[0], parts), keys[0])

    def add_part(total: tuple[Params, LossSums], part: tuple[Batch, Array]) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, gradient(params, *part)), None

    rest = jax.tree.map(lambda x: x[1:], (parts, keys))
    return jax.lax.scan(add_part, total, rest)[0]


def make_train_step(
    model: Transformer, optimizer: optax.GradientTransformation, config: TrainConfig, mesh: Mesh
) -> TrainStep:
    """The jitted step. The state is donated: use the one that comes back.

    Each device computes the summed loss and gradient of its own rows. One psum over `data` adds them up, and the
    division by the psum of token counts comes last, so that the update is the same however uneven the rows are.
    """

    def device_gradients(params: Params, batch: Batch, key: Array) -> tuple[Params, LossSums]:
        key = jax.random.fold_in(key, jax.lax.axis_index(DATA))
        # From here on each device has its own gradient; without this mark JAX would add them up unasked.
        params = jax.lax.pcast(params, DATA, to="varying")
        return jax.lax.psum(summed_gradients(model, params, batch, config, key), DATA)

    all_gradients = jax.shard_map(
        device_gradients,
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec(DATA), PartitionSpec()),
        out_specs=PartitionSpec(),
    )

    rate = learning_rate(config, model.config.d_model)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, StepLog]:
        key = jax.random.fold_in(jax.random.key(config.seed + 1), state.step)
        gradients, sums = all_gradients(state.params, batch, key)
        gradients = jax.tree.map(lambda g: g / jnp.maximum(sums.tokens, 1.0), gradients)
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        params: Any = optax.apply_updates(state.params, updates)
        average = state.average
        if config.ema_decay is not None:
            average = moving_average(average, params, state.step, config.ema_decay)
        log = StepLog(sums, optax.tree.norm(gradients), rate(state.step + 1))
        return TrainState(state.step + 1, params, opt_state, average), log

    return jax.jit(train_step, donate_argnums=0)


def moving_average(average: Any, params: Params, step: Array, decay: float) -> Params:
    """The average after one more step: it keeps the share min(decay, (1 + step) / (10 + step)) of what it was."""
    kept = jnp.minimum(decay, (1.0 + step) / (10.0 + step))
    return jax.tree.map(lambda old, new: old + (1.0 - kept) * (new - old), average, params)


def make_loss_step(model: Transformer, config: TrainConfig, mesh: Mesh) -> Callable[[Params, Batch], LossSums]:
    """The jitted loss of a batch without dropout, summed over all devices: for validation."""

    def device_loss(params: Params, batch: Batch) -> LossSums:
        return jax.lax.psum(batch_loss(model, params, batch, config, None), DATA)

    return jax.jit(
        jax.shard_map(
            device_loss,
            mesh=mesh,
            in_specs=(PartitionSpec(), PartitionSpec(DATA)),
            out_specs=PartitionSpec(),
        )
    )
