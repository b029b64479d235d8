"""§3.1 and Figure 1: encoder layers, decoder layers, and the Transformer made of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct

from transformer_jax.array_types import Array, Bool, Float, Int
from transformer_jax.attention import MultiHeadAttention, padding_mask, segment_mask
from transformer_jax.config import ModelConfig
from transformer_jax.errors import UserError
from transformer_jax.layers import (
    Embedding,
    FeedForward,
    LayerNorm,
    PositionalEncoding,
    drop_words,
    dropper,
    residual,
)

KeysValues = tuple[Float[Array, "B H S K"], Float[Array, "B H S K"]]
"""Keys and values of the encoder output."""
TargetKeysValues = tuple[Float[Array, "B H places K"], Float[Array, "B H places K"]]
"""Keys and values of the target tokens, or of those so far with room for the next ones."""


@struct.dataclass
class DecoderState:
    """What the decoder remembers from one step to the next: a value that goes in and comes back.

    The leading axis is the sentence, which may have several beams (W). Sentences may be reordered, repeated or dropped
    between steps. Beams change places by `ancestors_BWT` alone: keys and values stay where they were written, and a
    beam looks at those that its ancestors wrote.
    """

    self_attention: tuple[TargetKeysValues, ...]
    """Per layer, keys and values of the tokens so far, (B, H, length * W, K): token t of beam w is at place t * W + w.
    The places from `step * W` on are unused."""
    ancestors_BWT: Int[Array, "B W length"]
    """Which beam wrote token t of what is now beam w."""
    cross_attention: tuple[KeysValues, ...]
    """Per layer, keys and values of the encoder output, (B, H, S, K). Fixed."""
    memory_segments_BS: Int[Array, "B S"]
    """1 where the encoder output belongs to a token, 0 on padding. Fixed."""
    step: Int[Array, ""]
    """How many target tokens have been seen."""


class EncoderLayer(nn.Module):
    """Self-attention, then feed-forward, each with add & norm."""

    config: ModelConfig

    def setup(self) -> None:
        self.self_attention = MultiHeadAttention(self.config)
        self.self_attention_norm = LayerNorm(self.config)
        self.feed_forward = FeedForward(self.config, self.config.d_ff)
        self.feed_forward_norm = LayerNorm(self.config)

    def __call__(
        self, x_BSD: Float[Array, "B S D"], mask: Bool[Array, "B 1 S S"], *, deterministic: bool
    ) -> Float[Array, "B S D"]:
        drop = dropper(self, self.config.dropout, deterministic)
        drop_weights = _weights_dropper(self, deterministic)

        def attend_self(x_BSD: Array) -> Array:
            keys, values = self.self_attention.keys_values(x_BSD)
            return self.self_attention(x_BSD, keys, values, mask, drop=drop_weights)

        def feed_forward(x_BSD: Array) -> Array:
            return self.feed_forward(x_BSD, deterministic=deterministic)

        x_BSD = residual(x_BSD, attend_self, self.self_attention_norm, drop)
        return residual(x_BSD, feed_forward, self.feed_forward_norm, drop)


class DecoderLayer(nn.Module):
    """Masked self-attention, attention to the encoder output, then feed-forward, each with add & norm."""

    config: ModelConfig

    def setup(self) -> None:
        self.self_attention = MultiHeadAttention(self.config)
        self.self_attention_norm = LayerNorm(self.config)
        self.cross_attention = MultiHeadAttention(self.config)
        self.cross_attention_norm = LayerNorm(self.config)
        self.feed_forward = FeedForward(self.config, self.config.decoder_d_ff or self.config.d_ff)
        self.feed_forward_norm = LayerNorm(self.config)

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        self_mask: Bool[Array, "#B 1 T places"],
        memory: KeysValues,
        memory_mask: Bool[Array, "B 1 #T S"],
        *,
        past: TargetKeysValues | None = None,
        place: Int[Array, ""] | int = 0,
        deterministic: bool = True,
    ) -> tuple[Float[Array, "B T D"], TargetKeysValues]:
        """`past` has places for the keys and values of all tokens, and those before `place` filled in; x's come next.
        Without it, x is all there is to look at. Returns the output and what x has been looked up in: `past` with x's
        keys and values added."""
        drop = dropper(self, self.config.dropout, deterministic)
        drop_weights = _weights_dropper(self, deterministic)
        looked_at: list[TargetKeysValues] = []

        def attend_self(x_BTD: Array) -> Array:
            keys, values = self.self_attention.keys_values(x_BTD)
            if past is not None:
                keys = jax.lax.dynamic_update_slice_in_dim(past[0], keys, place, axis=2)
                values = jax.lax.dynamic_update_slice_in_dim(past[1], values, place, axis=2)
            looked_at.append((keys, values))
            return self.self_attention(x_BTD, keys, values, self_mask, drop=drop_weights)

        def attend_memory(x_BTD: Array) -> Array:
            return self.cross_attention(x_BTD, *memory, memory_mask, drop=drop_weights)

        def feed_forward(x_BTD: Array) -> Array:
            return self.feed_forward(x_BTD, deterministic=deterministic)

        x_BTD = residual(x_BTD, attend_self, self.self_attention_norm, drop)
        x_BTD = residual(x_BTD, attend_memory, self.cross_attention_norm, drop)
        x_BTD = residual(x_BTD, feed_forward, self.feed_forward_norm, drop)
        return x_BTD, looked_at[0]


def _weights_dropper(module: EncoderLayer | DecoderLayer, deterministic: bool):
    """Attention dropout; None where there is none, which leaves the fused kernels free to run."""
    rate = module.config.attention_dropout
    return None if deterministic or rate == 0.0 else dropper(module, rate, deterministic)


def maybe_remat(apply: Callable[..., Any], config: ModelConfig) -> Callable[..., Any]:
    """`apply(layer, ...)`, of which the gradient keeps the inputs only, where the configuration says so."""
    return nn.remat(apply) if config.remat else apply


class Encoder(nn.Module):
    """Positions, dropout, and the stack of encoder layers."""

    config: ModelConfig

    def setup(self) -> None:
        self.positions = PositionalEncoding(self.config)
        self.layer = [EncoderLayer(self.config) for _ in range(self.config.n_encoder_layers)]
        if self.config.norm == "pre":
            self.norm = LayerNorm(self.config)

    def __call__(
        self,
        x_BSD: Float[Array, "B S D"],
        segments_BS: Int[Array, "B S"],
        positions_BS: Int[Array, "#B S"],
        *,
        deterministic: bool,
    ) -> Float[Array, "B S D"]:
        mask = segment_mask(segments_BS, segments_BS)
        x_BSD = self.positions(x_BSD, positions_BS)
        x_BSD = dropper(self, self.config.dropout, deterministic)(x_BSD)

        def apply(layer: EncoderLayer, x_BSD: Array) -> Array:
            return layer(x_BSD, mask, deterministic=deterministic)

        for layer in self.layer:
            x_BSD = maybe_remat(apply, self.config)(layer, x_BSD)
        return self.norm(x_BSD) if self.config.norm == "pre" else x_BSD


class Decoder(nn.Module):
    """Positions, dropout, and the stack of decoder layers."""

    config: ModelConfig

    def setup(self) -> None:
        self.positions = PositionalEncoding(self.config)
        self.layer = [DecoderLayer(self.config) for _ in range(self.config.n_decoder_layers)]
        if self.config.norm == "pre":
            self.norm = LayerNorm(self.config)

    def keys_values(self, memory_BSD: Float[Array, "B S D"]) -> tuple[KeysValues, ...]:
        """Keys and values of the encoder output for every layer's cross-attention."""
        return tuple(layer.cross_attention.keys_values(memory_BSD) for layer in self.layer)

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        positions_BT: Int[Array, "#B T"],
        self_mask: Bool[Array, "#B 1 T places"],
        memory: tuple[KeysValues, ...],
        memory_mask: Bool[Array, "B 1 #T S"],
        *,
        past: tuple[TargetKeysValues, ...] | None = None,
        place: Int[Array, ""] | int = 0,
        deterministic: bool = True,
    ) -> tuple[Float[Array, "B T D"], tuple[TargetKeysValues, ...]]:
        """The output and, per layer, the keys and values looked at; see `DecoderLayer`."""
        x_BTD = self.positions(x_BTD, positions_BT)
        x_BTD = dropper(self, self.config.dropout, deterministic)(x_BTD)
        looked_at = []
        for n, layer in enumerate(self.layer):

            def apply(layer: DecoderLayer, x_BTD: Array, memory: KeysValues, past: TargetKeysValues | None) -> Any:
                return layer(x_BTD, self_mask, memory, memory_mask, past=past, place=place, deterministic=deterministic)

            before = None if past is None else past[n]
            x_BTD, keys_values = maybe_remat(apply, self.config)(layer, x_BTD, memory[n], before)
            looked_at.append(keys_values)
        return self.norm(x_BTD) if self.config.norm == "pre" else x_BTD, tuple(looked_at)


