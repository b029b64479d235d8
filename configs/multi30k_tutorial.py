"""Multi30k, English to German: 29,000 image captions, 12 epochs of a small model, 40 minutes on two CPU cores.

    python train.py --config configs/multi30k_tutorial.py --data.dir DIR

DIR holds train, val and test_2016_flickr as .en and .de, plain or .gz.
"""

from transformer_jax.config import DataConfig, DecodeConfig, ModelConfig, RunConfig, TrainConfig

config = RunConfig(
    name="multi30k_tutorial",
    model=ModelConfig(
        d_model=256,
        n_heads=4,
        d_ff=512,
        n_encoder_layers=3,
        n_decoder_layers=3,
        dropout=0.2,
        max_length=128,
    ),
    data=DataConfig(
        test_split="test_2016_flickr",
        vocab_size=6000,
        max_tokens=80,
        batch_tokens=2560,
        n_buckets=8,
    ),
    train=TrainConfig(
        epochs=12,
        schedule="rsqrt",
        warmup_steps=800,
        peak_rate=0.0022,
        decay_fraction=0.5,
        evaluate_every=0,
        checkpoint_every=500,
    ),
    decode=DecodeConfig(metric="bleu"),
    samples=(
        "A man in a red jacket is riding a bicycle.",
        "Two young girls are playing in the sand.",
        "A brown dog is running through the grass.",
        "A woman is reading a book on a bench.",
        "Three children are jumping into a swimming pool.",
        "A group of people is standing in front of a church.",
        "An old man is selling fruit at a market.",
        "A boy in a blue shirt is throwing a ball.",
        "The girl is sitting on a swing.",
        "Two dogs are playing with a stick in the snow.",
        "A man is cooking in a small kitchen.",
        "A football player is kicking the ball.",
        "People are waiting for a train at the station.",
        "A woman with a black hat is taking a picture.",
        "A child is sleeping in its mother's arms.",
        "Four men are working on a roof.",
        "A band is playing music on a stage.",
        "A white horse is jumping over a fence.",
        "A little boy is eating an ice cream.",
        "Two people are walking along the beach at night.",
    ),
)
