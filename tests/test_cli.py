"""`transformer-jax translate`: one line in, one line out, for any bytes; mistakes are one sentence."""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax import cli, cli_options, cli_translate, line_files
from transformer_jax.config import DecodeConfig, ModelConfig
from transformer_jax.corpus import iterate_file
from transformer_jax.errors import UserError
from transformer_jax.model import Transformer
from transformer_jax.model_folder import save_model
from transformer_jax.run_model import fit_model
from transformer_jax.sentencepiece_training import train_sentencepiece
from transformer_jax.sharding import data_mesh
from transformer_jax.tokenizer import CharacterTokenizer
from transformer_jax.translator import Hypothesis, Translation, Translator

ROOT = Path(__file__).resolve().parents[1]
TOKENIZER = CharacterTokenizer("abcdef ")


class Shouting:
    """Translates by rule, so that every output line is known: capitals, between marks; blank stays blank."""

    def __init__(self) -> None:
        self.config: DecodeConfig | None = None
        self.calls: list[tuple[int, int]] = []

    def load(self, options: argparse.Namespace, stopwatch: Any = None) -> Shouting:
        self.config = DecodeConfig(**cli_options.search_changes(options))
        return self

    def translate(self, lines: Sequence[str], prefixes: str | None = None, first_line: int = 1) -> list[Translation]:
        self.calls.append((first_line, len(lines)))
        return [translation(f"<{line.upper()}>" if line.strip() else "") for line in lines]


def translation(text: str) -> Translation:
    return Translation(text, 0.0, 0.0, (), ())


@pytest.fixture
def shouting(monkeypatch: pytest.MonkeyPatch) -> Shouting:
    translator = Shouting()
    monkeypatch.setattr(cli_translate, "load_translator", translator.load)
    return translator


def run(*arguments: object) -> int:
    return cli.run_command(lambda: cli._dispatch(["translate", *map(str, arguments)]))


def translate_file(content: bytes, folder: Path, name: str = "in.txt") -> bytes:
    (folder / name).write_bytes(content)
    assert run("model", "--input", folder / name, "--output", folder / "out.txt") == 0
    return (folder / "out.txt").read_bytes()


# --- one line in, one line out ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"a\nb\n", b"<A>\n<B>\n"),
        (b"a\nb", b"<A>\n<B>\n"),
        (b"", b""),
        (b"\n", b"\n"),
        (b"\na\n \n\n", b"\n<A>\n\n\n"),
        (b"a\r\nb\r\n", b"<A>\n<B>\n"),
        (b"a\rb\n", b"<A\rB>\n"),
        ("a\u2028b\u2029c\x85d\n".encode(), "<A\u2028B\u2029C\x85D>\n".encode()),
        (b"\xef\xbb\xbfa\nb\n", b"<A>\n<B>\n"),
        (b"a\x00b\n", b"<A\x00B>\n"),
        (b"a\xffb\n\xc3\n", b"<A\xffB>\n<\xc3>\n"),
        ("grün 🇩🇪\n".encode(), "<GRÜN 🇩🇪>\n".encode()),
        (b"x" * 10_000 + b"\n", b"<" + b"X" * 10_000 + b">\n"),
    ],
    ids=[
        *("plain", "no last newline", "empty", "one blank", "blanks", "CRLF", "lone CR"),
        *("U+2028", "BOM", "NUL", "not UTF-8", "UTF-8", "long"),
    ],
)
def test_each_line_in_is_one_line_out(content: bytes, expected: bytes, shouting: Shouting, tmp_path: Path) -> None:
    assert translate_file(content, tmp_path) == expected


def test_gzip_input_is_unpacked_whatever_its_name(shouting: Shouting, tmp_path: Path) -> None:
    assert translate_file(gzip.compress(b"a\n\nb\n"), tmp_path, "in.gz") == b"<A>\n\n<B>\n"
    assert translate_file(gzip.compress(b"a\n"), tmp_path, "in.txt") == b"<A>\n"


