"""Native Marian models: one .npz with the arrays and, in `special:model.yml`, the options of the architecture.

Kernels are [in, out] as ours, biases and layer norms [1, n]; layers count from 1. There is no start token: decoding
starts from a zero vector. Positions are Marian's own, layer norm's epsilon is 1e-6. The vocabulary has no padding: here
padding and start are the id one past the table.

The options decide, not the names of the arrays alone: a model that runs from right to left has the same arrays as any
other. What this model does not have is refused by the option's name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from transformer_jax.config import ModelConfig
from transformer_jax.errors import UserError
from transformer_jax.files import whole_file
from transformer_jax.model_folder import LoadedModel
from transformer_jax.weight_table import Entry, Params, parameter_shapes, read_entries, write_entries

OPTIONS_KEY = "special:model.yml"
EPSILON = 1e-6
MAX_LENGTH = 512
"""Rows of the position table of a model that was read; Marian computes positions without a limit."""
END_ID, UNKNOWN_ID = 0, 1
"""`</s>` and `<unk>` of every Marian vocabulary."""

Options = Mapping[str, Any]

REQUIRED: dict[str, tuple[str, ...]] = {
    "type": ("transformer",),
    "transformer-decoder-autoreg": ("self-attention",),
    "transformer-attention-mask": ("default",),
    "transformer-postprocess-emb": ("d", ""),
    "transformer-pool": ("false",),
    "transformer-no-projection": ("false",),
    "transformer-disable-position-embeddings": ("false",),
    "transformer-ffn-depth": ("2",),
    "transformer-decoder-ffn-depth": ("0", "2"),
    "transformer-ffn-activation": ("relu", "swish", "gelu"),
    "right-left": ("false",),
    "ulr": ("false",),
    "factors-dim-emb": ("0",),
    "lemma-dim-emb": ("0",),
}
"""Options with the values that this model has; what an old file leaves out has the first. Options that Marian itself
ignores for type transformer (transformer-no-bias, -no-affine, -train-position-embeddings) are ignored here too."""


# --- the table ----------------------------------------------------------------------------------------------


def entries(config: ModelConfig) -> list[Entry]:
    """Where every parameter of a model of this shape stands."""
    return list(_entries(config))


def _entries(c: ModelConfig) -> Iterator[Entry]:
    target = "Wemb" if c.shared_embedding else "decoder_Wemb"
    yield Entry(("target_embedding", "table"), target)
    if not c.shared_embedding:
        yield Entry(("source_embedding", "table"), "encoder_Wemb")
    if not c.tied_output:
        yield Entry(("output_embedding", "table"), "decoder_ff_logit_out_Wt")
    if c.logits_bias:
        yield Entry(("logits_bias",), "decoder_ff_logit_out_b", row=True)
    suffix = "_pre" if c.norm == "pre" else ""
    for side, n_layers in (("encoder", c.n_encoder_layers), ("decoder", c.n_decoder_layers)):
        for n in range(n_layers):
            yield from _layer_entries(side, n, suffix)
        if c.norm == "pre":
            yield from _norm_entries((side, "norm"), f"{side}_top_ln", "")


def _layer_entries(side: str, n: int, suffix: str) -> Iterator[Entry]:
    here, there = (side, f"layer_{n}"), f"{side}_l{n + 1}"
    blocks = [("self_attention", "self")] + ([("cross_attention", "context")] if side == "decoder" else [])
    for ours, theirs in blocks:
        for projection in ("query", "key", "value", "output"):
            yield from _linear_entries((*here, ours, projection), f"{there}_{theirs}", projection[0])
        yield from _norm_entries((*here, f"{ours}_norm"), f"{there}_{theirs}_Wo_ln", suffix)
    for number, projection in (("1", "hidden"), ("2", "output")):
        yield from _linear_entries((*here, "feed_forward", projection), f"{there}_ffn", number)
    yield from _norm_entries((*here, "feed_forward_norm"), f"{there}_ffn_ffn_ln", suffix)


def _linear_entries(path: tuple[str, ...], scope: str, letter: str) -> Iterator[Entry]:
    yield Entry((*path, "kernel"), f"{scope}_W{letter}")
    yield Entry((*path, "bias"), f"{scope}_b{letter}", row=True)


def _norm_entries(path: tuple[str, ...], name: str, suffix: str) -> Iterator[Entry]:
    yield Entry((*path, "scale"), f"{name}_scale{suffix}", row=True)
    yield Entry((*path, "bias"), f"{name}_bias{suffix}", row=True)


# --- reading ------------------------------------------------------------------------------------------------


def load_npz(path: Path) -> LoadedModel:
    """The model in a Marian .npz, float16 or float32."""
    arrays = _read_arrays(path)
    try:
        options = parse_options(arrays.pop(OPTIONS_KEY, None))
        config = config_from_options(options, arrays)
        params, account = read_entries(
            entries(config), _untie_layers(options, arrays), parameter_shapes(config), explained={}
        )
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    return LoadedModel(config, params, account, suppressed=(UNKNOWN_ID,))


def _read_arrays(path: Path) -> dict[str, np.ndarray]:
    if path.suffix == ".bin":
        raise UserError(f"{path} is a Marian binary model; give the .npz that it was made from.")
    try:
        file = np.load(path, allow_pickle=False)
        if not isinstance(file, np.lib.npyio.NpzFile):
            raise ValueError("it is a single array")
        with file:
            arrays = {name: file[name] for name in file.files}
    except FileNotFoundError as error:
        raise UserError(f"There is no file {path}.") from error
    except Exception as error:  # a damaged file can make zipfile and numpy raise anything
        reason = " ".join(str(error).split())
        raise UserError(f"{path} is not a complete .npz file ({reason}); copy it again.") from error
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):  # numpy hands on the bytes of what is no array
            raise UserError(f"{path} is not a complete .npz file ({name} is no array); copy it again.")
    return arrays


def parse_options(text: np.ndarray | None) -> Options:
    """The options of the architecture, every plain value as the string that it was written as."""
    import yaml

    if text is None:
        raise UserError(f"it holds no {OPTIONS_KEY}; a .npz without its options is no Marian model.")
    try:
        # The text ends in NULs, one or many, which YAML does not allow.
        options = yaml.load(text.astype(np.uint8).tobytes().replace(b"\0", b"").decode("utf-8"), yaml.BaseLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"its {OPTIONS_KEY} is not YAML ({' '.join(str(error).split())[:100]}).") from error
    if not isinstance(options, dict):
        raise UserError(f"its {OPTIONS_KEY} holds no options.")
    return options


def config_from_options(options: Options, arrays: Mapping[str, np.ndarray]) -> ModelConfig:
    """The model that the options describe; an option with a value that this model does not have is named."""
    for name, values in REQUIRED.items():
        value = str(options.get(name, values[0]))
        if value not in values:
            raise UserError(f"it was trained with {name}: {value}, which this model does not have ({_have(values)}).")
    if options.get("input-types"):
        raise UserError(f"it was trained with input-types: {options['input-types']}; this model reads one text.")
    shared = _is_true(options, "tied-embeddings-all") or _is_true(options, "tied-embeddings-src")
    tied = _is_true(options, "tied-embeddings-all") or _is_true(options, "tied-embeddings")
    sizes = _vocabulary_sizes(options, arrays, shared)
    tied_layers = _tied_layers(options)
    d_ff = _number(options, "transformer-dim-ffn")
    decoder_d_ff = _number(options, "transformer-decoder-dim-ffn", d_ff) or d_ff
    return ModelConfig(
        vocab_size=sizes[1],
        source_vocab_size=None if shared or sizes[0] == sizes[1] else sizes[0],
        d_model=_number(options, "dim-emb"),
        n_heads=_number(options, "transformer-heads"),
        d_ff=d_ff,
        decoder_d_ff=None if decoder_d_ff == d_ff else decoder_d_ff,
        n_encoder_layers=_number(options, "enc-depth"),
        n_decoder_layers=len(tied_layers) or _number(options, "dec-depth"),
        norm=_norm(options),
        norm_epsilon=EPSILON,
        positions="marian",
        activation=options.get("transformer-ffn-activation", "swish"),
        logits_bias=not _is_true(options, "output-omit-bias"),
        shared_embedding=shared,
        tied_output=tied,
        start_embedding="zero",
        max_length=MAX_LENGTH,
        pad_id=sizes[1],
        source_pad_id=None if sizes[0] == sizes[1] else sizes[0],
        start_id=sizes[1],
        end_id=END_ID,
    )


def _have(values: tuple[str, ...]) -> str:
    return "it has " + " or ".join(value or "none" for value in values)


def _is_true(options: Options, name: str) -> bool:
    return str(options.get(name, "false")).lower() in ("true", "yes", "on", "1")


def _number(options: Options, name: str, default: int | None = None) -> int:
    value = options.get(name, default)
    try:
        return int(value)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise UserError(f"its option {name} is {value!r}; it must be a whole number.") from error


def _vocabulary_sizes(options: Options, arrays: Mapping[str, np.ndarray], shared: bool) -> tuple[int, int]:
    """Rows of the source and target tables; the options must say the same."""
    names = ("Wemb", "Wemb") if shared else ("encoder_Wemb", "decoder_Wemb")
    for name in names:
        if name not in arrays:
            raise UserError(f"The weights hold no tensor {name}; they are of another model, or damaged.")
        if arrays[name].ndim != 2:
            raise UserError(f"Tensor {name} has shape {list(arrays[name].shape)}; a table of embeddings has two axes.")
    sizes = (len(arrays[names[0]]), len(arrays[names[1]]))
    said = options.get("dim-vocabs")
    # Marian writes 0 for a vocabulary whose size it was to find out by itself.
    if isinstance(said, list) and any(str(n) not in ("0", str(size)) for n, size in zip(said, sizes, strict=False)):
        raise UserError(f"its option dim-vocabs is {', '.join(map(str, said))}, but the tables have {sizes} rows.")
    return sizes


def _norm(options: Options) -> Any:
    """post or pre, from the operations around a block: d dropout, a add, n normalise."""
    before = str(options.get("transformer-preprocess", "")).replace("d", "")
    after = str(options.get("transformer-postprocess", "dan")).replace("d", "")
    top = str(options.get("transformer-postprocess-top", "")).replace("d", "")
    known = {("", "an", ""): "post", ("n", "a", "n"): "pre"}
    if (before, after, top) not in known:
        raise UserError(
            f"it was trained with transformer-preprocess '{options.get('transformer-preprocess', '')}', "
            f"transformer-postprocess '{options.get('transformer-postprocess', '')}' and transformer-postprocess-top "
            f"'{options.get('transformer-postprocess-top', '')}', which this model does not have (it has '', 'dan', '' "
            "and 'n', 'da', 'n')."
        )
    return known[before, after, top]


def _tied_layers(options: Options) -> list[int]:
    """Which layer's arrays the decoder's n-th layer takes; empty: each its own."""
    tied = options.get("transformer-tied-layers") or []
    try:
        return [int(n) for n in tied]
    except (TypeError, ValueError) as error:
        raise UserError(f"its option transformer-tied-layers is {tied!r}; it must be a list of numbers.") from error


def _untie_layers(options: Options, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays with each decoder layer written out that takes those of another."""
    tied = _tied_layers(options)
    if not tied:
        return arrays
    untied = {name: array for name, array in arrays.items() if not name.startswith("decoder_l")}
    for n, taken in enumerate(tied, start=1):
        prefix = f"decoder_l{taken}_"
        layer = {f"decoder_l{n}_{k.removeprefix(prefix)}": v for k, v in arrays.items() if k.startswith(prefix)}
        if not layer:
            raise UserError(f"its option transformer-tied-layers names layer {taken}, which the weights do not hold.")
        untied |= layer
    return untied


