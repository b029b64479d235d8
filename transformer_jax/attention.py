"""§3.2: scaled dot-product attention, multi-head attention, and the masks.

The mathematics stands in plain functions; `MultiHeadAttention` holds the parameters. Training, cached decoding and
packed batches all come through here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_jax.array_types import Array, Bool, Float, Int
from transformer_jax.config import ModelConfig
from transformer_jax.errors import UserError
from transformer_jax.products import product

MASKED_SCORE = -1e9
"""The score of a place that may not be looked at: finite, so that a row without any such place gives no NaN."""
ATTENTION_WEIGHTS = "attention_weights"
"""The collection in which `apply` returns the attention weights to a caller that asks for it."""


def causal_mask(length: int) -> Bool[Array, "T T"]:
    """§3.2.3: position t may look at positions up to and including t. True = may look."""
    return jnp.tril(jnp.ones((length, length), dtype=bool))


def padding_mask(ids: Int[Array, "*B S"], pad_id: int) -> Bool[Array, "*B S"]:
    """True where there is a token, False on padding."""
    return ids != pad_id


def segment_mask(
    query_segments: Int[Array, "B T"], key_segments: Int[Array, "B S"], *, causal: bool = False
) -> Bool[Array, "B 1 T S"]:
    """Who may look at whom: same segment, and not padding (segment 0); with `causal`, not ahead either.

    A row may hold several sentences one after another, numbered 1, 2, ... : none sees its neighbours.
    """
    mask = (query_segments[:, :, None] == key_segments[:, None, :]) & (key_segments[:, None, :] != 0)
    if causal:
        mask &= causal_mask(query_segments.shape[1])
    return mask[:, None]


def linear(weights: Mapping[str, Array], x: Float[Array, "*B i"]) -> Float[Array, "*B o"]:
    """x W + b in x's dtype. Every projection of the model is applied here; kernels are [in, out]."""
    y = product(x, weights["kernel"].astype(x.dtype))
    return y + weights["bias"].astype(x.dtype) if "bias" in weights else y


def init_linear(key: Array, n_in: int, n_out: int, use_bias: bool = True, gain: float = 1.0) -> dict[str, Array]:
    """Glorot-uniform kernel times `gain`, zero bias."""
    init = nn.initializers.variance_scaling(gain**2, "fan_avg", "uniform")
    weights = {"kernel": init(key, (n_in, n_out), jnp.float32)}
    return weights | {"bias": jnp.zeros((n_out,))} if use_bias else weights


def declare(module: nn.Module, name: str, init: Callable[..., Any], *args: Any) -> Any:
    """A parameter (array or dict of arrays) of `module`: drawn at init, afterwards what `apply` was given.

    Unlike `module.param` it does not insist on the initial shapes, so that a tree made ready for decoding runs too.
    """
    if module.is_initializing():
        return module.param(name, init, *args)
    if not module.has_variable("params", name):
        raise UserError(f"The parameters hold no {'/'.join((*module.path, name))}; they are not those of this model.")
    return module.get_variable("params", name)


def attention_weights(
    queries_BHTK: Float[Array, "B H T K"], keys_BHSK: Float[Array, "B H S K"], mask: Bool[Array, "#B #H #T S"]
) -> Float[Array, "B H T S"]:
    """softmax(Q K^T / sqrt(K)) of Eq. 1, in float32; places that the mask forbids weigh exactly 0.

    Where it forbids all of a row (a query of padding), the row is uniform: meaningless, but finite.
    """
    scale = queries_BHTK.shape[-1] ** -0.5
    scores_BHTS = jnp.einsum("BHTK,BHSK->BHTS", queries_BHTK * scale, keys_BHSK, preferred_element_type=jnp.float32)
    return jax.nn.softmax(jnp.where(mask, scores_BHTS, MASKED_SCORE), axis=-1)


