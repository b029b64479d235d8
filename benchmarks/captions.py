"""Writes captions of one language the way the training text is written, for back-translation and self-training.

    python benchmarks/captions.py captions.de.gz --like train.de.gz --output captions.de

Volunteers wrote the captions, many without capitals or full stops: to a model of the training text, `ein hund` is not
`Ein Hund`. A word that the training text does not have in its form, and any word of a line without capitals, takes the
form that it has most often there (inside a sentence, where capitals mean something); the first word a capital; the line
a full stop where it ends in none. Captions that come again, stand in the training text, or have fewer than three words
are left out.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from transformer_jax.cli import run_command
from transformer_jax.corpus import read_lines
from transformer_jax.files import write_whole

WORD = re.compile(r"\w+")


def forms_of_words(lines: Iterable[str]) -> dict[str, list[str]]:
    """From each word in small letters to its forms, the usual one first; the first word of a line does not count."""
    seen: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for line in lines:
        for word in WORD.findall(line)[1:]:
            seen[word.lower()][word] += 1
    return {small: [form for form, _ in forms.most_common()] for small, forms in seen.items()}


def as_usual(line: str, forms: dict[str, list[str]]) -> str:
    line = " ".join(line.split())
    without_capitals = line[1:].islower()

    def form(match: re.Match[str]) -> str:
        word = match[0]
        known = forms.get(word.lower(), [word])
        return word if word in known and not without_capitals else known[0]

    line = WORD.sub(form, line)
    line = line[:1].upper() + line[1:]
    return line if line.endswith((".", "!", "?", '"')) else line.rstrip(" ,;:") + "."


def written_as(captions: Iterable[str], training: list[str]) -> Iterator[str]:
    forms, seen = forms_of_words(training), set(training)
    for caption in captions:
        line = as_usual(caption, forms)
        if line not in seen and len(WORD.findall(line)) >= 3:
            seen.add(line)
            yield line


def main() -> int:
    parser = argparse.ArgumentParser(description="Write captions the way a training text is written.")
    parser.add_argument("captions", type=Path)
    parser.add_argument("--like", type=Path, required=True, help="the training text of the same language")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    captions, training = (read_lines(path, "replace") for path in (options.captions, options.like))
    kept = list(written_as(captions, training))
    write_whole(options.output, "".join(line + "\n" for line in kept))
    print(f"{len(captions):,} captions, {len(kept):,} kept")
    return 0


if __name__ == "__main__":
    raise SystemExit(run_command(main))
