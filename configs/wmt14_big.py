"""WMT14 English-German, the paper's big model (Tables 2 and 3): 300,000 steps, on eight accelerators days.

    python train.py --config configs/wmt14_big.py --dry-run        # what it takes, without data
    python train.py --config configs/wmt14_big.py

The text and batches of `wmt14_base`. On one device, `--train.accumulation 8` computes a step's batch in eight parts.
"""

from pathlib import Path

from transformer_jax.config import replace
from transformer_jax.run_options import load_config

config = replace(
    load_config(Path(__file__).with_name("wmt14_base.py")),
    **{
        "name": "wmt14_big",
        "model.d_model": 1024,  # Table 3
        "model.n_heads": 16,
        "model.d_ff": 4096,
        "model.dropout": 0.3,
        "train.steps": 300_000,  # §5.2
        "train.checkpoint_every": 600,  # every 10 minutes at the paper's 1.0 s a step
        "train.keep_checkpoints": 20,
        "train.average_last": 20,  # §6.1
    },
)
