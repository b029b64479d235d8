"""Text to text: a model with its tokenizer, requests sorted into static shapes, answers in the order of the lines."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from transformer_jax.config import DecodeConfig, Positions
from transformer_jax.decoding import BatchDecoder, Scorer, never_generated, row_sizes
from transformer_jax.errors import UserError
from transformer_jax.hypotheses import EMPTY, Hypothesis, Score, Translation, translation_of
from transformer_jax.long_lines import split_line
from transformer_jax.model import Transformer
from transformer_jax.pretrained import load_pretrained
from transformer_jax.reranking import Backward, language_tags, rerank
from transformer_jax.sampling import Sampling
from transformer_jax.search_rules import SearchOptions
from transformer_jax.sharding import data_mesh, replicate, shard_rows, to_host
from transformer_jax.source_tiles import pack_sources
from transformer_jax.stopwatch import Stopwatch
from transformer_jax.tokenizer import CharacterTokenizer, Tokenizer

log = logging.getLogger("transformer_jax")

LENGTHS = (16, 32, 48, 80, 128, 224)
"""Sentences are padded up to one of these, or to the model's limit: each is two compiled programs, and the last batch
of a file, which may be small, one more."""
SHARED_ROWS = 128
"""Shorter sentences come in batches of as many rows as those of this length: a batch fills up with the next shorter."""
SCORED_SLOTS = 2048
"""Tokens at most that are scored together: each has a row of logits of its own, unlike a decoding step's."""
MOST_ROWS = 2048
"""Rows of a batch at most, whatever the tokens."""
EARLY_STOPPING = {"best": False, "first": True, "never": "never"}


