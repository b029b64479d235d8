"""samples.md: the same sentences after each evaluation."""

from __future__ import annotations

import math
from typing import Any

import pytest

from transformer_jax.samples_page import choose_stages, samples_page

STAGES = [
    {"step": 10, "score": 0.1, "samples": [["A dog.", "Ein"], ["A cat.", "Ein"]]},
    {"step": 15},
    {"step": 20, "score": 0.9, "samples": [["A dog.", "Ein Hund."], ["A cat.", "Eine Katze."]]},
    {"step": 1030, "score": 0.9, "samples": [["A dog.", "Ein Hund."], ["A cat.", "Die Katze."]]},
]


def test_sentences_stand_beside_their_translations_after_each_stage() -> None:
    overview = samples_page(STAGES).split("## Every evaluation")[0]
    assert overview == (
        "# Samples\n\n## Side by side\n\n"
        "| source | step 10 | step 20 (best) | step 1,030 |\n"
        "|---|---|---|---|\n"
        "| `A dog.` | `Ein` | `Ein Hund.` | `Ein Hund.` |\n"
        "| `A cat.` | `Ein` | `Eine Katze.` | `Die Katze.` |\n\n"
    )


def test_every_evaluation_is_there_and_those_that_agree_share_a_line() -> None:
    dog, cat = samples_page(STAGES).split("### ")[1:]
    assert dog.startswith("`A dog.`\n")
    assert dog.split("|---:|---|\n")[1] == "| 10 | `Ein` |\n| 20 to 1,030 | `Ein Hund.` |\n\n"
    assert cat.split("|---:|---|\n")[1] == "| 10 | `Ein` |\n| 20 | `Eine Katze.` |\n| 1,030 | `Die Katze.` |\n"


@pytest.mark.parametrize(
    ("n", "best", "chosen"),
    [
        (3, 1, [0, 1, 2]),
        (5, None, [0, 1, 2, 3, 4]),
        (12, 11, [0, 1, 2, 5, 11]),
        (100, 60, [0, 15, 30, 60, 99]),
        (100, None, [0, 12, 24, 49, 99]),
        (100, 1, [0, 1, 25, 50, 99]),
        (100, 2, [0, 1, 2, 50, 99]),
        (100, 0, [0, 12, 24, 49, 99]),
        (6, 4, [0, 1, 2, 4, 5]),
        (6, 1, [0, 1, 2, 3, 5]),
        (7, 5, [0, 1, 2, 5, 6]),
    ],
)
def test_of_many_stages_the_first_best_last_and_early_ones_are_chosen(
    n: int, best: int | None, chosen: list[int]
) -> None:
    assert choose_stages(n, best) == chosen


def test_every_column_is_filled_whenever_the_best_came() -> None:
    for n in range(1, 30):
        for best in (None, *range(n)):
            for most in range(3, 7):
                chosen = choose_stages(n, best, most)
                assert len(set(chosen)) == len(chosen) == min(n, most)
                assert {0, n - 1, n - 1 if best is None else best} <= set(chosen) <= set(range(n))


def test_no_stage_is_called_the_best_where_nothing_was_scored() -> None:
    page = samples_page([{"step": 1, "samples": [["a", "b"]]}, {"step": 2, "samples": [["a", "b"]]}])
    assert "| source | step 1 | step 2 |" in page


@pytest.mark.parametrize("score", [math.nan, math.inf, True, "0.9", 10**400], ids=lambda score: str(score)[:4])
def test_a_score_that_is_no_number_is_not_the_best(score: Any) -> None:
    sentences = [["a", "b"]]
    scores = (score, 0.5, 0.75)
    page = samples_page([{"step": n, "score": s, "samples": sentences} for n, s in enumerate(scores, 1)])
    assert "| source | step 1 | step 2 | step 3 (best) |" in page
    assert "(best)" not in samples_page([{"step": 1, "score": score, "samples": sentences}])


@pytest.mark.parametrize("samples", [3, {"a": "b"}, ["ab"], [["a"]], [["a", 3]], [[["a"], "b"]]], ids=repr)
def test_samples_of_a_damaged_record_are_left_out(samples: Any) -> None:
    whole = {"step": 2, "score": 1.0, "samples": [["a", "b"]]}
    assert samples_page([{"step": 1, "score": 2.0, "samples": samples}, whole]) == samples_page([whole])


def test_the_tables_stay_whole_whatever_a_translation_holds() -> None:
    page = samples_page([{"step": 1, "samples": [["a|b `c`\nd", "x|y `z`\nw <b> \r"], ["empty", ""]]}])
    assert "| 1 | `x\\|y 'z' w <b>  ` |" in page
    assert "| `a\\|b 'c' d` | `x\\|y 'z' w <b>  ` |" in page
    assert "| 1 |  |" in page
    headings = [line for line in page.split("\n") if line.startswith("### ")]
    assert headings == ["### `a|b 'c' d`", "### `empty`"]
    assert page.count("`") % 2 == 0


def test_sentences_that_were_added_later_are_empty_before() -> None:
    page = samples_page([{"step": 1, "samples": [["a", "b"]]}, {"step": 2, "samples": [["a", "b"], ["c", "d"]]}])
    assert "| `c` |  | `d` |" in page


def test_sentences_in_another_order_keep_their_translations() -> None:
    stages = [
        {"step": 1, "samples": [["a cat", "eine Katze"], ["a dog", "ein Hund"]]},
        {"step": 2, "samples": [["a dog", "der Hund"], ["a cat", "die Katze"]]},
    ]
    rows = [line for line in samples_page(stages).split("\n") if line.startswith("| `a ")]
    assert rows == ["| `a dog` | `ein Hund` | `der Hund` |", "| `a cat` | `eine Katze` | `die Katze` |"]


def test_a_run_without_samples_says_so() -> None:
    assert "No sentence" in samples_page([{"step": 1, "score": 0.5}])
