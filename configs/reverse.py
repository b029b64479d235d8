"""`31415` -> `51413`: lists of 3 to 8 digits backwards, 500 of them held out. A minute or two on two CPU cores."""

from transformer_jax.config import DataConfig, DecodeConfig, ModelConfig, RunConfig, TrainConfig

config = RunConfig(
    name="reverse",
    model=ModelConfig.tiny(d_model=64, d_ff=128, dropout=0.0, max_length=32),
    data=DataConfig(task="reversal", max_tokens=16, batch_tokens=None, batch_size=64, n_buckets=1),
    train=TrainConfig(
        steps=1000,
        schedule="rsqrt",
        warmup_steps=200,
        peak_rate=0.004,
        decay_fraction=0.5,
        clip_norm=1.0,
        evaluate_every=250,
        checkpoint_every=250,
    ),
    decode=DecodeConfig(metric="exact", extra_length=4, batch_tokens=4096),
)
