"""tensorflow-datasets without TensorFlow: a prepared set trains what the text files it was made from train."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_corpus_cache import run_config, sentences

from transformer_jax.cli import run_command
from transformer_jax.errors import UserError
from transformer_jax.pair_sources import open_files
from transformer_jax.run_data import read_texts
from transformer_jax.tfds_parallel import open_dataset, prepare_parallel_text
from transformer_jax.trainer import Trainer

pytest.importorskip("tensorflow_datasets", reason="tensorflow-datasets is not installed")

ROOT = Path(__file__).resolve().parents[1]
LANGUAGES = ("en", "de")
STRANGE = ["one\u2028line\x85with\rmarks", "caf\ufffd", " spaces ", "", "\U0001f438 frog", "\x00\x01"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of train and val files, plain and gzipped, with lines of every kind."""
    folder = tmp_path_factory.mktemp("text")
    for language, seed in (("en", 0), ("de", 1)):
        lines = [*sentences(150, seed), *STRANGE, *sentences(150, seed + 2)]
        content = "\n".join(lines).encode() + b"\r\nbytes \xff\xfe\n"
        (folder / f"train.{language}").write_bytes(content)
        (folder / f"val.{language}.gz").write_bytes(gzip.compress("\n".join(sentences(20, seed + 4)).encode()))
    return folder


@pytest.fixture(scope="module")
def prepared(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sets")
    splits = {"train": (text / "train.en", text / "train.de")}
    splits["validation"] = (text / "val.en.gz", text / "val.de.gz")
    prepare_parallel_text(splits, LANGUAGES, folder)
    return folder


def test_a_prepared_set_has_the_pairs_of_its_files_in_their_order(text: Path, prepared: Path) -> None:
    dataset = open_dataset("parallel_text/en-de", prepared, LANGUAGES)
    from_files = list(open_files(text / "train.en", text / "train.de"))
    train = dataset.split("train")
    assert list(train) == from_files
    assert len(train) == len(from_files) == 307
    assert from_files[-1] == ("bytes \ufffd\ufffd",) * 2
    swapped = open_dataset("parallel_text/en-de:1.0.0", prepared, ("de", "en")).split("train")
    assert list(swapped) == [(target, source) for source, target in from_files]
    assert swapped.digest != train.digest
    assert list(dataset.split("train[10:20]")) == from_files[10:20]
    assert len(dataset.text("val")) == 20  # the name that configs have stands for "validation" too


def test_a_prepared_set_trains_the_bits_of_its_files(text: Path, prepared: Path, tmp_path: Path) -> None:
    data = dataclasses.replace(run_config(text).data, source=(), target=(), dir=text)
    from_files = dataclasses.replace(run_config(text), data=data)
    data = dataclasses.replace(data, dir=None, tfds="parallel_text/en-de", tfds_dir=prepared)
    from_set = dataclasses.replace(from_files, data=data)
    runs = [Trainer(config, tmp_path / name) for name, config in (("files", from_files), ("set", from_set))]
    assert runs[0].batches.fingerprint == runs[1].batches.fingerprint
    for name in ("source.spm", "vocab.json"):
        assert (runs[0].folder.tokenizer / name).read_bytes() == (runs[1].folder.tokenizer / name).read_bytes()
    for run in runs:
        run.train()
    files = [run.folder.model / "model.safetensors" for run in runs]
    assert files[0].read_bytes() == files[1].read_bytes()
    states: list[Any] = [run.checkpoints for run in runs]
    assert states[0].latest_step == states[1].latest_step == 2
    losses = [[r["loss"] for r in run.folder.records("train")] for run in runs]
    assert losses[0] == losses[1]
    report = json.loads((tmp_path / "set" / "data_report.json").read_text())
    assert report["corpora"][0]["name"] == "parallel_text/en-de/1.0.0 train"
    assert report["corpora"][0]["removed"]["blank"] == 1


def test_a_set_is_mixed_with_files(text: Path, prepared: Path) -> None:
    data = dataclasses.replace(
        run_config(text).data,
        tfds="parallel_text/en-de",
        tfds_dir=prepared,
        source=(text / "train.en",),
        target=(text / "train.de",),
        weights=(2.0, 1.0),
    )
    texts = read_texts(data)
    assert [(len(source.pairs), source.weight) for source in texts.train.sources] == [(307, 2.0), (307, 1.0)]
    assert texts.validation is not None
    assert len(texts.validation) == 20


CHECK = """
import sys
from pathlib import Path
from transformer_jax.tfds_parallel import open_dataset, prepare_parallel_text
folder, text = Path(sys.argv[1]), Path(sys.argv[2])
prepare_parallel_text({"train": (text / "train.en", text / "train.de")}, ("en", "de"), folder, "again")
n = sum(1 for _ in open_dataset("again/en-de", folder, ("en", "de")).split("train"))
print("RESULT", n, "tensorflow" in sys.modules)
"""


def test_neither_making_nor_reading_imports_tensorflow(text: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", CHECK, str(tmp_path), str(text)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "RESULT 307 False"


def test_the_command_makes_a_set(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformer_jax.cli import _dispatch

    split = ["--split", "train", str(text / "train.en"), str(text / "train.de")]
    command = ["prepare-tfds", str(tmp_path), "--name", "mine", "--languages", "en", "de", *split]
    assert run_command(lambda: _dispatch(command)) == 0
    assert f"--data.tfds mine/en-de --data.tfds-dir {tmp_path}" in capsys.readouterr().out
    assert len(open_dataset("mine/en-de", tmp_path, LANGUAGES).split("train")) == 307
    assert run_command(lambda: _dispatch(command)) == 2
    assert "is a prepared set already" in capsys.readouterr().err
    assert run_command(lambda: _dispatch([*command, *split])) == 2
    assert "named twice" in capsys.readouterr().err


def test_what_is_not_there_is_named(text: Path, prepared: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"There is no set no_such_set in .*check --data\.tfds"):
        open_dataset("no_such_set", prepared, LANGUAGES)
    with pytest.raises(UserError, match="no text called fr; it has de, en"):
        open_dataset("parallel_text/en-de", prepared, ("en", "fr"))
    with pytest.raises(UserError, match="no split 'test'; it has train, validation"):
        open_dataset("parallel_text/en-de", prepared, LANGUAGES).split("test")
    with pytest.raises(UserError, match="cannot name a set or a language"):
        prepare_parallel_text({"train": (text / "train.en", text / "train.de")}, ("en", "DE"), tmp_path)
    with pytest.raises(UserError, match="There is no file"):
        prepare_parallel_text({"train": (text / "no.en", text / "train.de")}, LANGUAGES, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_set_without_the_library_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with pytest.raises(UserError, match=r"pip install 'transformer-jax\[tfds\]'"):
        open_dataset("parallel_text/en-de", None, LANGUAGES)
