"""Text to ids and back, against MarianTokenizer and native Marian, and for the lines of rude users."""

# ruff: noqa: RUF001 - characters that look like others are part of what is tested

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from transformer_jax.errors import UserError
from transformer_jax.sentencepiece_training import train_sentencepiece, vocabulary_of
from transformer_jax.tokenizer import (
    CharacterTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    load_tokenizer,
)

ENGLISH = [
    "The small frog sits near the pond, and the heron waits.",
    "Three heavy boxes stand in front of the old station.",
    "Would you like tea or coffee at 7:45?",
    "Nobody knows why the lights went out on Sunday evening.",
    "She bought 12 apples, 3 pears and one melon for 9.80.",
]
GERMAN = [
    "Der kleine Frosch sitzt am Teich, und der Reiher wartet.",
    "Drei schwere Kisten stehen vor dem alten Bahnhof.",
    "Möchten Sie um 7:45 Uhr Tee oder Kaffee?",
    "Niemand weiß, warum am Sonntagabend das Licht ausging.",
    "Sie kaufte 12 Äpfel, 3 Birnen und eine Melone für 9,80.",
]
NASTY = [
    *(
        "",
        " ",
        "\t",
        "\u00a0\u3000",
        "\x00",
        "a\x00b",
        "\x01\x02\x1f\x7f",
        "\ufeffa",
        "a\u200bb\u200d",
        "\ufffd",
    ),
    *("▁", "▁▁ a ▁b", "a  b   c ", "  leading", "tab\tand\u2028separators\u2029\x85\r", "\r"),
    *("👩‍👩‍👧‍👦 family 🇩🇪", "日本語の文", "שלום עולם", "e\u0301 é", "ﬁne ½ ① Ａ", "\U0010ffff", "\ue000"),
    *("a >>fra<< b", " >>fra<< a", "<< a >>", ">>", "> > fra < <", "<pa d>", "< /s>", "%s {} \\n \\"),
    *("frog" * 2_500, "x " * 5_000, "𝕏" * 10_000, "." * 10_000),
]
SURROGATES = ["\ud800", "a\udcffb", "\udc00\ud800 frog", "\ud83d\ude00"]


def _random_lines(seed: int, count: int) -> list[str]:
    """Lines put together from words, broken words, and characters from all over Unicode."""
    rng = random.Random(seed)
    words = " ".join(ENGLISH + GERMAN).split()
    makers: list[Callable[[], str]] = [
        lambda: rng.choice(words),
        lambda: rng.choice(words)[rng.randrange(4) :],
        lambda: "".join(rng.sample("▁.,;:!?-'\"()[]&%$#@ \t\u00a0\u200b", 3)),
        lambda: chr(rng.choice([rng.randrange(0x20), rng.randrange(0xD800), rng.randrange(0xE000, 0x30000)])),
    ]
    return ["".join(rng.choice(["", " "]) + rng.choice(makers)() for _ in range(12)) for _ in range(count)]


def _sample_lines() -> list[str]:
    return [*ENGLISH, *GERMAN, *NASTY, *_random_lines(seed=0, count=400)]


@pytest.fixture(scope="module")
def joint() -> SentencePieceTokenizer:
    return train_sentencepiece(ENGLISH + GERMAN, 140, source_lang="en", target_lang="de")


def _model_of(tokenizer: SentencePieceTokenizer, folder: Path) -> bytes:
    tokenizer.save(folder)
    return (folder / "source.spm").read_bytes()


@pytest.fixture
def tagged(joint: SentencePieceTokenizer, tmp_path: Path) -> SentencePieceTokenizer:
    """A joint vocabulary with language tags, its ids in an order that is not the SentencePiece model's."""
    model = _model_of(joint, tmp_path / "untagged")
    pieces = [*vocabulary_of(model), ">>fra<<", ">>deu<<"]
    random.Random(1).shuffle(pieces)
    return SentencePieceTokenizer(model, model, {piece: index for index, piece in enumerate(pieces)})


@pytest.fixture
def separate(tmp_path: Path) -> SentencePieceTokenizer:
    """Separate vocabularies, 100 source and 80 target ids."""
    source = _model_of(train_sentencepiece(ENGLISH, 100), tmp_path / "source")
    target = _model_of(train_sentencepiece(GERMAN, 80, model_type="unigram"), tmp_path / "target")
    return SentencePieceTokenizer(source, target, vocabulary_of(source), vocabulary_of(target))


# --- equal to other implementations -------------------------------------------------------------------------


