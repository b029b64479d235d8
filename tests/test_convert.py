"""From one format to another: exactly, or refused by name; and other programs read what was written."""

from __future__ import annotations

import dataclasses
import functools
import gzip
import itertools
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import jax
import numpy as np
import pytest
from huggingface_hub.errors import (
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from transformer_jax import cli, hf_marian, native_marian, weight_table
from transformer_jax import convert as convert_module
from transformer_jax.config import DecodeConfig, ModelConfig
from transformer_jax.convert import convert
from transformer_jax.errors import UserError
from transformer_jax.model import Transformer
from transformer_jax.model_folder import save_model
from transformer_jax.native_marian import OPTIONS_KEY
from transformer_jax.pretrained import load_pretrained
from transformer_jax.run_model import fit_model
from transformer_jax.sentencepiece_training import train_sentencepiece, vocabulary_of
from transformer_jax.sharding import data_mesh
from transformer_jax.tensor_files import read_tensors
from transformer_jax.tokenizer import CharacterTokenizer, SentencePieceTokenizer, load_tokenizer
from transformer_jax.translator import Translation, Translator
from transformer_jax.weight_table import Params, parameter_shapes

pytestmark = pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses")

TINY = Path(__file__).parent / "fixtures" / "marian_tiny"
SIZES = {"d_model": 16, "n_heads": 2, "d_ff": 24, "n_encoder_layers": 1, "n_decoder_layers": 2, "max_length": 64}
TEXT = [
    "The small frog sits near the pond, and the heron waits.",
    "Three heavy boxes stand in front of the old station.",
    "Would you like tea or coffee?",
    "Der kleine Frosch sitzt am Teich, und der Reiher wartet.",
    "Drei schwere Kisten stehen vor dem alten Bahnhof.",
]


@pytest.fixture(scope="module", autouse=True)
def each_tree_of_shapes_once() -> Iterator[None]:
    """Tracing a model takes longer than the rest of reading or writing it, and many tests have the same one."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (hf_marian, native_marian, sys.modules[__name__]):
            patch.setattr(module, "parameter_shapes", functools.lru_cache(weight_table.parameter_shapes))
        yield


@pytest.fixture(scope="session")
def native_dir(shared_dir: Path) -> Path:
    return shared_dir / "marian_native"


@pytest.fixture(scope="module")
def sub_words() -> SentencePieceTokenizer:
    return train_sentencepiece(TEXT, 90, source_lang="en", target_lang="de")


@pytest.fixture(scope="module")
def separate(tmp_path_factory: pytest.TempPathFactory) -> SentencePieceTokenizer:
    """Separate vocabularies, 80 source and 70 target ids."""
    models = []
    for language, lines, size in (("en", TEXT[:3], 80), ("de", TEXT[3:], 70)):
        folder = tmp_path_factory.mktemp(language)
        train_sentencepiece(lines, size).save(folder)
        models.append((folder / "source.spm").read_bytes())
    return SentencePieceTokenizer(*models, *map(vocabulary_of, models))


def random_params(config: ModelConfig, kernels: float) -> Params:
    """No value is 0 or 1: a bias or scale that gets lost, or the wrong one, shows."""
    rng = np.random.default_rng(0)

    def draw(path: Any, shape: Any) -> np.ndarray:
        name = path[-1].key
        array = rng.normal(size=shape.shape)
        if name == "table":  # rows of one length, but for the end's: no word always wins
            array /= np.linalg.norm(array, axis=1, keepdims=True)
            array[0] *= 2
            return array.astype(np.float32)
        return ((name == "scale") + (kernels if name == "kernel" else 0.25) * array).astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, parameter_shapes(config))


def save_own(folder: Path, tokenizer: Any, kernels: float = 0.25, **changes: Any) -> tuple[ModelConfig, Params]:
    """A model folder as a run of ours leaves it: the model fits the tokenizer, and its weights are random."""
    config = fit_model(ModelConfig(**{**SIZES, **changes}), tokenizer)
    params = random_params(config, kernels)
    save_model(folder, config, params)
    tokenizer.save(folder)
    return config, params


def assert_same(params: Params, others: Params) -> None:
    assert jax.tree.structure(params) == jax.tree.structure(others)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32)), params, others)


def arrays_of(npz: Path) -> dict[str, np.ndarray]:
    with np.load(npz) as file:
        return {name: file[name] for name in file.files if name != OPTIONS_KEY}


def assert_same_arrays(arrays: dict[str, np.ndarray], others: dict[str, np.ndarray]) -> None:
    assert arrays.keys() == others.keys()
    for name, array in arrays.items():
        assert (array.shape, array.dtype) == (others[name].shape, others[name].dtype)
        assert array.tobytes() == others[name].tobytes(), name


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def translations(folder: Path, lines: list[str]) -> list[Translation]:
    """By greedy search, all lines in one batch, which is one program to compile."""
    return Translator.from_pretrained(folder, DecodeConfig(batch_tokens=20_000), mesh=data_mesh(1)).translate(lines)


def refusal(action: Callable[[], Any]) -> str:
    """The sentence with which something is refused."""
    with pytest.raises(UserError) as caught:
        action()
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    return message


# --- there and back -----------------------------------------------------------------------------------------


def test_a_hugging_face_folder_comes_back_bit_for_bit(native_dir: Path, tmp_path: Path):
    source = native_dir / "hf_dates"
    model = convert(source, tmp_path / "first")
    convert(tmp_path / "first", tmp_path / "second")
    assert model.source == source
    expected, written = read_tensors(source), read_tensors(tmp_path / "first")
    assert_same_arrays({name: expected[name] for name in written}, written)
    # What is not written is told in the account: copies of the table, and the positions that are computed.
    assert expected.keys() - written.keys() == set(model.account.explained)
    first, second = contents(tmp_path / "first"), contents(tmp_path / "second")
    assert first == second
    for name in ("source.spm", "target.spm"):
        assert first[name] == (source / name).read_bytes()
    assert json.loads(first["vocab.json"]) == json.loads((source / "vocab.json").read_text())
    settings = (
        *("source_lang", "target_lang", "separate_vocabs", "model_max_length", "tokenizer_class"),
        *("eos_token", "unk_token", "pad_token"),
    )
    theirs = json.loads((source / "tokenizer_config.json").read_text())
    ours = json.loads(first["tokenizer_config.json"])
    assert {name: ours[name] for name in settings} == {name: theirs[name] for name in settings}


def test_transformers_computes_the_same_from_the_written_folder(native_dir: Path, tmp_path: Path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    convert(native_dir / "hf_dates", tmp_path / "out")
    logits, ids = [], []
    for folder in (native_dir / "hf_dates", tmp_path / "out"):
        model, info = transformers.MarianMTModel.from_pretrained(folder, output_loading_info=True)
        assert not any(info.values()), info
        tokenizer = transformers.MarianTokenizer.from_pretrained(folder)
        inputs = tokenizer(["10 May 1990 at 14:05", "about 12 boxes"], return_tensors="pt", padding=True)
        with torch.no_grad():
            logits.append(model.eval()(**inputs, decoder_input_ids=inputs["input_ids"]).logits.numpy())
        ids.append(inputs["input_ids"].tolist())
    assert ids[0] == ids[1]
    np.testing.assert_array_equal(*logits)


OWN: dict[str, dict[str, Any]] = {
    "paper": {"attention_bias": False},
    "opus-mt": {"positions": "sin_then_cos", "activation": "swish", "logits_bias": True},
    "untied": {"tied_output": False, "activation": "gelu"},
    "separate": {"shared_embedding": False, "logits_bias": True},
}


@pytest.mark.parametrize("kind", OWN)
def test_a_model_of_ours_comes_back_bit_for_bit_from_hugging_faces_layout(
    kind: str, sub_words: SentencePieceTokenizer, separate: SentencePieceTokenizer, tmp_path: Path
):
    tokenizer = separate if kind == "separate" else sub_words
    config, params = save_own(tmp_path / "ours", tokenizer, **OWN[kind])
    assert config.start_id == config.vocab_size
    convert(tmp_path / "ours", tmp_path / "hf")
    again = load_pretrained(tmp_path / "hf")
    assert again.config == config
    assert_same(again.params, params)
    assert again.tokenizer.encode_source_batch(TEXT) == tokenizer.encode_source_batch(TEXT)
    assert again.tokenizer.encode_target_batch(TEXT) == tokenizer.encode_target_batch(TEXT)


def test_a_native_folder_comes_back_bit_for_bit(tmp_path: Path):
    """Straight, and by way of a model folder of ours."""
    convert(TINY, tmp_path / "straight", "marian")
    load_pretrained(TINY).save(tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "around", "marian")
    for folder in (tmp_path / "straight", tmp_path / "around"):
        assert sorted(path.name for path in folder.iterdir()) == ["decoder.yml", "model.npz", "vocab.spm"]
        assert_same_arrays(arrays_of(folder / "model.npz"), arrays_of(TINY / "model.npz"))
        assert (folder / "vocab.spm").read_bytes() == (TINY / "vocab.spm").read_bytes()
        model = load_pretrained(folder)
        assert model.config == load_pretrained(TINY).config
        assert model.suppressed == (1,)


def test_an_opus_package_comes_back_with_its_ids(native_dir: Path, tmp_path: Path):
    convert(native_dir / "opus_layout", tmp_path / "out", "marian")
    npz = next((native_dir / "opus_layout").glob("*.npz"))
    assert_same_arrays(arrays_of(tmp_path / "out" / "model.npz"), arrays_of(npz))
    before, after = load_pretrained(native_dir / "opus_layout"), load_pretrained(tmp_path / "out")
    lines = ["10 May 1990 at 14:05", "☃ about 12 boxes", "Zehn große Häuser"]
    assert before.tokenizer.encode_source_batch(lines) == after.tokenizer.encode_source_batch(lines)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        *("decoder.yml", "model.npz", "source.spm", "target.spm", "vocab.yml")
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"activation": "gelu", "logits_bias": True},
        {"attention_bias": False, "n_encoder_layers": 3, "n_decoder_layers": 1, "decoder_d_ff": 20},
        {"shared_embedding": False, "tied_output": False},
        {"tied_output": False, "logits_bias": True},
    ],
    ids=str,
)
def test_a_model_trained_with_marians_positions_becomes_a_native_one(
    changes: dict[str, Any],
    sub_words: SentencePieceTokenizer,
    separate: SentencePieceTokenizer,
    tmp_path: Path,
):
    tokenizer = sub_words if changes.get("shared_embedding", True) else separate
    config, params = save_own(tmp_path / "ours", tokenizer, **changes, positions="marian", norm_epsilon=1e-6)
    convert(tmp_path / "ours", tmp_path / "native", "marian")
    native = load_pretrained(tmp_path / "native")
    # Biases that the model does not have are zeros there, and positions have no end.
    others = {"attention_bias": True, "max_length": native.config.max_length, "dropout": config.dropout}
    assert native.config == dataclasses.replace(config, **others)
    flat = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    for path, leaf in jax.tree_util.tree_leaves_with_path(native.params):
        name = jax.tree_util.keystr(path)
        np.testing.assert_array_equal(leaf, flat.pop(name) if name in flat else np.zeros_like(leaf))
    assert not flat
    assert native.tokenizer.encode_source_batch(TEXT) == tokenizer.encode_source_batch(TEXT)
    assert native.tokenizer.encode_target_batch(TEXT) == tokenizer.encode_target_batch(TEXT)


# --- between native Marian and transformers -----------------------------------------------------------------


def test_a_native_model_needs_other_positions_in_transformers(tmp_path: Path):
    message = refusal(lambda: convert(TINY, tmp_path / "hf"))
    for part in ("transformers", "positions marian", "norm_epsilon 1e-06", "--positions sin_then_cos"):
        assert part in message
    assert not list(tmp_path.iterdir())


def test_a_hugging_face_folder_needs_other_positions_in_native_marian(native_dir: Path, tmp_path: Path):
    message = refusal(lambda: convert(native_dir / "hf_dates", tmp_path / "native", "marian"))
    for part in ("Native Marian", "positions sin_then_cos", "norm_epsilon 1e-05", "--positions marian"):
        assert part in message
    assert not list(tmp_path.iterdir())


def references(native_dir: Path) -> list[dict[str, Any]]:
    path = native_dir / "marian_dates" / "refs.json"
    return json.loads(path.read_text(encoding="utf-8"))["sentences"]


def test_a_native_model_translates_in_transformers_as_here(native_dir: Path, tmp_path: Path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    convert(native_dir / "marian_dates", tmp_path / "hf", positions="sin_then_cos")
    model, info = transformers.MarianMTModel.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(info.values()), info
    tokenizer = transformers.MarianTokenizer.from_pretrained(tmp_path / "hf")
    lines = [line["src"] for line in references(native_dir)][:40]
    inputs = tokenizer(lines, return_tensors="pt", padding=True)
    with torch.no_grad():
        generated = model.generate(**inputs, num_beams=1, do_sample=False).tolist()
    ours = translations(tmp_path / "hf", lines)
    for translation, ids in zip(ours, generated, strict=True):
        assert ids[0] == model.config.decoder_start_token_id == 565
        assert ids[1 : len(translation.tokens) + 1] == list(translation.tokens)
        assert set(ids[len(translation.tokens) + 1 :]) <= {model.config.pad_token_id}
    texts = tokenizer.batch_decode(generated, skip_special_tokens=True)
    assert texts == [translation.text for translation in ours]
    # The other table of positions leaves this model's translations as they were.
    assert texts == [line["greedy"]["text"] for line in references(native_dir)][:40]


def test_a_converted_opus_model_is_the_native_one_again(native_dir: Path, tmp_path: Path):
    """hf_dates was made from a native model; with Marian's positions it has that one's scores and translations."""
    convert(native_dir / "hf_dates", tmp_path / "native", "marian", positions="marian")
    npz = next((native_dir / "opus_layout").glob("*.npz"))
    assert_same_arrays(arrays_of(tmp_path / "native" / "model.npz"), arrays_of(npz))
    lines = references(native_dir)
    ours = translations(tmp_path / "native", [line["src"] for line in lines])
    assert [translation.text for translation in ours] == [line["greedy"]["text"] for line in lines]
    scores = [line["greedy"]["logprob"] for line in lines]
    np.testing.assert_allclose([translation.log_prob for translation in ours], scores, atol=2e-4)


# --- a model trained here, in transformers and in CTranslate2 -----------------------------------------------


def some_lines(shared_dir: Path, n: int) -> list[str]:
    with gzip.open(shared_dir / "data" / "multi30k" / "val.en.gz", "rt", encoding="utf-8") as file:
        return [line.rstrip("\n") for line in itertools.islice(file, n)]


ROOM = 14


def greedy_ids(folder: Path, lines: list[str]) -> list[list[int]]:
    """The likeliest token after all that came before, ROOM times, by the whole model: no search of ours, no cache."""
    model = load_pretrained(folder)
    config = model.config
    sources = model.tokenizer.encode_source_batch(lines)
    pad = config.pad_id if config.source_pad_id is None else config.source_pad_id
    source = np.full((len(lines), max(map(len, sources))), pad, np.int32)
    for row, ids in enumerate(sources):
        source[row, : len(ids)] = ids
    target = np.full((len(lines), ROOM + 1), config.pad_id, np.int32)
    target[:, 0] = config.start_id
    apply = jax.jit(lambda params, *ids: Transformer(config).apply({"params": params}, *ids).argmax(-1))
    for n in range(ROOM):
        target[:, n + 1] = np.asarray(apply(model.params, source, target))[:, n]
    found = [ids[1:].tolist() for ids in target]
    return [ids[: ids.index(config.end_id) + 1] if config.end_id in ids else ids for ids in found]


@pytest.fixture(scope="module", params=["paper", "opus-mt", "separate"])
def exported(
    request: pytest.FixtureRequest, shared_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[str], list[list[int]]]:
    """A folder that `convert` wrote, 50 lines, and our translations of them, token ids, cut at ROOM."""
    lines = some_lines(shared_dir, 50)
    folder = tmp_path_factory.mktemp(request.param)
    tokenizer = train_sentencepiece(lines + TEXT, 200)
    if request.param == "separate":
        tokenizer.save(folder / "source")
        train_sentencepiece(lines[25:] + TEXT, 160).save(folder / "target")
        models = [(folder / side / "source.spm").read_bytes() for side in ("source", "target")]
        tokenizer = SentencePieceTokenizer(*models, *map(vocabulary_of, models))
    # Kernels large enough that what comes out depends on what goes in, and is not the last word again.
    save_own(folder / "ours", tokenizer, kernels=1.0, **{**OWN[request.param], "d_model": 32, "n_heads": 4})
    convert(folder / "ours", folder / "hf")
    ours = greedy_ids(folder / "ours", lines)
    assert len({tuple(tokens) for tokens in ours}) > 30
    assert len({token for tokens in ours for token in tokens}) > 20
    assert any(0 in tokens for tokens in ours)  # some end by themselves
    return folder / "hf", lines, ours


def test_transformers_translates_the_exported_model_as_we_do(exported: tuple[Path, list[str], list[list[int]]]):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    folder, lines, ours = exported
    model, info = transformers.MarianMTModel.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    inputs = transformers.MarianTokenizer.from_pretrained(folder)(lines, return_tensors="pt", padding=True)
    model.generation_config.max_length = None
    with torch.no_grad():
        generated = model.generate(**inputs, num_beams=1, do_sample=False, max_new_tokens=ROOM).tolist()
    for tokens, ids in zip(ours, generated, strict=True):
        assert ids[1 : len(tokens) + 1] == tokens
        assert len(tokens) == ROOM or tokens[-1] == 0


def test_ctranslate2_translates_the_exported_model_as_we_do(
    exported: tuple[Path, list[str], list[list[int]]], tmp_path: Path
):
    ctranslate2 = pytest.importorskip("ctranslate2")
    pytest.importorskip("transformers")
    folder, lines, ours = exported
    if (folder / "target_vocab.json").is_file():
        pytest.skip("CTranslate2's converter knows one vocabulary for both sides")
    ctranslate2.converters.TransformersConverter(str(folder)).convert(str(tmp_path / "ct2"))
    program = ctranslate2.Translator(str(tmp_path / "ct2"), compute_type="float32", intra_threads=1)
    ids = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    pieces = {index: piece for piece, index in ids.items()}
    tokenizer = load_tokenizer(folder)
    tokens = [[pieces[token] for token in line] for line in tokenizer.encode_source_batch(lines)]
    # CTranslate2 leaves out </s>, and ends an output at its limit.
    found = program.translate_batch(tokens, beam_size=1, min_decoding_length=0, max_decoding_length=ROOM)
    theirs = [[ids[piece] for piece in result.hypotheses[0]] for result in found]
    assert theirs == [[token for token in line if token != 0] for line in ours]


# --- what is refused, and what is left behind ---------------------------------------------------------------


@pytest.mark.parametrize("to", ["hf", "marian"])
def test_a_model_of_characters_is_refused(to: Any, tmp_path: Path):
    save_own(tmp_path / "ours", CharacterTokenizer("abc "))
    message = refusal(lambda: convert(tmp_path / "ours", tmp_path / "out", to))
    assert "characters" in message
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


@pytest.mark.parametrize(
    ("to", "changes", "culprits"),
    [
        ("hf", {"positions": "learned"}, ["transformers", "positions learned"]),
        ("hf", {"norm": "pre"}, ["transformers", "norm pre"]),
        ("hf", {"norm": "pre", "positions": "learned"}, ["norm pre", "positions learned"]),
        ("hf", {"norm_epsilon": 1e-3}, ["norm_epsilon 0.001"]),
        ("marian", {}, ["Native Marian", "positions interleaved", "norm_epsilon 1e-05"]),
        ("marian", {"positions": "learned"}, ["positions learned"]),
        ("marian", {"positions": "marian"}, ["norm_epsilon 1e-05"]),
        ("marian", {"positions": "marian", "norm_epsilon": 1e-6, "scale_embedding": False}, ["scale_embedding"]),
        ("marian", {"positions": "marian", "norm_epsilon": 1e-6, "norm": "pre"}, ["norm pre"]),
    ],
    ids=str,
)
def test_what_the_other_program_lacks_is_refused_by_name(
    to: Any, changes: dict[str, Any], culprits: list[str], sub_words: SentencePieceTokenizer, tmp_path: Path
):
    save_own(tmp_path / "ours", sub_words, **changes)
    message = refusal(lambda: convert(tmp_path / "ours", tmp_path / "new" / "out", to))
    assert all(culprit in message for culprit in culprits), message
    assert "--positions" not in message  # there is no way out
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


@pytest.mark.parametrize("positions", ["marian", "sin_then_cos"])
def test_interleaved_and_learned_positions_cannot_be_read_as_others(
    positions: Any, sub_words: SentencePieceTokenizer, tmp_path: Path
):
    for own in ("interleaved", "learned"):
        save_own(tmp_path / own, sub_words, positions=own)
        message = refusal(lambda own=own: convert(tmp_path / own, tmp_path / "out", positions=positions))
        assert f"{own} positions" in message
        assert positions in message
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_there_already_is_left_alone(tmp_path: Path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine too")
    for name in ("out", "file"):
        message = refusal(lambda name=name: convert(TINY, tmp_path / name, "marian"))
        assert str(tmp_path / name) in message
    assert contents(tmp_path / "out") == {"notes.txt": b"mine"}
    assert (tmp_path / "file").read_text() == "mine too"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "out"]


def test_an_empty_folder_is_filled_and_parents_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "empty").mkdir()
    convert(TINY, tmp_path / "empty", "marian")
    convert(TINY, tmp_path / "a" / "b", "marian")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    convert(TINY, Path("."), "marian")
    assert contents(tmp_path / "empty") == contents(tmp_path / "a" / "b") == contents(tmp_path / "here")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "empty", "here"]


@pytest.mark.parametrize("there_already", [False, True])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["disk", "ctrl-c"])
def test_a_conversion_that_fails_leaves_nothing_behind(
    error: BaseException, there_already: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    save_native = convert_module.save_native

    def fail(folder: Path, *args: Any) -> None:
        save_native(folder, *args)  # all but the last step is done
        raise error

    monkeypatch.setattr(convert_module, "save_native", fail)
    if there_already:
        (tmp_path / "out").mkdir()
    told = type(error) if isinstance(error, KeyboardInterrupt) else UserError
    with pytest.raises(told) as caught:
        convert(TINY, tmp_path / "out", "marian")
    if told is UserError:
        assert str(caught.value) == f"{tmp_path}/out cannot be written (No space left on device)."
    assert [path.name for path in tmp_path.rglob("*")] == (["out"] if there_already else [])


def test_a_conversion_is_not_harmed_by_another_to_the_same_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_native = convert_module.save_native

    def another_begins_and_fails(folder: Path, *args: Any) -> None:
        save_native(folder, *args)
        with monkeypatch.context() as patch:
            patch.setattr(convert_module, "save_native", save_native)
            with pytest.raises(UserError):
                convert(tmp_path / "nowhere", tmp_path / "out", "marian")
            patch.setattr(convert_module, "save_native", lambda *args: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                convert(TINY, tmp_path / "out", "marian")

    monkeypatch.setattr(convert_module, "save_native", another_begins_and_fails)
    convert(TINY, tmp_path / "out", "marian")
    assert (tmp_path / "out" / "decoder.yml").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("name", ["nowhere", "no/such/folder", "nowhere/", "a b/c"])
def test_a_model_that_is_nowhere_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    message = refusal(lambda: convert(name, tmp_path / "out"))
    assert f"There is no folder {name.rstrip('/')}" in message
    assert not list(tmp_path.iterdir())


# --- the hub ------------------------------------------------------------------------------------------------

NAME = "Helsinki-NLP/opus-mt-en-de"


class Hub:
    """Stands for huggingface_hub: a model's files, or the error that the hub answers with; and what is cached."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.files: list[str] = []
        self.error: Exception | None = None
        self.cached: Path | None = None
        self.asked: list[tuple[str, str, str | None]] = []
        self.patterns: list[str] | None = None
        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda _, *a, **k: self.model_info(*a, **k))
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self.snapshot_download)

    def model_info(self, name: str, *, revision: str | None = None, **options: Any) -> Any:
        self.asked.append(("model_info", name, revision))
        if self.error is not None:
            raise self.error
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=file) for file in self.files])

    def snapshot_download(
        self,
        name: str,
        *,
        revision: str | None = None,
        allow_patterns: list[str] | None = None,
        local_files_only: bool = False,
    ) -> str:
        self.asked.append(("local" if local_files_only else "download", name, revision))
        if not local_files_only:
            self.patterns = allow_patterns
        if self.cached is None or (self.error is not None and not local_files_only):
            raise LocalEntryNotFoundError("Cannot find an appropriate cached snapshot folder.")
        return str(self.cached)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Hub:
    monkeypatch.chdir(tmp_path)
    return Hub(monkeypatch)


