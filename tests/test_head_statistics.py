"""Which head looks where on the dates task: the rules by hand-made maps, and `transformer-jax heads`."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_files import LONG

from transformer_jax import cli
from transformer_jax.attention_maps import attention_maps
from transformer_jax.checkpoint import Checkpoints
from transformer_jax.config import DataConfig, ModelConfig, RunConfig
from transformer_jax.errors import UserError
from transformer_jax.head_report import Stage, as_json, as_text, heads_figure
from transformer_jax.head_statistics import (
    KINDS,
    HeadStatistics,
    answers,
    check_task,
    check_training,
    count_shares,
    head_statistics,
    held_out_dates,
)
from transformer_jax.model import Transformer
from transformer_jax.model_folder import save_model
from transformer_jax.run_folder import RunFolder
from transformer_jax.tasks import dates
from transformer_jax.tokenizer import CharacterTokenizer
from transformer_jax.training import init_params, start_from

TASK = dates()
TOKENIZER = CharacterTokenizer(TASK.characters)
MODEL = ModelConfig.tiny(
    TOKENIZER.vocab_size, d_model=16, n_heads=2, d_ff=32, n_encoder_layers=1, n_decoder_layers=2, max_length=32
)
#      0123456789 and 10, the end
PAIRS = [("1965-10-05", "5 October 1965"), ("2000-02-29", "29 February 2000")]


def heads(*arguments: object) -> int:
    return cli.run_command(lambda: cli._dispatch(["heads", *map(str, arguments)]))


# --- the rules ----------------------------------------------------------------------------------------------


def test_a_day_of_one_digit_is_copied_from_the_second() -> None:
    found = answers(*PAIRS[0])
    assert len(found) == len("5 October 1965") + 1
    assert found[0] == (("digits",), (9,))
    assert found[1] == found[9] == found[14] == (("rest",), (4, 7, 10))
    assert found[2] == (("first_letter", "month"), (5, 6))
    assert found[3:9] == [(("month",), (5, 6))] * 6
    assert found[10:14] == [(("digits",), (place,)) for place in (0, 1, 2, 3)]


def test_a_day_of_two_digits_is_copied_in_order() -> None:
    found = answers(*PAIRS[1])
    assert len(found) == len("29 February 2000") + 1
    assert found[:2] == [(("digits",), (8,)), (("digits",), (9,))]


@pytest.mark.parametrize("pair", [("1965-10-5", "5 October 1965"), ("1965-10-05", "5 October 965")])
def test_what_is_no_date_has_no_answers(pair: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match="no pair of the dates task"):
        answers(*pair)


def test_shares_of_maps_that_are_known() -> None:
    """Three heads: one that always looks at the answer, one always at place 9, one always at the month's first digit.

    Of 11 digits (5 and 6) two are copied from place 9, the 5 and the 9; none from place 5. Of the letters, 7 and 8,
    all are written from place 5 or 6; of the spaces and ends, 3 and 3, none.
    """
    strongest = []
    for pair in PAIRS:
        right = [places[0] for _, places in answers(*pair)]
        padded = [*right, 0, 0]  # of longer dates in the same batch
        strongest.append(np.array([[padded, [9] * len(padded), [5] * len(padded)]]))
    found = count_shares(strongest, PAIRS)
    assert found.counts == {"digits": 11, "first_letter": 2, "month": 15, "rest": 6}
    golden = {"digits": [1, 2 / 11, 0], "first_letter": [1, 0, 1], "month": [1, 0, 1], "rest": [1, 0, 0]}
    for kind, shares in golden.items():
        np.testing.assert_allclose(found.shares_NH[kind], [shares], rtol=1e-12)
    assert found.best("digits") == (0, 0)


def test_the_second_digit_of_the_month_counts_and_the_dash_beside_it_does_not() -> None:
    letters = slice(2, 9)
    row = np.zeros((1, 1, 15), int)
    row[..., letters] = [6, 6, 5, 4, 7, 6, 9]
    assert count_shares([row], PAIRS[:1]).shares_NH["month"] == pytest.approx(4 / 7)
    assert count_shares([row], PAIRS[:1]).shares_NH["first_letter"] == 1


# --- a model's maps -----------------------------------------------------------------------------------------


def params_of(seed: int) -> dict:
    """Larger projections: where all weights are nearly alike, which is largest would hang on the last bit."""
    return jax.tree.map(lambda x: 3 * x if x.ndim == 2 else x, init_params(Transformer(MODEL), seed))


def test_a_batch_has_the_maps_of_its_sentences() -> None:
    """Dates of all lengths in one shape, against each by itself: row t is the step that writes token t."""
    pairs = [*PAIRS, ("1999-05-01", "1 May 1999"), ("2030-09-30", "30 September 2030")]
    model, params = Transformer(MODEL), params_of(0)
    alone = []
    for source, target in pairs:
        maps = attention_maps(model, params, TOKENIZER.encode_source(source), TOKENIZER.encode_target(target))
        alone.append(maps.cross_NHTS.argmax(axis=-1))
    golden, found = count_shares(alone, pairs), head_statistics(model, params, TOKENIZER, pairs)
    assert found.counts == golden.counts
    for kind in KINDS:
        np.testing.assert_array_equal(found.shares_NH[kind], golden.shares_NH[kind])
        assert found.shares_NH[kind].shape == (2, 2)
    assert 0 < found.shares_NH["digits"].max() < 1


def test_models_of_other_tasks_are_refused() -> None:
    for characters in ("0123456789", "abc 0123456789-", [*TASK.characters, "!"]):
        with pytest.raises(UserError, match="not one of the dates task"):
            check_task(CharacterTokenizer(characters))
    check_task(TOKENIZER)


def test_what_a_run_says_of_its_training_decides() -> None:
    """A task of the same letters, such as the dates the other way round, is told from the dates by this alone."""
    for data, reason in (
        ({"task": "written dates"}, "runs/a was trained on the task written dates"),
        ({"task": None}, "runs/a was trained on text from files"),
    ):
        with pytest.raises(UserError, match=re.escape(f"not one of the dates task ({reason}), for which")):
            check_training("runs/a", {"data": data})
    for config in ({"data": {"task": "dates"}}, {"data": {}}, {"data": 3}, {}):
        check_training("runs/a", config)


def test_dates_are_held_out_ones_spread_over_the_years() -> None:
    found = held_out_dates(100)
    held_out = TASK.held_out
    assert set(found) <= set(zip(held_out.source, held_out.target, strict=True))
    assert len(set(found)) == 100
    years = [int(source[:4]) for source, _ in found]
    assert (min(years), max(years)) < (1905, 2100)
    assert max(years) > 2090
    for n in (0, 2001):
        with pytest.raises(UserError, match="1 to 2,000"):
            held_out_dates(n)


# --- the report ---------------------------------------------------------------------------------------------


def statistics(first: float) -> HeadStatistics:
    shares = {kind: np.array([[first, 0.5], [0.125, 0.0]]) for kind in KINDS}
    return HeadStatistics(shares, {"digits": 5000, "first_letter": 1, "month": 2, "rest": 3})


def test_one_stage_is_a_table_of_heads_and_questions() -> None:
    lines = as_text([Stage("model", None, statistics(1.0))]).split("\n")
    assert lines[0] == "digits          digits, on the digit that they copy (5,000)"
    assert lines[5].split("  ")[-1].strip() == "spaces, end"
    assert [line.split() for line in lines[6:]] == [
        ["layer", "1", "head", "1", *["100.0%"] * 4],
        ["layer", "1", "head", "2", *["50.0%"] * 4],
        ["layer", "2", "head", "1", *["12.5%"] * 4],
        ["layer", "2", "head", "2", *["0.0%"] * 4],
        ["best", *["100.0%"] * 4],
    ]


def test_several_stages_stand_side_by_side() -> None:
    text = as_text([Stage("step 50", 50, statistics(0.25)), Stage("step 1,000", 1000, statistics(1.0))])
    blocks = text.split("\n\n")
    assert [block.split("\n")[0].split(" (")[0] for block in blocks] == list(KINDS.values())
    rows = blocks[0].split("\n")[1:]
    assert rows[0].split() == ["step", "50", "step", "1,000"]
    assert rows[1].split() == ["layer", "1", "head", "1", "25.0%", "100.0%"]
    assert rows[-1].split() == ["best", "50.0%", "100.0%"]


def test_json_names_the_best_head_counted_from_one() -> None:
    report = json.loads(json.dumps(as_json([Stage("step 50", 50, statistics(0.25))], 7)))
    assert (report["dates"], report["tokens"]["digits"]) == (7, 5000)
    (stage,) = report["stages"]
    assert (stage["step"], stage["best"]["rest"]) == (50, {"layer": 1, "head": 2, "share": 0.5})
    assert stage["shares"]["month"] == [[0.25, 0.5], [0.125, 0.0]]


def test_the_picture_has_a_panel_for_each_stage_and_question_with_its_shares() -> None:
    figure = heads_figure([Stage("step 50", 50, statistics(0.25)), Stage("step 100", 100, statistics(1.0))])
    assert len(figure.axes) == 8
    assert [[text.get_text() for text in figure.axes[n].texts] for n in (0, 4)] == [
        ["25", "50", "12", "0"],
        ["100", "50", "12", "0"],
    ]


# --- the command --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two checkpoints of other models, the second of which is its best."""
    folder = RunFolder(tmp_path_factory.mktemp("runs") / "dates")
    folder.create()
    folder.write_config(RunConfig(model=MODEL, data=DataConfig(task="dates")))
    TOKENIZER.save(folder.tokenizer)
    with Checkpoints(folder.checkpoints) as checkpoints:
        for step in (50, 1000):
            state = start_from(params_of(step), optax.adam(1e-3)).replace(step=jnp.asarray(step))
            checkpoints.save(state, {"position": {}, "best": {}})
    save_model(folder.model, MODEL, params_of(1000))
    TOKENIZER.save(folder.model)
    return folder.folder


