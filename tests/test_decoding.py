"""Decoding: sentences move to smaller shapes, beams share their source, and no result depends on it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.config import DecodeConfig, ModelConfig
from transformer_jax.decoding import BatchDecoder, row_sizes, step_function
from transformer_jax.errors import UserError
from transformer_jax.model import Transformer
from transformer_jax.search import beam_search
from transformer_jax.search_rules import SearchOptions
from transformer_jax.sharding import data_mesh, replicate, shard_rows
from transformer_jax.source_tiles import pack_sources
from transformer_jax.stopwatch import Stopwatch
from transformer_jax.tokenizer import CharacterTokenizer
from transformer_jax.translator import Hypothesis, Translator

TOKENIZER = CharacterTokenizer(tuple("abcdefgh 0123456789"))
CONFIG = ModelConfig(
    vocab_size=TOKENIZER.vocab_size,
    d_model=16,
    n_heads=2,
    d_ff=32,
    n_encoder_layers=1,
    n_decoder_layers=2,
    max_length=40,
    logits_bias=True,
)
MODEL = Transformer(CONFIG)
LENGTH = 30
LIMITS = (30, 4, 30, 9, 17, 30, 6, 22)
LINES = ["abc", "a", "fade 12", "h" * 7, "0123456", "bead", "a b c d", "9"]


def random_params(seed: int = 4) -> Any:
    """Large weights, and an end token that makes outputs end at all kinds of lengths."""
    rng = np.random.default_rng(seed)
    ids = jnp.ones((1, 1), jnp.int32)
    shapes = jax.eval_shape(MODEL.init, jax.random.key(0), ids, ids)["params"]

    def draw(path: Any, shape: Any) -> np.ndarray:
        centre = 1.0 if jax.tree_util.keystr(path).endswith("['scale']") else 0.0
        return (centre + 0.5 * rng.normal(size=shape.shape)).astype(np.float32)

    params = jax.tree_util.tree_map_with_path(draw, shapes)
    params["logits_bias"][CONFIG.end_id] = 1.0
    return params


PARAMS = random_params()
OPTIONS = SearchOptions(end_id=CONFIG.end_id, beam_size=3, n_best=2, suppressed=(0, 1))


def batch() -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    ids = np.zeros((len(LINES), 8), np.int32)
    for row, line in enumerate(LINES):
        encoded = TOKENIZER.encode_source(line)
        ids[row, : len(encoded)] = encoded
    return ids, (ids != 0).astype(np.int32), {"limits_B": np.array(LIMITS, np.int32)}


@pytest.fixture(scope="module")
def golden() -> Any:
    """The whole search in one program, with the sources' keys and values repeated for every beam by hand."""
    ids, segments, asked = jax.tree.map(jnp.asarray, batch())
    W = OPTIONS.beam_size

    @jax.jit
    def search(params: Any) -> Any:
        memory = MODEL.apply({"params": params}, ids, segments, method="encode")
        repeated = jnp.repeat(memory, W, axis=0)
        of_rows = jnp.repeat(jnp.asarray(segments), W, axis=0)
        state = MODEL.apply({"params": params}, repeated, of_rows, LENGTH, method="start_decoding")
        reorder = lambda state, rows: jax.tree.map(lambda x: x[rows] if x.ndim else x, state)  # noqa: E731
        start = jnp.full(len(ids), CONFIG.start_id)
        limits = jnp.asarray(asked["limits_B"])
        return beam_search(step_function(MODEL, params), reorder, state, start, limits, OPTIONS, length=LENGTH)

    return jax.device_get(search(jax.device_put(PARAMS)))


DECODERS: dict[int, BatchDecoder] = {}  # by the number of devices: the tests share compiled programs


def decode(n_devices: int, few_rows: int) -> Any:
    mesh = data_mesh(n_devices)
    decoder = DECODERS.setdefault(n_devices, BatchDecoder(MODEL, mesh, OPTIONS))
    sources = [TOKENIZER.encode_source(line) for line in LINES]
    tiles = pack_sources(sources, len(LINES), 8, CONFIG.pad_id, n_devices)
    arrays = shard_rows((tiles, batch()[2]), mesh)
    return decoder.decode(replicate(PARAMS, mesh), *arrays, length=LENGTH, few_rows=few_rows)


