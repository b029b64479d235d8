"""A run with a teacher: what the teacher writes, what the run then learns from, and stops at every place."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from programs import free_address, in_processes, load_program

from transformer_jax import diversification
from transformer_jax.cli import run_command
from transformer_jax.config import DataConfig, DecodeConfig, ModelConfig, RunConfig, TeacherConfig, TrainConfig, replace
from transformer_jax.diversification import rewrite_text, search_changes, teacher_run, train_run
from transformer_jax.dry_run import describe
from transformer_jax.errors import UserError
from transformer_jax.hypotheses import EMPTY, translation_of
from transformer_jax.rewritten_text import GrowingPairs, RewrittenText
from transformer_jax.run_data import read_texts
from transformer_jax.run_folder import RunFolder
from transformer_jax.run_options import parse_options
from transformer_jax.sharding import data_mesh
from transformer_jax.trainer import Trainer
from transformer_jax.training_text import TrainingText
from transformer_jax.translator import Translator

ROOT = Path(__file__).resolve().parents[1]
WORDS = ["abc", "bcd", "cde", "dea", "eab", "ace"]
TEXT = [f"{a} {b}" for a in WORDS for b in WORDS]
FILES = ("1.new_target.source.txt", "1.new_target.target.txt", "1.new_source.source.txt", "1.new_source.target.txt")


def write_pairs(folder: Path, name: str, sources: Sequence[str]) -> None:
    """Line for line, its letters from the end to the start in capitals."""
    (folder / f"{name}.en").write_text("".join(f"{line}\n" for line in sources))
    (folder / f"{name}.de").write_text("".join(f"{line[::-1].upper()}\n" for line in sources))


def run_of(folder: Path, weight: float = 0.5, **changes: Any) -> RunConfig:
    for split, lines in (("train", TEXT), ("val", TEXT[:4]), ("test", TEXT[4:8])):
        if not (folder / f"{split}.en").exists():
            write_pairs(folder, split, lines)
    data = DataConfig(
        dir=folder, vocab_size=40, max_tokens=32, n_buckets=1, batch_tokens=256, weights=(2.0,), reversed_weight=0.5,
        test_split="test",
    )  # fmt: skip
    config = RunConfig(
        model=ModelConfig(d_model=16, n_heads=2, d_ff=32, n_encoder_layers=1, n_decoder_layers=1, max_length=32),
        data=data,
        train=TrainConfig(
            steps=40, schedule="constant", peak_rate=0.01, warmup_steps=1, evaluate_every=None, n_devices=1
        ),
        decode=DecodeConfig(beam_size=3, rerank_weight=0.2, length_penalty=0.6, extra_length=4, min_length=4),
        teacher=TeacherConfig(weight),
    )
    return replace(config, **changes)


def lines_of(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").split("\n")[:-1]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run and its teacher, both to their ends."""
    folder = tmp_path_factory.mktemp("whole")
    assert train_run(run_of(folder), folder / "run").exit_code == 0
    return folder / "run"


# --- what the teacher writes --------------------------------------------------------------------------------


def test_new_targets_are_of_the_runs_own_search_and_new_sources_of_the_beam_alone(whole: Path) -> None:
    new_target, new_source = ([lines_of(whole / "rewritten" / name) for name in FILES[i : i + 2]] for i in (0, 2))
    real = lines_of(whole.parent / "train.de")
    assert new_target[0] == TEXT
    assert new_source[1] == real
    search = DecodeConfig(beam_size=3, extra_length=4, min_length=4)
    teacher = Translator.from_pretrained(whole / "teacher", search, mesh=data_mesh(1))
    ranked = teacher.translate(TEXT, rerank_weight=0.2, length_penalty=0.6)
    assert new_target[1] == [t.text for t in ranked]
    back = teacher.translate([f">>en<< {line}" for line in real], length_penalty=1.0)
    assert new_source[0] == [t.text for t in back]
    assert len(set(new_target[1])) > 3
    assert new_target[1] != real


def test_without_a_ranking_both_ways_are_searched_alike() -> None:
    search = DecodeConfig(beam_size=4, length_penalty=0.7)
    assert search_changes(search, "source") == search_changes(search, "target") == {"n_best": 1}


