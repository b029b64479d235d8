"""Sub-words cut by chance: with no chance they are SentencePiece's own, with it they have the right distribution."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from transformer_jax.errors import UserError
from transformer_jax.sentencepiece_training import train_sentencepiece
from transformer_jax.subword_sampling import (
    Drawing,
    bpe_dropout,
    check_drawing,
    drawn_pieces,
    join_unknown,
    piece_scores,
    sample_unigram,
    scores_are_ranks,
)
from transformer_jax.tokenizer import load_processor

TEXT = [
    "The small frog sits on a stone, and the other frogs watch it.",
    "Two dogs are playing with a ball in the sand.",
    "A man in a red jacket is riding a bicycle down the street.",
    "Ein kleiner Frosch sitzt auf einem Stein; die anderen Frösche sehen zu.",
    "Zwei Hunde spielen mit einem Ball im Sand.",
] * 8
OTHERS = ["frogs and dogs", "  two   spaces ", "Größe 12,5 °C", "x", "日本 frog 語 ☃☃ dogs", "ﬁne", "a▁b"]


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_without_chance_the_pieces_are_those_of_sentencepiece(kind: str) -> None:
    """BPE with no merge left out; unigram with an exponent so high that only the likeliest cut is ever drawn."""
    tokenizer = train_sentencepiece(TEXT, 150 if kind == "bpe" else 70, model_type=kind)  # type: ignore[arg-type]
    processor = tokenizer._source.processor
    assert scores_are_ranks(piece_scores(processor)) == (kind == "bpe")
    strength = 0.0 if kind == "bpe" else 1e4
    lines = [line for line in TEXT[:5] + OTHERS if kind == "bpe" or "▁" not in line]
    for line, pieces in zip(lines, drawn_pieces(processor, lines, Drawing(strength, 1)), strict=True):
        assert pieces == processor.encode(line, out_type=str), line


def test_the_text_is_spelt_whatever_is_drawn() -> None:
    tokenizer = train_sentencepiece(TEXT, 150)
    for seed in range(5):
        drawn = tokenizer.encode_source_batch(TEXT[:5], Drawing(0.5, seed))
        assert [tokenizer.decode_source(ids) for ids in drawn] == TEXT[:5]


def test_bpe_dropout_by_hand() -> None:
    """Merges ab, then abc: at p = 1/2 'ab' survives in half of the words, and then 'abc' in half of those: 1/4; bc is
    no piece. Where ab is left out once, nothing else can be merged, and the word stays a b c."""
    scores = {"a": -9.0, "b": -9.0, "c": -9.0, "ab": -1.0, "abc": -2.0}
    rng = random.Random(0)
    found = Counter("|".join(bpe_dropout("abc", scores, 0.5, rng)) for _ in range(8000))
    assert found.keys() == {"a|b|c", "ab|c", "abc"}
    for cut, share in (("a|b|c", 0.5), ("ab|c", 0.25), ("abc", 0.25)):
        assert found[cut] / 8000 == pytest.approx(share, abs=0.02)


@pytest.mark.parametrize("alpha", [0.3, 1.0])
def test_unigram_cuts_have_the_frequencies_of_their_probabilities(alpha: float) -> None:
    """All four cuts of 'abc' by hand: a|b|c, ab|c, a|bc, abc."""
    scores = {"a": -1.0, "b": -1.5, "c": -2.0, "ab": -1.2, "bc": -2.5, "abc": -3.0}
    weights = {
        cut: math.exp(alpha * sum(scores[p] for p in cut.split("|"))) for cut in ("a|b|c", "ab|c", "a|bc", "abc")
    }
    rng = random.Random(0)
    found = Counter("|".join(sample_unigram("abc", scores, alpha, rng)) for _ in range(20_000))
    for cut, weight in weights.items():
        assert found[cut] / 20_000 == pytest.approx(weight / sum(weights.values()), abs=0.015)


def test_unknown_letters_side_by_side_are_one_piece() -> None:
    assert join_unknown(["a", "☃", "☂", "a", "☃"], {"a": 0.0}) == ["a", "☃☂", "a", "☃"]


def test_what_is_drawn_is_the_same_in_every_process(tmp_path: Path) -> None:
    train_sentencepiece(TEXT, 150).save(tmp_path)
    program = (
        "from pathlib import Path; from transformer_jax.tokenizer import load_tokenizer; "
        "from transformer_jax.subword_sampling import Drawing; "
        f"print(load_tokenizer(Path({str(tmp_path)!r})).encode_source_batch({TEXT[:3]!r}, Drawing(0.3, 5)))"
    )
    outputs = {
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    }
    assert len(outputs) == 1
    assert outputs.pop().startswith("[[")


def test_a_vocabulary_of_bytes_is_refused(tmp_path: Path) -> None:
    import sentencepiece

    (tmp_path / "text").write_text("\n".join(TEXT), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(  # type: ignore[attr-defined]
        input=str(tmp_path / "text"),
        model_prefix=str(tmp_path / "bytes"),
        vocab_size=400,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
    )
    with pytest.raises(UserError, match="does not go with a vocabulary of bytes"):
        drawn_pieces(load_processor(tmp_path / "bytes.model"), ["a"], Drawing(0.1, 0))


@pytest.mark.parametrize("option", [{"split_by_whitespace": False}, {"treat_whitespace_as_suffix": True}])
def test_a_vocabulary_whose_pieces_are_not_those_of_words_is_refused(option: dict[str, bool], tmp_path: Path) -> None:
    import sentencepiece

    (tmp_path / "text").write_text("\n".join(TEXT), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(  # type: ignore[attr-defined]
        input=str(tmp_path / "text"),
        model_prefix=str(tmp_path / "other"),
        vocab_size=150,
        model_type="bpe",
        minloglevel=2,
        **option,
    )
    processor = load_processor(tmp_path / "other.model")
    with pytest.raises(UserError, match="whose pieces are not those of words"):
        check_drawing(processor, TEXT)
    check_drawing(train_sentencepiece(TEXT, 150)._source.processor, TEXT)
