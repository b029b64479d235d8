"""The model folder: what goes out comes back bit for bit, and transformers computes the same model from it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.config import DecodeConfig, ModelConfig
from transformer_jax.errors import UserError
from transformer_jax.hf_marian import generation_config_json, to_tensors
from transformer_jax.model import Transformer
from transformer_jax.model_folder import load_model, save_model
from transformer_jax.sentencepiece_training import train_sentencepiece
from transformer_jax.sharding import data_mesh
from transformer_jax.tokenizer import SentencePieceTokenizer
from transformer_jax.translator import Translator

V = 29
SUB_WORD_IDS = {"pad_id": V - 1, "start_id": V - 1, "end_id": 0}
SIZES = {"d_model": 16, "n_heads": 2, "d_ff": 24, "n_encoder_layers": 1, "n_decoder_layers": 2, "max_length": 40}
TEXT = [
    "The small frog sits near the pond, and the heron waits.",
    "Three heavy boxes stand in front of the old station.",
    "Would you like tea or coffee?",
    "Der kleine Frosch sitzt am Teich, und der Reiher wartet.",
    "Drei schwere Kisten stehen vor dem alten Bahnhof.",
]


def tiny(**changes: Any) -> ModelConfig:
    return ModelConfig(**{"vocab_size": V, **SIZES, **SUB_WORD_IDS, **changes})


def random_params(config: ModelConfig, seed: int = 0, scale: float = 0.25) -> Any:
    """No value is 0 or 1: a bias or scale that gets lost, or the wrong one, shows."""
    rng = np.random.default_rng(seed)
    ids = jnp.ones((1, 1), jnp.int32)
    shapes = jax.eval_shape(Transformer(config).init, jax.random.key(0), ids, ids)["params"]

    def draw(path: Any, shape: Any) -> np.ndarray:
        centre = 1.0 if jax.tree_util.keystr(path).endswith("['scale']") else 0.0
        return (centre + scale * rng.normal(size=shape.shape)).astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, shapes)


BEYOND = {"start_embedding": "zero", "pad_id": V, "start_id": V}
"""As in native Marian: neither padding nor the start has a row."""

OPTIONS: dict[str, dict[str, Any]] = {
    "interleaved": {},
    "sin_then_cos": {"positions": "sin_then_cos"},
    "marian positions": {"positions": "marian"},
    "learned": {"positions": "learned"},
    "pre-norm": {"norm": "pre"},
    "pre-norm learned": {"norm": "pre", "positions": "learned"},
    "no attention bias": {"attention_bias": False},
    "logits bias": {"logits_bias": True},
    "untied": {"tied_output": False},
    "separate tables": {"shared_embedding": False},
    "separate vocabularies": {"shared_embedding": False, "source_vocab_size": 37},
    "separate untied with bias": {"shared_embedding": False, "tied_output": False, "logits_bias": True},
    "start zero": {"start_embedding": "zero"},
    "start zero, logits bias": {"start_embedding": "zero", "logits_bias": True},
    "start zero, untied": {"start_embedding": "zero", "tied_output": False, "logits_bias": True},
    "start zero, separate": {"start_embedding": "zero", "shared_embedding": False},
    "characters": {"pad_id": 0, "start_id": 1, "end_id": 2},
    "characters, start zero": {"pad_id": 0, "start_id": 1, "end_id": 2, "start_embedding": "zero"},
    "start beyond the table": BEYOND,
    "start beyond, logits bias, paper": {**BEYOND, "logits_bias": True, "attention_bias": False},
    "start beyond, untied": {**BEYOND, "tied_output": False},
    "start beyond, separate": {
        **BEYOND,
        "shared_embedding": False,
        "source_vocab_size": 37,
        "source_pad_id": 37,
        "logits_bias": True,
    },
    "training alone": {"word_dropout": 0.1, "attention_init_gain": 0.5, "remat": True},
    "deep encoder": {"n_encoder_layers": 3, "n_decoder_layers": 1},
    "narrow decoder": {"decoder_d_ff": 10},
    "everything else": {
        "activation": "swish",
        "norm_epsilon": 1e-6,
        "scale_embedding": False,
        "dropout": 0.3,
        "attention_dropout": 0.1,
        "feed_forward_dropout": 0.2,
        "dtype": "bfloat16",
    },
}


@pytest.mark.parametrize("changes", OPTIONS.values(), ids=OPTIONS)
def test_saved_model_comes_back_bit_for_bit(changes: dict[str, Any], tmp_path: Path) -> None:
    config = tiny(**changes)
    params = random_params(config)
    before = jax.tree.map(np.copy, params)
    save_model(tmp_path, config, params)
    loaded = load_model(tmp_path)
    assert loaded.config == config
    assert jax.tree.structure(loaded.params) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, loaded.params, params)
    jax.tree.map(np.testing.assert_array_equal, params, before)  # saving changed nothing of the caller's


def test_every_option_of_the_configuration_was_tried() -> None:
    """A new field of ModelConfig must join the table above, or be named here."""
    tried = set(SIZES) | {"vocab_size"} | {name for changes in OPTIONS.values() for name in changes}
    assert {f.name for f in dataclasses.fields(ModelConfig)} - tried == set()


# --- transformers computes the same model -------------------------------------------------------------------


def load_in_transformers(folder: Path) -> Any:
    """The model as transformers reads it; every tensor must have found its place."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    model, info = transformers.MarianMTModel.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model.eval()


