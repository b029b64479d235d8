"""What a run consists of: frozen dataclasses, checked when they are made.

`ModelConfig` is the architecture (§3 of the paper), `DataConfig` the text and its batches (§5.1), `TrainConfig` the
optimiser and the loop (§5.2-5.4), `DecodeConfig` how translations are made (§6.1), `TeacherConfig` what may come before
the run, `RunConfig` all of them together.
A file in `configs/` makes one `RunConfig`; the command line overrides its fields.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from transformer_jax.config_checks import check, not_below, one_of, probabilities
from transformer_jax.data_config import DataConfig as DataConfig
from transformer_jax.errors import UserError

Positions = Literal["interleaved", "sin_then_cos", "marian", "learned"]
Activation = Literal["relu", "swish", "gelu"]

VOCAB_FROM_TOKENIZER = 0
"""Stands for the vocabulary size in a config whose tokenizer is still to be trained."""


@dataclass(frozen=True)
class ModelConfig:
    """The architecture. The defaults are the paper's base model (Table 3); sizes are counts of units."""

    vocab_size: int = VOCAB_FROM_TOKENIZER
    """Target vocabulary, or the joint one. 0: filled in from the tokenizer."""
    source_vocab_size: int | None = None
    """Source vocabulary where it is separate from the target's; None: the same."""
    d_model: int = 512
    n_heads: int = 8
    d_ff: int = 2048
    decoder_d_ff: int | None = None
    """Feed-forward width of the decoder where it is not the encoder's; None: the same."""
    n_encoder_layers: int = 6
    n_decoder_layers: int = 6
    dropout: float = 0.1
    """On the output of every sub-layer and on the sums of embeddings and positions (§5.4)."""
    attention_dropout: float = 0.0
    """On the attention weights; not in the paper."""
    feed_forward_dropout: float = 0.0
    """On the feed-forward hidden layer; not in the paper."""
    word_dropout: float = 0.0
    """Share of tokens whose whole embedding is zeroed, on both sides (Gal & Ghahramani 2016; Sennrich et al. 2016)."""
    norm: Literal["post", "pre"] = "post"
    """post: LayerNorm(x + Sublayer(x)), the paper (§3.1). pre: x + Sublayer(LayerNorm(x)), and a last norm on top."""
    norm_epsilon: float = 1e-5
    """Layer norm's epsilon: 1e-5 in PyTorch and Hugging Face Marian, 1e-6 in native Marian."""
    positions: Positions = "interleaved"
    """interleaved: the paper (§3.5). sin_then_cos: Hugging Face Marian. marian: native Marian, tensor2tensor."""
    activation: Activation = "relu"
    attention_bias: bool = True
    """Biases on the four projections of an attention block."""
    attention_init_gain: float = 1.0
    """Factor of the initial query, key and value kernels; 2^-0.5 is as if the three were drawn as one matrix, as
    fairseq and PyTorch do, and lets post-norm bear a larger rate. Without effect on a model that exists already."""
    logits_bias: bool = False
    """A bias per vocabulary entry on the output."""
    shared_embedding: bool = True
    """One table for source and target (§3.4); needs a joint vocabulary."""
    tied_output: bool = True
    """The target table, transposed, is the output projection (§3.4)."""
    scale_embedding: bool = True
    """Multiply embeddings by sqrt(d_model) (§3.4)."""
    start_embedding: Literal["token", "zero"] = "token"
    """What the decoder sees first: the start token's embedding, or a zero vector as in Marian."""
    max_length: int = 512
    """Rows of the position table: the longest sentence either side, in tokens."""
    pad_id: int = 0
    """Padding on the target side, and on the source side too unless it has an id of its own. Ids beyond the table are
    allowed: padding is never looked at, and a zero start needs no row."""
    source_pad_id: int | None = None
    """Padding on the source side where its vocabulary is separate; None: the same."""
    start_id: int = 1
    end_id: int = 2
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the computation. Parameters, layer norms, attention scores and logits are float32 always."""
    remat: bool = False
    """Keep only each layer's input for the gradient and compute the rest again: less memory, a third more time."""

    def __post_init__(self) -> None:
        one_of(
            self,
            norm=("post", "pre"),
            positions=("interleaved", "sin_then_cos", "marian", "learned"),
            activation=("relu", "swish", "gelu"),
            start_embedding=("token", "zero"),
            dtype=("float32", "bfloat16"),
        )
        not_below(self, 1, "d_model", "n_heads", "d_ff", "n_encoder_layers", "n_decoder_layers", "max_length")
        not_below(self, 0, "vocab_size", "pad_id", "start_id", "end_id")
        if self.decoder_d_ff is not None:
            not_below(self, 1, "decoder_d_ff")
        if self.source_pad_id is not None:
            not_below(self, 0, "source_pad_id")
        probabilities(self, "dropout", "attention_dropout", "feed_forward_dropout", "word_dropout")
        check(
            0 < self.attention_init_gain < 100,
            f"attention_init_gain is {self.attention_init_gain}; take a number above 0, 1 or a little less.",
        )
        check(
            self.d_model % self.n_heads == 0,
            f"d_model is {self.d_model}, which is not a multiple of n_heads, {self.n_heads}; "
            "every head needs the same share of the width.",
        )
        check(
            self.positions == "learned" or self.d_model % 2 == 0,
            f"d_model is {self.d_model}, but sinusoidal positions come in pairs of sine and cosine; "
            "take an even d_model, or positions learned.",
        )
        check(
            self.positions != "marian" or self.d_model >= 4,
            f"d_model is {self.d_model}, but positions marian space their timescales over d_model/2 - 1 steps; "
            "take a d_model of at least 4.",
        )
        check(
            not self.shared_embedding or self.source_vocab_size in (None, self.vocab_size),
            f"shared_embedding needs one vocabulary, but source_vocab_size is {self.source_vocab_size} and "
            f"vocab_size is {self.vocab_size}; set shared_embedding to false.",
        )

    @property
    def d_head(self) -> int:
        return self.d_model // self.n_heads

    @classmethod
    def base(cls, vocab_size: int = 37_000, **changes: Any) -> ModelConfig:
        """The paper's base model, Table 3."""
        return cls(**{"vocab_size": vocab_size, **changes})

    @classmethod
    def big(cls, vocab_size: int = 37_000, **changes: Any) -> ModelConfig:
        """The paper's big model, Table 3 (dropout 0.3, as for English-German)."""
        sizes = {"d_model": 1024, "n_heads": 16, "d_ff": 4096, "dropout": 0.3}
        return cls(**{"vocab_size": vocab_size, **sizes, **changes})

    @classmethod
    def tiny(cls, vocab_size: int = VOCAB_FROM_TOKENIZER, **changes: Any) -> ModelConfig:
        """Two layers of width 128: learns a small task on a CPU in minutes."""
        sizes = {"d_model": 128, "n_heads": 4, "d_ff": 512, "n_encoder_layers": 2, "n_decoder_layers": 2}
        return cls(**{"vocab_size": vocab_size, **sizes, **changes})


