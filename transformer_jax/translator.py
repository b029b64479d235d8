"""Text to text: a model with its tokenizer, requests sorted into static shapes, answers in the order of the lines."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from transformer_jax.array_types import Array
from transformer_jax.batching import length_sorted_batches
from transformer_jax.config import DecodeConfig, Positions
from transformer_jax.model import DecoderState, Transformer
from transformer_jax.pretrained import load_pretrained
from transformer_jax.search import Hypotheses, greedy
from transformer_jax.sharding import DATA, data_mesh, replicate, shard_rows, to_host
from transformer_jax.tokenizer import CharacterTokenizer, Tokenizer

log = logging.getLogger("transformer_jax")

SOURCE_LENGTHS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Sources are padded up to one of these (or to the model's limit): each is one compiled program."""


@dataclass(frozen=True)
class Translation:
    """What one line became."""

    text: str
    score: float
    """Log-probability of the output under the model, natural logarithm. 0 for a blank line."""
    tokens: tuple[int, ...]
    """Token ids, with the end token where the model gave one."""


DecodeProgram = Callable[..., Hypotheses]


def make_decode(model: Transformer, mesh: Mesh, suppressed: tuple[int, ...] = ()) -> DecodeProgram:
    """The jitted greedy translation of a batch: (params, source ids, source segments, limits, length=room).

    `suppressed` ids are never generated, nor are padding and start.

    Each device translates its own rows, and stops when they are done.
    """
    config = model.config
    never = {config.pad_id, config.start_id, *suppressed} - {config.end_id}
    suppressed = tuple(sorted(i for i in never if i < config.vocab_size))

    def decode(params: Any, ids_BS: Array, segments_BS: Array, limits_B: Array, length: int) -> Hypotheses:
        def call(*args: Any, method: str) -> Any:
            return model.apply({"params": params}, *args, method=method)

        def step(state: DecoderState, tokens_B: Array) -> tuple[Array, DecoderState]:
            logits_B1V, state = call(state, tokens_B[:, None], method="decode_step")
            return jax.nn.log_softmax(logits_B1V[:, 0]), state

        memory_BSD = call(ids_BS, segments_BS, method="encode")
        state = call(memory_BSD, segments_BS, length, method="start_decoding")
        start_B = jnp.full(limits_B.shape, config.start_id, jnp.int32)
        return greedy(step, state, start_B, limits_B, end_id=config.end_id, length=length, suppressed=suppressed)

    @functools.partial(jax.jit, static_argnames="length")
    def decode_rows(params: Any, ids_BS: Array, segments_BS: Array, limits_B: Array, length: int) -> Hypotheses:
        rows = PartitionSpec(DATA)
        return jax.shard_map(
            functools.partial(decode, length=length),
            mesh=mesh,
            in_specs=(PartitionSpec(), rows, rows, rows),
            out_specs=rows,
            check_vma=False,  # the loop starts from constants, alike on every device, and goes on with rows that differ
        )(params, ids_BS, segments_BS, limits_B)

    return decode_rows


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
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.config = config or DecodeConfig()
        self.mesh = mesh or data_mesh()
        self.params = replicate(params, self.mesh)
        self.decode = make_decode(model, self.mesh, suppressed)

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        config: DecodeConfig | None = None,
        *,
        positions: Positions | None = None,
        revision: str | None = None,
    ) -> Translator:
        """Loads a model folder, the model of a run folder, a native Marian folder or .npz, or a model of the hub.

        See `transformer_jax.pretrained.load_pretrained` for `positions` and `revision`.
        """
        model = load_pretrained(path, positions=positions, revision=revision)
        return cls(Transformer(model.config), model.params, model.tokenizer, config, suppressed=model.suppressed)

    def with_params(self, params: Any) -> Translator:
        """The same translator, with its compiled programs, on other parameters (already on the mesh)."""
        other = object.__new__(Translator)
        other.__dict__.update(self.__dict__, params=params)
        return other

    def translate(self, lines: Sequence[str], first_line: int = 1) -> list[Translation]:
        """One translation per line, in order. A blank line gives an empty one and never reaches the model.

        Warnings count lines from `first_line`."""
        filled = [i for i, line in enumerate(lines) if line.strip()]
        sources = self._encode([lines[i] for i in filled], [first_line + i for i in filled])
        rooms = [self._room(len(ids)) for ids in sources]
        translations = [Translation("", 0.0, ())] * len(lines)
        for batch in length_sorted_batches(rooms, self.config.batch_tokens):
            outputs = self._decode_batch([sources[i] for i in batch])
            for i, (tokens, score) in zip(batch, outputs, strict=True):
                text = self.tokenizer.decode(tokens)
                translations[filled[i]] = Translation(text, score, tuple(tokens))
        return translations

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

    def _room(self, length: int) -> int:
        """The static source length that holds so many tokens."""
        limit = self.model.config.max_length
        return min([size for size in SOURCE_LENGTHS if size >= length] + [limit])

    def _decode_batch(self, sources: Sequence[Sequence[int]]) -> list[tuple[list[int], float]]:
        """Tokens and log-probability of each, in a shape with the room of the longest."""
        config, n_devices = self.model.config, self.mesh.size
        S = self._room(max(map(len, sources)))
        full = max(1, self.config.batch_tokens // S)
        rows = 1 if len(sources) == 1 else full
        rows = -(-rows // n_devices) * n_devices
        ids = np.full((rows, S), config.pad_id, np.int32)
        segments = np.zeros((rows, S), np.int32)
        limits = np.zeros(rows, np.int32)
        for row, source in enumerate(sources):
            ids[row, : len(source)] = source
            segments[row, : len(source)] = 1
            limits[row] = min(len(source) + self.config.extra_length, config.max_length)
        room = min(S + self.config.extra_length, config.max_length)
        found = self.decode(self.params, *shard_rows((ids, segments, limits), self.mesh), length=room)
        tokens, lengths, scores = to_host(found)
        return [(tokens[i, : lengths[i]].tolist(), float(scores[i])) for i in range(len(sources))]
