"""What a run reads: its texts, its tokenizer, and the training pairs in tokens."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from transformer_jax.batching import TokenPairs
from transformer_jax.cleaning import REMOVED, LineRules, Report
from transformer_jax.config import DataConfig
from transformer_jax.corpus import ParallelText, read_parallel, split_files
from transformer_jax.errors import AbsentError, UserError
from transformer_jax.pair_sources import ListedPairs, PairSource, WeightedSource, open_files
from transformer_jax.progress import Progress
from transformer_jax.rewritten_text import RewrittenText
from transformer_jax.run_folder import RunFolder
from transformer_jax.sentencepiece_training import train_sentencepiece
from transformer_jax.sharding import is_main_process, wait_for_main
from transformer_jax.tasks import TASKS, Task
from transformer_jax.token_blocks import TokenRules
from transformer_jax.token_cache import META
from transformer_jax.tokenizer import CharacterTokenizer, Tokenizer, load_tokenizer
from transformer_jax.training_text import Indexer, TrainingText


@dataclass(frozen=True)
class Texts:
    """The sentence pairs of a run; those to train on are read when they are asked for."""

    train: TrainingText
    validation: ParallelText | None
    test: ParallelText | None
    characters: tuple[str, ...] | None = None
    """The alphabet of a task made by rule; None for text, which is cut into sub-words."""
    samples: tuple[str, ...] = ()
    """Sources that the task wants to see translated."""


def read_texts(config: DataConfig, download: bool = True, rewritten: RewrittenText | None = None) -> Texts:
    """Reads or makes the held-out texts that the configuration names, and looks through those to train on, with what a
    teacher has made of them (`rewritten`). What is not on the disk is fetched, or refused without `download`."""
    if config.task is not None:
        task = find_task(config.task)
        pairs = ListedPairs(tuple(zip(task.train.source, task.train.target, strict=True)), config.task)
        train = _training_text(config, [pairs], task.held_out, None, None)
        return Texts(train, task.held_out, None, task.characters, task.show)
    sources: list[PairSource] = []
    validation = _named(config.validation_source, config.validation_target, "validation")
    test = _named(config.test_source, config.test_target, "test")
    if config.dir is not None:
        sources.append(open_files(*_split(config, config.train_split)))
        validation = validation or read_parallel(*_split(config, config.validation_split))
        test = test or (read_parallel(*_split(config, config.test_split)) if config.test_split else None)
    if config.tfds is not None:
        from transformer_jax.tfds_parallel import open_dataset

        languages = config.source_lang, config.target_lang
        dataset = open_dataset(config.tfds, config.tfds_dir, languages, download)
        sources.append(dataset.split(config.train_split))
        validation = validation or dataset.text(config.validation_split)
        test = test or (dataset.text(config.test_split) if config.test_split else None)
    sources += [open_files(source, target) for source, target in zip(config.source, config.target, strict=True)]
    if not sources:
        raise AbsentError(
            "There is no training text: name a folder with --data.dir, files with --data.source and --data.target, "
            "a set of tensorflow-datasets with --data.tfds, or a task with --data.task."
        )
    return Texts(_training_text(config, sources, validation, test, rewritten), validation, test)


def find_task(name: str) -> Task:
    """A corpus made by rule."""
    if name not in TASKS:
        raise UserError(f"There is no task {name!r}; the tasks are {', '.join(TASKS)}.")
    return TASKS[name]()


def _training_text(
    config: DataConfig,
    sources: list[PairSource],
    validation: ParallelText | None,
    test: ParallelText | None,
    rewritten: RewrittenText | None,
) -> TrainingText:
    weights = config.weights * len(sources) if len(config.weights) == 1 else config.weights
    weights, tags = weights or (1.0,) * len(sources), config.tags or ("",) * len(sources)
    weighted = [WeightedSource(*parts) for parts in zip(sources, weights, tags, strict=True)]
    held_out = {name: text for name, text in (("validation", validation), ("test", test)) if text is not None}
    text = TrainingText(tuple(weighted), LineRules.of(config), held_out, config.limit)
    if rewritten is not None:
        weighted += rewritten.sources_for(text)
    if config.reversed_weight:
        weighted += [source.exchange(config.reversed_weight, f">>{config.source_lang}<<") for source in weighted]
    return dataclasses.replace(text, sources=tuple(weighted))


def _split(config: DataConfig, split: str) -> tuple[Path, Path]:
    assert config.dir is not None
    return split_files(config.dir, split, config.source_lang, config.target_lang)


def _named(source: Path | None, target: Path | None, name: str) -> ParallelText | None:
    if (source is None) != (target is None):
        raise UserError(f"Only one side of the {name} text is named; name both {name}_source and {name}_target.")
    return None if source is None or target is None else read_parallel(source, target)


def find_tokenizer(config: DataConfig, texts: Texts, progress: bool) -> Tokenizer:
    """A new run's tokenizer: the one that is given, the task's alphabet, or one trained on the training text."""
    if config.tokenizer is not None:
        return load_tokenizer(config.tokenizer)
    if texts.characters is not None:
        return CharacterTokenizer(texts.characters)
    # Of files of any name the languages are those of the options only where something hangs on them.
    named = config.dir is not None or config.tfds is not None or config.reversed_weight > 0
    return train_sentencepiece(
        texts.train.sample(config.vocab_lines),
        config.vocab_size,
        model_type=config.tokenizer_type,
        tags=[source.tag for source in texts.train.sources],
        source_lang=config.source_lang if named else None,
        target_lang=config.target_lang if named else None,
        progress=progress,
    )


def training_pairs(
    config: DataConfig, texts: Texts, tokenizer: Tokenizer, start_id: int, folder: RunFolder
) -> tuple[TokenPairs, Report]:
    """The training text in tokens, and what was left out of it. Of several processes the main one makes the cache, the
    others wait and read it. `start_id`, where the model has another start than the tokenizer's."""
    rules = TokenRules(
        config.max_tokens, config.too_long, config.max_length_ratio, config.subword_sampling, config.readings
    )
    indexer = Indexer(texts.train, tokenizer, rules, start_id, config.index_processes, Progress.say)
    if config.task is not None:
        return indexer.in_memory()
    cache = (config.cache or folder.tokens) / indexer.key(folder.tokenizer)
    if is_main_process():
        indexer.build(cache, folder.tokenizer)
    wait_for_main((cache / META).is_file, "tokens")
    pairs, report = indexer.read(cache)
    return pairs, {**report, "tokens": str(cache)}


def to_tokens(
    text: ParallelText,
    tokenizer: Tokenizer,
    max_tokens: int | None,
    rule: Literal["drop", "cut"] = "drop",
    start_id: int | None = None,
) -> tuple[TokenPairs, dict[str, int]]:
    """A held-out text in tokens, and how many pairs each rule took out or cut. `start_id`, where the model has another
    start than the tokenizer's."""
    source = ListedPairs(tuple(zip(text.source, text.target, strict=True)), "the held-out text")
    whole = TrainingText((WeightedSource(source),), LineRules(), {})
    start_id = tokenizer.start_id if start_id is None else start_id
    pairs, report = Indexer(whole, tokenizer, TokenRules(max_tokens, rule), start_id).in_memory()
    (corpus,) = report["corpora"]
    counts = {f"{REMOVED[name]} left out": n for name, n in corpus["removed"].items() if n}
    return pairs, counts | ({f"longer than {max_tokens} tokens cut": corpus["cut"]} if corpus["cut"] else {})
