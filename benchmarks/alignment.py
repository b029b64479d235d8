"""Word links read off a model's attention, beside those of a hand.

    python benchmarks/alignment.py MODEL [--pairs benchmarks/alignment_pairs.txt]

For each decoder layer, and for the step that reads a target word and the one that writes it: precision, recall, F1 and
alignment error rate (Och and Ney 2003), in percent. MODEL translates English captions into German.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from transformer_jax.alignment import Links, Step, link, word_weights, words_of
from transformer_jax.cli import run_command

STEPS: tuple[Step, ...] = ("writes", "reads")
PAIRS = Path(__file__).with_name("alignment_pairs.txt")


@dataclass(frozen=True)
class Pair:
    """Two lines with their links: the sure ones, and all that are right."""

    source: str
    target: str
    sure: frozenset[tuple[int, int]]
    possible: frozenset[tuple[int, int]]


@dataclass(frozen=True)
class Agreement:
    precision: float
    recall: float
    f1: float
    aer: float


def read_pairs(path: Path) -> list[Pair]:
    pairs = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            _, source, target, links = line.split(" ||| ")
            found = [(int(i), kind, int(j)) for i, kind, j in re.findall(r"(\d+)([-?])(\d+)", links)]
            sure = frozenset((i, j) for i, kind, j in found if kind == "-")
            pairs.append(Pair(source, target, sure, frozenset((i, j) for i, _, j in found)))
    return pairs


def agreement(found: list[Links], pairs: list[Pair]) -> Agreement:
    """Precision counts links that are right, recall the sure ones that are found."""
    n_found = sum(map(len, found))
    n_sure = sum(len(pair.sure) for pair in pairs)
    right = sum(len(pair.possible.intersection(links)) for links, pair in zip(found, pairs, strict=True))
    sure = sum(len(pair.sure.intersection(links)) for links, pair in zip(found, pairs, strict=True))
    precision, recall = right / max(1, n_found), sure / n_sure
    f1 = 2 * precision * recall / max(1e-9, precision + recall)
    return Agreement(precision, recall, f1, 1.0 - (right + sure) / (n_found + n_sure))


def main() -> int:
    parser = argparse.ArgumentParser(description="Word links of a model beside those of a hand.")
    parser.add_argument("model")
    parser.add_argument("--pairs", type=Path, default=PAIRS)
    options = parser.parse_args()
    from transformer_jax.aligner import Aligner
    from transformer_jax.translator import Translator

    translator, pairs = Translator.from_pretrained(options.model), read_pairs(options.pairs)
    tokenizer, c = translator.tokenizer, translator.model.config
    ids = [(tokenizer.encode_source(pair.source), tokenizer.encode_target(pair.target)) for pair in pairs]
    sources = [words_of(tokenizer.source_pieces(pair.source)) for pair in pairs]
    targets = [words_of(tokenizer.target_pieces(pair.target)) for pair in pairs]

    def measure(maps: list[np.ndarray], step: Step) -> Agreement:
        weights = [word_weights(*three, step) for three in zip(maps, sources, targets, strict=True)]
        return agreement([link(*two) for two in zip(weights, sources, strict=True)], pairs)

    print(f"{len(pairs)} pairs, {sum(len(pair.sure) for pair in pairs)} sure links")
    print("| layer | step | precision | recall | F1 | AER | best head: F1 |")
    print("|---|---|---|---|---|---|---|")
    for layer in range(1, c.n_decoder_layers + 1):
        found = Aligner(translator, layer=layer).cross_attention(ids)
        for step in STEPS:
            mean = measure([cross_HTS.mean(axis=0) for cross_HTS in found], step)
            f1 = [measure([cross_HTS[head] for cross_HTS in found], step).f1 for head in range(c.n_heads)]
            shown = " | ".join(f"{100 * x:.1f}" for x in (mean.precision, mean.recall, mean.f1, mean.aer))
            print(f"| {layer} | {step} | {shown} | {int(np.argmax(f1)) + 1}: {100 * max(f1):.1f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
