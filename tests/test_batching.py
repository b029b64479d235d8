"""Batches: little padding, every pair once, and an order that can be resumed."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
import pytest

from transformer_jax.batching import (
    Batch,
    Bucket,
    BucketLayout,
    Ragged,
    TokenPairs,
    TrainingBatches,
    assign_buckets,
    bucket_bounds,
    every_pair_once,
    length_sorted_batches,
    make_batch,
    make_buckets,
    read_ahead,
)
from transformer_jax.config import DataConfig
from transformer_jax.errors import UserError

PAD, START, END = 0, 1, 2
FACTS_LENGTHS = [7, 19, 9, 17, 8, 12, 22, 16]


def corpus(n: int, longest: int = 20, seed: int = 0) -> TokenPairs:
    """Pairs that all differ: each side begins with the pair's own number (from 100) and ends with END."""
    rng = np.random.default_rng(seed)

    def side() -> Ragged:
        return Ragged.pack(
            [[100 + i, *rng.integers(3, 50, rng.integers(0, longest - 1)).tolist(), END] for i in range(n)]
        )

    return TokenPairs(side(), side(), PAD, START)


def config(**changes: Any) -> DataConfig:
    return DataConfig(**{"max_tokens": 20, "batch_tokens": 160, "n_buckets": 3, "rows_multiple": 4, **changes})


def training(pairs: TokenPairs, seed: int = 0, n_batches: int = 1000, **changes: Any) -> TrainingBatches:
    return TrainingBatches(pairs, BucketLayout(pairs, make_buckets(pairs, config(**changes))), seed, n_batches)


