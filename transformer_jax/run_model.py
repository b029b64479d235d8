"""What model a run trains: one that fits its tokenizer, or one that exists already."""

from __future__ import annotations

import dataclasses
import logging
import math

import jax

from transformer_jax.config import DataConfig, ModelConfig, RunConfig
from transformer_jax.errors import UserError
from transformer_jax.hf_marian import without_start_row
from transformer_jax.model import Transformer
from transformer_jax.pretrained import Pretrained, load_pretrained
from transformer_jax.tokenizer import SentencePieceTokenizer, Tokenizer
from transformer_jax.training import init_params

log = logging.getLogger("transformer_jax")

OF_THE_RUN = (
    "dropout",
    "attention_dropout",
    "feed_forward_dropout",
    "word_dropout",
    "attention_init_gain",
    "dtype",
    "remat",
)
"""What a run sets in a model that exists already (the gain to no effect); all else is the model's own."""


def load_initial(config: RunConfig) -> Pretrained | None:
    """The model that a run starts from, in Marian's form where it can be: no row for padding, a zero start."""
    if config.init is None:
        return None
    if config.data.tokenizer is not None:
        raise UserError("A model that is trained on keeps its own tokenizer; leave out data.tokenizer, or init.")
    loaded = load_pretrained(config.init, positions=config.init_positions)
    model_config, params = without_start_row(loaded.config, loaded.params)
    kept = [
        f"model.{field.name} {getattr(model_config, field.name)}"
        for field in dataclasses.fields(ModelConfig)
        if field.name not in OF_THE_RUN
        and getattr(config.model, field.name) not in (field.default, getattr(model_config, field.name))
    ]
    if kept:
        log.warning("What is trained on stays as it is; the model to start from has %s.", ", ".join(kept))
    model_config = dataclasses.replace(model_config, **{name: getattr(config.model, name) for name in OF_THE_RUN})
    return dataclasses.replace(loaded, config=model_config, params=params)


def fit_model(config: ModelConfig, tokenizer: Tokenizer) -> ModelConfig:
    """The model of the tokenizer's vocabulary. With sub-words it is as in Marian: it starts from a zero vector and has
    no row for padding, so that the exported model is the same one everywhere."""
    fitted = {
        "vocab_size": tokenizer.vocab_size,
        "pad_id": tokenizer.pad_id,
        "start_id": tokenizer.start_id,
        "end_id": tokenizer.end_id,
    }
    separate = isinstance(tokenizer, SentencePieceTokenizer) and tokenizer.separate_vocabs
    if separate:
        fitted |= {"source_vocab_size": tokenizer.source_vocab_size, "source_pad_id": tokenizer.source_pad_id}
    pads_are_last = (tokenizer.pad_id, tokenizer.source_pad_id) == (
        tokenizer.vocab_size - 1,
        tokenizer.source_vocab_size - 1,
    )
    if isinstance(tokenizer, SentencePieceTokenizer) and pads_are_last:
        fitted |= {"vocab_size": tokenizer.vocab_size - 1, "start_embedding": "zero"}
        if separate:
            fitted |= {"source_vocab_size": tokenizer.source_vocab_size - 1}
    return dataclasses.replace(config, **fitted)


def within_the_model(config: RunConfig, model: ModelConfig) -> RunConfig:
    """The run with no sentence longer than the model that it starts from, whose positions cannot be added to."""
    data = dataclasses.replace(config.data, max_tokens=min(config.data.max_tokens, model.max_length))
    return dataclasses.replace(config, data=data)


def model_line(config: ModelConfig) -> str:
    """The model in a line of text: its parameters and its sizes."""
    shapes = jax.eval_shape(lambda: init_params(Transformer(config), 0))
    n_params = sum(math.prod(x.shape) for x in jax.tree.leaves(shapes))
    return (
        f"model      {n_params:,} parameters: d_model {config.d_model}, {config.n_heads} heads, d_ff {config.d_ff}, "
        f"{config.n_encoder_layers}+{config.n_decoder_layers} layers, vocabulary {config.vocab_size:,}"
    )


def check_lengths(data: DataConfig, model: ModelConfig) -> None:
    if data.max_tokens > model.max_length:
        raise UserError(
            f"data.max_tokens is {data.max_tokens}, but the model's positions end at max_length, {model.max_length}; "
            "lower the one or raise the other."
        )


def check_devices(config: RunConfig, n_devices: int) -> None:
    """Every batch must split evenly over the devices and the parts of a step."""
    parts = n_devices * config.train.accumulation
    if config.data.rows_multiple % parts:
        raise UserError(
            f"Batches have a multiple of {config.data.rows_multiple} rows, which {n_devices} devices in "
            f"{config.train.accumulation} parts cannot share evenly; set data.rows_multiple to a multiple of {parts}."
        )


def check_backward(config: RunConfig) -> None:
    """Only a model that learns both directions, or has learnt them, can be its own way back."""
    data = config.data
    learns = data.reversed_weight or config.init is not None or data.tokenizer is not None or any(data.tags)
    if config.decode.rerank_weight and not learns:
        raise UserError(
            f"decode.rerank_weight is {config.decode.rerank_weight}, but this run does not learn to translate back; "
            "set data.reversed_weight, or decode.rerank_weight to 0."
        )
