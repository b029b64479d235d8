"""Averages of checkpoints: the right ones, added up in float32, as a model that loads."""

from __future__ import annotations

import json
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
from transformer_jax.config import ModelConfig, RunConfig
from transformer_jax.errors import UserError
from transformer_jax.model import Transformer
from transformer_jax.run_folder import RunFolder
from transformer_jax.sharding import data_mesh, replicate
from transformer_jax.tokenizer import CharacterTokenizer
from transformer_jax.training import init_params, start_from
from transformer_jax.translator import Translator

pytestmark = pytest.mark.usefixtures("fast_compilation")

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
    average = average_params(run / "checkpoints", STEPS)
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
        UserError, match=r"steps 1 and 2 differ in .*: \(.*\) and \(.*\); only checkpoints of one model"
    ):
        average_params(tmp_path, [1, 2])


def test_a_damaged_checkpoint_is_told(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"The checkpoint of step 5 in .* cannot be read"):
        read_params(tmp_path, 5)


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