def pairs_in(batch: Batch) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The pairs of a batch, found again by its segments alone."""
    found = []
    for row in range(len(batch.source_ids_BS)):
        for segment in range(1, int(batch.source_segments_BS[row].max()) + 1):
            source = batch.source_ids_BS[row][batch.source_segments_BS[row] == segment]
            target = batch.target_outputs_BT[row][batch.target_segments_BT[row] == segment]
            found.append((tuple(source.tolist()), tuple(target.tolist())))
    return found


def all_pairs(pairs: TokenPairs) -> Counter[Any]:
    return Counter((tuple(pairs.source[i].tolist()), tuple(pairs.target[i].tolist())) for i in range(len(pairs)))


def assert_equal(a: Batch, b: Batch) -> None:
    for name, x, y in zip(Batch._fields, a, b, strict=True):
        np.testing.assert_array_equal(x, y, err_msg=name)


# --- filling to a budget ------------------------------------------------------------------------------------


def test_length_sorted_batches_are_those_of_the_facts() -> None:
    assert length_sorted_batches(FACTS_LENGTHS, 48) == [[0, 4, 2, 5], [7, 3], [1, 6]]


def test_length_sorted_batches_leave_the_padding_of_the_facts() -> None:
    def pads(batches: list[list[int]]) -> int:
        return sum(max(FACTS_LENGTHS[j] for j in batch) - FACTS_LENGTHS[i] for batch in batches for i in batch)

    assert pads(length_sorted_batches(FACTS_LENGTHS, 48)) == 16
    assert pads(length_sorted_batches(FACTS_LENGTHS, 22 * 8)) == 66


def test_a_line_longer_than_the_budget_is_a_batch_of_its_own() -> None:
    assert length_sorted_batches([5, 100, 5, 5], 10) == [[0, 2], [3], [1]]
    assert length_sorted_batches([], 10) == []


# --- the shapes ---------------------------------------------------------------------------------------------


def least_slots(source: Sequence[int], target: Sequence[int], n_buckets: int) -> int:
    """The fewest slots over all ways to cut the lengths 1..longest into at most n_buckets ranges."""
    longer = [max(pair) for pair in zip(source, target, strict=True)]
    longest = max(longer)
    best = None
    for cuts in itertools.combinations_with_replacement(range(longest + 1), n_buckets - 1):
        edges, slots = [0, *cuts, longest], 0
        for low, high in itertools.pairwise(edges):
            inside = [i for i, length in enumerate(longer) if low < length <= high]
            if inside:
                slots += len(inside) * (max(source[i] for i in inside) + max(target[i] for i in inside))
        best = slots if best is None else min(best, slots)
    assert best is not None
    return best


@pytest.mark.parametrize("seed", range(12))
def test_bucket_bounds_leave_as_few_slots_as_trying_all_cuts(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n, n_buckets = int(rng.integers(1, 15)), int(rng.integers(1, 5))
    source, target = rng.integers(1, 12, n), rng.integers(1, 12, n)
    bounds = bucket_bounds(source, target, n_buckets)
    assert 1 <= len(bounds) <= n_buckets
    slots = 0
    for s, t in zip(source, target, strict=True):
        slots += sum(next(bound for bound in bounds if s <= bound[0] and t <= bound[1]))
    assert slots == least_slots(source.tolist(), target.tolist(), n_buckets)


def test_there_are_never_more_shapes_than_asked_for_and_rows_divide() -> None:
    pairs = corpus(300)
    for n_buckets in (1, 2, 5):
        batches = training(pairs, n_buckets=n_buckets)
        shapes = {
            (b.source_ids_BS.shape, b.target_outputs_BT.shape)
            for b in islice(map(batches.__getitem__, range(200)), 200)
        }
        assert len(shapes) <= n_buckets
        assert all(source[0] % 4 == 0 for source, _ in shapes)


def test_rows_times_longest_side_stays_within_the_token_budget() -> None:
    for bucket in make_buckets(corpus(300), config(batch_tokens=200, n_buckets=4)):
        longest = max(bucket.source_length, bucket.target_length)
        assert bucket.rows * longest <= 200
        assert (bucket.rows + 4) * longest > 200  # no row less than fits


def test_batch_size_mode_has_that_many_rows_in_every_shape() -> None:
    assert {b.rows for b in make_buckets(corpus(100), config(batch_tokens=None, batch_size=12))} == {12}


def test_pairs_longer_than_the_biggest_bucket_are_refused_and_counted() -> None:
    pairs = TokenPairs(Ragged.pack([[3, 2], [3] * 9, [3] * 5]), Ragged.pack([[3, 2], [4, 2], [4] * 9]), PAD, START)
    with pytest.raises(UserError, match="2 pairs are longer"):
        assign_buckets(pairs, [Bucket(4, 5, 5)])


def test_a_pair_goes_to_the_first_bucket_that_holds_both_sides() -> None:
    pairs = TokenPairs(Ragged.pack([[3] * 2, [3] * 2, [3] * 6]), Ragged.pack([[3] * 3, [3] * 8, [3] * 3]), PAD, START)
    assert assign_buckets(pairs, [Bucket(4, 4, 4), Bucket(4, 8, 8)]).tolist() == [0, 1, 1]


# --- one batch ----------------------------------------------------------------------------------------------


def test_batch_of_two_pairs_is_as_written_by_hand() -> None:
    pairs = TokenPairs(Ragged.pack([[7, 8, 2], [9, 2]]), Ragged.pack([[5, 2], [6, 4, 3, 2]]), PAD, START)
    batch = make_batch(pairs, [1, 0], Bucket(3, 4, 5))
    assert batch.source_ids_BS.tolist() == [[9, 2, 0, 0], [7, 8, 2, 0], [0, 0, 0, 0]]
    assert batch.source_segments_BS.tolist() == [[1, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]]
    assert batch.source_positions_BS.tolist() == [[0, 1, 0, 0], [0, 1, 2, 0], [0, 0, 0, 0]]
    assert batch.target_inputs_BT.tolist() == [[1, 6, 4, 3, 0], [1, 5, 0, 0, 0], [0, 0, 0, 0, 0]]
    assert batch.target_outputs_BT.tolist() == [[6, 4, 3, 2, 0], [5, 2, 0, 0, 0], [0, 0, 0, 0, 0]]
    assert batch.target_segments_BT.tolist() == [[1, 1, 1, 1, 0], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]]
    assert batch.target_positions_BT.tolist() == [[0, 1, 2, 3, 0], [0, 1, 0, 0, 0], [0, 0, 0, 0, 0]]
    assert batch.weights_BT.tolist() == [[1, 1, 1, 1, 0], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]]
    assert {x.dtype.name for x in batch[:-1]} == {"int32"}
    assert batch.weights_BT.dtype == np.float32


def test_decoder_reads_the_start_token_and_then_its_own_outputs() -> None:
    batch = training(corpus(50))[3]
    for inputs, outputs, segments in zip(
        batch.target_inputs_BT, batch.target_outputs_BT, batch.target_segments_BT, strict=True
    ):
        n = int(segments.sum())
        if n:
            assert inputs[:n].tolist() == [START, *outputs[: n - 1].tolist()]
            assert outputs[n - 1] == END


def test_an_empty_batch_is_all_padding() -> None:
    batch = make_batch(corpus(3), [], Bucket(2, 4, 4))
    assert not batch.weights_BT.any()
    assert not batch.source_segments_BS.any()
    assert not batch.target_segments_BT.any()


def test_five_more_pad_columns_change_no_token_segment_position_or_weight() -> None:
    pairs = corpus(6)
    tight = make_batch(pairs, range(6), Bucket(8, 20, 20))
    wide = make_batch(pairs, range(6), Bucket(8, 25, 25))
    for name, a, b in zip(Batch._fields, tight, wide, strict=True):
        np.testing.assert_array_equal(a, b[:, :20], err_msg=name)
        assert not b[:, 20:].any(), name  # PAD is 0 here, and so are segment, position and weight of padding


# --- a run's batches ----------------------------------------------------------------------------------------


def test_every_epoch_sees_every_pair_exactly_once() -> None:
    pairs = corpus(101)
    batches = training(pairs)
    per_epoch = batches.batches_per_epoch
    for epoch in range(3):
        seen = Counter(p for i in range(epoch * per_epoch, (epoch + 1) * per_epoch) for p in pairs_in(batches[i]))
        assert seen == all_pairs(pairs)


def test_empty_rows_weigh_nothing() -> None:
    pairs = corpus(101)
    batches = training(pairs)
    total = sum(float(batches[i].weights_BT.sum()) for i in range(batches.batches_per_epoch))
    assert total == len(pairs.target.ids)
    empty_rows = 0
    for i in range(batches.batches_per_epoch):
        batch = batches[i]
        empty = batch.source_segments_BS.sum(1) == 0
        empty_rows += int(empty.sum())
        assert not batch.weights_BT[empty].any()
        assert (batch.target_outputs_BT[empty] == PAD).all()
    assert empty_rows > 0  # 101 pairs do not fill rows of four


def test_epochs_have_the_same_number_of_batches_in_another_order() -> None:
    batches = training(corpus(101))
    plans = [batches.plan(epoch) for epoch in range(4)]
    assert [len(plan) for plan in plans] == [batches.batches_per_epoch] * 4
    orders = [[index for _, members, _ in plan for index in members.tolist()] for plan in plans]
    assert len({tuple(order) for order in orders}) == 4


def test_batches_are_the_same_in_whatever_order_they_are_asked_for() -> None:
    pairs = corpus(60)
    forwards, at_random = training(pairs), training(pairs)
    numbers = list(range(3 * forwards.batches_per_epoch))
    expected = {i: forwards[i] for i in numbers}
    for i in np.random.default_rng(5).permutation(numbers).tolist():
        assert_equal(at_random[i], expected[i])


def test_the_seed_decides_the_order() -> None:
    pairs = corpus(60)
    first, again, other = training(pairs, 3), training(pairs, 3), training(pairs, 4)
    for i in range(10):
        assert_equal(first[i], again[i])
    assert [pairs_in(first[i]) for i in range(10)] != [pairs_in(other[i]) for i in range(10)]


def test_pairs_of_a_bucket_are_dealt_anew_each_epoch() -> None:
    """Batches that held the same sentences each epoch would not be random batches."""
    batches = training(corpus(200))
    partners = [{frozenset(members.tolist()) for _, members, _ in batches.plan(epoch)} for epoch in (0, 1)]
    assert not partners[0] & {group for group in partners[1] if len(group) > 4}


@pytest.mark.parametrize("n", [1, 2, 3])
def test_tiny_corpora_make_batches(n: int) -> None:
    pairs = corpus(n)
    batches = training(pairs)
    per_epoch = batches.batches_per_epoch
    assert 1 <= per_epoch <= n
    assert Counter(p for i in range(per_epoch) for p in pairs_in(batches[i])) == all_pairs(pairs)
    assert batches[10 * per_epoch].weights_BT.sum() > 0


def pairs_of_lengths(lengths: Sequence[int]) -> TokenPairs:
    """Both sides as long as said; every token of a pair is its number, from 100."""
    side = Ragged.pack([[100 + i] * n for i, n in enumerate(lengths)])
    return TokenPairs(side, side, PAD, START)


def test_pairs_that_would_leave_a_batch_nearly_empty_go_to_the_next_larger_bucket() -> None:
    """Of six pairs of length 4, two would share a batch with two empty rows. Moving them to the bucket of 5 costs 2 x 2
    slots more, and saves the 2 x 8 of the empty rows; the two pairs of length 5 have room beside them."""
    pairs = pairs_of_lengths([4] * 6 + [5] * 2)
    layout = BucketLayout(pairs, [Bucket(4, 4, 4), Bucket(4, 5, 5)])
    assert (layout.batches_per_epoch, layout.slots) == (2, 4 * 8 + 4 * 10)
    moved = set()
    for epoch in range(8):
        placed = sorted(layout.epoch(np.random.default_rng(epoch)), key=lambda batch: batch.shape.source_length)
        assert [len(batch.pairs) for batch in placed] == [4, 4]
        assert sorted(np.concatenate([batch.pairs for batch in placed]).tolist()) == list(range(8))
        moved |= {i for i in placed[1].pairs.tolist() if i < 6}
    assert moved == set(range(6))  # each epoch others


def test_pairs_stay_where_the_next_bucket_costs_more_or_cannot_hold_them() -> None:
    nearly_full = BucketLayout(pairs_of_lengths([4] * 7 + [9]), [Bucket(4, 4, 4), Bucket(4, 9, 9)])
    assert nearly_full.slots == 2 * 4 * 8 + 4 * 18
    source, target = Ragged.pack([[3] * 4, [3] * 2]), Ragged.pack([[3] * 2, [3] * 5])
    other_way_round = BucketLayout(TokenPairs(source, target, PAD, START), [Bucket(4, 4, 2), Bucket(4, 2, 5)])
    assert other_way_round.batches_per_epoch == 2


@pytest.mark.parametrize("seed", range(5))
def test_buckets_of_any_lengths_hold_each_pair_once_an_epoch(seed: int) -> None:
    rng = np.random.default_rng(seed)
    pairs = corpus(int(rng.integers(1, 200)), seed=seed)
    changes = {"n_buckets": int(rng.integers(1, 12)), "batch_tokens": int(rng.integers(80, 400)), "rows_multiple": 2}
    batches = training(pairs, **changes)
    for epoch in (0, 1):
        numbers = range(epoch * batches.batches_per_epoch, (epoch + 1) * batches.batches_per_epoch)
        assert Counter(p for i in numbers for p in pairs_in(batches[i])) == all_pairs(pairs)
    assert len(batches.plan(1)) == batches.batches_per_epoch


def test_padding_share_counts_the_empty_slots_of_an_epoch() -> None:
    batches = training(corpus(101))
    slots = tokens = 0
    for i in range(batches.batches_per_epoch):
        b = batches[i]
        slots += b.source_ids_BS.size + b.target_outputs_BT.size
        tokens += int(b.source_segments_BS.sum() + b.target_segments_BT.sum())
    assert batches.padding_share == pytest.approx(1 - tokens / slots)


# --- stopping and going on ----------------------------------------------------------------------------------


def test_position_goes_out_as_plain_values_and_comes_back_as_the_batch_number() -> None:
    pairs = corpus(60)
    batches = training(pairs)
    number = 2 * batches.batches_per_epoch + 3
    record = batches.position(number).to_json()
    assert (record["epoch"], record["index"], record["batch"]) == (2, 3, number)
    assert training(pairs).check_position(record) == number


def test_position_of_another_corpus_is_refused_by_name() -> None:
    record = training(corpus(60)).position(3).to_json()
    with pytest.raises(UserError, match="fingerprint"):
        training(corpus(60, seed=1)).check_position(record)


def test_position_of_another_seed_is_refused_by_name() -> None:
    pairs = corpus(60)
    record = training(pairs, 0).position(3).to_json()
    with pytest.raises(UserError, match="seed 0 there, 1 here"):
        training(pairs, 1).check_position(record)


@pytest.mark.parametrize("changes", [{"n_buckets": 1}, {"batch_tokens": 320}, {"rows_multiple": 8}])
@pytest.mark.parametrize("batch", [0, 3])
def test_position_of_other_batch_shapes_is_refused(changes: dict[str, Any], batch: int) -> None:
    """Also within the first epoch, where the epoch and the index are the same whatever the shapes."""
    pairs = corpus(60)
    record = training(pairs).position(batch).to_json()
    with pytest.raises(UserError, match=r"shapes .* there, .* here"):
        training(pairs, **changes).check_position(record)


def test_fingerprint_sees_every_change_of_the_tokens() -> None:
    def pairs(source: list[list[int]], target: list[list[int]], pad: int = PAD, start: int = START) -> TokenPairs:
        return TokenPairs(Ragged.pack(source), Ragged.pack(target), pad, start)

    source, target = [[3, 4, 2], [5, 2]], [[6, 2], [7, 8, 2]]
    variants = [
        pairs(source, target),
        pairs([[3, 4], [2, 5, 2]], target),  # the same tokens, cut elsewhere
        pairs([[3, 9, 2], [5, 2]], target),
        pairs(source, [[6, 2], [7, 9, 2]]),
        pairs(target, source),
        pairs(source, target, pad=9),
        pairs(source, target, start=9),
    ]
    assert len({p.fingerprint() for p in variants}) == len(variants)
    assert pairs(source, target).fingerprint() == variants[0].fingerprint()


def test_reading_ahead_gives_exactly_the_batches_from_a_number_on() -> None:
    batches = training(corpus(60), n_batches=25)
    for start in (0, 7, 24):
        read = list(read_ahead(batches, start, n_threads=2))
        assert len(read) == 25 - start
        for offset, batch in enumerate(read):
            assert_equal(Batch(*batch), batches[start + offset])


# --- a whole text -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 5, 101])
def test_a_whole_text_is_read_exactly_once(n: int) -> None:
    pairs = corpus(n)
    buckets = make_buckets(pairs, config())
    read = list(every_pair_once(pairs, buckets))
    assert Counter(p for batch in read for p in pairs_in(batch)) == all_pairs(pairs)
    assert sum(float(batch.weights_BT.sum()) for batch in read) == len(pairs.target.ids)
    assert {b.source_ids_BS.shape for b in read} <= {(b.rows, b.source_length) for b in buckets}