def sentences(config: ModelConfig) -> tuple[np.ndarray, np.ndarray]:
    """Sources of three lengths, padded, and targets that begin with the start token."""
    rng = np.random.default_rng(1)
    source = rng.integers(3, min(V, config.source_vocab_size or V) - 1, (3, 9))
    source[0, 4:] = source[1, 7:] = config.pad_id if config.source_pad_id is None else config.source_pad_id
    target = rng.integers(3, V - 1, (3, 7))
    target[:, 0] = config.start_id
    return source.astype(np.int32), target.astype(np.int32)


def logits_of_both(config: ModelConfig, params: Any, folder: Path) -> tuple[np.ndarray, np.ndarray]:
    torch = pytest.importorskip("torch")

    save_model(folder, config, params)
    source, target = sentences(config)
    with torch.no_grad():
        theirs = load_in_transformers(folder)(
            input_ids=torch.tensor(source).long(),
            attention_mask=torch.tensor(source != source[0, -1]).long(),
            decoder_input_ids=torch.tensor(target).long(),
        ).logits.numpy()
    ours = Transformer(config).apply({"params": jax.device_put(params)}, jnp.asarray(source), jnp.asarray(target))
    return np.asarray(ours), theirs


EXPRESSIBLE: dict[str, dict[str, Any]] = {
    "opus-mt": {"positions": "sin_then_cos", "activation": "swish", "logits_bias": True},
    "paper": {},
    "paper without attention bias": {"attention_bias": False, "activation": "gelu"},
    "unscaled, deep decoder": {"scale_embedding": False, "n_decoder_layers": 3, "logits_bias": True},
    "separate tables": {"shared_embedding": False, "source_vocab_size": 37, "logits_bias": True},
    "untied": {"shared_embedding": False, "tied_output": False, "logits_bias": True},
    "shared but untied": {"tied_output": False},
    "characters": {"pad_id": 0, "start_id": 1, "end_id": 2},
}


@pytest.mark.parametrize("changes", EXPRESSIBLE.values(), ids=EXPRESSIBLE)
def test_transformers_gives_the_logits_of_our_model(changes: dict[str, Any], tmp_path: Path) -> None:
    config = tiny(**changes)
    ours, theirs = logits_of_both(config, random_params(config), tmp_path)
    assert np.abs(ours).max() > 1
    np.testing.assert_allclose(theirs, ours, atol=3e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"logits_bias": True, "positions": "sin_then_cos"},
        {"tied_output": False, "shared_embedding": False},
        {"shared_embedding": False, "source_vocab_size": 37, "source_pad_id": 37},
        {"shared_embedding": False, "source_vocab_size": 23, "source_pad_id": 23},
    ],
    ids=str,
)
def test_transformers_starts_from_zero_where_our_model_does(changes: dict[str, Any], tmp_path: Path) -> None:
    config = tiny(**BEYOND, **changes)
    ours, theirs = logits_of_both(config, random_params(config), tmp_path)
    assert ours.shape[-1] == V
    assert theirs.shape[-1] == V + 1
    np.testing.assert_allclose(theirs[..., :V], ours, atol=3e-5)
    # And the token that it starts with takes nothing of the probabilities: its logit must not be 0.
    assert (theirs[..., V] < theirs[..., :V].min(-1) - 100).all()


def test_a_file_that_transformers_has_written_again_still_loads(tmp_path: Path) -> None:
    config = tiny(**BEYOND, logits_bias=True, positions="sin_then_cos")
    ours, _ = logits_of_both(config, random_params(config), tmp_path / "ours")
    load_in_transformers(tmp_path / "ours").save_pretrained(tmp_path / "theirs")
    loaded = load_model(tmp_path / "theirs")
    arguments = map(jnp.asarray, sentences(config))
    again = Transformer(loaded.config).apply({"params": jax.device_put(loaded.params)}, *arguments)
    np.testing.assert_allclose(again, ours, atol=1e-6)


def test_kernels_are_out_by_in_and_biases_are_exported_as_zeros() -> None:
    config = tiny(attention_bias=False, positions="sin_then_cos")
    params = random_params(config)
    tensors = to_tensors(config, params)
    kernel = params["encoder"]["layer_0"]["feed_forward"]["hidden"]["kernel"]
    assert kernel.shape == (16, 24)
    np.testing.assert_array_equal(tensors["model.encoder.layers.0.fc1.weight"], kernel.T)
    assert not tensors["model.decoder.layers.1.encoder_attn.q_proj.bias"].any()
    assert tensors["final_logits_bias"].shape == (1, V)


def test_generation_never_chooses_pad_or_start() -> None:
    assert generation_config_json(tiny())["bad_words_ids"] == [[V - 1]]
    assert generation_config_json(tiny(pad_id=0, start_id=1, end_id=2))["bad_words_ids"] == [[0], [1]]


