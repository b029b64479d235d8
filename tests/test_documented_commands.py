"""No command in README.md and docs/ is wrong: all are read by the programs' own parsers, and those of marked blocks run
at small size. See documented.py for the marks."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import documented
import pytest
from documented import PAGES, ROOT, SMALL_RUN, Block, Command, Models, World, blocks_of, commands_of, inline_code, read
from programs import load_program

from transformer_jax import cli
from transformer_jax.errors import UserError
from transformer_jax.run_options import _option_names, parse_options
from transformer_jax.tasks import TASKS

BLOCKS = [block for page in PAGES for block in blocks_of(page)]
SHELL = [block for block in BLOCKS if block.is_shell]
PYTHON = {page: [b for b in BLOCKS if b.page == page and b.language == "python" and b.kind == "run"] for page in PAGES}
PROGRAMS = ("python ", "transformer-jax ", "pytest ", "pip ", "mkdocs ", "echo ", "srun ")
FOREIGN = ("--normalize", "--xla_")
"""Options of other programs that pages speak of begin so."""


def by_name(block: Block) -> str:
    return block.name


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Commands are for the top of the checkout. docs/sorting_task.py makes a task known, which is forgotten again."""
    monkeypatch.chdir(ROOT)
    before = dict(TASKS)
    yield
    TASKS.clear()
    TASKS.update(before)


# --- marks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.is_shell or b.language == "python"], ids=by_name)
def test_a_block_says_what_becomes_of_it(block: Block) -> None:
    """An unmarked Python block is a quotation, and must be that: it stands in the package as it is."""
    if block.language == "python" and block.kind is None:
        quoted = " ".join(block.text.split())
        sources = (path.read_text(encoding="utf-8") for path in (ROOT / "transformer_jax").glob("*.py"))
        assert any(quoted in " ".join(source.split()) for source in sources), "neither marked nor in the package"
        return
    assert block.kind is not None, "put <!-- run --> or <!-- shown: why it is not run --> before it, or make it `text`"
    assert (block.kind == "shown") == bool(block.reason), "shown needs a reason, run needs none"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_stand_in_fences_at_the_margin(page: Path) -> None:
    """Others would not be found here."""
    outside = documented.FENCE.sub("", page.read_text(encoding="utf-8"))
    assert not re.findall(rf"^ +(?:```|{'|'.join(PROGRAMS)}).*", outside, re.MULTILINE)


def test_the_pages_have_commands() -> None:
    """So that a change of style does not make these tests empty."""
    assert sum(len(list(commands_of(b.text))) for b in SHELL if b.kind == "run") >= 25


# --- reading ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", SHELL, ids=by_name)
def test_the_options_of_a_block_are_those_of_the_programs(block: Block) -> None:
    read_all(block.text)


def read_all(text: str) -> None:
    for command in commands_of(text):
        read(command)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_within_sentences_are_right_too(page: Path) -> None:
    for code in inline_code(page):
        words = code.split()
        if code.startswith("python ") and len(words) == 2:  # a program is named, without what it needs
            assert (ROOT / words[1]).is_file(), f"there is no program {words[1]}"
        elif code.startswith(PROGRAMS):
            read_all(f"{code} --help" if len(words) == 2 else code)


def known_options() -> set[str]:
    """All options of the programs' parsers, noted while they are built."""
    found = {"--help", *_option_names(parse_options([], documented.DATES))}
    add_argument = argparse.ArgumentParser.add_argument

    def note(parser: Any, *names: str, **options: Any) -> Any:
        found.update(names)
        return add_argument(parser, *names, **options)

    def stop(*_: Any) -> None:
        raise documented.Parsed

    programs: list[Any] = [lambda: cli._dispatch([])]
    programs += [load_program(path).main for path in sorted((ROOT / "benchmarks").glob("*.py"))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse._ActionsContainer, "add_argument", note)
        patch.setattr(argparse.ArgumentParser, "parse_args", stop)
        for main in programs:
            with pytest.raises(documented.Parsed):
                main()
    return found


def test_options_within_sentences_exist() -> None:
    known = known_options()
    wrong = []
    for page in PAGES:
        for code in inline_code(page):
            if code.startswith("--"):
                options = [word.split("=")[0] for word in code.split() if word.startswith("--")]
                wrong += [
                    f"{page.name}: {option}"
                    for option in options
                    if option not in known and not option.startswith(FOREIGN)
                ]
    assert not wrong


