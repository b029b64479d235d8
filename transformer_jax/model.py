"""§3.1 and Figure 1: encoder layers, decoder layers, and the Transformer made of them."""

from __future__ import annotations

import dataclasses

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
    dropper,
    residual,
)

KeysValues = tuple[Float[Array, "sentences H S K"], Float[Array, "sentences H S K"]]
"""Keys and values of the encoder output. Target rows (B) may be more than sentences: beams, side by side."""
TargetKeysValues = tuple[Float[Array, "B H length K"], Float[Array, "B H length K"]]
"""Keys and values of the target tokens, or of those so far with room for the next ones."""


@struct.dataclass
class DecoderState:
    """What the decoder remembers from one step to the next: a value that goes in and comes back.

    The leading axis of what belongs to the encoder output is the sentence (B), that of self-attention the row: there
    may be several rows to a sentence, its beams, side by side. Either may be reordered, repeated or dropped between
    steps.
    """

    self_attention: tuple[TargetKeysValues, ...]
    """Per layer, keys and values of the tokens so far, (rows, H, length, K); the places from `step` on are unused."""
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
        self_mask: Bool[Array, "#B 1 T length"],
        memory: KeysValues,
        memory_mask: Bool[Array, "sentences 1 #T S"],
        *,
        past: TargetKeysValues | None = None,
        step: Int[Array, ""] | int = 0,
        deterministic: bool = True,
    ) -> tuple[Float[Array, "B T D"], TargetKeysValues]:
        """x are the tokens from `step` on. `past` has room for the keys and values of all steps, and those before
        `step` filled in; without it, x is all there is to look at. Returns the output and what x has been looked
        up in: `past` with x's keys and values added."""
        drop = dropper(self, self.config.dropout, deterministic)
        drop_weights = _weights_dropper(self, deterministic)
        looked_at: list[TargetKeysValues] = []

        def attend_self(x_BTD: Array) -> Array:
            keys, values = self.self_attention.keys_values(x_BTD)
            if past is not None:
                keys = jax.lax.dynamic_update_slice_in_dim(past[0], keys, step, axis=2)
                values = jax.lax.dynamic_update_slice_in_dim(past[1], values, step, axis=2)
            looked_at.append((keys, values))
            return self.self_attention(x_BTD, keys, values, self_mask, drop=drop_weights)

        def attend_memory(x_BTD: Array) -> Array:
            # Beams of one sentence, rows side by side, are so many queries to the same keys.
            of_sentences = x_BTD.reshape(memory[0].shape[0], -1, x_BTD.shape[-1])
            y = self.cross_attention(of_sentences, *memory, memory_mask, drop=drop_weights)
            return y.reshape(x_BTD.shape)

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
        for layer in self.layer:
            x_BSD = layer(x_BSD, mask, deterministic=deterministic)
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
        self_mask: Bool[Array, "#B 1 T length"],
        memory: tuple[KeysValues, ...],
        memory_mask: Bool[Array, "sentences 1 #T S"],
        *,
        past: tuple[TargetKeysValues, ...] | None = None,
        step: Int[Array, ""] | int = 0,
        deterministic: bool = True,
    ) -> tuple[Float[Array, "B T D"], tuple[TargetKeysValues, ...]]:
        """The output and, per layer, the keys and values looked at; see `DecoderLayer`."""
        x_BTD = self.positions(x_BTD, positions_BT)
        x_BTD = dropper(self, self.config.dropout, deterministic)(x_BTD)
        looked_at = []
        for n, layer in enumerate(self.layer):
            x_BTD, keys_values = layer(
                x_BTD,
                self_mask,
                memory[n],
                memory_mask,
                past=None if past is None else past[n],
                step=step,
                deterministic=deterministic,
            )
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
        return self.encoder(
            embedding(source_ids_BS), source_segments_BS, source_positions_BS, deterministic=deterministic
        )

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
            self._embed_target(target_ids_BT),
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
        c = self.config
        shape = (memory_BSD.shape[0] * beam_size, c.n_heads, length, c.d_head)
        empty = tuple((jnp.zeros(shape, c.dtype), jnp.zeros(shape, c.dtype)) for _ in self.decoder.layer)
        return DecoderState(
            self_attention=empty,
            cross_attention=self.decoder.keys_values(memory_BSD),
            memory_segments_BS=source_segments_BS,
            step=jnp.zeros((), jnp.int32),
        )

    def decode_step(
        self, state: DecoderState, target_ids_BT: Int[Array, "B T"]
    ) -> tuple[Float[Array, "B T V"], DecoderState]:
        """Logits after each of the next tokens (one, or several of a given prefix), and the state after them.

        The caller sees to it that no more tokens come than `start_decoding` made room for: the step is known to the
        device only, so it cannot be checked here.
        """
        T = target_ids_BT.shape[1]
        length = state.self_attention[0][0].shape[2]
        positions_1T = state.step + jnp.arange(T)[None]
        seen = jnp.arange(length)[None, :] <= positions_1T[0][:, None]
        x_BTD, self_attention = self.decoder(
            self._embed_target(target_ids_BT),
            positions_1T,
            seen[None, None],
            state.cross_attention,
            (state.memory_segments_BS != 0)[:, None, None, :],
            past=state.self_attention,
            step=state.step,
        )
        state = dataclasses.replace(state, self_attention=self_attention, step=state.step + T)
        return self._logits(x_BTD), state

    def _embed_target(self, target_ids_BT: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        x_BTD = self.target_embedding(target_ids_BT)
        if self.config.start_embedding == "zero":
            x_BTD = jnp.where((target_ids_BT == self.config.start_id)[..., None], 0, x_BTD)
        return x_BTD

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