@pytest.fixture(scope="module")
def sub_words() -> SentencePieceTokenizer:
    return train_sentencepiece(TEXT, 90, source_lang="en", target_lang="de")


def test_transformers_translates_the_saved_folder_as_we_do(sub_words: SentencePieceTokenizer, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = tiny(
        vocab_size=sub_words.vocab_size - 1,
        pad_id=sub_words.pad_id,
        start_id=sub_words.start_id,
        end_id=sub_words.end_id,
        start_embedding="zero",
        max_length=64,
    )
    params = random_params(config, seed=3, scale=0.7)
    save_model(tmp_path, config, params)
    sub_words.save(tmp_path)
    mesh = data_mesh(1)
    room = 12
    loaded = Translator.from_pretrained(tmp_path)
    translator = Translator(loaded.model, loaded.params, loaded.tokenizer, DecodeConfig(extra_length=room), mesh)
    ours = translator.translate(TEXT)

    tokenizer = transformers.MarianTokenizer.from_pretrained(tmp_path)
    model = load_in_transformers(tmp_path)
    inputs = tokenizer(TEXT, return_tensors="pt", padding=True)
    with torch.no_grad():
        model.generation_config.max_length = None
        generated = model.generate(**inputs, num_beams=1, do_sample=False, max_new_tokens=room).tolist()
    distinct = set()
    for translation, theirs in zip(ours, generated, strict=True):
        assert theirs[0] == config.start_id
        n = min(len(translation.tokens), room)
        assert list(translation.tokens[:n]) == theirs[1 : n + 1]
        distinct |= set(theirs)
        # All of ours was compared, or theirs was cut at its limit.
        assert len(translation.tokens) == n or len(theirs) == room + 1
    assert len(distinct) > 5


# --- folders that are not a model ---------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_model(tmp_path, tiny(), random_params(tiny()))
    return tmp_path


def refusal(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        load_model(folder)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_missing_file_is_named(saved: Path, name: str) -> None:
    (saved / name).unlink()
    assert name in refusal(saved)


def test_missing_tensor_is_named(saved: Path) -> None:
    from safetensors.numpy import load_file, save_file

    tensors = load_file(saved / "model.safetensors")
    del tensors["model.decoder.layers.1.fc2.bias"]
    save_file(tensors, saved / "model.safetensors")
    assert "model.decoder.layers.1.fc2.bias" in refusal(saved)


def test_tensor_of_another_shape_is_named_with_both_shapes(saved: Path) -> None:
    described = json.loads((saved / "config.json").read_text())
    described["transformer_jax"]["vocab_size"] = V + 1
    (saved / "config.json").write_text(json.dumps(described))
    message = refusal(saved)
    assert "model.shared.weight" in message
    assert "[29, 16]" in message
    assert "[30, 16]" in message


@pytest.mark.parametrize("copy", ["lm_head.weight", "model.encoder.embed_tokens.weight"])
def test_copies_of_a_tied_table_may_stand_in_the_file_but_must_agree(saved: Path, copy: str) -> None:
    from safetensors.numpy import load_file, save_file

    tensors = load_file(saved / "model.safetensors")
    tensors[copy] = tensors["model.shared.weight"].copy()
    save_file(tensors, saved / "model.safetensors")
    load_model(saved)
    tensors[copy][3, 4] += 1
    save_file(tensors, saved / "model.safetensors")
    message = refusal(saved)
    assert copy in message
    assert "model.shared.weight" in message


@pytest.mark.parametrize("size", [0, 4, 100, -1])
def test_truncated_weights_are_refused_with_the_file_named(saved: Path, size: int) -> None:
    content = (saved / "model.safetensors").read_bytes()
    (saved / "model.safetensors").write_bytes(content[:size])
    assert str(saved / "model.safetensors") in refusal(saved)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"not json", b"\xff\xfe", b"[]", b"3", b"{}", b'{"transformer_jax": 3}']
)
def test_config_that_is_not_ours_is_refused_with_the_file_named(saved: Path, content: bytes) -> None:
    (saved / "config.json").write_bytes(content)
    assert str(saved / "config.json") in refusal(saved)


def test_setting_of_a_newer_version_is_named(saved: Path) -> None:
    described = json.loads((saved / "config.json").read_text())
    described["transformer_jax"]["mixture_of_experts"] = 8
    (saved / "config.json").write_text(json.dumps(described))
    assert "mixture_of_experts" in refusal(saved)


@pytest.mark.parametrize(("name", "value"), [("n_heads", 3), ("activation", "tanh"), ("d_model", "16"), ("d_ff", None)])
def test_setting_of_an_impossible_value_is_refused_with_the_file_named(saved: Path, name: str, value: Any) -> None:
    described = json.loads((saved / "config.json").read_text())
    described["transformer_jax"][name] = value
    (saved / "config.json").write_text(json.dumps(described))
    with pytest.raises(UserError, match=r"config\.json does not describe a model: "):
        load_model(saved)


def test_saving_leaves_no_part_files(saved: Path) -> None:
    assert sorted(path.name for path in saved.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
