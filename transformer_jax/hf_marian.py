"""Hugging Face's layout of Marian models: names of tensors, config.json, generation_config.json.

A table says where each of our parameters stands there. PyTorch kernels are [out, in], ours [in, out]. The layout
knows one table of positions, sines then cosines; a model with the paper's interleaved ones is the same model with
its channels in another order, so its weights are permuted on the way out and back on the way in. Biases that the paper
does not have are written as zeros.

What the layout cannot say (pre-norm, learned positions, native Marian's positions) stands under the extra key
"transformer_jax" of config.json, which holds our own ModelConfig; `obstacles` lists what of it transformers would not
honour.

The start. Marian's decoder starts from a zero vector and has no entry for it; the layout starts from the row of a
token, `<pad>`, which it adds at the end of the table: a row of zeros. Its logit, 0, then takes part in the softmax.
A model of ours that starts from zero is written with that row, and with a bias that forbids the token, so that
probabilities stay as they are. CTranslate2 drops the row and starts from zero by itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from transformer_jax.config import ModelConfig, model_from_json
from transformer_jax.errors import UserError
from transformer_jax.layers import sinusoids
from transformer_jax.weight_table import Account, Entry, Params, parameter_shapes, read_entries, write_entries

OWN_KEY = "transformer_jax"
NEVER = -1e4
"""A logit that gives a token no probability, and that float16 can hold."""

ACTIVATIONS = {"relu": "relu", "swish": "swish", "silu": "swish", "gelu": "gelu"}
"""transformers' names of the activations that this model has."""

SIZES = ("encoder_attention_heads", "encoder_ffn_dim", "d_model", "encoder_layers", "decoder_layers")
SWITCHES = {
    "normalize_before": False,
    "normalize_embedding": False,
    "add_final_layer_norm": False,
    "static_position_embeddings": True,
    "tie_encoder_decoder": False,
    "is_decoder": False,
}
"""Settings of config.json, some of them of 2020, that change the model: the only value that MarianMTModel honours."""


# --- the table ----------------------------------------------------------------------------------------------


def entries(config: ModelConfig) -> list[Entry]:
    """Where every parameter of a model of this shape stands."""
    return list(_entries(config))


def _entries(c: ModelConfig) -> Iterator[Entry]:
    shared, source, target, output = (
        "model.shared.weight",
        "model.encoder.embed_tokens.weight",
        "model.decoder.embed_tokens.weight",
        "lm_head.weight",
    )
    names = ([shared, source] if c.shared_embedding else []) + [target] + ([output] if c.tied_output else [])
    yield Entry(("target_embedding", "table"), names[0], width_axes=(1,), aliases=tuple(names[1:]))
    if not c.shared_embedding:
        yield Entry(("source_embedding", "table"), source, width_axes=(1,))
    if not c.tied_output:
        yield Entry(("output_embedding", "table"), output, width_axes=(1,))
    if c.logits_bias:
        yield Entry(("logits_bias",), "final_logits_bias", row=True, zeros=True)
    for side, n_layers in (("encoder", c.n_encoder_layers), ("decoder", c.n_decoder_layers)):
        if c.positions == "learned":
            yield Entry((side, "positions", "table"), f"model.{side}.embed_positions.weight", width_axes=(1,))
        for n in range(n_layers):
            yield from _layer_entries(c, side, n)
        if c.norm == "pre":
            yield from _norm_entries((side, "norm"), f"model.{side}.layer_norm")


def _layer_entries(c: ModelConfig, side: str, n: int) -> Iterator[Entry]:
    here, there = (side, f"layer_{n}"), f"model.{side}.layers.{n}"
    blocks = [("self_attention", "self_attn", "self_attn_layer_norm")]
    if side == "decoder":
        blocks.append(("cross_attention", "encoder_attn", "encoder_attn_layer_norm"))
    for ours, theirs, norm in blocks:
        for projection in ("query", "key", "value", "output"):
            name = f"{there}.{theirs}." + {"query": "q", "key": "k", "value": "v", "output": "out"}[projection]
            into_width = projection == "output"
            yield from _linear_entries(
                (*here, ours, projection), f"{name}_proj", into_width=into_width, bias=c.attention_bias
            )
        yield from _norm_entries((*here, f"{ours}_norm"), f"{there}.{norm}")
    for projection, name in (("hidden", "fc1"), ("output", "fc2")):
        into_width = projection == "output"
        yield from _linear_entries(
            (*here, "feed_forward", projection), f"{there}.{name}", into_width=into_width, bias=True
        )
    yield from _norm_entries((*here, "feed_forward_norm"), f"{there}.final_layer_norm")


