"""§3.3-3.5 and §5.4: feed-forward, embedding, positions, layer normalisation, dropout, add & norm."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.array_types import Array, Bool, Float, Int
from transformer_jax.attention import declare, init_linear, linear
from transformer_jax.config import ModelConfig, Positions
from transformer_jax.products import product

ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "relu": jax.nn.relu,
    "swish": jax.nn.swish,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
}


def sinusoids(length: int, d_model: int, layout: Positions) -> np.ndarray:
    """§3.5: the table of positional encodings, float32 (length, d_model), computed in float64.

    interleaved   sine and cosine of one timescale side by side (the paper)
    sin_then_cos  all sines, then all cosines (Hugging Face Marian)
    marian        the same, but with timescales spaced over d_model/2 - 1 (native Marian, tensor2tensor)
    """
    n_scales = d_model // 2
    spacing = n_scales - 1 if layout == "marian" else n_scales
    frequencies = 10_000.0 ** (-np.arange(n_scales) / spacing)
    angles = np.arange(length)[:, None] * frequencies
    sines, cosines = np.sin(angles), np.cos(angles)
    if layout == "interleaved":
        table = np.stack([sines, cosines], axis=-1).reshape(length, d_model)
    else:
        table = np.concatenate([sines, cosines], axis=-1)
    return table.astype(np.float32)


def layer_norm(weights: Mapping[str, Array], x: Float[Array, "*B D"], epsilon: float) -> Float[Array, "*B D"]:
    """Each vector to mean 0 and variance 1, then scale and bias; in float32, returned in x's dtype."""
    x32 = x.astype(jnp.float32)
    centred = x32 - x32.mean(axis=-1, keepdims=True)
    variance = jnp.square(centred).mean(axis=-1, keepdims=True)
    normal = centred * jax.lax.rsqrt(variance + epsilon)
    return (normal * weights["scale"] + weights["bias"]).astype(x.dtype)


def keep_mask(key: Array, keep_probability: float, shape: tuple[int, ...]) -> Bool[Array, ...]:
    """True with the given probability, independently per element: a hash of the element's index and the key.

    XLA fuses the hash into the multiplication that uses the mask and makes it again for the gradient, so that no
    random bits go through memory. See docs/performance.md for what this saves over jax.random.
    """
    index = jnp.zeros(shape, jnp.uint32)
    stride = 1
    for axis in reversed(range(len(shape))):
        index += jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(stride % 2**32)
        stride *= shape[axis]
    # A place's key is drawn by hashing already: its own two words serve, without another round of threefry.
    first, second = jax.random.key_data(key).reshape(-1)[:2]
    return _mix(_mix(index + first) ^ second) < jnp.uint32(round(keep_probability * 0xFFFFFFFF))


def _mix(x: Array) -> Array:
    """A 32-bit finaliser: every input bit changes each output bit with a probability near one half."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def dropout(x: Array, rate: float, key: Array | None) -> Array:
    """§5.4: zero a share of the elements, scale the others up. Without a key, or at rate 0, x itself."""
    if key is None or rate == 0.0:
        return x
    keep = 1.0 - rate
    return jnp.where(keep_mask(key, keep, x.shape), x / jnp.asarray(keep, x.dtype), jnp.zeros((), x.dtype))


def drop_words(x_BTD: Float[Array, "B T D"], rate: float, key: Array) -> Float[Array, "B T D"]:
    """Word dropout: whole vectors are zeroed, the others scaled up."""
    keep = 1.0 - rate
    kept_BT1 = keep_mask(key, keep, (*x_BTD.shape[:-1], 1))
    return jnp.where(kept_BT1, x_BTD / jnp.asarray(keep, x_BTD.dtype), jnp.zeros((), x_BTD.dtype))


def dropper(module: nn.Module, rate: float, deterministic: bool) -> Callable[[Array], Array]:
    """A function that drops at `rate`, each time by a fresh key of the module; the identity if deterministic."""
    if deterministic or rate == 0.0:
        return lambda x: x
    return lambda x: dropout(x, rate, module.make_rng("dropout"))


class LayerNorm(nn.Module):
    """Layer normalisation over the width, with scale and bias."""

    config: ModelConfig

    def setup(self) -> None:
        D = self.config.d_model
        self.scale = declare(self, "scale", lambda key: jnp.ones((D,)))
        self.bias = declare(self, "bias", lambda key: jnp.zeros((D,)))

    def __call__(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return layer_norm({"scale": self.scale, "bias": self.bias}, x_BTD, self.config.norm_epsilon)


class FeedForward(nn.Module):
    """§3.3, Eq. 2: activation(x W1 + b1) W2 + b2 at every position alike."""

    config: ModelConfig
    d_ff: int

    def setup(self) -> None:
        D, F = self.config.d_model, self.d_ff
        self.hidden = declare(self, "hidden", init_linear, D, F)
        self.output = declare(self, "output", init_linear, F, D)

    def __call__(self, x_BTD: Float[Array, "B T D"], *, deterministic: bool = True) -> Float[Array, "B T D"]:
        drop = dropper(self, self.config.feed_forward_dropout, deterministic)
        return linear(self.output, drop(ACTIVATIONS[self.config.activation](linear(self.hidden, x_BTD))))


class Embedding(nn.Module):
    """§3.4: a table of vectors, drawn with standard deviation D^-0.5 and multiplied by sqrt(D) on the way in.

    The same table, transposed, can be the output projection (`logits`).
    """

    config: ModelConfig
    n_tokens: int

    def setup(self) -> None:
        shape = (self.n_tokens, self.config.d_model)
        init = nn.initializers.normal(self.config.d_model**-0.5)
        self.table = declare(self, "table", init, shape, jnp.float32)

    def __call__(self, ids_BT: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        # Padding may have an id beyond the table; what it becomes is masked, but must be a number.
        x_BTD = jnp.take(self.table, ids_BT, axis=0, mode="clip")
        if self.config.scale_embedding:
            x_BTD *= math.sqrt(self.config.d_model)
        return x_BTD.astype(self.config.dtype)

    def logits(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """x E^T, float32."""
        return product(x_BTD, self.table.astype(x_BTD.dtype), jnp.float32, transposed=True)


class PositionalEncoding(nn.Module):
    """§3.5: adds to each token's embedding the vector of its position in its own sentence."""

    config: ModelConfig

    def setup(self) -> None:
        c = self.config
        if c.positions == "learned":
            init = nn.initializers.normal(c.d_model**-0.5)
            self.table = declare(self, "table", init, (c.max_length, c.d_model), jnp.float32)
        else:
            self.table = sinusoids(c.max_length, c.d_model, c.positions)

    def __call__(self, x_BTD: Float[Array, "B T D"], positions_BT: Int[Array, "#B T"]) -> Float[Array, "B T D"]:
        return x_BTD + jnp.asarray(self.table)[positions_BT].astype(x_BTD.dtype)


def residual(
    x_BTD: Float[Array, "B T D"],
    sublayer: Callable[[Array], Array],
    norm: LayerNorm,
    drop: Callable[[Array], Array],
) -> Float[Array, "B T D"]:
    """§3.1: the residual connection and layer normalisation around a sub-layer ("add & norm").

    Post-norm, LayerNorm(x + Dropout(Sublayer(x))), is the paper; pre-norm normalises what goes into the sub-layer.
    """
    if norm.config.norm == "post":
        return norm(x_BTD + drop(sublayer(x_BTD)))
    return x_BTD + drop(sublayer(norm(x_BTD)))