def _marian_tokenizer(folder: Path) -> Any:
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    return transformers.MarianTokenizer.from_pretrained(folder)


def _assert_equal_to_marian(ours: SentencePieceTokenizer, marian: Any) -> None:
    """Compares ids and text of both sides. MarianTokenizer cannot decode a separate source vocabulary."""
    lines = _sample_lines()
    expected_source = marian(lines)["input_ids"]
    expected_target = marian(text_target=lines)["input_ids"]
    assert ours.encode_source_batch(lines) == expected_source
    assert ours.encode_target_batch(lines) == expected_target
    # MarianTokenizer knows one <pad>, the source's, and stumbles over it where a target piece has the same
    # id.
    rng, stop, pad = random.Random(2), ours.end_id, ours.pad_id
    decodable = sorted(set(range(ours.vocab_size)) - {pad, ours.source_pad_id})
    arbitrary = [rng.choices(decodable, k=20) for _ in range(200)]
    cut = [ids[: ids.index(stop) + 1] if stop in ids else ids for ids in [*expected_target, *arbitrary]]
    expected_text = marian.batch_decode(cut, skip_special_tokens=True, use_source_tokenizer=False)
    assert [ours.decode([pad, *ids]) for ids in cut] == expected_text
    if not ours.separate_vocabs:
        expected_text = marian.batch_decode(cut, skip_special_tokens=True, use_source_tokenizer=True)
        assert [ours.decode_source(ids) for ids in cut] == expected_text


@pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses")
@pytest.mark.parametrize("kind", ["joint", "tagged", "separate"])
def test_a_saved_folder_is_read_alike_by_marian_tokenizer(kind: str, request: pytest.FixtureRequest, tmp_path: Path):
    ours: SentencePieceTokenizer = request.getfixturevalue(kind)
    ours.save(tmp_path / "saved")
    marian = _marian_tokenizer(tmp_path / "saved")
    assert (marian.pad_token_id, marian.eos_token_id) == (ours.source_pad_id, ours.end_id)
    assert len(marian) == ours.source_vocab_size
    _assert_equal_to_marian(ours, marian)


@pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses")
def test_language_tags_are_read_alike_by_marian_tokenizer(tagged: SentencePieceTokenizer, tmp_path: Path):
    tagged.save(tmp_path / "saved")
    marian = _marian_tokenizer(tmp_path / "saved")
    lines = [">>fra<< The frog", ">>deu<<frog", ">>fra<<", ">>fra<<>>deu<< frog", ">>deu<< 日本"]
    assert tagged.encode_source_batch(lines) == marian(lines)["input_ids"]
    assert marian.supported_language_codes == [tag for tag in marian.encoder if tag in tagged.language_tags]


@pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses")
def test_a_hugging_face_folder_is_read_as_marian_tokenizer_reads_it(shared_dir: Path):
    folder = shared_dir / "marian_native" / "hf_dates"
    ours = load_tokenizer(folder)
    assert isinstance(ours, SentencePieceTokenizer)
    _assert_equal_to_marian(ours, _marian_tokenizer(folder))


def test_lines_are_cut_into_the_pieces_of_native_marian(shared_dir: Path):
    folder = shared_dir / "marian_native"
    ours = load_tokenizer(folder / "hf_dates")
    vocab = json.loads((folder / "hf_dates" / "vocab.json").read_text())
    references = json.loads((folder / "marian_dates" / "refs.json").read_text())
    for line in references["sentences"]:
        assert ours.encode_source(line["src"]) == [vocab[piece] for piece in line["src_pieces"]] + [vocab["</s>"]]
        target_ids = [vocab[piece] for piece in line["greedy"]["pieces"]]
        assert ours.decode([*target_ids, vocab["</s>"]]) == line["greedy"]["text"]
    assert ours.encode_source("☃ 10 May")[1] == vocab["<unk>"]


# --- the tokenizer that we train ----------------------------------------------------------------------------


def test_the_trained_table_has_the_size_asked_for_and_marians_special_ids(
    joint: SentencePieceTokenizer, tmp_path: Path
):
    joint.save(tmp_path)
    vocab = json.loads((tmp_path / "vocab.json").read_text())
    assert sorted(vocab.values()) == list(range(140))
    assert (vocab["</s>"], vocab["<unk>"], vocab["<pad>"]) == (0, 1, 139)
    assert (joint.vocab_size, joint.source_vocab_size) == (140, 140)
    assert (joint.end_id, joint.unknown_id, joint.pad_id, joint.start_id) == (0, 1, 139, 139)


