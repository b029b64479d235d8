"""2,000 lines, ordinary and nasty, through transformers' MarianTokenizer and ours; and native Marian's vocabularies.

Where the two differ, it is known why, and no other line may differ. MarianTokenizer's ways that are not followed:

1. Special tokens in the text. "</s>", "<unk>" and "<pad>" in a user's line become those tokens: the model sees an end
   in the middle of its source. Here text is text.
2. Tags of a model that has none. It takes everything from ">>" at the start of a line up to the next "<<" as one
   token, which a vocabulary without language tags turns into one <unk>: quoted text is lost. Here, as in native Marian,
   it is text. With language tags in the vocabulary, an unknown tag at the start of a source line is an error here, and
   what has a space in it is no tag. On the target side all but known tags are text.
3. Separate vocabularies. It has one <pad>, that of the source: a target piece that happens to have the same id
   disappears from decoded text. It decodes source ids by the target's table.
"""

# ruff: noqa: RUF001 - characters that look like others are part of what is tested

from __future__ import annotations

import gzip
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import yaml

from transformer_jax.errors import UserError
from transformer_jax.native_folder import load_native, save_native
from transformer_jax.native_marian import load_npz
from transformer_jax.sentencepiece_training import train_sentencepiece, vocabulary_of
from transformer_jax.tokenizer import SentencePieceTokenizer, load_tokenizer

TINY = Path(__file__).parent / "fixtures" / "marian_tiny"
SPECIAL = ("</s>", "<unk>", "<pad>")
TAGS = (">>fra<<", ">>deu<<")

FRAGMENTS = (
    *("", " ", " \t  ", "\u00a0\u3000", "\u200b\u200d"),  # nothing, seen or not
    *("\x00", "\x01\x1f\x7f", "\x85", "\u2028\u2029", "\ufeff", "\r"),
    *("👩‍👩‍👧‍👦 🇩🇪", "☃\ufe0f", "１２Ａｂ", "ﬁ½①", "e\u0301\u0323\u0301", "日本語", "שלום"),
    *("𝕏", "\U0010ffff\ue000", "\ufffd", "▁", "\\n \"'{}%s", "frog" * 250, "<<", ">>"),
    *(*SPECIAL, ">>deu<<", ">>xyz<<", ">>two words<<"),
)
CONTEXTS = (
    *("{}", "{} A dog runs.", "A dog {}", "Ein Hund{}läuft", " {}", "{}{}"),
    *("{}\u3000{}", "a {} b >>fra<< {}", "{}1."),
)


@pytest.fixture(scope="module")
def multi30k(shared_dir: Path) -> dict[str, list[str]]:
    """850 lines of each language."""
    texts = {}
    for language in ("en", "de"):
        with gzip.open(shared_dir / "data" / "multi30k" / f"val.{language}.gz", "rt", encoding="utf-8") as file:
            texts[language] = [line.rstrip("\n") for line in file][:850]
    return texts


@pytest.fixture(scope="module")
def lines(multi30k: dict[str, list[str]]) -> list[str]:
    nasty = [context.replace("{}", fragment) for fragment in FRAGMENTS for context in CONTEXTS]
    rng = random.Random(0)
    mixed = ["".join(rng.choice(FRAGMENTS) for _ in range(4)) for _ in range(300 - len(nasty))]
    everything = [*multi30k["en"], *multi30k["de"], *nasty, *mixed]
    assert len(everything) == 2_000
    return everything


def spm_of(tokenizer: SentencePieceTokenizer, folder: Path) -> bytes:
    tokenizer.save(folder)
    return (folder / "source.spm").read_bytes()


