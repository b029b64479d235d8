"""Native Marian models: the numbers that Marian itself computes, and a sentence that names what cannot be read.

The golden values were computed by Marian v1.12.42. One model with its scores lies in fixtures/marian_tiny; the other
layouts, and the two trained models, are read from the data beside the checkout.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml

from transformer_jax import native_marian
from transformer_jax.config import DecodeConfig, ModelConfig
from transformer_jax.errors import UserError
from transformer_jax.model import Transformer
from transformer_jax.native_folder import load_native, save_native
from transformer_jax.native_marian import OPTIONS_KEY, load_npz, model_options, parse_options, save_npz
from transformer_jax.pretrained import load_pretrained
from transformer_jax.sentencepiece_training import vocabulary_of
from transformer_jax.sharding import data_mesh
from transformer_jax.tokenizer import SentencePieceTokenizer
from transformer_jax.translator import Translator

TINY = Path(__file__).parent / "fixtures" / "marian_tiny"
ACCEPTED = (
    *("postnorm_tiedall", "prenorm_tiedall", "tied_trg", "tied_src", "untied", "untied_tiedtrg_sepvoc", "omitbias"),
    *("enc3dec1", "gelu", "task_base", "lneps", "float16", "tiedlayers", "decffn24"),
)
REFUSED = {
    "embnorm": "transformer-postprocess-emb: dn",
    "ffn3_decffn": "transformer-ffn-depth: 3",
    "noproj": "transformer-no-projection: true",
    "nopos": "transformer-disable-position-embeddings: true",
    "aan": "transformer-decoder-autoreg: average-attention",
    "ssru": "transformer-decoder-autoreg: rnn",
    "transformer_new": "type: transformer-new",
    "s2s": "type: s2s",
    "pool": "transformer-pool: true",
    "rightleft": "right-left: true",
}
S, T = 26, 28  # room for the longest of the stored pairs


@pytest.fixture(scope="module", autouse=True)
def each_tree_of_shapes_once() -> Iterator[None]:
    """Tracing a model takes longer than the rest of reading it, and most tests read the same one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_marian, "parameter_shapes", functools.lru_cache(native_marian.parameter_shapes))
        yield


@pytest.fixture(scope="session")
def native_dir(shared_dir: Path) -> Path:
    return shared_dir / "marian_native"


# --- the numbers --------------------------------------------------------------------------------------------


@functools.lru_cache
def scoring_program(config: ModelConfig) -> Any:
    def log_probabilities(params: Any, source: jax.Array, target: jax.Array) -> jax.Array:
        return jax.nn.log_softmax(Transformer(config).apply({"params": params}, source, target))

    return jax.jit(log_probabilities)


def word_scores(config: ModelConfig, params: Any, pairs: list[dict[str, Any]]) -> list[np.ndarray]:
    """The log-probability of each target word and of the end, pair by pair; all pairs are one padded batch."""
    source_pad = config.pad_id if config.source_pad_id is None else config.source_pad_id
    source = np.full((len(pairs), S), source_pad, np.int32)
    target = np.full((len(pairs), T), config.pad_id, np.int32)
    for row, pair in enumerate(pairs):
        source[row, : len(pair["src_ids"]) + 1] = [*pair["src_ids"], config.end_id]
        target[row, : len(pair["trg_ids"]) + 1] = [config.start_id, *pair["trg_ids"]]
    log_probs = np.asarray(scoring_program(config)(params, source, target))
    words = [[*pair["trg_ids"], config.end_id] for pair in pairs]
    return [log_probs[row, np.arange(len(ids)), ids] for row, ids in enumerate(words)]


def assert_native_scores(npz: Path, pairs: list[dict[str, Any]], expected: list[list[float]]) -> None:
    model = load_npz(npz)
    for ours, theirs in zip(word_scores(model.config, model.params, pairs), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=3e-5)


def tiny_pairs() -> list[dict[str, Any]]:
    return json.loads((TINY / "scores.json").read_text(encoding="utf-8"))


def test_words_have_the_probabilities_that_native_marian_gives_them():
    pairs = tiny_pairs()
    assert len(pairs) == 10
    assert_native_scores(TINY / "model.npz", pairs, [pair["word_scores"] for pair in pairs])


