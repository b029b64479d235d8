"""Word links of many sentence pairs: their cross-attention in batches, of one layer."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from transformer_jax.alignment import Links, Step, divides_otherwise, link, word_weights, words_of
from transformer_jax.attention import ATTENTION_WEIGHTS
from transformer_jax.batching import length_sorted_batches
from transformer_jax.errors import UserError
from transformer_jax.explain import Units, check_choice, split_by_space
from transformer_jax.sharding import shard_rows, to_host
from transformer_jax.translator import LENGTHS, SCORED_SLOTS, Translator

log = logging.getLogger("transformer_jax")

TokenPair = tuple[Sequence[int], Sequence[int]]
"""Source and target ids, each with its end token."""


class Aligner:
    """Links the words of given translations.

    >>> aligner = Aligner(Translator.from_pretrained("runs/multi30k_tutorial"))
    >>> pharaoh(aligner.align(["A man sleeps."], ["Ein Mann schläft."])[0])
    '0-0 1-1 2-2'
    """

    def __init__(
        self,
        translator: Translator,
        *,
        layer: int | None = None,
        head: int | None = None,
        step: Step = "writes",
        units: Units | None = None,
    ) -> None:
        """`layer` and `head` count from 1; left out, they are the last layer and the mean over heads."""
        c = translator.model.config
        check_choice(c.n_decoder_layers, c.n_heads, layer, head, "The decoder")
        self.translator, self.head = translator, head
        self.step: Step = step
        self.slots = min(translator.config.batch_tokens, SCORED_SLOTS)
        self.by_space = split_by_space(translator.tokenizer, units)
        self._weights = _layer_weights(translator, layer or c.n_decoder_layers)

    def align(self, sources: Sequence[str], targets: Sequence[str], first_line: int = 1) -> list[Links]:
        """Links of each pair; none for a pair with an empty side, or with one that is too long for the model."""
        if len(sources) != len(targets):
            raise UserError(f"There are {len(sources)} sources but {len(targets)} targets; they must be as many.")
        tokenizer, limit = self.translator.tokenizer, self.translator.model.config.max_length
        pairs: list[TokenPair] = list(
            zip(tokenizer.encode_source_batch(sources), tokenizer.encode_target_batch(targets), strict=True)
        )
        found: list[Links] = [[] for _ in pairs]
        chosen: list[int] = []
        for n, pair in enumerate(pairs):
            lengths = [len(ids) for ids in pair]
            if max(lengths) > limit:
                log.warning("Pair %d has over %d tokens on a side, too many for the model.", first_line + n, limit)
            elif min(lengths) > 1:
                chosen.append(n)
        for n, cross_HTS in zip(chosen, self.cross_attention([pairs[n] for n in chosen]), strict=True):
            found[n] = self._link(cross_HTS, sources[n], targets[n], first_line + n)
        return found

    def _link(self, cross_HTS: np.ndarray, source: str, target: str, line: int) -> Links:
        tokenizer = self.translator.tokenizer
        source_words = words_of(tokenizer.source_pieces(source), by_space=self.by_space)
        target_words = words_of(tokenizer.target_pieces(target), by_space=self.by_space)
        if self.by_space and (divides_otherwise(source_words, source) or divides_otherwise(target_words, target)):
            log.warning("Pair %d: the tokenizer divides it into other words than its spaces do.", line)
        cross_TS = cross_HTS.mean(axis=0) if self.head is None else cross_HTS[self.head - 1]
        return link(word_weights(cross_TS, source_words, target_words, self.step), source_words)

    def cross_attention(self, pairs: Sequence[TokenPair]) -> list[np.ndarray]:
        """(H, T, S) of the layer for each pair: row t belongs to the step that writes target token t."""
        found: list[np.ndarray] = [np.zeros(())] * len(pairs)
        for batch, room in self._batches(pairs):
            arrays = self._arrays([pairs[n] for n in batch], room)
            weights_BHTS = to_host(self._weights(self.translator.params, *arrays))
            for row, n in enumerate(batch):
                found[n] = np.asarray(weights_BHTS[row, :, : len(pairs[n][1]), : len(pairs[n][0])])
        return found

    def _batches(self, pairs: Sequence[TokenPair]) -> Iterator[tuple[list[int], int]]:
        """Numbers of pairs of similar length, and the static length that holds them."""
        limit = self.translator.model.config.max_length
        rooms = [min([n for n in LENGTHS if n >= max(map(len, pair))] + [limit]) for pair in pairs]
        for batch in length_sorted_batches(rooms, self.slots):
            yield batch, rooms[batch[-1]]

    def _arrays(self, pairs: Sequence[TokenPair], room: int) -> Any:
        """Source ids, source segments and decoder inputs, each (rows, room): as many rows as a full batch has."""
        tokenizer, mesh = self.translator.tokenizer, self.translator.mesh
        rows = -(-max(1, self.slots // room) // mesh.size) * mesh.size
        source_ids = np.full((rows, room), tokenizer.source_pad_id, np.int32)
        segments = np.zeros((rows, room), np.int32)
        inputs = np.full((rows, room), self.translator.model.config.start_id, np.int32)
        for row, (source, target) in enumerate(pairs):
            source_ids[row, : len(source)] = source
            segments[row, : len(source)] = 1
            inputs[row, 1 : len(target)] = target[:-1]
        return shard_rows((source_ids, segments, inputs), mesh)


def _layer_weights(translator: Translator, layer: int) -> Any:
    """(params, source ids, segments, inputs) -> (B, H, T, S). The compiler leaves out what comes after the layer."""
    model = translator.model

    @jax.jit
    def weights(params: Any, source_ids: jax.Array, segments: jax.Array, inputs: jax.Array) -> Any:
        _, found = model.apply({"params": params}, source_ids, inputs, segments, mutable=[ATTENTION_WEIGHTS])
        return found[ATTENTION_WEIGHTS]["decoder"][f"layer_{layer - 1}"]["cross_attention"]["BHTS"][0]

    return weights