@pytest.fixture(scope="module")
def folders(
    shared_dir: Path, multi30k: dict[str, list[str]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """A folder of each kind: someone else's, and saved ones of ours."""
    base = tmp_path_factory.mktemp("tokenizers")
    english, german = multi30k["en"][:300], multi30k["de"][:300]
    shared = train_sentencepiece(english + german, 600)
    model = spm_of(shared, base / "shared")
    pieces = [*vocabulary_of(model), *TAGS]
    random.Random(1).shuffle(pieces)  # ids of a table are not those of the model
    SentencePieceTokenizer(model, model, {p: i for i, p in enumerate(pieces)}).save(base / "tagged")
    source = spm_of(train_sentencepiece(english, 300, model_type="unigram"), base / "english")
    target = spm_of(train_sentencepiece(german, 400), base / "german")
    SentencePieceTokenizer(source, target, vocabulary_of(source), vocabulary_of(target)).save(base / "separate")
    return {"hf_dates": shared_dir / "marian_native" / "hf_dates"} | {
        name: base / name for name in ("shared", "tagged", "separate")
    }


# --- transformers' MarianTokenizer --------------------------------------------------------------------------


def kind_of_difference(line: str, has_tags: bool, source: bool) -> str | None:
    """Why the ids of a line may not be MarianTokenizer's; None: they must be."""
    tag = line[: line.index("<<") + 2] if line.startswith(">>") and "<<" in line else ""
    if tag and not has_tags:
        return "tag, of a model without tags"
    if tag and tag not in TAGS:
        return "unknown tag" if source and tag.split() == [tag] else "no tag, but text"
    if any(token in line for token in SPECIAL):
        return "special token in the text"
    return None


@pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses")
@pytest.mark.parametrize("kind", ["hf_dates", "shared", "tagged", "separate"])
def test_ids_are_those_of_marian_tokenizer(kind: str, folders: dict[str, Path], lines: list[str]):
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    marian, ours = transformers.MarianTokenizer.from_pretrained(folders[kind]), load_tokenizer(folders[kind])
    has_tags = kind == "tagged"
    theirs = {True: marian(lines)["input_ids"], False: marian(text_target=lines)["input_ids"]}
    differing: dict[str, int] = {}
    for source, encode in ((True, ours.encode_source), (False, ours.encode_target)):
        for line, expected in zip(lines, theirs[source], strict=True):
            reason = kind_of_difference(line, has_tags, source)
            if reason == "unknown tag":
                with pytest.raises(UserError, match="not a language tag of this model"):
                    encode(line)
                differing[reason] = differing.get(reason, 0) + 1
                continue
            ids = encode(line)
            if ids != expected:
                assert reason is not None, line
                differing[reason] = differing.get(reason, 0) + 1
    # Every exemption is needed.
    expected_kinds = {"special token in the text"}
    expected_kinds |= {"unknown tag", "no tag, but text"} if has_tags else {"tag, of a model without tags"}
    assert differing.keys() == expected_kinds
    assert sum(differing.values()) < 300


@pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses")
@pytest.mark.parametrize("kind", ["hf_dates", "shared", "tagged", "separate"])
def test_text_is_that_of_marian_tokenizer(kind: str, folders: dict[str, Path], lines: list[str]):
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    marian, ours = transformers.MarianTokenizer.from_pretrained(folders[kind]), load_tokenizer(folders[kind])
    ids = ours.encode_target_batch(lines)
    expected = marian.batch_decode(ids, skip_special_tokens=True, use_source_tokenizer=False)
    swallowed = 0
    for line_ids, text in zip(ids, expected, strict=True):
        if ours.decode(line_ids) != text:
            assert kind == "separate"
            assert ours.source_pad_id in line_ids
            swallowed += 1
    assert (swallowed > 0) is (kind == "separate")
    if kind != "separate":
        untagged = [line for line in lines if not line.startswith(">>")]
        ids = ours.encode_source_batch(untagged)
        expected = marian.batch_decode(ids, skip_special_tokens=True, use_source_tokenizer=True)
        assert [ours.decode_source(line_ids) for line_ids in ids] == expected


def test_both_sides_of_a_separate_vocabulary_are_those_of_sentencepiece(folders: dict[str, Path], lines: list[str]):
    """What MarianTokenizer cannot decode: each side by its own model, without what is unknown."""
    ours = load_tokenizer(folders["separate"])
    sides = {
        "source": (ours.encode_source_batch, ours.decode_source),
        "target": (ours.encode_target_batch, ours.decode),
    }
    for name, (encode, decode) in sides.items():
        processor = sentencepiece.SentencePieceProcessor(model_file=str(folders["separate"] / f"{name}.spm"))
        ids = encode(lines)
        # No line has a tag here: the model's own ids are the table's.
        assert [line_ids[:-1] for line_ids in ids] == processor.encode(lines)
        known = [[token for token in line_ids[:-1] if token != processor.unk_id()] for line_ids in ids]
        expected = [text.replace("▁", " ").strip() for text in map(processor.decode, known)]
        assert [decode(line_ids) for line_ids in ids] == expected
        assert len(set(expected)) > 800


# --- native Marian's vocabularies ---------------------------------------------------------------------------


def test_a_vocab_spm_gives_the_ids_of_native_marian(shared_dir: Path):
    folder = shared_dir / "marian_native" / "marian_dates"
    references = json.loads((folder / "refs.json").read_text(encoding="utf-8"))
    _, tokenizer = load_native(folder)
    for line in [*references["sentences"], *references["edge_cases"]]:
        assert tokenizer.encode_source(line["src"]) == [*line["src_ids"], 0]
        best = line["greedy"]
        assert tokenizer.decode(best["ids"]) == best["text"]
    for line in references["sentences"]:
        assert tokenizer.encode_target(line["ref"]) == [*line["scored_ref"]["ids"], 0]


def test_a_vocab_yml_gives_the_ids_of_the_pieces(shared_dir: Path):
    folder = shared_dir / "marian_native" / "opus_layout"
    table = yaml.safe_load((folder / "opus.spm565-spm565.vocab.yml").read_text(encoding="utf-8"))
    references = json.loads((folder.parent / "marian_dates" / "refs.json").read_text(encoding="utf-8"))
    _, tokenizer = load_native(folder)
    own_ids = 0
    for line in [*references["sentences"], *references["edge_cases"]]:
        expected = [table.get(piece, table["<unk>"]) for piece in line["src_pieces"]]
        assert tokenizer.encode_source(line["src"]) == [*expected, table["</s>"]]
        own_ids += expected == line["src_ids"]
        pieces = line["greedy"]["pieces"]
        assert tokenizer.decode([table[piece] for piece in pieces]) == line["greedy"]["text"]
    assert own_ids < 10  # the ids inside the .spm are others


ODD_PIECES = (
    *("no", "Yes", "true", "null", "~", "1.0", "0x1F", "1e3", "012", "1_000", ".inf", "2001-12-14", "12:30:45"),
    *('"', "'", '"quoted"', "it's", "\\", "\\n", "a: b", "# no comment", " #", ":", "-", "- a", "?", "? a", "!"),
    *("!!str", "&a", "*a", "|", ">", "%", "@", "`", "{", "}", "[", "]", ",", "{a: b}", "<<", "=", "---", "..."),
    *("▁", "▁a", "\t", "\r", "\n", "\x00", "\x01", "\x1b", "\x7f", "\x80", "\x85", "\xa0", "\u2028", "\u2029"),
    *("\ufeff", "\ufffe", "\uffff", "\ufffd", "😀", "👩‍👩‍👧‍👦", "\U0010ffff", "e\u0301", "é", "ﬁ", "日本語"),
    *(">>deu<<", "x" * 1_000),
)


def native_folder(folder: Path, tokenizer: SentencePieceTokenizer) -> SentencePieceTokenizer:
    """What is read of what was written; the model in the folder has nothing to do with it."""
    model = load_npz(TINY / "model.npz")
    save_native(folder, model.config, model.params, tokenizer)
    return load_native(folder)[1]


def table_of(tokenizer: SentencePieceTokenizer, folder: Path, name: str = "vocab.json") -> dict[str, int]:
    """Pieces and ids, as the other format of the folder says them."""
    tokenizer.save(folder)
    return json.loads((folder / name).read_text(encoding="utf-8"))


def test_pieces_of_any_characters_survive_a_vocab_yml(tmp_path: Path):
    spm = (TINY / "vocab.spm").read_bytes()
    pieces = [*list(vocabulary_of(spm))[:-1], *ODD_PIECES]
    random.Random(2).shuffle(pieces)
    vocab = {piece: index for index, piece in enumerate(dict.fromkeys([*pieces, "<pad>"]))}
    written = SentencePieceTokenizer(spm, spm, vocab)
    read = native_folder(tmp_path / "native", written)
    assert sorted(path.name for path in (tmp_path / "native").iterdir()) == [
        *("decoder.yml", "model.npz", "source.spm", "target.spm", "vocab.yml")
    ]
    assert table_of(read, tmp_path / "read") == vocab
    assert read.language_tags == written.language_tags == [">>deu<<"]
    for loader in (yaml.SafeLoader, yaml.CSafeLoader):  # and other readers of YAML find strings and numbers
        content = yaml.load((tmp_path / "native" / "vocab.yml").read_text(encoding="utf-8"), loader)
        assert content == {piece: index for piece, index in vocab.items() if piece != "<pad>"}


def test_plain_words_of_a_vocab_yml_are_words(tmp_path: Path):
    """As Marian's YAML library writes them: unquoted where it can be, and so `no` is not false and `1.0` no number."""
    shutil.copytree(TINY, tmp_path / "model")
    plain = ("no", "Yes", "null", "~", "1.0", "012", "0x1F", "2001-12-14", "<<", "=", "a#b", "é", "😀")
    quoted = {'"\\""': '"', '"\\\\"': "\\", '"\\x85"': "\x85", '"\\u2028"': "\u2028", '"#"': "#", "'it''s'": "it's"}
    written = ["</s>", "<unk>", *plain, *quoted]
    text = "".join(f"{word}: {index}\n" for index, word in enumerate(written))
    for name in ("source.spm", "target.spm"):
        shutil.copyfile(TINY / "vocab.spm", tmp_path / "model" / name)
    (tmp_path / "model" / "v.yml").write_text(text, encoding="utf-8")
    (tmp_path / "model" / "decoder.yml").write_text("models: [model.npz]\nvocabs: [v.yml, v.yml]\n")
    _, tokenizer = load_native(tmp_path / "model")
    expected = [quoted.get(word, word) for word in written] + ["<pad>"]
    assert table_of(tokenizer, tmp_path / "read") == {word: index for index, word in enumerate(expected)}


def with_other_ids(model: Path) -> dict[str, int]:
    """A table in which ordinary pieces have changed places; Marian's own stay where it wants them."""
    *pieces, pad = vocabulary_of(model)
    ordinary = pieces[2:]
    random.Random(3).shuffle(ordinary)
    return {piece: index for index, piece in enumerate([*pieces[:2], *ordinary, pad])}


@pytest.mark.parametrize("kind", ["hf_dates", "shared", "tagged", "separate", "separate tables"])
def test_a_tokenizer_survives_native_marians_files(
    kind: str, folders: dict[str, Path], lines: list[str], tmp_path: Path
):
    written: Any = load_tokenizer(folders["separate" if kind == "separate tables" else kind])
    if kind == "separate tables":  # whose ids are not those inside the models
        files = [folders["separate"] / f"{side}.spm" for side in ("source", "target")]
        written = SentencePieceTokenizer(*files, *map(with_other_ids, files))
    read = native_folder(tmp_path / "native", written)
    files = {path.name for path in (tmp_path / "native").iterdir()} - {"decoder.yml", "model.npz"}
    assert (
        files
        == {
            "hf_dates": {"source.spm", "target.spm", "vocab.yml"},
            "shared": {"vocab.spm"},
            "tagged": {"source.spm", "target.spm", "vocab.yml"},
            "separate": {"source.spm", "target.spm"},
            "separate tables": {"source.spm", "target.spm", "source.vocab.yml", "target.vocab.yml"},
        }[kind]
    )
    for name in ("vocab_size", "source_vocab_size", "pad_id", "source_pad_id", "start_id", "end_id", "unknown_id"):
        assert getattr(read, name) == getattr(written, name)
    plain = [line for line in lines if not line.startswith(">>")]
    assert read.encode_source_batch(plain) == written.encode_source_batch(plain)
    assert read.encode_target_batch(lines) == written.encode_target_batch(lines)
    assert read.language_tags == written.language_tags
    every_id = list(range(1, written.vocab_size))
    assert read.decode(every_id) == written.decode(every_id)
