"""§3.1 and Figure 1: the whole model, in every option, in training and in cached decoding; and its configuration."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_numpy

from transformer_jax import ModelConfig, Transformer, UserError, layers
from transformer_jax.loss import cross_entropy
from transformer_jax.model import DecoderLayer, DecoderState, EncoderLayer

Params = dict[str, Any]


def tiny(**changes: Any) -> ModelConfig:
    sizes = {"vocab_size": 13, "d_model": 16, "n_heads": 2, "d_ff": 32, "max_length": 24, "dropout": 0.0}
    return ModelConfig(**{**sizes, "n_encoder_layers": 1, "n_decoder_layers": 1, **changes})


OPTIONS: dict[str, dict[str, Any]] = {
    "paper": {},
    "pre_norm": {"norm": "pre"},
    "sin_then_cos": {"positions": "sin_then_cos"},
    "marian_positions": {"positions": "marian"},
    "learned_positions": {"positions": "learned"},
    "swish": {"activation": "swish"},
    "gelu": {"activation": "gelu"},
    "no_attention_bias": {"attention_bias": False},
    "logits_bias": {"logits_bias": True},
    "untied": {"tied_output": False},
    "separate_tables": {"shared_embedding": False},
    "vocabularies_36_52": {"shared_embedding": False, "source_vocab_size": 36, "vocab_size": 52},
    "vocabularies_36_52_untied": {
        "shared_embedding": False,
        "source_vocab_size": 36,
        "vocab_size": 52,
        "tied_output": False,
    },
    "depths_3_1": {"n_encoder_layers": 3},
    "depths_1_3": {"n_decoder_layers": 3},
    "zero_start": {"start_embedding": "zero"},
    "no_embedding_scale": {"scale_embedding": False},
    "norm_epsilon": {"norm_epsilon": 0.1},
}
DROPOUTS: dict[str, dict[str, Any]] = {
    "dropout": {"dropout": 0.3},
    "attention_dropout": {"attention_dropout": 0.3},
    "feed_forward_dropout": {"feed_forward_dropout": 0.3},
}


def make_params(config: ModelConfig, seed: int = 0) -> Params:
    """Parameters as they could be after training: no bias is 0, no scale is 1. Drawn by NumPy, nothing compiled."""
    ids = jnp.ones((1, 1), jnp.int32)
    shapes = jax.eval_shape(Transformer(config).init, jax.random.key(0), ids, ids)["params"]
    random = np.random.default_rng(seed)

    def draw(path: Any, shape: Any) -> jax.Array:
        name = path[-1].key
        spread = {"kernel": shape.shape[0] ** -0.5, "table": config.d_model**-0.5}.get(name, 0.2)
        mean = 1.0 if name == "scale" else 0.0
        return jnp.array(mean + spread * random.standard_normal(shape.shape), jnp.float32)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def random_ids(seed: int, length: int, vocab_size: int) -> list[int]:
    """A sentence without special tokens."""
    return np.random.default_rng(seed).integers(3, vocab_size, length).tolist()


def pad(sentences: list[list[int]], length: int, pad_id: int = 0) -> jax.Array:
    return jnp.array([ids + [pad_id] * (length - len(ids)) for ids in sentences], jnp.int32)


def sentence_pair(config: ModelConfig, seed: int, S: int, T: int) -> tuple[list[int], list[int]]:
    source = random_ids(seed, S - 1, config.source_vocab_size or config.vocab_size)
    return [*source, config.end_id], [config.start_id, *random_ids(seed + 100, T - 1, config.vocab_size)]


class Batch(NamedTuple):
    """Two pairs of different length, as lists and padded to the one shape that most tests here share."""

    pairs: list[tuple[list[int], list[int]]]
    source_BS: jax.Array
    target_BT: jax.Array
    segments_BS: jax.Array

    @classmethod
    def of(cls, config: ModelConfig) -> Batch:
        pairs = [sentence_pair(config, seed, 6 - 3 * seed, 5) for seed in range(2)]
        source, target = pad([s for s, _ in pairs], 8), pad([t for _, t in pairs], 5)
        return cls(pairs, source, target, (source != 0).astype(jnp.int32))


def function(config: ModelConfig, method: str = "__call__") -> Any:
    """A method of the model as a function of its parameters. Run one operation at a time: what is compiled for one
    option serves the others, where a program of its own for each would take minutes. `test_compiled_...` compiles."""
    return partial(Transformer(config).apply, method=method)


def parameter_count(tree: Any) -> int:
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(tree))


# --- sizes


@pytest.mark.parametrize(
    ("config", "total", "table", "encoder_layer", "decoder_layer"),
    [
        (ModelConfig.base(37_000), 63_082_496, 18_944_000, 3_152_384, 4_204_032),
        (ModelConfig.big(37_000), 214_245_376, 37_888_000, 12_596_224, 16_796_672),
    ],
    ids=["base", "big"],
)
def test_parameter_counts_of_the_papers_models(
    config: ModelConfig, total: int, table: int, encoder_layer: int, decoder_layer: int
) -> None:
    ids = jnp.ones((1, 1), jnp.int32)
    params = jax.eval_shape(Transformer(config).init, jax.random.key(0), ids, ids)["params"]
    assert parameter_count(params) == total
    assert parameter_count(params["target_embedding"]) == table
    for n in range(6):
        assert parameter_count(params["encoder"][f"layer_{n}"]) == encoder_layer
        assert parameter_count(params["decoder"][f"layer_{n}"]) == decoder_layer
    assert total == table + 6 * encoder_layer + 6 * decoder_layer


def test_parameter_count_of_the_dates_model() -> None:
    ids = jnp.ones((1, 1), jnp.int32)
    params = jax.eval_shape(Transformer(ModelConfig.tiny(41)).init, jax.random.key(0), ids, ids)["params"]
    assert parameter_count(params) == 930_944


def count_dropout_places(config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The rates of all places that drop something in one pass of training."""
    rates: list[float] = []

    def counting(x: jax.Array, rate: float, key: jax.Array) -> jax.Array:
        rates.append(rate)
        return x

    ids = jnp.ones((2, 4), jnp.int32)
    params = jax.eval_shape(Transformer(config).init, jax.random.key(0), ids, ids)
    monkeypatch.setattr(layers, "dropout", counting)
    apply = partial(Transformer(config).apply, deterministic=False, rngs={"dropout": jax.random.key(0)})
    jax.eval_shape(apply, params, ids, ids)
    return rates