@pytest.mark.parametrize("variant", ACCEPTED)
def test_every_layout_that_is_read_has_the_scores_of_native_marian(variant: str, native_dir: Path):
    stored = json.loads((native_dir / "variants" / "scores.json").read_text(encoding="utf-8"))
    model = stored["models"][variant]
    expected = [row["word_scores"] for row in model["scores"]]
    assert len(expected) == 10
    assert_native_scores(native_dir / "variants" / variant / "model.npz", stored["pairs"][model["pairs"]], expected)


def test_every_stored_model_is_read_or_refused(native_dir: Path):
    variants = {path.name for path in (native_dir / "variants").iterdir() if path.is_dir()}
    assert variants == {*ACCEPTED, *REFUSED}


def test_every_number_of_the_file_arrives(native_dir: Path):
    for npz in (TINY / "model.npz", native_dir / "variants" / "untied" / "model.npz"):
        with np.load(npz) as file:
            sizes = {name: file[name].size for name in file.files if name != OPTIONS_KEY}
        account = load_npz(npz).account
        assert (account.n_tensors, account.n_used, account.explained) == (len(sizes), len(sizes), {})
        assert account.n_bias == sizes["decoder_ff_logit_out_b"]
        assert account.n_parameters + account.n_bias == sum(sizes.values())


def test_tied_layers_are_written_out(native_dir: Path):
    """transformer-tied-layers [1, 1]: both decoder layers take the arrays of the first, in new arrays."""
    model = load_npz(native_dir / "variants" / "tiedlayers" / "model.npz")
    first, second = (model.params["decoder"][f"layer_{n}"] for n in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, second)
    encoder = model.params["encoder"]
    assert model.config.n_decoder_layers == 2
    assert (encoder["layer_0"]["self_attention"]["query"]["kernel"] != 0).any()
    assert not np.array_equal(
        encoder["layer_0"]["self_attention"]["query"]["kernel"], encoder["layer_1"]["self_attention"]["query"]["kernel"]
    )


# --- what is refused ----------------------------------------------------------------------------------------


def refusal(path: Path, load: Callable[[Path], Any] = load_npz) -> str:
    """The sentence with which a path is refused."""
    with pytest.raises(UserError) as caught:
        load(path)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    return message


def rewrite(
    folder: Path,
    options: dict[str, Any] | None = None,
    without: tuple[str, ...] = (),
    arrays: dict[str, Any] | None = None,
) -> Path:
    """The tiny model with some of its options or arrays changed, or left out."""
    with np.load(TINY / "model.npz") as file:
        content = {name: file[name] for name in file.files}
    settings = {**parse_options(content[OPTIONS_KEY]), **(options or {})}
    text = yaml.safe_dump({name: value for name, value in settings.items() if name not in without})
    content |= {OPTIONS_KEY: np.frombuffer(text.encode() + b"\0", np.int8), **(arrays or {})}
    np.savez(folder / "changed.npz", **{name: array for name, array in content.items() if name not in without})
    return folder / "changed.npz"


@pytest.mark.parametrize(("variant", "culprit"), REFUSED.items(), ids=REFUSED)
def test_what_the_model_does_not_have_is_refused_by_the_options_name(variant: str, culprit: str, native_dir: Path):
    npz = native_dir / "variants" / variant / "model.npz"
    message = refusal(npz)
    assert culprit in message
    assert str(npz) in message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("transformer-attention-mask", "alibi"),
        ("right-left", "true"),
        ("transformer-decoder-ffn-depth", "1"),
        ("transformer-ffn-activation", "tanh"),
        ("transformer-postprocess-emb", "nd"),
        ("transformer-preprocess", "dn"),
        ("transformer-postprocess", "dhn"),
        ("transformer-postprocess-top", "n"),
        ("ulr", "true"),
        ("factors-dim-emb", "8"),
        ("lemma-dim-emb", "-2"),
        ("input-types", ["sequence", "sequence", "class"]),
        ("type", "multi-transformer"),
        ("type", "amun"),
        ("transformer-heads", "3"),
        ("transformer-heads", "many"),
        ("dim-emb", ["16"]),
        ("transformer-tied-layers", ["1", "two"]),
        ("transformer-tied-layers", ["1", "3"]),
    ],
    ids=str,
)
def test_an_option_that_changes_the_model_is_refused_with_its_value(name: str, value: Any, tmp_path: Path):
    message = refusal(rewrite(tmp_path, {name: value}))
    named = {"transformer-heads": "n_heads"}.get(name, name) if value == "3" else name
    assert named in message
    assert all(part in message for part in ([value] if isinstance(value, str) else value[-1:]))


