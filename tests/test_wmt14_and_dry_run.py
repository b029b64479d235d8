"""The WMT14 recipes are the paper's to the number; a dry run tells what they take without any data."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.batching import Batch
from transformer_jax.config import DataConfig, ModelConfig, RunConfig, TrainConfig, replace
from transformer_jax.dry_run import ACCELERATORS, batch_shape, describe, device_step, padding_line, training_flops
from transformer_jax.errors import UserError
from transformer_jax.model import Transformer
from transformer_jax.run_options import Accelerator, load_config, parse_options
from transformer_jax.tokenizer import CharacterTokenizer
from transformer_jax.trainer import Trainer
from transformer_jax.training import batch_logits, init_params

CONFIGS = Path(__file__).parent.parent / "configs"


@pytest.fixture(scope="module")
def base() -> RunConfig:
    return load_config(CONFIGS / "wmt14_base.py")


@pytest.fixture(scope="module")
def big() -> RunConfig:
    return load_config(CONFIGS / "wmt14_big.py")


def test_both_follow_section_5_of_the_paper(base: RunConfig, big: RunConfig) -> None:
    for config in (base, big):
        train, data, decode = config.train, config.data, config.decode
        # §5.1: WMT 2014 English-German, 37,000 shared byte pairs, about 25,000 tokens a side.
        assert (data.tfds, data.source_lang, data.target_lang) == ("wmt14_translate/de-en", "en", "de")
        assert (data.tokenizer_type, data.vocab_size) == ("bpe", 37_000)
        rows, length = batch_shape(config)
        assert abs(rows * length - 25_000) < 1_000
        assert (data.validation_split, data.test_split) == ("validation", "test")  # newstest2013 and newstest2014
        # §5.3
        assert (train.beta1, train.beta2, train.epsilon) == (0.9, 0.98, 1e-9)
        assert (train.schedule, train.warmup_steps, train.decay_fraction) == ("paper", 4000, 0.0)
        assert train.clip_norm is None
        # §5.4
        assert train.label_smoothing == 0.1
        # §6.1
        assert (decode.beam_size, decode.length_rule, decode.length_penalty, decode.extra_length) == (
            4,
            "gnmt",
            0.6,
            50,
        )
        # §3.4 and §3.5
        model = config.model
        assert (model.shared_embedding, model.tied_output, model.scale_embedding) == (True, True, True)
        assert (model.norm, model.positions, model.activation) == ("post", "interleaved", "relu")


@pytest.mark.parametrize(
    ("name", "sizes", "dropout", "steps", "averaged", "seconds"),
    [
        ("wmt14_base", (512, 2048, 8, 6, 6), 0.1, 100_000, 5, 0.4),
        ("wmt14_big", (1024, 4096, 16, 6, 6), 0.3, 300_000, 20, 1.0),
    ],
)
def test_each_has_its_row_of_table_3(
    name: str, sizes: tuple[int, ...], dropout: float, steps: int, averaged: int, seconds: float
) -> None:
    config = load_config(CONFIGS / f"{name}.py")
    m, train = config.model, config.train
    assert (m.d_model, m.d_ff, m.n_heads, m.n_encoder_layers, m.n_decoder_layers) == sizes
    assert m.d_head == 64
    assert (m.dropout, train.steps, train.average_last) == (dropout, steps, averaged)
    # §6.1: checkpoints "written at 10-minute intervals", at §5.2's seconds a step.
    assert train.checkpoint_every * seconds == 600
    assert train.keep_checkpoints == averaged


def test_a_dry_run_of_base_tells_the_numbers_of_the_paper(base: RunConfig, tmp_path: Path) -> None:
    """63.08M parameters with the paper's vocabulary; on the paper's eight P100 about its 12 hours."""
    told = "\n".join(describe(replace(base, **{"data.tfds_dir": tmp_path}), "P100", 8, compiled=False))
    assert "63,082,496 parameters" in told
    assert "96 rows of 256 slots a side" in told
    assert "1 for training" in told
    assert f"padding    not measured: wmt14_translate/de-en is not in {tmp_path} yet." in told
    hours = float(told.split(" s a step, ")[1].split(" hours")[0])
    assert 8 < hours < 16


def test_the_command_prints_it_without_data(tmp_path: Path) -> None:
    command = [sys.executable, str(CONFIGS.parent / "train.py"), "--config", str(CONFIGS / "dates.py"), "--dry-run"]
    command += ["--accelerators", "2", "--accelerator", "A100"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert "930,944 parameters" in done.stdout
    assert "padding    11.0% of all slots (buckets, 1 shape; of 71,049 pairs)" in done.stdout
    assert "on 2 A100" in done.stdout
    assert "GiB" in done.stdout
    assert not list(tmp_path.iterdir())
    with pytest.raises(UserError, match="--accelerators is 0"):
        parse_options(["--dry-run", "--accelerators", "0"], CONFIGS / "dates.py")


def test_a_dry_run_makes_the_checks_of_a_run(base: RunConfig) -> None:
    with pytest.raises(UserError, match="multiple of 8 rows, which 12 devices"):
        describe(base, "A100", 12, compiled=False)
    with pytest.raises(UserError, match="There is no task 'dance'"):
        describe(replace(load_config(CONFIGS / "dates.py"), **{"data.task": "dance"}), compiled=False)
    with pytest.raises(UserError, match="max_tokens is 256, but the model's positions end at max_length, 100"):
        describe(replace(base, **{"model.max_length": 100}), compiled=False)


def test_a_dry_run_does_not_know_the_steps_of_epochs() -> None:
    told = "\n".join(describe(load_config(CONFIGS / "multi30k.py"), compiled=False))
    assert "padding    not measured: There is no training text" in told
    assert "as many steps as 14 epochs of the text have" in told
    assert "teacher    first a run of 24 epochs of the text as it is" in told
    assert "for 1,000 on 8 H100" in told
    assert "2,093,568 parameters" in told


def test_a_dry_run_measures_the_padding_of_a_text(tmp_path: Path) -> None:
    """Rows of 8 slots for pairs of 4 + 4 tokens, end tokens included: full in pairs, half empty where 8 rows hold one
    each."""
    for name in ("train.en", "train.de", "val.en", "val.de"):
        (tmp_path / name).write_text("abc\n" * 16)
    characters = CharacterTokenizer("abc")
    characters.save(tmp_path / "tokenizer")
    data = DataConfig(dir=tmp_path, tokenizer=tmp_path / "tokenizer", max_tokens=8, row_tokens=8, batch_tokens=64)
    assert padding_line(RunConfig(data=data)).startswith("padding    0.0% of all slots (buckets")
    packed = dataclasses.replace(data, batching="packed")
    assert padding_line(RunConfig(data=packed)).startswith("padding    0.0% of all slots (packed")
    fewer = dataclasses.replace(packed, limit=8)
    assert padding_line(RunConfig(data=fewer)).startswith("padding    50.0% of all slots (packed, 1 shape;")


def test_a_dry_run_tells_that_a_text_is_absent_and_refuses_one_that_is_broken(tmp_path: Path) -> None:
    for name in ("train.en", "train.de", "val.en", "val.de"):
        (tmp_path / name).write_text("abc\n" * 16)
    CharacterTokenizer("abc").save(tmp_path / "tokenizer")
    data = DataConfig(dir=tmp_path, tokenizer=tmp_path / "tokenizer")
    (tmp_path / "train.de").write_text("abc\n" * 15)
    with pytest.raises(UserError, match="has 15: line i"):
        padding_line(RunConfig(data=data))
    (tmp_path / "train.de").unlink()
    assert "not measured" in padding_line(RunConfig(data=data))


def test_a_dry_run_counts_what_is_computed_twice() -> None:
    config = load_config(CONFIGS / "dates.py")

    def flops(**changes: Any) -> float:
        told = "\n".join(describe(replace(config, **changes), compiled=False, padding=False))
        return float(told.split(" TFLOP a step")[0].split()[-1])

    assert flops(**{"train.r_drop": 5.0}) == pytest.approx(2 * flops(), rel=0.01)
    assert flops(**{"model.remat": True}) == pytest.approx(4 / 3 * flops(), rel=0.01)


def test_every_accelerator_that_is_offered_is_known() -> None:
    assert set(Accelerator.__args__) == set(ACCELERATORS)


def test_the_arithmetic_is_that_of_the_compiled_forward_pass() -> None:
    """XLA counts the floating-point operations of what it compiled; those of norms, softmax and masks come on top, so
    layers are wide here. The gradient costs twice the forward pass."""
    config = ModelConfig(
        vocab_size=2000, d_model=256, n_heads=2, d_ff=1024, n_encoder_layers=2, n_decoder_layers=3, dropout=0.0
    )
    model = Transformer(config)
    ids, S, T = jax.ShapeDtypeStruct((4, 64), jnp.int32), 64, 64
    batch = Batch(ids, ids, ids, ids, ids, ids, ids, jax.ShapeDtypeStruct(ids.shape, jnp.float32))
    params = jax.eval_shape(lambda: init_params(model, 0))
    compiled = jax.jit(lambda p, b: batch_logits(model, p, b, None)).lower(params, batch).compile()
    counted: Any = compiled.cost_analysis()
    assert training_flops(config, 4 * S, 4 * T, S, T) / 3 == pytest.approx(counted["flops"], rel=0.05)


def test_a_dry_run_compiles_the_step_that_a_run_would_make() -> None:
    config = replace(
        load_config(CONFIGS / "dates.py"), **{"model.vocab_size": 41, "model.d_model": 16, "model.d_ff": 32}
    )
    whole, half = (device_step(config, n).memory_analysis().temp_size_in_bytes for n in (1, 2))
    assert half < 0.7 * whole


@pytest.mark.parametrize("name", ["wmt14_base", "wmt14_big"])
def test_the_recipe_runs_on_eight_devices_at_reduced_width(name: str, shared_dir: Path, tmp_path: Path) -> None:
    """Fifty steps on news text: its vocabulary, packing, schedule, checkpoints and average, with narrow layers."""
    news = shared_dir / "data" / "newstest"
    changes = {
        "model.d_model": 16,
        "model.n_heads": 2,
        "model.d_ff": 32,
        "model.n_encoder_layers": 1,
        "model.n_decoder_layers": 1,
        "model.dtype": "float32",
        "data.tfds": None,
        "data.dir": news,
        "data.train_split": "dev",
        "data.validation_split": "dev",
        "data.test_split": None,
        "data.vocab_size": 600,
        "data.max_tokens": 64,
        "data.row_tokens": 64,
        "data.batch_tokens": 1024,
        "data.limit": 800,
        "train.steps": 50,
        "train.warmup_steps": 20,
        "train.evaluate_every": None,
        "train.checkpoint_every": 10,
        "train.keep_checkpoints": 5,
        "train.average_last": 5 if name == "wmt14_base" else 4,
        "samples": (),
    }
    if name == "wmt14_big":
        changes = {"train.average_last": 4, **changes}
    trainer = Trainer(replace(load_config(CONFIGS / f"{name}.py"), **changes), tmp_path / "run")
    assert trainer.mesh.size == 8
    assert trainer.batches.padding_share < 0.15  # few rows: the last batch is not full
    outcome = trainer.train()
    assert outcome.step == 50
    assert trainer.program_counts()["training"] == 1
    records = trainer.folder.records("train")
    assert records[-1]["loss"] < 6.6 < np.log(600) + 0.5
    (average,) = trainer.folder.records("average")
    assert average["steps"] == [10, 20, 30, 40, 50][-changes["train.average_last"] :]
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()


def test_base_and_big_differ_in_nothing_else(base: RunConfig, big: RunConfig) -> None:
    assert big.data == base.data
    assert big.decode == base.decode
    same = {f.name for f in dataclasses.fields(TrainConfig)} - {
        "steps",
        "checkpoint_every",
        "keep_checkpoints",
        "average_last",
    }
    assert all(getattr(big.train, name) == getattr(base.train, name) for name in same)