def test_the_base_model_drops_at_32_places(monkeypatch: pytest.MonkeyPatch) -> None:
    assert count_dropout_places(ModelConfig.base(), monkeypatch) == 32 * [0.1]


def test_attention_and_feed_forward_dropout_are_places_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModelConfig.base(attention_dropout=0.2, feed_forward_dropout=0.3)
    rates = count_dropout_places(config, monkeypatch)
    # 6 encoder layers attend once, 6 decoder layers twice; all 12 have one feed-forward.
    assert (rates.count(0.1), rates.count(0.2), rates.count(0.3)) == (32, 18, 12)


def test_every_dropout_place_draws_from_a_key_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny(n_encoder_layers=2, n_decoder_layers=2, dropout=0.1, attention_dropout=0.1, feed_forward_dropout=0.1)
    keys: list[jax.Array] = []

    def collecting(x: jax.Array, rate: float, key: jax.Array) -> jax.Array:
        keys.append(jax.random.key_data(key))
        return x

    params, batch = make_params(config), Batch.of(config)
    monkeypatch.setattr(layers, "dropout", collecting)

    for seed in (0, 1):
        rngs = {"dropout": jax.random.key(seed)}
        function(config)({"params": params}, *batch[1:3], deterministic=False, rngs=rngs)
    drawn = [tuple(key.tolist()) for key in keys]
    # 2 x 2 + 2 x 3 sub-layers, 2 sums, 2 + 2 x 2 attentions, 4 feed-forwards; twice, with another key.
    assert len(drawn) == 2 * (10 + 2 + 6 + 4)
    assert len(set(drawn)) == len(drawn)


