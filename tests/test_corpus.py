"""Lines, pairs and lengths: no pair may shift, and no line may be lost without being counted."""

import gzip
import io
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from transformer_jax.corpus import (
    LengthRule,
    ParallelText,
    iterate_lines,
    limit_length,
    read_lines,
    read_parallel,
    split_files,
)
from transformer_jax.errors import UserError

WriteFile = Callable[[str, bytes], Path]


@pytest.fixture
def write_file(tmp_path: Path) -> WriteFile:
    def write(name: str, content: bytes) -> Path:
        (tmp_path / name).write_bytes(content)
        return tmp_path / name

    return write


def _lines(content: bytes) -> list[str]:
    return list(iterate_lines(io.BytesIO(content)))


# --- lines --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        (b"", []),
        (b"a\nb\n", ["a", "b"]),
        (b"a\nb", ["a", "b"]),
        (b"\n", [""]),
        (b"a\n\n\n", ["a", "", ""]),
        (b"a\r\nb\r\n", ["a", "b"]),
        (b"a\r\r\nb", ["a\r", "b"]),
        (b"\r\n", [""]),
        (b"a\rb\nc", ["a\rb", "c"]),
        (b"\xef\xbb\xbfa\nb", ["a", "b"]),
        (b"\xef\xbb\xbf", []),
        (b"\xef\xbb\xbf\n", [""]),
        (b"a\n\xef\xbb\xbfb", ["a", "\ufeffb"]),
        (b"a\x00b\x0b\x0c\x1c\x1d\x1e\n", ["a\x00b\x0b\x0c\x1c\x1d\x1e"]),
    ],
)
def test_a_line_ends_at_newline_only(content: bytes, lines: list[str]):
    assert _lines(content) == lines


@pytest.mark.parametrize("separator", ["\x85", "\u2028", "\u2029", "\r"])
def test_unicode_line_separators_are_text(separator: str):
    line = f"one{separator}two"
    assert _lines(f"{line}\nnext\n".encode()) == [line, "next"]


def test_bytes_that_are_not_utf8_come_back_as_they_were():
    content = b"caf\xe9 \xff\xfe \xed\xa0\x80\xc3"
    (line,) = _lines(content)
    assert line.encode("utf-8", "surrogateescape") == content


def test_lines_are_given_as_they_arrive():
    read_end, write_end = os.pipe()
    with os.fdopen(read_end, "rb") as reader, os.fdopen(write_end, "wb", buffering=0) as writer:
        # Were the first line held back until more arrives, the rescue would close the pipe and the test fail.
        rescue = threading.Timer(5.0, writer.close)
        rescue.start()
        writer.write(b"first\n")
        first = next(iterate_lines(reader))
        arrived_early = not writer.closed
        rescue.cancel()
    assert first == "first"
    assert arrived_early