@dataclass(frozen=True)
class TrainConfig:
    """The optimiser, the loss and the loop."""

    steps: int = 100_000
    epochs: int | None = None
    """Passes over the training text; where it is set, it takes the place of `steps`."""
    seed: int = 0
    schedule: Literal["paper", "rsqrt", "cosine", "constant"] = "paper"
    """paper: Eq. 3. The others rise to peak_rate over warmup_steps; rsqrt and cosine then fall."""
    warmup_steps: int = 4000
    peak_rate: float | None = None
    """Highest learning rate; None: Eq. 3's own, (d_model * warmup_steps)^-0.5."""
    decay_fraction: float = 0.0
    """Share of the run, at its end, over which the rate falls linearly to 0."""
    beta1: float = 0.9
    beta2: float = 0.98
    epsilon: float = 1e-9
    clip_norm: float | None = None
    """Global gradient norm above which gradients are scaled down; None, as in the paper: never."""
    label_smoothing: float = 0.1
    smoothing: Literal["all", "others"] = "all"
    """all: epsilon spread over the whole vocabulary. others: over all but the right token (tensor2tensor)."""
    accumulation: int = 1
    """Parts that a step's batch is computed in, one after another, to save memory; only dropout's masks change."""
    r_drop: float = 0.0
    """Weight of R-Drop (Liang et al. 2021): each batch is read twice with other dropout masks, and the divergence of
    the two predictions, alpha/4 (KL(p||q) + KL(q||p)) per token, is added to the mean of the two losses; 5 there."""
    ema_decay: float | None = None
    """Evaluate and save an average of the parameters that forgets by this factor per step (0.999, say) instead of the
    last ones; over the first steps it forgets faster, so that it does not remember the start. None: no average."""
    average_last: int = 1
    """The model of a finished run is the average of so many last checkpoints (§6.1: 5 for base, 20 for big)."""
    log_every: int = 50
    evaluate_every: int | None = 1000
    """Steps between evaluations, the last step being one; 0: after each epoch; None: never."""
    checkpoint_every: int = 1000
    keep_checkpoints: int = 5
    patience: int | None = None
    """Stop after so many evaluations without a better score; None: never."""
    skip_test: bool = False
    """Leave the test text alone when the run ends; it is only looked for in the training text."""
    n_devices: int | None = None
    """Devices to spread a batch over; None: all."""

    def __post_init__(self) -> None:
        one_of(self, schedule=("paper", "rsqrt", "cosine", "constant"), smoothing=("all", "others"))
        not_below(self, 1, "steps", "warmup_steps", "accumulation", "log_every", "checkpoint_every")
        not_below(self, 1, "keep_checkpoints", "average_last")
        not_below(self, 0, "seed")
        check(
            self.evaluate_every is None or self.evaluate_every >= 0,
            f"evaluate_every is {self.evaluate_every}; it must be a number of steps, or 0 for every epoch.",
        )
        probabilities(self, "label_smoothing", "beta1", "beta2", "decay_fraction")
        for name in ("peak_rate", "clip_norm", "patience", "n_devices", "epochs"):
            value = getattr(self, name)
            check(value is None or value > 0, f"{name} is {value}; it must be above 0.")
        check(self.r_drop >= 0, f"r_drop is {self.r_drop}; it must be 0 (none) or more.")
        check(
            self.ema_decay is None or 0 < self.ema_decay < 1,
            f"ema_decay is {self.ema_decay}; it must be above 0 and below 1.",
        )
        check(
            self.average_last <= self.keep_checkpoints,
            f"average_last is {self.average_last}, but keep_checkpoints is {self.keep_checkpoints}; keep at least as "
            "many as are averaged.",
        )
        check(
            self.average_last == 1 or self.ema_decay is None,
            "average_last and ema_decay both average the parameters; take one of them.",
        )
        check(
            self.peak_rate is None or self.schedule != "paper",
            f"peak_rate is {self.peak_rate}, but schedule paper (Eq. 3) sets its own; take schedule rsqrt.",
        )