# --- layers against torch


def torch_attention_params(torch_module: Any) -> Params:
    kernels = torch_module.in_proj_weight.detach().numpy()
    D = kernels.shape[1]
    biases = torch_module.in_proj_bias.detach().numpy().reshape(3, D)
    weights = dict(zip(("query", "key", "value"), zip(kernels.reshape(3, D, D), biases, strict=True), strict=True))
    weights["output"] = tuple(p.detach().numpy() for p in (torch_module.out_proj.weight, torch_module.out_proj.bias))
    return {name: {"kernel": jnp.array(w.T), "bias": jnp.array(b)} for name, (w, b) in weights.items()}


def torch_linear_params(torch_module: Any, kernel: str = "kernel") -> Params:
    weight, bias = (p.detach().numpy() for p in (torch_module.weight, torch_module.bias))
    return {kernel: jnp.array(weight.T), "bias": jnp.array(bias)}


def randomised(torch: Any, module: Any) -> Any:
    """Norms and biases off their starting values, so that leaving one out shows."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.startswith("norm") and name.endswith("weight"):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(std=0.1)
    return module.eval()


LAYER = {"d_model": 512, "nhead": 8, "dim_feedforward": 2048, "batch_first": True, "norm_first": False}


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_encoder_layer_equals_torch() -> None:
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    theirs = randomised(torch, torch.nn.TransformerEncoderLayer(**LAYER, activation="relu"))
    params = {
        "self_attention": torch_attention_params(theirs.self_attn),
        "self_attention_norm": torch_linear_params(theirs.norm1, "scale"),
        "feed_forward": {
            "hidden": torch_linear_params(theirs.linear1),
            "output": torch_linear_params(theirs.linear2),
        },
        "feed_forward_norm": torch_linear_params(theirs.norm2, "scale"),
    }
    x, is_token = normal(0, 2, 10, 512), np.ones((2, 10), bool)
    is_token[1, 7:] = False
    with torch.no_grad():
        golden = theirs(torch.from_numpy(x), src_key_padding_mask=torch.from_numpy(~is_token)).numpy()
    mask = jnp.broadcast_to(jnp.array(is_token)[:, None, None, :], (2, 1, 10, 10))
    apply = partial(EncoderLayer(ModelConfig.base()).apply, deterministic=True)
    output = apply({"params": params}, jnp.array(x), mask)
    # What torch makes of a pad's own row (its fast path: zeros) is nobody's business.
    difference = float(np.abs(output - golden)[is_token].max())
    print(f"difference from torch encoder layer: {difference:.3g}")
    assert difference <= 2e-6
    assert np.abs(golden).max() > 2


def test_decoder_layer_equals_torch() -> None:
    torch = pytest.importorskip("torch")
    torch.manual_seed(1)
    theirs = randomised(torch, torch.nn.TransformerDecoderLayer(**LAYER, activation="relu"))
    params = {
        "self_attention": torch_attention_params(theirs.self_attn),
        "self_attention_norm": torch_linear_params(theirs.norm1, "scale"),
        "cross_attention": torch_attention_params(theirs.multihead_attn),
        "cross_attention_norm": torch_linear_params(theirs.norm2, "scale"),
        "feed_forward": {
            "hidden": torch_linear_params(theirs.linear1),
            "output": torch_linear_params(theirs.linear2),
        },
        "feed_forward_norm": torch_linear_params(theirs.norm3, "scale"),
    }
    x, memory, is_token = normal(1, 2, 7, 512), normal(2, 2, 10, 512), np.ones((2, 10), bool)
    is_token[1, 7:] = False
    causal = np.tril(np.ones((7, 7), bool))

    def torch_output(dtype: Any) -> np.ndarray:
        with torch.no_grad():
            return theirs.to(dtype)(
                torch.from_numpy(x).to(dtype),
                torch.from_numpy(memory).to(dtype),
                tgt_mask=torch.from_numpy(~causal),
                memory_key_padding_mask=torch.from_numpy(~is_token),
            ).numpy()

    golden, exact = torch_output(torch.float32), torch_output(torch.float64)

    def run(layer: DecoderLayer, x: jax.Array, memory: jax.Array) -> jax.Array:
        mask = jnp.array(is_token)[:, None, None, :]
        keys_values = layer.cross_attention.keys_values(memory)
        return layer(x, jnp.array(causal)[None, None], keys_values, mask)[0]

    apply = partial(DecoderLayer(ModelConfig.base()).apply, method=run)
    output = apply({"params": params}, jnp.array(x), jnp.array(memory))
    difference, error, torch_error = (
        float(np.abs(a - b).max()) for a, b in ((output, golden), (output, exact), (golden, exact))
    )
    print(f"difference from torch decoder layer: {difference:.3g}; errors: ours {error:.3g}, torch {torch_error:.3g}")
    # Torch's own float32 rounding, which differs from CPU to CPU, is no mistake of ours: float64 is exact.
    assert error <= 2e-6
    assert difference <= 2e-6 + torch_error
    assert np.abs(golden).max() > 2


# --- every option: teacher forcing, cached decoding, training


@pytest.mark.parametrize("option", OPTIONS)
def test_logits_equal_the_reference_and_decoding_with_a_cache_equals_teacher_forcing(option: str) -> None:
    """A batch of two sentences of different length, padded, against one at a time in NumPy without masks;
    then the same once more token by token, and with the first three tokens at once."""
    config = tiny(**OPTIONS[option])
    params = make_params(config)
    variables, (pairs, source, target, segments) = {"params": params}, Batch.of(config)
    memory = function(config, "encode")(variables, source)
    forced = function(config, "decode")(variables, target, memory, segments)
    assert forced.shape == (2, 5, config.vocab_size)
    assert forced.dtype == jnp.float32
    for row, (source_ids, target_ids) in enumerate(pairs):
        golden = reference_numpy.logits(config, params, source_ids, target_ids)
        np.testing.assert_allclose(forced[row], golden, atol=1e-5)

    start = function(config, "start_decoding")(variables, memory, segments, 7)
    for prefix in (1, 3):
        logits, state = function(config, "decode_step")(variables, start, target[:, :prefix])
        cached = [logits]
        for t in range(prefix, 5):
            logits, state = function(config, "decode_step")(variables, state, target[:, t : t + 1])
            cached.append(logits)
        np.testing.assert_allclose(jnp.concatenate(cached, axis=1), forced, atol=1e-5)


def test_every_option_changes_the_result() -> None:
    """Otherwise the test above would compare one model with itself eighteen times."""
    paper = tiny()
    params, (source, target) = make_params(paper), sentence_pair(paper, 1, 6, 5)
    golden = reference_numpy.logits(paper, params, source, target)
    same_tree = ("sin_then_cos", "marian_positions", "swish", "gelu", "zero_start", "no_embedding_scale")
    for option in (*same_tree, "norm_epsilon"):
        changed = reference_numpy.logits(tiny(**OPTIONS[option]), params, source, target)
        assert np.abs(changed - golden).max() > 1e-3, option
    differing = {"pre_norm", "learned_positions", "no_attention_bias", "logits_bias", "untied", "separate_tables"}
    structure = jax.tree.structure(params)
    for option in differing | {"depths_3_1", "depths_1_3"}:
        assert jax.tree.structure(make_params(tiny(**OPTIONS[option]))) != structure, option


@pytest.mark.parametrize("option", [*OPTIONS, *DROPOUTS, "bfloat16"])
def test_training_lowers_the_loss_and_reaches_every_parameter(option: str) -> None:
    config = tiny(**{**OPTIONS, **DROPOUTS, "bfloat16": {"dtype": "bfloat16"}}[option])
    _, source, inputs, _ = Batch.of(config)
    outputs = jnp.concatenate([inputs[:, 1:], jnp.full((2, 1), config.end_id)], axis=1)
    weights, key = jnp.ones(outputs.shape), jax.random.key(0)

    def loss(params: Params) -> jax.Array:
        logits = Transformer(config).apply(
            {"params": params}, source, inputs, deterministic=False, rngs={"dropout": key}
        )
        assert isinstance(logits, jax.Array)
        assert logits.dtype == jnp.float32
        sums = cross_entropy(logits, outputs, weights, smoothing=0.1)
        return sums.loss / sums.tokens

    params, losses = make_params(config), []
    loss_and_gradients = jax.jit(jax.value_and_grad(loss))
    for _ in range(2):
        value, gradients = loss_and_gradients(params)
        losses.append(float(value))
        # In NumPy: JAX would compile a program for each shape.
        params = jax.tree.map(lambda p, g: np.asarray(p) - 0.1 * np.asarray(g), params, gradients)
    losses.append(float(loss_and_gradients(params)[0]))
    assert np.isfinite(losses).all()
    assert losses[0] > losses[1] > losses[2]
    assert losses[2] < losses[0] - 0.1
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradients):
        name = jax.tree_util.keystr(path)
        assert np.isfinite(leaf).all(), name
        # A key's bias adds the same to all scores of a query: softmax forgets it.
        if not name.endswith("['key']['bias']"):
            assert np.abs(leaf).max() > 0, name
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}


@pytest.mark.parametrize("option", DROPOUTS)
def test_dropout_acts_in_training_only_and_differs_from_key_to_key(option: str) -> None:
    config = tiny(**DROPOUTS[option])
    params, batch = make_params(config), Batch.of(config)
    ids = ({"params": params}, *batch[1:3])

    def train(seed: int) -> np.ndarray:
        return np.asarray(function(config)(*ids, deterministic=False, rngs={"dropout": jax.random.key(seed)}))

    first, again, other = train(0), train(0), train(1)
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 1e-2
    golden = reference_numpy.logits(config, params, *batch.pairs[0])
    np.testing.assert_allclose(function(config)(*ids)[0], golden, atol=1e-5)


def test_bfloat16_computes_low_but_answers_in_float32_close_to_the_exact_result() -> None:
    config = tiny(dtype="bfloat16")
    params = make_params(config)
    variables, (pairs, source, target, segments) = {"params": params}, Batch.of(config)
    memory = function(config, "encode")(variables, source)
    assert memory.dtype == jnp.bfloat16
    forced = function(config, "decode")(variables, target, memory, segments)
    state = Transformer(config).apply(variables, memory, segments, 5, method="start_decoding")
    assert {x.dtype for x in jax.tree.leaves((state.self_attention, state.cross_attention))} == {jnp.dtype("bfloat16")}
    step = function(config, "decode_step")
    cached = []
    for t in range(5):
        logits, state = step(variables, state, target[:, t : t + 1])
        cached.append(logits)
    for logits in (forced, jnp.concatenate(cached, axis=1)):
        assert logits.dtype == jnp.float32
        for row, (source_ids, target_ids) in enumerate(pairs):
            golden = reference_numpy.logits(config, params, source_ids, target_ids)
            error = np.abs(np.asarray(logits[row]) - golden).max()
            assert 1e-4 < error < 0.15  # lower than float32, no lower than 8 bits of mantissa explain


# --- the first decoder input


def with_row_changed(params: Params, token: int) -> Params:
    """The same parameters but for one token's embedding."""
    table = np.array(params["target_embedding"]["table"])
    table[token] += 3.0
    return {**params, "target_embedding": {"table": jnp.array(table)}}