def test_gzip_is_told_by_content_not_by_name(write_file: WriteFile):
    assert read_lines(write_file("plain.gz", b"a\nb\n")) == ["a", "b"]
    assert read_lines(write_file("packed.txt", gzip.compress(b"\xef\xbb\xbfa\r\nb"))) == ["a", "b"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_loses_no_bytes(tmp_path: Path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(b"first\nsecond\n",), daemon=True)
    writer.start()
    assert read_lines(pipe) == ["first", "second"]


def test_a_damaged_gzip_file_is_named(write_file: WriteFile):
    with pytest.raises(UserError, match=r"broken\.gz is a damaged gzip file"):
        read_lines(write_file("broken.gz", gzip.compress(b"a line\n" * 100)[:-10]))


def test_a_file_that_is_missing_or_is_a_folder_is_named(tmp_path: Path):
    with pytest.raises(UserError, match=r"no file .*nowhere\.en"):
        read_lines(tmp_path / "nowhere.en")
    with pytest.raises(UserError, match="is a folder"):
        read_lines(tmp_path)


# --- pairs --------------------------------------------------------------------------------------------------


def test_pairs_with_a_blank_side_are_dropped_together_and_counted(write_file: WriteFile):
    source = write_file("a.en", b"one\n\nthree\nfour\n \t\nsix\n")
    target = write_file("a.de", "eins\nzwei\n\u00a0\u2003\nvier\n\nsechs\n".encode())
    text = read_parallel(source, target)
    assert (text.source, text.target) == (["one", "four", "six"], ["eins", "vier", "sechs"])
    assert text.removed == {"blank": 3}


def test_a_separator_inside_a_line_does_not_shift_the_pairs(write_file: WriteFile):
    source = write_file("a.en", "one\u2028more\ntwo\r\nthree\x85\n".encode())
    target = write_file("a.de", b"eins\nzwei\ndrei\n")
    text = read_parallel(source, target)
    assert list(zip(text.source, text.target, strict=True)) == [
        ("one\u2028more", "eins"),
        ("two", "zwei"),
        ("three\x85", "drei"),
    ]


def test_training_text_is_always_valid_unicode(write_file: WriteFile):
    text = read_parallel(write_file("a.en", b"caf\xe9\n"), write_file("a.de", b"\xffKaffee\n"))
    assert (text.source, text.target) == (["caf\ufffd"], ["\ufffdKaffee"])


def test_several_files_are_joined_in_order(write_file: WriteFile):
    sources = [write_file("a.en", b"one\n"), write_file("b.en", gzip.compress(b"two\nthree"))]
    targets = [write_file("a.de", b"eins"), write_file("b.de", b"zwei\ndrei\n")]
    text = read_parallel(sources, targets)
    assert (text.source, text.target) == (["one", "two", "three"], ["eins", "zwei", "drei"])


def test_unequal_line_counts_are_both_printed(write_file: WriteFile):
    with pytest.raises(UserError, match=r"a\.en has 3 lines and .*a\.de has 2"):
        read_parallel(write_file("a.en", b"1\n2\n3\n"), write_file("a.de", b"1\n2\n"))


def test_unequal_files_do_not_make_up_for_each_other(write_file: WriteFile):
    sources = [write_file("a.en", b"1\n2\n"), write_file("b.en", b"1\n")]
    targets = [write_file("a.de", b"1\n"), write_file("b.de", b"1\n2\n")]
    with pytest.raises(UserError, match=r"a\.en has 2 lines and .*a\.de has 1"):
        read_parallel(sources, targets)


@pytest.mark.parametrize(
    "content", [b"", b"\xef\xbb\xbf", gzip.compress(b"", mtime=0)], ids=["nothing", "mark", "packed"]
)
def test_an_empty_file_is_named(write_file: WriteFile, content: bytes):
    with pytest.raises(UserError, match=r"a\.de is empty"):
        read_parallel(write_file("a.en", b"one\n"), write_file("a.de", content))


def test_files_without_a_single_pair_are_an_error(write_file: WriteFile):
    with pytest.raises(UserError, match="text on both sides"):
        read_parallel(write_file("a.en", b"one\n\n"), write_file("a.de", b"\nzwei\n"))


def test_files_that_do_not_come_in_pairs_are_an_error(write_file: WriteFile):
    one = write_file("a.en", b"one\n")
    with pytest.raises(UserError, match="2 source files and 1 target"):
        read_parallel([one, one], one)
    with pytest.raises(UserError, match="No file is named"):
        read_parallel([], [])


def test_parallel_text_of_unequal_sides_cannot_be_made():
    with pytest.raises(UserError, match="2 lines and the target 1"):
        ParallelText(["a", "b"], ["a"])


def test_a_split_is_found_plain_or_packed(tmp_path: Path, write_file: WriteFile):
    english, german = write_file("train.en", b"one"), write_file("train.de.gz", gzip.compress(b"eins"))
    assert split_files(tmp_path, "train", "en", "de") == (english, german)


def test_a_missing_split_says_what_was_looked_for(tmp_path: Path, write_file: WriteFile):
    write_file("val.en", b"one")
    with pytest.raises(UserError, match=r"neither val\.de nor val\.de\.gz"):
        split_files(tmp_path, "val", "en", "de")
    with pytest.raises(UserError, match=r"no folder .*nowhere"):
        split_files(tmp_path / "nowhere", "val", "en", "de")


def test_multi30k_is_read_whole(shared_dir: Path):
    text = read_parallel(*split_files(shared_dir / "data" / "multi30k", "train", "en", "de"))
    assert len(text) + text.removed["blank"] == 29_000  # the size that its authors give
    assert text.source[0] == "Two young, White males are outside near many bushes."


# --- lengths ------------------------------------------------------------------------------------------------

END = 0
SOURCES = [[5, END], [5, 6, 7, END], [5, 6, END], [5, 6, 7, 8, END]]
TARGETS = [[9, END], [9, END], [9, 8, 7, END], [9, 8, 7, 6, END]]


def test_dropping_removes_the_pair_where_either_side_is_too_long():
    sources, targets, count = limit_length(SOURCES, TARGETS, 3, 3, "drop")
    assert (sources, targets, count) == ([[5, END]], [[9, END]], 3)


def test_cutting_keeps_every_pair_and_its_end_tokens():
    sources, targets, count = limit_length(SOURCES, TARGETS, 3, 2, "cut")
    assert sources == [[5, END], [5, 6, END], [5, 6, END], [5, 6, END]]
    assert targets == [[9, END], [9, END], [9, END], [9, END]]
    assert count == 3


@pytest.mark.parametrize("rule", ["drop", "cut"])
def test_pairs_at_the_limit_are_left_alone(rule: LengthRule):
    assert limit_length(SOURCES, TARGETS, 5, 5, rule) == (SOURCES, TARGETS, 0)


def test_a_limit_of_one_token_leaves_the_end_token():
    assert limit_length([[5, 6, END]], [[9, END]], 1, 1, "cut") == ([[END]], [[END]], 1)


@pytest.mark.parametrize(("max_source", "max_target"), [(0, 3), (3, 0)])
def test_a_limit_without_room_for_the_end_token_is_an_error(max_source: int, max_target: int):
    with pytest.raises(UserError, match=f"{max_source} and {max_target}"):
        limit_length(SOURCES, TARGETS, max_source, max_target, "cut")
