"""§5.1: sentence pairs of similar length together, in a few static shapes, in an order that can be resumed.

A `Batch` is what the model and the loss see. `TrainingBatches` is the endless row of batches of a run, addressed by
number: batch i is the same on any number of devices and processes, however the run was stopped and started. A `Layout`
says which pairs share a batch: `BucketLayout` here, `PackedLayout` in packing.py.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from transformer_jax.config import DataConfig
from transformer_jax.errors import UserError


class Batch(NamedTuple):
    """Rows of tokens, int32. Segments number the sentences of a row from 1, 0 is padding; positions count within a
    sentence. The decoder reads `target_inputs` and is to say `target_outputs`, the same tokens one step on."""

    source_ids_BS: Any
    source_segments_BS: Any
    source_positions_BS: Any
    target_inputs_BT: Any
    target_outputs_BT: Any
    target_segments_BT: Any
    target_positions_BT: Any
    weights_BT: Any
    """float32: how much each target token counts in the loss; 0 on padding."""


@dataclass(frozen=True)
class Ragged:
    """Many token sequences end to end: sequence i is `ids[offsets[i]:offsets[i + 1]]`. The arrays may be files that
    are mapped into memory, and the ids of a smaller type than int32."""

    ids: np.ndarray
    offsets: np.ndarray

    @classmethod
    def pack(cls, sequences: Sequence[Sequence[int]]) -> Ragged:
        lengths = np.fromiter((len(s) for s in sequences), np.int64, len(sequences))
        ids = np.fromiter(itertools.chain.from_iterable(sequences), np.int32, int(lengths.sum()))
        return cls(ids, np.concatenate([[0], np.cumsum(lengths)]))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, i: int) -> np.ndarray:
        return self.ids[self.offsets[i] : self.offsets[i + 1]]

    @cached_property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    def take(self, chosen: np.ndarray) -> Ragged:
        """The sequences of these numbers, in this order. Touches no others: `ids` may be a file of any size."""
        starts = self.offsets[chosen]
        offsets = np.concatenate([[0], np.cumsum(self.offsets[chosen + 1] - starts)])
        # Token k of the result is token k - (tokens before its sequence) of that sequence.
        places = np.repeat(starts - offsets[:-1], np.diff(offsets)) + np.arange(offsets[-1])
        return Ragged(self.ids[places], offsets)


@dataclass(frozen=True)
class TokenPairs:
    """A parallel corpus in tokens; each side ends with its end token."""

    source: Ragged
    target: Ragged
    pad_id: int
    start_id: int
    known_fingerprint: str | None = None
    """What `fingerprint` found when these tokens were written; None: it has not been asked yet."""

    def __len__(self) -> int:
        return len(self.source)

    def fingerprint(self) -> str:
        """Tells whether two runs read the same tokens: a digest of everything that batches are made of."""
        if self.known_fingerprint is not None:
            return self.known_fingerprint
        digest = hashlib.sha256(f"{self.pad_id} {self.start_id}".encode())
        for side in (self.source, self.target):
            for array, kind in ((side.ids, np.int32), (side.offsets, np.int64)):
                for i in range(0, len(array), 1 << 20):  # in pieces: the whole may not fit in memory
                    digest.update(np.ascontiguousarray(array[i : i + (1 << 20)], kind).tobytes())
        return digest.hexdigest()[:16]


@dataclass(frozen=True)
class Bucket:
    """A static shape: batches of `rows` rows, sources up to `source_length`, targets up to `target_length`."""

    rows: int
    source_length: int
    target_length: int

    @property
    def row_slots(self) -> int:
        return self.source_length + self.target_length

    def holds(self, other: Bucket) -> bool:
        """Whether every pair of the other fits here."""
        return self.source_length >= other.source_length and self.target_length >= other.target_length

    def __str__(self) -> str:
        return f"{self.rows}x{self.source_length}/{self.target_length}"


@dataclass(frozen=True)
class Position:
    """Where in its data a run is: `batch` batches have been used. Means the same on any number of devices."""

    batch: int
    epoch: int
    index: int
    seed: int
    fingerprint: str
    shapes: str
    """The layout of the batches, with their number in an epoch: with another, the same number is another batch."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def length_sorted_batches(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices in batches of similar length: sorted, then filled while rows times longest stays within `budget`."""
    batches: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        if not batches or (len(batches[-1]) + 1) * lengths[i] > budget:
            batches.append([])
        batches[-1].append(i)
    return batches


