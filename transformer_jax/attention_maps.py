"""Who looks at whom: the attention weights of every layer and head for one sentence pair.

Two ways to the same numbers: all target tokens at once (teacher forcing), and one by one with cached keys and values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.attention import ATTENTION_WEIGHTS
from transformer_jax.model import Transformer


@dataclass(frozen=True)
class AttentionMaps:
    """The weights of N layers with H heads for S source and T target tokens, float32. Every row sums to 1.

    Row t of the decoder's maps belongs to the step that reads target token t-1 (at t=0 the start token) and writes
    target token t.
    """

    encoder_NHSS: np.ndarray
    """How much each source token takes from each source token."""
    decoder_NHTT: np.ndarray
    """How much each step takes from what the steps up to it have read: 0 above the diagonal."""
    cross_NHTS: np.ndarray
    """How much each step takes from each source token."""


def attention_maps(
    model: Transformer, params: Any, source_ids: Sequence[int], target_ids: Sequence[int]
) -> AttentionMaps:
    """The maps of one pair by teacher forcing; both sides end with their end token, as the tokenizer gives them."""
    inputs = jnp.asarray([[model.config.start_id, *target_ids[:-1]]])
    segments = jnp.ones((1, len(source_ids)), jnp.int32)

    @jax.jit
    def apply(params: Any, *arrays: jax.Array) -> Any:
        _, found = model.apply({"params": params}, *arrays, mutable=[ATTENTION_WEIGHTS])
        return found[ATTENTION_WEIGHTS]

    weights = apply(params, jnp.asarray([source_ids]), inputs, segments)
    return AttentionMaps(
        encoder_NHSS=_stack(weights["encoder"], "self_attention"),
        decoder_NHTT=_stack(weights["decoder"], "self_attention"),
        cross_NHTS=_stack(weights["decoder"], "cross_attention"),
    )


def cached_attention_maps(
    model: Transformer, params: Any, source_ids: Sequence[int], target_ids: Sequence[int]
) -> AttentionMaps:
    """The same maps as decoding sees them: token by token, with the keys and values of earlier steps kept."""
    variables, T = {"params": params}, len(target_ids)
    segments = jnp.ones((1, len(source_ids)), jnp.int32)
    memory, found = model.apply(
        variables, jnp.asarray([source_ids]), segments, method=Transformer.encode, mutable=[ATTENTION_WEIGHTS]
    )
    encoder = found[ATTENTION_WEIGHTS]["encoder"]
    state = model.apply(variables, memory, segments, T, method=Transformer.start_decoding)

    @jax.jit
    def step(state: Any, ids: jax.Array) -> tuple[Any, Any]:
        (_, state), found = model.apply(
            variables, state, ids, method=Transformer.decode_step, mutable=[ATTENTION_WEIGHTS]
        )
        return state, found[ATTENTION_WEIGHTS]["decoder"]

    steps = []
    for token in (model.config.start_id, *target_ids[:-1]):
        state, decoder = step(state, jnp.asarray([[token]]))
        steps.append(decoder)
    return AttentionMaps(
        encoder_NHSS=_stack(encoder, "self_attention"),
        decoder_NHTT=np.concatenate([_stack(decoder, "self_attention") for decoder in steps], axis=2),
        cross_NHTS=np.concatenate([_stack(decoder, "cross_attention") for decoder in steps], axis=2),
    )


def _stack(layers: Mapping[str, Any], block: str) -> np.ndarray:
    """(N, H, T, S) of what a stack's blocks of one kind have returned for a single sentence."""
    in_order = [layers[f"layer_{n}"][block]["BHTS"][0] for n in range(len(layers))]
    return np.concatenate([np.asarray(weights_1HTS) for weights_1HTS in in_order])
