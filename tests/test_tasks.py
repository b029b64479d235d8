"""The corpora made by rule: their sizes, their answers, and that nothing held out is trained on."""

import pytest

from transformer_jax.tasks import TASKS, Task, number_words, numbers
from transformer_jax.tokenizer import CharacterTokenizer


@pytest.fixture(scope="module")
def made() -> dict[str, Task]:
    return {name: make(seed=0) for name, make in TASKS.items()}


@pytest.fixture(params=sorted(TASKS))
def task(request: pytest.FixtureRequest, made: dict[str, Task]) -> Task:
    return made[request.param]


def _answers(task: Task) -> dict[str, str]:
    return {
        source: target
        for text in (task.train, task.held_out)
        for source, target in zip(text.source, text.target, strict=True)
    }


def test_no_held_out_example_is_trained_on_and_none_occurs_twice(task: Task):
    sources = [*task.train.source, *task.held_out.source]
    assert len(set(sources)) == len(sources)


def test_the_same_seed_gives_the_same_corpus_and_another_seed_another(task: Task):
    assert TASKS[task.name]() == task
    assert TASKS[task.name](seed=1).held_out.source != task.held_out.source


def test_every_character_has_an_id(task: Task):
    tokenizer = CharacterTokenizer(task.characters)
    everything = "".join(line for pair in _answers(task).items() for line in pair)
    assert not tokenizer.unknown_characters(everything)


def test_most_inputs_to_show_are_held_out(task: Task):
    assert len(set(task.show) & set(task.held_out.source)) == 5
    assert not set(task.show) & set(task.train.source)


def test_dates_are_all_days_of_two_centuries_in_41_tokens(made: dict[str, Task]):
    task = made["dates"]
    assert (len(task.train), len(task.held_out)) == (73_049 - 2_000, 2_000)
    assert CharacterTokenizer(task.characters).vocab_size == 41
    every_day = sorted([*task.train.source, *task.held_out.source])
    assert (every_day[0], every_day[-1]) == ("1900-01-01", "2099-12-31")
    assert len(set(every_day)) == 73_049


@pytest.mark.parametrize(
    ("iso", "written"),
    [
        ("1965-05-10", "10 May 1965"),
        ("1900-01-01", "1 January 1900"),
        ("2000-02-29", "29 February 2000"),
        ("2099-12-31", "31 December 2099"),
        ("1999-09-09", "9 September 1999"),
    ],
)
def test_a_date_is_written_out(made: dict[str, Task], iso: str, written: str):
    assert _answers(made["dates"])[iso] == written


def test_dates_show_inputs_that_no_rule_covers(made: dict[str, Task]):
    assert made["dates"].show[-5:] == ("2150-07-04", "1850-11-23", "2021-02-30", "2021-13-01", "0001-01-01")


def test_reversal_has_500_held_out_lists_of_three_to_eight_digits_in_13_tokens(made: dict[str, Task]):
    task = made["reversal"]
    assert (len(task.train), len(task.held_out)) == (64_000, 500)
    assert CharacterTokenizer(task.characters).vocab_size == 13
    assert {len(source) for source in task.train.source} == {3, 4, 5, 6, 7, 8}
    assert {len(source) for source in task.held_out.source} == {3, 4, 5, 6, 7, 8}


def test_reversal_answers_read_the_list_backwards(made: dict[str, Task]):
    for source, target in _answers(made["reversal"]).items():
        assert list(source) == list(reversed(target))


def test_numbers_are_0_to_999_with_100_held_out(made: dict[str, Task]):
    task = made["numbers"]
    assert (len(task.train), len(task.held_out)) == (900, 100)
    assert {int(source) for source in _answers(task)} == set(range(1000))
    assert _answers(task)["142"] == "one hundred forty two"


@pytest.mark.parametrize("seed", range(20))
def test_the_words_that_others_are_made_of_are_always_learned(seed: int):
    words = [number_words(number) for number in range(20)]
    assert "zero" in words
    assert set(words) <= set(numbers(seed).train.target)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, "zero"),
        (7, "seven"),
        (13, "thirteen"),
        (19, "nineteen"),
        (20, "twenty"),
        (40, "forty"),
        (99, "ninety nine"),
        (100, "one hundred"),
        (105, "one hundred five"),
        (142, "one hundred forty two"),
        (611, "six hundred eleven"),
        (850, "eight hundred fifty"),
        (999, "nine hundred ninety nine"),
    ],
)
def test_a_number_is_spelled_out(number: int, words: str):
    assert number_words(number) == words


@pytest.mark.parametrize("number", [-1, 1000])
def test_numbers_that_cannot_be_spelled_are_refused(number: int):
    with pytest.raises(ValueError, match=str(number)):
        number_words(number)