def test_a_zero_start_is_position_0_alone_whatever_the_start_tokens_row_holds() -> None:
    config = tiny(start_embedding="zero", tied_output=False)
    params, ids = make_params(config), Batch.of(config)[1:3]
    changed = with_row_changed(params, config.start_id)
    apply = function(config)
    np.testing.assert_array_equal(apply({"params": params}, *ids), apply({"params": changed}, *ids))
    token = tiny(tied_output=False)
    assert not np.array_equal(function(token)({"params": params}, *ids), function(token)({"params": changed}, *ids))


# --- what may not be seen


def test_a_token_changes_no_logits_before_it() -> None:
    config = tiny()
    variables, (_, source, target, _) = {"params": make_params(config)}, Batch.of(config)
    other = np.array(target)
    other[:, 3] = 3 + (other[:, 3] - 2) % 10
    before = function(config)(variables, source, target)
    after = function(config)(variables, source, jnp.array(other))
    np.testing.assert_array_equal(before[:, :3], after[:, :3])
    assert np.abs(before[:, 3] - after[:, 3]).max() > 1e-3


def test_a_sentence_of_19_tokens_alone_equals_itself_padded_to_22() -> None:
    config = tiny()
    variables, (source, target) = {"params": make_params(config)}, sentence_pair(config, 0, 19, 5)
    targets = pad([target], 5)
    alone = function(config)(variables, pad([source], 19), targets)
    padded = function(config)(variables, pad([source], 22), targets)
    unmasked = function(config)(variables, pad([source], 22), targets, jnp.ones((1, 22), jnp.int32))
    difference, without = (float(np.abs(logits - alone).max()) for logits in (padded, unmasked))
    print(f"19 tokens padded to 22: {difference:.3g}; without the mask {without:.3g}")
    assert difference <= 5e-6
    assert without > 0.05
    golden = reference_numpy.logits(config, variables["params"], source, target)
    np.testing.assert_allclose(padded[0], golden, atol=1e-5)


