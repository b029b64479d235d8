"""The training step: the same update on any number of devices, in any number of parts, on any platform."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from programs import free_address, in_processes

from transformer_jax.batching import Batch, Bucket, Ragged, TokenPairs, make_batch
from transformer_jax.config import ModelConfig, TrainConfig
from transformer_jax.decoding import make_decode
from transformer_jax.model import Transformer
from transformer_jax.optimizer import adam
from transformer_jax.sharding import data_mesh, replicate, shard_rows
from transformer_jax.training import init_state, make_loss_step, make_train_step

V = 23
MODEL = ModelConfig.tiny(
    V, d_model=16, n_heads=2, d_ff=32, n_encoder_layers=1, n_decoder_layers=1, dropout=0.0, max_length=32
)
TRAIN = TrainConfig(warmup_steps=4000)


def uneven_batches(n: int, rows: int = 16) -> list[Batch]:
    """Rows of very different lengths, the last ones empty: devices hold unequal numbers of tokens."""
    rng = np.random.default_rng(0)

    def sequences() -> Ragged:
        lengths = np.sort(rng.integers(2, 12, rows * n))
        return Ragged.pack([rng.integers(3, V, length).tolist() for length in lengths])

    pairs = TokenPairs(sequences(), sequences(), pad_id=0, start_id=1)
    bucket = Bucket(rows, 12, 12)
    return [make_batch(pairs, np.arange(i * rows, (i + 1) * rows - 3), bucket) for i in range(n)]


def run_steps(
    n_devices: int, config: TrainConfig = TRAIN, model_config: ModelConfig = MODEL, n_steps: int = 5
) -> tuple[list[float], Any]:
    mesh = data_mesh(n_devices)
    model, optimizer = Transformer(model_config), adam(config, model_config.d_model)
    state = replicate(init_state(model, optimizer, config.seed), mesh)
    step = make_train_step(model, optimizer, config, mesh)
    losses = []
    for batch in uneven_batches(n_steps):
        state, log = step(state, shard_rows(batch, mesh))
        losses.append(float(log.sums.loss / log.sums.tokens))
    return losses, jax.device_get(state.params)


def without_key_biases(params: Any) -> list[np.ndarray]:
    """All parameters that have a gradient. A key's bias has none: it adds the same to all scores of a query, which the
    softmax cancels. What is computed for it is rounding, and Adam divides rounding by its own size."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return [np.asarray(leaf) for path, leaf in leaves if "['key']['bias']" not in jax.tree_util.keystr(path)]


def largest_difference(a: Any, b: Any) -> float:
    pairs = zip(without_key_biases(a), without_key_biases(b), strict=True)
    return max(float(np.abs(x - y).max()) for x, y in pairs)


@pytest.fixture(scope="module")
def one_device() -> tuple[list[float], Any]:
    return run_steps(1)


def test_eight_devices_with_uneven_rows_make_the_update_of_one(one_device: tuple[list[float], Any]) -> None:
    losses, params = run_steps(8)
    np.testing.assert_allclose(losses, one_device[0], atol=1e-6)
    assert largest_difference(params, one_device[1]) <= 1e-6


def test_accumulation_changes_no_number(one_device: tuple[list[float], Any]) -> None:
    losses, params = run_steps(2, dataclasses.replace(TRAIN, accumulation=4))
    np.testing.assert_allclose(losses, one_device[0], atol=1e-6)
    assert largest_difference(params, one_device[1]) <= 1e-6


def test_gradient_is_that_of_the_mean_over_all_tokens() -> None:
    """Against jax.grad of the mean loss, written here without devices, sums or segments."""
    batch = uneven_batches(1)[0]
    model = Transformer(MODEL)
    sgd = optax.sgd(1.0)
    state = init_state(model, sgd, 0)

    def mean_loss(params: Any) -> jax.Array:
        ids = jnp.asarray(batch.source_ids_BS), jnp.asarray(batch.target_inputs_BT)
        logits = model.apply({"params": params}, *ids)
        smooth = 0.9 * jax.nn.one_hot(batch.target_outputs_BT, V) + 0.1 / V
        losses = -(smooth * jax.nn.log_softmax(logits)).sum(-1)
        return losses[batch.weights_BT > 0].mean()

    expected = jax.tree.map(lambda p, g: p - g, state.params, jax.grad(mean_loss)(state.params))
    mesh = data_mesh(8)
    step = make_train_step(model, sgd, TRAIN, mesh)
    new, _ = step(replicate(state, mesh), shard_rows(batch, mesh))
    assert largest_difference(jax.device_get(new.params), jax.device_get(expected)) <= 1e-6


def test_dropout_differs_between_steps_and_devices_and_repeats_with_the_seed() -> None:
    """The same row on every device, and an optimizer that never moves: the losses differ by the masks alone."""
    batch = uneven_batches(1, rows=8)[0]
    same_rows = Batch(*(np.repeat(x[:1], 8, axis=0) for x in batch))
    model, still = Transformer(dataclasses.replace(MODEL, dropout=0.5)), optax.sgd(0.0)

    def two_losses(step: Any, rows: Batch, n_devices: int) -> list[float]:
        mesh = data_mesh(n_devices)
        state = replicate(init_state(model, still, 0), mesh)
        losses = []
        for _ in range(2):
            state, log = step(state, shard_rows(rows, mesh))
            losses.append(float(log.sums.loss))
        return losses

    on_eight = make_train_step(model, still, TRAIN, data_mesh(8))
    first, second = two_losses(on_eight, same_rows, 8)
    assert first != second
    assert two_losses(on_eight, same_rows, 8) == [first, second]
    on_one = make_train_step(model, still, TRAIN, data_mesh(1))
    one_row = two_losses(on_one, Batch(*(x[:1] for x in same_rows)), 1)[0]
    assert first != pytest.approx(8 * one_row, rel=1e-4)  # device 0 has the mask of the single row, the others not


