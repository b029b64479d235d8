"""Text to text: the translation of a line is its own, whatever else is translated beside it."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.config import DecodeConfig, ModelConfig
from transformer_jax.decoding import BatchDecoder
from transformer_jax.errors import UserError
from transformer_jax.model import Transformer
from transformer_jax.model_folder import save_model
from transformer_jax.search import NBest
from transformer_jax.sharding import data_mesh
from transformer_jax.source_tiles import SourceTiles
from transformer_jax.tokenizer import CharacterTokenizer
from transformer_jax.translator import Translation, Translator

CHARACTERS = tuple("abcdefgh 0123456789")
TOKENIZER = CharacterTokenizer(CHARACTERS)
CONFIG = ModelConfig(
    vocab_size=TOKENIZER.vocab_size,
    d_model=16,
    n_heads=2,
    d_ff=32,
    n_encoder_layers=1,
    n_decoder_layers=1,
    max_length=24,
    logits_bias=True,
)
MODEL = Transformer(CONFIG)
EXTRA = 4
LINES = ["abc", "a", "", "fade 12", "h" * 14, "   ", "0123456789", "bead", "a b c d e f 12", "9"]


def random_params(seed: int = 2) -> Any:
    """Weights so large that outputs depend on the source, and an end token that is likely enough to come."""
    rng = np.random.default_rng(seed)
    ids = jnp.ones((1, 1), jnp.int32)
    shapes = jax.eval_shape(MODEL.init, jax.random.key(0), ids, ids)["params"]

    def draw(path: Any, shape: Any) -> np.ndarray:
        centre = 1.0 if jax.tree_util.keystr(path).endswith("['scale']") else 0.0
        return (centre + 0.5 * rng.normal(size=shape.shape)).astype(np.float32)

    params = jax.tree_util.tree_map_with_path(draw, shapes)
    params["logits_bias"][CONFIG.end_id] = END_BIAS
    return params


END_BIAS = 2.0
PARAMS = random_params()
DECODERS: dict[int, Any] = {}  # by the number of devices: all translators here share their compiled programs


def make_translator(batch_tokens: int = 256, n_devices: int = 1) -> Translator:
    config = DecodeConfig(extra_length=EXTRA, batch_tokens=batch_tokens)
    translator = Translator(MODEL, PARAMS, TOKENIZER, config, data_mesh(n_devices))
    translator._decoders = DECODERS.setdefault(n_devices, translator._decoders)
    return translator


@pytest.fixture(scope="module")
def translator() -> Translator:
    return make_translator()


@pytest.fixture(scope="module")
def expected(translator: Translator) -> dict[str, Translation]:
    return dict(zip(LINES, translator.translate(LINES), strict=True))


def assert_same(found: list[Translation], lines: list[str], expected: dict[str, Translation]) -> None:
    assert len(found) == len(lines)
    for line, translation in zip(lines, found, strict=True):
        assert translation.text == expected[line].text
        assert translation.tokens == expected[line].tokens
        assert translation.score == pytest.approx(expected[line].score, abs=1e-4)


# --- against a loop without cache, batches or padding -------------------------------------------------------


@jax.jit
def log_probs_of(source_1S: jax.Array, segments_1S: jax.Array, target_1T: jax.Array) -> jax.Array:
    logits = MODEL.apply({"params": PARAMS_ON_DEVICE}, source_1S, target_1T, segments_1S)
    return jax.nn.log_softmax(logits[0])


PARAMS_ON_DEVICE = jax.device_put(PARAMS)


def forced(source: list[int], prefix: list[int]) -> np.ndarray:
    """Log-probabilities after each token of start + prefix, by the whole model on the whole prefix."""
    width = CONFIG.max_length
    source_ids, segments = np.zeros((1, width), np.int32), np.zeros((1, width), np.int32)
    source_ids[0, : len(source)], segments[0, : len(source)] = source, 1
    target = np.zeros((1, width), np.int32)
    target[0, : len(prefix) + 1] = [CONFIG.start_id, *prefix]
    return np.asarray(log_probs_of(source_ids, segments, target))[: len(prefix) + 1]


def test_greedy_translation_is_that_of_an_uncached_loop(expected: dict[str, Translation]) -> None:
    ended = 0
    for line in LINES:
        if not line.strip():
            continue
        source = TOKENIZER.encode_source(line)
        tokens: list[int] = []
        while len(tokens) < min(len(source) + EXTRA, CONFIG.max_length) and CONFIG.end_id not in tokens:
            scores = forced(source, tokens)[-1].copy()
            scores[[CONFIG.pad_id, CONFIG.start_id]] = -np.inf
            tokens.append(int(np.argmax(scores)))
        assert list(expected[line].tokens) == tokens
        ended += tokens[-1] == CONFIG.end_id
    assert 0 < ended < 8  # both ways to stop were seen


def test_outputs_differ_between_sources(expected: dict[str, Translation]) -> None:
    """Without this, the tests here would pass on a model that says the same to everything."""
    assert len({expected[line].tokens for line in LINES if line.strip()}) >= 6


def test_score_is_the_log_probability_of_the_returned_tokens(expected: dict[str, Translation]) -> None:
    for line in LINES:
        if line.strip():
            tokens = list(expected[line].tokens)
            table = forced(TOKENIZER.encode_source(line), tokens[:-1])
            by_hand = sum(table[i, token] for i, token in enumerate(tokens))
            assert expected[line].log_prob == pytest.approx(by_hand, abs=1e-4)
            assert expected[line].score == pytest.approx(by_hand / len(tokens), abs=1e-4)
            assert sum(expected[line].token_scores) == pytest.approx(by_hand, abs=1e-4)


def test_text_is_that_of_the_tokens_without_the_end_token(expected: dict[str, Translation]) -> None:
    for translation in expected.values():
        characters = [CHARACTERS[token - 3] for token in translation.tokens if token != CONFIG.end_id]
        assert translation.text == "".join(characters)


# --- whatever stands beside it ------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_tokens", [1, 16, 64])
def test_translation_does_not_depend_on_the_size_of_batches(
    batch_tokens: int, expected: dict[str, Translation]
) -> None:
    """1: below the longest line, each then translated alone."""
    assert_same(make_translator(batch_tokens).translate(LINES), LINES, expected)


def test_translation_does_not_depend_on_the_order_of_lines(
    translator: Translator, expected: dict[str, Translation]
) -> None:
    lines = [LINES[i] for i in np.random.default_rng(0).permutation(len(LINES))]
    assert_same(translator.translate(lines), lines, expected)
    assert_same(translator.translate(lines + lines), lines + lines, expected)


def test_translation_does_not_depend_on_a_long_line_beside_it(
    translator: Translator, expected: dict[str, Translation]
) -> None:
    found = translator.translate(["abcdefgh " * 2, *LINES])
    assert_same(found[1:], LINES, expected)


def test_a_line_alone_gives_what_it_gives_in_company(translator: Translator, expected: dict[str, Translation]) -> None:
    for line in LINES:
        assert_same(translator.translate([line]), [line], expected)


def test_eight_devices_give_what_one_gives(expected: dict[str, Translation]) -> None:
    assert_same(make_translator(n_devices=8).translate(LINES), LINES, expected)


def test_lines_longer_than_the_budget_do_not_crowd_the_short_ones() -> None:
    """A budget below the longest line must not widen the batches of the others beyond their rows."""
    lines = ["a"] * 7 + ["abcdefgh" * 2]
    assert len(make_translator(batch_tokens=16).translate(lines)) == 8


def test_compiled_programs_are_few_whatever_the_lines() -> None:
    """A program is compiled for each combination of shapes and room: so many may there be, and no more."""
    seen = set()

    def decode(_: Any, sources: SourceTiles, asked: Any, *, length: int, **__: Any) -> NBest:
        seen.add((*(x.shape for x in sources), asked["limits_B"].shape, length))
        B = len(sources.places_BS)
        one = np.zeros((B, 1), np.float32)
        tokens = np.zeros((B, 1, length), np.int32)
        return NBest(tokens, np.ones((B, 1), int), one, one, tokens.astype(np.float32), one > 0)

    translator = stubbed(make_translator(256), decode)
    rng = np.random.default_rng(3)
    for _ in range(60):
        n = int(rng.integers(1, 30))
        found = translator.translate(["a" * rng.integers(0, 40) for _ in range(n)])
        assert len(found) == n
    # Rooms of 16 and 24 tokens, each with 4 rows or 1.
    assert 3 <= len(seen) <= 4


def stubbed(translator: Translator, decode: Any) -> Translator:
    """The translator with another function in place of its compiled programs."""
    other = translator.with_params(translator.params)
    decoder = object.__new__(BatchDecoder)
    decoder.decode = decode  # type: ignore[method-assign]
    other._decoder = lambda config: decoder  # type: ignore[method-assign]
    return other


# --- lines that are no sentence -----------------------------------------------------------------------------


def test_blank_lines_give_empty_lines_and_never_reach_the_model(translator: Translator) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("the model was asked")

    alone = stubbed(translator, refuse)
    blank = ["", " ", "\t \t", "\u00a0", "\u2028", "\r"]
    assert [t.text for t in alone.translate(blank)] == [""] * len(blank)
    assert alone.translate([]) == []
    with pytest.raises(AssertionError, match="asked"):
        alone.translate(["a"])


def test_a_line_too_long_is_cut_with_a_warning_that_names_it(
    translator: Translator, caplog: pytest.LogCaptureFixture
) -> None:
    longest = "abcde fgh12" * 2 + "3"  # 23 characters and the end token fill the model's 24 positions
    with caplog.at_level(logging.WARNING):
        lines = ["a", "", longest + "9999", longest]
        cut, whole = translator.translate(lines, long_lines="cut")[2:]
    assert cut.tokens == whole.tokens
    messages = [r.getMessage() for r in caplog.records]
    assert messages == ["Line 3 has 28 tokens; the first 24 are translated."]


def test_a_line_too_long_is_translated_in_parts_and_joined(
    translator: Translator, caplog: pytest.LogCaptureFixture, expected: dict[str, Translation]
) -> None:
    line = "abc " * 5 + "fade 12 " * 3
    with caplog.at_level(logging.WARNING):
        joined, after = translator.translate([line, "bead"])
    parts = ["abc abc abc abc abc", "fade 12 fade 12 fade 12"]
    found = [t.text for t in translator.translate(parts)]
    assert joined.text == " ".join(text for text in found if text)
    assert after.tokens == expected["bead"].tokens
    assert [r.getMessage() for r in caplog.records] == ["Line 1 has 45 tokens; it is translated in 2 parts."]


def test_line_numbers_go_on_from_the_lines_before(translator: Translator, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        translator.translate(["a", "b" * 50], first_line=2049)
    assert "Line 2050 " in caplog.text


def test_unknown_characters_are_left_out_with_a_warning(
    translator: Translator, caplog: pytest.LogCaptureFixture, expected: dict[str, Translation]
) -> None:
    with caplog.at_level(logging.WARNING):
        found = translator.translate(["aXbcY", "\udcff", "fade 12"])
    assert found[0].tokens == expected["abc"].tokens
    assert len(found) == 3
    assert "X" in caplog.text
    assert "Y" in caplog.text


def test_known_lines_are_translated_without_any_warning(
    translator: Translator, caplog: pytest.LogCaptureFixture
) -> None:
    translator.translate(LINES)
    assert caplog.records == []


# --- loading ------------------------------------------------------------------------------------------------


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "run" / "model"
    save_model(folder, CONFIG, PARAMS)
    TOKENIZER.save(folder)
    return folder


def refusal(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        Translator.from_pretrained(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_run_folder_and_model_folder_give_the_same_translations(
    model_folder: Path, expected: dict[str, Translation]
) -> None:
    config = DecodeConfig(extra_length=EXTRA, batch_tokens=256)
    for path in (model_folder, model_folder.parent, str(model_folder)):
        loaded = Translator.from_pretrained(path, config)
        assert loaded.model.config == CONFIG
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(loaded.params), PARAMS)
    one_device = make_translator().with_params(loaded.params)
    one_device.tokenizer = loaded.tokenizer
    one_device.params = jax.device_put(jax.device_get(loaded.params), jax.devices()[0])
    assert_same(one_device.translate(LINES), LINES, expected)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "vocab.json"])
def test_missing_file_of_the_model_folder_is_named(model_folder: Path, name: str) -> None:
    (model_folder / name).unlink()
    assert name in refusal(model_folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "vocab.json", "tokenizer_config.json"])
def test_damaged_file_of_the_model_folder_is_named(model_folder: Path, name: str) -> None:
    content = (model_folder / name).read_bytes()
    (model_folder / name).write_bytes(content[: len(content) // 2])
    assert name in refusal(model_folder)


def test_missing_folder_is_named(tmp_path: Path) -> None:
    assert str(tmp_path / "nothing") in refusal(tmp_path / "nothing")


def test_run_without_a_model_yet_says_so(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    assert "no model yet" in refusal(tmp_path)


def test_tokenizer_of_another_size_is_refused_with_both_sizes(model_folder: Path) -> None:
    CharacterTokenizer("xyz").save(model_folder)
    message = refusal(model_folder)
    assert "22" in message
    assert "6" in message


def test_tokenizer_with_other_special_ids_is_refused_by_name(model_folder: Path) -> None:
    described = json.loads((model_folder / "config.json").read_text())
    described["transformer_jax"]["end_id"] = 5
    (model_folder / "config.json").write_text(json.dumps(described))
    message = refusal(model_folder)
    assert "end_id is 5 in the model, but 2 in the tokenizer" in message
