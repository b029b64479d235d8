"""A translation with all that was looked at, as values and from the command line."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax import cli, cli_explain
from transformer_jax.aligner import Aligner
from transformer_jax.alignment import Word, pharaoh
from transformer_jax.attention_maps import attention_maps
from transformer_jax.config import DecodeConfig, ModelConfig
from transformer_jax.errors import UserError
from transformer_jax.explain import explain
from transformer_jax.model import Transformer
from transformer_jax.run_model import fit_model
from transformer_jax.sentencepiece_training import train_sentencepiece
from transformer_jax.sharding import data_mesh
from transformer_jax.tokenizer import CharacterTokenizer, SentencePieceTokenizer
from transformer_jax.translator import Translator

SIZES = {"d_model": 16, "n_heads": 2, "d_ff": 16, "n_encoder_layers": 1, "n_decoder_layers": 2, "max_length": 32}
TEXT = ["a red dog runs", "red dogs run", "a dog", "ein roter Hund rennt", "rote Hunde rennen", "ein Hund"]


def make_translator(tokenizer: Any) -> Translator:
    """Random weights, large enough that maps are uneven."""
    config = fit_model(ModelConfig(vocab_size=1, **SIZES), tokenizer)
    model, ids = Transformer(config), jnp.ones((1, 2), jnp.int32)
    params = jax.tree.map(lambda x: 3 * x if x.ndim == 2 else x, model.init(jax.random.key(5), ids, ids)["params"])
    return Translator(model, params, tokenizer, DecodeConfig(extra_length=3), data_mesh(1))


@pytest.fixture(scope="module")
def characters() -> Translator:
    return make_translator(CharacterTokenizer("0123456789-May "))


@pytest.fixture(scope="module")
def subwords() -> Translator:
    return make_translator(train_sentencepiece(TEXT * 3, 40, tags=[">>deu<<"]))


# --- pieces -------------------------------------------------------------------------------------------------


def test_characters_are_their_own_pieces() -> None:
    tokenizer = CharacterTokenizer("ab ")
    assert tokenizer.source_pieces("b xa") == ["b", " ", "a", "</s>"]
    assert tokenizer.pieces_of([0, 1, 3, 2, 99]) == ["<pad>", "<s>", "a", "</s>", "<unk>"]


def test_sub_words_are_as_many_as_ids_and_read_as_the_text(subwords: Translator) -> None:
    tokenizer = subwords.tokenizer
    assert isinstance(tokenizer, SentencePieceTokenizer)
    for line in (">>deu<< a red dog", "dogs  run", "a dög </s> 🇩🇪", ""):
        pieces = tokenizer.source_pieces(line)
        assert len(pieces) == len(tokenizer.encode_source(line))
        assert pieces[-1] == "</s>"
        assert "".join(pieces[:-1]).replace("▁", " ").split() == line.split()
    ids = tokenizer.encode_target("ein Hund")
    assert tokenizer.pieces_of(ids) == tokenizer.target_pieces("ein Hund")
    assert tokenizer.pieces_of([tokenizer.pad_id, tokenizer.unknown_id, 10**6]) == ["<pad>", "<unk>", "<unk>"]


# --- values -------------------------------------------------------------------------------------------------


def test_a_given_target_is_looked_at_as_it_is(characters: Translator) -> None:
    found = explain(characters, "05-1", "1 May")
    assert (found.source, found.target, found.given) == ("05-1", "1 May", True)
    assert found.source_tokens == ("0", "5", "-", "1", "</s>")
    assert found.target_tokens == ("1", "␣", "M", "a", "y", "</s>")
    assert found.read_tokens == ("<s>", "1", "␣", "M", "a", "y")
    assert [word.text for word in found.target_words] == ["1", " ", "M", "a", "y"]
    encode = characters.tokenizer.encode_source
    source, target = encode("05-1"), encode("1 May")
    maps = attention_maps(characters.model, characters.params, source, target)
    for name, weights in vars(maps).items():
        np.testing.assert_allclose(getattr(found.maps, name), weights, atol=1e-6)
    inputs = jnp.asarray([[characters.model.config.start_id, *target[:-1]]])
    logits = np.asarray(characters.model.apply({"params": characters.params}, jnp.asarray([source]), inputs)[0], float)
    log_probs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    np.testing.assert_allclose(found.token_log_probs, log_probs[np.arange(len(target)), target], atol=1e-4)


def test_without_a_target_it_is_the_translation_that_is_looked_at(characters: Translator) -> None:
    found, translation = explain(characters, "1965"), characters.translate(["1965"])[0]
    assert found.target == translation.text
    assert not found.given
    assert len(found.target_tokens) == len(translation.tokens)
    np.testing.assert_allclose(found.token_log_probs, translation.token_scores, atol=1e-5)
    assert found.maps.cross_NHTS.shape == (2, 2, len(translation.tokens), 5)
    longer = explain(characters, "1965", beam_size=2, min_length=6)
    assert len(longer.target_tokens) >= 6


def test_links_are_of_the_layer_and_head_asked_for(characters: Translator) -> None:
    found = explain(characters, "05-1", "1 May")
    for layer, head, weights in (
        (None, None, found.maps.cross_NHTS[1].mean(axis=0)),
        (1, None, found.maps.cross_NHTS[0].mean(axis=0)),
        (2, 2, found.maps.cross_NHTS[1, 1]),
    ):
        by_hand = [(int(row.argmax()), t) for t, row in enumerate(weights[:-1]) if row.argmax() < 4]
        assert found.links(layer, head) == sorted(by_hand)
    np.testing.assert_allclose(found.word_weights(step="reads"), found.maps.cross_NHTS[1].mean(axis=0)[1:, :4])


def test_words_are_of_sub_words_or_each_of_them(subwords: Translator) -> None:
    found = explain(subwords, ">>deu<< a red dog", "ein roter Hund")
    assert [word.text for word in found.source_words] == [">>deu<<", "a", "red", "dog"]
    assert found.source_words[0] == Word(">>deu<<", 0, 1)
    assert found.target_words[-1].end == len(found.target_tokens) - 1
    single = explain(subwords, ">>deu<< a red dog", "ein roter Hund", units="tokens")
    assert len(single.source_words) == len(found.source_tokens) - 1


def test_words_of_characters_are_what_spaces_separate(characters: Translator) -> None:
    found = explain(characters, "19 65", "9 1", units="words")
    assert found.source_words == (Word("19", 0, 2), Word("65", 2, 5))
    assert found.target_words == (Word("9", 0, 1), Word("1", 1, 3))
    assert len(explain(characters, "19 65", "9 1").source_words) == 5


def test_a_translation_that_was_cut_is_said(characters: Translator, caplog: pytest.LogCaptureFixture) -> None:
    found = explain(characters, "1965", max_length=2)
    assert len(found.target_tokens) == 2
    assert "</s>" not in found.target_tokens
    assert "cut after 2 tokens" in caplog.text


def test_words_that_are_not_those_of_the_spaces_are_said(
    subwords: Translator, caplog: pytest.LogCaptureFixture
) -> None:
    explain(subwords, "a dog", "ein Hund")
    assert not caplog.records
    explain(subwords, "a\u200bdog", "ein Hund")
    assert "other words than its spaces" in caplog.text


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ("  ", None, "The source is empty"),
        ("1965", "", "The target is empty"),
        ("äöü", None, "The source has nothing that the model knows"),
        ("1" * 32, None, "The source has 33 tokens, but the model takes 32 at most"),
        ("1", "1" * 32, "The target has 33 tokens"),
    ],
)
def test_what_cannot_be_looked_at_is_said(
    source: str, target: str | None, message: str, characters: Translator
) -> None:
    with pytest.raises(UserError, match=message):
        explain(characters, source, target)


def test_characters_that_are_left_out_are_named(characters: Translator, caplog: pytest.LogCaptureFixture) -> None:
    found = explain(characters, "1x9", "1")
    assert found.source_tokens == ("1", "9", "</s>")
    assert "left out: x" in caplog.text


# --- many pairs ---------------------------------------------------------------------------------------------

PAIRS = [
    ("a red dog runs", "ein roter Hund rennt"),
    ("", "ein"),
    (">>deu<< a dog", "ein Hund"),
    ("red dogs run", "rote Hunde rennen"),
    ("dog", " "),
]


@pytest.mark.parametrize("choice", [{}, {"layer": 1, "head": 2, "step": "reads"}, {"units": "tokens"}])
def test_pairs_in_batches_have_the_links_that_each_has_alone(choice: dict[str, Any], subwords: Translator) -> None:
    found = Aligner(subwords, **choice).align(*map(list, zip(*PAIRS, strict=True)))
    how = {name: value for name, value in choice.items() if name != "units"}
    for (source, target), links in zip(PAIRS, found, strict=True):
        alone = explain(subwords, source, target, units=choice.get("units")) if source and target.strip() else None
        assert links == (alone.links(**how) if alone else [])
    assert sum(map(len, found)) >= 3


def test_a_pair_too_long_or_cut_otherwise_is_named(subwords: Translator, caplog: pytest.LogCaptureFixture) -> None:
    long = "red " * 40
    found = Aligner(subwords).align(["a dog", long, "a\u200bdog", "a"], ["ein Hund", "ein", "ein", "a \u200b"], 11)
    assert found[1] == []
    messages = [record.getMessage() for record in caplog.records]
    assert messages[0] == "Pair 12 has over 32 tokens on a side, too many for the model."
    # A space without width is a space to the tokenizer and none to `split`: one word is two, and two are one.
    assert [m.split(" into")[0] for m in messages[1:]] == [f"Pair {n}: the tokenizer divides it" for n in (13, 14)]


def test_sides_must_be_as_many(subwords: Translator) -> None:
    with pytest.raises(UserError, match="2 sources but 1 targets"):
        Aligner(subwords).align(["a", "b"], ["c"])


# --- the command --------------------------------------------------------------------------------------------


@pytest.fixture
def command(subwords: Translator, monkeypatch: pytest.MonkeyPatch) -> Translator:
    monkeypatch.setattr(cli_explain, "load_translator", lambda options: subwords)
    return subwords


def run(*arguments: object) -> int:
    return cli.run_command(lambda: cli._dispatch(["explain", "model", *map(str, arguments)]))


def test_the_terminal_shows_the_strongest_source_words(command: Translator, capfd: pytest.CaptureFixture[str]) -> None:
    assert run("a red dog", "--target", "ein roter Hund") == 0
    lines = capfd.readouterr().out.splitlines()
    found = explain(command, "a red dog", "ein roter Hund")
    assert lines[0] == "given  ein roter Hund"
    assert "decoder layer 2 of 2, mean of 2 heads" in lines[2]
    weights = found.word_weights()
    assert len(lines) == 3 + 3
    for j, line in enumerate(lines[3:]):
        best = int(weights[j].argmax())
        name, strongest = line.split("<-")
        assert name.strip() == f"{j}:{['ein', 'roter', 'Hund'][j]}"
        mark = "*" if (best, j) in found.links() else ""
        assert strongest.split()[:2] == [f"{best}:{['a', 'red', 'dog'][best]}{mark}", f"{weights[j, best]:.2f}"]


def test_links_and_all_values_are_printed(command: Translator, capfd: pytest.CaptureFixture[str]) -> None:
    found = explain(command, "a dog", "ein Hund")
    assert run("a dog", "--target", "ein Hund", "--format", "pharaoh", "--layer", 1, "--step", "reads") == 0
    assert capfd.readouterr().out == pharaoh(found.links(1, step="reads")) + "\n"
    assert run("a dog", "--target", "ein Hund", "--format", "json") == 0
    printed = json.loads(capfd.readouterr().out)
    assert printed["source_tokens"] == list(found.source_tokens)
    assert [tuple(link) for link in printed["links"]] == found.links()
    assert printed["source_words"][1] == dataclasses.asdict(found.source_words[1])
    for name, weights in (("encoder", found.maps.encoder_NHSS), ("cross", found.maps.cross_NHTS)):
        np.testing.assert_allclose(printed[name], weights, atol=1e-6)


def test_maps_are_written(command: Translator, tmp_path: Path) -> None:
    for name, beginning in (("map.png", b"\x89PNG"), ("map.HTML", b"<!doctype html>")):
        assert run("a dog", "--output", tmp_path / name) == 0
        assert (tmp_path / name).read_bytes().startswith(beginning)
    assert {path.name for path in tmp_path.iterdir()} == {"map.png", "map.HTML"}
    assert '"source":"a dog"' in (tmp_path / "map.HTML").read_text(encoding="utf-8")


def test_files_are_aligned_line_by_line(
    command: Translator, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli_explain, "CHUNK", 2)
    for n, name in enumerate(("a.en", "a.de")):
        (tmp_path / name).write_text("".join(pair[n] + "\n" for pair in PAIRS), encoding="utf-8")
    files = ("--source", tmp_path / "a.en", "--target-file", tmp_path / "a.de")
    expected = [pharaoh(links) for links in Aligner(command).align(*map(list, zip(*PAIRS, strict=True)))]
    assert run(*files) == 0
    assert capfd.readouterr().out.split("\n") == [*expected, ""]
    assert run(*files, "--format", "json", "--output", tmp_path / "links.jsonl") == 0
    records = [json.loads(line) for line in (tmp_path / "links.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [record["line"] for record in records] == [1, 2, 3, 4, 5]
    assert [pharaoh([(i, j) for i, j in record["links"]]) for record in records] == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Give a sentence, or two files"),
        (["a", "--source", "x"], "Give a sentence or two files, not both"),
        (["--source", "x"], "Give a sentence, or two files"),
        ([" "], "The sentence is empty"),
        (["a", "--target", ""], "The target is empty"),
        (["a", "--output", "map.pdf"], "map.pdf is neither a picture nor a page; end the name with .png or .html"),
        (["a", "--output", "no/map.png"], "There is no folder no to write map.png in"),
        (["a", "--layer", "3"], "The decoder has no layer 3; its layers are 1 to 2"),
        (["a", "--head", "0"], "The decoder has no head 0; its heads are 1 to 2"),
        (["a " * 40], "The source has 41 tokens, but the model takes 32 at most"),
        ([">>fra<< a"], "is not a language tag of this model"),
        (["--source", "no.en", "--target-file", "no.de"], "There is no file no.en"),
        (["--source", "x", "--target-file", "y", "--format", "text"], "come as pharaoh or json"),
        (["--source", "x", "--target-file", "y", "--output", "map.png"], "A map is one sentence's"),
        (
            ["--source", "one.en", "--target-file", "one.en", "--output", "no/links"],
            "There is no folder no to write links in",
        ),
        (["--source", "x", "--target-file", "y", "--beam-size", "2"], "--beam-size is of searching"),
        (["a", "--target", "b", "--max-length", "2"], "--max-length is of searching"),
        (["a", "--target", "b", "--seed", "2"], "--seed is of searching"),
        (["a", "--n-best", "2"], "leave out --n-best"),
        (["--source", "x", "--target-file", "y", "--target", "z"], "name the translations' file"),
        (["--source", "one.en", "--target-file", "two.de"], "one.en has 1 lines and two.de has 2"),
    ],
)
def test_mistakes_are_one_sentence(
    arguments: list[str],
    message: str,
    command: Translator,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.en").write_text("a\n", encoding="utf-8")
    (tmp_path / "two.de").write_text("a\nb\n", encoding="utf-8")
    assert run(*arguments) == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"one.en", "two.de"}


def test_bytes_that_are_no_text_come_through(command: Translator, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert run("a \udcff dog", "--target", "ein \udcff Hund") == 0
    assert b"ein \xff Hund" in capfdbinary.readouterr().out
    assert run("a \udcff dog", "--target", "ein \udcff Hund", "--format", "json") == 0
    assert json.loads(capfdbinary.readouterr().out.decode("utf-8"))["target"] == "ein ? Hund"


@pytest.mark.parametrize(
    "arguments",
    [
        ("explain", "--source", "a.en", "--target-file", "a.de", "--output", "a.de"),
        ("translate", "--input", "a.en", "--output", "./a.en"),
        ("score", "--source", "a.en", "--target", "a.de", "--output", "a.en"),
        ("evaluate", "--source", "a.en", "--reference", "a.de", "--output", "a.de"),
    ],
)
def test_no_command_writes_over_what_it_reads(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.en", "a.de"):
        Path(name).write_text(f"{name}\n", encoding="utf-8")
    command, *options = arguments
    assert cli.run_command(lambda: cli._dispatch([command, "no_model", *options])) == 2
    assert "is one of the inputs, which would be lost" in capsys.readouterr().err
    assert [Path(name).read_text(encoding="utf-8") for name in ("a.en", "a.de")] == ["a.en\n", "a.de\n"]