def dot_product_attention(
    queries_BHTK: Float[Array, "B H T K"],
    keys_BHSK: Float[Array, "B H S K"],
    values_BHSK: Float[Array, "B H S K"],
    mask: Bool[Array, "#B #H #T S"],
    *,
    drop: Callable[[Array], Array] | None = None,
) -> Float[Array, "B H T K"]:
    """Eq. 1: softmax(Q K^T / sqrt(K)) V. `drop` is applied to the weights (attention dropout).

    On a CUDA device, 16-bit inputs go through cuDNN's fused kernel, which never writes the weights to memory.
    """
    if drop is None and _cudnn_can_run(queries_BHTK, keys_BHSK):
        heads_inside = [jnp.swapaxes(x, 1, 2) for x in (queries_BHTK, keys_BHSK, values_BHSK)]
        output_BTHK = jax.nn.dot_product_attention(*heads_inside, mask=mask, implementation="cudnn")
        return jnp.swapaxes(output_BTHK, 1, 2)
    weights_BHTS = attention_weights(queries_BHTK, keys_BHSK, mask)
    if drop is not None:
        weights_BHTS = drop(weights_BHTS)
    return jnp.einsum("BHTS,BHSK->BHTK", weights_BHTS.astype(values_BHSK.dtype), values_BHSK)


def _cudnn_can_run(queries_BHTK: Array, keys_BHSK: Array) -> bool:
    """cuDNN's kernel takes 16-bit floats, heads of up to 128 in steps of 8, and lengths in steps of 2."""
    length, d_head = queries_BHTK.shape[-2:]
    return (
        jax.default_backend() == "gpu"
        and queries_BHTK.dtype in (jnp.bfloat16, jnp.float16)
        and d_head % 8 == 0
        and d_head <= 128
        and length > 1
        and length % 2 == 0
        and keys_BHSK.shape[-2] % 2 == 0
    )


def split_heads(x_BTD: Float[Array, "B T D"], n_heads: int) -> Float[Array, "B H T K"]:
    B, T, D = x_BTD.shape
    return jnp.swapaxes(x_BTD.reshape(B, T, n_heads, D // n_heads), 1, 2)


def merge_heads(x_BHTK: Float[Array, "B H T K"]) -> Float[Array, "B T D"]:
    B, H, T, K = x_BHTK.shape
    return jnp.swapaxes(x_BHTK, 1, 2).reshape(B, T, H * K)


class MultiHeadAttention(nn.Module):
    """§3.2.2: H attentions side by side, each on its own projection of the input to D / H dimensions.

    Keys and values are made by `keys_values` and given to the call, so that one module serves self-attention (the
    keys of x itself), attention to the encoder, and decoding with keys kept from earlier steps.
    """

    config: ModelConfig

    def setup(self) -> None:
        D, bias, gain = self.config.d_model, self.config.attention_bias, self.config.attention_init_gain
        self.query = declare(self, "query", init_linear, D, D, bias, gain)
        self.key = declare(self, "key", init_linear, D, D, bias, gain)
        self.value = declare(self, "value", init_linear, D, D, bias, gain)
        self.output = declare(self, "output", init_linear, D, D, bias)

    def keys_values(self, memory_BSD: Float[Array, "B S D"]) -> tuple[Float[Array, "B H S K"], Float[Array, "B H S K"]]:
        """What there is to look at, projected: K W^K and V W^V, split into heads."""
        H = self.config.n_heads
        return split_heads(linear(self.key, memory_BSD), H), split_heads(linear(self.value, memory_BSD), H)

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        keys_BHSK: Float[Array, "B H S K"],
        values_BHSK: Float[Array, "B H S K"],
        mask: Bool[Array, "#B #H #T S"],
        *,
        drop: Callable[[Array], Array] | None = None,
    ) -> Float[Array, "B T D"]:
        """Concat(head_1, ..., head_H) W^O with queries from x; `drop` is applied to the attention weights.

        A caller of `apply` that says mutable=[ATTENTION_WEIGHTS] gets the weights back beside the result.
        """
        queries_BHTK = split_heads(linear(self.query, x_BTD), self.config.n_heads)
        if self.is_mutable_collection(ATTENTION_WEIGHTS) and not self.is_initializing():
            self.sow(ATTENTION_WEIGHTS, "BHTS", attention_weights(queries_BHTK, keys_BHSK, mask))
        heads_BHTK = dot_product_attention(queries_BHTK, keys_BHSK, values_BHSK, mask, drop=drop)
        return linear(self.output, merge_heads(heads_BHTK))