def test_what_stands_on_padding_changes_nothing() -> None:
    config = tiny(tied_output=False)
    params, ids = make_params(config), Batch.of(config)[1:3]
    changed = with_row_changed(params, config.pad_id)
    apply = function(config)
    np.testing.assert_array_equal(apply({"params": params}, *ids), apply({"params": changed}, *ids))


def test_a_source_of_padding_alone_gives_finite_logits_and_gradients() -> None:
    """A batch is filled up with empty rows: they must not spoil the others."""
    config = tiny()
    source, target = pad([[5, 2], []], 8), pad([[1, 4], []], 5)

    def total(params: Params) -> jax.Array:
        return jnp.square(Transformer(config).apply({"params": params}, source, target)).sum()

    value, gradient = jax.value_and_grad(total)(make_params(config))
    assert np.isfinite(value)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_packed_sentences_have_the_logits_that_each_has_alone_and_do_not_see_their_neighbour(norm: Any) -> None:
    config = tiny(norm=norm, n_encoder_layers=2, n_decoder_layers=2)
    params = make_params(config)
    first, second, third = (sentence_pair(config, seed, S, T) for seed, S, T in ((7, 4, 3), (8, 3, 2), (9, 3, 2)))
    rows = [(first, second), (first, third)]  # the same sentence beside two neighbours
    logits = function(config)(
        {"params": params},
        pad([a[0] + b[0] for a, b in rows], 8),
        pad([a[1] + b[1] for a, b in rows], 5),
        pad(2 * [[1, 1, 1, 1, 2, 2, 2]], 8),
        pad(2 * [[1, 1, 1, 2, 2]], 5),
        pad(2 * [[0, 1, 2, 3, 0, 1, 2]], 8),
        pad(2 * [[0, 1, 2, 0, 1]], 5),
    )
    logits = np.asarray(logits)
    for row, (a, b) in zip(logits, rows, strict=True):
        np.testing.assert_allclose(row[:3], reference_numpy.logits(config, params, *a), atol=1e-5)
        np.testing.assert_allclose(row[3:], reference_numpy.logits(config, params, *b), atol=1e-5)
    np.testing.assert_array_equal(logits[0, :3], logits[1, :3])
    assert np.abs(logits[0, 3:] - logits[1, 3:]).max() > 1e-2