@pytest.mark.parametrize("line", ENGLISH + GERMAN)
def test_training_text_survives_the_round_trip(joint: SentencePieceTokenizer, line: str):
    ids = joint.encode_target(line)
    assert ids == joint.encode_source(line)
    assert (ids.count(joint.end_id), ids[-1]) == (1, joint.end_id)
    assert joint.decode(ids) == line


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_training_is_deterministic(model_type: Any, tmp_path: Path):
    first = _model_of(train_sentencepiece(ENGLISH, 70, model_type=model_type), tmp_path)
    assert first == _model_of(train_sentencepiece(iter(ENGLISH), 70, model_type=model_type), tmp_path)


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
@pytest.mark.parametrize("size", [10, 5_000])
def test_a_size_that_the_text_cannot_have_is_answered_with_one_that_it_can(model_type: Any, size: int):
    with pytest.raises(UserError, match=rf"vocabulary of {size} is too .*\d") as refusal:
        train_sentencepiece(ENGLISH, size, model_type=model_type)
    possible = next(
        int(word) for word in str(refusal.value).replace(".", " ").split() if word.isdigit() and int(word) != size
    )
    assert train_sentencepiece(ENGLISH, possible, model_type=model_type).vocab_size == possible
    with pytest.raises(UserError, match=str(possible)):  # and the named size is the very limit
        train_sentencepiece(ENGLISH, possible + (1 if size > possible else -1), model_type=model_type)


@pytest.mark.parametrize("lines", [[], [""], ["  ", "\t"], ["\x01"]])
def test_text_without_text_is_an_error(lines: list[str]):
    with pytest.raises(UserError, match="text"):
        train_sentencepiece(lines, 100)


def test_an_error_while_reading_the_text_is_not_disguised():
    def lines():
        yield "one"
        raise UserError("the second file is missing")

    with pytest.raises(UserError, match="second file"):
        train_sentencepiece(lines(), 100)


def test_long_lines_and_lone_surrogates_are_trained_on():
    lines = [
        "x" * 10_000 + "ß",
        "broken \ud800 line",
    ]  # SentencePiece by itself loses the first, stops at the second
    tokenizer = train_sentencepiece(lines, 25)
    assert tokenizer.unknown_id not in tokenizer.encode_source("ß")


def test_a_sample_of_the_lines_follows_the_seed(tmp_path: Path):
    lines = [f"{chr(0x4E00 + index)} and so on" for index in range(200)]

    def known_characters(seed: int) -> set[str]:
        tokenizer = train_sentencepiece(lines, 30, max_lines=10, seed=seed)
        return {line[0] for line in lines if tokenizer.unknown_id not in tokenizer.encode_source(line)}

    assert len(known_characters(0)) == 10
    assert known_characters(0) == known_characters(0)
    assert known_characters(0) != known_characters(1)


@pytest.mark.parametrize("progress", [False, True])
def test_training_writes_to_standard_error_only_if_asked(progress: bool, capfd: pytest.CaptureFixture[str]):
    train_sentencepiece(ENGLISH, 80, progress=progress)
    written = capfd.readouterr()
    assert written.out == ""
    assert ("reading text" in written.err) is progress
    assert "trainer" not in written.err  # SentencePiece's own log


# --- rude lines ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["joint", "tagged", "separate"])
def test_no_line_crashes_and_every_line_ends_once(kind: str, request: pytest.FixtureRequest):
    tokenizer: SentencePieceTokenizer = request.getfixturevalue(kind)
    for line in [*_sample_lines(), *SURROGATES]:
        for ids in (tokenizer.encode_source(line), tokenizer.encode_target(line)):
            assert (ids.count(tokenizer.end_id), ids[-1]) == (1, tokenizer.end_id)
        text = tokenizer.decode(tokenizer.encode_target(line))
        assert "▁" not in text
        assert "\n" not in text


def test_a_lone_surrogate_is_a_replacement_character_and_a_pair_is_its_character():
    tokenizer = train_sentencepiece(["frog pond 😀"], 13)
    assert tokenizer.encode_source("frog\udcffpond") == tokenizer.encode_source("frog\ufffdpond")
    assert tokenizer.encode_source("frogpond") != tokenizer.encode_source("frog\ufffdpond")
    assert tokenizer.decode(tokenizer.encode_target("frog \ud83d\ude00")) == "frog 😀"