class Translator:
    """Translates lines of text.

    >>> translator = Translator.from_pretrained("runs/dates")
    >>> translator.translate(["1965-05-10"])[0].text
    '10 May 1965'
    """

    def __init__(
        self,
        model: Transformer,
        params: Any,
        tokenizer: Tokenizer,
        config: DecodeConfig | None = None,
        mesh: Mesh | None = None,
        suppressed: tuple[int, ...] = (),
        stopwatch: Stopwatch | None = None,
        backward: Backward | None = None,
    ) -> None:
        """`backward`: what translates back, for `rerank_weight`; left out, this model itself."""
        self.model = model
        self.tokenizer = tokenizer
        self.config = config or DecodeConfig()
        self.mesh = mesh or data_mesh()
        self.params = replicate(params, self.mesh)
        self.suppressed = suppressed
        self.stopwatch = stopwatch
        self.backward = backward or Backward()
        self._decoders: dict[SearchOptions, BatchDecoder] = {}
        self._scorer = Scorer(model, self.mesh)

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        config: DecodeConfig | None = None,
        *,
        positions: Positions | None = None,
        revision: str | None = None,
        mesh: Mesh | None = None,
        stopwatch: Stopwatch | None = None,
        backward: Backward | None = None,
    ) -> Translator:
        """Loads a model folder, the model of a run folder, a native Marian folder or .npz, or a model of the hub.

        Without `config` the search is the model's own: the beam and the length rule of its generation_config.json or
        decoder.yml. See `transformer_jax.pretrained.load_pretrained` for `positions` and `revision`.
        """
        model = load_pretrained(path, positions=positions, revision=revision)
        config = config or DecodeConfig(**model.search)
        transformer = Transformer(model.config)
        return cls(transformer, model.params, model.tokenizer, config, mesh, model.suppressed, stopwatch, backward)

    def with_params(self, params: Any) -> Translator:
        """The same translator, with its compiled programs, on other parameters (already on the mesh)."""
        other = object.__new__(Translator)
        other.__dict__.update(self.__dict__, params=params)
        return other

    def n_programs(self) -> int:
        """How many programs have been compiled, for translating and for scoring."""
        scoring: Any = self._scorer.score
        return sum(decoder.n_programs() for decoder in self._decoders.values()) + scoring._cache_size()

    # --- translating ----------------------------------------------------------------------------------------

    def translate(
        self,
        lines: Sequence[str],
        *,
        prefixes: Sequence[str] | str | None = None,
        first_line: int = 1,
        **changes: Any,
    ) -> list[Translation]:
        """One translation per line, in order. A blank line gives an empty one and never reaches the model.

        `prefixes`: what translations must begin with, one for all lines or one for each. `changes` are fields of
        DecodeConfig for this call: `translate(lines, beam_size=4, n_best=4)`. Warnings count lines from `first_line`.
        """
        config = dataclasses.replace(self.config, **changes)
        backward = self.backward.resolve(self) if config.rerank_weight else None
        # All that the beam finds is ranked again, however few of it are asked for.
        search = dataclasses.replace(config, n_best=config.beam_size) if backward else config
        parts, lines_of_parts = self._parts(lines, config, first_line)
        found: list[tuple[Hypothesis, ...]] = self._translate_parts(parts, lines_of_parts, prefixes, search, first_line)
        if backward:
            tags = language_tags(self.tokenizer)
            with contextlib.nullcontext() if self.stopwatch is None else self.stopwatch.measure("rank"):
                found = [best[: config.n_best] for best in rerank(parts, found, tags, backward, config)]
        of_lines: list[list[tuple[Hypothesis, ...]]] = [[] for _ in lines]
        for line, hypotheses in zip(lines_of_parts, found, strict=True):
            of_lines[line].append(hypotheses)
        blank = dataclasses.replace(EMPTY, source_log_prob=0.0) if backward else EMPTY
        return [translation_of(parts, blank) for parts in of_lines]

    def _parts(self, lines: Sequence[str], config: DecodeConfig, first_line: int) -> tuple[list[str], list[int]]:
        """What is translated by itself: lines, or their parts where they are too long; and the line of each."""
        filled = [i for i, line in enumerate(lines) if line.strip()]
        limit = self.model.config.max_length
        parts: list[str] = []
        lines_of_parts: list[int] = []
        try:
            lengths = [len(ids) for ids in self.tokenizer.encode_source_batch([lines[i] for i in filled])]
        except UserError:
            self._name_the_line(lines, filled, first_line)
            raise
        for i, length in zip(filled, lengths, strict=True):
            pieces = [lines[i]]
            if length > limit and config.long_lines == "split":
                language = getattr(self.tokenizer, "source_lang", None)
                pieces = split_line(lines[i], limit, self._length, language, language_tags(self.tokenizer))
                log.warning("Line %d has %d tokens; it is translated in %d parts.", first_line + i, length, len(pieces))
            parts += pieces
            lines_of_parts += [i] * len(pieces)
        return parts, lines_of_parts

    def _name_the_line(self, lines: Sequence[str], filled: Sequence[int], first_line: int) -> None:
        for i in filled:
            try:
                self.tokenizer.encode_source(lines[i])
            except UserError as error:
                raise UserError(f"Line {first_line + i}: {error}") from error

    def _length(self, text: str) -> int:
        return len(self.tokenizer.encode_source(text))

    def _translate_parts(
        self,
        parts: Sequence[str],
        numbers: Sequence[int],
        prefixes: Sequence[str] | str | None,
        config: DecodeConfig,
        first_line: int,
    ) -> list[tuple[Hypothesis, ...]]:
        sources = self._encode(parts, [first_line + i for i in numbers])
        given = self._encode_prefixes(prefixes, numbers)
        # Each part draws from a number of its own: that of its line, and its place in it.
        place: list[int] = []
        for i, n in enumerate(numbers):
            place.append(place[-1] + 1 if i and numbers[i - 1] == n else 0)
        drawn = [(first_line + n + 7919 * k) % 2**31 for n, k in zip(numbers, place, strict=True)]
        return self.translate_tokens(sources, config, given, drawn)

    def translate_tokens(
        self,
        sources: Sequence[Sequence[int]],
        config: DecodeConfig | None = None,
        prefixes: Sequence[Sequence[int]] | None = None,
        sentence_ids: Sequence[int] | None = None,
    ) -> list[tuple[Hypothesis, ...]]:
        """Hypotheses, best first, of sources in tokens (with their end token); `rerank_weight` is of lines of text.

        `prefixes`: target ids that each must begin with. `sentence_ids`: what its drawing follows from, with the seed.
        """
        config = config or self.config
        prefixes = [[]] * len(sources) if prefixes is None else prefixes
        sentence_ids = range(len(sources)) if sentence_ids is None else sentence_ids
        decoder = self._decoder(config)
        found: list[tuple[Hypothesis, ...]] = [()] * len(sources)
        for batch in self._batches([len(ids) for ids in sources], config.batch_tokens):
            outputs = self._decode_batch(
                [sources[i] for i in batch],
                [prefixes[i] for i in batch],
                [sentence_ids[i] for i in batch],
                decoder,
                config,
                alone=len(sources) == 1,
            )
            for i, hypotheses in zip(batch, outputs, strict=True):
                found[i] = hypotheses
        return found

    def _encode(self, lines: Sequence[str], numbers: Sequence[int]) -> list[list[int]]:
        """Source ids; what the vocabulary or the model has no room for is left out, with a warning."""
        sources = self.tokenizer.encode_source_batch(lines)
        limit = self.model.config.max_length
        for i, ids in enumerate(sources):
            if len(ids) > limit:
                log.warning("Line %d has %d tokens; the first %d are translated.", numbers[i], len(ids), limit)
                sources[i] = [*ids[: limit - 1], self.tokenizer.end_id]
        if isinstance(self.tokenizer, CharacterTokenizer):
            unknown = {c for line in lines for c in self.tokenizer.unknown_characters(line)}
            if unknown:
                shown = " ".join(repr(c)[1:-1] for c in sorted(unknown))
                log.warning("Characters that the model does not know are left out: %s", shown)
        return sources

    def _encode_prefixes(self, prefixes: Sequence[str] | str | None, numbers: Sequence[int]) -> list[list[int]]:
        """Target ids that each part must begin with. The second part of a line has no prefix: the first one has it."""
        if prefixes is None or not numbers:
            return [[]] * len(numbers)
        if isinstance(prefixes, str):
            encoded = self.tokenizer.encode_target_batch([prefixes]) * (max(numbers) + 1)
        else:
            if len(prefixes) <= max(numbers):
                raise UserError(
                    f"There are {len(prefixes)} prefixes for more lines; give one for each, or one for all."
                )
            encoded = self.tokenizer.encode_target_batch(list(prefixes))
        given = [encoded[n][:-1] if i == 0 or numbers[i - 1] != n else [] for i, n in enumerate(numbers)]
        if getattr(self.tokenizer, "unknown_id", None) in {token for ids in given for token in ids}:
            raise UserError("A prefix has letters that the model cannot spell; leave them out.")
        if max(map(len, given)) >= self.model.config.max_length:
            raise UserError(f"A prefix is longer than the model, which ends at {self.model.config.max_length} tokens.")
        return given

    def _rows(self, room: int, batch_tokens: int, shared_rows: int = SHARED_ROWS) -> tuple[int, int]:
        """Rows of a full batch of this length, and of the small one."""
        shared = max(room, min(shared_rows, self.model.config.max_length))
        return row_sizes(min(MOST_ROWS, max(1, batch_tokens // shared)), self.mesh.size)

    def _batches(
        self, lengths: Sequence[int], batch_tokens: int, shared_rows: int = SHARED_ROWS
    ) -> Iterator[list[int]]:
        """Indices in batches of similar length, the longest first: only the last may not be full."""
        order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        while order:
            rows, _ = self._rows(self._room(lengths[order[0]]), batch_tokens, shared_rows)
            yield order[:rows]
            order = order[rows:]

    def _room(self, length: int) -> int:
        """The static length that holds so many tokens."""
        limit = self.model.config.max_length
        return min([size for size in LENGTHS if size >= length] + [limit])

    def _decoder(self, config: DecodeConfig) -> BatchDecoder:
        options = SearchOptions(
            end_id=self.model.config.end_id,
            beam_size=config.beam_size,
            n_best=config.n_best,
            length_rule=config.length_rule,
            length_penalty=config.length_penalty,
            early_stopping=EARLY_STOPPING[config.early_stopping] if config.length_rule == "hf" else False,
            word_penalty=config.word_penalty,
            suppressed=never_generated(self.model.config, self.suppressed),
            no_repeat_ngram_size=config.no_repeat_ngram_size,
            repetition_penalty=config.repetition_penalty,
            sampling=Sampling(config.temperature, config.top_k, config.top_p) if config.sample else None,
        )
        if options not in self._decoders:
            self._decoders[options] = BatchDecoder(self.model, self.mesh, options, self.stopwatch)
        return self._decoders[options]

    def _limit(self, source_length: int, config: DecodeConfig) -> int:
        """The longest output for a source of so many tokens (the end token counts on both sides)."""
        limits = [self.model.config.max_length]
        if config.extra_length is not None:
            limits.append(source_length + config.extra_length)
        if config.max_length is not None:
            limits.append(config.max_length)
        if config.max_length_factor is not None:
            limits.append(math.ceil(min(source_length * config.max_length_factor, limits[0])))
        return min(limits)

    def _decode_batch(
        self,
        sources: Sequence[Sequence[int]],
        prefixes: Sequence[Sequence[int]],
        sentence_ids: Sequence[int],
        decoder: BatchDecoder,
        config: DecodeConfig,
        alone: bool,
    ) -> list[tuple[Hypothesis, ...]]:
        """Hypotheses of each source, decoded together in a shape with the room of the longest. `alone`: it is one, and
        all that was asked for."""
        S = self._room(max(map(len, sources)))
        rows, few_rows = self._rows(S, config.batch_tokens)
        if alone:
            rows = self.mesh.size
        elif len(sources) <= few_rows:
            rows = few_rows
        tiles = pack_sources(sources, rows, S, self.tokenizer.source_pad_id, self.mesh.size)
        limits = np.zeros(rows, np.int32)
        limits[: len(sources)] = [self._limit(len(source), config) for source in sources]
        asked = {"limits_B": limits}
        if config.min_length:
            asked["min_lengths_B"] = np.full(rows, min(config.min_length, self.model.config.max_length), np.int32)
        if any(prefixes):
            asked |= _prefix_arrays(prefixes, rows, self._room(max(map(len, prefixes))))
        if config.sample:
            asked["sentence_ids_B"] = np.resize(np.asarray(sentence_ids, np.int32), rows)
        length = max(1, self._limit(S, config))
        batch = shard_rows((tiles, asked), self.mesh)
        found = decoder.decode(self.params, *batch, length=length, few_rows=min(few_rows, rows), seed=config.seed)
        return [
            tuple(self._hypothesis(found, row, n) for n in range(config.n_best) if found.scores_BN[row, n] > -np.inf)
            for row in range(len(sources))
        ]

    def _padded(self, rows_of_ids: Sequence[Sequence[int]], rows: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Source ids and segments in one static shape."""
        ids = np.full((rows, length), self.tokenizer.source_pad_id, np.int32)
        segments = np.zeros((rows, length), np.int32)
        for row, source in enumerate(rows_of_ids):
            ids[row, : len(source)] = source
            segments[row, : len(source)] = 1
        return ids, segments

    def _hypothesis(self, found: Any, row: int, n: int) -> Hypothesis:
        length = int(found.lengths_BN[row, n])
        tokens = tuple(found.tokens_BNT[row, n, :length].tolist())
        return Hypothesis(
            text=self.tokenizer.decode(tokens),
            score=float(found.scores_BN[row, n]),
            log_prob=float(found.log_probs_BN[row, n]),
            tokens=tokens,
            token_scores=tuple(found.token_log_probs_BNT[row, n, :length].tolist()),
        )

    # --- scoring --------------------------------------------------------------------------------------------

    def score(self, sources: Sequence[str], targets: Sequence[str], first_line: int = 1) -> list[Score]:
        """The log-probability of each target given its source."""
        if len(sources) != len(targets):
            raise UserError(f"There are {len(sources)} sources but {len(targets)} targets; they must be as many.")
        numbers = [first_line + i for i in range(len(sources))]
        pairs = list(zip(self._encode(sources, numbers), self._encode_targets(targets, numbers), strict=True))
        return self.score_tokens(pairs)

    def _encode_targets(self, targets: Sequence[str], numbers: Sequence[int]) -> list[list[int]]:
        encoded, limit = self.tokenizer.encode_target_batch(list(targets)), self.model.config.max_length
        for i, ids in enumerate(encoded):
            if len(ids) > limit:
                log.warning("Target %d has %d tokens; the first %d are scored.", numbers[i], len(ids), limit)
                encoded[i] = ids[:limit]
        return encoded

    def score_tokens(
        self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], batch_tokens: int | None = None
    ) -> list[Score]:
        """The same for pairs of ids: source with its end token, target as it is to be scored."""
        lengths = [max(len(source), len(target), 1) for source, target in pairs]
        scores = [Score(0.0, ())] * len(pairs)
        slots = min(batch_tokens or self.config.batch_tokens, SCORED_SLOTS)
        for batch in self._batches(lengths, slots, shared_rows=1):
            T = self._room(lengths[batch[0]])
            rows, few_rows = self._rows(T, slots, shared_rows=1)
            rows = few_rows if len(batch) <= few_rows else rows
            ids, segments = self._padded([pairs[i][0] for i in batch], rows, T)
            inputs = np.full((rows, T), self.model.config.start_id, np.int32)
            outputs = np.zeros((rows, T), np.int32)
            for row, i in enumerate(batch):
                target = pairs[i][1]
                outputs[row, : len(target)] = target
                inputs[row, 1 : len(target)] = target[:-1]
            arrays = shard_rows((ids, segments, inputs, outputs), self.mesh)
            log_probs = np.asarray(to_host(self._scorer.score(self.params, *arrays)))
            for row, i in enumerate(batch):
                of_tokens = log_probs[row, : len(pairs[i][1])]
                scores[i] = Score(float(of_tokens.sum()), tuple(of_tokens.tolist()))
        return scores


def _prefix_arrays(prefixes: Sequence[Sequence[int]], rows: int, room: int) -> dict[str, np.ndarray]:
    ids, lengths = np.zeros((rows, room), np.int32), np.zeros(rows, np.int32)
    for row, prefix in enumerate(prefixes):
        ids[row, : len(prefix)], lengths[row] = prefix, len(prefix)
    return {"prefix_BP": ids, "prefix_lengths_B": lengths}
