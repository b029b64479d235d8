"""Averages of checkpoints: the right ones, added up in float32, as a model that loads."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from transformer_jax import cli
from transformer_jax.averaging import average_params, average_run, last_steps
from transformer_jax.checkpoint import Checkpoints, read_params
from transformer_jax.config import DataConfig, DecodeConfig, ModelConfig, RunConfig, TrainConfig, replace
from transformer_jax.errors import UserError
from transformer_jax.model import Transformer
from transformer_jax.run_folder import RunFolder
from transformer_jax.sharding import data_mesh, replicate
from transformer_jax.tokenizer import CharacterTokenizer
from transformer_jax.trainer import Trainer
from transformer_jax.training import init_params, start_from
from transformer_jax.translator import Translator

TOKENIZER = CharacterTokenizer(tuple("abc "))
MODEL = ModelConfig.tiny(
    TOKENIZER.vocab_size, d_model=16, n_heads=2, d_ff=32, n_encoder_layers=1, n_decoder_layers=1, max_length=16
)
STEPS = (900, 1000, 1100)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with three checkpoints whose parameters are 1, 2 and 6 times those of a start, on eight devices."""
    folder = RunFolder(tmp_path_factory.mktemp("runs") / "three")
    folder.create()
    folder.write_config(RunConfig(model=MODEL))
    TOKENIZER.save(folder.tokenizer)
    with Checkpoints(folder.checkpoints, keep=5) as checkpoints:
        for step, factor in zip(STEPS, (1.0, 2.0, 6.0), strict=True):
            params = jax.tree.map(lambda x, factor=factor: x * factor, start())
            state = start_from(params, optax.adam(1e-3)).replace(step=jnp.asarray(step))
            checkpoints.save(replicate(state, data_mesh(8)), {"position": {}, "best": {}})
    return folder.folder


def start() -> Any:
    return init_params(Transformer(MODEL), 0)


def test_parameters_are_read_without_the_rest(run: Path) -> None:
    params = read_params(run / "checkpoints", 1000)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, 2 * np.asarray(b)), params, start())


def test_the_average_is_the_mean_of_the_named_checkpoints(run: Path) -> None:
    average, steps = average_params(run / "checkpoints", STEPS)
    assert steps == list(STEPS)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, 3 * np.asarray(b), rtol=1e-6), average, start())
    assert {x.dtype for x in jax.tree.leaves(average)} == {np.dtype(np.float32)}


def test_the_last_are_the_highest_numbers_not_names() -> None:
    assert last_steps([1000, 900, 1100], 2, Path("run")) == [1000, 1100]
    with pytest.raises(UserError, match="run holds 3 checkpoints, fewer than the 4 to average"):
        last_steps([1000, 900, 1100], 4, Path("run"))
    with pytest.raises(UserError, match="--last is 0"):
        last_steps([1000], 0, Path("run"))


