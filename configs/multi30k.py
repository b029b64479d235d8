"""Multi30k, English to German: a narrow, deep model that learns from the text and from what its teacher made of it.

    python train.py --config configs/multi30k.py --data.dir DIR

DIR holds train, val and test_2016_flickr as .en and .de, plain or .gz. `multi30k_tutorial` is quicker. The run trains
its teacher first, which learns both directions, English lines as they are and German ones with the tag >>en<< (after
Ding et al. 2021), and lets it write each side of the training text anew (Nguyen et al., arXiv 1911.01986). Sizes after
Wu et al. (arXiv 2105.14462); pre-norm, as post-norm does not learn at such a rate; what a beam finds is ranked by the
way back (Yee et al., arXiv 1908.05731). Two CPU cores take under two hours. What was tried and measured:
docs/results.md.
"""

from pathlib import Path

from transformer_jax.config import DecodeConfig, ModelConfig, RunConfig, TeacherConfig, TrainConfig, replace
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
        dropout=0.15,
        norm="pre",
        max_length=128,
    ),
    data=replace(_tutorial.data, weights=(2.0,), reversed_weight=0.5, batch_tokens=3072, n_buckets=14),
    train=TrainConfig(
        epochs=14,
        schedule="rsqrt",
        warmup_steps=2000,
        peak_rate=0.004,
        decay_fraction=0.4,
        evaluate_every=2080,
        checkpoint_every=192,
        keep_checkpoints=10,
        average_last=10,
    ),
    # The teacher sees less text, more often, and needs more dropout.
    teacher=TeacherConfig(weight=0.5, epochs=24, dropout=0.2),
    # Ranking favours long outputs, which a smaller length_penalty takes back (docs/results.md).
    decode=DecodeConfig(beam_size=5, length_penalty=0.6, rerank_weight=0.2),
    samples=_tutorial.samples,
)