def test_the_teacher_is_the_same_run_on_the_text_as_it_is_and_leaves_the_test_alone(tmp_path: Path) -> None:
    config = run_of(tmp_path, **{"teacher.epochs": 7, "teacher.dropout": 0.25})
    teacher = teacher_run(config)
    assert (teacher.train.epochs, teacher.model.dropout, teacher.teacher.weight) == (7, 0.25, 0)
    assert teacher.train.skip_test
    same = replace(
        teacher, **{"train.epochs": None, "train.skip_test": False, "model.dropout": config.model.dropout},
        name=config.name, teacher=config.teacher,
    )  # fmt: skip
    assert same == config
    as_long = teacher_run(run_of(tmp_path))
    assert (as_long.train.steps, as_long.train.epochs, as_long.model.dropout) == (40, None, 0.1)


def test_only_the_runs_own_model_is_scored_on_the_test_text(tmp_path: Path) -> None:
    config = run_of(tmp_path, **{"train.steps": 3, "train.evaluate_every": 3})
    train_run(config, tmp_path / "run")
    for folder, scored in ((tmp_path / "run", True), (tmp_path / "run" / "teacher", False)):
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        (result,) = [r for r in records if r["kind"] == "result"]
        assert ("bleu" in result) == scored
        # Told of in either case: the test lines stand in this training text.
        assert json.loads((folder / "data_report.json").read_text())["held_out"]["test"]["pairs"] == 4


def test_a_line_with_a_tag_that_the_vocabulary_lacks_is_left_blank_and_a_known_one_stays(
    whole: Path, tmp_path: Path
) -> None:
    write_pairs(tmp_path, "train", TEXT[:3])
    (tmp_path / "train.en").write_text(f">>en<< {TEXT[0]}\n>>fr<< {TEXT[1]}\n{TEXT[2]}\n")
    rewritten = rewrite_with_the_teacher_of(whole, run_of(tmp_path), tmp_path / "run")
    blank = [line == "" for line in lines_of(rewritten / FILES[1])]
    assert blank == [False, True, False]
    new_sources = lines_of(rewritten / FILES[2])
    assert [line.startswith(">>en<< ") for line in new_sources] == [True, False, False]
    assert [line == "" for line in new_sources] == blank  # towards a language that the vocabulary does not know