def http_error(kind: Any, message: str) -> Exception:
    return kind(message, response=SimpleNamespace(headers={}, request=None))


def connection_error() -> Exception:
    """Without a network: an error of the HTTP library that huggingface_hub uses, not of huggingface_hub."""
    library: Any = HfHubHTTPError.__bases__[0]
    return type("ConnectError", (library,), {})("[Errno -2] Name or service not known")


OFFLINE: dict[str, Callable[[], Exception]] = {
    "no network": connection_error,
    "switched off": lambda: OfflineModeIsEnabled("Cannot reach the hub:\noffline mode is enabled."),
    "server error": lambda: http_error(HfHubHTTPError, "503 Server Error\n\nService Unavailable"),
    "time-out": lambda: TimeoutError("timed out"),
}


@pytest.mark.parametrize("kind", OFFLINE)
def test_without_the_hub_one_sentence_says_so(kind: str, hub: Hub, tmp_path: Path):
    hub.error = OFFLINE[kind]()
    message = refusal(lambda: convert(NAME, tmp_path / "out"))
    assert f"There is no folder {NAME}" in message
    assert "hub" in message
    assert str(hub.error).split()[-1].rstrip(".") in message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", OFFLINE)
def test_without_the_hub_a_cached_copy_is_used(kind: str, hub: Hub, sub_words: Any, tmp_path: Path):
    save_own(tmp_path / "cached", sub_words)
    hub.error, hub.cached = OFFLINE[kind](), tmp_path / "cached"
    assert load_pretrained(NAME, revision="main").source == tmp_path / "cached"
    assert hub.asked[-1] == ("local", NAME, "main")
    (tmp_path / "cached" / "config.json").unlink()  # an interrupted download is no copy
    assert NAME in refusal(lambda: load_pretrained(NAME))


