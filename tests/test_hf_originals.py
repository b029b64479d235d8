"""Models that transformers has made: read from every form in which they come, with the same numbers."""

from __future__ import annotations

import builtins
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.config import ModelConfig
from transformer_jax.decoding import make_decode
from transformer_jax.errors import UserError
from transformer_jax.hf_marian import config_from_json, entries, from_tensors, without_start_row
from transformer_jax.model import Transformer
from transformer_jax.model_folder import load_model
from transformer_jax.sharding import data_mesh

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


V = 36
SMALL: dict[str, Any] = {
    "vocab_size": V,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 40,
    "activation_function": "swish",
    "scale_embedding": True,
    "pad_token_id": V - 1,
    "decoder_start_token_id": V - 1,
    "eos_token_id": 0,
    "forced_eos_token_id": None,
}
SEPARATE = {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 52}


def original(seed: int = 0, **changes: Any) -> Any:
    """A MarianMTModel whose every number is random, the pad row and the output bias too."""
    torch.manual_seed(seed)
    model = transformers.MarianMTModel(transformers.MarianConfig(**{**SMALL, **changes})).eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "embed_positions" not in name:
                tensor.add_(torch.randn_like(tensor) * 0.25)
        model.final_logits_bias.copy_(torch.randn_like(model.final_logits_bias))
    return model