def test_checkpoints_are_shown_in_order_and_the_model_is_the_one_that_it_is_of(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {}
    for name, options in {"all": ["--all"], "one": ["--steps", "50"], "model": []}.items():
        assert heads(run, *options, "--dates", 40, "--format", "json") == 0
        found[name] = json.loads(capsys.readouterr().out)["stages"]
    assert [stage["step"] for stage in found["all"]] == [50, 1000]
    assert found["one"] == found["all"][:1]
    assert found["model"][0]["shares"] == found["all"][1]["shares"]
    golden = head_statistics(Transformer(MODEL), params_of(50), TOKENIZER, held_out_dates(40))
    assert found["one"][0]["shares"] == {kind: golden.shares_NH[kind].tolist() for kind in KINDS}


def test_text_and_picture(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert heads(run, "--steps", 1000, 50, "--dates", 40, "--output", tmp_path / "heads.png") == 0
    assert "step 50    step 1,000\n" in capsys.readouterr().out
    assert (tmp_path / "heads.png").read_bytes().startswith(b"\x89PNG")


def test_mistakes_are_told_in_a_sentence(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = RunFolder(tmp_path / "numbers")
    tokenizer = CharacterTokenizer("0123456789")
    config = dataclasses.replace(MODEL, vocab_size=tokenizer.vocab_size)
    other.create()
    save_model(other.model, config, init_params(Transformer(config), 0))
    tokenizer.save(other.model)
    for arguments, sentence in (
        ([run, "--steps", 51], "holds no checkpoint of step 51; it holds 50, 1000"),
        ([run / "model", "--all"], "holds no checkpoints/"),
        ([run, "--dates", 0], "0 dates are asked for"),
        ([run, "--output", tmp_path / "heads.svg"], "end it in .png"),
        # Told before the work: the model, which is not there, is not asked for.
        ([tmp_path / "absent", "--output", tmp_path / LONG], f"{tmp_path / LONG} cannot be written (File name too"),
        ([run / "config.json", "--all"], "config.json is a file; name the folder of a run"),
        ([tmp_path / "absent", "--all"], "There is no folder"),
        ([tmp_path / "absent"], "There is no folder"),
        ([other.folder], "not one of the dates task"),
    ):
        assert heads(*arguments) == 2, arguments
        error = capsys.readouterr().err
        assert sentence in error
        assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"d_model": 32}, "The checkpoints of {} are not of the model that its config.json describes."),
        ({"n_decoder_layers": 1}, "The checkpoints of {} are not of the model that its config.json describes."),
        ({"norm_epsilon": "x"}, "{}/config.json does not describe a model of this version"),
        ({"d_ff": 10**400}, "{}/config.json does not describe a model of this version"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_checkpoints_of_another_model_than_the_config_says_are_told(
    change: dict, sentence: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    shutil.copytree(run, other)
    described = json.loads((run / "config.json").read_text())
    described["model"].update(change)
    (other / "config.json").write_text(json.dumps(described))
    assert heads(other, "--all", "--dates", 40) == 2
    error = capsys.readouterr().err
    assert sentence.format(other) in error
    assert error.count("\n") == 1


def test_a_damaged_config_is_told_with_what_comes_of_it(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = tmp_path / "other"
    shutil.copytree(run, other)
    (other / "config.json").write_text("{")
    assert heads(other, "--dates", 40) == 0
    (record,) = [record for record in caplog.records if record.name == "transformer_jax"]
    message = record.getMessage()
    assert message.startswith(f"{other}/config.json is not valid JSON")
    assert message.endswith(" Whether the run was trained on the dates is told by the model's alphabet alone.")


def test_a_run_of_another_task_with_the_same_letters_is_refused(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    shutil.copytree(run, other)
    RunFolder(other).write_config(RunConfig(model=MODEL, data=DataConfig(task="written dates")))
    monkeypatch.chdir(other / "model")
    for arguments, name in (([other], other), ([other, "--all"], other), ([other / "model"], other), (["."], other)):
        assert heads(*arguments, "--dates", 40) == 2, arguments
        assert f"({name} was trained on the task written dates)" in capsys.readouterr().err
    # A model folder by itself does not say: it is known by its alphabet.
    shutil.copytree(run / "model", tmp_path / "alone")
    assert heads(tmp_path / "alone", "--dates", 40) == 0