# --- the decoder's state


def test_compiled_decoding_in_one_loop_equals_teacher_forcing() -> None:
    """The state goes through jit and scan as it is: its shapes and types are the same after each step."""
    config = tiny(logits_bias=True)
    params, batch = make_params(config), Batch.of(config)

    @jax.jit
    def decode(params: Params, source_BS: jax.Array, target_BT: jax.Array) -> jax.Array:
        apply = partial(Transformer(config).apply, {"params": params})
        memory, segments = apply(source_BS, method="encode"), apply(source_BS, method="source_segments")

        def step(state: Any, ids_B: jax.Array) -> tuple[Any, jax.Array]:
            logits, state = apply(state, ids_B[:, None], method="decode_step")
            return state, logits[:, 0]

        _, logits_TBV = jax.lax.scan(step, apply(memory, segments, 7, method="start_decoding"), target_BT.T)
        return logits_TBV.swapaxes(0, 1)

    logits = decode(params, batch.source_BS, batch.target_BT)
    for row, pair in zip(logits, batch.pairs, strict=True):
        np.testing.assert_allclose(row, reference_numpy.logits(config, params, *pair), atol=1e-5)


def test_rows_of_the_state_may_be_reordered_repeated_and_dropped_between_steps() -> None:
    """As beam search does: after three tokens the rows change places, after four the first is dropped for another
    copy of the second. Each goes on as the row that it was."""
    config = tiny(n_decoder_layers=2)
    variables, (pairs, source, target, segments) = {"params": make_params(config)}, Batch.of(config)
    step = function(config, "decode_step")

    def take(state: DecoderState, rows: list[int]) -> DecoderState:
        return jax.tree.map(lambda x: x[jnp.array(rows)] if x.ndim else x, state)

    memory = function(config, "encode")(variables, source)
    state = function(config, "start_decoding")(variables, memory, segments, 7)
    _, state = step(variables, state, target[:, :3])
    fourth, state = step(variables, take(state, [1, 0]), target[::-1, 3:4])
    fifth, state = step(variables, take(state, [0, 0]), jnp.stack([target[1, 4:], target[1, 4:]]))
    assert int(state.step) == 5
    golden = [reference_numpy.logits(config, variables["params"], *pair) for pair in pairs]
    np.testing.assert_allclose(fourth[:, 0], [golden[1][3], golden[0][3]], atol=1e-5)
    np.testing.assert_allclose(fifth[:, 0], [golden[1][4], golden[1][4]], atol=1e-5)


