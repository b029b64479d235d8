"""Options that commands of `transformer-jax` share: which model, and how to search."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from transformer_jax.errors import UserError
from transformer_jax.files import check_writable

BACKWARD = ("backward", "backward_tag", "backward_positions")
"""Options of the model that translates back."""
RERANK_WEIGHT = 0.3
"""Where such an option is given without a weight."""
MODEL_HELP = "a model folder, a run folder, a native Marian folder or .npz, or a name on the Hugging Face hub"


def add_model(parser: argparse.ArgumentParser, metavar: str | None = None) -> None:
    parser.add_argument("model", metavar=metavar, help=MODEL_HELP)
    parser.add_argument(
        "--positions",
        choices=("sin_then_cos", "marian"),
        help="read the weights with this table: marian is what OPUS-MT models were trained with",
    )
    parser.add_argument("--revision", help="branch, tag or commit of a model of the hub")


def add_running(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch-tokens", type=int, help="source slots that are translated together (4096)")
    parser.add_argument("--devices", type=int, help="devices to use (all)")


def add_search(parser: argparse.ArgumentParser) -> None:
    """Fields of DecodeConfig; what is left out is as the model says, or DecodeConfig's default."""
    group = parser.add_argument_group("search", "left out: as the model's own files say, else as in parentheses")
    group.add_argument("--beam-size", type=int, help="hypotheses followed at once; 1: greedy (4)")
    group.add_argument("--n-best", type=int, help="hypotheses given for each line (1)")
    group.add_argument("--length-rule", choices=("hf", "gnmt", "marian"), help="how lengths compare (hf)")
    group.add_argument("--length-penalty", type=float, help="above 0 long outputs gain (1.0)")
    group.add_argument("--early-stopping", choices=("best", "first", "never"), help="when a search ends (best)")
    group.add_argument("--word-penalty", type=float, help="of rule marian, per token (0)")
    group.add_argument("--no-repeat-ngram-size", type=int, help="no n tokens in a row twice (0: they may)")
    group.add_argument("--repetition-penalty", type=float, help="above 1 tokens come again less (1)")
    group.add_argument("--rerank-weight", type=float, help="rank also by the way back to the source, times this (0)")
    group.add_argument("--min-length", type=int, help="tokens at least, the end token included (0)")
    group.add_argument("--extra-length", type=_length, help="tokens more than the source at most, or none (50)")
    group.add_argument("--max-length-factor", type=float, help="times the source's tokens at most (no limit)")
    group.add_argument("--max-length", type=int, help="tokens at most (no limit)")
    group.add_argument("--sample", action="store_true", default=None, help="draw tokens at random instead")
    group.add_argument("--temperature", type=float, help="of the drawing (1)")
    group.add_argument("--top-k", type=int, help="draw from the k likeliest (0: all)")
    group.add_argument("--top-p", type=float, help="draw from the likeliest that reach this probability (1)")
    group.add_argument("--seed", type=int, help="of the drawing (0)")
    group.add_argument("--long-lines", choices=("split", "cut"), help="lines beyond the model's limit (split)")
    _add_backward(parser)


def _add_backward(parser: argparse.ArgumentParser) -> None:
    """Which model says how likely the source is, given a translation of it."""
    group = parser.add_argument_group("the way back", "of --rerank-weight, which is 0.3 where one of these is given")
    group.add_argument("--backward", metavar="MODEL", help="a model of the other direction (the same one, by its tag)")
    group.add_argument("--backward-tag", metavar="TAG", help="what it wants before a line, such as '>>en<<', or ''")
    group.add_argument("--backward-positions", choices=("sin_then_cos", "marian"), help="as --positions, of that model")


def _length(text: str) -> int | str:
    try:
        return "none" if text == "none" else int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor none") from error


def search_changes(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of DecodeConfig that the command line sets."""
    from transformer_jax.config import DecodeConfig

    names = {field.name for field in dataclasses.fields(DecodeConfig)}
    changes = {k: v for k, v in vars(options).items() if k in names and v is not None}
    if changes.get("extra_length") == "none":
        changes["extra_length"] = None
    if changes.get("sample"):
        changes = {"beam_size": 1, "n_best": 1} | changes
    else:
        of_drawing = [name for name in ("temperature", "top_k", "top_p", "seed") if name in changes]
        if of_drawing:
            option = of_drawing[0].replace("_", "-")
            raise UserError(f"--{option} is of drawing at random, which --sample asks for; add that, or leave it out.")
    return changes


def with_defaults(changes: dict[str, Any], model: dict[str, Any]) -> dict[str, Any]:
    """The command line's changes over the model's own search over this program's defaults."""
    merged: dict[str, Any] = {"beam_size": 4} | model | changes
    if "beam_size" not in changes:  # a list of n needs a beam of n
        merged["beam_size"] = max(merged["beam_size"], merged.get("n_best", 1))
    if merged.get("length_rule", "hf") != "marian" and "word_penalty" not in changes:
        merged.pop("word_penalty", None)  # the model's own rule has it, the one that is asked for does not
    return merged


def load_translator(options: argparse.Namespace, stopwatch: Any = None) -> Any:
    """The translator that the command line asks for."""
    from transformer_jax.config import DecodeConfig
    from transformer_jax.model import Transformer
    from transformer_jax.pretrained import load_pretrained
    from transformer_jax.sharding import data_mesh, use_compilation_cache
    from transformer_jax.translator import Translator

    use_compilation_cache()
    mesh = data_mesh(options.devices)
    changes = search_changes(options)
    ranked = any(getattr(options, name, None) is not None for name in BACKWARD)
    if ranked and changes.setdefault("rerank_weight", RERANK_WEIGHT) == 0:
        raise UserError("--backward is of ranking by the way back, which --rerank-weight 0 does without; drop one.")
    DecodeConfig(**with_defaults(changes, {}))  # a mistake is told before the model is loaded
    model = load_pretrained(options.model, positions=options.positions, revision=options.revision)
    config = DecodeConfig(**with_defaults(changes, model.search))
    transformer = Transformer(model.config)
    translator = Translator(transformer, model.params, model.tokenizer, config, mesh, model.suppressed, stopwatch)
    if config.rerank_weight:
        translator.backward = _backward(options, mesh)
        translator.backward.resolve(translator)  # a mistake is told before anything is translated
    return translator


def _backward(options: argparse.Namespace, mesh: Any) -> Any:
    from transformer_jax.reranking import Backward
    from transformer_jax.translator import Translator

    if options.backward is None and options.backward_positions is not None:
        raise UserError("--backward-positions is of the model that --backward names; name one, or leave it out.")
    if options.backward is None:
        return Backward(tag=options.backward_tag)
    other = Translator.from_pretrained(options.backward, positions=options.backward_positions, mesh=mesh)
    return Backward(other, options.backward_tag)


def check_files(output: Path | None, *inputs: Path | None) -> None:
    """That the inputs are there, that the output can be, and that it would not take the place of an input."""
    if output is not None:
        check_writable(output)
    for path in inputs:
        if path is None:
            continue
        if path.is_dir():
            raise UserError(f"{path} is a folder; name a file.")
        if not path.exists():
            raise UserError(f"There is no file {path}.")
        if output is not None and output.exists() and output.samefile(path) and path.is_file():
            raise UserError(f"The output {output} is one of the inputs, which would be lost; give it another name.")
