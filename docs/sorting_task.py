"""A task of one's own in one file: `31415` -> `11345`, digits in order. See docs/extending.md.

python train.py --config docs/sorting_task.py
"""

import numpy as np

from transformer_jax.config import DataConfig, DecodeConfig, ModelConfig, RunConfig, TrainConfig
from transformer_jax.corpus import ParallelText
from transformer_jax.tasks import TASKS, Task


def sorting(seed: int = 0) -> Task:
    """20,000 different lists of 5 digits to learn from, and 500 held out."""
    numbers = np.random.default_rng(seed).permutation(100_000)[:20_500]
    sources = [f"{number:05}" for number in numbers]
    targets = ["".join(sorted(source)) for source in sources]
    return Task(
        name="sorting",
        train=ParallelText(sources[500:], targets[500:]),
        held_out=ParallelText(sources[:500], targets[:500]),
        characters=tuple("0123456789"),
        show=tuple(sources[:5]),
    )


TASKS["sorting"] = sorting

config = RunConfig(
    name="sorting",
    model=ModelConfig.tiny(d_model=64, d_ff=128, dropout=0.0, max_length=16),
    data=DataConfig(task="sorting", max_tokens=8, batch_tokens=None, batch_size=64, n_buckets=1),
    train=TrainConfig(steps=600, schedule="rsqrt", warmup_steps=100, peak_rate=0.004, evaluate_every=200),
    decode=DecodeConfig(metric="exact", extra_length=2),
)