def test_a_name_that_the_hub_does_not_have_is_told(hub: Hub):
    hub.error = http_error(RepositoryNotFoundError, "404 Client Error.\n\nRepository Not Found for url")
    message = refusal(lambda: load_pretrained(NAME))
    assert NAME in message
    assert "no model of this name" in message
    assert "go online" not in message


def test_a_revision_that_the_hub_does_not_have_is_told(hub: Hub):
    hub.error = http_error(RevisionNotFoundError, "404 Client Error.\n\nRevision Not Found for url")
    message = refusal(lambda: load_pretrained(NAME, revision="v9"))
    assert NAME in message
    assert "v9" in message
    assert "go online" not in message


def test_a_repository_without_weights_is_told(hub: Hub):
    hub.files = ["README.md", "config.json", "tf_model.h5", "flax_model.msgpack", "onnx/model.safetensors"]
    message = refusal(lambda: load_pretrained(NAME))
    assert NAME in message
    assert "model.safetensors" in message
    assert "go online" not in message


COMMON = ["config.json", "generation_config.json", "source.spm", "target.spm", "tokenizer_config.json", "vocab.json"]
OTHERS = ["README.md", "tf_model.h5", "flax_model.msgpack", "rust_model.ot", "onnx/config.json", "onnx/source.spm"]
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]


