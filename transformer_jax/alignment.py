"""Which word became which: links between words, read off the attention to the source.

Attention is between tokens and comes step by step; links are between words. Three rules lead from one to the other:

- A word is what spaces separate. What it gives is the sum over its sub-words, what it takes their mean.
- Each target word is linked to the source word with the largest weight, and to none where the end token, or a language
  tag, has more.
- The row of a target token is that of the step that writes it. The step that reads it, one later, is the other choice
  ("shift-att" of Chen et al. 2020, "Accurate Word Alignment Induction from Neural Machine Translation"): it knows which
  token it was. Which is better depends on layer and model; docs/explain.md has what was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from transformer_jax.tokenizer import END, is_language_tag

Step = Literal["writes", "reads"]
"""Which step's attention is that of a target token."""
Links = list[tuple[int, int]]
"""(source word, target word), both counted from 0."""
WORD_BEGINS = "▁"  # U+2581, SentencePiece's visible space


@dataclass(frozen=True)
class Word:
    """Neighbouring tokens, from number `first` up to and without `end`."""

    text: str
    first: int
    end: int


def words_of(pieces: list[str], *, by_space: bool = True) -> list[Word]:
    """The words of a sentence in pieces; its end token is none. A language tag is a word of its own.

    A space belongs to the word that it begins, be it a sub-word's mark or a character of its own; at the end of the
    sentence, to the last word. Without `by_space` every token is a word: for characters, and for text that is written
    without spaces.
    """
    words: list[Word] = []
    after_tag = False
    for n, piece in enumerate(pieces[:-1] if pieces[-1:] == [END] else pieces):
        text = _without_space(piece) if by_space else piece
        tag = is_language_tag(piece)
        goes_on = by_space and words and not tag and not after_tag
        if goes_on and (words[-1].text == "" or text == piece):
            before = words.pop()
            words.append(Word(before.text + text, before.first, n + 1))
        else:
            words.append(Word(text, n, n + 1))
        after_tag = tag
    if len(words) > 1 and words[-1].text == "":
        space, last = words.pop(), words.pop()
        words.append(Word(last.text, last.first, space.end))
    return words


def _without_space(piece: str) -> str:
    """A piece without the space that it begins with."""
    return piece.lstrip().removeprefix(WORD_BEGINS)


def divides_otherwise(words: Sequence[Word], text: str) -> bool:
    """Whether the pieces make other words than the spaces of the text do, so that the numbers of links differ."""
    return len(words) != len(text.split())


def rows_of_tokens(cross_TS: np.ndarray, step: Step) -> np.ndarray:
    """Row t: the attention that counts as target token t's. The last token is read by no step: it keeps its own."""
    if step == "writes":
        return cross_TS
    return np.concatenate([cross_TS[1:], cross_TS[-1:]])


def word_weights(
    cross_TS: np.ndarray, source: Sequence[Word], target: Sequence[Word], step: Step = "writes"
) -> np.ndarray:
    """(target words, source words): the sum over a source word's tokens, the mean over a target word's."""
    rows_TS = rows_of_tokens(cross_TS, step)
    columns = [rows_TS[:, word.first : word.end].sum(axis=1) for word in source]
    by_word = np.stack(columns, axis=1) if source else np.zeros((len(rows_TS), 0))
    rows = [by_word[word.first : word.end].mean(axis=0) for word in target]
    return np.stack(rows) if target else np.zeros((0, len(source)))


def link(weights: np.ndarray, source: Sequence[Word]) -> Links:
    """The links of `word_weights`. What a row lacks of 1 is the end token's."""
    links = []
    for j, row in enumerate(weights):
        i = int(row.argmax()) if len(row) else None
        if i is not None and row[i] > 1.0 - row.sum() and not is_tag(source[i]):
            links.append((i, j))
    return sorted(links)


def is_tag(word: Word) -> bool:
    """Whether a source word is a language tag, which is one token."""
    return word.end - word.first == 1 and is_language_tag(word.text)


def pharaoh(links: Links) -> str:
    """`0-0 1-2`: source word - target word, as alignment tools write and read it."""
    return " ".join(f"{i}-{j}" for i, j in links)
