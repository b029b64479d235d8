"""Multi30k, English to German: a narrow, deep, strongly regularised model, two hours on two CPU cores.

    python train.py --config configs/multi30k.py --data.dir DIR

DIR holds train, val and test_2016_flickr as .en and .de, plain or .gz. `multi30k_tutorial` is quicker. Sizes, dropout
and beam after Wu et al. (arXiv 2105.14462); pre-norm, as post-norm does not learn at such a rate (docs/results.md).
"""

from pathlib import Path

from transformer_jax.config import DecodeConfig, ModelConfig, RunConfig, TrainConfig, replace
from transformer_jax.run_options import load_config

_tutorial = load_config(Path(__file__).with_name("multi30k_tutorial.py"))

config = RunConfig(
    name="multi30k",
    model=ModelConfig(
        d_model=128,
        n_heads=4,
        d_ff=256,
        n_encoder_layers=4,
        n_decoder_layers=4,
        dropout=0.3,
        norm="pre",
        max_length=128,
    ),
    data=replace(_tutorial.data, batch_tokens=3072, n_buckets=14),
    train=TrainConfig(
        epochs=52,
        schedule="rsqrt",
        warmup_steps=2000,
        peak_rate=0.004,
        decay_fraction=0.4,
        evaluate_every=960,
        checkpoint_every=192,
        keep_checkpoints=10,
        average_last=10,
    ),
    decode=DecodeConfig(beam_size=5),
    samples=_tutorial.samples,
)
