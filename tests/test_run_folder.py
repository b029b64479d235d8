"""The run folder: records that survive a kill, pages and pictures made from them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from transformer_jax.config import DataConfig, ModelConfig, RunConfig
from transformer_jax.errors import UserError
from transformer_jax.run_folder import RunFolder


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    folder = RunFolder(tmp_path / "runs" / "one")
    folder.create()
    yield folder
    folder.close()


def test_config_is_kept_as_plain_json(tmp_path: Path) -> None:
    config = RunConfig(
        name="mine", model=ModelConfig(d_model=64), data=DataConfig(dir=tmp_path / "data"), samples=("Grüße",)
    )
    folder = RunFolder(tmp_path / "run")
    folder.create()
    folder.write_config(config)
    kept = json.loads((tmp_path / "run" / "config.json").read_text(encoding="utf-8"))
    assert kept["name"] == "mine"
    assert kept["model"]["d_model"] == 64
    assert kept["data"]["dir"] == str(tmp_path / "data")
    assert kept["samples"] == ["Grüße"]


def test_records_come_back_by_kind_in_order(folder: RunFolder) -> None:
    folder.write("train", 1, loss=2.5)
    folder.write("validation", 1, score=0.5, samples=[["Straße", "street"]])
    folder.write("train", 2, loss=2.0)
    assert [r["step"] for r in folder.records("train")] == [1, 2]
    assert folder.records("validation") == [
        {"kind": "validation", "step": 1, "score": 0.5, "samples": [["Straße", "street"]]}
    ]
    assert len(folder.records()) == 3


def test_a_run_without_records_has_none(tmp_path: Path) -> None:
    assert RunFolder(tmp_path).records() == []


def test_numbers_go_to_tensorboard_too(folder: RunFolder) -> None:
    folder.write("train", 7, loss=0.25)
    folder.close()
    (events,) = folder.folder.glob("events.*")
    assert b"train/loss" in events.read_bytes()


LAST = '{"kind": "train", "step": 3, "text": "ü}", "loss": 1.5}'.encode()


@pytest.mark.parametrize("cut", range(1, len(LAST)))
def test_a_half_written_last_line_is_ignored_wherever_it_was_cut(folder: RunFolder, cut: int) -> None:
    """Also in the middle of a letter, and after a brace that is not the last."""
    folder.metrics.write_bytes(b'{"kind": "train", "step": 1}\n{"kind": "train", "step": 2}\n' + LAST[:cut])
    assert [r["step"] for r in folder.records()] == [1, 2]


def test_records_written_after_a_half_line_are_not_lost_with_it(folder: RunFolder) -> None:
    folder.metrics.write_bytes(b'{"kind": "train", "step": 1}\n{"kind": "tra')
    folder.write("train", 2, loss=1.0)
    folder.write("train", 3, loss=1.0)
    assert [r["step"] for r in folder.records()] == [1, 2, 3]


def test_records_beyond_the_step_that_a_run_goes_on_from_are_forgotten(folder: RunFolder) -> None:
    for step in (1, 2, 3):
        folder.write("train", step, text="ß")
        folder.write("validation", step)
    folder.forget_after(2)
    assert [(r["kind"], r["step"]) for r in folder.records()] == [
        ("train", 1),
        ("validation", 1),
        ("train", 2),
        ("validation", 2),
    ]
    folder.write("train", 3)
    assert [r["step"] for r in folder.records("train")] == [1, 2, 3]


def test_forgetting_drops_a_half_written_line(folder: RunFolder) -> None:
    folder.metrics.write_bytes(b'{"kind": "train", "step": 1}\n{"kind": "tra')
    folder.forget_after(5)
    assert folder.metrics.read_bytes() == b'{"kind": "train", "step": 1}\n'


def test_curves_and_samples_are_written_whole(folder: RunFolder) -> None:
    for step in (10, 20):
        folder.write("train", step, loss=5.0 / step, accuracy=0.5, rate=1e-3)
    folder.write("validation", 20, loss=0.4, accuracy=0.6, score=0.9, samples=[["A dog.", "Ein Hund."]])
    folder.draw()
    content = (folder.folder / "curves.png").read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert content.endswith(b"IEND\xaeB`\x82")
    assert "`Ein Hund.`" in (folder.folder / "samples.md").read_text()
    assert not list(folder.folder.glob(".*"))  # no half-written file is left


def test_lone_surrogates_of_a_damaged_file_are_replaced(folder: RunFolder) -> None:
    line = b'{"kind": "validation", "step": 1, "samples": [["a", "\\ud800"]]}\n'
    folder.metrics.write_bytes(line)
    folder.draw()
    folder.forget_after(1)
    assert "| `a` | `?` |" in (folder.folder / "samples.md").read_text(encoding="utf-8")
    assert folder.metrics.read_bytes() == line.replace(b"\\ud800", b"?")


def test_curves_of_a_run_without_records_are_drawn_too(folder: RunFolder) -> None:
    folder.draw()
    assert (folder.folder / "curves.png").is_file()


def test_a_file_in_the_place_of_the_run_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        RunFolder(tmp_path / "file").create()
    with pytest.raises(UserError, match="cannot be written"):
        RunFolder(tmp_path / "file" / "run").create()
