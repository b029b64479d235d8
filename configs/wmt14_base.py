"""WMT14 English-German, the paper's base model (Tables 2 and 3): 100,000 steps, on eight accelerators about half a day.

    python train.py --config configs/wmt14_base.py --dry-run       # what it takes, without data
    python train.py --config configs/wmt14_base.py                 # downloads the text; needs pip install -e '.[tfds]'

What the paper says of it in §5 and §6.1 stands here as written; where it is silent, the comments say what was chosen.
"""

from transformer_jax.config import DataConfig, DecodeConfig, ModelConfig, RunConfig, TrainConfig

config = RunConfig(
    name="wmt14_base",
    model=ModelConfig(
        d_model=512,
        n_heads=8,
        d_ff=2048,
        n_encoder_layers=6,
        n_decoder_layers=6,
        dropout=0.1,  # §5.4
        max_length=512,
        dtype="bfloat16",  # of the computation; parameters, Adam, norms and logits are float32
    ),
    data=DataConfig(
        tfds="wmt14_translate/de-en",  # about 4.5 million pairs, §5.1
        validation_split="validation",  # newstest2013
        test_split="test",  # newstest2014
        source_lang="en",
        target_lang="de",
        tokenizer_type="bpe",
        vocab_size=37_000,  # shared, §5.1
        max_tokens=256,
        max_length_ratio=9.0,  # not in the paper: leaves out lines that are no translations
        drop_duplicates=True,  # nor this
        batching="packed",
        row_tokens=256,
        batch_tokens=24_576,  # about 25,000 source and 25,000 target tokens, §5.1: 96 rows of 256
        rows_multiple=8,
    ),
    train=TrainConfig(
        steps=100_000,  # §5.2
        schedule="paper",  # Eq. 3
        warmup_steps=4000,  # §5.3
        beta1=0.9,
        beta2=0.98,
        epsilon=1e-9,
        label_smoothing=0.1,  # §5.4
        evaluate_every=5000,
        checkpoint_every=1500,  # every 10 minutes at the paper's 0.4 s a step
        keep_checkpoints=5,
        average_last=5,  # §6.1
        log_every=100,
    ),
    decode=DecodeConfig(
        beam_size=4,  # §6.1
        length_rule="gnmt",
        length_penalty=0.6,
        extra_length=50,
    ),
    samples=(
        "The weather is nice today, so we will walk to the station.",
        "The committee did not say when it would publish its report.",
        "Prices rose by two per cent last year.",
    ),
)