def test_log_reports_the_rate_of_the_step_and_the_norm_of_the_mean_gradient() -> None:
    batch = uneven_batches(1)[0]
    model, optimizer = Transformer(MODEL), optax.sgd(1.0)
    mesh = data_mesh(1)
    before = init_state(model, optimizer, 0)
    old = jax.device_get(before.params)
    new, log = make_train_step(model, optimizer, TRAIN, mesh)(replicate(before, mesh), shard_rows(batch, mesh))
    # SGD with rate 1 moves by the gradient itself.
    moves = jax.tree.leaves(jax.tree.map(lambda a, b: a - np.asarray(b), old, new.params))
    moved = np.sqrt(sum((move**2).sum() for move in moves))
    assert float(log.gradient_norm) == pytest.approx(moved, rel=1e-4)
    assert float(log.rate) == pytest.approx(16**-0.5 * 4000**-1.5, rel=1e-6)
    assert float(log.sums.tokens) == batch.weights_BT.sum()


def test_validation_loss_is_the_same_on_any_number_of_devices_and_without_dropout() -> None:
    batch = uneven_batches(1)[0]
    model = Transformer(dataclasses.replace(MODEL, dropout=0.5))
    params = init_state(model, optax.sgd(0.0), 0).params
    sums = []
    for n in (1, 4, 8):
        mesh = data_mesh(n)
        sums.append(
            jax.device_get(make_loss_step(model, TRAIN, mesh)(replicate(params, mesh), shard_rows(batch, mesh)))
        )
    for other in sums[1:]:
        np.testing.assert_allclose(other, sums[0], rtol=1e-6)


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_train_step_and_decode_loop_lower_for_accelerators(platform: str) -> None:
    mesh = data_mesh(8)
    model, optimizer = Transformer(MODEL), adam(TRAIN, MODEL.d_model)
    batch = uneven_batches(1)[0]
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (init_state(model, optimizer, 0), batch))
    step = make_train_step(model, optimizer, TRAIN, mesh)
    exported = jax.export.export(step, platforms=[platform])(*abstract)  # type: ignore[arg-type]
    assert "all_reduce" in exported.mlir_module()

    state, batch_shapes = abstract
    rows = batch_shapes.source_ids_BS.shape[0]
    decode = make_decode(model, mesh)
    limits = jax.ShapeDtypeStruct((rows,), jnp.int32)
    arguments = (state.params, batch_shapes.source_ids_BS, batch_shapes.source_segments_BS, limits)
    exported = jax.export.export(decode, platforms=[platform])(*arguments, length=16)  # type: ignore[arg-type]
    assert "while" in exported.mlir_module()


WORKER = """
import json, sys
import jax
jax.config.update("jax_platforms", "cpu")
coordinator, count, number, n_local = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
jax.config.update("jax_num_cpu_devices", n_local)
from transformer_jax.sharding import join_processes, to_host
if count > 1:
    join_processes(coordinator, count, number)
sys.path.insert(0, sys.argv[5])
import test_training
losses, params = test_training.run_steps(count * n_local)
digest = [float(abs(x).sum()) for x in test_training.without_key_biases(params)]
print("RESULT " + json.dumps([losses, digest, jax.device_count()]))
"""


def run_processes(count: int, n_local: int) -> list[Any]:
    address, here = free_address(), str(Path(__file__).parent)
    commands = [["-c", WORKER, address, str(count), str(i), str(n_local), here] for i in range(count)]
    outputs = in_processes(commands)
    return [json.loads(next(x for x in out.splitlines() if x.startswith("RESULT "))[7:]) for out in outputs]


def test_two_processes_train_one_run_with_one_folder(tmp_path: Path) -> None:
    """train.py in two processes of four devices, against one of eight: evaluation, checkpoints and files included."""
    root = Path(__file__).parents[1]
    options = ["--train.steps", "4", "--train.evaluate-every", "2", "--train.log-every", "1", "--decode.limit", "16"]
    options += ["--train.checkpoint-every", "2"]
    command = [str(root / "train.py"), "--config", str(root / "configs" / "reverse.py"), *options, "--output"]
    in_processes([[*command, str(tmp_path / "one")]], JAX_NUM_CPU_DEVICES="8")
    address = free_address()
    together = [*command, str(tmp_path / "two"), "--processes.coordinator", address, "--processes.count", "2"]
    in_processes([[*together, "--processes.id", str(i)] for i in range(2)], JAX_NUM_CPU_DEVICES="4")

    def losses(folder: Path) -> list[tuple[str, int, float]]:
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return [(r["kind"], r["step"], r.get("loss", 0.0)) for r in records]

    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert [r[:2] for r in one] == [r[:2] for r in two]
    assert len(one) == 7  # four steps, two evaluations, one result
    np.testing.assert_allclose([r[2] for r in two], [r[2] for r in one], atol=1e-5)
    assert (tmp_path / "two" / "model" / "model.safetensors").is_file()
    assert sorted(p.name for p in (tmp_path / "two" / "checkpoints").iterdir()) == ["2", "4"]


def test_two_processes_of_four_devices_equal_one_process_of_eight() -> None:
    (one,) = run_processes(1, 8)
    first, second = run_processes(2, 4)
    assert first == second
    assert first[2] == one[2] == 8
    np.testing.assert_allclose(first[0], one[0], atol=1e-6)
    np.testing.assert_allclose(first[1], one[1], rtol=1e-6)
