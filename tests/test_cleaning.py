"""What is left out of the training text, counted by hand, and which held-out lines stand in it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from transformer_jax.batching import TokenPairs
from transformer_jax.cleaning import LineFilter, LineRules, Report, describe_report, total_removed
from transformer_jax.config import DataConfig
from transformer_jax.corpus import ParallelText, scan_file
from transformer_jax.errors import UserError
from transformer_jax.pair_sources import ListedPairs, WeightedSource, copies, open_files
from transformer_jax.token_blocks import TokenRules
from transformer_jax.tokenizer import CharacterTokenizer, UnknownTagError
from transformer_jax.training_text import Indexer, TrainingText

LETTERS = CharacterTokenizer("abcdefghijklmnopqrstuvwxyz >")
PAIRS = [
    ("a", "b"),
    ("", "b"),
    ("a", " \t"),
    ("same", "same "),
    ("a", "b"),
    ("a", "c"),
    ("test line", "x"),
    ("x", "test target"),
    ("test line", "test target"),
    ("four", "fourfourf"),  # 5 and 10 tokens with the end token
    ("four", "fourfourfo"),
    ("1234", "none of it can be spelt"),
    ("abcdefghijkl", "abcdefghijkl."),
]
HELD_OUT = {
    "validation": ParallelText(["test line", "nowhere"], ["test target", "x"]),
    "test": ParallelText(["four", "four"], ["b", "vier"]),
}


def listed(pairs: list[tuple[str, str]], weight: float = 1.0, tag: str = "", name: str = "corpus") -> WeightedSource:
    return WeightedSource(ListedPairs(tuple(pairs), name), weight, tag)


def tokens_of(
    *sources: WeightedSource,
    rules: LineRules | None = None,
    tokens: TokenRules | None = None,
    limit: int | None = None,
) -> tuple[TokenPairs, Report]:
    text = TrainingText(sources, rules or LineRules(), HELD_OUT, limit)
    return Indexer(text, LETTERS, tokens or TokenRules(None), 1).in_memory()


def texts_of(pairs: TokenPairs) -> list[tuple[str, str]]:
    source, target = pairs.source, pairs.target
    return [(LETTERS.decode_source(source[i].tolist()), LETTERS.decode(target[i].tolist())) for i in range(len(pairs))]


# --- the rules ----------------------------------------------------------------------------------------------


def test_by_default_only_blank_and_unspelt_pairs_are_left_out() -> None:
    pairs, report = tokens_of(listed(PAIRS))
    assert total_removed(report) == {"blank": 2, "unspelt": 1}
    assert len(pairs) == report["pairs"] == 10


def test_each_rule_counts_what_it_removes() -> None:
    rules = LineRules(identical=True, duplicates=True, held_out="drop_pairs")
    pairs, report = tokens_of(listed(PAIRS), rules=rules, tokens=TokenRules(12, "drop", 2.0))
    assert total_removed(report) == {
        "blank": 2,
        "identical": 1,
        "held_out": 1,
        "duplicate": 1,
        "unspelt": 1,
        "length_ratio": 3,  # of 10 and 2, 2 and 12, 5 and 11 tokens
        "too_long": 1,  # 13 tokens
    }
    assert texts_of(pairs) == [("a", "b"), ("a", "c"), ("four", "fourfourf")]
    assert report["pairs"] == 13 - 10
    (corpus,) = report["corpora"]
    assert (corpus["read"], corpus["kept"], corpus["cut"]) == (13, 3, 0)


def test_lines_of_held_out_text_are_dropped_whatever_stands_beside_them() -> None:
    pairs, report = tokens_of(listed(PAIRS[:-2]), rules=LineRules(held_out="drop_lines"))
    # Held out are the sources "test line", "nowhere", "four" and the targets "test target", "x", "b", "vier".
    assert total_removed(report) == {"blank": 2, "held_out": 7}
    assert texts_of(pairs) == [("same", "same "), ("a", "c")]


def test_cut_pairs_are_kept_and_counted() -> None:
    pairs, report = tokens_of(listed(PAIRS[-1:]), tokens=TokenRules(6, "cut"))
    assert texts_of(pairs) == [("abcde", "abcde")]
    assert (total_removed(report), report["corpora"][0]["cut"]) == ({}, 1)


def test_duplicates_are_found_across_corpora_and_only_as_whole_pairs() -> None:
    first, second = listed([("a", "b"), ("ab", "c")]), listed([("a", "bc"), ("a", "b"), ("b", "a")])
    pairs, report = tokens_of(first, second, rules=LineRules(duplicates=True))
    assert texts_of(pairs) == [("a", "b"), ("ab", "c"), ("a", "bc"), ("b", "a")]
    assert [corpus["removed"]["duplicate"] for corpus in report["corpora"]] == [0, 1]


def test_a_line_with_a_tag_that_the_vocabulary_lacks_is_left_out_alone(tmp_path: Path) -> None:
    class WithTags(CharacterTokenizer):
        def encode_source(self, line: str) -> list[int]:
            if line.startswith(">>xx<<"):
                raise UnknownTagError("no such tag")
            return super().encode_source(line)

    text = TrainingText((listed([("a", "b"), (">>xx<< a", "c"), ("d", "e")]),), LineRules(), {})
    pairs, report = Indexer(text, WithTags("abcde"), TokenRules(None), 1).in_memory()
    assert len(pairs) == 2
    assert total_removed(report) == {"unknown_tag": 1}


# --- held-out lines -----------------------------------------------------------------------------------------


def test_held_out_lines_in_the_training_text_are_counted() -> None:
    _, report = tokens_of(listed(PAIRS))
    assert report["held_out"] == {
        "validation": {"lines": 2, "sources": 1, "targets": 2, "pairs": 1},
        "test": {"lines": 2, "sources": 2, "targets": 1, "pairs": 0},
    }
    warnings = [line for line in describe_report(report) if line.startswith("warning")]
    assert warnings[0] == (
        "warning    of 2 validation lines 1 sources, 2 targets and 1 pairs stand in the training text too"
    )


def test_a_blank_training_pair_leaks_nothing() -> None:
    line_filter = LineFilter(LineRules(), HELD_OUT)
    assert line_filter.removes("test line", " ") == "blank"
    assert line_filter.held_out_report()["validation"]["sources"] == 0


# --- weights, tags, limits ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weight", "expected"),
    [
        (1.0, [1, 1, 1, 1, 1, 1]),
        (2.0, [2, 2, 2, 2, 2, 2]),
        (0.5, [0, 1, 0, 1, 0, 1]),
        (2.5, [2, 3, 2, 3, 2, 3]),
        (0.3, [0, 0, 0, 1, 0, 0]),
    ],
)
def test_copies_of_a_weight(weight: float, expected: list[int]) -> None:
    assert copies(weight, 0, 6).tolist() == expected
    assert copies(weight, 0, 2).tolist() + copies(weight, 2, 4).tolist() == expected


def test_copies_are_exact_for_decimal_weights() -> None:
    """0.1 is no binary number; of a million pairs it is a hundred thousand all the same."""
    assert copies(0.1, 0, 1_000_000).sum() == 100_000
    assert copies(0.1, 9, 1).tolist() == [1]


def test_weights_and_tags_belong_to_their_corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformer_jax.training_text.BLOCK_PAIRS", 2)
    first = listed([("a", "b"), ("c", "d"), ("", "x"), ("e", "f"), ("g", "h"), ("i", "j")], 0.5)
    second = listed([("k", "l")], 2, ">>bt>>")
    pairs, report = tokens_of(first, second)
    assert texts_of(pairs) == [("c", "d"), ("g", "h"), (">>bt>> k", "l"), (">>bt>> k", "l")]
    assert [(c["read"], c["kept"], c["pairs_an_epoch"]) for c in report["corpora"]] == [(6, 5, 2), (1, 1, 2)]
    assert "weight 0.5, 2 an epoch" in describe_report(report)[1]


def test_exchanged_pairs_are_tagged_and_weighted_after_all_others() -> None:
    first, second = listed([("a", "b"), ("c", "d")]), listed([("k", "l")], 2, ">>bt>>")
    both = [first, second, *(source.exchange(0.5, ">>en>>") for source in (first, second))]
    pairs, report = tokens_of(*both)
    assert texts_of(pairs)[:4] == [("a", "b"), ("c", "d"), (">>bt>> k", "l"), (">>bt>> k", "l")]
    assert texts_of(pairs)[4:] == [(">>en>> d", "c"), (">>en>> l", "k")]
    assert [c["pairs_an_epoch"] for c in report["corpora"]] == [2, 2, 1, 1]
    assert "corpus, sides exchanged: 2 of 2 pairs, weight 0.5, 1 an epoch, tag >>en>>" in describe_report(report)[3]


def test_rules_and_limit_treat_exchanged_pairs_as_the_pairs_they_were() -> None:
    """An exchanged held-out pair leaks as much as the pair itself; the pair itself is no duplicate of it."""
    source = listed([("a", "z"), ("a", "z"), ("test line", "x"), ("c", "test target"), ("d", "e"), ("f", "g")])
    rules = LineRules(duplicates=True, held_out="drop_lines")
    pairs, report = tokens_of(source, source.exchange(1, ""), rules=rules, limit=2)
    assert texts_of(pairs) == [("a", "z"), ("d", "e"), ("z", "a"), ("e", "d")]
    plain, exchanged = report["corpora"]
    assert plain["removed"] == exchanged["removed"]
    assert (exchanged["removed"]["held_out"], exchanged["removed"]["duplicate"]) == (2, 1)


def test_weights_multiply_as_decimal_numbers() -> None:
    assert listed([], 0.1).exchange(3, "").weight == 0.3


def test_the_limit_counts_what_the_rules_on_lines_leave() -> None:
    pairs, report = tokens_of(listed([("", "x"), ("a", "b")]), listed([("c", "d"), ("e", "f")]), limit=2)
    assert texts_of(pairs) == [("a", "b"), ("c", "d")]
    assert [corpus["read"] for corpus in report["corpora"]] == [2, 1]


@pytest.mark.parametrize(
    ("pairs", "options", "complaint"),
    [
        ([("", "a")], {}, "text on both sides"),
        ([("1", "2")], {}, "knows none of the text"),
        ([("abcd", "abcd")], {"tokens": TokenRules(3)}, "longer than max_tokens, 3"),
        ([("a", "a")], {"rules": LineRules(identical=True)}, "identical"),
        ([("a", "b")], {"tokens": TokenRules(None)}, "weights"),
    ],
)
def test_a_text_of_which_nothing_is_left_says_why(
    pairs: list[tuple[str, str]], options: dict[str, object], complaint: str
) -> None:
    weight = 0.5 if complaint == "weights" else 1.0
    with pytest.raises(UserError, match=complaint):
        tokens_of(listed(pairs, weight), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"weights": (1.0, 2.0)}, "weights has 2 entries, but there are 0 corpora"),
        ({"tags": ("x",)}, "tags has 1 entries, but there are 0 corpora"),
        ({"source": (Path("a"),), "target": (Path("b"),), "weights": (0.0,)}, "above 0"),
        ({"dir": Path("d"), "tags": ("", "x")}, "tags has 2 entries, but there are 1"),
        ({"max_length_ratio": 0.5}, "max_length_ratio is 0.5"),
        ({"held_out": "drop"}, "held_out is 'drop'"),
        ({"index_processes": 0}, "index_processes is 0"),
        ({"reversed_weight": -1.0}, "reversed_weight is -1.0"),
        ({"reversed_weight": float("nan")}, "reversed_weight is nan"),
        ({"task": "dates", "reversed_weight": 1.0}, "reversed_weight is of text, but task dates"),
        ({"task": "dates", "weights": (2.0,)}, "weights is of text, but task dates"),
        ({"task": "dates", "tfds": "x"}, "named twice, by task and tfds"),
    ],
)
def test_impossible_settings_are_refused(options: dict[str, object], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        DataConfig(**options)  # type: ignore[arg-type]


# --- the report ---------------------------------------------------------------------------------------------


def test_the_report_is_plain_json_and_one_line_for_one_corpus() -> None:
    _, report = tokens_of(listed([("a", "c"), ("", "")]))
    assert json.loads(json.dumps(report)) == report
    assert describe_report(report) == ["text       1 pairs to train on, 2 + 2 tokens (left out: 1 with a blank side)"]


# --- scanning files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "n_lines"),
    [
        (b"", 0),
        (b"\xef\xbb\xbf", 0),
        (b"a", 1),
        (b"a\nb\n", 2),
        (b"a\rb\x85\xe2\x80\xa8c\n\xff", 2),
        (b"\n\n", 2),
        (b"\xef\xbb\xbf\n", 1),
    ],
)
def test_a_scan_counts_the_lines_that_are_read(tmp_path: Path, content: bytes, n_lines: int) -> None:
    (tmp_path / "plain").write_bytes(content)
    (tmp_path / "packed").write_bytes(gzip.compress(content))
    assert scan_file(tmp_path / "plain")[0] == n_lines
    assert scan_file(tmp_path / "packed") == scan_file(tmp_path / "plain")
    (tmp_path / "other").write_bytes(content + b"x")
    assert scan_file(tmp_path / "other")[1] != scan_file(tmp_path / "plain")[1]


def test_files_of_different_length_stop_with_both_counts(tmp_path: Path) -> None:
    (tmp_path / "a.en").write_bytes(b"1\n2\n3\n")
    (tmp_path / "a.de").write_bytes(b"1\n2")
    with pytest.raises(UserError, match=r"a\.en has 3 lines and .*a\.de has 2"):
        open_files(tmp_path / "a.en", tmp_path / "a.de")


def test_a_file_that_changes_while_it_is_read_is_named(tmp_path: Path) -> None:
    for name in ("a.en", "a.de"):
        (tmp_path / name).write_bytes(b"1\n2\n")
    pairs = open_files(tmp_path / "a.en", tmp_path / "a.de")
    (tmp_path / "a.de").write_bytes(b"1\n")
    with pytest.raises(UserError, match=r"changed while it was read: there were 2 lines, now there are 1"):
        list(pairs)