@pytest.mark.parametrize("line", ["</s>", "12 </s> 34", "<pad>", "<unk>", "1 <pad></s>", "1 >>fra<< 2", ">> 2 <<"])
def test_special_tokens_and_tags_in_the_text_are_text(line: str, tmp_path: Path):
    # The model knows digits only, so that it gives "</s>" back as one unknown piece.
    model = _model_of(train_sentencepiece(["0 1 2 3 4 5 6 7 8 9"], 14), tmp_path)
    vocab = vocabulary_of(model)
    tag_id = len(vocab)
    tokenizer = SentencePieceTokenizer(model, model, {**vocab, ">>fra<<": tag_id})
    assert tokenizer.encode_source(">>fra<< 1")[0] == tag_id
    for ids in (tokenizer.encode_source(line), tokenizer.encode_target(line)):
        assert ids.count(tokenizer.end_id) == 1
        assert tokenizer.unknown_id in ids
        assert {tokenizer.pad_id, tag_id}.isdisjoint(ids)


def test_an_unknown_language_tag_is_an_error_that_lists_the_valid_ones(tagged: SentencePieceTokenizer):
    with pytest.raises(UserError, match=r">>xyz<<.*use one of >>deu<< >>fra<<"):
        tagged.encode_source(">>xyz<< The frog")


def test_a_model_without_language_tags_takes_them_as_text(joint: SentencePieceTokenizer):
    ids = joint.encode_source(">>fra<< frog")
    assert joint.encode_source("frog")[:-1] == ids[-len(joint.encode_source("frog")) : -1]
    assert len(ids) > len(joint.encode_source("frog")) + 1


def test_each_line_of_a_batch_is_encoded_as_if_alone(joint: SentencePieceTokenizer):
    lines = _random_lines(seed=3, count=100)
    assert joint.encode_source_batch(lines) == [joint.encode_source(line) for line in lines]
    assert joint.encode_target_batch([]) == []


# --- decoding -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["joint", "tagged", "separate"])
def test_decoding_stops_at_the_end_and_leaves_out_special_tokens(kind: str, request: pytest.FixtureRequest):
    tokenizer: SentencePieceTokenizer = request.getfixturevalue(kind)
    *ids, end = tokenizer.encode_target(GERMAN[0])
    beyond_the_table = tokenizer.vocab_size + 5
    rude = [tokenizer.start_id, *ids[:3], tokenizer.pad_id, tokenizer.unknown_id, beyond_the_table, *ids[3:]]
    assert tokenizer.decode([*rude, end, *ids]) == GERMAN[0]
    assert tokenizer.decode([]) == tokenizer.decode([end]) == ""


def test_separate_vocabularies_keep_their_own_special_ids(tmp_path: Path):
    source = _model_of(train_sentencepiece(ENGLISH, 60), tmp_path / "source")
    target = _model_of(train_sentencepiece(GERMAN, 120), tmp_path / "target")
    tokenizer = SentencePieceTokenizer(source, target, vocabulary_of(source), vocabulary_of(target))
    assert (tokenizer.source_vocab_size, tokenizer.vocab_size) == (60, 120)
    assert (tokenizer.source_pad_id, tokenizer.pad_id, tokenizer.start_id) == (59, 119, 119)
    piece = next(piece for piece, index in vocabulary_of(target).items() if index == tokenizer.source_pad_id)
    assert tokenizer.decode([tokenizer.source_pad_id]) == piece.replace("▁", "")
    assert tokenizer.decode_source(tokenizer.encode_source(ENGLISH[0])) == ENGLISH[0]


def test_a_piece_that_only_the_table_knows_leaves_no_space_mark(joint: SentencePieceTokenizer, tmp_path: Path):
    model = _model_of(joint, tmp_path)
    vocab = vocabulary_of(model)
    tokenizer = SentencePieceTokenizer(model, model, {**vocab, "▁Kröte": len(vocab)})
    frog = joint.encode_target("Frosch")[:-1]
    assert tokenizer.decode([len(vocab), *frog, len(vocab)]) == "Kröte Frosch Kröte"


def test_a_line_break_spelled_in_bytes_does_not_make_two_lines(tmp_path: Path):
    tokenizer = train_sentencepiece(ENGLISH, 330, byte_fallback=True)
    vocab = vocabulary_of(_model_of(tokenizer, tmp_path))
    assert tokenizer.decode([vocab["<0x41>"], vocab["<0x0A>"], vocab["<0x42>"]]) == "A B"
    assert tokenizer.decode(tokenizer.encode_target("日本")) == "日本"