def test_a_way_back_that_says_nothing_leaves_no_tag_alone(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    teacher = diversification._Teacher(run_of(whole.parent), whole / "teacher")
    monkeypatch.setattr(teacher.translator, "translate", lambda lines, **_: [translation_of([], EMPTY)] * len(lines))
    corpus = read_texts(run_of(whole.parent).data).train.sources[0]
    assert teacher.rewrite([(">>en<< abc", "cba")], "source", corpus, first_line=1) == [("", "cba")]


def rewrite_with_the_teacher_of(whole: Path, config: RunConfig, run: Path) -> Path:
    """The text of another run, rewritten by a teacher that is trained already."""
    shutil.copytree(whole / "teacher", run / "teacher")
    assert rewrite_text(config, RunFolder(run)) is None
    return run / "rewritten"


def text_of(config: RunConfig, run: Path) -> TrainingText:
    """What the run trains on."""
    return read_texts(config.data, rewritten=RewrittenText.of(config, run / "rewritten")).train


# --- what the run learns from -------------------------------------------------------------------------------


def test_the_run_sees_its_text_as_it_is_and_each_rewritten_pair_by_its_weight(whole: Path) -> None:
    """36 pairs of weight 2, rewritten ones of 2 x 0.5, and of each half as many with the sides exchanged."""
    report = json.loads((whole / "data_report.json").read_text())
    corpora = {corpus["name"].replace(str(whole), "RUN"): corpus for corpus in report["corpora"]}
    real = f"{whole.parent / 'train.en'} + train.de"
    target, source = (
        f"RUN/rewritten/1.new_{side}.source.txt + 1.new_{side}.target.txt" for side in ("target", "source")
    )
    seen = {name: corpus["pairs_an_epoch"] for name, corpus in corpora.items()}
    removed = {name: sum(corpora[name]["removed"].values()) for name in (target, source)}
    assert seen[real] == 72
    assert seen[f"{real}, sides exchanged"] == 36
    for name in (target, source):
        assert seen[name] == 36 - removed[name]  # an untrained teacher writes a blank line now and then
        assert seen[f"{name}, sides exchanged"] == (36 - removed[name]) // 2
    assert len(seen) == 6


def with_more(config: RunConfig, folder: Path, **changes: Any) -> RunConfig:
    """The run with a second corpus of ten pairs."""
    write_pairs(folder, "more", TEXT[:10])
    more = {"source": (folder / "more.en",), "target": (folder / "more.de",), "weights": (2.0, 3.0), **changes}
    return dataclasses.replace(config, data=dataclasses.replace(config.data, **more))


def test_several_corpora_keep_their_weights_and_tags(whole: Path, tmp_path: Path) -> None:
    config = with_more(run_of(tmp_path), tmp_path, tags=("", "(bt)"))
    rewritten = rewrite_with_the_teacher_of(whole, config, tmp_path / "run")
    sources = text_of(config, tmp_path / "run").sources
    assert [(s.weight, s.tag, s.rewritten, s.exchanged) for s in sources] == [
        (2.0, "", "", False), (3.0, "(bt)", "", False),
        (1.0, "", "target", False), (1.5, "(bt)", "target", False),
        (1.0, "", "source", False), (1.5, "(bt)", "source", False),
        (1.0, ">>en<<", "", True), (1.5, ">>en<<", "", True),
        (0.5, ">>en<<", "target", True), (0.75, ">>en<<", "target", True),
        (0.5, ">>en<<", "source", True), (0.75, ">>en<<", "source", True),
    ]  # fmt: skip
    assert lines_of(rewritten / "2.new_target.source.txt") == TEXT[:10]
    search = {"beam_size": 3, "extra_length": 4, "min_length": 4, "rerank_weight": 0.2, "length_penalty": 0.6}
    teacher = Translator.from_pretrained(whole / "teacher", DecodeConfig(**search), mesh=data_mesh(1))
    asked = teacher.translate([f"(bt) {line}" for line in TEXT[:10]])
    assert lines_of(rewritten / "2.new_target.target.txt") == [t.text for t in asked]


def test_a_limit_is_of_the_text_as_it_is_and_of_either_kind_of_new_pairs(whole: Path, tmp_path: Path) -> None:
    config = with_more(run_of(tmp_path, **{"data.limit": 12}), tmp_path)
    rewritten = rewrite_with_the_teacher_of(whole, config, tmp_path / "run")
    assert len(lines_of(rewritten / FILES[0])) == 12
    assert (rewritten / "2.new_target.source.txt").read_text() == ""  # beyond the limit
    text = text_of(config, tmp_path / "run")
    for exchanged, numbers in ((False, (0, 2, 3)), (True, (4, 6, 7))):
        kept = [number for number, _ in text.kept(text.new_counts(), text.new_filter(), exchanged)]
        assert {number: kept.count(number) for number in kept} == dict.fromkeys(numbers, 12)


def test_a_run_of_one_direction_gets_new_targets_only(whole: Path, tmp_path: Path) -> None:
    config = run_of(tmp_path, **{"data.reversed_weight": 0.0, "decode.rerank_weight": 0.0})
    rewritten = rewrite_with_the_teacher_of(whole, config, tmp_path / "run")
    assert sorted(path.name for path in rewritten.iterdir()) == [*FILES[:2], "made_from.json"]
    assert [s.rewritten for s in text_of(config, tmp_path / "run").sources] == ["", "target"]


def test_the_vocabulary_is_of_all_the_text(whole: Path) -> None:
    lines = text_of(run_of(whole.parent), whole).sample(10_000)
    assert set(lines_of(whole / "rewritten" / FILES[1])) < set(lines)
    assert set(lines_of(whole / "rewritten" / FILES[2])) < set(lines)


# --- stopped and gone on with -------------------------------------------------------------------------------


def test_a_stop_while_the_teacher_writes_changes_no_bit(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[int] = []
    translate = Translator.translate

    def stopped(self: Translator, lines: Sequence[str], **changes: Any) -> Any:
        calls.append(len(lines))
        if len(calls) in (2, 5):
            os.kill(os.getpid(), signal.SIGINT)
        return translate(self, lines, **changes)

    config = run_of(whole.parent)
    monkeypatch.setattr(diversification, "CHUNK", 10)
    monkeypatch.setattr(Translator, "translate", stopped)
    assert train_run(config, tmp_path / "run").exit_code == 130
    assert "SIGINT: 20 new targets are kept" in capsys.readouterr().err
    part = tmp_path / "run" / ".rewritten.part"
    with (part / FILES[1]).open("ab") as file:
        file.write(b"half a line")  # of one that was killed
    assert train_run(config, tmp_path / "run").exit_code == 130
    assert "SIGINT: 10 new sources are kept" in capsys.readouterr().err
    assert train_run(config, tmp_path / "run").exit_code == 0
    assert calls == [10, 10, 10, 6, 10, 10, 10, 6]
    monkeypatch.undo()

    for name in FILES:
        assert (tmp_path / "run" / "rewritten" / name).read_text() == (whole / "rewritten" / name).read_text()
    model, same = (Translator.from_pretrained(run).params for run in (tmp_path / "run", whole))
    for a, b in zip(jax.tree.leaves(model), jax.tree.leaves(same), strict=True):
        np.testing.assert_array_equal(a, b)
    assert not part.exists()


def test_a_finished_teacher_is_not_trained_again(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diversification, "rewrite_text", None)
    monkeypatch.setattr(diversification, "teacher_run", None)
    assert train_run(run_of(whole.parent), whole).exit_code == 0


def test_another_text_than_the_one_that_was_rewritten_is_refused(whole: Path, tmp_path: Path) -> None:
    config = run_of(tmp_path)
    assert len(text_of(config, whole).sources) == 6  # the same lines, in other files
    text_of(replace(config, **{"data.weights": (3.0,)}), whole)
    with pytest.raises(UserError, match="was written from another training text"):
        text_of(replace(config, **{"data.limit": 5}), whole)
    write_pairs(tmp_path, "train", TEXT[1:])
    with pytest.raises(UserError, match="was written from another training text"):
        train_run(config, whole)
    run = RunFolder(tmp_path / "run")
    (run.folder / ".rewritten.part").mkdir(parents=True)
    (run.folder / ".rewritten.part" / "made_from.json").write_text((whole / "rewritten" / "made_from.json").read_text())
    with pytest.raises(UserError, match="was written from another training text"):
        rewrite_text(config, run)


def test_held_out_texts_may_change_where_nothing_is_left_out_for_them(whole: Path, tmp_path: Path) -> None:
    config = run_of(tmp_path)
    write_pairs(tmp_path, "val", TEXT[:9])
    assert len(text_of(config, whole).sources) == 6
    dropping = replace(config, **{"data.held_out": "drop_pairs"})
    rewrite_with_the_teacher_of(whole, dropping, tmp_path / "run")
    text_of(dropping, tmp_path / "run")
    write_pairs(tmp_path, "val", TEXT[:3])
    with pytest.raises(UserError, match="was written from another training text"):
        text_of(dropping, tmp_path / "run")


def test_files_that_are_no_longer_as_they_were_written_are_told(whole: Path, tmp_path: Path) -> None:
    config, run = run_of(tmp_path), tmp_path / "run"
    rewritten = rewrite_with_the_teacher_of(whole, config, run)
    path = rewritten / FILES[2]
    for damage in (lambda: path.write_text("".join(path.read_text().splitlines(True)[1:])), path.unlink):
        damage()
        with pytest.raises(UserError, match=r"is not as the teacher wrote it; delete .*rewritten and start again"):
            text_of(config, run)
    for content in ("{", "[]"):
        (rewritten / "made_from.json").write_text(content)
        with pytest.raises(UserError, match="the teacher then writes it anew"):
            text_of(config, run)


def test_a_way_back_that_was_not_written_is_missed_by_name(whole: Path, tmp_path: Path) -> None:
    config = run_of(tmp_path)
    one_direction = replace(config, **{"data.reversed_weight": 0.0, "decode.rerank_weight": 0.0})
    rewrite_with_the_teacher_of(whole, one_direction, tmp_path / "run")
    with pytest.raises(UserError, match=r"wrote no 1.new_source.source.txt: data.reversed_weight was 0"):
        text_of(config, tmp_path / "run")


def test_a_text_that_is_half_written_is_not_gone_on_with_by_another_search(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, translate = RunFolder(tmp_path / "run"), Translator.translate

    def stopped(self: Translator, lines: Sequence[str], **changes: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return translate(self, lines, **changes)

    shutil.copytree(whole / "teacher", run.teacher)
    config = run_of(tmp_path)
    monkeypatch.setattr(diversification, "CHUNK", 10)
    with monkeypatch.context() as patch:
        patch.setattr(Translator, "translate", stopped)
        assert rewrite_text(config, run) == "SIGINT"
    with pytest.raises(UserError, match="begun by another teacher, or with other options of decode"):
        rewrite_text(replace(config, **{"decode.beam_size": 2}), run)
    assert rewrite_text(replace(config, **{"decode.metric": "exact"}), run) is None
    assert len(lines_of(run.rewritten / FILES[1])) == len(TEXT)


def test_a_start_that_was_killed_with_all_written_is_gone_on_with_by_the_same_search_alone(
    whole: Path, tmp_path: Path
) -> None:
    config, run = run_of(tmp_path), RunFolder(tmp_path / "run")
    written = rewrite_with_the_teacher_of(whole, config, run.folder)
    written.rename(run.folder / ".rewritten.part")
    with pytest.raises(UserError, match="begun by another teacher, or with other options of decode"):
        rewrite_text(replace(config, **{"decode.beam_size": 2}), run)
    assert rewrite_text(config, run) is None
    assert len(lines_of(run.rewritten / FILES[1])) == len(TEXT)


def test_a_signal_at_the_teachers_end_ends_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save = Trainer._save

    def interrupted(self: Trainer, *parts: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        save(self, *parts)

    monkeypatch.setattr(Trainer, "_save", interrupted)
    assert train_run(run_of(tmp_path, **{"train.steps": 2}), tmp_path / "run").exit_code == 143
    assert "SIGTERM: the teacher is trained; the same command goes on from there." in capsys.readouterr().err
    assert not (tmp_path / "run" / "rewritten").exists()
    assert not (tmp_path / "run" / ".rewritten.part").exists()


def test_a_folder_that_holds_a_run_without_a_teacher_is_refused_before_the_teachers_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_run(run_of(tmp_path, weight=0.0, **{"train.steps": 2}), tmp_path / "run")
    monkeypatch.setattr(diversification, "Trainer", None)
    with pytest.raises(UserError, match="holds a run that was started without a teacher"):
        train_run(run_of(tmp_path), tmp_path / "run")
    with pytest.raises(UserError, match="already holds a run"):
        train_run(run_of(tmp_path), tmp_path / "run", resume="never")


def test_a_run_that_was_begun_is_not_gone_on_with_where_that_is_refused(whole: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="already holds a run"):
        train_run(run_of(whole.parent), whole, resume="never")
    shutil.copytree(whole / "teacher", tmp_path / "run" / "teacher")
    with pytest.raises(UserError, match="already holds a run"):
        train_run(run_of(tmp_path), tmp_path / "run", resume="never")


def test_a_start_that_failed_before_any_step_is_no_run(tmp_path: Path) -> None:
    config = run_of(tmp_path, **{"train.steps": 2})
    with pytest.raises(UserError, match="vocabulary of 5 is too small"):
        train_run(replace(config, **{"data.vocab_size": 5}), tmp_path / "run", resume="never")
    assert train_run(config, tmp_path / "run", resume="never").exit_code == 0


def test_a_trainer_alone_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="There is no text of a teacher"):
        Trainer(run_of(tmp_path), tmp_path / "run")


def test_pairs_of_files_grow_from_where_both_are_whole(tmp_path: Path) -> None:
    paths = tmp_path / "a", tmp_path / "b"
    paths[0].write_bytes(b"1\n2\n3\n4")
    paths[1].write_bytes(b"one\ntwo")
    growing = GrowingPairs(paths)
    assert growing.n_lines == 1
    growing.add(1, [("2", "zwei"), ("3", "a line\nbreak")])
    growing.add(3, [("4", "\ud800")])
    assert [path.read_text().split("\n") for path in paths] == [
        ["1", "2", "3", "4", ""],
        ["one", "zwei", "a line break", "?", ""],
    ]
    assert GrowingPairs(paths).n_lines == growing.n_lines == 4


def test_two_processes_write_and_train_together(whole: Path, tmp_path: Path) -> None:
    """train.py in two processes of one device each: one of them writes, and both learn from it."""
    run_of(tmp_path)
    options = (
        f"{ROOT / 'train.py'} --config {ROOT / 'configs' / 'multi30k.py'} --output {tmp_path / 'run'} "
        f"--data.test-split None --data.dir {tmp_path} --data.tokenizer {whole / 'tokenizer'} --data.max-tokens 32 "
        "--data.n-buckets 1 "
        "--data.batch-tokens 256 --model.d-model 16 --model.d-ff 32 --model.n-encoder-layers 1 "
        "--model.n-decoder-layers 1 --decode.beam-size 2 --decode.extra-length 4 --decode.min-length 4 --train.steps 2 "
        f"--train.evaluate-every None --processes.coordinator {free_address()} --processes.count 2 --processes.id"
    )
    in_processes([[*options.split(), str(i)] for i in range(2)], JAX_NUM_CPU_DEVICES="1")
    rewritten = tmp_path / "run" / "rewritten"
    assert lines_of(rewritten / FILES[0]) == TEXT
    assert all(lines_of(rewritten / FILES[1]))
    assert lines_of(rewritten / FILES[3]) == lines_of(tmp_path / "train.de")
    report = json.loads((tmp_path / "run" / "data_report.json").read_text())
    assert len(report["corpora"]) == 6


# --- asked for ----------------------------------------------------------------------------------------------


def test_train_py_trains_the_teacher_and_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_of(tmp_path)
    program = load_program(ROOT / "train.py")
    options = (
        f"--config {ROOT / 'configs' / 'multi30k.py'} --smoke --output {tmp_path / 'run'} --data.dir {tmp_path} "
        "--data.vocab-size 40 --data.max-tokens 32 --data.test-split None --data.batch-tokens 256 --data.n-buckets 1 "
        "--model.d-model 16 --model.d-ff 32 --model.n-encoder-layers 1 --model.n-decoder-layers 1 --decode.beam-size 2 "
        "--train.n-devices 1 --decode.extra-length 4 --teacher.weight 0.5"
    )
    assert run_command(lambda: program.main(options.split())) == 0, capsys.readouterr().err
    told = capsys.readouterr().err
    assert "teacher    36 new targets and sources in" in told
    assert told.count("finished   ") == 2
    assert lines_of(tmp_path / "run" / "rewritten" / FILES[0]) == TEXT


@pytest.mark.parametrize(
    ("options", "length"),
    [
        ("", (24, 14)),
        ("--train.epochs 3", (3, 3)),
        ("--train.epochs 3 --teacher.epochs 5", (5, 3)),
        ("--train.steps 7 --teacher.epochs 5", (5, None)),
        ("--train.steps 7", (None, None)),
        ("--smoke", (2, 2)),
    ],
)
def test_a_length_on_the_command_line_is_the_teachers_too(options: str, length: tuple[int | None, int | None]) -> None:
    run = parse_options(["--config", str(ROOT / "configs" / "multi30k.py"), *options.split()], ROOT).run
    assert (teacher_run(run).train.epochs, run.train.epochs) == length
    assert "--train.steps" not in options or teacher_run(run).train.steps == 7


def test_a_dry_run_tells_of_the_teacher(tmp_path: Path) -> None:
    told = describe(run_of(tmp_path, **{"teacher.epochs": 24}), n_devices=1, compiled=False)
    (line,) = [line for line in told if line.startswith("teacher")]
    assert "24 epochs of the text as it is" in line
    assert "to targets and once more to sources" in line
    alone = describe(run_of(tmp_path, weight=0.0), n_devices=1, compiled=False)
    assert not [line for line in alone if line.startswith("teacher")]


@pytest.mark.parametrize(
    ("teacher", "message"),
    [
        ({"weight": -1.0}, "teacher.weight is -1.0"),
        ({"weight": float("inf")}, "teacher.weight is inf"),
        ({"weight": float("nan")}, "teacher.weight is nan"),
        ({"weight": 1.0, "epochs": 0}, "teacher.epochs is 0"),
        ({"weight": 1.0, "dropout": 1.0}, "dropout is 1.0"),
    ],
)
def test_a_setting_that_cannot_be_is_told_by_its_name(teacher: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        TeacherConfig(**teacher)


def test_a_corpus_made_by_rule_has_no_teacher() -> None:
    with pytest.raises(UserError, match="has pairs made by rule"):
        dataclasses.replace(RunConfig(data=DataConfig(task="dates")), teacher=TeacherConfig(1.0))