def assert_same(found: Any, golden: Any) -> None:
    np.testing.assert_array_equal(found.lengths_BN, golden.lengths_BN)
    np.testing.assert_array_equal(found.tokens_BNT, golden.tokens_BNT)
    np.testing.assert_allclose(found.scores_BN, golden.scores_BN, atol=1e-5)
    np.testing.assert_allclose(found.token_log_probs_BNT, golden.token_log_probs_BNT, atol=1e-5)
    np.testing.assert_array_equal(found.finished_BN, golden.finished_BN)


def test_outputs_end_at_different_lengths(golden: Any) -> None:
    """Without this, no sentence would ever leave a batch in these tests."""
    assert len(set(golden.lengths_BN[:, 0].tolist())) >= 4
    assert golden.lengths_BN.max() == LENGTH
    assert golden.lengths_BN[:, 0].min() < 8


@pytest.mark.parametrize("few_rows", [2, 5, 8])
def test_sentences_that_are_left_may_move_to_a_smaller_shape(few_rows: int, golden: Any) -> None:
    assert_same(decode(1, few_rows), golden)


@pytest.mark.parametrize("few_rows", [2, 4])
def test_sentences_move_between_devices_when_few_are_left(few_rows: int, golden: Any) -> None:
    """Rows 0 and 2 and 5 are the last, all on the first device of two until they move."""
    assert_same(decode(2, few_rows), golden)


def test_there_are_two_programs_for_a_shape() -> None:
    decoder = BatchDecoder(MODEL, data_mesh(1), OPTIONS)
    DECODERS[1] = decoder
    for _ in range(2):
        decode(1, 2)
    assert decoder.n_programs() == 2


def test_few_rows_are_a_quarter_and_serve_every_device() -> None:
    assert row_sizes(64, 1) == (64, 16)
    assert row_sizes(64, 8) == (64, 16)
    assert row_sizes(10, 8) == (16, 8)
    assert row_sizes(1, 8) == (8, 8)


# --- through the translator -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def translator() -> Translator:
    config = DecodeConfig(beam_size=3, extra_length=10, batch_tokens=128)
    return Translator(MODEL, PARAMS, TOKENIZER, config, data_mesh(1))


def test_n_best_lists_are_best_first_and_begin_with_the_translation(translator: Translator) -> None:
    for translation in translator.translate(LINES, n_best=3):
        assert len(translation.n_best) == 3
        scores = [h.score for h in translation.n_best]
        assert scores == sorted(scores, reverse=True)
        assert len({h.tokens for h in translation.n_best}) == 3
        assert translation.tokens == translation.n_best[0].tokens
        assert isinstance(translation.n_best[0], Hypothesis)


def test_returned_scores_are_those_of_scoring_the_same_tokens(translator: Translator) -> None:
    sources = [TOKENIZER.encode_source(line) for line in LINES]
    for line, source in zip(translator.translate(LINES, n_best=3), sources, strict=True):
        scored = translator.score_tokens([(source, h.tokens) for h in line.n_best])
        for hypothesis, score in zip(line.n_best, scored, strict=True):
            assert hypothesis.log_prob == pytest.approx(score.log_prob, abs=1e-4)
            np.testing.assert_allclose(hypothesis.token_scores, score.token_log_probs, atol=1e-4)
            assert hypothesis.score == pytest.approx(score.log_prob / len(hypothesis.tokens), abs=1e-4)


def test_score_takes_text_and_adds_the_end_token(translator: Translator) -> None:
    (score,) = translator.score(["abc"], ["fade"])
    (golden,) = translator.score_tokens([(TOKENIZER.encode_source("abc"), TOKENIZER.encode_target("fade"))])
    assert len(score.token_log_probs) == 5
    assert score == golden
    with pytest.raises(UserError, match="1 sources but 2 targets"):
        translator.score(["a"], ["b", "c"])


def test_translations_begin_with_their_prefix(translator: Translator) -> None:
    free = translator.translate(LINES)
    given = translator.translate(LINES, prefixes="ge")
    assert all(t.text.startswith("ge") for t in given)
    assert not all(t.text.startswith("ge") for t in free)
    each = translator.translate(LINES, prefixes=[f"{i}" for i in range(len(LINES))])
    assert [t.text[0] for t in each] == [f"{i}" for i in range(len(LINES))]
    with pytest.raises(UserError, match="1 prefixes for more lines"):
        translator.translate(LINES, prefixes=["a"])


