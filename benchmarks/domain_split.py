"""Splits Multi30k into two domains: captions with dogs, and all others, for the fine-tuning demonstration.

    python benchmarks/domain_split.py DIR OUTPUT

DIR holds train, val and test_2016_flickr as .en and .de, plain or .gz. OUTPUT gets general/ and dogs/ with the same
names. There are few dogs in val and test_2016_flickr: of all pairs with dogs, the last 300 are dogs/test_2016_flickr,
and the 200 before them dogs/val. None of them is in general/.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from transformer_jax.cli import run_command
from transformer_jax.corpus import read_parallel, split_files

DOGS = re.compile(r"\b(dog|dogs|puppy|puppies)\b", re.IGNORECASE)
Pair = tuple[str, str]
SPLITS = ("train", "val", "test_2016_flickr")


def main() -> int:
    parser = argparse.ArgumentParser(description="Split Multi30k into captions with dogs and all others.")
    parser.add_argument("dir", type=Path)
    parser.add_argument("output", type=Path)
    options = parser.parse_args()
    dogs: list[Pair] = []
    for split in SPLITS:
        text = read_parallel(*split_files(options.dir, split, "en", "de"))
        pairs = list(zip(text.source, text.target, strict=True))
        dogs += [pair for pair in pairs if DOGS.search(pair[0])]
        write(options.output / "general", split, [pair for pair in pairs if not DOGS.search(pair[0])])
    for split, part in zip(SPLITS, (dogs[:-500], dogs[-500:-300], dogs[-300:]), strict=True):
        write(options.output / "dogs", split, part)
    return 0


def write(folder: Path, split: str, pairs: list[Pair]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for side, language in enumerate(("en", "de")):
        lines = "".join(pair[side] + "\n" for pair in pairs)
        (folder / f"{split}.{language}").write_text(lines, encoding="utf-8")
    print(f"{folder.name:<8} {split:<17} {len(pairs):>6,} pairs")


if __name__ == "__main__":
    raise SystemExit(run_command(main))