@pytest.mark.parametrize(
    ("weights", "taken"),
    [
        (["model.safetensors"], ["model.safetensors"]),
        (["pytorch_model.bin"], ["pytorch_model.bin"]),
        (["pytorch_model.bin", "model.safetensors"], ["model.safetensors"]),
        ([*SHARDS, "pytorch_model.bin"], SHARDS),
    ],
    ids=["safetensors", "bin", "both", "shards and bin"],
)
def test_a_model_of_the_hub_is_downloaded_in_its_best_format(
    weights: list[str], taken: list[str], hub: Hub, sub_words: Any, tmp_path: Path
):
    config, params = save_own(tmp_path / "snapshot", sub_words)
    hub.files, hub.cached = [*COMMON, *OTHERS, *weights], tmp_path / "snapshot"
    model = load_pretrained(NAME, revision="refs/pr/2")
    assert model.config == config
    assert_same(model.params, params)
    assert model.source == tmp_path / "snapshot"
    assert sorted(hub.patterns or []) == sorted([*COMMON, *taken])
    assert hub.asked == [("model_info", NAME, "refs/pr/2"), ("download", NAME, "refs/pr/2")]


def test_a_folder_of_the_name_is_not_looked_for_in_the_hub(hub: Hub, sub_words: Any, tmp_path: Path):
    save_own(tmp_path / NAME, sub_words)
    assert load_pretrained(NAME).source == Path(NAME)
    assert hub.asked == []


