"""The training step of this project beside a plain PyTorch one: same shapes, same threads, turn by turn.

    python benchmarks/train_step.py                      # both cases, two threads
    python benchmarks/train_step.py --case dates --repeats 15
    python benchmarks/train_step.py --json > result.json

A step is forward, backward and Adam (beta2 0.98, epsilon 1e-9) in float32, with dropout 0.1 and label smoothing 0.1.

- Ours is `transformer_jax.training.make_train_step` on a mesh of one device, as `train.py` runs it: the accuracy, the
  perplexity and the gradient norm that it logs are part of the step.
- PyTorch is eager, from torch.nn modules: one product for the queries, keys and values of self-attention,
  scaled_dot_product_attention, nn.LayerNorm, a tied table, cross_entropy(label_smoothing=0.1), and torch.optim.Adam
  in its fused implementation (see --torch-adam for the other two).

Each side lives in a process of its own, pinned to the same cores. The two take turns, so that whatever else the
machine does falls on both: a turn is about --seconds of steps, and the result is the median over --repeats turns.
The ratio is the median of each pair of neighbouring turns' ratios. Before that two processes of ours are started one
after another with one compilation cache, empty at first: their compile times are "cold" and "cached".

A machine busy with other work hurts PyTorch more, whose OpenMP threads wait for each other by spinning. Look at the
load first. With --threads 1 nothing waits, and "CPU ms", the lowest processor time per step summed over threads, is
nearly free of what else runs.

--tunables sets GLIBC_TUNABLES in our processes, --both-tunables in PyTorch's too (see docs/performance.md).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Case:
    """One model and the shape of its batches."""

    sizes: str
    """The name of the ModelConfig preset."""
    vocab_size: int
    rows: int
    source_length: int
    target_length: int


CASES = {
    "dates": Case("tiny", 41, 128, 11, 18),
    "base": Case("base", 37_000, 32, 30, 30),
}
DROPOUT = SMOOTHING = 0.1
RATE = 1e-4
BETAS = (0.9, 0.98)
EPSILON = 1e-9

Steps = Callable[[int], float]
"""Runs that many steps and returns the last loss per token."""


def model_config(case: Case) -> Any:
    from transformer_jax import ModelConfig

    return getattr(ModelConfig, case.sizes)(vocab_size=case.vocab_size, dropout=DROPOUT)


def step_flops(case: Case) -> float:
    """Floating-point operations of the matrix products of a step; the backward pass counts twice the forward."""
    c = model_config(case)
    D, F, S, T = c.d_model, c.d_ff, case.source_length, case.target_length
    source, target = case.rows * S, case.rows * T
    encoder = source * (4 * D * D + 2 * D * F + 2 * S * D)
    decoder = target * (6 * D * D + 2 * D * F + 2 * T * D + 2 * S * D) + source * 2 * D * D
    multiplications = c.n_encoder_layers * encoder + c.n_decoder_layers * decoder + target * D * case.vocab_size
    return 3 * 2.0 * multiplications


def random_tokens(case: Case) -> tuple[Any, Any, Any]:
    """Source, decoder input and decoder output, the same for both sides; every row full, special ids left out."""
    import numpy as np

    rng = np.random.default_rng(0)
    source = rng.integers(3, case.vocab_size, (case.rows, case.source_length), dtype=np.int32)
    target = rng.integers(3, case.vocab_size, (case.rows, case.target_length + 1), dtype=np.int32)
    return source, target[:, :-1], target[:, 1:]


# ---- ours


def prepare_ours(case: Case) -> tuple[Steps, dict[str, float]]:
    start = time.perf_counter()
    import jax
    import numpy as np

    from transformer_jax import Transformer
    from transformer_jax.batching import Batch
    from transformer_jax.config import TrainConfig
    from transformer_jax.optimizer import adam
    from transformer_jax.sharding import data_mesh, replicate, shard_rows, use_compilation_cache
    from transformer_jax.training import init_state, make_train_step

    if os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        use_compilation_cache()
    imported = time.perf_counter()

    source, target_in, target_out = random_tokens(case)
    mesh = data_mesh(1)
    batch = shard_rows(
        Batch(
            source,
            np.ones_like(source),
            np.broadcast_to(np.arange(source.shape[1], dtype=np.int32), source.shape),
            target_in,
            target_out,
            np.ones_like(target_in),
            np.broadcast_to(np.arange(target_in.shape[1], dtype=np.int32), target_in.shape),
            np.ones(target_in.shape, np.float32),
        ),
        mesh,
    )
    model = Transformer(model_config(case))
    config = TrainConfig(
        label_smoothing=SMOOTHING,
        schedule="constant",
        warmup_steps=1,
        peak_rate=RATE,
        beta1=BETAS[0],
        beta2=BETAS[1],
        epsilon=EPSILON,
    )
    optimizer = adam(config, model.config.d_model)
    state = replicate(init_state(model, optimizer, seed=0), mesh)
    jax.block_until_ready(state)
    initialised = time.perf_counter()
    train_step: Any = make_train_step(model, optimizer, config, mesh)
    traced = train_step.lower(state, batch)
    lowered = time.perf_counter()
    step = traced.compile()
    compiled = time.perf_counter()

    def steps(n: int) -> float:
        nonlocal state
        state, log = step(state, batch)
        for _ in range(n - 1):
            state, log = step(state, batch)
        jax.block_until_ready(state)
        return float(log.sums.loss / log.sums.tokens)

    steps(1)
    return steps, {
        "import_s": imported - start,
        "init_s": initialised - imported,
        "trace_s": lowered - initialised,
        "compile_s": compiled - lowered,
        "first_step_s": time.perf_counter() - start,
    }


# ---- PyTorch


def torch_model(case: Case) -> Any:
    """The same Transformer from torch.nn, post-norm, with dropout where the paper has it."""
    import math

    import torch
    from torch import nn
    from torch.nn import functional

    from transformer_jax.layers import sinusoids

    c = model_config(case)
    D, H = c.d_model, c.n_heads

    def heads(x: Any) -> Any:
        return x.view(x.shape[0], x.shape[1], H, D // H).transpose(1, 2)

    class SelfAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query_key_value = nn.Linear(D, 3 * D)
            self.output = nn.Linear(D, D)

        def forward(self, x: Any, mask: Any = None, causal: bool = False) -> Any:
            q, k, v = (heads(part) for part in self.query_key_value(x).chunk(3, dim=-1))
            y = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
            return self.output(y.transpose(1, 2).reshape(x.shape))

    class CrossAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query = nn.Linear(D, D)
            self.key_value = nn.Linear(D, 2 * D)
            self.output = nn.Linear(D, D)

        def forward(self, x: Any, memory: Any, mask: Any) -> Any:
            k, v = (heads(part) for part in self.key_value(memory).chunk(2, dim=-1))
            y = functional.scaled_dot_product_attention(heads(self.query(x)), k, v, attn_mask=mask)
            return self.output(y.transpose(1, 2).reshape(x.shape))

    def feed_forward() -> Any:
        return nn.Sequential(nn.Linear(D, c.d_ff), nn.ReLU(), nn.Linear(c.d_ff, D))

    class EncoderLayer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.feed_forward = SelfAttention(), feed_forward()
            self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(2))
            self.drop = nn.Dropout(DROPOUT)

        def forward(self, x: Any, mask: Any) -> Any:
            x = self.norms[0](x + self.drop(self.attention(x, mask=mask)))
            return self.norms[1](x + self.drop(self.feed_forward(x)))

    class DecoderLayer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.cross_attention = SelfAttention(), CrossAttention()
            self.feed_forward = feed_forward()
            self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(3))
            self.drop = nn.Dropout(DROPOUT)

        def forward(self, x: Any, memory: Any, memory_mask: Any) -> Any:
            x = self.norms[0](x + self.drop(self.attention(x, causal=True)))
            x = self.norms[1](x + self.drop(self.cross_attention(x, memory, memory_mask)))
            return self.norms[2](x + self.drop(self.feed_forward(x)))

    class Model(nn.Module):
        positions: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(case.vocab_size, D)
            nn.init.normal_(self.embedding.weight, std=D**-0.5)
            table = torch.from_numpy(sinusoids(c.max_length, D, "interleaved"))
            self.register_buffer("positions", table, persistent=False)
            self.encoder = nn.ModuleList(EncoderLayer() for _ in range(c.n_encoder_layers))
            self.decoder = nn.ModuleList(DecoderLayer() for _ in range(c.n_decoder_layers))
            self.drop = nn.Dropout(DROPOUT)

        def embed(self, ids: Any) -> Any:
            return self.drop(self.embedding(ids) * math.sqrt(D) + self.positions[: ids.shape[1]])

        def forward(self, source: Any, target: Any) -> Any:
            mask = (source != c.pad_id)[:, None, None, :]
            memory = self.embed(source)
            for layer in self.encoder:
                memory = layer(memory, mask)
            x = self.embed(target)
            for layer in self.decoder:
                x = layer(x, memory, mask)
            return functional.linear(x, self.embedding.weight)

    return Model()


def prepare_torch(case: Case, threads: int, adam: str) -> tuple[Steps, dict[str, float]]:
    start = time.perf_counter()
    import torch
    from torch.nn import functional

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    imported = time.perf_counter()
    source, target_in, target_out = (torch.from_numpy(x).long() for x in random_tokens(case))
    model = torch_model(case).train()
    implementation: dict[str, Any] = {} if adam == "default" else {adam: True}
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE, betas=BETAS, eps=EPSILON, **implementation)

    def steps(n: int) -> float:
        loss = torch.zeros(())
        for _ in range(n):
            optimizer.zero_grad()
            logits = model(source, target_in)
            loss = functional.cross_entropy(
                logits.flatten(0, 1), target_out.flatten(), ignore_index=0, label_smoothing=SMOOTHING
            )
            loss.backward()
            optimizer.step()
        return loss.item()

    steps(1)
    return steps, {"import_s": imported - start, "first_step_s": time.perf_counter() - start}


# ---- taking turns


def work(side: str, case: Case, threads: int, torch_adam: str) -> None:
    """A worker: prepares, then for each number read from standard input runs as many steps and says how long."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    sys.path.insert(0, str(ROOT))
    if side == "ours":
        steps, times = prepare_ours(case)
    else:
        steps, times = prepare_torch(case, threads, torch_adam)
    print(json.dumps(times), flush=True)
    for line in sys.stdin:
        start, cpu_start = time.perf_counter(), time.process_time()
        loss = steps(int(line))
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
        print(json.dumps({"seconds": seconds, "cpu_seconds": cpu_seconds, "loss": loss}), flush=True)


