"""The commands that run a model on files: translate, score, evaluate."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

from transformer_jax.cli_options import check_files, load_translator
from transformer_jax.errors import UserError
from transformer_jax.line_files import input_chunks, output_file


def translate(options: argparse.Namespace) -> int:
    """One line in, one line out; with n-best lists, the format says how several come out."""
    check_files(options.output, options.input)
    if (options.input is None and sys.stdin is None) or (options.output is None and sys.stdout is None):
        raise UserError("Standard input or output is closed; name files with --input and --output.")
    if options.format == "text" and (options.n_best or 1) > 1:
        raise UserError("Several hypotheses a line need --format jsonl or tsv; text has one line for each.")
    if options.scores and options.format != "text":
        raise UserError(f"{options.format} has the scores without --scores; leave it out.")
    stopwatch = None
    if options.report == "timing":
        from transformer_jax.stopwatch import Stopwatch

        stopwatch = Stopwatch()
    began = time.perf_counter()
    translator = load_translator(options, stopwatch)
    loaded = time.perf_counter() - began
    done = n_tokens = 0
    with output_file(options.output) as output, _Progress(options.input) as progress:
        for chunk in input_chunks(options.input):
            translations = translator.translate(chunk, prefixes=options.prefix, first_line=done + 1)
            for number, translation in enumerate(translations, start=done + 1):
                for line in _lines(number, translation, options):
                    output.write(line.encode("utf-8", "surrogateescape") + b"\n")
                n_tokens += len(translation.tokens)
            done += len(chunk)
            output.flush()
            progress.show(done)
    if stopwatch is not None:
        _report(stopwatch.seconds, loaded, n_tokens)
    return 0


def _lines(number: int, translation: Any, options: argparse.Namespace) -> list[str]:
    """What is written for one line of input."""
    if options.format == "text":
        # A line break inside a translation would be one line too many.
        text = translation.text.replace("\n", " ")
        return [f"{translation.score:.4f}\t{text}" if options.scores else text]
    if options.format == "tsv":
        rows = [(h.score, h.text) for h in translation.n_best]
        return [f"{number}\t{score:.4f}\t{' '.join(text.split())}" for score, text in rows]
    hypotheses = [{k: v for k, v in dataclasses.asdict(h).items() if v is not None} for h in translation.n_best]
    return [json.dumps({"line": number, "text": translation.text, "n_best": hypotheses}, ensure_ascii=False)]


def _report(seconds: dict[str, float], loaded: float, n_tokens: int) -> None:
    decoding, ranking = seconds["decode"], seconds["rank"]
    running = decoding + ranking
    speed = n_tokens / running if running else 0.0
    ranked = f", rank by the way back {ranking:.1f} s" if ranking else ""
    print(
        f"load {loaded:.1f} s, compile {seconds['compile']:.1f} s, encode and decode "
        f"{decoding:.1f} s{ranked}; {n_tokens:,} tokens, {speed:,.0f} tokens/s",
        file=sys.stderr,
    )


class _Progress:
    """Lines done, their speed and the time left: on a terminal only."""

    def __init__(self, path: Path | None) -> None:
        from tqdm import tqdm

        total = None if path is None or not sys.stderr.isatty() else _count_lines(path)
        self._bar = tqdm(total=total, unit=" lines", desc="translate", disable=not sys.stderr.isatty() or path is None)

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def show(self, done: int) -> None:
        self._bar.update(done - self._bar.n)


def _count_lines(path: Path) -> int | None:
    from transformer_jax.corpus import iterate_file

    return sum(1 for _ in iterate_file(path)) if path.is_file() else None


def score(options: argparse.Namespace) -> int:
    """A line of scores for each pair of lines."""
    sources, targets = _read_pairs(options.source, options.target, options.output)
    translator = load_translator(options)
    with output_file(options.output) as output:
        for number, found in enumerate(translator.score(sources, targets), start=1):
            line = f"{found.log_prob:.6f}"
            if options.format == "jsonl":
                line = json.dumps({"line": number, **dataclasses.asdict(found)})
            output.write(line.encode() + b"\n")
    return 0


def evaluate(options: argparse.Namespace) -> int:
    """BLEU, chrF and exact match of the model's translations."""
    from transformer_jax.evaluation import compound_split_bleu, score_translations

    if (options.n_best or 1) > 1:
        raise UserError("Only the best of each line is scored; leave out --n-best.")
    sources, references = _read_pairs(options.source, options.reference, options.output)
    translator = load_translator(options)
    language = options.target_lang or getattr(translator.tokenizer, "target_lang", None) or "en"
    with contextlib.nullcontext() if options.output is None else output_file(options.output) as output:
        translations = [translation.text for translation in translator.translate(sources)]
        if output is not None:
            output.write("".join(text + "\n" for text in translations).encode("utf-8", "surrogateescape"))
    scores = score_translations(translations, references, language)
    compounds = compound_split_bleu(translations, references) if options.compound_split else None
    if options.format == "json":
        split = {} if compounds is None else {"bleu_compound_split": compounds}
        print(json.dumps(dataclasses.asdict(scores) | split | {"lines": len(sources)}))
    else:
        print(f"BLEU        {scores.bleu:.2f}   [{scores.signature}]")
        print(f"lower-cased {scores.bleu_lowercase:.2f}")
        print(f"chrF        {scores.chrf:.2f}")
        print(f"exact match {scores.exact:.4f}   ({len(sources):,} lines)")
        if compounds is not None:
            print(f"compounds   {compounds:.2f}   [tokenised by 13a, split at hyphens: compares with the paper only]")
    return 0


def _read_pairs(source: Path, target: Path, output: Path | None) -> tuple[list[str], list[str]]:
    from transformer_jax.corpus import read_lines

    check_files(output, source, target)
    sources, targets = read_lines(source), read_lines(target)
    if len(sources) != len(targets):
        raise UserError(f"{source} has {len(sources)} lines and {target} has {len(targets)}; they must be as many.")
    return sources, targets