# --- the command line ---------------------------------------------------------------------------------------


def run(*arguments: object) -> int:
    return cli.run_command(lambda: cli._dispatch(["convert", *map(str, arguments)]))


def test_the_command_prints_what_became_of_every_tensor(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert run(TINY, tmp_path / "out", "--to", "marian") == 0
    written = capsys.readouterr()
    assert f"read       {TINY}\n" in written.out
    # Counted by hand in the file: 86 arrays, 13,176 numbers, 120 of them the output bias.
    account = "86 tensors: 86 carried over, 0 not; 13,056 parameters and an output bias of 120"
    assert account in written.out
    assert f"written    {tmp_path / 'out'}\n" in written.out
    assert written.err == ""
    assert_same_arrays(arrays_of(tmp_path / "out" / "model.npz"), arrays_of(TINY / "model.npz"))


def test_the_command_reads_a_single_file_and_writes_for_transformers(tmp_path: Path):
    shutil.copytree(TINY, tmp_path / "model")
    assert run(tmp_path / "model" / "model.npz", tmp_path / "out", "--positions", "sin_then_cos") == 0
    config = load_pretrained(tmp_path / "out").config
    assert (config.positions, config.norm_epsilon, config.start_embedding) == ("sin_then_cos", 1e-5, "zero")
    described = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (described["vocab_size"], described["decoder_start_token_id"], described["pad_token_id"]) == (121, 120, 120)


def test_the_command_says_in_one_sentence_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert run(TINY, tmp_path / "out") == 2
    written = capsys.readouterr()
    assert written.out == ""
    assert written.err.startswith("error: transformers cannot run this model exactly: positions marian")
    assert written.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_the_command_hands_the_revision_on(hub: Hub, sub_words: Any, tmp_path: Path):
    save_own(tmp_path / "snapshot", sub_words)
    hub.files, hub.cached = [*COMMON, "model.safetensors"], tmp_path / "snapshot"
    assert run(NAME, tmp_path / "out", "--revision", "v2") == 0
    assert hub.asked == [("model_info", NAME, "v2"), ("download", NAME, "v2")]
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_saving_in_python_writes_what_the_command_writes(sub_words: SentencePieceTokenizer, tmp_path: Path):
    save_own(tmp_path / "ours", sub_words)
    convert(tmp_path / "ours", tmp_path / "converted")
    load_pretrained(tmp_path / "ours").save(tmp_path / "saved")
    assert contents(tmp_path / "saved") == contents(tmp_path / "converted")


def test_how_a_model_is_searched_goes_along(tmp_path: Path):
    shutil.copytree(TINY, tmp_path / "model")
    named = (TINY / "decoder.yml").read_text() + "beam-size: 7\nnormalize: 1.5\nword-penalty: 0.7\n"
    (tmp_path / "model" / "decoder.yml").write_text(named)
    convert(tmp_path / "model", tmp_path / "native", "marian")
    assert load_pretrained(tmp_path / "native").search == load_pretrained(tmp_path / "model").search
    convert(tmp_path / "model", tmp_path / "hf", positions="sin_then_cos")
    assert load_pretrained(tmp_path / "hf").search == {"beam_size": 7, "length_penalty": 1.5}
