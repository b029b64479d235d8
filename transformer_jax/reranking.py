"""Ranks the hypotheses of a search also by how well each tells its source: log p(y|x) + λ log p(x|y).

Li and Jurafsky (arXiv 1601.00372), maximum mutual information; without a language model the noisy channel of Yee et al.
(arXiv 1908.05731). p(x|y) is of a model of the other direction, or of the same model where it has learnt both
(`data.reversed_weight`). What the search never found is not found here: a wider beam offers more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from transformer_jax.config import DecodeConfig
from transformer_jax.errors import UserError
from transformer_jax.hypotheses import Hypothesis, Score
from transformer_jax.long_lines import split_tag
from transformer_jax.search_rules import SearchOptions, length_divisors

if TYPE_CHECKING:
    from transformer_jax.translator import Translator


@dataclass(frozen=True)
class Backward:
    """What tells how likely a source is, given a translation of it."""

    translator: Translator
    """A model that translates the target's language back."""
    tag: str = ""
    """What stands before a line to have it translated to the source's language, such as '>>en<<'; '' for nothing."""


def own_backward(translator: Translator) -> Backward:
    """The model itself, where it has learnt both directions."""
    language, tags = (getattr(translator.tokenizer, name, None) for name in ("source_lang", "language_tags"))
    tag = f">>{language}<<"
    if language is None or tag not in (tags or ()):
        raise UserError(
            f"This model does not translate back: its vocabulary has no tag {tag if language else 'of its source'}. To "
            "rank by it (rerank_weight), name a model of the other direction, or the tag that asks this one for it."
        )
    return Backward(translator, tag)


def rerank(
    sources: Sequence[str],
    found: Sequence[tuple[Hypothesis, ...]],
    tags: Sequence[str],
    backward: Backward,
    config: DecodeConfig,
) -> list[tuple[Hypothesis, ...]]:
    """Each source's hypotheses, best first by both directions; those of equal score as they came.

    To a hypothesis's score comes `rerank_weight` times that of its source given its text: log p(x|y) by the same length
    rule, over the source's own length. `tags` are the forward model's; one at the start of a source is no part of x,
    and where it is the backward one, as in `>>en<< Ein Hund` of a model of both directions, the way back has none.
    """
    questions = [_questions(source, best, tags, backward.tag) for source, best in zip(sources, found, strict=True)]
    source_scores = _source_scores(list(dict.fromkeys(pair for of_line in questions for pair in of_line)), backward)
    options = SearchOptions(end_id=0, length_rule=config.length_rule, length_penalty=config.length_penalty)
    divisors = length_divisors(options, backward.translator.model.config.max_length)

    def with_source(h: Hypothesis, of_source: Score) -> Hypothesis:
        added = config.rerank_weight * of_source.log_prob / float(divisors[len(of_source.token_log_probs)])
        return dataclasses.replace(h, score=h.score + added, source_log_prob=of_source.log_prob)

    return [
        tuple(
            sorted(
                (with_source(h, source_scores[pair]) for h, pair in zip(hypotheses, pairs, strict=True)),
                key=lambda h: -h.score,
            )
        )
        for hypotheses, pairs in zip(found, questions, strict=True)
    ]


def _questions(
    source: str, hypotheses: Sequence[Hypothesis], tags: Sequence[str], back_tag: str
) -> list[tuple[str, str]]:
    """For each hypothesis, the line that is translated back, and what it should become."""
    tag, body = split_tag(source, tags)
    before = f"{back_tag} " if tag != back_tag else ""

    def line(text: str) -> str:
        # Text that looks like a tag is none: after a space it is not read as one.
        return before + (f" {text}" if text.startswith(">>") else text)

    return [(line(h.text), body.strip()) for h in hypotheses]


def _source_scores(pairs: Sequence[tuple[str, str]], backward: Backward) -> dict[tuple[str, str], Score]:
    """How likely each source is given that text. What is beyond the model's limit does not count, on either side."""
    model = backward.translator
    limit = model.model.config.max_length
    texts = model.tokenizer.encode_source_batch([text for text, _ in pairs])
    originals = model.tokenizer.encode_target_batch([original for _, original in pairs])
    scores = model.score_tokens([(text[:limit], ids[:limit]) for text, ids in zip(texts, originals, strict=True)])
    return dict(zip(pairs, scores, strict=True))
