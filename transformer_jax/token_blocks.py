"""Pairs of lines to pairs of token sequences, block by block, in one process or several.

A block is a few thousand pairs of one corpus. However many processes share the work, the blocks come back in order
and hold the same tokens; only a few of them are in memory at a time.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from transformer_jax.batching import Ragged
from transformer_jax.corpus import LengthRule, TokenIds, limit_length
from transformer_jax.errors import UserError
from transformer_jax.subword_sampling import Drawing
from transformer_jax.tokenizer import SentencePieceTokenizer, Tokenizer, UnknownTagError, load_tokenizer

BLOCK_PAIRS = 4096
MAX_PROCESSES = 16
BLOCKS_AHEAD = 3
"""Per process: blocks that are being encoded or wait for it."""


@dataclass(frozen=True)
class TokenRules:
    """The rules that look at tokens, the end token included in every length."""

    max_tokens: int | None
    too_long: LengthRule = "drop"
    max_length_ratio: float | None = None
    """Drop pairs of which one side is more than so many times as long as the other, before any cutting."""
    sampling: float = 0.0
    """How far sub-words are drawn by chance (`subword_sampling`)."""
    readings: int = 1
    """How often the whole text is turned into tokens: once as in use, and with `sampling` the other times."""


@dataclass(frozen=True)
class TextBlock:
    """Pairs of lines of the corpus with this number, tags included."""

    corpus: int
    source: list[str]
    target: list[str]
    drawn: Drawing | None = None
    """How it is cut into sub-words by chance; None: as in use."""


@dataclass(frozen=True)
class TokenBlock:
    """What is left of a block in tokens, and how many pairs each rule removed or cut."""

    corpus: int
    source: Ragged
    target: Ragged
    removed: Counter[str] = field(default_factory=Counter)
    cut: int = 0


def encode_block(block: TextBlock, tokenizer: Tokenizer, rules: TokenRules) -> TokenBlock:
    """Encodes a block and applies the rules to it."""
    source, target, unknown_tags = _encode(block, tokenizer)
    removed = Counter(unknown_tag=unknown_tags)
    # A side of which only the end token is left says nothing, whatever stood in the line.
    pairs = [(s, t) for s, t in zip(source, target, strict=True) if len(s) > 1 and len(t) > 1]
    removed["unspelt"] = len(source) - len(pairs)
    if rules.max_length_ratio is not None:
        ratio = rules.max_length_ratio
        alike = [(s, t) for s, t in pairs if max(len(s), len(t)) <= ratio * min(len(s), len(t))]
        removed["length_ratio"] = len(pairs) - len(alike)
        pairs = alike
    source, target = [s for s, _ in pairs], [t for _, t in pairs]
    cut = 0
    if rules.max_tokens is not None:
        limit = rules.max_tokens
        source, target, changed = limit_length(source, target, limit, limit, rules.too_long)
        if rules.too_long == "cut":
            cut = changed
        else:
            removed["too_long"] = changed
    return TokenBlock(block.corpus, Ragged.pack(source), Ragged.pack(target), removed, cut)


def _encode(block: TextBlock, tokenizer: Tokenizer) -> tuple[list[TokenIds], list[TokenIds], int]:
    try:
        return *_encode_sides(block, tokenizer), 0
    except UnknownTagError:
        # One line among millions that begins with a tag the vocabulary lacks is text from the web: no reason to stop.
        pairs = zip(block.source, block.target, strict=True)
        kept = [(source, target) for source, target in pairs if tag_is_known(tokenizer, source)]
        rest = TextBlock(block.corpus, [source for source, _ in kept], [target for _, target in kept], block.drawn)
        return *_encode_sides(rest, tokenizer), len(block.source) - len(kept)


def _encode_sides(block: TextBlock, tokenizer: Tokenizer) -> tuple[list[TokenIds], list[TokenIds]]:
    if block.drawn is None or not isinstance(tokenizer, SentencePieceTokenizer):
        return tokenizer.encode_source_batch(block.source), tokenizer.encode_target_batch(block.target)
    strength, seed = block.drawn  # the two sides are drawn apart
    source = tokenizer.encode_source_batch(block.source, Drawing(strength, 2 * seed))
    return source, tokenizer.encode_target_batch(block.target, Drawing(strength, 2 * seed + 1))


def tag_is_known(tokenizer: Tokenizer, line: str) -> bool:
    """Whether a source line has no language tag at its start, or one that the vocabulary has."""
    try:
        tokenizer.encode_source(line)
    except UnknownTagError:
        return False
    return True


def repeat_pairs(block: TokenBlock, times: np.ndarray) -> TokenBlock:
    """The block with pair i `times[i]` times over."""
    if (times == 1).all():
        return block
    chosen = np.repeat(np.arange(len(times)), times)
    return TokenBlock(block.corpus, block.source.take(chosen), block.target.take(chosen), block.removed, block.cut)


def join_blocks(sides: Sequence[Ragged]) -> Ragged:
    """One side of several blocks, end to end."""
    lengths = np.concatenate([np.zeros(0, np.int64), *(side.lengths for side in sides)])
    ids = np.concatenate([np.zeros(0, np.int32), *(side.ids for side in sides)])
    return Ragged(ids, np.concatenate([[0], np.cumsum(lengths)]))


# --- several processes --------------------------------------------------------------------------------------


def usable_processes() -> int:
    """The processors that this process may run on, at most `MAX_PROCESSES`."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(available, MAX_PROCESSES)


def encode_blocks(
    blocks: Iterable[TextBlock], tokenizer: Tokenizer, rules: TokenRules, *, folder: Path | None, processes: int
) -> Iterator[TokenBlock]:
    """Encodes all blocks, in order.

    Args:
        folder: holds the tokenizer, for the other processes to load; None: this process does all the work.
        processes: how many share it; with 1 this one does.
    """
    if folder is None or processes <= 1:
        for block in blocks:
            yield encode_block(block, tokenizer, rules)
        return
    from concurrent.futures import Future, ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool

    waiting: deque[Future[TokenBlock]] = deque()
    # "spawn": JAX has threads, and a forked child of a process with threads may hang.
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _start_worker)
    try:
        for block in blocks:
            waiting.append(pool.submit(_work, folder, rules, block))
            if len(waiting) >= BLOCKS_AHEAD * processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise UserError(
            "A process that turns text into tokens ended early, perhaps for lack of memory; start again with fewer "
            "(--data.index-processes 1)."
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _start_worker() -> None:
    """A worker ends with its parent, however that ends, and leaves Ctrl-C to it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@functools.cache
def _loaded(folder: Path) -> Tokenizer:
    """Called in the processes of the pool alone, once in each."""
    return load_tokenizer(folder)


def _work(folder: Path, rules: TokenRules, block: TextBlock) -> TokenBlock:
    return encode_block(block, _loaded(folder), rules)