# --- writing ------------------------------------------------------------------------------------------------


def obstacles(config: ModelConfig) -> list[str]:
    """What native Marian would not honour of this model; empty: it computes the same."""
    found = []
    if config.positions != "marian":
        found.append(f"positions {config.positions} (Marian has its own)")
    if config.norm_epsilon != EPSILON:
        found.append(f"norm_epsilon {config.norm_epsilon:g} (Marian has 1e-06)")
    if config.start_embedding != "zero" or config.start_id != config.vocab_size:
        found.append("a start token with a row of its own (Marian starts from zero)")
    if not config.scale_embedding:
        found.append("scale_embedding false (Marian multiplies embeddings by sqrt(d_model))")
    if config.end_id != END_ID:
        found.append(f"end_id {config.end_id} (Marian's </s> is {END_ID})")
    return found


def save_npz(path: Path, config: ModelConfig, params: Params) -> None:
    """Writes the model as Marian does: uncompressed, float32, biases [1, n]. What Marian lacks is refused by name."""
    reasons = obstacles(config)
    if reasons:
        raise UserError(f"Native Marian cannot run this model: {'; '.join(reasons)}.")
    if not config.attention_bias:
        config = dataclasses.replace(config, attention_bias=True)
        params = _with_zero_biases(config, params)
    arrays = write_entries(entries(config), params)
    arrays[OPTIONS_KEY] = _options_array(config)
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]


