"""Padding of bucketed and packed batches on a text, the speed of the pipeline alone, and which of them trains faster.

    python benchmarks/packing.py --source train.en --target train.de --vocab-size 6000 --row-tokens 64 96 128
    python benchmarks/packing.py --source train.en --target train.de --grain         # grain's packers beside ours
    python benchmarks/packing.py --source train.en --target train.de --pairs 2000000 # pairs drawn from the text
    python benchmarks/packing.py --source train.en --target train.de --config configs/multi30k_tutorial.py --steps 5

Padding counts all slots of an epoch on both sides, empty rows included. The pipeline's speed is in real tokens of both
sides per second of processor time, in one thread: "lay out" is what happens once (packing; finding buckets), "batches"
is an epoch's order and its arrays. Peak memory is that of the process so far.

With --config the config's model is trained on each layout's shapes, --steps times on each, turn by turn. The speed is
that of an epoch: each shape's lowest time times its number of batches; beside it the same from processor time, which
is nearly free of what else the machine does.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from transformer_jax.batching import TokenPairs, TrainingBatches
from transformer_jax.config import DataConfig
from transformer_jax.corpus import read_parallel
from transformer_jax.packing import make_layout, row_lengths
from transformer_jax.run_data import to_tokens
from transformer_jax.run_options import load_config
from transformer_jax.sentencepiece_training import train_sentencepiece
from transformer_jax.tokenizer import load_tokenizer


def read_pairs(options: argparse.Namespace) -> TokenPairs:
    text = read_parallel(options.source, options.target)
    if options.tokenizer:
        tokenizer = load_tokenizer(options.tokenizer)
    else:
        tokenizer = train_sentencepiece([*text.source, *text.target], options.vocab_size, model_type="bpe")
    pairs, removed = to_tokens(text, tokenizer, options.max_tokens)
    print(
        f"{len(pairs):,} pairs, {len(pairs.source.ids):,} + {len(pairs.target.ids):,} tokens; {removed or 'all kept'}"
    )
    if options.pairs:
        drawn = np.random.default_rng(0).integers(0, len(pairs), options.pairs)
        pairs = TokenPairs(pairs.source.take(drawn), pairs.target.take(drawn), pairs.pad_id, pairs.start_id)
        print(f"{len(pairs):,} pairs drawn from them")
    return pairs


def layouts(options: argparse.Namespace) -> Iterator[tuple[str, DataConfig]]:
    common = {"max_tokens": options.max_tokens, "batch_tokens": options.batch_tokens, "rows_multiple": 8}
    for n in options.n_buckets:
        yield f"{n} buckets", DataConfig(**common, n_buckets=n)
    for n in options.row_tokens:
        common |= {"max_tokens": min(n, options.max_tokens), "batch_tokens": max(8 * n, options.batch_tokens)}
        yield f"rows of {n}", DataConfig(**common, batching="packed", row_tokens=n)


def measure(name: str, pairs: TokenPairs, config: DataConfig) -> TrainingBatches:
    tokens = len(pairs.source.ids) + len(pairs.target.ids)
    began = time.process_time()
    layout = make_layout(pairs, config)
    laid_out = time.process_time() - began
    batches = TrainingBatches(pairs, layout, 0, layout.batches_per_epoch)
    began = time.process_time()
    for i in range(len(batches)):
        _ = batches[i]
    made = time.process_time() - began
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    print(
        f"{name:14}  padding {batches.padding_share:6.2%}  {len(batches):,} batches of {len(layout.shapes)} shapes  "
        f"lay out {tokens / laid_out:,.0f} tokens/s  batches {tokens / made:,.0f} tokens/s  peak {memory:,.0f} MiB"
    )
    return batches


def measure_grain(pairs: TokenPairs, row_tokens: int, n_bins: int) -> None:
    import grain
    from grain.experimental import BestFitPackIterDataset, FirstFitPackIterDataset

    class Source:
        def __len__(self) -> int:
            return len(pairs)

        def __getitem__(self, index: int) -> dict[str, np.ndarray]:
            return {"source": pairs.source[index], "target": pairs.target[index]}

    source, target = row_lengths(pairs.source, pairs.target, row_tokens)
    tokens = len(pairs.source.ids) + len(pairs.target.ids)
    for name, packer in (("first-fit", FirstFitPackIterDataset), ("best-fit", BestFitPackIterDataset)):
        shuffled: Any = grain.MapDataset.source(Source()).shuffle(seed=0).to_iter_dataset()
        lengths = {"source": source, "target": target}
        began = time.process_time()
        rows = sum(1 for _ in packer(shuffled, length_struct=lengths, num_packing_bins=n_bins))
        speed = tokens / (time.process_time() - began)
        padding = 1 - tokens / (rows * (source + target))
        print(f"grain {name}, {n_bins} rows of {row_tokens} open  padding {padding:6.2%}  {speed:,.0f} tokens/s")


def train_on(all_batches: dict[str, TrainingBatches], pairs: TokenPairs, options: argparse.Namespace) -> None:
    import jax

    from transformer_jax import Transformer
    from transformer_jax.config import replace
    from transformer_jax.optimizer import adam
    from transformer_jax.sharding import data_mesh, replicate, shard_rows
    from transformer_jax.training import init_state, make_train_step

    run = load_config(options.config)
    vocab_size = 1 + int(max(pairs.source.ids.max(), pairs.target.ids.max()))
    config = replace(run.model, vocab_size=vocab_size, start_id=pairs.start_id, pad_id=pairs.pad_id)
    model, mesh = Transformer(config), data_mesh(1)
    optimizer = adam(run.train, config.d_model)
    step = make_train_step(model, optimizer, run.train, mesh)
    state = replicate(init_state(model, optimizer, 0), mesh)

    counts, example = Counter(), {}
    for name, batches in all_batches.items():
        for i, placed in enumerate(batches.plan(0)):
            counts[name, placed.shape] += 1
            example.setdefault((name, placed.shape), i)
    lowest = dict.fromkeys(example, (float("inf"), float("inf")))
    for turn in range(options.steps + 1):  # the first one compiles
        for (name, shape), i in example.items():
            batch = shard_rows(all_batches[name][i], mesh)
            began, began_cpu = time.perf_counter(), time.process_time()
            state, log = step(state, batch)
            jax.block_until_ready(log)
            if turn:
                wall, cpu = lowest[name, shape]
                wall = min(wall, time.perf_counter() - began)
                lowest[name, shape] = (wall, min(cpu, time.process_time() - began_cpu))
    for name in all_batches:
        wall, cpu = (sum(n * lowest[key][i] for key, n in counts.items() if key[0] == name) for i in (0, 1))
        target = len(pairs.target.ids)
        print(f"{name:14}  {target / wall:,.0f} target tokens/s, {wall:.0f} s an epoch; {cpu:.0f} s of processor time")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, help="folder of a tokenizer; one is trained if left out")
    parser.add_argument("--vocab-size", type=int, default=6000)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--batch-tokens", type=int, default=2560)
    parser.add_argument("--n-buckets", type=int, nargs="*", default=[8, 20])
    parser.add_argument("--row-tokens", type=int, nargs="*", default=[64, 128])
    parser.add_argument("--pairs", type=int, help="draw so many pairs from the text")
    parser.add_argument("--grain", action="store_true", help="grain's packers too")
    parser.add_argument("--config", type=Path, help="train this config's model on each")
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    pairs = read_pairs(options)
    measured = {name: measure(name, pairs, config) for name, config in layouts(options)}
    if options.grain:
        for row_tokens in options.row_tokens:
            measure_grain(pairs, row_tokens, 64)
    if options.config:
        train_on(measured, pairs, options)


if __name__ == "__main__":
    main()