def arguments(model: Any, rows: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Padded sources, and targets that begin with the start token."""
    rng = np.random.default_rng(1)
    c = model.config
    source = rng.integers(1, c.vocab_size - 1, (rows, 9))
    source[0, 4:] = source[1, 7:] = c.pad_token_id
    target = rng.integers(1, c.decoder_vocab_size - 1, (rows, 7))
    target[:, 0] = c.decoder_start_token_id
    return source.astype(np.int32), target.astype(np.int32)


def check_same_numbers(model: Any, folder: Path) -> ModelConfig:
    """Encoder output within 2e-6 of its largest value, logits within 3e-5."""
    source, target = arguments(model)
    mask = source != model.config.pad_token_id
    with torch.no_grad():
        theirs = model(
            input_ids=torch.tensor(source).long(),
            attention_mask=torch.tensor(mask).long(),
            decoder_input_ids=torch.tensor(target).long(),
        )
    loaded = load_model(folder)
    ours, variables = Transformer(loaded.config), {"params": jax.device_put(loaded.params)}
    memory = np.asarray(ours.apply(variables, jnp.asarray(source), method="encode"))
    golden = theirs.encoder_last_hidden_state.numpy()
    assert np.abs(memory - golden)[mask].max() <= 2e-6 * np.abs(golden[mask]).max()
    logits = np.asarray(ours.apply(variables, jnp.asarray(source), jnp.asarray(target)))
    assert np.abs(theirs.logits.numpy()).max() > 1
    np.testing.assert_allclose(logits, theirs.logits.numpy(), atol=3e-5)
    return loaded.config


MODELS: dict[str, dict[str, Any]] = {
    "swish": {},
    "relu": {"activation_function": "relu"},
    "gelu": {"activation_function": "gelu"},
    "unscaled": {"scale_embedding": False},
    "separate tables": {"share_encoder_decoder_embeddings": False},
    "separate vocabularies": SEPARATE,
    "separate vocabularies, untied": {**SEPARATE, "tie_word_embeddings": False},
    "3+1 layers": {"encoder_layers": 3, "decoder_layers": 1},
    "1+3 layers": {"encoder_layers": 1, "decoder_layers": 3},
    "narrow decoder": {"decoder_ffn_dim": 8},
}


@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS)
def test_models_of_transformers_give_the_same_numbers(changes: dict[str, Any], tmp_path: Path) -> None:
    model = original(**changes)
    model.save_pretrained(tmp_path)
    check_same_numbers(model, tmp_path)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_files_of_16_bits_are_widened(dtype: str, tmp_path: Path) -> None:
    original().to(getattr(torch, dtype)).save_pretrained(tmp_path)
    wide = transformers.MarianMTModel.from_pretrained(tmp_path, dtype=torch.float32).eval()
    check_same_numbers(wide, tmp_path)


def test_shards_are_put_together(tmp_path: Path) -> None:
    model = original()
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    check_same_numbers(model, tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    original().save_pretrained(tmp_path, max_shard_size="10KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(UserError, match=shard.name):
        load_model(tmp_path)


@pytest.fixture
def pickled(tmp_path: Path) -> tuple[Any, Path]:
    """A folder as of 2020: pytorch_model.bin with every table under all its names, positions included."""
    model = original()
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    return model, tmp_path


def test_pytorch_files_are_read(pickled: tuple[Any, Path]) -> None:
    check_same_numbers(*pickled)


def test_a_pickle_that_would_run_code_is_refused(pickled: tuple[Any, Path]) -> None:
    _, folder = pickled
    torch.save({"model.shared.weight": builtins.print}, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pytorch_model\.bin is not a file of tensors"):
        load_model(folder)


def test_pytorch_files_ask_for_pytorch_where_it_is_missing(
    pickled: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    real: Callable[..., Any] = builtins.__import__

    def without_torch(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "torch":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_torch)
    with pytest.raises(UserError, match="needs PyTorch: pip install torch"):
        load_model(pickled[1])


TABLE_NAMES = (
    "model.shared.weight",
    "model.encoder.embed_tokens.weight",
    "model.decoder.embed_tokens.weight",
    "lm_head.weight",
)


@pytest.mark.parametrize("name", TABLE_NAMES)
def test_the_tied_table_is_found_under_each_of_its_names_alone(name: str, tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    model = original()
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    present = [n for n in TABLE_NAMES if n in tensors]
    table = tensors[present[0]]
    for n in present:
        del tensors[n]
    save_file({**tensors, name: table}, tmp_path / "model.safetensors")
    check_same_numbers(model, tmp_path)


def test_every_tensor_of_the_released_models_shape_is_accounted_for() -> None:
    """opus-mt-en-de: 259 tensors, of which 254 are carried over, and 73,886,208 parameters. Nothing is computed."""
    with torch.device("meta"):
        model = transformers.MarianMTModel(
            transformers.MarianConfig(
                vocab_size=58_101,
                d_model=512,
                encoder_layers=6,
                decoder_layers=6,
                encoder_attention_heads=8,
                decoder_attention_heads=8,
                encoder_ffn_dim=2048,
                decoder_ffn_dim=2048,
                max_position_embeddings=512,
                activation_function="swish",
                scale_embedding=True,
                pad_token_id=58_100,
                decoder_start_token_id=58_100,
            )
        )
    config = config_from_json(json.loads(model.config.to_json_string()), Path("config.json"))
    tensors = {name: np.zeros(tuple(tensor.shape), np.float16) for name, tensor in model.state_dict().items()}
    from transformer_jax.layers import sinusoids

    for side in ("encoder", "decoder"):
        tensors[f"model.{side}.embed_positions.weight"] = sinusoids(512, 512, "sin_then_cos")
    params, account = from_tensors(config, tensors)
    assert (account.n_tensors, account.n_used, len(account.explained)) == (259, 254, 5)
    assert account.n_parameters == 73_886_208
    assert account.n_bias == 58_101
    assert str(account) == (
        "259 tensors: 254 carried over, 5 not (2 position tables, computed here, 3 the tied table again); "
        "73,886,208 parameters and an output bias of 58,101"
    )
    assert len(jax.tree.leaves(params)) == len(entries(config)) == 254


def test_greedy_ids_are_those_of_transformers(tmp_path: Path) -> None:
    model = original(seed=5)
    model.save_pretrained(tmp_path)
    source, _ = arguments(model, rows=8)
    mask = source != model.config.pad_token_id
    with torch.no_grad():
        theirs = model.generate(
            input_ids=torch.tensor(source).long(),
            attention_mask=torch.tensor(mask).long(),
            num_beams=1,
            do_sample=False,
            max_new_tokens=12,
            bad_words_ids=[[V - 1]],
        ).numpy()[:, 1:]
    loaded = load_model(tmp_path)
    decode = make_decode(Transformer(loaded.config), data_mesh(1))
    limits = np.full(len(source), 12, np.int32)
    found = decode(jax.device_put(loaded.params), source, mask.astype(np.int32), limits, length=12)
    lengths = np.asarray(found.lengths_B)
    assert len({tuple(row) for row in theirs}) > 3
    for row, length, golden in zip(np.asarray(found.tokens_BT), lengths, theirs, strict=True):
        assert row[:length].tolist() == golden[:length].tolist()
        assert (golden[length:] == V - 1).all()


def test_dropping_the_start_row_leaves_the_other_logits_as_they_were(tmp_path: Path) -> None:
    for changes in ({}, {**SEPARATE, "decoder_start_token_id": 51}):
        model = original(**changes)
        start = model.config.decoder_start_token_id
        with torch.no_grad():
            model.get_decoder().embed_tokens.weight[start] = 0
        model.save_pretrained(tmp_path)
        loaded = load_model(tmp_path)
        config, params = without_start_row(loaded.config, loaded.params)
        assert (config.start_embedding, config.vocab_size) == ("zero", loaded.config.vocab_size - 1)
        source, target = map(jnp.asarray, arguments(model))
        before = Transformer(loaded.config).apply({"params": jax.device_put(loaded.params)}, source, target)
        after = Transformer(config).apply({"params": jax.device_put(params)}, source, target)
        np.testing.assert_allclose(after, np.asarray(before)[..., :-1], atol=1e-6)


# --- configurations that are another model --------------------------------------------------------------------


def described(**changes: Any) -> dict[str, Any]:
    return {**json.loads(transformers.MarianConfig(**SMALL).to_json_string()), **changes}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "bart"}, "model_type is bart"),
        ({"model_type": None}, "model_type is none"),
        ({"normalize_before": True}, "normalize_before"),
        ({"normalize_embedding": True}, "normalize_embedding"),
        ({"add_final_layer_norm": True}, "add_final_layer_norm"),
        ({"static_position_embeddings": False}, "static_position_embeddings"),
        ({"is_decoder": True}, "is_decoder"),
        ({"decoder_attention_heads": 4}, "decoder_attention_heads is 4 and encoder_attention_heads 2"),
        ({"activation_function": "gelu_new"}, "activation_function is 'gelu_new'"),
        ({"quantization_config": {"bits": 8}}, "quantization_config"),
        ({"d_model": "16"}, "d_model is '16'"),
        ({"d_model": 17}, "d_model"),
    ],
)
def test_settings_that_this_model_cannot_honour_are_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError) as caught:
        config_from_json(described(**changes), Path("config.json"))
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_sizes_are_named() -> None:
    without = described()
    del without["encoder_ffn_dim"]
    with pytest.raises(UserError, match="'encoder_ffn_dim' is missing"):
        config_from_json(without, Path("config.json"))


def test_keys_that_old_configurations_lack_have_the_defaults_of_transformers() -> None:
    old = described()
    optional = ("decoder_vocab_size", "share_encoder_decoder_embeddings", "tie_word_embeddings", "decoder_ffn_dim")
    for name in (*optional, "dropout", "attention_dropout", "decoder_attention_heads", "activation_function"):
        old.pop(name, None)
    config = config_from_json(old, Path("config.json"))
    assert (config.vocab_size, config.shared_embedding, config.tied_output) == (V, True, True)
    assert config.activation == "gelu"  # what MarianConfig() says


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda t: t.update({"final_logits_bias": np.zeros((1, 7), np.float32)}), "final_logits_bias"),
        (lambda t: t.update({"model.encoder.layernorm_embedding.weight": np.ones(16, np.float32)}), "layernorm_embed"),
        (lambda t: t.update({"model.encoder.embed_positions.weight": np.ones((40, 16), np.float32)}), "embed_posit"),
        (lambda t: t.update({"model.encoder.layers.0.fc1.weight": np.ones((24, 16), np.int8)}), "int8"),
        (lambda t: t.pop("model.encoder.layers.1.self_attn.q_proj.bias"), "layers.1.self_attn.q_proj.bias"),
    ],
    ids=["bias of another length", "unknown tensor", "learned positions", "quantised", "missing"],
)
def test_tensors_that_do_not_fit_are_named(spoil: Callable[[dict[str, Any]], Any], named: str) -> None:
    model = original()
    tensors = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    spoil(tensors)
    with pytest.raises(UserError) as caught:
        from_tensors(config_from_json(described(), Path("config.json")), tensors)
    assert named in str(caught.value)


def test_a_missing_output_bias_is_zero() -> None:
    tensors = {name: tensor.numpy() for name, tensor in original().state_dict().items()}
    del tensors["final_logits_bias"]
    params, _ = from_tensors(config_from_json(described(), Path("config.json")), tensors)
    assert not params["logits_bias"].any()