def _linear_entries(path: tuple[str, ...], name: str, *, into_width: bool, bias: bool) -> Iterator[Entry]:
    """A projection out of the model's width, or into it."""
    yield Entry((*path, "kernel"), f"{name}.weight", transposed=True, width_axes=(1 if into_width else 0,))
    if bias:
        yield Entry((*path, "bias"), f"{name}.bias", width_axes=(0,) if into_width else ())


def _norm_entries(path: tuple[str, ...], name: str) -> Iterator[Entry]:
    yield Entry((*path, "scale"), f"{name}.weight", width_axes=(0,))
    yield Entry((*path, "bias"), f"{name}.bias", width_axes=(0,))


def channel_order(config: ModelConfig) -> np.ndarray | None:
    """Which of our channels comes n-th in the layout: sines first, then cosines. None: as they are."""
    if config.positions != "interleaved":
        return None
    return np.concatenate([np.arange(0, config.d_model, 2), np.arange(1, config.d_model, 2)])


def starts_beyond(config: ModelConfig) -> bool:
    """Whether the decoder starts from zero by an id that has no row, as native Marian models do."""
    return config.start_embedding == "zero" and config.start_id == config.vocab_size


# --- tensors ------------------------------------------------------------------------------------------------


def to_tensors(config: ModelConfig, params: Params) -> dict[str, np.ndarray]:
    """Our parameters under Hugging Face's names, float32."""
    tensors = write_entries(entries(config), params, channel_order(config))
    if not config.logits_bias:
        tensors["final_logits_bias"] = np.zeros((1, config.vocab_size), np.float32)
    if not config.attention_bias:
        for entry in entries(dataclasses.replace(config, attention_bias=True)):
            if entry.name not in tensors:
                tensors[entry.name] = np.zeros(config.d_model, np.float32)
    if starts_beyond(config):
        tables = [
            entry.name for entry in entries(config) if entry.path[-2:-1] and entry.path[-2].endswith("_embedding")
        ]
        for name in tables:
            tensors[name] = np.pad(tensors[name], ((0, 1), (0, 0)))
        tensors["final_logits_bias"] = np.pad(tensors["final_logits_bias"], ((0, 0), (0, 1)), constant_values=NEVER)
    if not config.tied_output:  # then transformers ties no tables at all, and wants each of them
        table = entries(config)[0]
        tensors |= dict.fromkeys(table.aliases, tensors[table.name])
    return tensors


def from_tensors(config: ModelConfig, tensors: dict[str, np.ndarray]) -> tuple[Params, Account]:
    """The inverse of `to_tensors`, with an account of what became of every tensor."""
    explained = {}
    for side in ("encoder", "decoder"):
        name = f"model.{side}.embed_positions.weight"
        if config.positions != "learned" and name in tensors:
            _check_positions(name, tensors[name])
            explained[name] = "position tables, computed here"
    if not config.logits_bias and "final_logits_bias" in tensors:
        if np.asarray(tensors["final_logits_bias"]).reshape(-1)[: config.vocab_size].any():
            raise UserError("Tensor final_logits_bias is not zero, but the configuration says logits_bias false.")
        explained["final_logits_bias"] = "output bias of zeros"
    if not config.attention_bias:
        without = {entry.name for entry in entries(config)}
        for entry in entries(dataclasses.replace(config, attention_bias=True)):
            if entry.name not in without and entry.name in tensors:
                if np.asarray(tensors[entry.name]).any():
                    raise UserError(
                        f"Tensor {entry.name} is not zero, but the configuration says attention_bias false."
                    )
                explained[entry.name] = "attention biases of zeros"
    if starts_beyond(config):
        tensors = _without_start_row(config, tensors)
    return read_entries(entries(config), tensors, parameter_shapes(config), explained, channel_order(config))