def test_standard_input_goes_to_standard_output(
    shouting: Shouting, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\r\n\n\xff\n")))
    assert run("model") == 0
    captured = capfdbinary.readouterr()
    assert captured.out == b"<A>\n\n<\xff>\n"
    assert captured.err == b""


def test_a_line_break_inside_a_translation_makes_no_second_line(
    shouting: Shouting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def translate(lines: Iterable[str], **_: Any) -> list[Translation]:
        return [translation("one\ntwo") for _ in lines]

    monkeypatch.setattr(shouting, "translate", translate)
    assert translate_file(b"a\nb\n", tmp_path) == b"one two\none two\n"


def test_long_files_are_translated_in_parts_whose_warnings_keep_counting(shouting: Shouting, tmp_path: Path) -> None:
    n = 2 * line_files.CHUNK + 5
    content = b"".join(b"%d\n" % i for i in range(n))
    assert translate_file(content, tmp_path) == b"".join(b"<%d>\n" % i for i in range(n))
    size = line_files.CHUNK
    assert shouting.calls == [(1, size), (size + 1, size), (2 * size + 1, 5)]


def test_options_reach_the_translator(shouting: Shouting, tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b"a\n")
    options = ("--batch-tokens", 99, "--extra-length", 7, "--beam-size", 3, "--length-rule", "gnmt")
    assert run("model", "--input", tmp_path / "in", *options) == 0
    assert shouting.config == DecodeConfig(batch_tokens=99, extra_length=7, beam_size=3, length_rule="gnmt")
    options = ("--extra-length", "none", "--sample", "--seed", 3, "--top-k", 5)
    assert run("model", "--input", tmp_path / "in", *options) == 0
    assert shouting.config == DecodeConfig(extra_length=None, sample=True, seed=3, top_k=5)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--top-k", 5), "--top-k is of drawing at random, which --sample asks for"),
        (("--temperature", 0.5), "--temperature is of drawing at random"),
        (("--seed", 1), "--seed is of drawing at random"),
        (("--scores", "--format", "tsv"), "tsv has the scores without --scores"),
    ],
)
def test_options_that_would_do_nothing_are_refused(
    options: tuple[Any, ...], sentence: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").write_bytes(b"a\n")
    assert run("model", "--input", tmp_path / "in", "--output", tmp_path / "out", *options) == 2
    assert sentence in capfd.readouterr().err
    assert not (tmp_path / "out").exists()


def test_every_setting_of_the_search_has_an_option() -> None:
    parser = argparse.ArgumentParser()
    cli_options.add_search(parser)
    cli_options.add_running(parser)
    options = {action.dest for action in parser._actions}
    fields = {field.name for field in dataclasses.fields(DecodeConfig)}
    assert fields - options == {"metric", "limit"}  # of evaluations during training


# --- the output file ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("earlier", [None, b"from an earlier run\n"])
def test_output_file_is_complete_or_as_it_was(
    earlier: bytes | None, shouting: Shouting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def translate(lines: Sequence[str], first_line: int = 1, **_: Any) -> list[Translation]:
        if first_line > 1:
            raise UserError("the second part is bad")
        return [translation("x") for _ in lines]

    monkeypatch.setattr(shouting, "translate", translate)
    (tmp_path / "in").write_bytes(b"a\n" * (line_files.CHUNK + 1))
    out = tmp_path / "out"
    if earlier is not None:
        out.write_bytes(earlier)
    assert run("model", "--input", tmp_path / "in", "--output", out) == 2
    assert (out.read_bytes() if out.exists() else None) == earlier
    assert {path.name for path in tmp_path.iterdir()} <= {"in", "out"}  # and nothing half-written is left


def test_a_device_or_pipe_is_written_to_and_not_replaced(shouting: Shouting, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE)
    (tmp_path / "in").write_bytes(b"a\n")
    assert run("model", "--input", tmp_path / "in", "--output", pipe) == 0
    assert reader.communicate(timeout=20)[0] == b"<A>\n"
    assert pipe.is_fifo()


# --- mistakes -----------------------------------------------------------------------------------------------


def assert_one_sentence(capsys: pytest.CaptureFixture[str], *parts: object) -> None:
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("error: ")
    for part in parts:
        assert str(part) in line


def test_missing_input_file_is_one_sentence_and_writes_nothing(
    shouting: Shouting, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("model", "--input", tmp_path / "none", "--output", tmp_path / "out") == 2
    assert_one_sentence(capsys, tmp_path / "none")
    assert not (tmp_path / "out").exists()


def test_damaged_gzip_is_one_sentence_and_writes_nothing(
    shouting: Shouting, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.gz").write_bytes(gzip.compress(os.urandom(1000))[:500])
    assert run("model", "--input", tmp_path / "in.gz", "--output", tmp_path / "out") == 2
    assert_one_sentence(capsys, "in.gz")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("output", ["no/such/folder/out", "."])
def test_output_that_cannot_be_written_is_one_sentence(
    output: str, shouting: Shouting, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").write_bytes(b"a\n")
    assert run("model", "--input", tmp_path / "in", "--output", tmp_path / output) == 2
    assert_one_sentence(capsys, (tmp_path / output).parent if output != "." else tmp_path)


def test_impossible_option_is_one_sentence(
    shouting: Shouting, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").write_bytes(b"a\n")
    assert run("model", "--input", tmp_path / "in", "--batch-tokens", 0) == 2
    assert_one_sentence(capsys, "batch_tokens is 0")


@pytest.mark.parametrize("arguments", [[], ["translat", "model"], ["translate"], ["translate", "m", "--inptu", "x"]])
def test_a_command_line_that_makes_no_sense_ends_with_code_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        cli._dispatch(arguments)
    assert stop.value.code == 2
    assert "usage: transformer-jax" in capsys.readouterr().err


def test_a_reader_that_has_gone_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> int:
        raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert cli.run_command(broken) == 141


def test_interrupt_ends_with_code_130(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    assert cli.run_command(interrupted) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_too_little_memory_is_one_sentence_and_another_error_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    def allocate() -> int:
        jnp.zeros(2**50, jnp.int8).block_until_ready()
        return 0

    assert cli.run_command(allocate) == 2
    assert capsys.readouterr().err == f"error: {cli.NO_MEMORY}\n"
    with pytest.raises(RuntimeError, match="a bug"):
        cli.run_command(lambda: (_ for _ in ()).throw(RuntimeError("a bug")))


# --- with a real model, as a program ------------------------------------------------------------------------


def random_params(shapes: Any, seed: int) -> Any:
    """A seed whose outputs differ from line to line."""
    rng = np.random.default_rng(seed)

    def draw(path: Any, x: Any) -> np.ndarray:
        centre = 1.0 if jax.tree_util.keystr(path).endswith("['scale']") else 0.0
        return (centre + 0.5 * rng.normal(size=x.shape)).astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, shapes)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    config = ModelConfig(
        vocab_size=TOKENIZER.vocab_size,
        d_model=16,
        n_heads=2,
        d_ff=16,
        n_encoder_layers=1,
        n_decoder_layers=1,
        max_length=8,
    )
    ids = jnp.ones((1, 1), jnp.int32)
    shapes = jax.eval_shape(Transformer(config).init, jax.random.key(0), ids, ids)["params"]
    save_model(folder, config, random_params(shapes, seed=9))
    TOKENIZER.save(folder)
    return folder


def transformer_jax(*arguments: object, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "transformer_jax", *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, input=stdin, capture_output=True, env=environment, timeout=180)


def test_the_program_writes_what_the_translator_says(model_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines = ["abc", "", "fade", "a\x00b", "face a", "\u2028", "abcdefabcdef", "b"]
    done = transformer_jax("translate", model_folder, stdin="\n".join(lines).encode())
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    with caplog.at_level(logging.WARNING):
        expected = Translator.from_pretrained(model_folder, mesh=data_mesh(1)).translate(lines)
    assert done.stdout.decode().split("\n") == [*(t.text for t in expected), ""]
    assert len({t.text for t in expected}) >= 4
    # What was said beside it is warnings, a line each.
    assert "Line 7 has 13 tokens; it is translated in 2 parts." in caplog.text
    assert done.stderr.decode().splitlines() == [f"WARNING: {r.getMessage()}" for r in caplog.records]


def test_the_program_ends_with_code_2_and_one_sentence_without_a_model(tmp_path: Path) -> None:
    done = transformer_jax("translate", tmp_path / "no-model", stdin=b"a\n")
    assert done.returncode == 2
    assert done.stdout == b""
    (line,) = done.stderr.decode().splitlines()
    assert line.startswith("error: ")
    assert "no-model" in line


# --- n-best lists, scores, evaluation, streaming ----------------------------------------------------------------


def command(*arguments: object) -> int:
    return cli.run_command(lambda: cli._dispatch([*map(str, arguments), "--devices", "1"]))


@pytest.fixture(scope="module")
def golden(model_folder: Path) -> list[Translation]:
    translator = Translator.from_pretrained(model_folder, mesh=data_mesh(1))
    return translator.translate(SENTENCES, beam_size=3, n_best=2)


SENTENCES = ["abc", "", "fade", "b"]


@pytest.fixture
def sentences(tmp_path: Path) -> Path:
    path = tmp_path / "in.txt"
    path.write_text("\n".join(SENTENCES) + "\n")
    return path


def test_n_best_lists_come_as_json_or_table(
    model_folder: Path, sentences: Path, golden: list[Translation], capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    asked = ("translate", model_folder, "--input", sentences, "--beam-size", 3, "--n-best", 2)
    assert command(*asked, "--format", "jsonl") == 0
    records = [json.loads(line) for line in capfdbinary.readouterr().out.splitlines()]
    assert [r["line"] for r in records] == [1, 2, 3, 4]
    assert [r["text"] for r in records] == [t.text for t in golden]
    for record, expected in zip(records, golden, strict=True):
        assert [h["text"] for h in record["n_best"]] == [h.text for h in expected.n_best]
        assert [h["tokens"] for h in record["n_best"]] == [list(h.tokens) for h in expected.n_best]
        np.testing.assert_allclose(
            [h["score"] for h in record["n_best"]], [h.score for h in expected.n_best], atol=1e-5
        )
    assert command(*asked, "--format", "tsv") == 0
    rows = [line.split("\t") for line in capfdbinary.readouterr().out.decode().splitlines()]
    assert [int(row[0]) for row in rows] == [1, 1, 2, 3, 3, 4, 4]
    assert [row[2] for row in rows] == [" ".join(h.text.split()) for t in golden for h in t.n_best]


def test_several_hypotheses_in_plain_text_are_refused(
    model_folder: Path, sentences: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("translate", model_folder, "--input", sentences, "--n-best", 2) == 2
    assert_one_sentence(capsys, "--format jsonl or tsv")


def test_scores_of_lines_are_those_of_the_translator(
    model_folder: Path, sentences: Path, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    targets = ["abc", "fed", "", "aaa"]
    (tmp_path / "target").write_text("\n".join(targets) + "\n")
    asked = ("score", model_folder, "--source", sentences, "--target", tmp_path / "target")
    assert command(*asked) == 0
    found = [float(line) for line in capfdbinary.readouterr().out.splitlines()]
    expected = Translator.from_pretrained(model_folder, mesh=data_mesh(1)).score(SENTENCES, targets)
    np.testing.assert_allclose(found, [s.log_prob for s in expected], atol=1e-5)
    assert command(*asked, "--format", "jsonl") == 0
    record = json.loads(capfdbinary.readouterr().out.splitlines()[3])
    np.testing.assert_allclose(record["token_log_probs"], expected[3].token_log_probs, atol=1e-5)
    (tmp_path / "target").write_text("one\n")
    assert command(*asked) == 2
    assert b"4 lines" in capfdbinary.readouterr().err


def test_evaluation_scores_the_translations_that_translate_writes(
    model_folder: Path, sentences: Path, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    out = tmp_path / "out"
    assert command("translate", model_folder, "--input", sentences, "--output", out) == 0
    asked = ("evaluate", model_folder, "--source", sentences, "--reference", out, "--format", "json")
    assert command(*asked) == 0
    scores = json.loads(capfdbinary.readouterr().out)
    assert (scores["exact"], scores["lines"]) == (1.0, 4)
    assert "version:" in scores["signature"]
    out.write_text("x\n" * 4)
    assert command(*asked, "--output", tmp_path / "again") == 0
    assert json.loads(capfdbinary.readouterr().out)["exact"] == 0.0
    assert len((tmp_path / "again").read_text().splitlines()) == 4


def test_a_report_of_times_goes_to_standard_error(
    model_folder: Path, sentences: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert command("translate", model_folder, "--input", sentences, "--report", "timing") == 0
    report = capfdbinary.readouterr().err.decode()
    assert all(word in report for word in ("load ", "compile ", "decode ", " tokens/s"))


def test_lines_are_answered_as_they_come(model_folder: Path) -> None:
    """A program that writes a line and waits for its translation gets it."""
    arguments = [sys.executable, "-m", "transformer_jax", "translate", str(model_folder), "--devices", "1"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        for line in (b"abc\n", b"\n", b"fade\n"):
            program.stdin.write(line)
            program.stdin.flush()
            assert program.stdout.readline().endswith(b"\n")
        program.stdin.close()
        assert program.stdout.read() == b""
        assert program.wait(timeout=60) == 0


def test_what_has_arrived_is_one_chunk_and_errors_come_after_it() -> None:
    def lines() -> Iterator[str]:
        yield from ("a", "", "b")
        raise UserError("the input broke")

    chunks = line_files.available(lines())
    assert next(chunks) == ["a", "", "b"]
    with pytest.raises(UserError, match="the input broke"):
        next(chunks)


def fuzzed_lines(n: int) -> list[bytes]:
    rng = np.random.default_rng(0)
    odd = [b"", b" ", b"\t", b"\x00", b"\xff\xfe", b"\xed\xa0\x80", b"a\rb", b"\r", b"abc " * 2500, b"x" * 10_000]
    odd += [text.encode() for text in ("\u2028", "\u0085x", "\ufeffa", "🙂")]
    random = [rng.integers(0, 256, rng.integers(0, 40)).astype(np.uint8).tobytes() for _ in range(n - 8 * len(odd))]
    lines = [line.replace(b"\n", b"") for line in odd * 8 + random]
    return [lines[i] for i in rng.permutation(len(lines))]


def test_2000_fuzzed_lines_come_out_as_2000_lines_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = fuzzed_lines(2000)
    ends = [b"\r\n" if i % 3 == 0 else b"\n" for i in range(len(lines))]
    (tmp_path / "in").write_bytes(b"".join(line + end for line, end in zip(lines, ends, strict=True)))
    translator = fuzz_translator()
    monkeypatch.setattr(cli_translate, "load_translator", lambda *_: translator)
    asked = ("translate", "model", "--input", tmp_path / "in", "--output", tmp_path / "out")
    assert command(*asked) == 0
    out = (tmp_path / "out").read_bytes().split(b"\n")
    assert len(out) == len(lines) + 1
    texts = list(iterate_file(tmp_path / "in"))
    assert len(texts) == len(lines)
    for text, found in zip(texts, out, strict=False):
        assert found.decode() == (f"{len(text)}" if text.strip() else "")


def fuzz_translator() -> Translator:
    """A real translator with a real SentencePiece tokenizer, but programs that answer with the length of the line."""
    tokenizer = train_sentencepiece(["abc def", "a b c d e f", "xyz"] * 3, 25)
    config = fit_model(ModelConfig.tiny(max_length=64), tokenizer)
    translator = Translator(Transformer(config), {}, tokenizer, mesh=data_mesh(1))

    def answer(parts: Sequence[str], *_: Any) -> list[tuple[Hypothesis, ...]]:
        tokenizer.encode_source_batch(list(parts))
        return [(Hypothesis("+", 0.0, 0.0, (), ()),) for _ in parts]

    def joined(lines: Sequence[str], **changes: Any) -> list[Translation]:
        found = Translator.translate(translator, lines, **changes)
        assert len(found) == len(lines)
        return [translation(f"{len(line)}" if t.text else "") for line, t in zip(lines, found, strict=True)]

    translator._translate_parts = answer  # type: ignore[method-assign]
    translator.translate = joined  # type: ignore[method-assign]
    return translator


# --- outputs and options that once went wrong -------------------------------------------------------------------


def test_a_link_is_written_through_and_stays_a_link(shouting: Shouting, tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b"a\n")
    (tmp_path / "real").write_bytes(b"old\n")
    (tmp_path / "link").symlink_to("real")
    assert run("model", "--input", tmp_path / "in", "--output", tmp_path / "link") == 0
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"<A>\n"


def test_standard_output_by_its_path_is_written_to_and_not_replaced(model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "stdout").symlink_to("/proc/self/fd/1")
    (tmp_path / "in").write_bytes(b"abc\n")
    done = transformer_jax("translate", model_folder, "--input", tmp_path / "in", "--output", tmp_path / "stdout")
    assert done.returncode == 0
    assert done.stdout.count(b"\n") == 1
    assert (tmp_path / "stdout").is_symlink()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--devices", 0), "0 devices"),
        (("--seed", 10**24), "seed is"),
        (("--max-length-factor", "inf"), "max_length_factor is inf"),
        (("--prefix", "a" * 50), "longer than the model"),
        (("--extra-length", -1), "extra_length is -1"),
    ],
)
def test_impossible_options_are_one_sentence(
    options: tuple[object, ...],
    named: str,
    model_folder: Path,
    sentences: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["translate", model_folder, "--input", sentences, *options]
    assert cli.run_command(lambda: cli._dispatch([*map(str, arguments)])) == 2
    assert_one_sentence(capsys, named)


def test_a_maximum_of_no_tokens_gives_empty_lines(
    model_folder: Path, sentences: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert command("translate", model_folder, "--input", sentences, "--max-length", 0) == 0
    assert capfdbinary.readouterr().out == b"\n" * 4


def test_a_list_asked_for_is_as_wide_as_its_beam() -> None:
    assert cli_options.with_defaults({"n_best": 6}, {"beam_size": 2})["beam_size"] == 6
    assert cli_options.with_defaults({"n_best": 3}, {"beam_size": 6})["beam_size"] == 6
    assert cli_options.with_defaults({}, {})["beam_size"] == 4
    other_rule = cli_options.with_defaults({"length_rule": "hf"}, {"length_rule": "marian", "word_penalty": 0.5})
    assert "word_penalty" not in other_rule