def test_the_command_writes_a_model_that_translates(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "model"
    monkeypatch.setattr("sys.argv", ["transformer-jax", "average", str(run), "--last", "2", "--output", str(output)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 0
    assert "2 checkpoints, steps 1000, 1100" in capsys.readouterr().out
    translator = Translator.from_pretrained(output, mesh=data_mesh(1))
    table = np.asarray(translator.params["target_embedding"]["table"])
    golden = 4 * np.asarray(start()["target_embedding"]["table"])
    assert np.allclose(np.sort(table, axis=None), np.sort(golden, axis=None), atol=1e-5)  # channels may be reordered
    assert len(translator.translate(["ab c", ""])) == 2


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"last": 7}, "fewer than the 7"),
        ({"steps": [900, 950]}, "no checkpoint of step 950; it holds 900, 1000, 1100"),
    ],
)
def test_what_is_not_there_is_told(run: Path, tmp_path: Path, change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        average_run(run, tmp_path / "out", **change)


def test_a_folder_in_use_is_not_written_into(run: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(UserError, match="exists; name a new folder"):
        average_run(run, tmp_path)
    with pytest.raises(UserError, match="holds no checkpoints/"):
        average_run(tmp_path, tmp_path / "out")


def test_checkpoints_of_different_models_are_refused(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, keep=5) as checkpoints:
        for step, width in ((1, 16), (2, 32)):
            model = Transformer(ModelConfig.tiny(8, d_model=width, n_heads=2, d_ff=32))
            state = start_from(init_params(model, 0), optax.sgd(0.1)).replace(step=jnp.asarray(step))
            checkpoints.save(state, {"position": {}, "best": {}})
    with pytest.raises(
        UserError, match=r"steps 1 and 2 differ in .*: \[.*\] and \[.*\]; only checkpoints of one model"
    ):
        average_params(tmp_path, [1, 2])


def test_a_checkpoint_that_is_damaged_or_missing_is_told_and_left_out(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "checkpoints"
    shutil.copytree(run / "checkpoints", folder)
    for data in folder.glob("1000/state/**/d/*"):
        data.unlink()
    for step in (5, 1000):
        with pytest.raises(UserError, match=rf"step {step} in .* cannot be read: its files are damaged or missing"):
            read_params(folder, step)
    average, steps = average_params(folder, STEPS, leave_out_damaged=True)
    assert steps == [900, 1100]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, 3.5 * np.asarray(b), rtol=1e-6), average, start())
    with pytest.raises(UserError, match="step 1000"):
        average_params(folder, STEPS)
    with pytest.raises(UserError, match="that is to be averaged can be read"):
        average_params(folder, [1000], leave_out_damaged=True)
    assert "step 1000" in caplog.text
    assert "left out of the average" in caplog.text


def test_a_config_of_another_version_is_told(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("checkpoints", "tokenizer"):
        (copy / name).symlink_to(run / name)
    described = json.loads((run / "config.json").read_text())
    described["model"]["gears"] = 5
    (copy / "config.json").write_text(json.dumps(described))
    with pytest.raises(UserError, match="does not describe a model of this version"):
        average_run(copy, tmp_path / "out")


def test_checkpoints_of_another_model_than_the_config_says_are_told(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("checkpoints", "tokenizer"):
        (copy / name).symlink_to(run / name)
    described = json.loads((run / "config.json").read_text())
    described["model"]["d_model"] = 32
    (copy / "config.json").write_text(json.dumps(described))
    with pytest.raises(UserError, match=r"not of the model that its config\.json describes"):
        average_run(copy, tmp_path / "out")
    (copy / "checkpoints").unlink()
    (copy / "checkpoints").mkdir()
    with pytest.raises(UserError, match="holds no checkpoint yet"):
        average_run(copy, tmp_path / "out")


# --- at the end of a run --------------------------------------------------------------------------------------


RUN = RunConfig(
    model=ModelConfig.tiny(d_model=16, n_heads=2, d_ff=32, n_encoder_layers=1, n_decoder_layers=1, max_length=64),
    data=DataConfig(task="reversal", max_tokens=16, batch_tokens=None, batch_size=16, n_buckets=1, limit=200),
    train=TrainConfig(
        n_devices=1,
        steps=12,
        warmup_steps=10,
        evaluate_every=None,
        checkpoint_every=4,
        keep_checkpoints=3,
        average_last=2,
    ),
    decode=DecodeConfig(metric="exact", extra_length=4, limit=4),
)


def finish(folder: Path, stop_at: int | None = None, **changes: Any) -> list[int]:
    """Trains, with a SIGTERM after a step if asked for; the steps that the last average is of."""
    trainer = Trainer(replace(RUN, **{f"train.{name}": value for name, value in changes.items()}), folder)
    train_step = trainer.train_step

    def step(state: Any, batch: Any) -> Any:
        state, log = train_step(state, batch)
        if int(state.step) == stop_at:
            os.kill(os.getpid(), signal.SIGTERM)
        return state, log

    step._cache_size = train_step._cache_size  # type: ignore[attr-defined]
    trainer.train_step = step
    trainer.train()
    records = trainer.folder.records("average")
    return records[-1]["steps"] if records else []


def model_of(folder: Path) -> bytes:
    return (folder / "model" / "model.safetensors").read_bytes()


def test_a_run_that_was_stopped_averages_the_checkpoints_of_one_that_was_not(tmp_path: Path) -> None:
    assert finish(tmp_path / "straight") == [8, 12]
    assert finish(tmp_path / "stopped", stop_at=9) == []
    assert finish(tmp_path / "stopped") == [8, 12]
    assert model_of(tmp_path / "straight") == model_of(tmp_path / "stopped")
    with Checkpoints(tmp_path / "stopped" / "checkpoints") as checkpoints:
        assert checkpoints.steps == [4, 8, 12]


def test_a_run_that_goes_on_averages_anew_and_keeps_the_best(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert finish(folder, evaluate_every=4) == [8, 12]
    first = model_of(folder)
    assert finish(folder, evaluate_every=4) == [8, 12]  # it was over: nothing changes
    assert model_of(folder) == first
    assert len(RunFolder(folder).records("average")) == 1
    assert finish(folder, steps=16, evaluate_every=None) == [12, 16]
    assert model_of(folder) != first


def test_an_average_that_scored_higher_is_not_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = iter([1.0, 2.0, 3.0, 9.0, 4.0, 5.0])  # at 4, 8, 12, of the average, at 16, of the average

    def score(*_: Any) -> dict[str, Any]:
        return {"exact": next(scores), "bleu": 0.0, "bleu_lowercase": 0.0, "chrf": 0.0, "signature": ""}

    monkeypatch.setattr(Trainer, "_score", score)
    folder = tmp_path / "run"
    finish(folder, evaluate_every=4)
    best = model_of(folder)
    finish(folder, evaluate_every=4, steps=16)
    assert model_of(folder) == best
    assert RunFolder(folder).records("result")[-1]["best_score"] == 9.0


def test_a_moving_average_is_what_is_averaged_and_resumed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    finish(folder, average_last=1, ema_decay=0.9)
    average = read_params(folder / "checkpoints", 12)
    assert average_run(folder, tmp_path / "model", steps=[12]) == [12]
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == model_of(folder)
    raw = finish(tmp_path / "raw", average_last=1)
    assert raw == []
    other = read_params(tmp_path / "raw" / "checkpoints", 12)
    assert any((a != b).any() for a, b in zip(*map(jax.tree.leaves, (average, other)), strict=True))
    with pytest.raises(UserError, match=r"an average of the parameters and the run asks for none \(train.ema_decay\)"):
        finish(folder, average_last=1, steps=16)
