"""The commands that README.md and docs/ show: found, read by the programs' own parsers, and run at small size.

A block of commands is a fence without a language (or `sh`), after a comment that says what becomes of it:

    <!-- run -->                    every command is run: small models, two steps, a text of a few lines
    <!-- shown: the reason -->      it is not run, but its options are read

Output is shown in a `text` fence. A `python` fence has such a comment too. pip and pytest are never run, in either
kind of block: the names of extras and of test files are checked.
"""

from __future__ import annotations

import argparse
import io
import re
import shlex
import shutil
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from programs import load_program

from transformer_jax import cli
from transformer_jax.run_options import parse_options

ROOT = Path(__file__).resolve().parents[1]
DATES, TEXT = ROOT / "configs" / "dates.py", ROOT / "configs" / "multi30k_tutorial.py"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
SHELL = ("", "sh", "bash", "console")
FENCE = re.compile(
    r"^(?P<ticks>`{3,4})(?P<language>\w*)[^\n]*\n(?P<body>.*?)^(?P=ticks)`*\s*$", re.MULTILINE | re.DOTALL
)
COMMENT = re.compile(r"<!-- (run|shown)(?:: ([^>]*\S))? -->\s*$")
NOT_RUN = ("pip", "pytest", "mkdocs", "git", "cd", "jupyter")

SMALL_MODEL = {
    "--model.d-model": "16",
    "--model.n-heads": "2",
    "--model.d-ff": "16",
    "--model.n-encoder-layers": "1",
    "--model.n-decoder-layers": "1",
}
SMALL_RUN = SMALL_MODEL | {
    "--train.steps": "2",
    "--train.evaluate-every": "None",
    "--train.checkpoint-every": "1",
    "--data.limit": "48",
    "--data.vocab-size": "80",
    "--data.n-buckets": "1",
}


@dataclass(frozen=True)
class Block:
    """A fence of a page, with the comment before it."""

    page: Path
    line: int
    language: str
    text: str
    kind: str | None
    """run or shown; None where there is no comment."""
    reason: str | None

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def is_shell(self) -> bool:
        return self.language in SHELL


def blocks_of(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for fence in FENCE.finditer(text):
        comment = COMMENT.search(text[: fence.start()])
        kind, reason = (comment[1], comment[2]) if comment else (None, None)
        line = text.count("\n", 0, fence.start()) + 1
        yield Block(page, line, fence["language"], fence["body"], kind, reason)


def inline_code(page: Path) -> Iterator[str]:
    """What stands between backticks, outside of fences, on one line."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", text):
        yield " ".join(code.split())


@dataclass(frozen=True)
class Command:
    """A program and its arguments; what is piped into it, and the variables that are set for it."""

    words: tuple[str, ...]
    piped: str | None = None
    variables: tuple[str, ...] = ()

    def __str__(self) -> str:
        return shlex.join(self.words)


def commands_of(text: str) -> Iterator[Command]:
    """The commands of a block: lines joined where they go on, comments left out, lists and pipes taken apart, and
    launchers (srun, gcloud) taken off."""
    for line in text.replace("\\\n", " ").splitlines():
        piped = None
        for part in _split(shlex.split(line, comments=True), ("&&", "|")):
            variables = tuple(word for word in part if re.match(r"[A-Z_]+=", word))
            words = part[len(variables) :]
            if words[0] == "echo":
                piped = " ".join(words[1:]) + "\n"
            elif "--command" in words:
                yield from commands_of(words[words.index("--command") + 1])
            else:
                if words[0] == "srun":
                    words = words[next(n for n, word in enumerate(words) if word in ("python", "transformer-jax")) :]
                yield Command(tuple(words), piped, variables)


def _split(words: Sequence[str], at: Sequence[str]) -> Iterator[list[str]]:
    part: list[str] = []
    for word in (*words, at[0]):
        if word in at:
            if part:
                yield part
            part = []
        else:
            part.append(word)


# --- reading ------------------------------------------------------------------------------------------------


class Parsed(Exception):  # noqa: N818  not an error: the parser has come to its end
    pass


def read(command: Command) -> None:
    """Lets the program's own parser read a command; an AssertionError tells what it does not take."""
    program, *arguments = command.words
    if program == "python" and arguments[0] == "train.py":
        given = [word for word in arguments[1:] if word != "--help"]
        parse_options([str(TEXT) if word in ("...", "FILE") else word for word in given], DATES)
    elif program == "python":
        read_by_argparse(load_program(ROOT / arguments[0]).main, arguments[1:], command)
    elif program == "transformer-jax":
        if arguments:
            read_by_argparse(lambda: cli._dispatch(arguments), arguments, command)
    elif program == "pip":
        known = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
        asked = re.findall(r"(?:\.|transformer-jax)\[(.*?)\]", " ".join(arguments))
        assert set(asked) <= known.keys(), f"{command} names an extra that pyproject.toml has not"
    elif program == "pytest":
        missing = [word for word in arguments if not word.startswith("-") and not (ROOT / word).is_file()]
        assert not missing, f"{command} names files that are not there"
    else:
        assert program in NOT_RUN, f"{command}: an unknown program; tell tests/documented.py how to read it"


def read_by_argparse(main: Callable[[], object], arguments: Sequence[str], command: Command) -> None:
    def parse(parser: argparse.ArgumentParser, args: Sequence[str] | None = None, _: object = None) -> None:
        _, unknown = parser.parse_known_args(args)
        assert not unknown, f"{command}: {unknown} belong to no option"
        raise Parsed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse)
        patch.setattr(sys, "argv", ["program", *arguments])
        patch.setattr(sys, "stderr", complaint := io.StringIO())
        try:
            main()
        except Parsed:
            return
        except SystemExit as stop:
            if stop.code in (0, None):
                return
            raise AssertionError(f"{command}: {complaint.getvalue()}") from stop
    raise AssertionError(f"{command}: its parser was not asked")