@pytest.mark.parametrize(
    "text",
    [
        "python train.py --train.stepps 3",
        "python train.py --train.steps many",
        "python train.py --config configs/nothing.py",
        "python benchmarks/packing.py --source a --target b --row-token-s 3",
        "python benchmarks/nothing.py",
        "transformer-jax translate MODEL --beam 4 --no-such-option",
        "transformer-jax translat MODEL",
        "pip install '.[tests]'",
        "pytest tests/test_nothing.py",
        "srun --nodes 2 python train.py --process.count 0",
        'gcloud ssh POD --command "cd here && python train.py --process.count 0"',
        "rm -r runs",
    ],
)
def test_a_wrong_command_would_be_seen(text: str) -> None:
    with pytest.raises((AssertionError, UserError)):
        read_all(text)


def test_commands_are_taken_apart_as_a_shell_does() -> None:
    text = "#!/bin/sh\nA=1 python train.py \\\n --name 'a b'  # it's a\necho hello you | transformer-jax x && pip y\n"
    assert list(commands_of(text)) == [
        Command(("python", "train.py", "--name", "a b"), None, ("A=1",)),
        Command(("transformer-jax", "x"), "hello you\n"),
        Command(("pip", "y"), "hello you\n"),
    ]


def test_options_are_made_small_wherever_they_stand() -> None:
    given = ["--train.steps", "1000", "--name", "x", "--data.limit", "7"]
    assert documented.changed(given, {"--train.steps": "2", "--data.limit": "3"}) == [
        *("--name", "x", "--train.steps", "2", "--data.limit", "3")
    ]


def test_marks_and_fences_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documented, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- run -->\n```\na\n```\n\n<!-- shown: far away -->\n\n```sh\nb `c`\n```\ntext `d\ne`\n\n```text\nf\n```\n",
        "utf-8",
    )
    found = [(b.language, b.text, b.kind, b.reason, b.line) for b in blocks_of(page)]
    assert found == [
        ("", "a\n", "run", None, 2),
        ("sh", "b `c`\n", "shown", "far away", 8),
        ("text", "f\n", None, None, 14),
    ]
    assert list(inline_code(page)) == ["d e"]


# --- running ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    from transformer_jax.convert import convert

    folder = tmp_path_factory.mktemp("models")
    marian = ROOT / "tests" / "fixtures" / "marian_tiny"
    convert(str(marian), folder / "hf", "hf", positions="sin_then_cos")
    for name in ("train", "dev"):
        for language in ("en", "de"):
            documented.write_lines(folder / f"{name}.{language}")
    main = load_program(ROOT / "train.py").main
    small = SMALL_RUN | {"--train.steps": "3", "--train.n-devices": "1"}
    dates = ["--config", str(documented.DATES), "--output", str(folder / "dates")]
    assert main(documented.changed(dates, small)) == 0
    text = [
        *("--config", str(documented.TEXT), "--output", str(folder / "text"), "--data.reversed-weight", "1"),
        *("--data.source", str(folder / "train.en"), "--data.target", str(folder / "train.de")),
        *("--data.validation-source", str(folder / "dev.en"), "--data.validation-target", str(folder / "dev.de")),
    ]
    assert main(documented.changed(text, small)) == 0
    return Models(folder / "dates", folder / "text", folder / "hf", marian)


@pytest.fixture(scope="module")
def done() -> set[Command]:
    """Commands that have run: the same one on another page is not run again."""
    return set()


@pytest.fixture
def world(tmp_path: Path, models: Models, done: set[Command], monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return World(tmp_path, models, done)


@pytest.mark.parametrize("block", [b for b in SHELL if b.kind == "run"], ids=by_name)
def test_the_commands_of_a_block_run(block: Block, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for command in commands_of(block.text):
        world.run(command, monkeypatch)


@pytest.mark.parametrize("page", [page for page in PAGES if PYTHON[page]], ids=lambda page: page.name)
def test_the_python_of_a_page_runs(page: Path, world: World) -> None:
    names: dict[str, Any] = {}
    for block in PYTHON[page]:
        for word in re.findall(r'from_pretrained\("(.*?)"', block.text):
            world.provide(word)
        small = block.text.replace("ModelConfig.base(vocab_size=37_000)", "ModelConfig.tiny(vocab_size=37)")
        exec(compile(small, block.name, "exec"), names)
    assert os.getcwd() == str(world.folder)
