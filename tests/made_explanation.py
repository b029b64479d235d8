"""An explanation that no model made: any tokens, weights drawn at random or given."""

from __future__ import annotations

import numpy as np

from transformer_jax.alignment import words_of
from transformer_jax.attention_maps import AttentionMaps
from transformer_jax.explain import Explanation, labels


def random_weights(rng: np.random.Generator, *shape: int, causal: bool = False) -> np.ndarray:
    """Rows that sum to 1, uneven enough that no two weights are alike."""
    scores = 2.0 * rng.normal(size=shape)
    if causal:
        scores = np.where(np.tri(shape[-1], dtype=bool), scores, -np.inf)
    exponentials = np.exp(scores)
    return (exponentials / exponentials.sum(axis=-1, keepdims=True)).astype(np.float32)


def made(
    source: list[str], target: list[str], *, layers: tuple[int, int] = (2, 3), heads: int = 2, seed: int = 0
) -> Explanation:
    """Of pieces, the end token not among them. `layers`: of the encoder and of the decoder."""
    rng = np.random.default_rng(seed)
    source, target = [*source, "</s>"], [*target, "</s>"]
    S, T = len(source), len(target)
    return Explanation(
        source=" ".join(word.text for word in words_of(source)),
        target=" ".join(word.text for word in words_of(target)),
        given=False,
        source_tokens=labels(source),
        target_tokens=labels(target),
        token_log_probs=tuple(float(x) for x in -rng.random(T)),
        maps=AttentionMaps(
            encoder_NHSS=random_weights(rng, layers[0], heads, S, S),
            decoder_NHTT=random_weights(rng, layers[1], heads, T, T, causal=True),
            cross_NHTS=random_weights(rng, layers[1], heads, T, S),
        ),
        source_words=tuple(words_of(source)),
        target_words=tuple(words_of(target)),
    )
