"""What a line becomes: the hypotheses of a search, with their scores, joined where it was translated in parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

CONTINUED = "\N{SPACE}"
"""What joins the translations of a line's parts."""


@dataclass(frozen=True)
class Hypothesis:
    """One output for a line."""

    text: str
    score: float
    """By the length rule of the search, with what `rerank_weight` adds: what hypotheses are ranked by."""
    log_prob: float
    """Log-probability under the model, natural logarithm."""
    tokens: tuple[int, ...]
    """Token ids, with the end token where the model gave one."""
    token_scores: tuple[float, ...]
    """Log-probability of each token."""
    source_log_prob: float | None = None
    """Log-probability of the source given this text, by the other direction, where `rerank_weight` asks for it."""


@dataclass(frozen=True)
class Translation(Hypothesis):
    """What one line became: the best hypothesis, with the others."""

    n_best: tuple[Hypothesis, ...] = ()
    """All that were asked for, best first; a line has fewer where the search found fewer."""


@dataclass(frozen=True)
class Score:
    """How likely a given translation is."""

    log_prob: float
    token_log_probs: tuple[float, ...]
    """Of each target token, the end token last; natural logarithm."""


EMPTY = Hypothesis("", 0.0, 0.0, (), ())


def translation_of(parts: Sequence[tuple[Hypothesis, ...]], blank: Hypothesis = EMPTY) -> Translation:
    """A line's translation from those of its parts: the n-th best is made of the n-th best of each. `blank` is that of
    a line without any."""
    if not parts:
        return _with_others((blank,))
    if len(parts) == 1:
        return _with_others(parts[0])
    ranks = range(max(map(len, parts)))
    return _with_others(tuple(_joined([part[min(n, len(part) - 1)] for part in parts if part]) for n in ranks))


def _with_others(hypotheses: tuple[Hypothesis, ...]) -> Translation:
    best = hypotheses[0] if hypotheses else EMPTY
    fields = {f.name: getattr(best, f.name) for f in dataclasses.fields(Hypothesis)}
    return Translation(**fields, n_best=hypotheses)


def _joined(parts: Sequence[Hypothesis]) -> Hypothesis:
    of_source = [part.source_log_prob for part in parts if part.source_log_prob is not None]
    return Hypothesis(
        text=CONTINUED.join(part.text for part in parts if part.text),
        score=sum(part.score for part in parts),
        log_prob=sum(part.log_prob for part in parts),
        tokens=tuple(token for part in parts for token in part.tokens),
        token_scores=tuple(score for part in parts for score in part.token_scores),
        source_log_prob=sum(of_source) if of_source else None,
    )
