"""Several sentence pairs in one row, so that next to nothing of a batch is padding, and every batch has one shape.

Packing looks at lengths alone and does so once for a corpus: `pack` deals all pairs to rows, with look-ahead over
windows of shuffled pairs. An epoch shuffles the rows, and swaps pairs of equal lengths between them. So the number of
batches is the same in each epoch, batch i follows from the seed and i, and nothing has to be packed again to go on in
the middle of a run.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from transformer_jax.array_types import Int
from transformer_jax.batching import (
    Bucket,
    BucketLayout,
    Layout,
    Placed,
    Ragged,
    TokenPairs,
    make_buckets,
    rows_within,
)
from transformer_jax.config import DataConfig
from transformer_jax.errors import UserError

WINDOW = 256
"""Pairs among which a row looks for its own. With more, rows are fuller from the start; with fewer, packing is faster,
and what it leaves is gathered up by the rounds."""
WINDOWS_AT_ONCE = 128
"""Windows are packed side by side, a pair of each at a time, as numpy is fast on many numbers only."""
ROUNDS = 10
FULL = 0.02
"""Rows with more padding than this are taken apart, and their pairs go into the next round, but for the last."""

NEVER = 2**29
"""A length that fits nowhere."""


def pack(source_lengths: np.ndarray, target_lengths: np.ndarray, source_length: int, target_length: int) -> Ragged:
    """Deals all pairs to rows within whose lengths both sides stay: row r holds the pairs `rows[r]`.

    A pair counts by the share of a row that it takes on each side. A row begins with the longest pair of its window and
    is filled up by `_fill_rows`. The windows' last rows find little to choose from: rows that are not `FULL` are taken
    apart, and the pairs of all of them make the windows of the next round.
    """
    # In these units a row measures the same on both sides.
    capacity = source_length * target_length
    source, target = source_lengths * target_length, target_lengths * source_length
    too_long = int(((source > capacity) | (target > capacity)).sum())
    if too_long:
        raise UserError(f"{too_long} pairs are longer than a row of {source_length} and {target_length} tokens.")

    rng = np.random.default_rng(0)
    left = np.arange(len(source))
    packed: list[np.ndarray] = []  # pairs, row after row
    counts: list[np.ndarray] = []  # how many of them are in each row
    for later_rounds in reversed(range(ROUNDS)):
        pool, apart = rng.permutation(left), []
        for start in range(0, len(pool), WINDOW * WINDOWS_AT_ONCE):
            window_WN = _windows(pool[start : start + WINDOW * WINDOWS_AT_ONCE], source + target)
            present = window_WN >= 0
            source_WN = np.where(present, source[window_WN], NEVER).astype(np.int32)
            target_WN = np.where(present, target[window_WN], NEVER).astype(np.int32)
            row_WN = _fill_rows(source_WN, target_WN, capacity)
            row_WN += np.arange(len(row_WN), dtype=np.int32)[:, None] * WINDOW  # now each row has its own number

            # The pairs that are there, row after row, the longest of a row first.
            pair, row = window_WN[present], row_WN[present]
            order = np.argsort(row, kind="stable")
            pair, row = pair[order], row[order]
            tokens = np.bincount(row, source[pair] + target[pair])
            kept = tokens >= (1.0 - FULL) * 2 * capacity if later_rounds else tokens > 0
            packed.append(pair[kept[row]])
            apart.append(pair[~kept[row]])
            counts.append(np.bincount(row)[kept])
        left = np.concatenate(apart) if apart else left
        if not len(left):
            break
    offsets = np.concatenate([[0], np.cumsum(np.concatenate(counts))])
    return Ragged(np.concatenate(packed).astype(np.int32), offsets)


def _windows(pool: np.ndarray, size: np.ndarray) -> Int[np.ndarray, "W N"]:
    """The pool in windows, the longest pairs of each first; -1 where there is no pair."""
    window_WN = np.pad(pool, (0, -len(pool) % WINDOW), constant_values=-1).reshape(-1, WINDOW)
    order_WN = np.argsort(np.where(window_WN >= 0, -size[window_WN], 1), axis=1, kind="stable")
    return np.take_along_axis(window_WN, order_WN, axis=1)


def _fill_rows(
    source_WN: Int[np.ndarray, "W N"], target_WN: Int[np.ndarray, "W N"], capacity: int
) -> Int[np.ndarray, "W N"]:
    """The row of each pair, numbered from 0 in each window. Pairs are sorted by length, those that are none last.

    Each step places one pair in every window. Of those that fit into the open row, it is the one that leaves least:
    what is left on both sides, plus twice the difference of the two, since a row that is full on one side is closed,
    whatever is left on the other. Where none fits, the longest pair that is not placed begins a new row.
    """
    W = len(source_WN)
    every = np.arange(W)
    left = (source_WN < NEVER).sum(axis=1)
    row_WN = np.full(source_WN.shape, -1, np.int32)
    open_row = np.full(W, -1, np.int32)
    source_free, target_free = np.zeros(W, np.int32), np.zeros(W, np.int32)
    source_after, target_after, least_after = (np.empty_like(source_WN) for _ in range(3))
    while left.any():
        np.subtract(source_free[:, None], source_WN, out=source_after)
        np.subtract(target_free[:, None], target_WN, out=target_after)
        np.minimum(source_after, target_after, out=least_after)
        cost = np.add(source_after, target_after, out=source_after)
        # The sum plus twice the difference is three times the sum less four times the smaller.
        cost *= 3
        cost -= np.multiply(least_after, 4, out=target_after)
        cost[least_after < 0] = NEVER * 3
        chosen = cost.argmin(axis=1)
        opens = np.flatnonzero((least_after[every, chosen] < 0) & (left > 0))
        chosen[opens] = (row_WN[opens] < 0).argmax(axis=1)
        open_row[opens] += 1
        source_free[opens] = target_free[opens] = capacity

        w = np.flatnonzero(left)
        n = chosen[w]
        row_WN[w, n] = open_row[w]
        source_free[w] -= source_WN[w, n]
        target_free[w] -= target_WN[w, n]
        source_WN[w, n] = NEVER
        left[w] -= 1
    return row_WN


def row_lengths(source: Ragged, target: Ragged, row_tokens: int) -> tuple[int, int]:
    """The source and target length of rows that fill evenly: `row_tokens` on the side with more tokens in all, and in
    proportion on the other, where the longest sentence must find room too. Even, as attention's fast kernels want."""
    longest = int(max(source.lengths.max(), target.lengths.max()))
    if longest > row_tokens:
        raise UserError(
            f"The longest sentence has {longest} tokens, more than a packed row, data.row_tokens {row_tokens}; "
            "raise it, or lower data.max_tokens."
        )
    n_source, n_target = len(source.ids), len(target.ids)

    def shorter(share: float, side: Ragged) -> int:
        longest = int(side.lengths.max())
        return min(row_tokens, max(2 * round(row_tokens * share / 2), longest + longest % 2))

    if n_source > n_target:
        return row_tokens, shorter(n_target / n_source, target)
    return shorter(n_source / n_target, source), row_tokens


