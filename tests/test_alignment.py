"""From attention to word links: matrices small enough to do by hand."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from programs import load_program

from transformer_jax.alignment import Word, link, pharaoh, rows_of_tokens, word_weights, words_of

ROOT = Path(__file__).resolve().parents[1]

# Source: "new" in two tokens, "car", the end. Target: "neues", "Auto" in two tokens, the end.
SOURCE = words_of(["▁n", "ew", "▁car", "</s>"])
TARGET = words_of(["▁neues", "▁Au", "to", "</s>"])
CROSS = np.asarray(
    [
        [0.3, 0.3, 0.3, 0.1],
        [0.1, 0.2, 0.6, 0.1],
        [0.1, 0.1, 0.2, 0.6],
        [0.0, 0.1, 0.1, 0.8],
    ]
)


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        (["▁A", "▁t", "ul", "ip", ".", "</s>"], [("A", 0, 1), ("tulip.", 1, 5)]),
        (["A", "b", "</s>"], [("Ab", 0, 2)]),
        (["▁", "x", "▁y", "</s>"], [("x", 0, 2), ("y", 2, 3)]),
        (["▁", "▁y", "</s>"], [("y", 0, 2)]),
        ([">>fra<<", "▁a", "b", "</s>"], [(">>fra<<", 0, 1), ("ab", 1, 3)]),
        ([">>fra<<", "a", "</s>"], [(">>fra<<", 0, 1), ("a", 1, 2)]),
        (["▁a", "</s>", "b", "</s>"], [("a</s>b", 0, 3)]),
        (["▁a", "b"], [("ab", 0, 2)]),
        ([*list("3 May"), "</s>"], [("3", 0, 1), ("May", 1, 5)]),
        ([*list(" a  b "), "</s>"], [("a", 0, 2), ("b", 2, 6)]),
        ([" ", "</s>"], [("", 0, 1)]),
        (["</s>"], []),
        ([], []),
    ],
)
def test_a_word_is_what_spaces_separate(pieces: list[str], words: list[tuple[str, int, int]]) -> None:
    assert words_of(pieces) == [Word(*word) for word in words]


def test_characters_and_tokens_can_be_words_themselves() -> None:
    pieces = ["1", " ", "▁M", "</s>"]
    assert words_of(pieces, by_space=False) == [Word("1", 0, 1), Word(" ", 1, 2), Word("▁M", 2, 3)]


def test_a_word_gives_the_sum_and_takes_the_mean_of_its_tokens() -> None:
    # neues: 0.3 + 0.3 from "new". Auto: the mean of (0.1 + 0.2, 0.1 + 0.1) and of (0.6, 0.2).
    np.testing.assert_allclose(word_weights(CROSS, SOURCE, TARGET, "writes"), [[0.6, 0.3], [0.25, 0.4]])


def test_the_step_that_reads_a_token_is_one_later() -> None:
    np.testing.assert_allclose(rows_of_tokens(CROSS, "reads"), CROSS[[1, 2, 3, 3]])
    # neues is read by the step of row 1; Auto's tokens by those of rows 2 and 3.
    np.testing.assert_allclose(word_weights(CROSS, SOURCE, TARGET, "reads"), [[0.3, 0.6], [0.15, 0.15]])


def test_a_target_word_is_linked_to_the_source_word_with_the_largest_weight() -> None:
    assert link(word_weights(CROSS, SOURCE, TARGET, "writes"), SOURCE) == [(0, 0), (1, 1)]


def test_a_word_whose_weight_is_the_end_tokens_stays_alone() -> None:
    # Auto by the step that reads it: 0.15 and 0.15, and 0.7 for the end token.
    assert link(word_weights(CROSS, SOURCE, TARGET, "reads"), SOURCE) == [(1, 0)]


def test_a_language_tag_is_linked_to_nothing() -> None:
    source = words_of([">>deu<<", "▁a", "</s>"])
    assert link(np.asarray([[0.5, 0.4], [0.3, 0.6]]), source) == [(1, 1)]


def test_sides_without_words_have_no_links() -> None:
    assert link(word_weights(CROSS, SOURCE, []), SOURCE) == []
    assert link(word_weights(CROSS, [], TARGET), []) == []


def test_pharaoh_counts_from_zero_source_first() -> None:
    assert pharaoh([(0, 0), (2, 1)]) == "0-0 2-1"
    assert pharaoh([]) == ""


# --- the measure --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    return load_program(ROOT / "benchmarks" / "alignment.py")


def test_agreement_counts_sure_and_possible_links_as_och_and_ney_do(benchmark: ModuleType) -> None:
    pair = benchmark.Pair("a b c", "x y z", frozenset({(0, 0), (1, 1)}), frozenset({(0, 0), (1, 1), (2, 1)}))
    # Found: one sure, one possible, one wrong. Precision 2/3, recall 1/2, AER 1 - (1 + 2) / (3 + 2).
    found = benchmark.agreement([[(0, 0), (2, 1), (2, 2)]], [pair])
    assert found.precision == pytest.approx(2 / 3)
    assert found.recall == pytest.approx(1 / 2)
    assert found.f1 == pytest.approx(4 / 7)
    assert found.aer == pytest.approx(0.4)


def test_the_hand_aligned_pairs_name_words_that_are_there(benchmark: ModuleType) -> None:
    pairs = benchmark.read_pairs(benchmark.PAIRS)
    assert len(pairs) == 20
    for pair in pairs:
        source, target = pair.source.split(), pair.target.split()
        assert pair.sure
        assert pair.sure <= pair.possible
        assert all(i < len(source) and j < len(target) for i, j in pair.possible)
        # Every word has its link on the other side, if only a possible one.
        assert {i for i, _ in pair.possible} == set(range(len(source)))
        assert {j for _, j in pair.possible} == set(range(len(target)))