def _with_zero_biases(config: ModelConfig, params: Params) -> Params:
    """The parameters with a bias of zeros wherever a model with attention biases has one."""

    def fill(shapes: Params, given: Params) -> Params:
        return {
            name: np.zeros(shape.shape, np.float32)
            if name not in given
            else (fill(shape, given[name]) if isinstance(shape, dict) else given[name])
            for name, shape in shapes.items()
        }

    return fill(parameter_shapes(config), params)


def _options_array(config: ModelConfig) -> np.ndarray:
    """The options as NUL-terminated text."""
    import yaml

    text = yaml.safe_dump(model_options(config), default_flow_style=False, sort_keys=True).encode() + b"\0"
    return np.frombuffer(text, np.int8)


def model_options(c: ModelConfig) -> dict[str, Any]:
    """What Marian must know of a model to run it."""
    pre = c.norm == "pre"
    return {
        "type": "transformer",
        "dim-emb": c.d_model,
        "dim-vocabs": [c.source_vocab_size or c.vocab_size, c.vocab_size],
        "enc-depth": c.n_encoder_layers,
        "dec-depth": c.n_decoder_layers,
        "transformer-heads": c.n_heads,
        "transformer-dim-ffn": c.d_ff,
        "transformer-decoder-dim-ffn": c.decoder_d_ff or 0,
        "transformer-ffn-depth": 2,
        "transformer-decoder-ffn-depth": 0,
        "transformer-ffn-activation": c.activation,
        "transformer-preprocess": "n" if pre else "",
        "transformer-postprocess": "da" if pre else "dan",
        "transformer-postprocess-emb": "d",
        "transformer-postprocess-top": "n" if pre else "",
        "transformer-decoder-autoreg": "self-attention",
        "transformer-attention-mask": "default",
        "transformer-tied-layers": [],
        "transformer-no-projection": False,
        "transformer-pool": False,
        "transformer-disable-position-embeddings": False,
        "transformer-train-position-embeddings": False,
        "transformer-no-bias": False,
        "transformer-no-affine": False,
        "transformer-rnn-projection": False,
        "transformer-guided-alignment-layer": "last",
        "tied-embeddings": c.tied_output and not c.shared_embedding,
        "tied-embeddings-all": c.tied_output and c.shared_embedding,
        "tied-embeddings-src": c.shared_embedding and not c.tied_output,
        "output-omit-bias": not c.logits_bias,
        "right-left": False,
        "skip": False,
        "layer-normalization": False,
        "input-types": [],
        "ulr": False,
        "ulr-dim-emb": 0,
        "ulr-trainable-transformation": False,
        "factors-combine": "sum",
        "factors-dim-emb": 0,
        "lemma-dim-emb": 0,
        "lemma-dependency": "",
        "separator-symbol": "[eos]",
        "enc-type": "bidirectional",
        "enc-cell": "gru",
        "enc-cell-depth": 1,
        "dec-cell": "gru",
        "dec-cell-base-depth": 2,
        "dec-cell-high-depth": 1,
        "dim-rnn": 1024,
        "version": "v1.12.0",
    }
