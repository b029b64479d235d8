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
from transformer_jax.tokenizer import Tokenizer

if TYPE_CHECKING:
    from transformer_jax.translator import Translator


@dataclass(frozen=True)
class Backward:
    """What tells how likely a source is, given a translation of it."""

    translator: Translator | None = None
    """A model that translates the target's language back. None: the one that translates, which has learnt both."""
    tag: str | None = None
    """What its vocabulary wants before a line that becomes the source's language, such as '>>en<<'; '': nothing. None:
    the tag of the source language of the model that translates."""

    def resolve(self, forward: Translator) -> tuple[Translator, str]:
        """The model that translates back, and its tag; an error where they do not fit each other."""
        model = self.translator or forward
        language = getattr(forward.tokenizer, "source_lang", None)
        return model, _tag(self.tag, language, model.tokenizer, itself=self.translator is None)


def own_backward(language: str, tokenizer: Tokenizer) -> Backward:
    """Of a run that learns both directions: itself, under the tag of its source language."""
    return Backward(tag=_tag(f">>{language}<<", language, tokenizer, itself=True))


def _tag(given: str | None, language: str | None, tokenizer: Tokenizer, itself: bool) -> str:
    tags = language_tags(tokenizer)
    known = f"it has {' '.join(tags)}" if tags else "it has none"
    if given is not None:
        if given and given not in tags:
            raise UserError(f"The vocabulary of the way back has no tag {given!r}; {known}. Name one of its own.")
        return given
    if language is not None and f">>{language}<<" in tags:
        return f">>{language}<<"
    if not itself and not tags:
        return ""
    if not tags:
        raise UserError(
            "This model does not translate back, as its vocabulary has no tags; name a model of the other direction "
            "(backward) to rank by, or do without rerank_weight."
        )
    raise UserError(
        f"Which tag asks for the way back is not known: the source language is {language or 'not known'}, and of the "
        f"vocabulary's tags {known}. Name one as backward_tag, or '' for none."
    )


def language_tags(tokenizer: Tokenizer) -> Sequence[str]:
    return getattr(tokenizer, "language_tags", ())


def rerank(
    sources: Sequence[str],
    found: Sequence[tuple[Hypothesis, ...]],
    tags: Sequence[str],
    backward: tuple[Translator, str],
    config: DecodeConfig,
) -> list[tuple[Hypothesis, ...]]:
    """Each source's hypotheses, best first by both directions; those of equal score as they came.

    To a hypothesis's score comes `rerank_weight` times that of its source given its text: log p(x|y) by the same length
    rule, over the source's own length. `tags` are the forward model's; one at the start of a source is no part of x,
    and where it is the backward one, as in `>>en<< Ein Hund` of a model of both directions, the way back has none.
    """
    model, back_tag = backward
    questions = [_questions(source, best, tags, back_tag) for source, best in zip(sources, found, strict=True)]
    pairs = list(dict.fromkeys(pair for of_line in questions for pair in of_line))
    source_scores = dict(zip(pairs, _source_scores(pairs, model, config.batch_tokens), strict=True))
    options = SearchOptions(end_id=0, length_rule=config.length_rule, length_penalty=config.length_penalty)
    divisors = length_divisors(options, model.model.config.max_length)

    def with_source(h: Hypothesis, of_source: Score) -> Hypothesis:
        length = len(of_source.token_log_probs)
        score = (of_source.log_prob - config.word_penalty * length) / float(divisors[length])
        return dataclasses.replace(h, score=h.score + config.rerank_weight * score, source_log_prob=of_source.log_prob)

    def ranked(hypotheses: Sequence[Hypothesis], questions: Sequence[tuple[str, str]]) -> tuple[Hypothesis, ...]:
        both = [with_source(h, source_scores[pair]) for h, pair in zip(hypotheses, questions, strict=True)]
        return tuple(sorted(both, key=lambda h: -h.score))

    return [ranked(*of_line) for of_line in zip(found, questions, strict=True)]


def _questions(
    source: str, hypotheses: Sequence[Hypothesis], tags: Sequence[str], back_tag: str
) -> list[tuple[str, str]]:
    """For each hypothesis, the line that is translated back, and what it should become."""
    tag, body = split_tag(source, tags)
    before = "" if tag == back_tag else back_tag
    return [(tagged_line(before, h.text), body.strip()) for h in hypotheses]


def tagged_line(tag: str, text: str) -> str:
    """A line that is translated to the tag's language; '' is no tag. Text that looks like a tag is none: after a space
    it is not read as one."""
    return f"{tag} " * bool(tag) + (f" {text}" if text.startswith(">>") else text)


def _source_scores(pairs: Sequence[tuple[str, str]], model: Translator, batch_tokens: int) -> list[Score]:
    """How likely each source is given that text. What is beyond the model's limit does not count, on either side."""
    limit, end_id = model.model.config.max_length, model.tokenizer.end_id
    texts = model.tokenizer.encode_source_batch([text for text, _ in pairs])
    originals = model.tokenizer.encode_target_batch([original for _, original in pairs])
    texts = [ids if len(ids) <= limit else [*ids[: limit - 1], end_id] for ids in texts]
    return model.score_tokens(
        [(text, original[:limit]) for text, original in zip(texts, originals, strict=True)], batch_tokens
    )