@dataclass(frozen=True)
class DecodeConfig:
    """How evaluation translates."""

    beam_size: int = 1
    """Hypotheses that are followed at once; 1: greedy."""
    n_best: int = 1
    """Hypotheses that are given for each line."""
    length_rule: Literal["hf", "gnmt", "marian"] = "hf"
    """How outputs of different length compare; see docs/decoding.md. gnmt is the paper's (§6.1)."""
    length_penalty: float = 1.0
    """The rule's alpha: above 0 long outputs gain. The paper has 0.6."""
    early_stopping: Literal["best", "first", "never"] = "best"
    """Of rule hf, when a search ends. first: with beam_size finished outputs (transformers' True). best: when the best
    open one, as it is, is no better (False). never: when no open one can win any more."""
    word_penalty: float = 0.0
    """Of rule marian: subtracted per token."""
    no_repeat_ngram_size: int = 0
    """No n tokens in a row come twice; 0: they may."""
    repetition_penalty: float = 1.0
    """Above 1, tokens that have come before are less likely to come again."""
    rerank_weight: float = 0.0
    """Rank what the beam found also by the log-probability of the source given each translation, times this (Li &
    Jurafsky 2016): by the model itself where it has learnt both directions (`data.reversed_weight`)."""
    min_length: int = 0
    """Tokens that a translation has at least, the end token included."""
    extra_length: int | None = 50
    """A translation ends at the source's length plus this, in tokens (§6.1); None: at the model's limit."""
    max_length_factor: float | None = None
    """And at the source's length times this, as in Marian (3 there)."""
    max_length: int | None = None
    """And at so many tokens, the end token included."""
    sample: bool = False
    """Draw each token at random instead of searching."""
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    """Of the drawing."""
    long_lines: Literal["split", "cut"] = "split"
    """Lines beyond the model's limit are split at sentence ends and joined again, or cut."""
    batch_tokens: int = 4096
    """Source slots that are translated together: 32 sentences of up to 128 tokens, and no more of shorter ones."""
    metric: Literal["bleu", "exact"] = "bleu"
    """What is best: sacreBLEU, or the share of lines that are right to the letter."""
    limit: int | None = None
    """Translate only the first so many validation lines at each evaluation."""

    def __post_init__(self) -> None:
        one_of(
            self,
            metric=("bleu", "exact"),
            length_rule=("hf", "gnmt", "marian"),
            early_stopping=("best", "first", "never"),
            long_lines=("split", "cut"),
        )
        not_below(self, 1, "batch_tokens", "beam_size", "n_best")
        not_below(self, 0, "min_length", "no_repeat_ngram_size", "seed", "top_k")
        for name in ("extra_length", "max_length"):
            if getattr(self, name) is not None:
                not_below(self, 0, name)
        check(
            self.max_length_factor is None or 0 < self.max_length_factor < 1e6,
            f"max_length_factor is {self.max_length_factor}; it must be above 0, and a number of times.",
        )
        check(self.seed < 2**31, f"seed is {self.seed}; it must be below 2**31.")
        check(
            self.n_best <= self.beam_size,
            f"n_best is {self.n_best}, but beam_size is {self.beam_size}; a search finds at most as many as its beam.",
        )
        check(
            0 <= self.rerank_weight < 1e6,
            f"rerank_weight is {self.rerank_weight}; it must be between 0 (none) and 1e6.",
        )
        check(
            not (self.rerank_weight and self.sample),
            "rerank_weight ranks what a beam has found; leave it out where tokens are drawn (sample).",
        )
        check(
            not self.rerank_weight or self.beam_size > 1,
            f"rerank_weight is {self.rerank_weight}, but one hypothesis has no rank; take a beam_size of 2 or more.",
        )
        check(self.limit is None or self.limit > 0, f"decode.limit is {self.limit}; it must be above 0.")


