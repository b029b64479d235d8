"""Stop, kill, resume: the run that was interrupted ends with the same bits as the one that was not."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from programs import load_program

from transformer_jax.cli import run_command

WORKER = Path(__file__).parent / "resume_worker.py"
STEPS = 40


def start(folder: Path, *options: str, log: Path) -> subprocess.Popen[str]:
    command = [sys.executable, str(WORKER), str(folder), str(log), *options]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def finish(worker: subprocess.Popen[str]) -> tuple[int, str]:
    _, messages = worker.communicate(timeout=300)
    return worker.returncode, messages


def saved_state(folder: Path, step: int) -> dict[str, np.ndarray]:
    import orbax.checkpoint as ocp

    state = ocp.StandardCheckpointer().restore((folder / "checkpoints" / str(step) / "state").absolute())
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(state)}


def assert_same_bits(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    assert a.keys() == b.keys()
    assert len(a) > 100  # parameters and both of Adam's moments
    for name, array in a.items():
        np.testing.assert_array_equal(array, b[name], err_msg=name)


def batches_used(log: Path) -> list[tuple[int, str]]:
    return [(int(step), digest) for step, digest in (line.split() for line in log.read_text().splitlines())]


def without_times(metrics: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [{k: v for k, v in r.items() if "second" not in k and k != "wait"} for r in records]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody interrupted, with the log of its batches."""
    folder = tmp_path_factory.mktemp("whole")
    code, messages = finish(start(folder / "run", log=folder / "batches"))
    assert code == 0, messages
    return folder


def test_five_kills_at_random_steps_and_one_inside_a_save_change_no_bit(whole: Path, tmp_path: Path) -> None:
    chance = random.Random(0)
    log = tmp_path / "batches"
    reference = dict(batches_used(whole / "batches"))
    assert sorted(reference) == list(range(1, STEPS + 1))
    # Each kill lies beyond the last, so that every resumption gets somewhere; 24 is the step of a checkpoint.
    kills = [("--die-after", chance.randint(low, low + 5)) for low in (2, 8, 14)] + [("--die-saving", 24)]
    kills += [("--die-after", chance.randint(low, low + 5)) for low in (26, 33)]
    for option, step in kills:
        code, messages = finish(start(tmp_path / "run", option, str(step), log=log))
        assert code == -signal.SIGKILL, messages
        if option == "--die-saving":
            names = [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()]
            assert "24" not in names
            assert any(name.startswith("24.") for name in names), "the kill was meant to leave a half-written save"
    code, messages = finish(start(tmp_path / "run", log=log))
    assert code == 0, messages

    used = batches_used(log)
    assert len(used) > STEPS  # steps after a checkpoint were made again
    assert all(digest == reference[step] for step, digest in used)
    assert_same_bits(saved_state(tmp_path / "run", STEPS), saved_state(whole / "run", STEPS))
    assert without_times(tmp_path / "run" / "metrics.jsonl") == without_times(whole / "run" / "metrics.jsonl")
    for name in ("config.json", "model.safetensors", "vocab.json"):
        assert (tmp_path / "run" / "model" / name).read_bytes() == (whole / "run" / "model" / name).read_bytes()


def test_sigterm_saves_says_so_and_the_same_command_goes_on(whole: Path, tmp_path: Path) -> None:
    log = tmp_path / "batches"
    worker = start(tmp_path / "run", log=log)
    deadline = time.monotonic() + 240
    while not (log.is_file() and len(log.read_text().splitlines()) >= 3):
        assert worker.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    worker.send_signal(signal.SIGTERM)
    code, messages = finish(worker)
    assert "Traceback" not in messages
    assert "SIGTERM: saved at step" in messages
    assert code == 0  # the worker's train() returned; train.py turns the outcome into 143
    code, messages = finish(start(tmp_path / "run", log=log))
    assert code == 0, messages
    assert "resuming" in messages
    assert_same_bits(saved_state(tmp_path / "run", STEPS), saved_state(whole / "run", STEPS))


def test_a_run_saved_on_eight_devices_goes_on_on_four(whole: Path, tmp_path: Path) -> None:
    log = tmp_path / "batches"
    options = ["--die-after", "21", "--devices", "8"]
    code, messages = finish(start(tmp_path / "run", *options, log=log))
    assert code == -signal.SIGKILL, messages
    code, messages = finish(start(tmp_path / "run", "--devices", "4", log=log))
    assert code == 0, messages
    assert "resuming   at step 20" in messages
    reference = dict(batches_used(whole / "batches"))
    assert all(digest == reference[step] for step, digest in batches_used(log))
    assert saved_state(tmp_path / "run", STEPS).keys() == saved_state(whole / "run", STEPS).keys()


def test_a_checkpoint_that_cannot_be_read_is_put_aside_and_the_one_before_is_used(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole / "run", tmp_path / "run")
    checkpoints = tmp_path / "run" / "checkpoints"
    shutil.rmtree(checkpoints / str(STEPS) / "state")
    (checkpoints / "notes.txt").write_text("not a checkpoint")
    code, messages = finish(start(tmp_path / "run", log=tmp_path / "batches"))
    assert code == 0, messages
    assert f"resuming   at step {STEPS - 4}" in messages
    assert (checkpoints / f"{STEPS}.unreadable").is_dir()
    assert_same_bits(saved_state(tmp_path / "run", STEPS), saved_state(whole / "run", STEPS))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--model.d-ff", "48"], ["feed_forward/hidden/kernel", "[64, 128]", "[64, 48]"]),
        (["--train.clip-norm", "None"], ["clip_norm"]),
        (["--train.seed", "5"], ["seed 0 there, 5 here"]),
        (["--data.batch-size", "32"], ["shapes"]),
        (["--data.task", "numbers"], ["data.task reversal", "numbers"]),
    ],
)
def test_a_run_is_not_resumed_as_another_and_stays_as_it_was(
    options: list[str], named: list[str], reversal_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (reversal_run / "config.json").read_bytes()
    code = run_command(lambda: train_main([*REVERSAL, "--output", str(reversal_run), *options]))
    messages = capsys.readouterr().err
    assert code == 2
    for words in named:
        assert words in messages.splitlines()[-1]
    assert (reversal_run / "config.json").read_bytes() == before


@pytest.mark.parametrize("config", ["{", '{"data": 3, "model": []}'])
def test_a_run_with_a_damaged_config_goes_on(
    config: str, reversal_run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(reversal_run, folder)
    (folder / "config.json").write_text(config)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "average", "step": 2, "score": "x"}\n{"kind": "validation", "step": 2, "samples": 3}\n')
    assert run_command(lambda: train_main([*REVERSAL, "--output", str(folder)])) == 0
    assert json.loads((folder / "config.json").read_text()) == json.loads((reversal_run / "config.json").read_text())
    messages = [record.getMessage() for record in caplog.records if "config.json" in record.getMessage()]
    assert len(messages) == (config != '{"data": 3, "model": []}')
    for message in messages:
        assert message.endswith(" Whether the run was started with the same options of its vocabulary is not checked.")


ROOT = Path(__file__).parents[1]
REVERSAL = ["--config", str(ROOT / "configs" / "reverse.py"), "--train.n-devices", "1", "--decode.limit", "8"]
REVERSAL += ["--train.steps", "2", "--train.evaluate-every", "2"]


def train_main(arguments: list[str]) -> int:
    return load_program(ROOT / "train.py").main(arguments)


@pytest.fixture(scope="module")
def reversal_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reversal") / "run"
    assert train_main([*REVERSAL, "--output", str(folder)]) == 0
    return folder
