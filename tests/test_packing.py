"""Several sentences in one row: what stands where, that they do not see each other, and that none is lost."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from test_batching import PAD, START, all_pairs, assert_equal, corpus, pairs_in
from test_training import free_address, in_processes

from transformer_jax.batching import Batch, Bucket, Ragged, TokenPairs, TrainingBatches, make_batch, read_ahead
from transformer_jax.config import DataConfig, DecodeConfig, ModelConfig, RunConfig, TrainConfig
from transformer_jax.corpus import read_parallel
from transformer_jax.errors import UserError
from transformer_jax.model import Transformer
from transformer_jax.packing import PackedLayout, make_layout, pack, row_lengths
from transformer_jax.sentencepiece_training import train_sentencepiece
from transformer_jax.sharding import data_mesh, shard_rows
from transformer_jax.trainer import Trainer
from transformer_jax.training import batch_loss, init_params

SHAPE = Bucket(8, 24, 24)
MODEL = ModelConfig.tiny(
    200, d_model=16, n_heads=2, d_ff=32, n_encoder_layers=2, n_decoder_layers=2, dropout=0.0, max_length=20
)


def training(pairs: TokenPairs, seed: int = 0, shape: Bucket = SHAPE, n_batches: int = 1000) -> TrainingBatches:
    return TrainingBatches(pairs, PackedLayout(pairs, shape), seed, n_batches)


def epoch_of(batches: TrainingBatches, epoch: int) -> list[Batch]:
    return [batches[epoch * batches.batches_per_epoch + i] for i in range(batches.batches_per_epoch)]


# --- what stands where --------------------------------------------------------------------------------------


def test_packed_batch_is_as_written_by_hand() -> None:
    source = Ragged.pack([[7, 8, 2], [9, 2], [3, 2]])
    target = Ragged.pack([[5, 2], [6, 4, 2], [4, 3, 8, 2]])
    pairs = TokenPairs(source, target, PAD, START)
    batch = make_batch(pairs, [1, 0, 2], Bucket(3, 6, 5), counts=np.array([2, 1]))
    assert batch.source_ids_BS.tolist() == [[9, 2, 7, 8, 2, 0], [3, 2, 0, 0, 0, 0], [0] * 6]
    assert batch.source_segments_BS.tolist() == [[1, 1, 2, 2, 2, 0], [1, 1, 0, 0, 0, 0], [0] * 6]
    assert batch.source_positions_BS.tolist() == [[0, 1, 0, 1, 2, 0], [0, 1, 0, 0, 0, 0], [0] * 6]
    assert batch.target_inputs_BT.tolist() == [[1, 6, 4, 1, 5], [1, 4, 3, 8, 0], [0] * 5]
    assert batch.target_outputs_BT.tolist() == [[6, 4, 2, 5, 2], [4, 3, 8, 2, 0], [0] * 5]
    assert batch.target_segments_BT.tolist() == [[1, 1, 1, 2, 2], [1, 1, 1, 1, 0], [0] * 5]
    assert batch.target_positions_BT.tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 0], [0] * 5]
    assert batch.weights_BT.tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 1, 0], [0] * 5]


def rows_of(lengths: list[tuple[int, int]], source_length: int, target_length: int) -> list[list[tuple[int, int]]]:
    source, target = np.array(lengths).T
    rows = pack(source, target, source_length, target_length)
    return [[lengths[i] for i in rows[r]] for r in range(len(rows))]


def test_rows_are_those_found_by_hand() -> None:
    """Rows of 5 and 5. The longest pair, (4, 4), leaves (1, 1). Of the others, (3, 2) and (2, 3) fill a row together,
    and (5, 1) with (5, 4), which cannot share one: both fill the source. The (1, 1) goes where it fits."""
    rows = rows_of([(3, 2), (1, 1), (5, 1), (4, 4), (5, 4), (2, 3)], 5, 5)
    assert sorted(sorted(row) for row in rows) == [[(1, 1), (4, 4)], [(2, 3), (3, 2)], [(5, 1)], [(5, 4)]]


def test_a_row_prefers_what_fills_both_sides() -> None:
    """After (6, 4), rows of 10 and 10 have (4, 6) left: of equally many tokens (5 and 5 does not fit), (4, 6) leaves
    nothing and (3, 5) one on each side."""
    rows = rows_of([(6, 4), (4, 6), (3, 5), (4, 1)], 10, 10)
    assert sorted(rows[0]) == [(4, 6), (6, 4)]


def test_lengths_of_the_two_sides_follow_the_text() -> None:
    short, long = Ragged.pack([[3] * 6, [3] * 2]), Ragged.pack([[3] * 7, [3] * 9])
    assert row_lengths(short, long, 64) == (32, 64)  # 8 tokens for 16
    assert row_lengths(long, short, 64) == (64, 32)
    assert row_lengths(short, long, 10) == (6, 10)  # 5 would be too few for the longest, of 6
    with pytest.raises(UserError, match=r"longest sentence has 9 tokens, .* data.row_tokens 8"):
        row_lengths(short, long, 8)


@pytest.mark.parametrize("seed", range(20))
def test_rows_of_random_lengths_hold_every_pair_once_and_keep_both_limits(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n, source_length, target_length = int(rng.integers(1, 3000)), int(rng.integers(4, 90)), int(rng.integers(4, 90))
    source = rng.integers(1, source_length + 1, n)
    target = rng.integers(1, target_length + 1, n)
    rows = pack(source, target, source_length, target_length)
    assert sorted(rows.ids.tolist()) == list(range(n))
    for side, limit in ((source, source_length), (target, target_length)):
        assert (np.add.reduceat(side[rows.ids], rows.offsets[:-1]) <= limit).all()
    assert (rows.lengths > 0).all()


def test_a_pair_longer_than_a_row_is_refused() -> None:
    with pytest.raises(UserError, match="1 pairs are longer than a row of 5 and 6 tokens"):
        pack(np.array([5, 3]), np.array([6, 7]), 5, 6)


def test_packing_leaves_little() -> None:
    """Lengths like those of captions: 16 tokens on average, the two sides alike but not equal."""
    rng = np.random.default_rng(0)
    source = np.clip(rng.gamma(9, 16 / 9, 8000).round().astype(int), 3, 60)
    target = np.clip(source + rng.normal(0.7, 2.8, len(source)).round().astype(int), 3, 60)
    for target_length, most in ((64, 0.03), (128, 0.02)):
        source_length = round(target_length * source.sum() / target.sum())
        rows = pack(source, target, source_length, target_length)
        assert 1 - (source.sum() + target.sum()) / (len(rows) * (source_length + target_length)) <= most


# --- the same mathematics -----------------------------------------------------------------------------------


def test_packed_and_unpacked_batches_have_the_same_loss_and_gradients() -> None:
    pairs = corpus(40)
    placed = PackedLayout(pairs, Bucket(16, 50, 50)).epoch(np.random.default_rng(0))
    assert len(placed) == 1
    assert placed[0].counts is not None
    assert placed[0].counts.max() > 3
    packed = make_batch(pairs, placed[0].pairs, placed[0].shape, placed[0].counts)
    unpacked = make_batch(pairs, range(40), Bucket(40, 20, 20))
    model, config = Transformer(MODEL), TrainConfig()
    params = init_params(model, 0)

    def loss(params: Any, batch: Batch) -> Any:
        sums = batch_loss(model, params, batch, config, None)
        return sums.loss / sums.tokens, sums

    run = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (packed_loss, packed_sums), packed_gradients = run(params, packed)
    (unpacked_loss, unpacked_sums), unpacked_gradients = run(params, unpacked)
    assert float(packed_sums.tokens) == float(unpacked_sums.tokens) == len(pairs.target.ids)
    assert float(packed_sums.correct) == float(unpacked_sums.correct)
    assert float(packed_loss) == pytest.approx(float(unpacked_loss), rel=1e-6)
    for a, b in zip(jax.tree.leaves(packed_gradients), jax.tree.leaves(unpacked_gradients), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_a_sentence_does_not_see_its_neighbours() -> None:
    batch = training(corpus(40), shape=Bucket(8, 50, 50))[0]
    row = next(r for r in range(8) if batch.source_segments_BS[r].max() >= 3)
    rng = np.random.default_rng(0)
    changed = Batch(*(x.copy() for x in batch))
    for ids, segments in (
        (changed.source_ids_BS, batch.source_segments_BS),
        (changed.target_inputs_BT, batch.target_segments_BT),
    ):
        there = segments[row] == 2
        ids[row, there] = rng.integers(150, 200, there.sum())
    model = Transformer(MODEL)
    params = init_params(model, 0)

    @jax.jit
    def logits(b: Batch) -> Any:
        return model.apply({"params": params}, b[0], b[3], b[1], b[5], b[2], b[6])

    before, after = np.asarray(logits(batch)), np.asarray(logits(changed))
    neighbour = np.zeros(batch.target_segments_BT.shape, bool)
    neighbour[row] = batch.target_segments_BT[row] == 2
    others = (batch.target_segments_BT > 0) & ~neighbour
    np.testing.assert_allclose(after[others], before[others], atol=1e-6)
    assert (np.abs(after[neighbour] - before[neighbour]).max(axis=-1) > 1e-3).all()


# --- a run's batches ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "seed"), [(1, 0), (2, 0), (50, 1), (301, 2), (700, 3)])
def test_every_epoch_has_every_pair_once_in_equally_many_batches_of_one_shape(n: int, seed: int) -> None:
    pairs = corpus(n, seed=seed)
    batches = training(pairs, seed)
    orders = []
    for epoch in range(3):
        read = epoch_of(batches, epoch)
        assert Counter(p for batch in read for p in pairs_in(batch)) == all_pairs(pairs)
        assert {b.source_ids_BS.shape for b in read} == {b.target_inputs_BT.shape for b in read} == {(8, 24)}
        assert sum(float(b.weights_BT.sum()) for b in read) == len(pairs.target.ids)
        orders.append([p for batch in read for p in pairs_in(batch)])
    if n > 2:
        assert orders[0] != orders[1] != orders[2]


def test_pairs_of_the_same_lengths_find_new_neighbours_each_epoch() -> None:
    pairs = corpus(300, longest=4)
    placed = [training(pairs).plan(epoch) for epoch in (0, 1)]
    rows = [
        {frozenset(row.tolist()) for b in plan for row in np.split(b.pairs, np.cumsum(b.counts)[:-1])}
        for plan in placed
    ]
    assert len(rows[0] & rows[1]) < 0.05 * len(rows[0])


def test_padding_share_counts_every_slot_of_an_epoch() -> None:
    batches = training(corpus(301))
    read = epoch_of(batches, 0)
    slots = sum(b.source_ids_BS.size + b.target_outputs_BT.size for b in read)
    tokens = sum(int((b.source_segments_BS > 0).sum() + (b.target_segments_BT > 0).sum()) for b in read)
    assert batches.padding_share == pytest.approx(1 - tokens / slots)


def test_batches_are_the_same_in_whatever_order_they_are_asked_for() -> None:
    pairs = corpus(200)
    forwards, at_random = training(pairs), training(pairs)
    numbers = list(range(3 * forwards.batches_per_epoch))
    expected = {i: forwards[i] for i in numbers}
    for i in np.random.default_rng(5).permutation(numbers).tolist():
        assert_equal(at_random[i], expected[i])


def test_reading_goes_on_in_mid_epoch_after_the_position_record() -> None:
    pairs = corpus(200)
    first = training(pairs, n_batches=30)
    number = first.batches_per_epoch + 2
    record = json.loads(json.dumps(first.position(number).to_json()))
    assert (record["epoch"], record["index"]) == (1, 2)
    second = training(pairs, n_batches=30)
    rest = list(read_ahead(second, second.check_position(record)))
    assert len(rest) == 30 - number
    for offset, batch in enumerate(rest):
        assert_equal(Batch(*batch), first[number + offset])


@pytest.mark.parametrize("batch", [0, 3])
def test_position_of_another_corpus_seed_shape_or_way_of_batching_is_refused(batch: int) -> None:
    pairs = corpus(200)
    record = training(pairs).position(batch).to_json()
    others = {
        "fingerprint": training(corpus(200, seed=1)),
        "seed": training(pairs, seed=1),
        "shapes": training(pairs, shape=Bucket(8, 24, 26)),
        r"shapes .* 4x24/24": training(pairs, shape=Bucket(4, 24, 24)),
        r"shapes .* packed .* there": TrainingBatches(pairs, make_layout(pairs, DataConfig(max_tokens=20)), 0, 9),
    }
    for words, other in others.items():
        with pytest.raises(UserError, match=words):
            other.check_position(record)


# --- devices and processes ----------------------------------------------------------------------------------


def digest(batch: Any) -> str:
    return hashlib.sha256(b"".join(np.ascontiguousarray(x).tobytes() for x in batch)).hexdigest()


def digests_on(n_devices: int, n_batches: int = 4) -> list[str]:
    """What the devices of a mesh hold of the first batches, put together again."""
    from transformer_jax.sharding import to_host

    mesh = data_mesh(n_devices)
    batches = training(corpus(200))
    return [digest(to_host(shard_rows(batches[i], mesh))) for i in range(n_batches)]


@pytest.mark.parametrize("n_devices", [1, 2, 4, 8])
def test_order_is_the_same_on_any_number_of_devices(n_devices: int) -> None:
    batches = training(corpus(200))
    assert digests_on(n_devices) == [digest(batches[i]) for i in range(4)]


WORKER = """
import sys
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
from transformer_jax.sharding import join_processes
join_processes(sys.argv[1], 2, int(sys.argv[2]))
sys.path.insert(0, sys.argv[3])
import test_packing
assert jax.device_count() == 8
print("RESULT", *test_packing.digests_on(8))
"""


def test_order_is_the_same_in_two_processes() -> None:
    address, here = free_address(), str(Path(__file__).parent)
    outputs = in_processes([["-c", WORKER, address, str(i), here] for i in range(2)])
    found = [line.split()[1:] for out in outputs for line in out.splitlines() if line.startswith("RESULT")]
    assert found == [digests_on(1)] * 2


RUN = RunConfig(
    model=dataclasses.replace(MODEL, vocab_size=0, n_encoder_layers=1, n_decoder_layers=1, max_length=64),
    data=DataConfig(task="numbers", max_tokens=60, batching="packed", row_tokens=96, batch_tokens=768, rows_multiple=8),
    train=TrainConfig(epochs=2, log_every=1, evaluate_every=None, checkpoint_every=1000),
    decode=DecodeConfig(metric="exact", limit=4),
)


def recorded(trainer: Trainer, used: list[Batch], stop_after: int | None = None) -> None:
    """Trains, keeps the batches, and asks the run to stop after so many as a signal would."""
    import os
    import signal

    step_function: Any = trainer.train_step

    def record(state: Any, batch: Any) -> Any:
        used.append(Batch(*jax.device_get(batch)))
        if len(used) == stop_after:
            os.kill(os.getpid(), signal.SIGTERM)
        return step_function(state, batch)

    record._cache_size = step_function._cache_size  # type: ignore[attr-defined]
    trainer.train_step = record
    trainer.train()


def test_a_run_that_stops_in_mid_epoch_on_eight_devices_goes_on_on_two(tmp_path: Path) -> None:
    def trainer(n_devices: int) -> Trainer:
        return Trainer(dataclasses.replace(RUN, train=dataclasses.replace(RUN.train, n_devices=n_devices)), tmp_path)

    used: list[Batch] = []
    first = trainer(8)
    per_epoch, pairs = first.batches.batches_per_epoch, first.batches.pairs
    assert per_epoch > 4
    recorded(first, used, stop_after=per_epoch - 2)
    assert len(used) == per_epoch - 2
    second = trainer(2)
    recorded(second, used)
    assert len(used) == 2 * per_epoch
    for epoch in (used[:per_epoch], used[per_epoch:]):
        assert Counter(p for batch in epoch for p in pairs_in(batch)) == all_pairs(pairs)
    for i, batch in enumerate(used):
        assert_equal(batch, first.batches[i])
    assert second.program_counts()["training"] == 1
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [r for r in records if r["kind"] == "train"]
    assert len(steps) == 2 * per_epoch
    assert all(0 <= r["wait"] <= 1 and r["padding"] == pytest.approx(first.batches.padding_share) for r in steps)
    assert [r["epoch"] for r in steps] == pytest.approx([(n + 1) / per_epoch for n in range(2 * per_epoch)])
    assert (tmp_path / "curves.png").is_file()  # without evaluations, too


# --- the config's edge --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batching": "tight"}, "batching is 'tight'; it must be one of buckets, packed"),
        ({"batch_tokens": None}, "batch_tokens is None; set it, or take batching buckets"),
        ({"row_tokens": 100}, "row_tokens is 100, but a sentence may have max_tokens, 128"),
        ({"batch_tokens": 1500}, r"batch_tokens is 1500, too few for 8 rows \(rows_multiple\) of 256"),
        ({"row_tokens": 20_000, "batch_tokens": 200_000}, "row_tokens is 20000; it must be at most 16384"),
        ({"row_tokens": 0}, "row_tokens is 0; it must be at least 1"),
    ],
)
def test_settings_that_cannot_be_packed_are_refused_in_one_sentence(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        DataConfig(**{"batching": "packed", **changes})


def test_a_step_has_as_many_rows_as_the_tokens_allow() -> None:
    config = DataConfig(batching="packed", max_tokens=20, row_tokens=64, batch_tokens=64 * 23, rows_multiple=4)
    shape = make_layout(corpus(200), config).shapes[0]
    assert shape.rows == 20
    assert max(shape.source_length, shape.target_length) == 64


# --- real text ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "vocab_size", "rows", "most"), [("multi30k", 6000, (64, 96, 128), 0.03), ("newstest", 8000, (256,), 0.03)]
)
def test_padding_of_real_text(name: str, vocab_size: int, rows: tuple[int, ...], most: float, shared_dir: Path) -> None:
    folder = shared_dir / "data" / name
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there: this test needs its text")
    text = read_parallel(folder / "train.en.gz", folder / "train.de.gz")
    tokenizer = train_sentencepiece([*text.source, *text.target], vocab_size, model_type="bpe", progress=False)
    sides = [
        Ragged.pack(tokenizer.encode_source_batch(text.source)),
        Ragged.pack(tokenizer.encode_target_batch(text.target)),
    ]
    pairs = TokenPairs(*sides, tokenizer.pad_id, tokenizer.start_id)
    for row_tokens in rows:
        config = DataConfig(batching="packed", row_tokens=row_tokens, max_tokens=row_tokens, batch_tokens=2560)
        assert TrainingBatches(pairs, make_layout(pairs, config), 0, 1).padding_share <= most
    if name == "multi30k":
        layout = make_layout(pairs, DataConfig(n_buckets=20, batch_tokens=2560))
        assert len(layout.shapes) <= 20
        assert TrainingBatches(pairs, layout, 0, 1).padding_share <= 0.12
