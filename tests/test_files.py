"""Files appear whole or stay as they were, and an error names the file that the user knows."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from transformer_jax.errors import UserError
from transformer_jax.files import check_writable, whole_file, write_whole, writing
from transformer_jax.line_files import output_file

NOBODY = 65534
LONG = "x" * 250 + ".png"
"""A name that a file can have, but not with `.part` after it: so nobody, root included, can write it."""


@contextlib.contextmanager
def full_disk(size: int) -> Iterator[None]:
    """No file can grow beyond so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def without_privileges() -> Iterator[None]:
    """Root may write everything."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that everybody can reach, unlike those of pytest."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o777)
    yield folder
    folder.chmod(0o777)
    shutil.rmtree(folder)


def refusal(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        check_writable(path)
    return str(caught.value)


# --- writing ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("earlier", [None, b"from before"])
def test_where_the_disk_is_full_the_file_stays_as_it_was_and_is_named(earlier: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    if earlier is not None:
        path.write_bytes(earlier)
    # Above a buffer's size the error comes when it is written, below it when it is closed.
    for n in (50, 1_000_000):
        with full_disk(20), pytest.raises(UserError) as caught:
            write_whole(path, b"1" * n)
        assert str(caught.value) == f"{path} cannot be written (File too large)."
        assert [p.read_bytes() for p in tmp_path.iterdir()] == ([] if earlier is None else [earlier])
    write_whole(path, "ü")
    assert path.read_bytes() == b"\xc3\xbc"


def test_a_folder_that_is_not_there_is_named_with_the_file(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        write_whole(tmp_path / "no" / "picture.png", b"1")
    assert str(caught.value) == f"{tmp_path}/no/picture.png cannot be written (No such file or directory)."


def test_what_a_link_points_to_is_written(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there" / "file")
    for content in (b"new", b"changed"):
        write_whole(tmp_path / "link", content)
        assert (tmp_path / "link").is_symlink()
        assert [path.read_bytes() for path in (tmp_path / "there").iterdir()] == [content]


def test_a_link_that_leads_in_a_circle_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("link")
    write_whole(tmp_path / "link", b"new")
    assert (tmp_path / "link").read_bytes() == b"new"


def test_what_fails_in_a_folder_of_parts_is_told_of_the_whole(tmp_path: Path) -> None:
    """As where a model is written file by file under another name, which takes its own at the end."""
    part = tmp_path / ".part"
    part.mkdir()
    for write, reason in (
        (lambda: write_whole(part / "vocab.json", b"123"), "File too large"),
        (lambda: (part / "source.spm").write_bytes(b"123"), "File too large"),
        (lambda: (part / "absent" / "source.spm").write_bytes(b"1"), "No such file or directory"),
    ):
        with full_disk(2), pytest.raises(UserError) as caught, writing(tmp_path / "model"):
            write()
        assert str(caught.value) == f"{tmp_path}/model cannot be written ({reason})."
    with pytest.raises(UserError, match=r"^another mistake$"), writing(tmp_path / "model"):
        raise UserError("another mistake")
    with pytest.raises(BrokenPipeError), writing(tmp_path / "model"):
        raise BrokenPipeError


def test_an_error_of_what_is_written_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(TypeError), whole_file(tmp_path / "file") as file:
        file.writelines([b"half", "text"])  # type: ignore[list-item]
    assert not list(tmp_path.iterdir())


# --- before the work ----------------------------------------------------------------------------------------


def test_a_file_that_can_be_written_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "old").write_bytes(b"old")
    before = (tmp_path / "old").stat()
    os.mkfifo(tmp_path / "pipe")
    for name in ("old", "new", "pipe"):  # nobody reads the pipe: opening it would wait for ever
        check_writable(tmp_path / name)
    after = (tmp_path / "old").stat()
    assert (after.st_mtime_ns, after.st_ino, after.st_size) == (before.st_mtime_ns, before.st_ino, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old", "pipe"]


def test_places_that_cannot_be_written_are_told_by_the_name_that_was_given(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    golden = {
        "file/x": f"{tmp_path}/file is a file, so that x cannot be in it; name a folder.",
        "no/x": f"There is no folder {tmp_path}/no to write x in; make it, or name another.",
        ".": f"{tmp_path} is a folder; name a file.",
        LONG: f"{tmp_path}/{LONG} cannot be written (File name too long).",
    }
    for name, message in golden.items():
        assert refusal(tmp_path / name) == message


def test_a_folder_without_permission_is_told(open_folder: Path) -> None:
    open_folder.chmod(0o555)
    with without_privileges():
        assert refusal(open_folder / "x.png") == f"{open_folder}/x.png cannot be written (Permission denied)."


def test_a_protected_file_is_told(open_folder: Path) -> None:
    """Another could take its place, the folder being open: but it is protected."""
    (open_folder / "x.png").write_bytes(b"kept")
    (open_folder / "x.png").chmod(0o444)
    with without_privileges():
        assert refusal(open_folder / "x.png") == f"{open_folder}/x.png cannot be written (Permission denied)."
        check_writable(open_folder / "y.png")
    assert [path.read_bytes() for path in open_folder.iterdir()] == [b"kept"]


# --- others at work -----------------------------------------------------------------------------------------


def test_a_check_does_no_harm_to_a_file_that_is_being_written(tmp_path: Path) -> None:
    path = tmp_path / "out.txt"
    with whole_file(path) as file:
        file.write(b"hours of ")
        check_writable(path)
        write_whole(path, "another's")
        file.write(b"work")
    assert path.read_bytes() == b"hours of work"
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_fails_half_way_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "out.txt"

    def write() -> None:
        with output_file(path) as file:
            for _ in range(100):
                file.write(b"1" * 1000)

    with full_disk(2000), pytest.raises(UserError, match=r"out\.txt cannot be written \(File too large\)"):
        write()
    assert not list(tmp_path.iterdir())


def test_another_error_inside_is_no_error_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), whole_file(tmp_path / "out.txt"):
        (tmp_path / "absent").read_bytes()
    assert not list(tmp_path.iterdir())


def test_permissions_are_those_of_the_file_before(tmp_path: Path) -> None:
    path = tmp_path / "private.txt"
    path.write_text("mine")
    path.chmod(0o600)
    write_whole(path, "still mine")
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("still mine", 0o600)
    before = os.umask(0o027)
    try:
        write_whole(tmp_path / "new.txt", "new")
    finally:
        os.umask(before)
    assert (tmp_path / "new.txt").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
def test_what_is_open_is_written_to_from_where_it_stands(name: str, tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text("kept\n")
    code = (
        f"from pathlib import Path; from transformer_jax.files import write_whole; write_whole(Path({name!r}), 'new')"
    )
    with log.open("a") as stdout:
        subprocess.run([sys.executable, "-c", code], stdout=stdout, check=True)
    assert log.read_text() == "kept\nnew"