def test_the_cache_is_sized_by_the_decoder_and_the_source_side_stays_as_it_was() -> None:
    config = tiny(n_encoder_layers=1, n_decoder_layers=3)
    variables, (_, source, _, segments) = {"params": make_params(config)}, Batch.of(config)
    memory = function(config, "encode")(variables, source)
    before = function(config, "start_decoding")(variables, memory, segments, 7)
    assert isinstance(before, DecoderState)
    assert [k.shape for k, _ in before.self_attention] == 3 * [(2, 2, 7, 8)]
    assert [v.shape for _, v in before.cross_attention] == 3 * [(2, 2, 8, 8)]
    _, after = function(config, "decode_step")(variables, before, jnp.ones((2, 1), jnp.int32))
    for old, new in zip(jax.tree.leaves(before.cross_attention), jax.tree.leaves(after.cross_attention), strict=True):
        np.testing.assert_array_equal(old, new)
    for keys, values in after.self_attention:
        assert np.asarray(keys)[:, :, 0].any()
        assert not np.asarray(keys)[:, :, 1:].any()
        assert not np.asarray(values)[:, :, 1:].any()


# --- lengths and configuration: one sentence that names what is wrong


@pytest.mark.parametrize("side", ["source", "target"])
def test_a_sentence_beyond_the_positions_is_refused_with_both_numbers(side: str) -> None:
    config = tiny()
    variables = jax.eval_shape(Transformer(config).init, jax.random.key(0), *2 * [jnp.ones((1, 1), jnp.int32)])
    lengths = {"source": 5, "target": 5, side: 25}
    ids = [jnp.ones((1, length), jnp.int32) for length in lengths.values()]
    with pytest.raises(UserError, match=rf"{side} .*\b25\b.*\b24\b"):
        jax.eval_shape(Transformer(config).apply, variables, *ids)
    lengths[side] = 24
    ids = [jnp.ones((1, length), jnp.int32) for length in lengths.values()]
    assert jax.eval_shape(Transformer(config).apply, variables, *ids).shape == (1, lengths["target"], 13)


