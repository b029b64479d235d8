"""train.py's command line: every setting can be changed, and each mistake is one sentence."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from transformer_jax.cli import run_command
from transformer_jax.config import (
    DataConfig,
    DecodeConfig,
    ModelConfig,
    RunConfig,
    TrainConfig,
    replace,
    to_json,
)
from transformer_jax.errors import UserError
from transformer_jax.run_options import TrainOptions, load_config, parse_options

ROOT = Path(__file__).resolve().parents[1]
DATES = ROOT / "configs" / "dates.py"


def parse(*arguments: str) -> TrainOptions:
    return parse_options(list(arguments), DATES)


def refusal(*arguments: str) -> str:
    with pytest.raises(UserError) as caught:
        parse(*arguments)
    message = str(caught.value)
    assert "\n" not in message
    assert not set("│╭╰─") & set(message)  # tyro's frame
    return message


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    return tmp_path / "mine.py"


# --- what can be said ---------------------------------------------------------------------------------------


def test_without_options_the_default_config_is_taken_as_it_stands() -> None:
    assert parse().run == load_config(DATES)
    assert parse().config == DATES
    assert parse().resume == "auto"


def test_options_change_nested_settings_and_leave_the_others() -> None:
    options = parse(
        *("--train.steps", "7", "--model.d-model=64", "--model.dropout", "0.3", "--data.batch-tokens", "None"),
        *("--decode.limit", "5", "--name", "mine", "--output", "some/where", "--resume", "never"),
        *("--model.no-attention-bias", "--train.clip_norm", "2.5", "--samples", "a b", "c"),
    )
    expected = replace(
        load_config(DATES),
        name="mine",
        samples=("a b", "c"),
        **{"train.steps": 7, "model.d_model": 64, "model.dropout": 0.3, "decode.limit": 5},
        **{"data.batch_tokens": None, "model.attention_bias": False, "train.clip_norm": 2.5},
    )
    assert options.run == expected
    assert options.output == Path("some/where")
    assert options.resume == "never"


def test_files_are_named_in_pairs_and_replace_the_task() -> None:
    run = parse("--data.task", "None", "--data.source", "a", "b", "--data.target", "c", "d").run
    assert run.data.source == (Path("a"), Path("b"))
    assert run.data.target == (Path("c"), Path("d"))
    assert run.data.task is None


@pytest.mark.parametrize("form", ["two words", "equals sign"])
def test_another_config_file_is_the_one_that_options_change(config_file: Path, form: str) -> None:
    config_file.write_text(
        "from transformer_jax.config import RunConfig, TrainConfig\n"
        "config = RunConfig(name='other', train=TrainConfig(steps=11, warmup_steps=3))\n"
    )
    name = ["--config", str(config_file)] if form == "two words" else [f"--config={config_file}"]
    run = parse(*name, "--train.steps", "12").run
    assert (run.name, run.train.steps, run.train.warmup_steps) == ("other", 12, 3)


def test_smoke_cuts_the_run_down_and_takes_another_name() -> None:
    run = parse("--smoke", "--model.dropout", "0.2").run
    assert (run.data.limit, run.train.epochs, run.train.evaluate_every) == (500, 2, None)
    assert run.data.vocab_size <= 500
    assert run.name == "dates-smoke"
    assert run.model.dropout == 0.2


def test_several_processes_are_described_by_three_options() -> None:
    processes = parse("--processes.coordinator", "host:1234", "--processes.count", "2", "--processes.id", "1").processes
    assert (processes.coordinator, processes.count, processes.id) == ("host:1234", 2, 1)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.py")), ids=lambda path: path.stem)
def test_every_config_of_the_repository_loads(path: Path) -> None:
    config = load_config(path)
    assert config.name == path.stem
    assert config.train.warmup_steps < config.train.steps
    assert config.data.max_tokens <= config.model.max_length


def test_help_exits_with_0_and_lists_settings(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse("--help")
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    for option in ("--train.steps", "--model.d-model", "--data.source", "--smoke"):
        assert option in shown


# --- mistakes -----------------------------------------------------------------------------------------------


def test_unknown_option_is_refused_with_the_nearest_one() -> None:
    assert refusal("--train.stps", "7") == "There is no option --train.stps; did you mean --train.steps?"
    assert "--data.batch-tokens?" in refusal("--data.batch_tokenz=4")
    assert "--help" in refusal("--quantum-entanglement", "7")


def test_a_word_that_belongs_to_no_option_is_named() -> None:
    assert "'stray'" in refusal("stray")
    assert "'False'" in refusal("--model.attention-bias", "False")


def test_value_of_the_wrong_type_is_refused_with_option_and_value() -> None:
    message = refusal("--train.steps", "many")
    assert "--train.steps" in message
    assert "'many'" in message


@pytest.mark.parametrize(("option", "value"), [("--model.norm", "mid"), ("--resume", "maybe")])
def test_value_that_is_no_choice_is_refused_with_the_choices(option: str, value: str) -> None:
    message = refusal(option, value)
    assert value in message
    assert option in message
    assert "post" in message or "never" in message


def test_missing_value_is_refused_with_the_option() -> None:
    assert "--train.steps" in refusal("--train.steps")
    assert "--config" in refusal("--config")


def test_settings_that_do_not_fit_together_are_refused_by_name() -> None:
    message = refusal("--model.d-model", "100", "--model.n-heads", "3")
    assert message.startswith("model: d_model is 100, which is not a multiple of n_heads, 3")
    assert "named twice" in refusal("--data.dir", "somewhere")
    assert "steps is 0" in refusal("--train.steps", "0")


def test_missing_config_file_is_named() -> None:
    assert refusal("--config", "no/such.py") == "There is no config file no/such.py."


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("x = 1\n", "defines no `config`"),
        ("config = 3\n", "defines no `config`"),
        ("config = RunConfig(\n", "line 1"),
        ("config = RunConfig()\n", "RunConfig"),
        ("from transformer_jax.config import RunConfig\nconfig = RunConfig(nme='x')\n", "nme"),
        ("import no_such_module\n", "no_such_module"),
        ("raise RuntimeError('my own')\n", "my own"),
        ("from transformer_jax.config import ModelConfig\nModelConfig(n_heads=3)\n", "n_heads, 3"),
    ],
)
def test_config_file_with_a_mistake_is_named_with_the_mistake(config_file: Path, text: str, complaint: str) -> None:
    config_file.write_text(text)
    message = refusal("--config", str(config_file))
    assert str(config_file) in message
    assert complaint in message


def test_config_file_of_another_kind_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("a: 1\n")
    assert "config.yaml" in refusal("--config", str(tmp_path / "config.yaml"))


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: ModelConfig(d_model=30, n_heads=4), r"not a multiple of n_heads"),
        (lambda: ModelConfig(d_model=9, n_heads=3), r"sinusoidal positions come in pairs"),
        (lambda: ModelConfig(dropout=1.0), r"dropout is 1\.0"),
        (lambda: ModelConfig(vocab_size=9, source_vocab_size=8), r"shared_embedding"),
        (lambda: ModelConfig(n_decoder_layers=0), r"n_decoder_layers is 0"),
        (lambda: DataConfig(batch_tokens=64, max_tokens=32, rows_multiple=8), r"batch_tokens is 64"),
        (lambda: DataConfig(batch_tokens=None, batch_size=12, rows_multiple=8), r"batch_size is 12"),
        (lambda: DataConfig(source=(Path("a"),)), r"1 source files but 0 target files"),
        (lambda: DataConfig(task="dates", dir=Path("a")), r"named twice, by task and dir"),
        (lambda: TrainConfig(accumulation=0), r"accumulation is 0"),
        (lambda: TrainConfig(peak_rate=0.1), r"schedule paper"),
        (lambda: TrainConfig(patience=0), r"patience is 0"),
        (lambda: DecodeConfig(batch_tokens=0), r"batch_tokens is 0"),
    ],
)
def test_impossible_setting_is_refused_where_it_is_made(make: object, complaint: str) -> None:
    assert callable(make)
    with pytest.raises(UserError, match=complaint):
        make()


def test_replace_reaches_into_nested_settings_and_checks_them() -> None:
    run = replace(RunConfig(), **{"model.dropout": 0.3, "train.steps": 5})
    assert (run.model.dropout, run.train.steps, run.model.d_model) == (0.3, 5, 512)
    with pytest.raises(UserError, match="dropout"):
        replace(run, **{"model.dropout": 2.0})


def test_replace_changes_settings_that_must_fit_each_other_together() -> None:
    run = replace(RunConfig(), **{"decode.n_best": 8, "decode.beam_size": 8})
    assert (run.decode.n_best, run.decode.beam_size) == (8, 8)
    files = {"data.task": None, "data.source": (Path("a.en"),), "data.target": (Path("a.de"),)}
    assert replace(RunConfig(), **files).data.target == (Path("a.de"),)


def test_replace_changes_a_section_given_whole_and_one_of_its_settings() -> None:
    wide = ModelConfig(d_model=1024, n_heads=16)
    for changes in ({"model": wide, "model.dropout": 0.2}, {"model.dropout": 0.2, "model": wide}):
        run = replace(RunConfig(), **changes)
        assert (run.model.d_model, run.model.dropout) == (1024, 0.2)


def test_to_json_writes_paths_and_tuples_as_plain_values() -> None:
    plain = to_json(DataConfig(source=(Path("a/b"),), target=(Path("c"),), dir=None))
    assert plain["source"] == ["a/b"]
    assert plain["dir"] is None


# --- as a program -------------------------------------------------------------------------------------------


def test_mistake_ends_a_command_with_code_2_and_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(lambda: parse("--train.stps", "7") and 0) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "error: There is no option --train.stps; did you mean --train.steps?\n"


def test_bugs_keep_their_traceback() -> None:
    def bug() -> int:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_command(bug)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--train.stps", "7"],
        ["--data.task", "None", "--data.source", "no.en", "--data.target", "no.de"],
    ],
)
def test_train_py_ends_with_code_2_and_one_sentence(arguments: list[str], tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "train.py"), *arguments, "--output", str(tmp_path / "run")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=120)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert "train.stps" in line or "no.en" in line
    assert not (tmp_path / "run").exists()