class PackedLayout:
    """All batches of one shape, several pairs in each row. The last batch of an epoch is filled up with empty rows."""

    def __init__(self, pairs: TokenPairs, shape: Bucket) -> None:
        source_lengths, target_lengths = pairs.source.lengths, pairs.target.lengths
        rows = pack(source_lengths, target_lengths, shape.source_length, shape.target_length)
        self.shapes: Sequence[Bucket] = [shape]
        self.batches_per_epoch = -(-len(rows) // shape.rows)
        self.slots = self.batches_per_epoch * shape.rows * shape.row_slots
        self._digest = zlib.crc32(rows.offsets.tobytes(), zlib.crc32(rows.ids.tobytes()))

        lengths = source_lengths * (shape.target_length + 1) + target_lengths
        kinds, kind = np.unique(lengths, return_inverse=True)
        # Numbers of 16 bits are sorted many times faster.
        self._kind = kind.astype(np.uint16 if len(kinds) <= 2**16 else np.int32)
        """The same number for pairs that are as long as each other on both sides."""
        place = np.empty(len(pairs), np.int32)
        place[np.argsort(self._kind, kind="stable")] = np.arange(len(pairs), dtype=np.int32)
        self._rows = Ragged(place[rows.ids], rows.offsets)
        """The rows, with each pair given by its place among all pairs sorted by kind."""

    def epoch(self, rng: np.random.Generator) -> list[Placed]:
        """The rows in random order, with pairs of the same kind dealt anew."""
        order = rng.permutation(len(self._kind))
        by_kind = order[np.argsort(self._kind[order], kind="stable")]
        rows = self._rows.take(rng.permutation(len(self._rows)))
        members, counts, step = by_kind[rows.ids], rows.lengths, self.shapes[0].rows
        placed = []
        for first in range(0, len(rows), step):
            begin, end = rows.offsets[first], rows.offsets[min(first + step, len(rows))]
            placed.append(Placed(self.shapes[0], members[begin:end], counts[first : first + step]))
        return placed

    def __str__(self) -> str:
        return f"{self.shapes[0]} packed {self._digest:08x}"


def make_layout(pairs: TokenPairs, config: DataConfig) -> Layout:
    """How a run's pairs stand in its batches."""
    if config.batching == "buckets" or config.batch_tokens is None:
        return BucketLayout(pairs, make_buckets(pairs, config))
    lengths = row_lengths(pairs.source, pairs.target, config.row_tokens)
    return PackedLayout(pairs, Bucket(rows_within(config.batch_tokens, max(lengths), config.rows_multiple), *lengths))