def assert_reads_as_tiny(npz: Path) -> None:
    model, tiny = load_npz(npz), load_npz(TINY / "model.npz")
    assert model.config == tiny.config
    jax.tree.map(np.testing.assert_array_equal, model.params, tiny.params)


@pytest.mark.parametrize(
    "name", ["transformer-no-bias", "transformer-no-affine", "transformer-train-position-embeddings"]
)
def test_options_that_marian_itself_ignores_are_ignored(name: str, tmp_path: Path):
    """Marian writes the arrays, and uses them, whatever these say: a reader that believes them goes wrong."""
    assert_reads_as_tiny(rewrite(tmp_path, {name: "true"}))


def test_an_old_file_without_the_newer_options_is_read(tmp_path: Path):
    """What is left is what a model of 2018 says of itself; the rest has Marian's defaults."""
    needed = {
        *("type", "dim-emb", "enc-depth", "dec-depth", "transformer-heads", "transformer-dim-ffn"),
        "tied-embeddings-all",
    }
    with np.load(TINY / "model.npz") as file:
        options = parse_options(file[OPTIONS_KEY])
    assert needed < options.keys()
    assert_reads_as_tiny(rewrite(tmp_path, without=tuple(options.keys() - needed)))


@pytest.mark.parametrize("name", ["dim-emb", "enc-depth", "dec-depth", "transformer-heads", "transformer-dim-ffn"])
def test_a_size_that_is_not_told_is_named(name: str, tmp_path: Path):
    assert f"option {name}" in refusal(rewrite(tmp_path, without=(name,)))


@pytest.mark.parametrize("zeros", [0, 1, 7, 4096])
def test_options_may_end_in_any_number_of_zero_bytes(zeros: int, tmp_path: Path):
    with np.load(TINY / "model.npz") as file:
        text = file[OPTIONS_KEY].tobytes().rstrip(b"\0")
    assert_reads_as_tiny(rewrite(tmp_path, arrays={OPTIONS_KEY: np.frombuffer(text + b"\0" * zeros, np.int8)}))


# --- damaged weights ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["Wemb", "decoder_ff_logit_out_b", "encoder_l2_ffn_W1", "decoder_l1_context_Wo_ln_scale", OPTIONS_KEY]
)
def test_a_missing_array_is_named(name: str, tmp_path: Path):
    assert name in refusal(rewrite(tmp_path, without=(name,)))


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("encoder_l1_ffn_W1", (32, 16), "[16, 32]"),
        ("encoder_l1_ffn_b1", (1, 31), "[1, 32]"),
        ("encoder_l1_ffn_b1", (2, 32), "[1, 32]"),
        ("decoder_ff_logit_out_b", (1, 121), "[1, 120]"),
        ("Wemb", (120, 15), "[120, 16]"),
    ],
)
def test_an_array_of_another_shape_is_named_with_both(name: str, shape: tuple[int, ...], expected: str, tmp_path: Path):
    message = refusal(rewrite(tmp_path, arrays={name: np.zeros(shape, np.float32)}))
    assert name in message
    assert str(list(shape)) in message
    assert expected in message


@pytest.mark.parametrize("shape", [(), (120,), (2, 60, 16)])
def test_a_table_that_is_none_is_named(shape: tuple[int, ...], tmp_path: Path):
    assert "Wemb" in refusal(rewrite(tmp_path, arrays={"Wemb": np.zeros(shape, np.float32)}))


@pytest.mark.parametrize("name", ["Wpos", "encoder_l3_ffn_W1", "decoder_ff_logit_out_Wt"])
def test_an_array_without_a_place_is_named(name: str, tmp_path: Path):
    assert name in refusal(rewrite(tmp_path, arrays={name: np.zeros((4, 16), np.float32)}))


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.bool_])
def test_whole_numbers_are_no_weights(dtype: Any, tmp_path: Path):
    message = refusal(rewrite(tmp_path, arrays={"encoder_l1_self_Wq": np.ones((16, 16), dtype)}))
    assert "encoder_l1_self_Wq" in message
    assert np.dtype(dtype).name in message


