"""How fast text becomes tokens on disk, and how much memory that takes: synthetic parallel text of any size.

    python benchmarks/corpus.py --lines 2000000 --processes 2

Lines are made of words of a Zipf distribution, with the lengths of news text (25 words in the mean). A SentencePiece
vocabulary is trained on a sample of them; then the text is cleaned (duplicates, length ratio, held-out lines) and
tokenised into a cache, which is opened again and read at random. Peak memory is that of this process and of the
largest of those it starts, as the kernel counts it. On a machine that is busy with other work the processor's seconds
say more than those of the clock.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import time
from pathlib import Path

import numpy as np

from transformer_jax.cleaning import LineRules
from transformer_jax.corpus import ParallelText
from transformer_jax.pair_sources import WeightedSource, open_files
from transformer_jax.sentencepiece_training import train_sentencepiece
from transformer_jax.token_blocks import TokenRules
from transformer_jax.tokenizer import load_tokenizer
from transformer_jax.training_text import Indexer, TrainingText

LETTERS = np.array(list("etaonirshdlucmfwypvbgkjqxz"))


def make_words(n_words: int, rng: np.random.Generator) -> np.ndarray:
    lengths = rng.integers(2, 11, n_words)
    return np.array(["".join(rng.choice(LETTERS, length)) for length in lengths], dtype=object)


def write_text(path: Path, n_lines: int, seed: int) -> None:
    """Lines of words drawn by rank: word k with a probability like 1 / k."""
    rng = np.random.default_rng(seed)
    words = make_words(50_000, np.random.default_rng(0))
    chances = 1.0 / np.arange(1, len(words) + 1)
    bounds = np.cumsum(chances / chances.sum())
    with path.open("w", encoding="utf-8") as file:
        for first in range(0, n_lines, 10_000):
            lengths = np.clip(rng.lognormal(3.05, 0.6, min(10_000, n_lines - first)), 1, 150).astype(int)
            drawn = words[np.searchsorted(bounds, rng.random(lengths.sum()) * bounds[-1])]
            ends = np.cumsum(lengths)
            for start, end in zip(ends - lengths, ends, strict=True):
                file.write(" ".join(drawn[start:end]) + ".\n")


def peak_mib() -> tuple[float, float]:
    """Of this process, and of the largest of its children."""
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    self_kib, child_kib = (resource.getrusage(kind).ru_maxrss for kind in kinds)
    return self_kib / 1024, child_kib / 1024


def cpu_seconds() -> float:
    """Of this process and of those that it started and that have ended."""
    times = [resource.getrusage(kind) for kind in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(time.ru_utime + time.ru_stime for time in times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=2_000_000, help="pairs of lines")
    parser.add_argument("--processes", type=int, default=None, help="that tokenise; one per processor if left out")
    parser.add_argument("--folder", type=Path, default=Path("runs/corpus_benchmark"), help="for text and cache")
    parser.add_argument("--clean", action="store_true", help="with all cleaning rules; else with the defaults")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    paths = [options.folder / f"train{options.lines}.{side}" for side in ("source", "target")]
    for seed, path in enumerate(paths):
        if not path.is_file():
            write_text(path, options.lines, seed)
    result: dict[str, object] = {"lines": options.lines, "text_mb": sum(p.stat().st_size for p in paths) / 1e6}

    began = time.monotonic()
    source = open_files(*paths)
    result["scan_seconds"] = time.monotonic() - began
    held_out = ParallelText([], [])
    for index, (source_line, target_line) in enumerate(source):
        if index == 3000:
            break
        held_out.source.append(source_line)
        held_out.target.append(target_line)
    rules = LineRules(True, True, "drop_lines") if options.clean else LineRules()
    text = TrainingText((WeightedSource(source),), rules, {"test": held_out})

    tokenizer_folder = options.folder / "tokenizer"
    if not tokenizer_folder.is_dir():
        began = time.monotonic()
        train_sentencepiece(text.sample(200_000), 16_000).save(tokenizer_folder)
        result["vocabulary_seconds"] = time.monotonic() - began
    tokenizer = load_tokenizer(tokenizer_folder)
    result["mib_before"] = peak_mib()
    token_rules = TokenRules(256, max_length_ratio=9.0 if options.clean else None)
    indexer = Indexer(text, tokenizer, token_rules, tokenizer.start_id, options.processes)
    cache = options.folder / "tokens" / indexer.key(tokenizer_folder)
    shutil.rmtree(cache, ignore_errors=True)
    began, cpu_began = time.monotonic(), cpu_seconds()
    indexer.build(cache, tokenizer_folder)
    seconds, cpu = time.monotonic() - began, cpu_seconds() - cpu_began
    peak, child_peak = peak_mib()
    began = time.monotonic()
    pairs, report = indexer.read(cache)
    fingerprint = pairs.fingerprint()
    result |= {
        "index_seconds": seconds,
        "index_cpu_seconds": cpu,
        "pairs_per_second": options.lines / seconds,
        "pairs_per_cpu_second": options.lines / cpu,
        "peak_mib_main": peak,
        "peak_mib_worker": child_peak,
        "open_seconds": time.monotonic() - began,
        "cache_mb": sum(p.stat().st_size for p in cache.iterdir()) / 1e6,
        "fingerprint": fingerprint,
        "report": report,
    }
    chosen = np.random.default_rng(0).integers(len(pairs), size=100_000)
    began = time.monotonic()
    tokens = sum(len(pairs.source[i]) + len(pairs.target[i]) for i in chosen)
    result["tokens_read_per_second"] = tokens / (time.monotonic() - began)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
