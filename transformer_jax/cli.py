"""The command line, `transformer-jax translate` and `convert`, and what all commands share."""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from transformer_jax.errors import UserError

MODEL_HELP = "a model folder, a run folder, a native Marian folder or .npz, or a name on the Hugging Face hub"
CHUNK = 2048
"""Lines that are sorted and translated together where input comes from a file."""


def run_command(command: Callable[[], int | None]) -> int:
    """Runs a command; a mistake of the user's becomes one sentence on standard error and exit code 2."""
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING, stream=sys.stderr)
    try:
        return command() or 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # Whoever read our output has gone: nothing is wrong, and there is nobody left to tell.
        sys.stderr.close()
        return 141
    except OSError as error:
        print(f"error: {error.strerror or error}{f': {error.filename}' if error.filename else ''}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def main() -> None:
    """Entry point of `transformer-jax`."""
    sys.exit(run_command(lambda: _dispatch(sys.argv[1:])))


def _dispatch(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="transformer-jax", description="Translate with a trained Transformer.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    translate = commands.add_parser(
        "translate",
        help="translate text, one line in, one line out",
        description="Translate text, line by line.",
    )
    translate.add_argument("model", help=MODEL_HELP)
    translate.add_argument("--input", type=Path, help="text to translate, plain or .gz (default: standard input)")
    translate.add_argument("--output", type=Path, help="where to write it (default: standard output)")
    translate.add_argument("--batch-tokens", type=int, default=2048, help="source slots translated together")
    translate.add_argument(
        "--extra-length",
        type=int,
        default=50,
        help="a translation ends at the source's length plus this, in tokens",
    )
    _add_loading_options(translate)
    translate.set_defaults(run=_translate)
    convert = commands.add_parser(
        "convert",
        help="write a model in another format",
        description="Write a model for transformers and CTranslate2 (hf) or for native Marian (marian).",
    )
    convert.add_argument("model", metavar="FROM", help=MODEL_HELP)
    convert.add_argument("folder", metavar="TO", type=Path, help="a new folder")
    convert.add_argument("--to", choices=("hf", "marian"), default="hf", help="format (default: hf)")
    _add_loading_options(convert)
    convert.set_defaults(run=_convert)
    options = parser.parse_args(arguments)
    return options.run(options)


def _add_loading_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--positions",
        choices=("sin_then_cos", "marian"),
        help="read the weights with this table: marian is what OPUS-MT models were trained with",
    )
    parser.add_argument("--revision", help="branch, tag or commit of a model of the hub")


def _convert(options: argparse.Namespace) -> int:
    from transformer_jax.convert import convert

    model = convert(options.model, options.folder, options.to, positions=options.positions, revision=options.revision)
    print(f"read       {model.source}")
    print(f"           {model.account}")
    print(f"written    {options.folder}")
    return 0


def _translate(options: argparse.Namespace) -> int:
    from transformer_jax.config import DecodeConfig
    from transformer_jax.sharding import use_compilation_cache
    from transformer_jax.translator import Translator

    use_compilation_cache()
    config = DecodeConfig(batch_tokens=options.batch_tokens, extra_length=options.extra_length)
    if options.input is not None and (options.input.is_dir() or not options.input.exists()):
        raise UserError(f"There is no file {options.input}.")
    if (options.input is None and sys.stdin is None) or (options.output is None and sys.stdout is None):
        raise UserError("Standard input or output is closed; name files with --input and --output.")
    translator = Translator.from_pretrained(
        options.model, config, positions=options.positions, revision=options.revision
    )
    interactive = options.input is None and sys.stdin.isatty()
    with _input_lines(options.input) as lines, _output(options.output) as output:
        done = 0
        for chunk in _chunks(lines, 1 if interactive else CHUNK):
            translations = translator.translate(chunk, first_line=done + 1)
            done += len(chunk)
            for translation in translations:
                # A line break inside a translation would be one line too many.
                text = translation.text.replace("\n", " ")
                output.write(text.encode("utf-8", "surrogateescape") + b"\n")
            output.flush()
    return 0


def _chunks(lines: Iterable[str], size: int) -> Iterator[list[str]]:
    lines = iter(lines)
    while chunk := list(islice(lines, size)):
        yield chunk


@contextlib.contextmanager
def _input_lines(path: Path | None) -> Iterator[Iterator[str]]:
    from transformer_jax.corpus import iterate_file, iterate_lines

    yield iterate_lines(sys.stdin.buffer) if path is None else iterate_file(path)


@contextlib.contextmanager
def _output(path: Path | None) -> Iterator[BinaryIO]:
    """Standard output, or a file that takes its name when it is complete."""
    if path is None:
        yield sys.stdout.buffer
        return
    special = path.exists() and not path.is_file()  # a pipe or a device is written to, never replaced
    part = path if special else path.with_name(f".{path.name}.part")
    try:
        file = part.open("wb")
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}).") from error
    try:
        with file:
            yield file
        if not special:
            part.replace(path)
    finally:
        if not special:
            part.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