def test_decoding_beyond_the_positions_is_refused_with_both_numbers() -> None:
    config = tiny()
    variables = {"params": make_params(config)}
    with pytest.raises(UserError, match=r"target .*\b25\b.*\b24\b"):
        Transformer(config).apply(
            variables, jnp.zeros((1, 3, 16)), jnp.ones((1, 3), jnp.int32), 25, method="start_decoding"
        )


def test_a_model_without_a_vocabulary_is_refused() -> None:
    ids = jnp.ones((1, 1), jnp.int32)
    with pytest.raises(UserError, match=r"vocab_size is 0"):
        Transformer(tiny(vocab_size=0)).init(jax.random.key(0), ids, ids)


def test_the_initial_attention_kernels_can_be_drawn_as_one_matrix_would_be() -> None:
    """Glorot's limit is sqrt(6 / (rows + columns)): of (D, D), and of (D, 3D) where the three are drawn together."""
    config = tiny(d_model=64, attention_init_gain=2**-0.5)
    ids = jnp.ones((1, 1), jnp.int32)
    params = Transformer(config).init(jax.random.key(0), ids, ids)["params"]
    attention = params["decoder"]["layer_0"]["cross_attention"]
    limits = {name: float(jnp.abs(weights["kernel"]).max()) for name, weights in attention.items()}
    together, alone = (6 / (4 * 64)) ** 0.5, (6 / (2 * 64)) ** 0.5
    assert limits == pytest.approx({"query": together, "key": together, "value": together, "output": alone}, rel=0.01)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"d_model": 20, "n_heads": 8}, ["d_model", "20", "n_heads", "8"]),
        ({"d_model": 15, "n_heads": 3}, ["d_model", "15", "even"]),
        ({"d_model": 2, "n_heads": 1, "positions": "marian"}, ["d_model", "2", "marian"]),
        ({"norm": "middle"}, ["norm", "'middle'", "post", "pre"]),
        ({"positions": "rotary"}, ["positions", "'rotary'", "interleaved", "sin_then_cos", "marian", "learned"]),
        ({"activation": "tanh"}, ["activation", "'tanh'", "relu", "swish", "gelu"]),
        ({"start_embedding": "one"}, ["start_embedding", "'one'", "token", "zero"]),
        ({"dtype": "float8"}, ["dtype", "'float8'", "float32", "bfloat16"]),
        ({"dropout": 1.0}, ["dropout", "1.0", "below 1"]),
        ({"dropout": -0.1}, ["dropout", "-0.1", "at least 0"]),
        ({"attention_dropout": 1.5}, ["attention_dropout", "1.5"]),
        ({"feed_forward_dropout": 1.0}, ["feed_forward_dropout", "1.0"]),
        ({"attention_init_gain": 0.0}, ["attention_init_gain", "0.0", "above 0"]),
        ({"n_encoder_layers": 0}, ["n_encoder_layers", "0", "at least 1"]),
        ({"n_decoder_layers": -1}, ["n_decoder_layers", "-1"]),
        ({"d_ff": 0}, ["d_ff", "0"]),
        ({"n_heads": 0}, ["n_heads", "0"]),
        ({"max_length": 0}, ["max_length", "0"]),
        ({"vocab_size": -3}, ["vocab_size", "-3"]),
        ({"pad_id": -1}, ["pad_id", "-1"]),
        ({"source_vocab_size": 36, "vocab_size": 52}, ["source_vocab_size", "36", "vocab_size", "52"]),
    ],
)
def test_a_bad_configuration_is_refused_and_the_message_names_field_and_value(
    changes: dict[str, Any], named: list[str]
) -> None:
    with pytest.raises(UserError) as refusal:
        tiny(**changes)
    for word in named:
        assert word in str(refusal.value)


def test_odd_widths_are_fine_with_learned_positions() -> None:
    assert tiny(d_model=15, n_heads=3, positions="learned").d_head == 5


def test_a_configuration_cannot_be_changed_by_accident() -> None:
    with pytest.raises(AttributeError):
        tiny().d_model = 3  # type: ignore[misc]
