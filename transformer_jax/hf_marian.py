"""The model folder: Hugging Face's layout of Marian models (config.json, model.safetensors).

A table says where each of our parameters stands there. PyTorch kernels are [out, in], ours [in, out]. The layout
knows one table of positions, sines then cosines; a model with the paper's interleaved ones is the same model with
its channels in another order, so its weights are permuted on the way out and back on the way in. What the layout
cannot say (pre-norm, learned positions, a start token with an embedding of its own) stands under the extra key
"transformer_jax" of config.json, which holds our own ModelConfig.

There the decoder starts from a row of the target table, Marian's zero vector being a row of zeros; with a tied
output that row would also give the token a logit of 0. So where our model starts from zero, the exported row is zero
and the token's bias forbids it; what the row and the bias are here is kept in the metadata of model.safetensors.
"""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from transformer_jax.config import ModelConfig
from transformer_jax.errors import UserError

Params = dict[str, Any]
OWN_KEY = "transformer_jax"
NEVER = -1e4
"""A logit that gives a token no probability, and that float16 can hold."""


class Entry(NamedTuple):
    """One parameter: its path in our tree, its name there, and how the two arrays relate."""

    path: tuple[str, ...]
    name: str
    transposed: bool = False
    width_axes: tuple[int, ...] = ()
    """Our axes that run over the model's channels: those that positions of another layout permute."""
    row: bool = False
    """A vector here, a matrix of one row there."""


def entries(config: ModelConfig) -> list[Entry]:
    """Where every parameter of a model of this shape stands."""
    return list(_entries(config))


def _entries(c: ModelConfig) -> Iterator[Entry]:
    target = "model.shared.weight" if c.shared_embedding else "model.decoder.embed_tokens.weight"
    yield Entry(("target_embedding", "table"), target, width_axes=(1,))
    if not c.shared_embedding:
        yield Entry(("source_embedding", "table"), "model.encoder.embed_tokens.weight", width_axes=(1,))
    if not c.tied_output:
        yield Entry(("output_embedding", "table"), "lm_head.weight", width_axes=(1,))
    if c.logits_bias:
        yield Entry(("logits_bias",), "final_logits_bias", row=True)
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


def start_entries(config: ModelConfig) -> list[Entry]:
    """Where the layout has a zero or NEVER in place of our values for the start token: its row, its output bias."""
    if config.start_embedding != "zero" or config.start_id >= config.vocab_size:
        return []
    replaced = [("target_embedding", "table"), *([("logits_bias",)] if config.tied_output else [])]
    return [entry for entry in entries(config) if entry.path in replaced]


def table_copies(config: ModelConfig) -> dict[str, str]:
    """Names under which a table may stand once more, each with the name that we read."""
    copies = {}
    target = entries(config)[0].name
    if config.shared_embedding:
        copies = {f"model.{side}.embed_tokens.weight": target for side in ("encoder", "decoder")}
    return copies | ({"lm_head.weight": target} if config.tied_output else {})


def channel_order(config: ModelConfig) -> np.ndarray | None:
    """Which of our channels comes n-th in the layout: sines first, then cosines. None: as they are."""
    if config.positions != "interleaved":
        return None
    return np.concatenate([np.arange(0, config.d_model, 2), np.arange(1, config.d_model, 2)])


def to_tensors(config: ModelConfig, params: Params) -> dict[str, np.ndarray]:
    """Our parameters under Hugging Face's names, float32."""
    order = channel_order(config)
    tensors = {}
    for entry in entries(config):
        array = np.asarray(_at(params, entry.path), np.float32)
        if order is not None:
            for axis in entry.width_axes:
                array = np.take(array, order, axis)
        array = array.T if entry.transposed else array
        tensors[entry.name] = np.ascontiguousarray(array[None] if entry.row else array)
    if not config.logits_bias:
        tensors["final_logits_bias"] = np.zeros((1, config.vocab_size), np.float32)
    if not config.attention_bias:
        for entry in entries(dataclasses.replace(config, attention_bias=True)):
            if entry.name not in tensors:
                tensors[entry.name] = np.zeros(config.d_model, np.float32)
    if start_entries(config):
        table, bias = entries(config)[0].name, "final_logits_bias"
        tensors[table], tensors[bias] = tensors[table].copy(), tensors[bias].copy()
        tensors[table][config.start_id] = 0.0
        if config.tied_output:
            tensors[bias][0, config.start_id] = NEVER
    if not config.tied_output:  # then transformers ties no tables at all, and wants each of them
        tensors |= {copy: tensors[name] for copy, name in table_copies(config).items()}
    return tensors


