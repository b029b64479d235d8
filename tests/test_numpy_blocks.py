"""The NumPy blocks that the pages show: each equals the package's, and each example the values worked by hand."""

from __future__ import annotations

import math
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from programs import load_program

from transformer_jax import attention, averaging, layers, loss, optimizer
from transformer_jax.batching import bucket_bounds
from transformer_jax.config import ModelConfig, TrainConfig
from transformer_jax.model import DecoderLayer, EncoderLayer
from transformer_jax.search import beam_search
from transformer_jax.search_rules import SearchOptions

DOCS = Path(__file__).resolve().parents[1] / "docs"
CONFIG = ModelConfig(vocab_size=7, d_model=8, n_heads=2, d_ff=12, n_encoder_layers=1, n_decoder_layers=1)


def load_blocks() -> ModuleType:
    return load_program(DOCS / "numpy_blocks.py")


blocks = load_blocks()


def printed(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What a page shows of an example: numbers rounded as docs/hooks.py does it, spaces evened out."""
    with np.printoptions(precision=4, suppress=True):
        getattr(blocks, name)()
    return " ".join(capsys.readouterr().out.split())


# --- worked by hand -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "by_hand"),
    [
        ("show_attention", "weights [0.75 0.25] output [6. 2.] weights [1. 0.] output [8. 0.]"),
        ("show_multi_head_attention", "[[0.75 0.25 0. 1. ] [0.25 0.75 0. 1. ]]"),
        ("show_masks", "[[1 0 0 0 0] [1 1 0 0 0] [0 0 1 0 0] [0 0 1 1 0] [0 0 0 0 0]]"),
        ("show_layer_norm", "[[-1. -1. 1. 1.]]"),
        ("show_encoder_layer", "[[-1. 1.] [ 1. -1.]]"),
        ("show_decoder_layer", "[[-1. 1.] [-1. 1.]]"),
        ("show_feed_forward", "[[2 0]]"),
        ("show_embedding", "embedding [0. 1. 1. 0.] logits [0. 1. 1.]"),
        ("show_positions", "[[0. 1. 0. 1. ] [0.8415 0.5403 0.01 1. ] [0.9093 -0.4161 0.02 0.9998]]"),
        ("show_batches", "tokens 24 slots by number of shapes [36, 26, 25, 24]"),
        ("show_rate", "step 1 rate 1.747e-07 step 4,000 rate 6.988e-04 step 100,000 rate 1.398e-04"),
        ("show_adam", "after step 1: 0.900000 after step 2: 0.848669"),
        ("show_dropout", "[2. 0. 0. 8.]"),
        (
            "show_label_smoothing",
            "all [0.92 0.02 0.02 0.02 0.02] lowest loss 0.3897 others [0.9 0.025 0.025 0.025 0.025] lowest loss 0.4637",
        ),
        ("show_smoothed_loss", "sure all 4.0000 others 5.0000 calm all 0.3897 others 0.4662"),
        ("show_average", "{'bias': array([2., 4.])}"),
        ("show_beam_search", "beam 1 tokens [1, 0] probability 0.24 beam 2 tokens [2, 0] probability 0.36"),
    ],
)
def test_the_example_is_as_worked_by_hand(name: str, by_hand: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(name, capsys).replace("[ ", "[") == by_hand.replace("[ ", "[")


def test_every_example_is_tested() -> None:
    (marked,) = (m for m in test_the_example_is_as_worked_by_hand.pytestmark if m.name == "parametrize")
    assert {case[0] for case in marked.args[1]} == {name for name in dir(blocks) if name.startswith("show_")}


# --- against the package ------------------------------------------------------------------------------------


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_attention() -> None:
    queries, keys, values = random(5, 4), random(6, 4, seed=1), random(6, 4, seed=2)
    may_look = random(5, 6, seed=3) > -0.5
    output, weights = blocks.attention(queries, keys, values, may_look)
    ours = [jnp.asarray(x)[None, None] for x in (queries, keys, values, may_look)]
    np.testing.assert_allclose(attention.attention_weights(ours[0], ours[1], ours[3])[0, 0], weights, atol=1e-6)
    np.testing.assert_allclose(attention.dot_product_attention(*ours)[0, 0], output, atol=1e-5)


def test_masks() -> None:
    segments = np.array([1, 1, 2, 2, 2, 0])
    np.testing.assert_array_equal(attention.causal_mask(6), blocks.causal_mask(6))
    ours = attention.segment_mask(jnp.asarray(segments)[None], jnp.asarray(segments)[None])
    np.testing.assert_array_equal(ours[0, 0], blocks.segment_mask(segments, segments))


def drawn(module: Any, *arguments: Any, **options: Any) -> Any:
    """The module's parameters, none of them zero or one."""
    shapes = jax.eval_shape(lambda: module.init(jax.random.key(0), *arguments, **options))["params"]
    leaves, tree = jax.tree.flatten(shapes)
    return jax.tree.unflatten(tree, [jnp.asarray(random(*leaf.shape, seed=n)) / 2 for n, leaf in enumerate(leaves)])


def test_encoder_layer_with_all_that_is_in_it() -> None:
    x, segments = random(4, 8), jnp.array([[1, 1, 1, 0]])
    given = jnp.asarray(x)[None], attention.segment_mask(segments, segments)
    layer = EncoderLayer(CONFIG)
    params = drawn(layer, *given, deterministic=True)
    ours = layer.apply({"params": params}, *given, deterministic=True)
    mine = blocks.encoder_layer(to_numpy(params), x, np.asarray(given[1])[0, 0], n_heads=2)
    np.testing.assert_allclose(ours[0], mine, atol=1e-5)


def test_decoder_layer_with_all_that_is_in_it() -> None:
    x, memory, segments = random(5, 8), random(4, 8, seed=1), jnp.array([[1, 1, 1, 0]])
    self_mask = attention.causal_mask(5)[None, None]
    memory_mask = attention.segment_mask(jnp.ones((1, 5), jnp.int32), segments)
    layer, cross = DecoderLayer(CONFIG), attention.MultiHeadAttention(CONFIG)
    params = drawn(layer, jnp.asarray(x)[None], self_mask, (jnp.zeros((1, 2, 4, 4)),) * 2, memory_mask)
    # Keys and values of the memory are made once for a sentence, outside of the layer, by its cross-attention.
    of_cross = {"params": params["cross_attention"]}
    keys_values = cross.apply(of_cross, jnp.asarray(memory)[None], method="keys_values")
    ours, _ = layer.apply({"params": params}, jnp.asarray(x)[None], self_mask, keys_values, memory_mask)
    masks = blocks.causal_mask(5), np.asarray(memory_mask)[0, 0]
    np.testing.assert_allclose(ours[0], blocks.decoder_layer(to_numpy(params), x, memory, *masks, 2), atol=1e-5)


def to_numpy(params: Any) -> Any:
    return jax.tree.map(np.asarray, params)


def test_embedding_and_logits() -> None:
    module, table = layers.Embedding(CONFIG, 7), random(7, 8)
    params, ids, x = {"params": {"table": jnp.asarray(table)}}, np.array([[3, 0, 6]]), random(1, 3, 8, seed=1)
    np.testing.assert_allclose(module.apply(params, jnp.asarray(ids)), blocks.embed(table, ids), atol=1e-6)
    ours = module.apply(params, jnp.asarray(x), method="logits")
    np.testing.assert_allclose(ours, blocks.logits(table, x), atol=1e-5)


@pytest.mark.parametrize("d_model", [8, 512])
def test_positions(d_model: int) -> None:
    np.testing.assert_allclose(layers.sinusoids(60, d_model, "interleaved"), blocks.positions(60, d_model), atol=1e-6)


@pytest.mark.parametrize("n_shapes", [1, 2, 3, 4])
def test_fewest_slots(n_shapes: int) -> None:
    """The package finds by dynamic programming what trying all finds. Both sides alike: twice the slots of one."""
    lengths = np.random.default_rng(n_shapes).integers(2, 12, 40)
    bounds = [source for source, _ in bucket_bounds(lengths, lengths, n_shapes)]
    slots = sum(min(bound for bound in bounds if bound >= length) for length in lengths.tolist())
    assert slots == blocks.fewest_slots(lengths.tolist(), n_shapes)


def test_paper_rate() -> None:
    ours = optimizer.paper_rate(256, 300)(jnp.array([1, 299, 300, 301, 5000]))
    np.testing.assert_allclose(ours, [blocks.paper_rate(n, 256, 300) for n in (1, 299, 300, 301, 5000)], rtol=1e-5)


def test_adam_is_optax_with_the_papers_constants_and_rate() -> None:
    config = TrainConfig(warmup_steps=3)
    ours = optimizer.adam(config, d_model=16)
    parameter, gradients = jnp.asarray(random(5)), [random(5, seed=n) for n in range(1, 8)]
    state, moved = ours.init(parameter), parameter
    for gradient in gradients:
        updates, state = ours.update(jnp.asarray(gradient), state, moved)
        moved = optax.apply_updates(moved, updates)
    mine = blocks.adam(np.asarray(parameter), gradients, lambda step: blocks.paper_rate(step, 16, 3))
    np.testing.assert_allclose(moved, mine, atol=1e-5)


def test_the_worked_steps_are_those_of_optax() -> None:
    config = TrainConfig(schedule="constant", peak_rate=0.1, warmup_steps=1)
    ours, parameter = optimizer.adam(config, d_model=16), jnp.asarray(1.0)
    state, after = ours.init(parameter), []
    for gradient in (0.5, -0.1):
        updates, state = ours.update(jnp.asarray(gradient), state, parameter)
        parameter = jnp.asarray(optax.apply_updates(parameter, updates))
        after.append(float(parameter))
    np.testing.assert_allclose(after, [0.9, 0.848669], atol=1e-6)


def test_dropout() -> None:
    x, key = random(20, 30), jax.random.key(4)
    kept = np.asarray(layers.keep_mask(key, 0.7, (20, 30)))
    assert 0.6 < kept.mean() < 0.8
    np.testing.assert_allclose(layers.dropout(jnp.asarray(x), 0.3, key), blocks.dropout(x, 0.3, kept), atol=1e-5)


@pytest.mark.parametrize("reading", ["all", "others"])
def test_label_smoothing(reading: Any) -> None:
    logits, right = random(9) * 3, 2
    targets = blocks.smoothed_targets(right, 9, 0.1, reading)
    assert targets.sum() == pytest.approx(1)
    assert loss.smoothed_targets(9, 0.1, reading) == pytest.approx((targets[right], targets[0]))
    sums = loss.cross_entropy(
        jnp.asarray(logits)[None, None], jnp.array([[right]]), jnp.ones((1, 1)), smoothing=0.1, reading=reading
    )
    assert float(sums.loss) == pytest.approx(blocks.smoothed_loss(logits, targets), abs=1e-5)
    assert loss.lowest_loss(9, 0.1, reading) == pytest.approx(blocks.lowest_loss(targets))
    assert blocks.smoothed_loss(np.log(targets), targets) == pytest.approx(blocks.lowest_loss(targets))


def test_the_readings_are_one_with_another_epsilon() -> None:
    np.testing.assert_allclose(
        blocks.smoothed_targets(0, 41, 0.1, "all"), blocks.smoothed_targets(0, 41, 0.1 * 40 / 41, "others")
    )


@pytest.mark.parametrize("alpha", [0.0, 0.6, 2.0])
def test_beam_search_on_chains(alpha: float) -> None:
    """The next token depends on the last alone; every chain is a sentence of one batch."""
    V, limit, n_chains = 5, 6, 8
    chains = np.random.default_rng(1).dirichlet(np.full(V, 0.4), size=(n_chains, V)).astype(np.float32) + 1e-4
    log_probs = np.log(chains / chains.sum(-1, keepdims=True))
    start, W = 4, 3
    rows = jnp.repeat(jnp.arange(n_chains), W)

    def step(state: Any, tokens: Any) -> Any:
        return jnp.asarray(log_probs)[state, tokens], state

    found = beam_search(
        step,
        lambda state, order: state[order],
        rows,
        jnp.full(n_chains, start),
        jnp.full(n_chains, limit),
        SearchOptions(end_id=0, beam_size=W, length_rule="gnmt", length_penalty=alpha),
        length=limit,
    )
    for n in range(n_chains):
        score, tokens = blocks.beam_search(
            lambda tokens, n=n: log_probs[n, tokens[-1] if tokens else start], 0, W, limit, alpha
        )
        assert found.tokens_BNT[n, 0, : found.lengths_BN[n, 0]].tolist() == tokens
        assert float(found.scores_BN[n, 0]) == pytest.approx(score, abs=1e-5)
    assert len({int(length) for length in found.lengths_BN[:, 0]}) > 1, "chains of one length test no length rule"


def test_average(monkeypatch: pytest.MonkeyPatch) -> None:
    trees = [{"a": random(3, seed=n)} for n in range(4)]
    monkeypatch.setattr(averaging, "read_params", lambda folder, step: trees[step])
    ours, steps = averaging.average_params(Path("run"), [0, 1, 2, 3])
    assert steps == [0, 1, 2, 3]
    np.testing.assert_allclose(ours["a"], blocks.average(trees)["a"], atol=1e-6)


def test_softmax_of_large_scores_is_finite() -> None:
    np.testing.assert_allclose(blocks.softmax(np.array([1000.0, 1000.0 - math.log(3)])), [0.75, 0.25])
