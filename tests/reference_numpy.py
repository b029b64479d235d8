"""The Transformer once more, in plain NumPy and float64: what the tests hold the package against.

Written from the paper with one sentence, one head and one position at a time, no masks (a position only ever gets to
see what it may), no batches and no cache, so that it shares no idea, and no mistake, with the package.
It reads the package's parameter tree and `ModelConfig`, nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

Tree = Mapping[str, Any]


def softmax(scores: np.ndarray) -> np.ndarray:
    powers = np.exp(scores - scores.max())
    return powers / powers.sum()


def activation(name: str, x: np.ndarray) -> np.ndarray:
    def one(value: float) -> float:
        if name == "relu":
            return max(0.0, value)
        if name == "swish":
            return value / (1.0 + math.exp(-value))
        return value * 0.5 * (1.0 + math.erf(value / math.sqrt(2.0)))

    return np.vectorize(one, otypes=[float])(x)


def linear(weights: Tree, x: np.ndarray) -> np.ndarray:
    y = x @ np.asarray(weights["kernel"], np.float64)
    return y + np.asarray(weights["bias"], np.float64) if "bias" in weights else y


def layer_norm(weights: Tree, x: np.ndarray, epsilon: float) -> np.ndarray:
    rows = [(row - row.mean()) / math.sqrt(row.var() + epsilon) for row in x]
    return np.stack(rows) * np.asarray(weights["scale"], np.float64) + np.asarray(weights["bias"], np.float64)


def position_vector(position: int, d_model: int, layout: str) -> np.ndarray:
    """One row of the sinusoid table, channel by channel."""
    half = d_model // 2
    vector = np.zeros(d_model)
    for pair in range(half):
        if layout == "marian":
            # tensor2tensor: timescales from 1 to 10,000 in half - 1 equal steps of their logarithm.
            timescale = math.exp(pair * math.log(10_000.0) / (half - 1))
        else:
            timescale = 10_000.0 ** (2 * pair / d_model)
        sine_at, cosine_at = (2 * pair, 2 * pair + 1) if layout == "interleaved" else (pair, half + pair)
        vector[sine_at] = math.sin(position / timescale)
        vector[cosine_at] = math.cos(position / timescale)
    return vector


def attention(weights: Tree, x: np.ndarray, memory: np.ndarray, n_heads: int, causal: bool) -> np.ndarray:
    """Multi-head attention of one sentence, (T, D) looking at (S, D)."""
    queries, keys, values = (
        linear(weights["query"], x),
        linear(weights["key"], memory),
        linear(weights["value"], memory),
    )
    size = x.shape[1] // n_heads
    heads = np.zeros_like(x)
    for head in range(n_heads):
        columns = slice(head * size, (head + 1) * size)
        for t in range(len(x)):
            visible = t + 1 if causal else len(memory)
            scores = keys[:visible, columns] @ queries[t, columns] / math.sqrt(size)
            heads[t, columns] = softmax(scores) @ values[:visible, columns]
    return linear(weights["output"], heads)


def feed_forward(config: Any, weights: Tree, x: np.ndarray) -> np.ndarray:
    return linear(weights["output"], activation(config.activation, linear(weights["hidden"], x)))


def _stack(config: Any, weights: Tree, x: np.ndarray, memory: np.ndarray | None) -> np.ndarray:
    """The encoder's layers, or with a memory the decoder's."""

    def add_and_norm(x: np.ndarray, norm: Tree, sublayer: Any) -> np.ndarray:
        if config.norm == "post":
            return layer_norm(norm, x + sublayer(x), config.norm_epsilon)
        return x + sublayer(layer_norm(norm, x, config.norm_epsilon))

    n_layers = config.n_encoder_layers if memory is None else config.n_decoder_layers
    for n in range(n_layers):
        layer = weights[f"layer_{n}"]
        x = add_and_norm(
            x,
            layer["self_attention_norm"],
            lambda y, w=layer["self_attention"]: attention(w, y, y, config.n_heads, causal=memory is not None),
        )
        if memory is not None:
            x = add_and_norm(
                x,
                layer["cross_attention_norm"],
                lambda y, w=layer["cross_attention"]: attention(w, y, memory, config.n_heads, causal=False),
            )
        x = add_and_norm(x, layer["feed_forward_norm"], lambda y, w=layer["feed_forward"]: feed_forward(config, w, y))
    return layer_norm(weights["norm"], x, config.norm_epsilon) if config.norm == "pre" else x


def _embed(config: Any, params: Tree, side: str, ids: list[int]) -> np.ndarray:
    table = params["target_embedding" if config.shared_embedding else f"{side}_embedding"]["table"]
    vectors = []
    for position, token in enumerate(ids):
        vector = np.asarray(table, np.float64)[token]
        if config.scale_embedding:
            vector = vector * math.sqrt(config.d_model)
        if side == "target" and token == config.start_id and config.start_embedding == "zero":
            vector = np.zeros(config.d_model)
        stack = params["encoder" if side == "source" else "decoder"]
        if config.positions == "learned":
            vector = vector + np.asarray(stack["positions"]["table"], np.float64)[position]
        else:
            vector = vector + position_vector(position, config.d_model, config.positions)
        vectors.append(vector)
    return np.stack(vectors)


def encode(config: Any, params: Tree, source_ids: list[int]) -> np.ndarray:
    """The encoder output of one sentence without padding, (S, D)."""
    return _stack(config, params["encoder"], _embed(config, params, "source", source_ids), None)


def logits(config: Any, params: Tree, source_ids: list[int], target_ids: list[int]) -> np.ndarray:
    """The logits of one pair without padding, (T, V)."""
    memory = encode(config, params, source_ids)
    x = _stack(config, params["decoder"], _embed(config, params, "target", target_ids), memory)
    output = params["target_embedding" if config.tied_output else "output_embedding"]["table"]
    scores = x @ np.asarray(output, np.float64).T
    return scores + np.asarray(params["logits_bias"], np.float64) if config.logits_bias else scores