# --- running ------------------------------------------------------------------------------------------------


def changed(arguments: Sequence[str], options: Mapping[str, str]) -> list[str]:
    """The arguments with these options instead of what they say of them."""
    kept = [w for n, w in enumerate(arguments) if w not in options and (n == 0 or arguments[n - 1] not in options)]
    return [*kept, *(word for option in options.items() for word in option)]


WORDS = (
    *("a", "the", "small", "old", "red", "dog", "frog", "man", "girl", "boy", "tree", "house"),
    *("sits", "runs", "sleeps", "sees", "jumps", "near", "under", "over"),
)


def write_lines(path: Path) -> None:
    """Lines of words for .en and .de, dates for what has dates in its name; more of them where a model trains on it."""
    n_lines = 64 if path.name.startswith(("train", "my", "mono", "back")) else 8
    rng = np.random.default_rng(0)  # one text in all files, so that one compiled program serves most commands
    if "dates" in path.name:
        lines = [f"19{year:02}-05-10" for year in range(10, 13)]
    else:
        lines = [" ".join(rng.choice(WORDS, rng.integers(3, 8))) + "." for _ in range(n_lines)]
    if path.suffix == ".de":
        lines = [line.replace("the", "der").replace("dog", "Hund").title() for line in lines]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


@dataclass(frozen=True)
class Models:
    """Tiny trained runs, and folders of other programs' models, that commands may name."""

    dates: Path
    text: Path
    hugging_face: Path
    marian: Path

    def named(self, word: str) -> Path | None:
        """What a word of a command stands for, where it names a model."""
        if re.fullmatch(r"runs/[\w-]+(/model)?|RUN", word):
            run = self.dates if "dates" in word else self.text
            return run / "model" if word.endswith("/model") else run
        named = {"MODEL": self.text, "HF_FOLDER": self.hugging_face, "MARIAN_FOLDER": self.marian}
        return named.get(word, self.hugging_face if word.startswith("Helsinki-NLP/") else None)


class World:
    """A folder to run a block in: what its commands read is put there when they name it, what they write stays there
    for those that follow."""

    def __init__(self, folder: Path, models: Models, done: set[Command]) -> None:
        self.folder, self.models, self.done = folder, models, done
        for name in ("configs", "docs", "benchmarks"):
            (folder / name).symlink_to(ROOT / name)
        for split in ("train", "val", "test_2016_flickr"):
            for language in ("en", "de"):
                write_lines(folder / "DIR" / f"{split}.{language}")

    def run(self, command: Command, patch: pytest.MonkeyPatch) -> None:
        if command in self.done or command.words[0] in NOT_RUN:
            return
        words = list(command.words)
        is_training = words[:2] == ["python", "train.py"]
        shutil.rmtree(self.folder / "OUT", ignore_errors=True)  # a new folder each time
        for n, word in enumerate(words):
            if n and words[n - 1] == "--output":
                words[n] = "FILE.out" if word == "FILE" else word
            elif not (is_training and words[n - 1] == "--output"):
                self.provide(word)
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO((command.piped or "1965-05-10\n").encode())))
        if is_training:
            self.train(words[2:], command)
        elif words[0] == "transformer-jax":
            self.use(words[1:], command)
        else:
            patch.setattr(sys, "argv", words[1:])
            small = ["--steps", "2", "--evaluate-every", "2"] if words[1].endswith("embedding_start.py") else []
            patch.setattr(sys, "argv", [*words[1:], *small])
            assert not load_program(ROOT / words[1]).main(), command
        self.done.add(command)

    def provide(self, word: str) -> None:
        """Makes what a word names, if it names something to read that is not there."""
        path = self.folder / word
        if path.exists() or word.startswith("-"):
            return
        model = self.models.named(word)
        if model is not None:
            shutil.copytree(model, path)
        elif word == "FILE" or re.fullmatch(r"[\w.-]+\.(en|de|txt)", word):
            write_lines(path)

    def train(self, arguments: list[str], command: Command) -> None:
        small = SMALL_MODEL if "--dry-run" in arguments else SMALL_RUN
        if "--dry-run" not in arguments and not command.variables:
            small = small | {"--train.n-devices": "1"}
        if "..." in arguments:
            arguments[arguments.index("...")] = str(TEXT)
            small = small | {"--data.test-split": "None"}
        assert load_program(ROOT / "train.py").main(changed(arguments, small)) == 0, command

    def use(self, arguments: list[str], command: Command) -> None:
        # The runs that there are have three checkpoints.
        if "--last" in arguments:
            arguments[arguments.index("--last") + 1] = "2"
        if "--steps" in arguments:
            first = arguments.index("--steps") + 1
            last = next((n for n, word in enumerate(arguments) if n >= first and not word.isdigit()), len(arguments))
            arguments[first:last] = ["1", "2", "3"][: last - first]
        if arguments[0] in ("translate", "score", "evaluate") and "--devices" not in arguments:
            arguments += ["--devices", "1"]
        assert cli._dispatch(arguments) == 0, command
