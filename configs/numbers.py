"""`142` -> `one hundred forty two`: the numbers 0 to 999, 100 of them held out. Minutes on two CPU cores."""

from transformer_jax.config import DataConfig, DecodeConfig, ModelConfig, RunConfig, TrainConfig

config = RunConfig(
    name="numbers",
    model=ModelConfig(
        d_model=256, n_heads=4, d_ff=512, n_encoder_layers=3, n_decoder_layers=3, dropout=0.0, max_length=64
    ),
    data=DataConfig(task="numbers", max_tokens=48, batch_tokens=None, batch_size=32, n_buckets=1),
    train=TrainConfig(
        steps=1500,
        schedule="rsqrt",
        warmup_steps=100,
        peak_rate=0.001,
        decay_fraction=0.5,
        evaluate_every=250,
        checkpoint_every=250,
    ),
    decode=DecodeConfig(metric="exact", extra_length=40, batch_tokens=2048),
)
