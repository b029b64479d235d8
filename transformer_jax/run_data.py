"""What a run reads: its texts, its tokenizer, and the training pairs in tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from transformer_jax.batching import Ragged, TokenPairs
from transformer_jax.config import DataConfig
from transformer_jax.corpus import ParallelText, limit_length, read_parallel, split_files
from transformer_jax.errors import UserError
from transformer_jax.sentencepiece_training import train_sentencepiece
from transformer_jax.tasks import TASKS
from transformer_jax.tokenizer import (
    CharacterTokenizer,
    Tokenizer,
    load_tokenizer,
)


@dataclass(frozen=True)
class Texts:
    """The sentence pairs of a run."""

    train: ParallelText
    validation: ParallelText | None
    test: ParallelText | None
    characters: tuple[str, ...] | None = None
    """The alphabet of a task made by rule; None for text, which is cut into sub-words."""
    samples: tuple[str, ...] = ()
    """Sources that the task wants to see translated."""


def read_texts(config: DataConfig) -> Texts:
    """Reads or makes all texts that the configuration names."""
    if config.task is not None:
        if config.task not in TASKS:
            raise UserError(f"There is no task {config.task!r}; the tasks are {', '.join(TASKS)}.")
        task = TASKS[config.task]()
        return Texts(_first(task.train, config.limit), task.held_out, None, task.characters, task.show)
    if config.dir is not None:
        train = read_parallel(*_split(config, config.train_split))
        validation = read_parallel(*_split(config, config.validation_split))
        test = read_parallel(*_split(config, config.test_split)) if config.test_split else None
        return Texts(_first(train, config.limit), validation, test)
    if not config.source:
        raise UserError(
            "There is no training text: name a folder with --data.dir, files with --data.source and --data.target, "
            "or a task with --data.task."
        )
    return Texts(
        _first(read_parallel(config.source, config.target), config.limit),
        _optional(config.validation_source, config.validation_target, "validation"),
        _optional(config.test_source, config.test_target, "test"),
    )


def _split(config: DataConfig, split: str) -> tuple[Path, Path]:
    assert config.dir is not None
    return split_files(config.dir, split, config.source_lang, config.target_lang)


def _optional(source: Path | None, target: Path | None, name: str) -> ParallelText | None:
    if (source is None) != (target is None):
        raise UserError(f"Only one side of the {name} text is named; name both {name}_source and {name}_target.")
    return None if source is None or target is None else read_parallel(source, target)


def _first(text: ParallelText, limit: int | None) -> ParallelText:
    return text if limit is None else ParallelText(text.source[:limit], text.target[:limit], text.removed)


def find_tokenizer(config: DataConfig, texts: Texts, progress: bool) -> Tokenizer:
    """A new run's tokenizer: the one that is given, the task's alphabet, or one trained on the training text."""
    if config.tokenizer is not None:
        return load_tokenizer(config.tokenizer)
    if texts.characters is not None:
        return CharacterTokenizer(texts.characters)
    both_sides = [*texts.train.source, *texts.train.target]
    return train_sentencepiece(both_sides, config.vocab_size, model_type=config.tokenizer_type, progress=progress)


def to_tokens(
    text: ParallelText,
    tokenizer: Tokenizer,
    max_tokens: int | None,
    rule: Literal["drop", "cut"] = "drop",
    start_id: int | None = None,
) -> tuple[TokenPairs, dict[str, int]]:
    """The text in tokens, and how many pairs each rule took out or cut. `start_id`, where the model has another start
    than the tokenizer's."""
    source: Sequence[list[int]] = tokenizer.encode_source_batch(text.source)
    target: Sequence[list[int]] = tokenizer.encode_target_batch(text.target)
    # A side of which only the end token is left says nothing, whatever stood in the line.
    spelt = [i for i, (s, t) in enumerate(zip(source, target, strict=True)) if len(s) > 1 and len(t) > 1]
    counts = {"that the vocabulary cannot spell left out": len(source) - len(spelt)}
    source, target = [source[i] for i in spelt], [target[i] for i in spelt]
    if not source:
        raise UserError("The tokenizer knows none of the text: it does not belong to it; train or name another.")
    if max_tokens is not None:
        source, target, changed = limit_length(source, target, max_tokens, max_tokens, rule)
        counts[f"longer than {max_tokens} tokens {'cut' if rule == 'cut' else 'left out'}"] = changed
    if not source:
        raise UserError(f"No sentence pair is left: all are longer than max_tokens, {max_tokens}; raise it.")
    counts = {rule: n for rule, n in counts.items() if n}
    start_id = tokenizer.start_id if start_id is None else start_id
    return TokenPairs(Ragged.pack(source), Ragged.pack(target), tokenizer.pad_id, start_id), counts