# --- characters ---------------------------------------------------------------------------------------------


def test_characters_are_numbered_after_pad_start_and_end():
    tokenizer = CharacterTokenizer("ba-")
    assert (tokenizer.pad_id, tokenizer.start_id, tokenizer.end_id) == (0, 1, 2)
    assert (tokenizer.vocab_size, tokenizer.source_vocab_size) == (6, 6)
    assert tokenizer.encode_source("a-b") == tokenizer.encode_target("a-b") == [4, 5, 3, 2]
    assert tokenizer.encode_source_batch(["a", ""]) == tokenizer.encode_target_batch(["a", ""]) == [[4, 2], [2]]
    assert tokenizer.decode([1, 4, 0, 5, 99, 3, 2, 4]) == tokenizer.decode_source([4, 5, 3]) == "a-b"


def test_characters_outside_the_vocabulary_are_left_out_and_named():
    tokenizer = CharacterTokenizer(["a", "b"])
    assert tokenizer.encode_source("aXb\ud800</s>") == [3, 4, 2]
    assert tokenizer.unknown_characters("aXbX \ud800") == {"X", " ", "\ud800"}
    assert tokenizer.unknown_characters("abba") == set()


@pytest.mark.parametrize("characters", [["a", "a"], ["a", "bc"], [""]])
def test_a_character_vocabulary_of_anything_else_is_an_error(characters: list[str]):
    with pytest.raises(UserError, match="different single characters"):
        CharacterTokenizer(characters)


# --- folders ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["joint", "tagged", "separate", "characters"])
def test_a_loaded_tokenizer_is_the_saved_one(kind: str, request: pytest.FixtureRequest, tmp_path: Path):
    # "Ä" < "a" < "é" would not be their order in the file if the ids did not say so.
    saved: Tokenizer = CharacterTokenizer("éaÄ 7\n\u2028") if kind == "characters" else request.getfixturevalue(kind)
    saved.save(tmp_path / "new" / "folder")
    loaded = load_tokenizer(tmp_path / "new" / "folder")
    assert type(loaded) is type(saved)
    for name in ("vocab_size", "source_vocab_size", "pad_id", "source_pad_id", "start_id", "end_id"):
        assert getattr(loaded, name) == getattr(saved, name)
    lines = [*_random_lines(seed=4, count=50), "7aéÄ \u2028\n"]
    assert loaded.encode_source_batch(lines) == saved.encode_source_batch(lines)
    assert loaded.encode_target_batch(lines) == saved.encode_target_batch(lines)
    every_id = list(range(saved.end_id + 1, saved.vocab_size))
    assert loaded.decode(every_id) == saved.decode(every_id) != ""


def test_an_old_folder_without_a_tokenizer_class_is_marian(joint: SentencePieceTokenizer, tmp_path: Path):
    joint.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"target_lang": "de", "source_lang": "en"}')
    assert load_tokenizer(tmp_path).encode_source(ENGLISH[0]) == joint.encode_source(ENGLISH[0])
    (tmp_path / "tokenizer_config.json").unlink()
    assert load_tokenizer(tmp_path).encode_source(ENGLISH[0]) == joint.encode_source(ENGLISH[0])


def test_missing_files_are_named(separate: SentencePieceTokenizer, tmp_path: Path):
    separate.save(tmp_path / "model")
    (tmp_path / "model" / "target.spm").unlink()
    (tmp_path / "model" / "target_vocab.json").unlink()
    with pytest.raises(UserError, match=r"lacks target\.spm, target_vocab\.json"):
        load_tokenizer(tmp_path / "model")
    with pytest.raises(UserError, match=r"no folder .*nowhere"):
        load_tokenizer(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer_config.json", '{"tokenizer_class": "BertTokenizer"}', "BertTokenizer"),
        ("tokenizer_config.json", "{", "not valid JSON"),
        ("vocab.json", "[]", "holds a list"),
        ("vocab.json", '{"</s>": "0"}', "not a vocabulary"),
        ("vocab.json", '{"</s>": 0, "<unk>": 1}', "has no <pad>"),
        ("source.spm", "version https://git-lfs.github.com/spec/v1", "not a SentencePiece model"),
        ("target.spm", "", "not a SentencePiece model"),
    ],
)
def test_a_damaged_folder_is_explained(
    joint: SentencePieceTokenizer, tmp_path: Path, name: str, content: str, message: str
):
    joint.save(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=message):
        load_tokenizer(tmp_path)
