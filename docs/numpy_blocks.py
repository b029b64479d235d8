"""The paper's blocks in plain NumPy, one sentence at a time: the pages under docs/paper show them beside the package.

Letters of shapes are the package's: T target tokens, S source tokens, D d_model, H heads, K = D / H, F feed-forward,
V vocabulary. Each `show_...` function prints an example small enough to be worked by hand.
tests/test_numpy_blocks.py holds every block against the package, and every example against the values worked by hand.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

Array = np.ndarray
Weights = Mapping[str, Any]

# --- §3.2 ---------------------------------------------------------------------------------------------------


def softmax(scores: Array) -> Array:
    """Along the last axis. The largest score is taken off first, which changes nothing but keeps exp in range."""
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def attention(queries_TK: Array, keys_SK: Array, values_SK: Array, may_look_TS: Array) -> tuple[Array, Array]:
    """Eq. 1: softmax(Q Kᵀ / √K) V, and the weights."""
    scores_TS = queries_TK @ keys_SK.T / math.sqrt(keys_SK.shape[-1])
    weights_TS = softmax(np.where(may_look_TS, scores_TS, -1e9))
    return weights_TS @ values_SK, weights_TS


def linear(weights: Weights, x: Array) -> Array:
    return x @ weights["kernel"] + weights["bias"]


def multi_head_attention(weights: Weights, x_TD: Array, memory_SD: Array, may_look_TS: Array, n_heads: int) -> Array:
    """Each head attends in its own K = D / H channels of the projections; their results stand side by side again."""
    queries_TD = linear(weights["query"], x_TD)
    keys_SD, values_SD = linear(weights["key"], memory_SD), linear(weights["value"], memory_SD)
    heads = []
    for channels in np.split(np.arange(x_TD.shape[1]), n_heads):
        head_TK, _ = attention(queries_TD[:, channels], keys_SD[:, channels], values_SD[:, channels], may_look_TS)
        heads.append(head_TK)
    return linear(weights["output"], np.concatenate(heads, axis=-1))


def causal_mask(length: int) -> Array:
    """Row t: where the token at position t may look. True = may."""
    return np.arange(length)[None, :] <= np.arange(length)[:, None]


def segment_mask(query_segments_T: Array, key_segments_S: Array) -> Array:
    """Tokens look at their own sentence, and never at padding (segment 0)."""
    return (query_segments_T[:, None] == key_segments_S[None, :]) & (key_segments_S != 0)[None, :]


def show_attention() -> None:
    queries_TK = np.array([[2 * math.log(3), 0, 0, 0]])
    keys_SK = np.array([[1, 0, 0, 0], [0, 1, 0, 0]])
    values_SK = np.array([[8, 0], [0, 8]])
    for may_look_TS in ([[True, True]], [[True, False]]):
        output_TK, weights_TS = attention(queries_TK, keys_SK, values_SK, np.array(may_look_TS))
        print("weights", weights_TS[0], "output", output_TK[0])


def show_multi_head_attention() -> None:
    same = {"kernel": np.eye(4), "bias": np.zeros(4)}
    sharp = {"kernel": math.sqrt(2) * math.log(3) * np.eye(4), "bias": np.zeros(4)}
    weights = {"query": sharp, "key": same, "value": same, "output": same}
    x_TD = np.array([[1, 0, 0, 1], [0, 1, 0, 1]])
    print(multi_head_attention(weights, x_TD, x_TD, np.ones((2, 2), bool), n_heads=2))


def show_masks() -> None:
    segments = np.array([1, 1, 2, 2, 0])  # two sentences in a row, and a place that is left over
    print((segment_mask(segments, segments) & causal_mask(5)).astype(int))


# --- §3.1 and §3.3 ------------------------------------------------------------------------------------------


def layer_norm(weights: Weights, x_TD: Array, epsilon: float = 1e-5) -> Array:
    """Every vector to mean 0 and variance 1; then a scale and a bias for each channel, which are learned."""
    centred_TD = x_TD - x_TD.mean(axis=-1, keepdims=True)
    variance_T1 = (centred_TD**2).mean(axis=-1, keepdims=True)
    return centred_TD / np.sqrt(variance_T1 + epsilon) * weights["scale"] + weights["bias"]


def feed_forward(weights: Weights, x_TD: Array) -> Array:
    """Eq. 2: max(0, x W₁ + b₁) W₂ + b₂, at every position alike."""
    return linear(weights["output"], np.maximum(0, linear(weights["hidden"], x_TD)))


def encoder_layer(weights: Weights, x_SD: Array, may_look_SS: Array, n_heads: int) -> Array:
    attended_SD = multi_head_attention(weights["self_attention"], x_SD, x_SD, may_look_SS, n_heads)
    x_SD = layer_norm(weights["self_attention_norm"], x_SD + attended_SD)
    return layer_norm(weights["feed_forward_norm"], x_SD + feed_forward(weights["feed_forward"], x_SD))


def decoder_layer(
    weights: Weights, x_TD: Array, memory_SD: Array, self_mask_TT: Array, memory_mask_TS: Array, n_heads: int
) -> Array:
    attended_TD = multi_head_attention(weights["self_attention"], x_TD, x_TD, self_mask_TT, n_heads)
    x_TD = layer_norm(weights["self_attention_norm"], x_TD + attended_TD)
    attended_TD = multi_head_attention(weights["cross_attention"], x_TD, memory_SD, memory_mask_TS, n_heads)
    x_TD = layer_norm(weights["cross_attention_norm"], x_TD + attended_TD)
    return layer_norm(weights["feed_forward_norm"], x_TD + feed_forward(weights["feed_forward"], x_TD))


def plain_weights() -> Weights:
    """A layer of width 2 that is easy to follow: queries of zero (all weights equal), values as they are, no
    feed-forward block."""
    zero, same = {"kernel": np.zeros((2, 2)), "bias": np.zeros(2)}, {"kernel": np.eye(2), "bias": np.zeros(2)}
    attention = {"query": zero, "key": same, "value": same, "output": same}
    norm = {"scale": np.ones(2), "bias": np.zeros(2)}
    return {
        "self_attention": attention,
        "self_attention_norm": norm,
        "cross_attention": attention,
        "cross_attention_norm": norm,
        "feed_forward": {"hidden": zero, "output": zero},
        "feed_forward_norm": norm,
    }


def show_layer_norm() -> None:
    print(layer_norm({"scale": np.ones(4), "bias": np.zeros(4)}, np.array([[2, 2, 6, 6]])))


def show_feed_forward() -> None:
    hidden = {"kernel": np.array([[1, 0, 1], [0, 1, 1]]), "bias": np.array([0, 0, 2])}
    output = {"kernel": np.array([[1, 0], [0, 1], [1, 1]]), "bias": np.array([0, -1])}
    print(feed_forward({"hidden": hidden, "output": output}, np.array([[1, -2]])))


def show_encoder_layer() -> None:
    x_SD = np.array([[1, 3], [3, 1]])
    print(encoder_layer(plain_weights(), x_SD, np.ones((2, 2), bool), n_heads=1))


def show_decoder_layer() -> None:
    x_TD, memory_SD = np.array([[1, 3], [3, 1]]), np.array([[0, 8], [0, 0]])
    print(decoder_layer(plain_weights(), x_TD, memory_SD, causal_mask(2), np.ones((2, 2), bool), n_heads=1))


# --- §3.4 and §3.5 ------------------------------------------------------------------------------------------


def embed(table_VD: Array, ids_T: Array) -> Array:
    return table_VD[ids_T] * math.sqrt(table_VD.shape[1])


def logits(table_VD: Array, x_TD: Array) -> Array:
    """The same table once more: a token scores as well as its vector points where x does."""
    return x_TD @ table_VD.T


def positions(length: int, d_model: int) -> Array:
    """PE(pos, 2i) = sin(pos / 10000^(2i / D)), PE(pos, 2i + 1) = the cosine of the same."""
    table_TD = np.zeros((length, d_model))
    for i in range(d_model // 2):
        angles_T = np.arange(length) / 10_000 ** (2 * i / d_model)
        table_TD[:, 2 * i], table_TD[:, 2 * i + 1] = np.sin(angles_T), np.cos(angles_T)
    return table_TD


def show_embedding() -> None:
    table_VD = np.array([[1, 0, 0, 0], [0, 1, 0, 0], [0, 0.5, 0.5, 0]])
    x_TD = embed(table_VD, np.array([2]))
    print("embedding", x_TD[0], "logits", logits(table_VD, x_TD)[0])


def show_positions() -> None:
    print(positions(3, 4))


# --- §5.1 ---------------------------------------------------------------------------------------------------


def fewest_slots(lengths: Sequence[int], n_shapes: int) -> int:
    """Places that sentences take in batches of at most `n_shapes` lengths, each padded to the next of these lengths:
    the least of all choices, by trying every one."""
    steps = sorted(set(lengths))
    counts = [
        sum(min(shape for shape in (*shapes, steps[-1]) if shape >= length) for length in lengths)
        for shapes in itertools.combinations(steps[:-1], min(n_shapes, len(steps)) - 1)
    ]
    return min(counts)


def show_batches() -> None:
    lengths = [3, 9, 4, 8]
    print("tokens", sum(lengths), "slots by number of shapes", [fewest_slots(lengths, n) for n in (1, 2, 3, 4)])


# --- §5.3 ---------------------------------------------------------------------------------------------------


def paper_rate(step: int, d_model: int, warmup_steps: int) -> float:
    """Eq. 3. Steps count from 1."""
    return d_model**-0.5 * min(step**-0.5, step * warmup_steps**-1.5)


def adam(
    parameter: Array,
    gradients: Sequence[Array],
    rate: Callable[[int], float],
    beta1: float = 0.9,
    beta2: float = 0.98,
    epsilon: float = 1e-9,
) -> Array:
    """The parameter after one step for each gradient (Kingma & Ba 2015, Algorithm 1)."""
    mean, mean_square = np.zeros_like(parameter), np.zeros_like(parameter)
    for step, gradient in enumerate(gradients, start=1):
        mean = beta1 * mean + (1 - beta1) * gradient
        mean_square = beta2 * mean_square + (1 - beta2) * gradient**2
        # Both began at zero; divided by what they have seen so far, they are averages.
        unbiased, unbiased_square = mean / (1 - beta1**step), mean_square / (1 - beta2**step)
        parameter = parameter - rate(step) * unbiased / (np.sqrt(unbiased_square) + epsilon)
    return parameter


def show_rate() -> None:
    for step in (1, 4_000, 100_000):
        print(f"step {step:>7,}  rate {paper_rate(step, d_model=512, warmup_steps=4_000):.3e}")


def show_adam() -> None:
    parameter, gradients = np.array(1.0), [np.array(0.5), np.array(-0.1)]
    for n in (1, 2):
        print(f"after step {n}: {adam(parameter, gradients[:n], rate=lambda step: 0.1):.6f}")


# --- §5.4 ---------------------------------------------------------------------------------------------------


def dropout(x: Array, rate: float, kept: Array) -> Array:
    """What is not kept becomes 0; the rest is scaled up, so that the mean stays."""
    return np.where(kept, x / (1 - rate), 0)


def smoothed_targets(right: int, vocab_size: int, smoothing: float, reading: Literal["all", "others"]) -> Array:
    """What the model is to say at a token. "all" spreads the smoothing over the whole vocabulary, the right token
    included; "others" over the wrong ones only."""
    wrong = smoothing / vocab_size if reading == "all" else smoothing / (vocab_size - 1)
    targets_V = np.full(vocab_size, wrong)
    targets_V[right] = 1 - wrong * (vocab_size - 1)
    return targets_V


def smoothed_loss(logits_V: Array, targets_V: Array) -> float:
    """Cross-entropy with the smoothed targets, in nats."""
    return -float(targets_V @ np.log(softmax(logits_V)))


def lowest_loss(targets_V: Array) -> float:
    """The entropy of the targets: what the loss is where the model says exactly them."""
    return -float(targets_V @ np.log(targets_V))


def show_dropout() -> None:
    print(dropout(np.array([1.0, 2.0, 3.0, 4.0]), rate=0.5, kept=np.array([True, False, False, True])))


def show_label_smoothing() -> None:
    for reading in ("all", "others"):
        targets_V = smoothed_targets(right=0, vocab_size=5, smoothing=0.1, reading=reading)
        print(f"{reading:<7}", targets_V, f"lowest loss {lowest_loss(targets_V):.4f}")


def show_smoothed_loss() -> None:
    sure, calm = np.array([50.0, 0, 0, 0, 0]), np.log([0.92, 0.02, 0.02, 0.02, 0.02])
    for name, logits_V in (("sure", sure), ("calm", calm)):
        losses = [smoothed_loss(logits_V, smoothed_targets(0, 5, 0.1, reading)) for reading in ("all", "others")]
        print(f"{name}   all {losses[0]:.4f}   others {losses[1]:.4f}")


# --- §6.1 ---------------------------------------------------------------------------------------------------


def average(checkpoints: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """Every parameter's mean over the checkpoints."""
    return {name: np.mean([checkpoint[name] for checkpoint in checkpoints], axis=0) for name in checkpoints[0]}