class Worker:
    """A side of the comparison in its own process."""

    def __init__(self, side: str, case: str, args: argparse.Namespace, **environment: str) -> None:
        command = [sys.executable, __file__, "--worker", side, "--case", case]
        command += ["--threads", str(args.threads), "--torch-adam", args.torch_adam]
        environment = {
            "JAX_PLATFORMS": "cpu",
            "OMP_NUM_THREADS": str(args.threads),
            "TF_CPP_MIN_LOG_LEVEL": "2",
            **environment,
        }
        self.process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.times = self._answer()

    def _answer(self) -> dict[str, float]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a worker ended early, with status {self.process.wait()}")
        return json.loads(line)

    def run(self, steps: int) -> dict[str, float]:
        assert self.process.stdin is not None
        print(steps, file=self.process.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def compare(name: str, args: argparse.Namespace) -> dict[str, Any]:
    case = CASES[name]
    ours_environment = {"GLIBC_TUNABLES": args.tunables} if args.tunables else {}
    torch_environment = ours_environment if args.both_tunables else {}
    with tempfile.TemporaryDirectory() as cache:
        first = Worker("ours", name, args, JAX_COMPILATION_CACHE_DIR=cache, **ours_environment)
        first.close()
        ours = Worker("ours", name, args, JAX_COMPILATION_CACHE_DIR=cache, **ours_environment)
        torch = Worker("torch", name, args, **torch_environment)
        workers = {"ours": ours, "torch": torch}
        counts = {}
        for side, worker in workers.items():
            per_step = worker.run(3)["seconds"] / 3
            counts[side] = max(2, round(args.seconds / per_step))
        turns: dict[str, list[float]] = {side: [] for side in workers}
        processor: dict[str, list[float]] = {side: [] for side in workers}
        losses = {}
        for _ in range(args.repeats):
            for side, worker in workers.items():
                answer = worker.run(counts[side])
                turns[side].append(1e3 * answer["seconds"] / counts[side])
                processor[side].append(1e3 * answer["cpu_seconds"] / counts[side])
                losses[side] = answer["loss"]
        for worker in workers.values():
            worker.close()
    ratios = [t / o for o, t in zip(turns["ours"], turns["torch"], strict=True)]
    flops = step_flops(case)
    sides = {
        side: {
            "ms_per_step": (ms := statistics.median(turns[side])),
            "ms_lowest": min(turns[side]),
            "ms_highest": max(turns[side]),
            "cpu_ms_lowest": min(processor[side]),
            "gflops": flops / ms / 1e6,
            "last_loss": losses[side],
        }
        for side in workers
    }
    return {
        "case": name,
        "threads": args.threads,
        "torch_adam": args.torch_adam,
        "step_gflop": flops / 1e9,
        "ratio": statistics.median(ratios),
        "ratio_lowest": min(ratios),
        "ratio_highest": max(ratios),
        "ratio_of_lowest": min(turns["torch"]) / min(turns["ours"]),
        **sides,
        "start": {"cold": first.times, "cached": ours.times, "torch": torch.times},
    }


def table(result: dict[str, Any]) -> str:
    start = result["start"]
    lines = [
        f"{result['case']}: {result['step_gflop']:.2f} GFLOP a step, {result['threads']} threads",
        f"  {'':8}{'ms/step':>9}{'lowest':>9}{'highest':>9}{'CPU ms':>9}{'GFLOP/s':>9}{'first step':>12}",
    ]
    for side, begin in (("ours", "cold"), ("torch", "torch")):
        r = result[side]
        lines.append(
            f"  {side:8}{r['ms_per_step']:9.2f}{r['ms_lowest']:9.2f}{r['ms_highest']:9.2f}"
            f"{r['cpu_ms_lowest']:9.2f}{r['gflops']:9.1f}{start[begin]['first_step_s']:10.1f} s"
        )
    lines.append(
        f"  ratio   {result['ratio']:9.2f}  ({result['ratio_lowest']:.2f} to {result['ratio_highest']:.2f}; "
        f"of the lowest {result['ratio_of_lowest']:.2f})"
    )
    for which in ("cold", "cached"):
        t = start[which]
        lines.append(
            f"  {which:8}import {t['import_s']:.1f} s, initial state {t['init_s']:.1f} s, "
            f"trace {t['trace_s']:.1f} s, compile {t['compile_s']:.1f} s: first step after {t['first_step_s']:.1f} s"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=[*CASES, "all"], default="all")
    parser.add_argument("--repeats", type=int, default=9, help="turns of each side (default 9)")
    parser.add_argument("--seconds", type=float, default=0.5, help="length of a turn (default 0.5)")
    parser.add_argument("--threads", type=int, default=2, help="cores for each side (default 2)")
    parser.add_argument("--torch-adam", choices=["fused", "foreach", "default"], default="fused")
    parser.add_argument("--tunables", default="", help="GLIBC_TUNABLES for our processes")
    parser.add_argument("--both-tunables", action="store_true", help="the same for PyTorch's")
    parser.add_argument("--json", action="store_true", help="print one JSON object per case instead of the table")
    parser.add_argument("--worker", choices=["ours", "torch"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return work(args.worker, CASES[args.case], args.threads, args.torch_adam)
    sys.path.insert(0, str(ROOT))
    for name in CASES if args.case == "all" else [args.case]:
        result = compare(name, args)
        print(json.dumps(result) if args.json else table(result), flush=True)


if __name__ == "__main__":
    main()
