"""The command line: `transformer-jax translate | score | evaluate | convert | average | explain | plot | ...`."""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from transformer_jax.cli_explain import add_explain
from transformer_jax.cli_options import add_model, add_running, add_search
from transformer_jax.cli_watch import add_heads, add_plot
from transformer_jax.errors import UserError, is_out_of_memory
from transformer_jax.line_files import READER

NO_MEMORY = (
    "There is not enough memory for this: take fewer tokens at once (batch-tokens), shorter lines, a smaller beam or a "
    "smaller model."
)


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
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        print(f"error: {NO_MEMORY}", file=sys.stderr)
        return 2


def main() -> None:
    """Entry point of `transformer-jax`."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Names of files come out as the bytes that they came in as, whatever the locale.
        sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape")
    code = run_command(lambda: _dispatch(sys.argv[1:]))
    if any(thread.name == READER for thread in threading.enumerate()):
        # It holds standard input, without which the interpreter cannot end in the usual way.
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(code)
    sys.exit(code)


def _dispatch(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="transformer-jax", description="Use a trained Transformer.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_translate(commands.add_parser("translate", help="translate text, one line in, one line out"))
    _add_score(commands.add_parser("score", help="how likely given translations are"))
    _add_evaluate(commands.add_parser("evaluate", help="translate and compare with references"))
    _add_convert(commands.add_parser("convert", help="write a model in another format"))
    _add_average(commands.add_parser("average", help="make one model of a run's last checkpoints"))
    add_explain(commands.add_parser("explain", help="what the model looks at when it translates a sentence"))
    add_plot(commands.add_parser("plot", help="draw the curves of runs over each other"))
    add_heads(commands.add_parser("heads", help="what each head of a model of the dates task looks at"))
    _add_prepare_tfds(commands.add_parser("prepare-tfds", help="make a set of tensorflow-datasets from text files"))
    options = parser.parse_args(arguments)
    return options.run(options)


def _add_translate(parser: argparse.ArgumentParser) -> None:
    parser.description = "Translate text, one line in, one line out, in order."
    add_model(parser)
    parser.add_argument("--input", type=Path, help="text to translate, plain or .gz (standard input)")
    parser.add_argument("--output", type=Path, help="where to write it (standard output)")
    parser.add_argument("--format", choices=("text", "tsv", "jsonl"), default="text", help="of the output (text)")
    parser.add_argument("--scores", action="store_true", help="the score before each line of text, and a tab")
    parser.add_argument("--prefix", help="what every translation must begin with")
    parser.add_argument("--report", choices=("timing",), help="where the time went, on standard error")
    add_running(parser)
    add_search(parser)
    parser.set_defaults(run=_translate)


def _add_score(parser: argparse.ArgumentParser) -> None:
    parser.description = "The log-probability of each line of TARGET as a translation of that line of SOURCE."
    add_model(parser)
    parser.add_argument("--source", type=Path, required=True, help="plain or .gz")
    parser.add_argument("--target", type=Path, required=True, help="plain or .gz, as many lines")
    parser.add_argument("--output", type=Path, help="where to write the scores (standard output)")
    parser.add_argument("--format", choices=("text", "jsonl"), default="text", help="jsonl: with those of tokens")
    add_running(parser)
    parser.set_defaults(run=_score)


def _add_evaluate(parser: argparse.ArgumentParser) -> None:
    parser.description = "Translate SOURCE and score it against REFERENCE: sacreBLEU, chrF, exact match."
    add_model(parser)
    parser.add_argument("--source", type=Path, required=True, help="plain or .gz")
    parser.add_argument("--reference", type=Path, required=True, help="plain or .gz, as many lines")
    parser.add_argument("--output", type=Path, help="where to write the translations (nowhere)")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="of the scores (text)")
    parser.add_argument("--target-lang", help="whose tokenizer BLEU takes (the model's own, else 13a)")
    parser.add_argument("--compound-split", action="store_true", help="also BLEU as the paper counts it for German")
    add_running(parser)
    add_search(parser)
    parser.set_defaults(run=_evaluate)


def _add_convert(parser: argparse.ArgumentParser) -> None:
    parser.description = "Write a model for transformers and CTranslate2 (hf) or for native Marian (marian)."
    add_model(parser, "FROM")
    parser.add_argument("folder", metavar="TO", type=Path, help="a new folder")
    parser.add_argument("--to", choices=("hf", "marian"), default="hf", help="format (hf)")
    parser.set_defaults(run=_convert)


def _add_average(parser: argparse.ArgumentParser) -> None:
    parser.description = "Average the parameters of a run's checkpoints into a model folder."
    parser.add_argument("run_folder", metavar="RUN", type=Path, help="the folder of a run")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--last", type=int, metavar="N", help="the newest N checkpoints (all that the run kept)")
    which.add_argument("--steps", type=int, nargs="+", metavar="STEP", help="the checkpoints of these steps")
    parser.add_argument("--output", type=Path, required=True, help="a new folder for the model")
    parser.set_defaults(run=_average)


def _add_prepare_tfds(parser: argparse.ArgumentParser) -> None:
    parser.description = "Make a set of tensorflow-datasets, in array_record format, from parallel text files."
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="where sets are kept: --data.tfds-dir in training")
    parser.add_argument("--name", default="parallel_text", help="of the set (parallel_text)")
    parser.add_argument("--languages", nargs=2, required=True, metavar=("SOURCE", "TARGET"), help="such as en de")
    parser.add_argument(
        "--split",
        nargs=3,
        action="append",
        required=True,
        metavar=("SPLIT", "SOURCE", "TARGET"),
        help="such as train train.en train.de; once for each split",
    )
    parser.set_defaults(run=_prepare_tfds)


def _translate(options: argparse.Namespace) -> int:
    from transformer_jax.cli_translate import translate

    return translate(options)


def _score(options: argparse.Namespace) -> int:
    from transformer_jax.cli_translate import score

    return score(options)


def _evaluate(options: argparse.Namespace) -> int:
    from transformer_jax.cli_translate import evaluate

    return evaluate(options)


def _convert(options: argparse.Namespace) -> int:
    from transformer_jax.convert import convert

    model = convert(options.model, options.folder, options.to, positions=options.positions, revision=options.revision)
    print(f"read       {model.source}")
    print(f"           {model.account}")
    print(f"written    {options.folder}")
    return 0


def _average(options: argparse.Namespace) -> int:
    from transformer_jax.averaging import average_run

    steps = average_run(options.run_folder, options.output, options.last, options.steps)
    print(f"averaged   {len(steps)} checkpoints, steps {', '.join(map(str, steps))}")
    print(f"written    {options.output}")
    return 0


def _prepare_tfds(options: argparse.Namespace) -> int:
    from transformer_jax.tfds_parallel import prepare_parallel_text

    splits = {split: (Path(source), Path(target)) for split, source, target in options.split}
    if len(splits) < len(options.split):
        raise UserError("A split is named twice: name each once, with all of its text in one pair of files.")
    folder = prepare_parallel_text(splits, tuple(options.languages), options.folder, options.name)
    print(f"written    {folder}")
    print(f"train with --data.tfds {options.name}/{'-'.join(options.languages)} --data.tfds-dir {options.folder}")
    return 0


if __name__ == "__main__":
    main()