@dataclass(frozen=True)
class TeacherConfig:
    """A run of its own before the run, whose model writes the training text anew (Nguyen et al. 2020, data
    diversification): the run learns from the text as it is and from what the teacher made of it."""

    weight: float = 0.0
    """How often an epoch sees each pair with a target of the teacher's, and, where it has learnt both directions
    (`data.reversed_weight`), with a source of the teacher's, beside a weight of 1 for the pair as it is. 0: no
    teacher."""
    epochs: int | None = None
    """Passes over the text as it is; None: as long as the run."""
    dropout: float | None = None
    """Its model.dropout; None: the run's."""

    def __post_init__(self) -> None:
        check(
            0 <= self.weight < 1e6,
            f"teacher.weight is {self.weight}; it must be 0 (no teacher) or above, and a number of times.",
        )
        check(self.epochs is None or self.epochs > 0, f"teacher.epochs is {self.epochs}; it must be above 0.")
        if self.dropout is not None:
            probabilities(self, "dropout")


@dataclass(frozen=True)
class RunConfig:
    """One training run."""

    name: str = "run"
    init: str | None = None
    """A model to go on training: a model folder, a run folder, a native Marian folder or .npz, or a name on the Hugging
    Face hub. Its architecture and its tokenizer are kept; of `model` the dropouts, dtype and remat count."""
    init_positions: Positions | None = None
    """Read the model's weights with these positions: marian for an OPUS-MT model, as it was trained."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    samples: tuple[str, ...] = ()
    """Sentences translated and shown at every evaluation."""

    def __post_init__(self) -> None:
        check(
            not self.teacher.weight or self.data.task is None,
            f"A teacher writes text anew, but task {self.data.task} has pairs made by rule; set teacher.weight to 0.",
        )


def replace(config: Any, **changes: Any) -> Any:
    """`dataclasses.replace`, also through nested fields: `replace(run, **{"model.dropout": 0.3})`.

    All changes are made at once, so that settings which must fit each other may change together.
    """
    own: dict[str, Any] = {}
    nested: dict[str, dict[str, Any]] = {}
    for path, value in changes.items():
        head, _, rest = path.partition(".")
        if rest:
            nested.setdefault(head, {})[rest] = value
        else:
            own[head] = value
    for head, inner in nested.items():
        own[head] = replace(own.get(head, getattr(config, head)), **inner)
    return dataclasses.replace(config, **own)


def to_json(config: Any) -> dict[str, Any]:
    """A config as plain values that `json` can write; paths become strings."""

    def plain(value: Any) -> Any:
        if isinstance(value, Path):
            return str(value)
        if isinstance(value, dict):
            return {key: plain(inner) for key, inner in value.items()}
        return [plain(inner) for inner in value] if isinstance(value, list | tuple) else value

    return plain(dataclasses.asdict(config))


def model_from_json(described: Any) -> ModelConfig:
    """The architecture that `to_json` has written; a setting that is left out is as it comes.

    Raises:
        UserError: a setting is unknown, or has a value that it cannot have.
    """
    if not isinstance(described, dict):
        raise UserError("it holds no settings.")
    defaults = {setting.name: setting.default for setting in dataclasses.fields(ModelConfig)}
    unknown = sorted(described.keys() - defaults.keys())
    if unknown:
        raise UserError(f"it has settings that this version does not know: {', '.join(unknown)}.")
    for name, value in described.items():
        if not _is_of_the_kind_of(defaults[name], value):
            raise UserError(f"{name} has a value that it cannot have.")
    return ModelConfig(**described)


def _is_of_the_kind_of(default: Any, value: Any) -> bool:
    """A number for a number and so on; what may be left open (None) is a whole number."""
    if type(value) is int and abs(value) >= 2**31:
        return False  # no size of an array
    if default is None:
        return value is None or type(value) is int
    return type(value) in ((int, float) if isinstance(default, float) else (type(default),))