class Transformer(nn.Module):
    """The encoder-decoder Transformer.

    Ids are (B, S) and (B, T). Segments number the sentences of a packed row 1, 2, ... with 0 for padding; positions
    count within a sentence. Left out, a row is one sentence: source padding is told by `config.pad_id`, target
    padding is not masked (it stands at the end, where the causal mask hides it from every token).
    With deterministic=False, dropout draws from the "dropout" random stream given to `apply`.
    """

    config: ModelConfig

    def setup(self) -> None:
        c = self.config
        if c.vocab_size < 1:
            raise UserError("vocab_size is 0; give the model the size of its tokenizer's vocabulary.")
        self.target_embedding = Embedding(c, c.vocab_size)
        if not c.shared_embedding:
            self.source_embedding = Embedding(c, c.source_vocab_size or c.vocab_size)
        if not c.tied_output:
            self.output_embedding = Embedding(c, c.vocab_size)
        if c.logits_bias:
            self.logits_bias = self.param("logits_bias", nn.initializers.zeros, (c.vocab_size,))
        self.encoder = Encoder(c)
        self.decoder = Decoder(c)

    def __call__(
        self,
        source_ids_BS: Int[Array, "B S"],
        target_ids_BT: Int[Array, "B T"],
        source_segments_BS: Int[Array, "B S"] | None = None,
        target_segments_BT: Int[Array, "B T"] | None = None,
        source_positions_BS: Int[Array, "#B S"] | None = None,
        target_positions_BT: Int[Array, "#B T"] | None = None,
        *,
        deterministic: bool = True,
    ) -> Float[Array, "B T V"]:
        """Logits (float32) for the token after each target token, all at once (teacher forcing)."""
        if source_segments_BS is None:
            source_segments_BS = self.source_segments(source_ids_BS)
        memory_BSD = self.encode(source_ids_BS, source_segments_BS, source_positions_BS, deterministic=deterministic)
        return self.decode(
            target_ids_BT,
            memory_BSD,
            source_segments_BS,
            target_segments_BT,
            target_positions_BT,
            deterministic=deterministic,
        )

    def source_segments(self, source_ids_BS: Int[Array, "B S"]) -> Int[Array, "B S"]:
        """One sentence a row: 1 for its tokens, 0 for padding."""
        c = self.config
        pad_id = c.pad_id if c.source_pad_id is None else c.source_pad_id
        return padding_mask(source_ids_BS, pad_id).astype(jnp.int32)

    def encode(
        self,
        source_ids_BS: Int[Array, "B S"],
        source_segments_BS: Int[Array, "B S"] | None = None,
        source_positions_BS: Int[Array, "#B S"] | None = None,
        *,
        deterministic: bool = True,
    ) -> Float[Array, "B S D"]:
        """The encoder output, the paper's z: what the decoder calls memory."""
        if source_segments_BS is None:
            source_segments_BS = self.source_segments(source_ids_BS)
        if source_positions_BS is None:
            self._check_length("source", source_ids_BS.shape[1])
            source_positions_BS = jnp.arange(source_ids_BS.shape[1])[None]
        embedding = self.target_embedding if self.config.shared_embedding else self.source_embedding
        x_BSD = self._drop_words(embedding(source_ids_BS), deterministic)
        return self.encoder(x_BSD, source_segments_BS, source_positions_BS, deterministic=deterministic)

    def decode(
        self,
        target_ids_BT: Int[Array, "B T"],
        memory_BSD: Float[Array, "B S D"],
        source_segments_BS: Int[Array, "B S"],
        target_segments_BT: Int[Array, "B T"] | None = None,
        target_positions_BT: Int[Array, "#B T"] | None = None,
        *,
        deterministic: bool = True,
    ) -> Float[Array, "B T V"]:
        """Logits after each target token, given the encoder output."""
        if target_positions_BT is None:
            self._check_length("target", target_ids_BT.shape[1])
            target_positions_BT = jnp.arange(target_ids_BT.shape[1])[None]
        if target_segments_BT is None:
            target_segments_BT = jnp.ones_like(target_ids_BT)
        x_BTD, _ = self.decoder(
            self._drop_words(self._embed_target(target_ids_BT), deterministic),
            target_positions_BT,
            segment_mask(target_segments_BT, target_segments_BT, causal=True),
            self.decoder.keys_values(memory_BSD),
            segment_mask(target_segments_BT, source_segments_BS),
            deterministic=deterministic,
        )
        return self._logits(x_BTD)

    def start_decoding(
        self,
        memory_BSD: Float[Array, "B S D"],
        source_segments_BS: Int[Array, "B S"],
        length: int,
        beam_size: int = 1,
    ) -> DecoderState:
        """The state before the first of at most `length` target tokens. Source rows hold one sentence each, of which
        `beam_size` target rows, one after another, are translations."""
        self._check_length("target", length)
        c, B = self.config, memory_BSD.shape[0]
        shape = (B, c.n_heads, length * beam_size, c.d_head)
        empty = tuple((jnp.zeros(shape, c.dtype), jnp.zeros(shape, c.dtype)) for _ in self.decoder.layer)
        return DecoderState(
            self_attention=empty,
            ancestors_BWT=jnp.zeros((B, beam_size, length), jnp.int32),
            cross_attention=self.decoder.keys_values(memory_BSD),
            memory_segments_BS=source_segments_BS,
            step=jnp.zeros((), jnp.int32),
        )

    def decode_step(
        self, state: DecoderState, target_ids_RT: Int[Array, "R T"]
    ) -> tuple[Float[Array, "R T V"], DecoderState]:
        """Logits after each of the next tokens (one, or several of a given prefix), and the state after them. Row
        b * W + w is beam w of sentence b.

        The caller sees to it that no more tokens come than `start_decoding` made room for: the step is known to the
        device only, so it cannot be checked here.
        """
        (B, W, length), T = state.ancestors_BWT.shape, target_ids_RT.shape[1]
        # A sentence's beams are so many queries to what all of them have written, and to the encoder output.
        ids_BP = jnp.swapaxes(target_ids_RT.reshape(B, W, T), 1, 2).reshape(B, T * W)
        positions_T = state.step + jnp.arange(T)
        own_W1 = jnp.arange(W)[:, None]
        ancestors_BWT = jnp.where(jnp.arange(length) < state.step, state.ancestors_BWT, own_W1)
        x_BPD, self_attention = self.decoder(
            self._embed_target(ids_BP),
            jnp.repeat(positions_T, W)[None],
            _ancestry_mask(ancestors_BWT, positions_T),
            state.cross_attention,
            (state.memory_segments_BS != 0)[:, None, None, :],
            past=state.self_attention,
            place=state.step * W,
        )
        state = dataclasses.replace(
            state, self_attention=self_attention, ancestors_BWT=ancestors_BWT, step=state.step + T
        )
        x_RTD = jnp.swapaxes(x_BPD.reshape(B, T, W, -1), 1, 2).reshape(B * W, T, -1)
        return self._logits(x_RTD), state

    def _embed_target(self, target_ids_BT: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        x_BTD = self.target_embedding(target_ids_BT)
        if self.config.start_embedding == "zero":
            x_BTD = jnp.where((target_ids_BT == self.config.start_id)[..., None], 0, x_BTD)
        return x_BTD

    def _drop_words(self, x_BTD: Float[Array, "B T D"], deterministic: bool) -> Float[Array, "B T D"]:
        rate = self.config.word_dropout
        return x_BTD if deterministic or rate == 0.0 else drop_words(x_BTD, rate, self.make_rng("dropout"))

    def _logits(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        output = self.target_embedding if self.config.tied_output else self.output_embedding
        logits_BTV = output.logits(x_BTD)
        return logits_BTV + self.logits_bias if self.config.logits_bias else logits_BTV

    def _check_length(self, side: str, length: int) -> None:
        # A gather beyond a table would clamp in silence: every length is known here, so it is checked here.
        if length > self.config.max_length:
            raise UserError(
                f"The {side} has {length} tokens, but the model's positions end at {self.config.max_length}; "
                "shorten the text, or raise max_length."
            )


def _ancestry_mask(
    ancestors_BWT: Int[Array, "B W length"], positions_T: Int[Array, "T"]
) -> Bool[Array, "B 1 P places"]:
    """Which places of the cache each beam may look at, at each of these positions: those up to its own that its
    ancestors wrote, or it itself. P = T * W queries, places = length * W, both token by token, beam by beam."""
    B, W, length = ancestors_BWT.shape
    wrote_BWTU = ancestors_BWT[..., None] == jnp.arange(W)  # U: the beam that a place belongs to
    reached_QT = jnp.arange(length) <= positions_T[:, None]
    mask_BQWTU = wrote_BWTU[:, None] & reached_QT[:, None, :, None]
    return mask_BQWTU.reshape(B, 1, len(positions_T) * W, length * W)