def _without_start_row(config: ModelConfig, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors without the row and the bias that `to_tensors` added for the start token."""
    tensors = dict(tensors)
    for entry in entries(config):
        for name in (entry.name, *entry.aliases):
            if name not in tensors:
                continue
            if entry.path[0].endswith("_embedding"):
                tensors[name] = tensors[name][:-1]
            elif entry.path == ("logits_bias",):
                tensors[name] = tensors[name][..., :-1]
    return tensors


def _check_positions(name: str, table: np.ndarray) -> None:
    expected = None
    if table.ndim == 2 and table.shape[1] % 2 == 0:
        expected = sinusoids(table.shape[0], table.shape[1], "sin_then_cos")
    if expected is None or not np.allclose(table.astype(np.float32), expected, atol=1e-3):
        raise UserError(f"Tensor {name} is not the table of sinusoids; learned positions are not Marian's.")


# --- config.json --------------------------------------------------------------------------------------------


def obstacles(config: ModelConfig) -> list[str]:
    """What transformers' MarianMTModel would not honour of this model; empty: it computes the same."""
    found = []
    if config.norm != "post":
        found.append("norm pre (MarianMTModel is post-norm)")
    if config.positions in ("learned", "marian"):
        found.append(f"positions {config.positions} (MarianMTModel has sin_then_cos)")
    if config.norm_epsilon != 1e-5:
        found.append(f"norm_epsilon {config.norm_epsilon:g} (MarianMTModel has 1e-05)")
    if config.start_embedding == "zero" and not starts_beyond(config):
        found.append("start_embedding zero with a row for the start token (MarianMTModel starts from the row)")
    return found


def config_json(config: ModelConfig) -> dict[str, Any]:
    """config.json of the model folder."""
    rows = 1 if starts_beyond(config) else 0
    pad_ids = [config.pad_id] if config.source_pad_id is None else [config.pad_id, config.source_pad_id]
    return {
        "architectures": ["MarianMTModel"],
        "model_type": "marian",
        "activation_function": config.activation,
        "activation_dropout": config.feed_forward_dropout,
        "attention_dropout": config.attention_dropout,
        "bos_token_id": config.start_id,
        "d_model": config.d_model,
        "decoder_attention_heads": config.n_heads,
        "decoder_ffn_dim": config.decoder_d_ff or config.d_ff,
        "decoder_layers": config.n_decoder_layers,
        "decoder_start_token_id": config.start_id,
        "decoder_vocab_size": config.vocab_size + rows,
        "dropout": config.dropout,
        "encoder_attention_heads": config.n_heads,
        "encoder_ffn_dim": config.d_ff,
        "encoder_layers": config.n_encoder_layers,
        "eos_token_id": config.end_id,
        "forced_eos_token_id": None,
        "init_std": config.d_model**-0.5,
        "is_encoder_decoder": True,
        "max_position_embeddings": config.max_length,
        "normalize_before": config.norm == "pre",
        "normalize_embedding": False,
        "num_hidden_layers": config.n_encoder_layers,
        # There is one id for both sides, a row of both tables. transformers uses it where it makes padding by itself.
        "pad_token_id": min(pad_ids),
        "scale_embedding": config.scale_embedding,
        "share_encoder_decoder_embeddings": config.shared_embedding,
        "static_position_embeddings": config.positions != "learned",
        "tie_word_embeddings": config.tied_output,
        "torch_dtype": "float32",
        "vocab_size": (config.source_vocab_size or config.vocab_size) + rows,
        OWN_KEY: dataclasses.asdict(config),
    }


def config_from_json(described: dict[str, Any], path: Path) -> ModelConfig:
    """The model that a config.json describes: ours by our own key, any other by Hugging Face's."""
    own = described.get(OWN_KEY)
    try:
        return _config_of_marian(described) if own is None else model_from_json(own)
    except (TypeError, KeyError, ValueError, IndexError, OverflowError, UserError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else error
        raise UserError(f"{path} does not describe a model: {reason}") from error


def _config_of_marian(c: dict[str, Any]) -> ModelConfig:
    """A MarianConfig, with what transformers takes where a key is absent."""
    kind = c.get("model_type") or "none"
    if kind != "marian":
        raise UserError(f"its model_type is {kind}; only marian models are read.")
    for name, value in SWITCHES.items():
        if c.get(name, value) not in (value, None):
            raise UserError(f"{name} is {c[name]}, which MarianMTModel does not honour, and neither does this model.")
    if c.get("quantization_config"):
        raise UserError("it has a quantization_config; save the model without quantisation first.")
    for name in (*SIZES, "vocab_size"):
        if type(c[name]) is not int or not 0 < c[name] < 10**7:
            raise UserError(f"{name} is {c[name]!r}; it must be a whole number, and a size that can be.")
    for name in ("tie_word_embeddings", "share_encoder_decoder_embeddings", "scale_embedding"):
        if not isinstance(c.get(name, True), bool):
            raise UserError(f"{name} is {c[name]!r}; it must be true or false.")
    if c.get("decoder_attention_heads", c["encoder_attention_heads"]) != c["encoder_attention_heads"]:
        raise UserError(
            f"decoder_attention_heads is {c['decoder_attention_heads']} and encoder_attention_heads "
            f"{c['encoder_attention_heads']}; this model has the same number on both sides."
        )
    activation = c.get("activation_function", "gelu")
    if activation not in ACTIVATIONS:
        raise UserError(f"activation_function is {activation!r}; this model has {', '.join(ACTIVATIONS)}.")
    source_size = c["vocab_size"]
    target_size = c.get("decoder_vocab_size") or source_size
    shared = c.get("share_encoder_decoder_embeddings", True)
    decoder_d_ff = c.get("decoder_ffn_dim", c["encoder_ffn_dim"])
    pad_id, end_id = c.get("pad_token_id", 58100), c.get("eos_token_id", 0)
    return ModelConfig(
        vocab_size=source_size if shared else target_size,
        source_vocab_size=None if shared or source_size == target_size else source_size,
        d_model=c["d_model"],
        n_heads=c["encoder_attention_heads"],
        d_ff=c["encoder_ffn_dim"],
        decoder_d_ff=None if decoder_d_ff == c["encoder_ffn_dim"] else decoder_d_ff,
        n_encoder_layers=c["encoder_layers"],
        n_decoder_layers=c["decoder_layers"],
        dropout=c.get("dropout", 0.1),
        attention_dropout=c.get("attention_dropout", 0.0),
        feed_forward_dropout=c.get("activation_dropout", 0.0),
        positions="sin_then_cos",
        activation=ACTIVATIONS[activation],  # type: ignore[arg-type]
        logits_bias=True,
        shared_embedding=shared,
        tied_output=c.get("tie_word_embeddings", True),
        scale_embedding=c.get("scale_embedding", False),
        max_length=c.get("max_position_embeddings", 1024),
        pad_id=pad_id,
        start_id=c.get("decoder_start_token_id", pad_id),
        end_id=end_id[0] if isinstance(end_id, list) else end_id,
    )


def generation_config_json(config: ModelConfig, suppressed: tuple[int, ...] = ()) -> dict[str, Any]:
    """generation_config.json: ids that are never generated, and where generation starts and ends."""
    never = {config.pad_id, config.start_id, *suppressed} - {config.end_id}
    return {
        "bad_words_ids": [[i] for i in sorted(never)],
        "bos_token_id": config.start_id,
        "decoder_start_token_id": config.start_id,
        "eos_token_id": config.end_id,
        "pad_token_id": config.pad_id,
        "max_length": config.max_length,
        "num_beams": 4,
    }


def without_start_row(config: ModelConfig, params: Params) -> tuple[ModelConfig, Params]:
    """The model as Marian has it: no row for `<pad>`, the decoder starts from zero.

    Only for a model whose start token is the last entry and a row of zeros, as Hugging Face's converter makes it.
    The one number that changes is the softmax, in which `<pad>`, with its logit of 0, no longer takes part.
    """
    table = params["target_embedding"]["table"]
    last = config.vocab_size - 1
    if config.start_embedding != "token" or config.start_id != last or table[last].any():
        return config, params
    smaller = dict(params, target_embedding={"table": table[:last]})
    if config.logits_bias:
        smaller["logits_bias"] = params["logits_bias"][:last]
    if not config.tied_output:
        smaller["output_embedding"] = {"table": params["output_embedding"]["table"][:last]}
    changes: dict[str, Any] = {"vocab_size": last, "start_embedding": "zero"}
    if not config.shared_embedding:
        source_table = params["source_embedding"]["table"]
        smaller["source_embedding"] = {"table": source_table[:-1]}
        changes |= {"source_vocab_size": len(source_table) - 1}
        if len(source_table) != config.vocab_size:
            changes |= {"source_pad_id": len(source_table) - 1, "pad_id": last}
    return dataclasses.replace(config, **changes), smaller