def bucket_bounds(source_lengths: np.ndarray, target_lengths: np.ndarray, n_buckets: int) -> list[tuple[int, int]]:
    """The (source, target) lengths of at most `n_buckets` shapes that leave the least padding.

    Pairs are ordered by their longer side and cut into runs; each run is padded to the longest source and target in
    it. Which cuts leave the fewest slots is found exactly, by dynamic programming over the longer side's lengths.
    """
    longer = np.maximum(source_lengths, target_lengths)
    steps = np.unique(longer)
    L = len(steps)
    at = np.searchsorted(steps, longer)
    count = np.bincount(at, minlength=L)
    source_max, target_max = np.zeros(L, np.int64), np.zeros(L, np.int64)
    np.maximum.at(source_max, at, source_lengths)
    np.maximum.at(target_max, at, target_lengths)

    # slots[i, j]: slots taken by the pairs of steps i..j in one bucket
    slots = np.full((L, L), np.inf)
    for i in range(L):
        shape = np.maximum.accumulate(source_max[i:]) + np.maximum.accumulate(target_max[i:])
        slots[i, i:] = shape * np.cumsum(count[i:])

    best = slots[0]  # best[j]: fewest slots for steps 0..j with the buckets so far
    cuts: list[np.ndarray] = []
    for _ in range(min(n_buckets, L) - 1):
        with_cut = np.concatenate([[np.inf], best[:-1]])[:, None] + slots  # [i, j]: the last bucket starts at i
        cuts.append(np.where(with_cut.min(axis=0) < best, with_cut.argmin(axis=0), 0))
        best = np.minimum(best, with_cut.min(axis=0))

    bounds, end = [], L
    for cut in [*reversed(cuts), np.zeros(L, int)]:
        start = int(cut[end - 1])
        bounds.append((int(source_max[start:end].max()), int(target_max[start:end].max())))
        end = start
        if end == 0:
            break
    return bounds[::-1]


def make_buckets(pairs: TokenPairs, config: DataConfig) -> list[Bucket]:
    """The run's static shapes, with as many rows as the token budget (or the batch size) allows."""
    bounds = bucket_bounds(pairs.source.lengths, pairs.target.lengths, config.n_buckets)
    buckets = []
    for source_length, target_length in bounds:
        rows = config.batch_size
        if config.batch_tokens is not None:
            rows = rows_within(config.batch_tokens, max(source_length, target_length), config.rows_multiple)
        buckets.append(Bucket(rows, source_length, target_length))
    return buckets


