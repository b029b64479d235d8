"""The command that shows what a model looks at: explain, for one sentence or for the word links of two files."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformer_jax.cli_options import (
    BACKWARD,
    add_model,
    add_running,
    add_search,
    check_files,
    load_translator,
)
from transformer_jax.errors import UserError
from transformer_jax.files import check_writable
from transformer_jax.line_files import CHUNK, output_file

MAPS = (".png", ".html")
SHOWN = 3
"""Source words that the terminal shows for each target word."""


def add_explain(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Translate a sentence and show what the model looked at, or link the words of two files of translations."
    )
    add_model(parser)
    parser.add_argument("sentence", nargs="?", metavar="SENTENCE", help="what to translate")
    parser.add_argument("--target", help="a translation to look at instead of the model's own")
    parser.add_argument("--source", type=Path, metavar="FILE", help="instead of SENTENCE: lines, plain or .gz")
    parser.add_argument("--target-file", type=Path, metavar="FILE", help="their translations, as many lines")
    parser.add_argument(
        "--output", type=Path, help="a map: .png or .html; with files, the links (left out: standard output)"
    )
    parser.add_argument(
        "--format", choices=("text", "pharaoh", "json"), help="what is printed (text; pharaoh with files)"
    )
    group = parser.add_argument_group("attention", "layers and heads count from 1")
    group.add_argument("--layer", type=int, help="whose attention links words (the last); of a .png, the only")
    group.add_argument("--head", type=int, help="the only head (links: the mean of all; .png: each)")
    group.add_argument(
        "--step", choices=("writes", "reads"), default="writes", help="whose attention is a target word's (writes)"
    )
    group.add_argument("--units", choices=("words", "tokens"), help="what is linked (words; of characters, tokens)")
    add_running(parser)
    add_search(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    files = (options.source, options.target_file)
    if options.sentence is not None and any(files):
        raise UserError("Give a sentence or two files, not both.")
    if options.sentence is None:
        if not all(files):
            raise UserError("Give a sentence, or two files with --source and --target-file.")
        _check_no_search(options)
        return align_files(options)
    if options.target is not None:
        _check_no_search(options)
    elif (options.n_best or 1) > 1:
        raise UserError("One translation is looked at; leave out --n-best.")
    return explain_sentence(options)


def _check_no_search(options: argparse.Namespace) -> None:
    from transformer_jax.config import DecodeConfig

    names = [field.name for field in dataclasses.fields(DecodeConfig) if field.name != "batch_tokens"]
    names += BACKWARD
    asked = [name for name in names if getattr(options, name, None) is not None]
    if asked:
        option = asked[0].replace("_", "-")
        raise UserError(f"--{option} is of searching for a translation, but one is given; leave one of them out.")


# --- one sentence -------------------------------------------------------------------------------------------


def explain_sentence(options: argparse.Namespace) -> int:
    from transformer_jax.explain import check_choice, explain

    if sys.stdout is None:
        raise UserError("Standard output is closed, and what the model looked at is printed there; open it.")
    if options.output is not None:
        _check_map(options.output)
    if not options.sentence.strip():
        raise UserError("The sentence is empty; there is nothing to look at.")
    translator = load_translator(options)
    c = translator.model.config
    check_choice(c.n_decoder_layers, c.n_heads, options.layer, options.head, "The decoder")
    found = explain(translator, options.sentence, options.target, units=options.units)
    if options.output is not None:
        content = _map(options, found)
        with output_file(options.output) as output:
            output.write(content)
    # JSON is UTF-8 whatever the sentence was; as text, bytes that are none come out as they came in.
    errors = "replace" if options.format == "json" else "surrogateescape"
    with output_file(None) as output:
        output.write(f"{_printed(options, found)}\n".encode("utf-8", errors))
        output.flush()
    return 0


def _check_map(path: Path) -> None:
    """What can be told before a model is loaded."""
    if path.suffix.lower() not in MAPS:
        raise UserError(f"{path} is neither a picture nor a page; end the name with {' or '.join(MAPS)}.")
    check_writable(path)


def _map(options: argparse.Namespace, found: Any) -> bytes:
    if options.output.suffix.lower() == ".png":
        from transformer_jax.attention_plots import attention_picture

        return attention_picture(found, options.layer, options.head)
    from transformer_jax.attention_page import attention_page

    return attention_page(found, options.layer, options.head, options.step).encode("utf-8")


def _printed(options: argparse.Namespace, found: Any) -> str:
    from transformer_jax.alignment import pharaoh

    choice = (options.layer, options.head, options.step)
    if options.format == "pharaoh":
        return pharaoh(found.links(*choice))
    if options.format == "json":
        return json.dumps(_as_json(found, found.links(*choice)), ensure_ascii=False)
    return "\n".join(_as_text(found, *choice))


def _as_text(found: Any, layer: int | None, head: int | None, step: str) -> list[str]:
    """The translation, and the strongest source words of each target word."""
    n_layers, n_heads = found.maps.cross_NHTS.shape[:2]
    heads = f"mean of {n_heads} heads" if head is None else f"head {head}"
    total = sum(found.token_log_probs)
    lines = [
        f"{'given' if found.given else 'translation'}  {found.target}",
        f"log-probability {total:.2f}, {len(found.token_log_probs)} tokens, "
        f"each {math.exp(total / len(found.token_log_probs)):.3f} likely on average",
        f"attention to the source, decoder layer {layer or n_layers} of {n_layers}, {heads}, "
        f"of the step that {step} the word; * is linked",
    ]
    weights = found.word_weights(layer, head, step)
    linked = {(j, i) for i, j in found.links(layer, head, step)}
    source, target = (_numbered(words) for words in (found.source_words, found.target_words))
    width = max(map(len, target), default=0)
    for j, word in enumerate(target):
        best = sorted(range(len(source)), key=lambda i: -weights[j, i])[:SHOWN]
        shown = [f"{source[i]}{'*' if (j, i) in linked else ''} {weights[j, i]:.2f}" for i in best]
        lines.append(f"  {word:{width}}  <-  {'   '.join(shown)}")
    return lines


def _numbered(words: Sequence[Any]) -> list[str]:
    """Words with the numbers that links have."""
    from transformer_jax.explain import labels

    return [f"{n}:{label}" for n, label in enumerate(labels([word.text for word in words]))]


def _as_json(found: Any, links: Any) -> dict[str, Any]:
    """Everything, the weights of all layers and heads included: [layer][head][row][column]."""
    return {
        "source": found.source,
        "target": found.target,
        "source_tokens": found.source_tokens,
        "target_tokens": found.target_tokens,
        "read_tokens": found.read_tokens,
        "token_log_probs": found.token_log_probs,
        "source_words": [dataclasses.asdict(word) for word in found.source_words],
        "target_words": [dataclasses.asdict(word) for word in found.target_words],
        "links": links,
        "encoder": found.maps.encoder_NHSS.tolist(),
        "decoder": found.maps.decoder_NHTT.tolist(),
        "cross": found.maps.cross_NHTS.tolist(),
    }


# --- two files ----------------------------------------------------------------------------------------------


def align_files(options: argparse.Namespace) -> int:
    """One line of links for each pair of lines, in order; a blank line's is empty."""
    from transformer_jax.aligner import Aligner
    from transformer_jax.alignment import pharaoh
    from transformer_jax.corpus import read_lines

    if options.target is not None:
        raise UserError("--target is one sentence's; name the translations' file with --target-file.")
    if options.format == "text":
        raise UserError("The links of files come as pharaoh or json; leave out --format text.")
    if options.output is not None and options.output.suffix.lower() in MAPS:
        raise UserError(f"A map is one sentence's; {options.output} would be the links of many.")
    check_files(options.output, options.source, options.target_file)
    sources, targets = read_lines(options.source), read_lines(options.target_file)
    if len(sources) != len(targets):
        raise UserError(
            f"{options.source} has {len(sources)} lines and {options.target_file} has {len(targets)}; "
            "they must be as many."
        )
    translator = load_translator(options)
    aligner = Aligner(translator, layer=options.layer, head=options.head, step=options.step, units=options.units)
    with output_file(options.output) as output:
        for start in range(0, len(sources), CHUNK):
            part = slice(start, start + CHUNK)
            for number, links in enumerate(aligner.align(sources[part], targets[part], start + 1), start + 1):
                line = json.dumps({"line": number, "links": links}) if options.format == "json" else pharaoh(links)
                output.write(line.encode() + b"\n")
            output.flush()
    return 0
