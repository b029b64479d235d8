"""`DataConfig`: where a run's sentence pairs come from, what is left out of them, and how they are batched."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from transformer_jax.config_checks import check, not_below, one_of


@dataclass(frozen=True)
class DataConfig:
    """Where the sentence pairs come from, and how they are batched."""

    task: str | None = None
    """A corpus made by rule: dates, reversal or numbers. None: text."""
    dir: Path | None = None
    """A folder with TRAIN, VAL and TEST files named SPLIT.LANGUAGE, plain or .gz."""
    tfds: str | None = None
    """A set of tensorflow-datasets, such as wmt14_translate/de-en, with the splits named below."""
    tfds_dir: Path | None = None
    """Where such sets are; None: its own default, $TFDS_DATA_DIR or tensorflow_datasets in the home folder."""
    train_split: str = "train"
    validation_split: str = "val"
    test_split: str | None = None
    source_lang: str = "en"
    target_lang: str = "de"
    source: tuple[Path, ...] = ()
    """Training text, one sentence a line, plain or .gz; `target` holds line n's translation in line n. Comes on top of
    what `dir` and `tfds` name."""
    target: tuple[Path, ...] = ()
    weights: tuple[float, ...] = ()
    """How often an epoch sees the pairs of each corpus, in the order dir, tfds, source; 0.5: every second pair. One
    number is for all of them."""
    tags: tuple[str, ...] = ()
    """A text before each source line of a corpus, in the same order, such as '>>bt<<'; '' for none."""
    reversed_weight: float = 0.0
    """Learn the other direction too (Ding et al. 2021): how often an epoch sees each pair with its sides exchanged and
    the tag >>source_lang<< before it, beside a weight of 1 for the pair as it is. 0: never."""
    validation_source: Path | None = None
    validation_target: Path | None = None
    test_source: Path | None = None
    test_target: Path | None = None
    tokenizer: Path | None = None
    """A folder with source.spm, target.spm and vocab.json to use; None: train one on the training text."""
    vocab_size: int = 8000
    """Of the tokenizer to train, special tokens included."""
    vocab_lines: int = 2_000_000
    """Train it on a random sample of so many lines, where the text has more."""
    tokenizer_type: Literal["bpe", "unigram"] = "bpe"
    subword_sampling: float = 0.0
    """Cut the training text into sub-words by chance. With bpe, the probability that a merge is left out (BPE-dropout,
    Provilkov et al. 2020: 0.1); with unigram, alpha of the distribution that a cut is drawn from (Kudo 2018: 0.2)."""
    subword_readings: int = 8
    """With subword_sampling: ways in which each pair is cut, the first as in use. In so many passes over the text each
    pair comes once in each way, all of them shuffled together."""
    max_tokens: int = 128
    """Longest source or target in training, in tokens with the end token."""
    too_long: Literal["drop", "cut"] = "drop"
    max_length_ratio: float | None = None
    """Drop pairs of which one side has more than so many times the other's tokens; None: none."""
    drop_identical: bool = False
    """Drop pairs whose two sides are the same."""
    drop_duplicates: bool = False
    """Drop pairs that have come before."""
    held_out: Literal["keep", "drop_pairs", "drop_lines"] = "keep"
    """Training pairs that are validation or test pairs too. drop_lines: also those that share one side with one."""
    cache: Path | None = None
    """Folder for text in tokens, for several runs to share; None: tokens in the run folder."""
    index_processes: int | None = None
    """Processes that turn text into tokens; None: one for a small text, else one per processor, at most 16."""
    batch_tokens: int | None = 4096
    """Slots per side and step; None: `batch_size` counts instead. The paper has about 25,000 (§5.1)."""
    batch_size: int = 128
    """Sentence pairs per step where batch_tokens is None."""
    batching: Literal["buckets", "packed"] = "buckets"
    """buckets: sentences of similar length share a batch, one a row (§5.1). packed: several sentences share a row."""
    n_buckets: int = 8
    """Static shapes at most, of buckets."""
    row_tokens: int = 256
    """Slots of a packed row on the side with more tokens; the other side has as many as it needs beside it."""
    rows_multiple: int = 8
    """Every batch has a multiple of this many rows, so that this many devices can share it."""
    limit: int | None = None
    """Train on the first so many pairs only."""

    def __post_init__(self) -> None:
        one_of(self, tokenizer_type=("bpe", "unigram"), too_long=("drop", "cut"), batching=("buckets", "packed"))
        not_below(self, 1, "batch_size", "n_buckets", "rows_multiple", "row_tokens")
        not_below(self, 2, "max_tokens", "subword_readings")
        check(
            0.0 <= self.subword_sampling < 1.0,
            f"subword_sampling is {self.subword_sampling}; it must be at least 0 (none) and below 1.",
        )
        check(
            not self.subword_sampling or self.task is None,
            f"subword_sampling cuts sub-words by chance, but task {self.task} is of characters; set it to 0.",
        )
        check(self.limit is None or self.limit > 0, f"data.limit is {self.limit}; it must be above 0.")
        check(
            self.batch_tokens is None or self.batch_tokens >= self.max_tokens * self.rows_multiple,
            f"batch_tokens is {self.batch_tokens}, too few for {self.rows_multiple} rows (rows_multiple) of "
            f"{self.max_tokens} tokens (max_tokens); raise it, or lower one of the two.",
        )
        check(
            self.batch_tokens is not None or self.batch_size % self.rows_multiple == 0,
            f"batch_size is {self.batch_size}, which is not a multiple of rows_multiple, {self.rows_multiple}.",
        )
        if self.batching == "packed":
            self._check_packing()
        check(
            len(self.source) == len(self.target),
            f"{len(self.source)} source files but {len(self.target)} target files; name one target per source.",
        )
        self._check_corpora()

    @property
    def readings(self) -> int:
        """How often the training text is turned into tokens, each time with other sub-words."""
        return self.subword_readings if self.subword_sampling else 1

    def _check_corpora(self) -> None:
        one_of(self, held_out=("keep", "drop_pairs", "drop_lines"))
        not_below(self, 2, "vocab_lines")
        check(self.tfds != "", "tfds is empty; name a set of tensorflow-datasets, such as wmt14_translate/de-en.")
        check(self.tfds_dir is None or self.tfds is not None, "tfds_dir is of no use without tfds; name the set too.")
        chosen = [name for name in ("dir", "tfds", "source") if getattr(self, name)]
        check(
            self.task is None or not chosen,
            f"Training data is named twice, by {' and '.join(['task', *chosen])}; name it once.",
        )
        n_corpora = (self.dir is not None) + (self.tfds is not None) + len(self.source)
        for name, given, for_all in (("weights", len(self.weights), 1), ("tags", len(self.tags), 0)):
            check(
                given in (0, for_all, n_corpora),
                f"{name} has {given} entries, but there are {n_corpora} corpora (dir, tfds, then each source); "
                f"give one for each, {'one for all, ' if for_all else ''}or none.",
            )
        check(
            all(0 < weight < 1e6 for weight in self.weights),
            f"weights is {' '.join(map(str, self.weights))}; each must be above 0, and a number of times.",
        )
        check(
            self.max_length_ratio is None or 1 <= self.max_length_ratio < 1e6,
            f"max_length_ratio is {self.max_length_ratio}; it must be at least 1, and a number of times.",
        )
        check(
            0 <= self.reversed_weight < 1e6,
            f"reversed_weight is {self.reversed_weight}; it must be 0 or above, and a number of times.",
        )
        for name, none in (("weights", "give none (--data.weights alone)"), ("reversed_weight", "set it to 0")):
            check(
                not getattr(self, name) or self.task is None,
                f"{name} is of text, but task {self.task} has pairs made by rule; {none}.",
            )
        if self.index_processes is not None:
            not_below(self, 1, "index_processes")

    def _check_packing(self) -> None:
        check(
            self.batch_tokens is not None,
            "batching packed counts a batch in tokens, but batch_tokens is None; set it, or take batching buckets.",
        )
        check(
            self.max_tokens <= self.row_tokens,
            f"row_tokens is {self.row_tokens}, but a sentence may have max_tokens, {self.max_tokens}; "
            "raise the one or lower the other.",
        )
        check(self.row_tokens <= 2**14, f"row_tokens is {self.row_tokens}; it must be at most {2**14}.")
        check(
            self.batch_tokens is None or self.batch_tokens >= self.row_tokens * self.rows_multiple,
            f"batch_tokens is {self.batch_tokens}, too few for {self.rows_multiple} rows (rows_multiple) of "
            f"{self.row_tokens} tokens (row_tokens); raise it, or lower one of the two.",
        )
