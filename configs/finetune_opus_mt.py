"""Fine-tuning of an OPUS-MT or other Marian model on your own sentence pairs.

    python train.py --config configs/finetune_opus_mt.py --init Helsinki-NLP/opus-mt-en-de \\
        --data.source my.en --data.target my.de --data.validation-source dev.en --data.validation-target dev.de

--init takes a Hugging Face folder or hub name, a native Marian folder or .npz, a run folder, or a model folder. The
model keeps its vocabulary. It is scored before the first step and after every 500, and the best is written to
runs/finetune_opus_mt/model, for transformers and CTranslate2 (`transformer-jax convert` writes it for native Marian).
"""

from transformer_jax.config import DataConfig, DecodeConfig, ModelConfig, RunConfig, TrainConfig

config = RunConfig(
    name="finetune_opus_mt",
    model=ModelConfig(dropout=0.1),
    data=DataConfig(max_tokens=128, batch_tokens=4096, n_buckets=6),
    train=TrainConfig(
        steps=2000,
        # A tenth of the rates at which such models are trained from nothing: the model is to move, not to start anew.
        schedule="rsqrt",
        warmup_steps=200,
        peak_rate=3e-5,
        decay_fraction=0.5,
        clip_norm=1.0,
        log_every=20,
        evaluate_every=500,
        checkpoint_every=500,
        keep_checkpoints=2,
        patience=3,
    ),
    decode=DecodeConfig(metric="bleu"),
)
