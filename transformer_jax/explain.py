"""A translation with everything that the model looked at on the way: tokens, probabilities, attention, word links."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from transformer_jax.alignment import WORD_BEGINS, Links, Step, Word, divides_otherwise, link, word_weights, words_of
from transformer_jax.attention_maps import AttentionMaps, attention_maps
from transformer_jax.errors import UserError
from transformer_jax.tokenizer import END, START, CharacterTokenizer, Tokenizer
from transformer_jax.translator import Translator

log = logging.getLogger("transformer_jax")

Kind = Literal["encoder", "decoder", "cross"]
KINDS: tuple[Kind, ...] = ("encoder", "decoder", "cross")
SPACE = "␣"  # U+2423, how a label shows a space
Units = Literal["words", "tokens"]


@dataclass(frozen=True)
class Explanation:
    """One sentence, its translation, and the attention of every layer and head. Layers and heads count from 1."""

    source: str
    target: str
    given: bool
    """Whether the target was given; else it is the model's own translation."""
    source_tokens: tuple[str, ...]
    """S labels, the end token last. A sub-word that begins a word begins with ▁; a space character reads ␣."""
    target_tokens: tuple[str, ...]
    """T labels of what the decoder writes, the end token last (unless the translation was cut)."""
    token_log_probs: tuple[float, ...]
    """Of each target token, natural logarithm."""
    maps: AttentionMaps
    source_words: tuple[Word, ...]
    target_words: tuple[Word, ...]

    @property
    def read_tokens(self) -> tuple[str, ...]:
        """T labels of what the decoder reads, step by step: the start token, then what was written before."""
        return (START, *self.target_tokens[:-1])

    def weights(self, kind: Kind) -> np.ndarray:
        """(N, H, rows, columns) of one kind of attention."""
        maps = {"encoder": self.maps.encoder_NHSS, "decoder": self.maps.decoder_NHTT, "cross": self.maps.cross_NHTS}
        return maps[kind]

    def labels(self, kind: Kind) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Of the rows (who looks) and of the columns (at whom). A row of the decoder has the token that it writes."""
        rows = self.source_tokens if kind == "encoder" else self.target_tokens
        return rows, self.read_tokens if kind == "decoder" else self.source_tokens

    def word_weights(self, layer: int | None = None, head: int | None = None, step: Step = "writes") -> np.ndarray:
        """(target words, source words): cross-attention of a layer (the last), of a head or their mean."""
        cross_TS = select(self.maps.cross_NHTS, layer, head)
        return word_weights(cross_TS, self.source_words, self.target_words, step)

    def links(self, layer: int | None = None, head: int | None = None, step: Step = "writes") -> Links:
        """The source word of each target word, by the rules of `alignment`."""
        return link(self.word_weights(layer, head, step), self.source_words)


def check_choice(n_layers: int, n_heads: int, layer: int | None, head: int | None, what: str = "The model") -> None:
    """Layers and heads are counted from 1."""
    for name, number, count in (("layer", layer, n_layers), ("head", head, n_heads)):
        if number is not None and not 1 <= number <= count:
            raise UserError(f"{what} has no {name} {number}; its {name}s are 1 to {count}.")


def select(weights_NHTS: np.ndarray, layer: int | None, head: int | None) -> np.ndarray:
    """(T, S) of a layer (the last one), averaged over its heads or of one head."""
    n_layers, n_heads = weights_NHTS.shape[:2]
    check_choice(n_layers, n_heads, layer, head, "The decoder")
    of_layer_HTS = weights_NHTS[(layer or n_layers) - 1]
    return of_layer_HTS.mean(axis=0) if head is None else of_layer_HTS[head - 1]


def split_by_space(tokenizer: Tokenizer, units: Units | None) -> bool:
    """Whether words are what spaces separate. Left open, they are, but in a model of characters each is a word."""
    return not isinstance(tokenizer, CharacterTokenizer) if units is None else units == "words"


def explain(
    translator: Translator, source: str, target: str | None = None, *, units: Units | None = None, **changes: Any
) -> Explanation:
    """Translates a sentence, or takes the target given, and looks at the attention.

    `units`: what is linked, words or single tokens. `changes` are fields of DecodeConfig, as for `translate`.
    """
    tokenizer = translator.tokenizer
    source_ids = _encode(translator, "source", source)
    if target is None:
        found = translator.translate([source], **changes)[0]
        if not found.tokens:
            raise UserError("The search found no translation; allow a longer one, or give one with --target.")
        target_ids, log_probs, text = list(found.tokens), found.token_scores, found.text
        target_pieces = tokenizer.pieces_of(target_ids)
    else:
        target_ids, text = _encode(translator, "target", target), target
        log_probs = translator.score_tokens([(source_ids, target_ids)])[0].token_log_probs
        target_pieces = tokenizer.target_pieces(target)
    source_pieces = tokenizer.source_pieces(source)
    if target_pieces[-1] != END:
        log.warning("The translation was cut after %d tokens, before its end.", len(target_pieces))
    by_space = split_by_space(tokenizer, units)
    source_words = tuple(words_of(source_pieces, by_space=by_space))
    target_words = tuple(words_of(target_pieces, by_space=by_space))
    if by_space and (divides_otherwise(source_words, source) or divides_otherwise(target_words, text)):
        log.warning("The tokenizer divides the text into other words than its spaces do.")
    return Explanation(
        source=source,
        target=text,
        given=target is not None,
        source_tokens=labels(source_pieces),
        target_tokens=labels(target_pieces),
        token_log_probs=tuple(log_probs),
        maps=attention_maps(translator.model, translator.params, source_ids, target_ids),
        source_words=source_words,
        target_words=target_words,
    )


def _encode(translator: Translator, side: Literal["source", "target"], text: str) -> list[int]:
    """Ids of a sentence that the model can take whole."""
    tokenizer, limit = translator.tokenizer, translator.model.config.max_length
    if not text.strip():
        raise UserError(f"The {side} is empty; there is nothing to look at.")
    if isinstance(tokenizer, CharacterTokenizer) and (unknown := tokenizer.unknown_characters(text)):
        shown = " ".join(repr(c)[1:-1] for c in sorted(unknown))
        log.warning("Characters that the model does not know are left out: %s", shown)
    ids = tokenizer.encode_source(text) if side == "source" else tokenizer.encode_target(text)
    if len(ids) < 2:
        raise UserError(f"The {side} has nothing that the model knows; there is nothing to look at.")
    if len(ids) > limit:
        raise UserError(f"The {side} has {len(ids)} tokens, but the model takes {limit} at most; give a shorter one.")
    return ids


def labels(pieces: Sequence[str]) -> tuple[str, ...]:
    """Pieces as a picture shows them: spaces and line breaks can be seen."""
    return tuple("".join(SPACE if c.isspace() else c for c in piece) or WORD_BEGINS for piece in pieces)