def test_a_vocabulary_size_that_is_not_the_tables_is_told_with_both_numbers(tmp_path: Path):
    message = refusal(rewrite(tmp_path, {"dim-vocabs": ["120", "130"]}))
    assert "dim-vocabs" in message
    assert "130" in message
    assert "120" in message
    assert_reads_as_tiny(rewrite(tmp_path, {"dim-vocabs": ["0", "0"]}))  # Marian was to count by itself


@pytest.mark.parametrize(
    "text", [b"type: [", b"type: transformer\n\ttab: 1", b"\xff\xfe", b"", b"- a\n- b\n", b"words", b"{" * 1_500]
)
def test_options_that_are_not_yaml_are_refused(text: bytes, tmp_path: Path):
    assert OPTIONS_KEY in refusal(rewrite(tmp_path, arrays={OPTIONS_KEY: np.frombuffer(text + b"\0\0", np.int8)}))


@pytest.mark.parametrize("share", [0.0, 0.0005, 0.01, 0.3, 0.9, 0.999])
def test_a_truncated_file_is_named(share: float, tmp_path: Path):
    content = (TINY / "model.npz").read_bytes()
    (tmp_path / "model.npz").write_bytes(content[: int(len(content) * share)])
    assert str(tmp_path / "model.npz") in refusal(tmp_path / "model.npz")


def _zip_of_junk() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("Wemb.npy", b"not an array")
    return buffer.getvalue()


def _one_array() -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.zeros(3))
    return buffer.getvalue()


@pytest.mark.parametrize(
    "content",
    [
        b"version https://git-lfs.github.com/spec/v1\n",
        b"\x93NUMPY\x01",
        b"PK\x03\x04",
        b"\x80\x04N.",
        _zip_of_junk(),
        _one_array(),
    ],
    ids=["git-lfs pointer", "npy header", "zip header", "pickle", "zip of junk", "one array"],
)
def test_a_file_of_another_kind_is_named(content: bytes, tmp_path: Path):
    (tmp_path / "model.npz").write_bytes(content)
    assert str(tmp_path / "model.npz") in refusal(tmp_path / "model.npz")