Hypothesis = tuple[float, list[int]]
"""Sum of log-probabilities, tokens."""


def gnmt_score(total: float, length: int, alpha: float) -> float:
    """Wu et al. 2016, eq. 14, as the paper uses it."""
    return total / ((5 + length) / 6) ** alpha


def beam_search(
    next_log_probs: Callable[[list[int]], Array], end: int, beam_size: int, limit: int, alpha: float = 0.6
) -> tuple[float, list[int]]:
    """The best score and its tokens. `next_log_probs` tells how likely each token is after those given."""
    live: list[Hypothesis] = [(0.0, [])]
    done: list[Hypothesis] = []
    for length in range(1, limit + 1):
        grown = [
            (total + gain, [*tokens, token])
            for total, tokens in live
            for token, gain in enumerate(next_log_probs(tokens))
        ]
        grown = sorted(grown, key=lambda hypothesis: -hypothesis[0])[: 2 * beam_size]
        closed = [tokens[-1] == end or length == limit for _, tokens in grown]
        done += [hypothesis for hypothesis, is_closed in zip(grown[:beam_size], closed, strict=False) if is_closed]
        live = [hypothesis for hypothesis, is_closed in zip(grown, closed, strict=True) if not is_closed][:beam_size]
    scored = [(gnmt_score(total, len(tokens), alpha), tokens) for total, tokens in done]
    return max(scored, key=lambda found: found[0])


def show_average() -> None:
    print(average([{"bias": np.array([1.0, 2.0])}, {"bias": np.array([3.0, 6.0])}]))


def show_beam_search() -> None:
    # Token 0 ends. At first 1 is likelier than 2, but nobody knows what comes after 1, and 2 is nearly sure to end.
    after = {None: [0, 0.6, 0.4], 1: [0.4, 0.3, 0.3], 2: [0.9, 0.05, 0.05]}

    def next_log_probs(tokens: list[int]) -> Array:
        with np.errstate(divide="ignore"):
            return np.log(after[tokens[-1] if tokens else None])

    for beam_size in (1, 2):
        score, tokens = beam_search(next_log_probs, end=0, beam_size=beam_size, limit=2, alpha=0)
        print("beam", beam_size, "tokens", tokens, f"probability {math.exp(score):.2f}")
