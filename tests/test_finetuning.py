"""Training that starts from a model: its tokenizer and numbers are kept, and it is scored before the first step."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from transformer_jax.config import DataConfig, DecodeConfig, ModelConfig, RunConfig, TrainConfig
from transformer_jax.errors import UserError
from transformer_jax.pretrained import load_pretrained
from transformer_jax.run_model import load_initial
from transformer_jax.trainer import Trainer

TINY = Path(__file__).parent / "fixtures" / "marian_tiny"
PAIRS = [(pair["src"], pair["trg"]) for pair in json.loads((TINY / "scores.json").read_text())]


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    for side, language in enumerate(("en", "de")):
        (tmp_path / f"train.{language}").write_text("".join(pair[side] + "\n" for pair in PAIRS), encoding="utf-8")
    source, target = tmp_path / "train.en", tmp_path / "train.de"
    data = DataConfig(
        source=(source,),
        target=(target,),
        validation_source=source,
        validation_target=target,
        test_source=source,
        test_target=target,
        batch_tokens=None,
        batch_size=16,
        n_buckets=1,
    )
    train = TrainConfig(
        steps=30, schedule="constant", peak_rate=0.01, warmup_steps=1, evaluate_every=15, n_devices=1, log_every=5
    )
    return RunConfig(
        init=str(TINY),
        data=data,
        train=train,
        model=ModelConfig(dropout=0.0),
        decode=DecodeConfig(extra_length=5),
    )


def records(folder: Path, kind: str) -> list[Any]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [r for r in map(json.loads, lines) if r["kind"] == kind]


def test_a_native_model_is_trained_on_and_scored_before_and_after(
    config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Trainer(config, tmp_path / "run").train()
    validation = records(tmp_path / "run", "validation")
    assert [r["step"] for r in validation] == [0, 15, 30]
    # Before the first step it is the native model: its mean loss, unsmoothed, is that of Marian's own scores.
    golden = [score for pair in json.loads((TINY / "scores.json").read_text()) for score in pair["word_scores"]]
    assert np.log(validation[0]["perplexity"]) == pytest.approx(-np.mean(golden), abs=1e-4)
    assert validation[2]["loss"] < validation[0]["loss"] - 0.5
    (before,), (after,) = records(tmp_path / "run", "before"), records(tmp_path / "run", "result")
    assert before["signature"] == after["signature"]
    assert "test before" in capsys.readouterr().err

    original, tuned = load_pretrained(TINY), load_pretrained(tmp_path / "run")
    assert tuned.config == dataclasses.replace(original.config, dropout=0.0)
    assert tuned.suppressed == original.suppressed
    lines = [pair[0] for pair in PAIRS]
    assert tuned.tokenizer.encode_source_batch(lines) == original.tokenizer.encode_source_batch(lines)


def test_a_run_that_makes_nothing_better_keeps_the_model_that_it_began_with(config: RunConfig, tmp_path: Path) -> None:
    train = dataclasses.replace(config.train, peak_rate=1e-12, steps=2, evaluate_every=2)
    Trainer(dataclasses.replace(config, train=train), tmp_path / "run").train()
    kept, original = load_pretrained(tmp_path / "run"), load_pretrained(TINY)
    jax.tree.map(np.testing.assert_array_equal, kept.params, original.params)


def test_sizes_that_the_model_does_not_have_are_said(config: RunConfig, caplog: pytest.LogCaptureFixture) -> None:
    load_initial(config)
    assert not caplog.records
    asked = dataclasses.replace(config.model, d_model=24, n_encoder_layers=5, dropout=0.3)
    initial = load_initial(dataclasses.replace(config, model=asked))
    assert initial is not None
    own = load_pretrained(TINY).config
    assert initial.config.dropout == 0.3
    message = f"has model.d_model {own.d_model}, model.n_encoder_layers {own.n_encoder_layers}."
    assert caplog.records[0].getMessage().endswith(message)


def test_the_row_that_hugging_face_added_is_dropped(config: RunConfig, tmp_path: Path) -> None:
    """As its converter makes it: <pad> last, a row of zeros, which the decoder starts from."""
    from transformer_jax.convert import convert

    convert(TINY, tmp_path / "hf", positions="sin_then_cos")
    described = json.loads((tmp_path / "hf" / "config.json").read_text())
    rows = described["vocab_size"]
    del described["transformer_jax"]  # and it is a folder like any other
    (tmp_path / "hf" / "config.json").write_text(json.dumps(described))
    assert load_pretrained(tmp_path / "hf").config.vocab_size == rows
    initial = load_initial(dataclasses.replace(config, init=str(tmp_path / "hf")))
    assert initial is not None
    assert (initial.config.vocab_size, initial.config.start_embedding) == (rows - 1, "zero")
    assert initial.config.positions == "sin_then_cos"
    as_trained = dataclasses.replace(config, init=str(tmp_path / "hf"), init_positions="marian")
    again = load_initial(as_trained)
    assert again is not None
    native = load_pretrained(TINY)
    assert again.config == dataclasses.replace(
        native.config, dropout=0.0, max_length=again.config.max_length, source_pad_id=again.config.source_pad_id
    )
    jax.tree.map(np.testing.assert_array_equal, again.params, native.params)


def test_a_tokenizer_beside_the_models_own_is_refused(config: RunConfig, tmp_path: Path) -> None:
    data = dataclasses.replace(config.data, tokenizer=TINY)
    with pytest.raises(UserError, match="keeps its own tokenizer"):
        Trainer(dataclasses.replace(config, data=data), tmp_path / "run")


def test_a_model_that_is_not_there_is_one_sentence(config: RunConfig, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere"):
        Trainer(dataclasses.replace(config, init=str(tmp_path / "nowhere")), tmp_path / "run")
    assert not (tmp_path / "run").exists()
