"""`transformer-jax translate`: one line in, one line out, for any bytes; mistakes are one sentence."""

from __future__ import annotations

import gzip
import io
import logging
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax import cli, sharding
from transformer_jax.config import DecodeConfig, ModelConfig
from transformer_jax.errors import UserError
from transformer_jax.model import Transformer
from transformer_jax.model_folder import save_model
from transformer_jax.sharding import data_mesh
from transformer_jax.tokenizer import CharacterTokenizer
from transformer_jax.translator import Translation, Translator

ROOT = Path(__file__).resolve().parents[1]
TOKENIZER = CharacterTokenizer("abcdef ")


class Shouting:
    """Translates by rule, so that every output line is known: capitals, between marks; blank stays blank."""

    def __init__(self) -> None:
        self.config: DecodeConfig | None = None
        self.calls: list[tuple[int, int]] = []

    def from_pretrained(self, path: Path, config: DecodeConfig) -> Shouting:
        self.config = config
        return self

    def translate(self, lines: Sequence[str], first_line: int = 1) -> list[Translation]:
        self.calls.append((first_line, len(lines)))
        return [Translation(f"<{line.upper()}>" if line.strip() else "", 0.0, ()) for line in lines]


@pytest.fixture
def shouting(monkeypatch: pytest.MonkeyPatch) -> Shouting:
    translator = Shouting()
    monkeypatch.setattr(Translator, "from_pretrained", translator.from_pretrained)
    monkeypatch.setattr(sharding, "use_compilation_cache", lambda: None)
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
    def translate(lines: Iterable[str], first_line: int = 1) -> list[Translation]:
        return [Translation("one\ntwo", 0.0, ()) for _ in lines]

    monkeypatch.setattr(shouting, "translate", translate)
    assert translate_file(b"a\nb\n", tmp_path) == b"one two\none two\n"


def test_long_files_are_translated_in_parts_whose_warnings_keep_counting(shouting: Shouting, tmp_path: Path) -> None:
    n = 2 * cli.CHUNK + 5
    content = b"".join(b"%d\n" % i for i in range(n))
    assert translate_file(content, tmp_path) == b"".join(b"<%d>\n" % i for i in range(n))
    assert shouting.calls == [(1, cli.CHUNK), (cli.CHUNK + 1, cli.CHUNK), (2 * cli.CHUNK + 1, 5)]


def test_options_reach_the_translator(shouting: Shouting, tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b"a\n")
    assert run("model", "--input", tmp_path / "in", "--batch-tokens", 99, "--extra-length", 7) == 0
    assert shouting.config == DecodeConfig(batch_tokens=99, extra_length=7)


# --- the output file ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("earlier", [None, b"from an earlier run\n"])
def test_output_file_is_complete_or_as_it_was(
    earlier: bytes | None, shouting: Shouting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def translate(lines: Sequence[str], first_line: int = 1) -> list[Translation]:
        if first_line > 1:
            raise UserError("the second part is bad")
        return [Translation("x", 0.0, ()) for _ in lines]

    monkeypatch.setattr(shouting, "translate", translate)
    (tmp_path / "in").write_bytes(b"a\n" * (cli.CHUNK + 1))
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
    assert_one_sentence(capsys, tmp_path / output)


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
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_COMPILATION_CACHE_DIR": ""}
    return subprocess.run(command, input=stdin, capture_output=True, env=environment, timeout=180)


def test_the_program_writes_what_the_translator_says(model_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines = ["abc", "", "fade", "a\x00b", "face a", "\u2028", "abcdefabcdef", "b"]
    done = transformer_jax("translate", model_folder, stdin="\n".join(lines).encode())
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    loaded = Translator.from_pretrained(model_folder)
    with caplog.at_level(logging.WARNING):
        expected = Translator(loaded.model, jax.device_get(loaded.params), TOKENIZER, mesh=data_mesh(1)).translate(
            lines
        )
    assert done.stdout.decode().split("\n") == [*(t.text for t in expected), ""]
    assert len({t.text for t in expected}) >= 4
    # What was said beside it is warnings, a line each.
    assert "Line 7 has 13 tokens; the first 8 are translated." in caplog.text
    assert done.stderr.decode().splitlines() == [f"WARNING: {r.getMessage()}" for r in caplog.records]


def test_the_program_ends_with_code_2_and_one_sentence_without_a_model(tmp_path: Path) -> None:
    done = transformer_jax("translate", tmp_path / "no-model", stdin=b"a\n")
    assert done.returncode == 2
    assert done.stdout == b""
    (line,) = done.stderr.decode().splitlines()
    assert line.startswith("error: ")
    assert "no-model" in line
