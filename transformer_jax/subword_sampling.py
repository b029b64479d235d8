"""Sub-words cut by chance, as a regularisation: BPE-dropout (Provilkov et al. 2020), unigram sampling (Kudo 2018).

SentencePiece has both, but its random numbers differ from process to process whatever the seed; a run must repeat.
Words are cut one by one: a SentencePiece vocabulary of either kind has no piece that reaches over a space.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from transformer_jax.errors import UserError

SPACE_MARK = "▁"  # U+2581


class Drawing(NamedTuple):
    """How text is cut by chance.

    With a BPE vocabulary, `strength` is the probability that a merge is left out; with a unigram one, the exponent
    alpha of the probabilities that a cut is drawn by.
    """

    strength: float
    seed: int


def drawn_pieces(processor: Any, texts: Sequence[str], drawing: Drawing) -> list[list[str]]:
    """The pieces of each text, which follow from the texts, the vocabulary and the drawing alone."""
    scores = piece_scores(processor)
    cut = bpe_dropout if scores_are_ranks(scores) else sample_unigram
    rng = random.Random(drawing.seed)
    return [
        join_unknown(
            [p for word in words_of(processor, text) for p in cut(word, scores, drawing.strength, rng)], scores
        )
        for text in texts
    ]


def check_drawing(processor: Any, texts: Sequence[str]) -> None:
    """Refuses a vocabulary that cuts text in a way that is not known here: with nothing left to chance, the pieces must
    be SentencePiece's own. Such are those whose pieces reach over spaces or end with them, and those of bytes."""
    strength = 0.0 if scores_are_ranks(piece_scores(processor)) else 1e4
    if drawn_pieces(processor, texts, Drawing(strength, 0)) != processor.encode(list(texts), out_type=str):
        raise UserError(
            "subword_sampling does not go with this vocabulary, whose pieces are not those of words; set it to 0."
        )


def piece_scores(processor: Any) -> dict[str, float]:
    """The scores of the pieces that text is made of."""
    size = range(len(processor))
    if any(processor.is_byte(i) for i in size):
        raise UserError("subword_sampling does not go with a vocabulary of bytes; set it to 0.")
    return {
        processor.id_to_piece(i): processor.get_score(i)
        for i in size
        if not (processor.is_control(i) or processor.is_unknown(i) or processor.is_unused(i))
    }


def scores_are_ranks(scores: Mapping[str, float]) -> bool:
    """Whether they are of BPE, which scores a piece by the number of its merge; those of unigram are logarithms."""
    return all(score == int(score) for score in scores.values())


def words_of(processor: Any, text: str) -> list[str]:
    """The words as SentencePiece cuts them, each with its space mark."""
    first, *others = processor.normalize(text).split(SPACE_MARK)
    return ([first] if first else []) + [SPACE_MARK + word for word in others]


def bpe_dropout(word: str, scores: Mapping[str, float], probability: float, rng: random.Random) -> list[str]:
    """Merges letters into pieces as BPE does, the earliest learned first; at every step each possible merge is left out
    with this probability, and where none is left the word stays as it is."""
    pieces = list(word)
    while len(pieces) > 1:
        best, place = -math.inf, -1
        for i in range(len(pieces) - 1):
            score = scores.get(pieces[i] + pieces[i + 1])
            if score is not None and score > best and rng.random() >= probability:
                best, place = score, i
        if place < 0:
            break
        pieces[place : place + 2] = [pieces[place] + pieces[place + 1]]
    return pieces


def sample_unigram(word: str, scores: Mapping[str, float], alpha: float, rng: random.Random) -> list[str]:
    """Draws a cut of the word with probability proportional to the product of its pieces' probabilities to the power
    alpha: sums over all cuts from the left, then a draw from the right."""
    unknown = min(scores.values()) - 10.0  # SentencePiece's score of a letter that no piece has
    total = [0.0] + [-math.inf] * len(word)  # total[j]: log of the sum over all cuts of word[:j]
    ways: list[list[tuple[int, float]]] = [[] for _ in total]
    for j in range(1, len(word) + 1):
        for i in range(j):
            score = scores.get(word[i:j], unknown if j - i == 1 else None)
            if score is not None:
                ways[j].append((i, total[i] + alpha * score))
        highest = max(weight for _, weight in ways[j])
        total[j] = highest + math.log(sum(math.exp(weight - highest) for _, weight in ways[j]))
    pieces, end = [], len(word)
    while end:
        weights = [math.exp(weight - total[end]) for _, weight in ways[end]]
        (start,) = rng.choices([i for i, _ in ways[end]], weights)
        pieces.append(word[start:end])
        end = start
    return pieces[::-1]


def join_unknown(pieces: Sequence[str], scores: Mapping[str, float]) -> list[str]:
    """Letters side by side that no piece has are one unknown piece, as in SentencePiece."""
    joined: list[str] = []
    after_unknown = False
    for piece in pieces:
        unknown = piece not in scores
        if unknown and after_unknown:
            joined[-1] += piece
        else:
            joined.append(piece)
        after_unknown = unknown
    return joined
