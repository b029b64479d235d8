"""Lines that are longer than the model: split at sentence ends and joined again, or cut."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

_TAG = re.compile(r">>\S*?<<")

Measure = Callable[[str], int]
"""How many tokens a text has, with the end token."""


def split_line(line: str, limit: int, measure: Measure, language: str | None, tags: Sequence[str] = ()) -> list[str]:
    """Parts of at most `limit` tokens each, as few as sentence ends allow; a sentence that alone is longer is divided
    between words, and a word between letters. A language tag of the model's goes with each part."""
    if measure(line) <= limit:
        return [line]
    from sentencex import segment  # pyright: ignore[reportAttributeAccessIssue] - a compiled module

    tag, body = split_tag(line, tags)
    tag = f"{tag} " if tag else ""

    def length(text: str) -> int:
        return measure(tag + text)

    sentences = [s.strip() for s in segment((language or "en")[:2].lower(), body) if s.strip()]
    pieces = [piece for sentence in sentences for piece in _within(sentence, limit, length)]
    return [tag + part for part in _fill(pieces, limit, length)]


def split_tag(line: str, tags: Sequence[str]) -> tuple[str, str]:
    """The language tag at the start of a line, '' where there is none of these, and the rest."""
    match = _TAG.match(line)
    return (match.group(), line[match.end() :]) if match and match.group() in tags else ("", line)


def _within(text: str, limit: int, length: Measure) -> list[str]:
    """The text in pieces that fit: whole, or by words, or by letters."""
    if length(text) <= limit:
        return [text]
    words = text.split()
    if len(words) > 1:
        halves = (" ".join(words[: len(words) // 2]), " ".join(words[len(words) // 2 :]))
    elif len(text) > 1:
        halves = (text[: len(text) // 2], text[len(text) // 2 :])
    else:
        return [text]
    return [piece for half in halves for piece in _within(half, limit, length)]


def _fill(pieces: Sequence[str], limit: int, length: Measure) -> list[str]:
    """Neighbours put together again while they fit."""
    parts: list[str] = []
    for piece in pieces:
        if parts and length(f"{parts[-1]} {piece}") <= limit:
            parts[-1] = f"{parts[-1]} {piece}"
        else:
            parts.append(piece)
    return parts