def test_minimum_and_maximum_lengths_are_kept(translator: Translator) -> None:
    assert all(len(t.tokens) >= 9 for t in translator.translate(LINES, min_length=9))
    for line, translation in zip(LINES, translator.translate(LINES, extra_length=2), strict=True):
        assert len(translation.tokens) <= len(line) + 1 + 2
    for line, translation in zip(LINES, translator.translate(LINES, max_length_factor=1.5), strict=True):
        assert len(translation.tokens) <= int(np.ceil((len(line) + 1) * 1.5))


def test_samples_follow_from_the_seed_and_the_line_alone(translator: Translator) -> None:
    draw = {"sample": True, "beam_size": 1, "extra_length": 10}
    once = [t.tokens for t in translator.translate(LINES, **draw)]
    assert [t.tokens for t in translator.translate(LINES, **draw)] == once
    assert [t.tokens for t in translator.translate(LINES, seed=1, **draw)] != once
    (alone,) = translator.translate(LINES[3:4], first_line=4, **draw)
    assert alone.tokens == once[3]
    assert len({t.tokens for t in translator.translate(["abc"] * 6, **draw)}) > 1


def test_options_that_contradict_each_other_are_told(translator: Translator) -> None:
    with pytest.raises(UserError, match="n_best is 4, but beam_size is 3"):
        translator.translate(["a"], n_best=4)
    with pytest.raises(UserError, match="Sampling follows one hypothesis"):
        translator.translate(["a"], sample=True)
    with pytest.raises(UserError, match="word_penalty belongs"):
        translator.translate(["a"], word_penalty=0.5)


def test_a_file_with_lines_of_all_lengths_compiles_at_most_16_programs() -> None:
    config = dataclasses.replace(CONFIG, max_length=512, n_decoder_layers=1)
    params = dict(PARAMS, decoder={"layer_0": PARAMS["decoder"]["layer_0"]})
    search = DecodeConfig(beam_size=2, max_length=3, batch_tokens=1024)
    translator = Translator(Transformer(config), params, TOKENIZER, search, data_mesh(1))
    rng = np.random.default_rng(0)
    lines = ["ab" * (int(n) // 2) + "c" for n in rng.permutation(np.arange(1, 400, 8))]
    assert len(translator.translate(lines)) == len(lines)
    assert translator.n_programs() <= 16
    ten_times = [lines[i] for i in rng.integers(0, len(lines), 10 * len(lines))]
    translator.translate(ten_times)
    assert 5 <= translator.n_programs() <= 16


def test_parts_of_one_line_share_a_prefix_and_draw_apart(translator: Translator) -> None:
    line = "abc fade " * 12
    (given,) = translator.translate([line], prefixes="gg", extra_length=4)
    assert given.text.startswith("gg")
    parts = translator._parts([line], translator.config, 1)[0]
    assert len(parts) >= 2
    draws = translator._translate_parts([parts[0], parts[0]], [0, 0], None, SAMPLING, 1)
    assert draws[0][0].tokens != draws[1][0].tokens
    prefixes = translator._encode_prefixes("gg", [0, 0, 1])
    assert prefixes == [TOKENIZER.encode_target("gg")[:-1], [], TOKENIZER.encode_target("gg")[:-1]]


SAMPLING = DecodeConfig(sample=True, extra_length=10, batch_tokens=128)


def test_what_is_compiled_inside_another_function_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tracing an inner function (2 s) is part of tracing the outer one (5 s); compiling (3 s) comes after."""
    clock = [100.0]
    monkeypatch.setattr("transformer_jax.stopwatch.time.perf_counter", lambda: clock[-1])
    stopwatch = Stopwatch()
    with stopwatch.measure("decode"):
        for now, event, seconds in ((103.0, "trace", 2.0), (105.0, "trace", 5.0), (108.0, "backend", 3.0)):
            clock.append(now)
            stopwatch._on_event(f"/jax/core/compile/{event}", seconds)
        stopwatch._on_event("/jax/compilation_cache/cache_retrieval_time_sec", 2.5)  # part of "backend"
        clock.append(110.0)
    assert dict(stopwatch.seconds) == {"compile": 8.0, "decode": 2.0}