def test_a_flipped_bit_is_noticed(tmp_path: Path):
    content = bytearray((TINY / "model.npz").read_bytes())
    content[len(content) // 2] ^= 4
    (tmp_path / "model.npz").write_bytes(content)
    assert str(tmp_path / "model.npz") in refusal(tmp_path / "model.npz")


def test_a_binary_model_and_a_missing_file_are_named(tmp_path: Path):
    (tmp_path / "model.bin").write_bytes(b"\1\0")
    assert "model.bin is a Marian binary model" in refusal(tmp_path / "model.bin")
    assert "model.bin is a Marian binary model" in refusal(tmp_path / "model.bin", load_pretrained)
    assert "nothing.npz" in refusal(tmp_path / "nothing.npz")


# --- the folder ---------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the tiny model's folder, to be damaged."""
    shutil.copytree(TINY, tmp_path / "model")
    return tmp_path / "model"


def with_yml(folder: Path, changes: dict[str, str] | None = None) -> Path:
    """The folder, its vocabulary as OPUS-MT has it: a vocab.yml with the ids, source.spm and target.spm to cut by."""
    table = {**vocabulary_of(folder / "vocab.spm"), **(changes or {})}
    del table["<pad>"]
    lines = [f"{json.dumps(piece, ensure_ascii=False)}: {index}\n" for piece, index in table.items()]
    (folder / "opus.vocab.yml").write_text("".join(lines), encoding="utf-8")
    for name in ("source.spm", "target.spm"):
        shutil.copyfile(TINY / "vocab.spm", folder / name)
    (folder / "vocab.spm").unlink()
    (folder / "decoder.yml").write_text("models: [model.npz]\nvocabs: [opus.vocab.yml, opus.vocab.yml]\n")
    return folder


@pytest.mark.parametrize("named", ["by decoder.yml", "by nothing", "by path"])
def test_a_folder_gives_the_model_with_its_tokenizer(named: str, folder: Path):
    if named != "by decoder.yml":
        (folder / "decoder.yml").unlink()
    model = load_pretrained(folder / "model.npz" if named == "by path" else folder)
    assert isinstance(model.tokenizer, SentencePieceTokenizer)
    for pair in tiny_pairs():
        assert model.tokenizer.encode_source(pair["src"]) == [*pair["src_ids"], 0]
        assert model.tokenizer.encode_target(pair["trg"]) == [*pair["trg_ids"], 0]
        assert model.tokenizer.decode(pair["trg_ids"]) == pair["trg"]
    assert (model.config.vocab_size, model.config.pad_id, model.config.start_id) == (120, 120, 120)
    assert (model.tokenizer.vocab_size, model.tokenizer.pad_id, model.tokenizer.end_id) == (121, 120, 0)
    assert model.suppressed == (1,)


def test_a_decoder_yml_of_another_machine_is_understood(folder: Path):
    """Paths that are not here are looked for by their names, in the folder."""
    away = "/nowhere/of/another/machine"
    (folder / "decoder.yml").write_text(
        f"models:\n  - {away}/model.npz\nvocabs:\n  - {away}/vocab.spm\n  - {away}/vocab.spm\nno-such-option: 1\n"
    )
    assert load_pretrained(folder).config == load_pretrained(TINY).config
    (folder / "vocab.spm").rename(folder / "other.spm")
    assert "vocab.spm" in refusal(folder, load_pretrained)


def test_files_may_lie_elsewhere(folder: Path, tmp_path: Path):
    (tmp_path / "vocabularies").mkdir()
    spm = tmp_path / "vocabularies" / "v.spm"
    (folder / "vocab.spm").rename(spm)
    for path in (str(spm), "../vocabularies/v.spm"):
        (folder / "decoder.yml").write_text(f"models: [model.npz]\nvocabs: ['{path}', '{path}']\n")
        assert load_pretrained(folder).tokenizer.vocab_size == 121


@pytest.mark.parametrize(
    ("content", "culprits"),
    [
        ("models: [a.npz, b.npz]\nvocabs: [vocab.spm, vocab.spm]\n", ["2 models", "a.npz", "b.npz"]),
        ("models: [a.npz]\nvocabs: [vocab.spm, vocab.spm]\n", ["a.npz", "decoder.yml"]),
        ("models: [model.npz]\nvocabs: [vocab.spm, other.spm]\n", ["other.spm"]),
        ("models: [model.npz]\nvocabs: [vocab.spm]\n", ["1 vocabular", "decoder.yml"]),
        ("models: [model.npz]\nvocabs: [vocab.spm, vocab.spm, vocab.spm]\n", ["3 vocabularies", "decoder.yml"]),
        ("models: model.npz\n", ["models", "decoder.yml"]),
        ("models: [[model.npz]]\n", ["models", "decoder.yml"]),
        ("models: [model.npz]\nvocabs: {a: b}\n", ["vocabs", "decoder.yml"]),
        ("models: [model.npz]\nvocabs: [README.md, README.md]\n", ["README.md"]),
        ("models: [", ["decoder.yml", "YAML"]),
        ("- model.npz\n", ["decoder.yml"]),
        ("", ["decoder.yml"]),
    ],
)
def test_a_decoder_yml_that_does_not_fit_is_refused(content: str, culprits: list[str], folder: Path):
    (folder / "decoder.yml").write_text(content)
    message = refusal(folder, load_pretrained)
    assert all(culprit in message for culprit in culprits), message


def test_a_folder_with_two_models_wants_the_file_to_be_named(folder: Path):
    (folder / "decoder.yml").unlink()
    shutil.copyfile(folder / "model.npz", folder / "model.best.npz")
    message = refusal(folder, load_pretrained)
    assert "model.best.npz, model.npz" in message
    assert load_pretrained(folder / "model.best.npz").config.vocab_size == 120


def test_a_missing_model_is_named(folder: Path):
    (folder / "model.npz").unlink()
    message = refusal(folder, load_pretrained)
    assert "model.npz" in message
    assert "decoder.yml" in message


def test_a_missing_vocabulary_is_named(folder: Path):
    (folder / "vocab.spm").unlink()
    assert "vocab.spm" in refusal(folder, load_pretrained)
    (folder / "decoder.yml").unlink()
    assert "vocab.spm" in refusal(folder, load_pretrained)


def test_a_vocabulary_of_another_size_is_told_with_both_numbers(folder: Path, native_dir: Path):
    shutil.copyfile(native_dir / "variants" / "src.spm", folder / "vocab.spm")
    message = refusal(folder, load_pretrained)
    assert "120" in message
    assert "101" in message


@pytest.mark.parametrize("content", [b"", b"version https://git-lfs.github.com/spec/v1"])
def test_a_vocabulary_that_is_no_sentencepiece_model_is_named(content: bytes, folder: Path):
    (folder / "vocab.spm").write_bytes(content)
    assert f"{folder / 'vocab.spm'} is not a SentencePiece model" in refusal(folder, load_pretrained)


def test_a_vocab_yml_gives_the_ids_and_the_spm_files_the_pieces(folder: Path):
    ids = vocabulary_of(TINY / "vocab.spm")
    swapped = {"▁2": ids["."], ".": ids["▁2"]}
    tokenizer = load_pretrained(with_yml(folder, swapped)).tokenizer
    exchange = {swapped["."]: swapped["▁2"], swapped["▁2"]: swapped["."]}
    for pair in tiny_pairs():
        expected = [exchange.get(token, token) for token in pair["src_ids"]]
        assert tokenizer.encode_source(pair["src"]) == [*expected, 0]


@pytest.mark.parametrize("name", ["source.spm", "target.spm"])
def test_a_vocab_yml_without_the_models_that_cut_text_names_them(name: str, folder: Path):
    (with_yml(folder) / name).unlink()
    assert name in refusal(folder, load_pretrained)


@pytest.mark.parametrize(
    ("text", "culprit"),
    [
        ('"</s>": 0\n"<unk>": 1\n"a": 3\n', "0 to 2"),
        ('"</s>": 0\n"<unk>": 1\n"a": 1\n', "0 to 2"),
        ('"</s>": 0\n"<unk>": 1\n"a": 2\n"a": 3\n', "0 to 2"),
        ('"</s>": 0\n"<unk>": 1\n"a": -1\n', "0 to 2"),
        ('"</s>": 0\n"<unk>": 1\n"a": x\n', "number"),
        ('"</s>": 0\n"<unk>": 1\n"a": 2.5\n', "number"),
        ('"</s>": 0\n"<unk>": 1\n"a":\n', "number"),
        ('"</s>": 0\n"<unk>": 1\n"a": [2]\n', "number"),
        ("- </s>\n- <unk>\n", "number"),
        ("", "number"),
        ('"a": 0\n"<unk>": 1\n', "</s>"),
        ('"</s>": 0\n"a": 1\n', "<unk>"),
        ('"</s>": [\n', "YAML"),
    ],
)
def test_a_damaged_vocab_yml_is_named(text: str, culprit: str, folder: Path):
    (with_yml(folder) / "opus.vocab.yml").write_text(text)
    message = refusal(folder, load_pretrained)
    assert "opus.vocab.yml" in message
    assert culprit in message


def test_a_vocab_yml_that_is_not_utf_8_is_named(folder: Path):
    (with_yml(folder) / "opus.vocab.yml").write_bytes(b"\xe4: 1\n")
    assert "opus.vocab.yml" in refusal(folder, load_pretrained)


# --- there and back -----------------------------------------------------------------------------------------


def expanded(npz: Path) -> dict[str, np.ndarray]:
    """The arrays of a file, float32, with tied layers written out."""
    with np.load(npz) as file:
        arrays = {name: file[name] for name in file.files}
    options = parse_options(arrays.pop(OPTIONS_KEY))
    arrays = {name: array.astype(np.float32) for name, array in arrays.items()}
    for n, taken in enumerate(options["transformer-tied-layers"], start=1):
        start = f"decoder_l{taken}_"
        arrays |= {name.replace(start, f"decoder_l{n}_"): a for name, a in arrays.items() if name.startswith(start)}
    return arrays


def assert_round_trip(npz: Path, written: Path) -> None:
    model = load_npz(npz)
    save_npz(written, model.config, model.params)
    arrays, expected = expanded(written), expanded(npz)
    assert arrays.keys() == expected.keys()
    for name, array in expected.items():
        assert arrays[name].shape == array.shape
        np.testing.assert_array_equal(arrays[name].view(np.uint32), array.view(np.uint32))
    again = load_npz(written)
    assert again.config == model.config
    assert again.suppressed == model.suppressed
    assert jax.tree.structure(again.params) == jax.tree.structure(model.params)
    jax.tree.map(np.testing.assert_array_equal, again.params, model.params)
    # The options say what Marian's own said.
    with np.load(npz) as theirs, np.load(written) as ours:
        said, says = parse_options(theirs[OPTIONS_KEY]), parse_options(ours[OPTIONS_KEY])
    written_out = {"version", "transformer-tied-layers"}
    assert {k: v for k, v in says.items() if k not in written_out} == {k: said[k] for k in says.keys() - written_out}


def test_a_model_comes_back_bit_for_bit(tmp_path: Path):
    assert_round_trip(TINY / "model.npz", tmp_path / "new" / "model.npz")


@pytest.mark.parametrize("variant", ACCEPTED)
def test_every_layout_comes_back_bit_for_bit(variant: str, native_dir: Path, tmp_path: Path):
    assert_round_trip(native_dir / "variants" / variant / "model.npz", tmp_path / "model.npz")


def test_the_file_is_laid_out_as_marian_reads_it(tmp_path: Path):
    """Marian maps the arrays as they lie: uncompressed, C order, float32, biases with two axes."""
    model = load_npz(TINY / "model.npz")
    transposed = jax.tree.map(np.asfortranarray, model.params)
    save_npz(tmp_path / "model.npz", model.config, transposed)
    with zipfile.ZipFile(tmp_path / "model.npz") as file:
        assert {info.compress_type for info in file.infolist()} == {zipfile.ZIP_STORED}
        for name in file.namelist():
            with file.open(name) as array:
                version = np.lib.format.read_magic(array)
                assert version == (1, 0)
                shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(array)
            if name == f"{OPTIONS_KEY}.npy":
                assert (len(shape), dtype) == (1, np.int8)
            else:
                assert (len(shape), fortran_order, dtype) == (2, False, np.float32)
    with np.load(tmp_path / "model.npz") as file:
        assert file["encoder_l1_self_bq"].shape == (1, 16)
        assert file[OPTIONS_KEY].tobytes().endswith(b"\0")
    assert [path.name for path in tmp_path.iterdir()] == ["model.npz"]


def test_attention_biases_that_a_model_does_not_have_are_written_as_zeros(tmp_path: Path):
    model = load_npz(TINY / "model.npz")
    config = dataclasses.replace(model.config, attention_bias=False)
    blocks = ("self_attention", "cross_attention")

    def without(tree: dict[str, Any], inside: bool = False) -> dict[str, Any]:
        return {
            name: without(value, inside or name in blocks) if isinstance(value, dict) else value
            for name, value in tree.items()
            if not (inside and name == "bias")
        }

    save_npz(tmp_path / "model.npz", config, without(model.params))
    arrays, expected = expanded(tmp_path / "model.npz"), expanded(TINY / "model.npz")
    assert arrays.keys() == expected.keys()
    for name, array in expected.items():
        is_bias = any(f"_{block}_b{letter}" in name for block in ("self", "context") for letter in "qkvo")
        np.testing.assert_array_equal(arrays[name], np.zeros_like(array) if is_bias else array)


@pytest.mark.parametrize(
    ("changes", "culprit"),
    [
        ({"positions": "interleaved"}, "positions interleaved"),
        ({"positions": "sin_then_cos"}, "positions sin_then_cos"),
        ({"positions": "learned"}, "positions learned"),
        ({"norm_epsilon": 1e-5}, "norm_epsilon 1e-05"),
        ({"start_embedding": "token", "start_id": 5}, "start token"),
        ({"start_id": 5}, "start token"),
        ({"scale_embedding": False}, "scale_embedding"),
        ({"end_id": 2}, "end_id 2"),
    ],
    ids=str,
)
def test_what_native_marian_cannot_run_is_refused_by_name(changes: dict[str, Any], culprit: str, tmp_path: Path):
    model = load_npz(TINY / "model.npz")
    config = dataclasses.replace(model.config, **changes)
    assert culprit in refusal(tmp_path / "model.npz", lambda path: save_npz(path, config, model.params))
    assert not list(tmp_path.iterdir())


def test_the_options_name_every_setting_that_is_read(tmp_path: Path):
    """A written file relies on no default, Marian's or ours."""
    model = load_npz(TINY / "model.npz")
    with np.load(TINY / "model.npz") as file:
        asked = set(parse_options(file[OPTIONS_KEY]))
    ours = model_options(model.config).keys()
    # What is left out belongs to kinds of models that this is not.
    others = ("bert-", "transformer-aan-", "transformer-dim-aan", "transformer-alibi-")
    assert {name for name in asked - ours if not name.startswith(others)} == set()


def test_a_saved_folder_is_the_one_that_was_read(folder: Path, tmp_path: Path):
    model, tokenizer = load_native(folder)
    save_native(tmp_path / "written", model.config, model.params, tokenizer)
    assert (tmp_path / "written" / "vocab.spm").read_bytes() == (folder / "vocab.spm").read_bytes()
    again = load_pretrained(tmp_path / "written")
    assert again.config == model.config
    jax.tree.map(np.testing.assert_array_equal, again.params, model.params)
    lines = [pair["src"] for pair in tiny_pairs()]
    assert again.tokenizer.encode_source_batch(lines) == tokenizer.encode_source_batch(lines)


# --- trained models -----------------------------------------------------------------------------------------


def test_greedy_translations_are_those_of_native_marian(native_dir: Path):
    """All 100 test lines, and lines that are not ordinary: unknown characters, spaces, nothing, a run-away output that
    is cut at three times the source. In the OPUS-MT layout the ids are others than those inside the .spm files."""
    references = json.loads((native_dir / "marian_dates" / "refs.json").read_text(encoding="utf-8"))
    asked = [*references["sentences"], *references["edge_cases"]]
    assert (len(references["sentences"]), len(references["edge_cases"])) == (100, 10)
    for name in ("marian_dates", "opus_layout"):
        # One batch of one shape, so that one program is compiled.
        options = DecodeConfig(extra_length=None, max_length_factor=3, batch_tokens=20_000)
        translator = Translator.from_pretrained(native_dir / name, options, mesh=data_mesh(1))
        translations = translator.translate([line["src"] for line in asked])
        assert [translation.text for translation in translations] == [line["greedy"]["text"] for line in asked]
        if name == "marian_dates":
            for translation, line in zip(translations, asked, strict=True):
                ends = line["greedy"]["finished"] and bool(line["src"].strip())
                assert translation.tokens == (*line["greedy"]["ids"], *[0] * ends)
        filled = [i for i, line in enumerate(asked) if line["src"].strip()]  # blank lines do not reach our model
        log_probs = [asked[i]["greedy"]["logprob"] for i in filled]
        np.testing.assert_allclose([translations[i].log_prob for i in filled], log_probs, rtol=1e-5, atol=2e-4)


def test_words_of_a_trained_model_have_native_probabilities(native_dir: Path):
    references = json.loads((native_dir / "marian_dates" / "refs.json").read_text(encoding="utf-8"))
    lines = [line for line in references["sentences"] if len(line["scored_ref"]["ids"]) < T][:10]
    pairs = [{"src_ids": line["src_ids"], "trg_ids": line["scored_ref"]["ids"]} for line in lines]
    expected = [line["scored_ref"]["word_scores"] for line in lines]
    assert_native_scores(native_dir / "marian_dates" / "model.npz", pairs, expected)
    assert_native_scores(native_dir / "marian_dates" / "model.npz", pairs[::-1], expected[::-1])


def test_params_are_numpy_arrays_of_float32():
    model = load_npz(TINY / "model.npz")
    assert {leaf.dtype for leaf in jax.tree.leaves(model.params)} == {jnp.dtype("float32")}
    assert all(leaf.flags.c_contiguous for leaf in jax.tree.leaves(model.params))


@pytest.mark.parametrize(
    ("line", "expected"),
    [("", 0.0), ("normalize: 0.6\n", 0.6), ("normalize:\n", 1.0), ("normalize: 0\n", 0.0)],
)
def test_the_search_is_what_decoder_yml_says(line: str, expected: float, tmp_path: Path) -> None:
    shutil.copytree(TINY, tmp_path / "model")
    named = (TINY / "decoder.yml").read_text()
    (tmp_path / "model" / "decoder.yml").write_text(named + line + "beam-size: 7\nword-penalty: 0.25\n")
    model, _ = load_native(tmp_path / "model")
    found = {name: model.search[name] for name in ("length_rule", "beam_size", "length_penalty", "word_penalty")}
    assert found == {"length_rule": "marian", "beam_size": 7, "length_penalty": expected, "word_penalty": 0.25}