def rows_within(batch_tokens: int, length: int, multiple: int) -> int:
    """How many rows of a length the budget allows: a multiple of `multiple`, at least one."""
    return max(1, batch_tokens // length // multiple) * multiple


def assign_buckets(pairs: TokenPairs, buckets: Sequence[Bucket]) -> np.ndarray:
    """For each pair the number of the first bucket that holds it."""
    source, target = pairs.source.lengths, pairs.target.lengths
    assigned = np.full(len(pairs), -1)
    for n in reversed(range(len(buckets))):
        fits = (source <= buckets[n].source_length) & (target <= buckets[n].target_length)
        assigned[fits] = n
    if (assigned < 0).any():
        raise UserError(f"{int((assigned < 0).sum())} pairs are longer than the longest batch shape.")
    return assigned


def make_batch(
    pairs: TokenPairs,
    indices: Sequence[int] | np.ndarray,
    bucket: Bucket,
    counts: np.ndarray | None = None,
) -> Batch:
    """The pairs in rows of the bucket's shape: `counts[r]` of them, one after another, in row r; one in each where
    `counts` is None. Rows beyond are padding."""
    chosen = np.asarray(indices, np.int64)
    counts = np.ones(len(chosen), np.int64) if counts is None else counts
    source = _fill(pairs.source.take(chosen), counts, bucket.rows, bucket.source_length, pairs.pad_id)
    target = _fill(pairs.target.take(chosen), counts, bucket.rows, bucket.target_length, pairs.pad_id)
    target_outputs, target_segments, target_positions = target
    target_inputs = np.empty_like(target_outputs)
    target_inputs[:, 1:] = target_outputs[:, :-1]
    target_inputs[target_positions == 0] = pairs.start_id
    target_inputs[target_segments == 0] = pairs.pad_id
    return Batch(
        *source,
        target_inputs,
        target_outputs,
        target_segments,
        target_positions,
        (target_segments > 0).astype(np.float32),
    )


def _fill(
    side: Ragged, counts: np.ndarray, rows: int, length: int, pad_id: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids, segments and positions, each (rows, length), of sequences of which `counts[r]` share row r."""
    first = np.cumsum(counts) - counts  # of the sequences in each row
    row = np.repeat(np.arange(len(counts)), counts)
    begin = row * length + side.offsets[:-1] - side.offsets[first[row]]
    within = np.arange(len(side.ids)) - np.repeat(side.offsets[:-1], side.lengths)
    places = np.repeat(begin, side.lengths) + within
    ids, segments, positions = np.full(rows * length, pad_id, np.int32), *np.zeros((2, rows * length), np.int32)
    ids[places] = side.ids
    segments[places] = np.repeat(np.arange(len(side)) - first[row] + 1, side.lengths)
    positions[places] = within
    return ids.reshape(rows, length), segments.reshape(rows, length), positions.reshape(rows, length)


class Placed(NamedTuple):
    """What stands in a batch: pairs by number, row after row; `counts` of them in each row, or one where it is None."""

    shape: Bucket
    pairs: np.ndarray
    counts: np.ndarray | None = None


@runtime_checkable
class Layout(Protocol):
    """How the pairs of a corpus stand in batches. Every epoch has each pair once, in the same number of batches."""

    shapes: Sequence[Bucket]
    batches_per_epoch: int
    slots: int
    """Places for tokens in an epoch, both sides."""

    def epoch(self, rng: np.random.Generator) -> list[Placed]:
        """The batches of an epoch in order."""
        ...

    def __str__(self) -> str: ...


class BucketLayout:
    """Pairs of similar length together, one a row.

    A bucket's last batch is filled up with empty rows, so that no shape is ever new. Where that costs more slots than
    giving its pairs to the next larger bucket, they go there, other ones each epoch.
    """

    def __init__(self, pairs: TokenPairs, buckets: Sequence[Bucket]) -> None:
        self.shapes = buckets
        self._assigned = assign_buckets(pairs, buckets)
        pairs_in = np.bincount(self._assigned, minlength=len(buckets)).tolist()
        self._moves: list[tuple[int, int] | None] = []
        """For each bucket how many of its pairs go to which one."""
        for n, bucket in enumerate(buckets):
            rest = pairs_in[n] % bucket.rows
            larger = next((m for m in range(n + 1, len(buckets)) if buckets[m].holds(bucket)), None)
            move = None
            if rest and larger is not None:
                cost = rest * (buckets[larger].row_slots - bucket.row_slots)
                if cost < (bucket.rows - rest) * bucket.row_slots:
                    move = (rest, larger)
                    pairs_in[n] -= rest
                    pairs_in[larger] += rest
            self._moves.append(move)
        batches_of = [-(-n // bucket.rows) for n, bucket in zip(pairs_in, buckets, strict=True)]
        self.batches_per_epoch = sum(batches_of)
        self.slots = sum(n * b.rows * b.row_slots for n, b in zip(batches_of, buckets, strict=True))

    def epoch(self, rng: np.random.Generator) -> list[Placed]:
        """Pairs are shuffled, dealt to their buckets, and the batches shuffled."""
        order = rng.permutation(len(self._assigned))
        members = [order[self._assigned[order] == n] for n in range(len(self.shapes))]
        placed = []
        for n, (shape, move) in enumerate(zip(self.shapes, self._moves, strict=True)):
            if move is not None:
                rest, larger = move
                members[larger] = np.concatenate([members[n][-rest:], members[larger]])
                members[n] = members[n][:-rest]
            placed += [Placed(shape, members[n][i : i + shape.rows]) for i in range(0, len(members[n]), shape.rows)]
        return [placed[i] for i in rng.permutation(len(placed))]

    def __str__(self) -> str:
        return " ".join(map(str, self.shapes))


def padding_share(pairs: TokenPairs, layout: Layout) -> float:
    """Of the slots of an epoch, both sides, the share that holds no token."""
    return 1.0 - (len(pairs.source.ids) + len(pairs.target.ids)) / layout.slots


@dataclass(frozen=True)
class TrainingBatches:
    """The batches of a run, number 0 up to `n_batches`, epoch after epoch; all of it follows from the seed."""

    pairs: TokenPairs
    layout: Layout
    seed: int
    n_batches: int
    fingerprint: str = field(init=False)
    _epochs: dict[int, list[Placed]] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "fingerprint", self.pairs.fingerprint())

    @property
    def batches_per_epoch(self) -> int:
        return self.layout.batches_per_epoch

    @property
    def padding_share(self) -> float:
        return padding_share(self.pairs, self.layout)

    def plan(self, epoch: int) -> list[Placed]:
        """The epoch's batches in order."""
        if epoch not in self._epochs:
            plan = self.layout.epoch(np.random.default_rng((self.seed, epoch)))
            # Readers run ahead by a few batches: two neighbouring epochs are all that is ever asked for.
            for old in [e for e in self._epochs if e < epoch - 1]:
                self._epochs.pop(old, None)
            self._epochs[epoch] = plan
        return self._epochs[epoch]

    def __len__(self) -> int:
        return self.n_batches

    def __getitem__(self, index: int) -> Batch:
        epoch, place = divmod(int(index), self.batches_per_epoch)
        shape, members, counts = self.plan(epoch)[place]
        return make_batch(self.pairs, members, shape, counts)

    def position(self, batch: int) -> Position:
        """The record to keep with a checkpoint taken after `batch` batches."""
        epoch, index = divmod(batch, self.batches_per_epoch)
        shapes = f"{self.layout}, {self.batches_per_epoch} an epoch"
        return Position(batch, epoch, index, self.seed, self.fingerprint, shapes)

    def check_position(self, record: dict[str, Any]) -> int:
        """The batch number to go on with. The record must be of the same corpus, batches and seed."""
        here = self.position(int(record["batch"])).to_json()
        differing = [name for name in here if record.get(name) != here[name]]
        if differing:
            raise UserError(
                "The run folder was trained on other data or batches ("
                + ", ".join(f"{name} {record.get(name)} there, {here[name]} here" for name in differing)
                + "); go on with the same data options, or train into another folder."
            )
        return int(record["batch"])


def read_ahead(batches: TrainingBatches, start: int, n_threads: int = 1) -> Iterator[Batch]:
    """Batches from number `start` on, prepared by grain in background threads while the device works."""
    import grain

    dataset = grain.MapDataset.source(batches)[start:]
    options = grain.ReadOptions(num_threads=n_threads, prefetch_buffer_size=8)
    return iter(dataset.to_iter_dataset(options))


def every_pair_once(pairs: TokenPairs, buckets: Sequence[Bucket]) -> Iterator[Batch]:
    """All pairs in order of length, each exactly once, in the buckets' shapes: for a loss over a whole text."""
    assigned = assign_buckets(pairs, buckets)
    for n, bucket in enumerate(buckets):
        members = np.flatnonzero(assigned == n)
        for i in range(0, len(members), bucket.rows):
            yield make_batch(pairs, members[i : i + bucket.rows], bucket)