def from_tensors(config: ModelConfig, tensors: dict[str, np.ndarray], shapes: Params) -> Params:
    """The inverse of `to_tensors`. `shapes` is a tree of our parameters' shapes, against which all is checked."""
    order = channel_order(config)
    inverse = None if order is None else np.argsort(order)
    params: Params = {}
    for copy, name in table_copies(config).items():
        if copy in tensors and name in tensors and not np.array_equal(tensors[copy], tensors[name]):
            raise UserError(f"Tensors {copy} and {name} should be one table, but differ; the file is not this model.")
    for entry in entries(config):
        if entry.name not in tensors:
            raise UserError(f"The weights hold no tensor {entry.name}; the file is not this model, or damaged.")
        array = np.asarray(tensors[entry.name], np.float32)
        if entry.row and array.ndim == 2 and len(array) == 1:
            array = array[0]
        array = array.T if entry.transposed else array
        expected = tuple(_at(shapes, entry.path).shape)
        if array.shape != expected:
            raise UserError(
                f"Tensor {entry.name} has shape {list(array.shape)}, but the configuration says {list(expected)}."
            )
        if inverse is not None:
            for axis in entry.width_axes:
                array = np.take(array, inverse, axis)
        _put(params, entry.path, np.ascontiguousarray(array))
    return params


def config_json(config: ModelConfig) -> dict[str, Any]:
    """config.json of the model folder."""
    return {
        "architectures": ["MarianMTModel"],
        "model_type": "marian",
        "activation_function": config.activation,
        "activation_dropout": config.feed_forward_dropout,
        "attention_dropout": config.attention_dropout,
        "bos_token_id": config.start_id,
        "d_model": config.d_model,
        "decoder_attention_heads": config.n_heads,
        "decoder_ffn_dim": config.d_ff,
        "decoder_layers": config.n_decoder_layers,
        "decoder_start_token_id": config.start_id,
        "decoder_vocab_size": config.vocab_size,
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
        "pad_token_id": config.pad_id,
        "scale_embedding": config.scale_embedding,
        "share_encoder_decoder_embeddings": config.shared_embedding,
        "static_position_embeddings": config.positions != "learned",
        "tie_word_embeddings": config.tied_output,
        "torch_dtype": "float32",
        "vocab_size": config.source_vocab_size or config.vocab_size,
        OWN_KEY: dataclasses.asdict(config),
    }


def generation_config_json(config: ModelConfig) -> dict[str, Any]:
    return {
        "bad_words_ids": [[i] for i in sorted({config.pad_id, config.start_id} - {config.end_id})],
        "bos_token_id": config.start_id,
        "decoder_start_token_id": config.start_id,
        "eos_token_id": config.end_id,
        "pad_token_id": config.pad_id,
        "max_length": config.max_length,
        "num_beams": 4,
    }


def save_model(folder: Path, config: ModelConfig, params: Params) -> None:
    """Writes config.json, generation_config.json and model.safetensors; each file appears whole or not at all."""
    from safetensors.numpy import save

    folder.mkdir(parents=True, exist_ok=True)
    metadata = {"format": "pt"}
    for entry in start_entries(config):
        values = np.asarray(_at(params, entry.path), np.float32)[config.start_id]
        metadata[_start_key(entry)] = base64.b64encode(values.tobytes()).decode()
    files = {
        "model.safetensors": save(to_tensors(config, params), metadata),
        "config.json": _json(config_json(config)),
        "generation_config.json": _json(generation_config_json(config)),
    }
    for name, content in files.items():
        part = folder / f".{name}.part"
        part.write_bytes(content)
        part.replace(folder / name)


def load_model(folder: Path) -> tuple[ModelConfig, Params]:
    """Reads a model folder that `save_model` wrote."""
    import jax
    import jax.numpy as jnp
    from safetensors import SafetensorError, safe_open

    from transformer_jax.model import Transformer

    for name in ("config.json", "model.safetensors"):
        if not (folder / name).is_file():
            raise UserError(f"{folder} holds no {name}; name a model folder or a run folder.")
    try:
        described = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{folder / 'config.json'} is not valid JSON ({error}).") from error
    if not isinstance(described, dict) or not isinstance(described.get(OWN_KEY), dict):
        raise UserError(
            f"{folder / 'config.json'} was not written by transformer_jax (it has no key {OWN_KEY}); "
            "models of other origin are not read yet."
        )
    known = {f.name for f in dataclasses.fields(ModelConfig)}
    unknown = sorted(set(described[OWN_KEY]) - known)
    if unknown:
        raise UserError(f"{folder / 'config.json'} has settings that this version does not know: {', '.join(unknown)}.")
    try:
        config = ModelConfig(**described[OWN_KEY])
    except (TypeError, UserError) as error:
        raise UserError(f"{folder / 'config.json'} does not describe a model: {error}") from error
    try:
        with safe_open(folder / "model.safetensors", framework="numpy") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
            metadata = file.metadata() or {}
    except SafetensorError as error:
        raise UserError(f"{folder / 'model.safetensors'} cannot be read ({error}); copy it again.") from error
    ids = jnp.ones((1, 1), jnp.int32)
    shapes = jax.eval_shape(Transformer(config).init, jax.random.key(0), ids, ids)["params"]
    params = from_tensors(config, tensors, shapes)
    for entry in start_entries(config):
        if _start_key(entry) in metadata:  # not where another program has written the file
            values = np.frombuffer(base64.b64decode(metadata[_start_key(entry)]), np.float32)
            _at(params, entry.path)[config.start_id] = values if values.size > 1 else values[0]
    return config, params


def _start_key(entry: Entry) -> str:
    return f"{OWN_KEY}.start.{'.'.join(entry.path)}"


def _json(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


def _at(tree: Params, path: tuple[str, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _put(tree: Params, path: tuple[str, ...], value: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value
