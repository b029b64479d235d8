"""Three corpora that are made by rule: no download, and every answer is known exactly.

The held-out examples are never trained on, so that exact match on them measures the rule that the model
found, not its memory. The same seed gives the same corpus.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import date, timedelta

import numpy as np

from transformer_jax.corpus import ParallelText

N_SHOWN = 5  # held-out inputs to look at after training


@dataclass(frozen=True)
class Task:
    """A corpus with exact answers.

    Attributes:
        name: what the task is called in a configuration.
        train: the pairs to learn from.
        held_out: the pairs to be judged by; none of them is in `train`.
        characters: every character of the corpus, for `CharacterTokenizer`, which adds pad, start and end.
        show: inputs whose output is worth a look after training: some held out, and some that break the rule.
    """

    name: str
    train: ParallelText
    held_out: ParallelText
    characters: tuple[str, ...]
    show: tuple[str, ...]


# --- dates: 1965-05-10 -> 10 May 1965 -----------------------------------------------------------------------

MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
FIRST_DAY, LAST_DAY = date(1900, 1, 1), date(2099, 12, 31)

# Nothing in the training text says what to do here: years never seen, and days that no calendar has.
OUT_OF_RANGE_DATES = ("2150-07-04", "1850-11-23", "2021-02-30", "2021-13-01", "0001-01-01")


def written_date(day: date) -> str:
    """Writes a day as a person would: 10 May 1965. (`strftime` would follow the machine's language.)"""
    return f"{day.day} {MONTHS[day.month - 1]} {day.year}"


def dates(seed: int = 0) -> Task:
    """ISO dates to written ones: every day of 1900-2099, of which 2,000 are held out."""
    n_days = (LAST_DAY - FIRST_DAY).days + 1
    days = [FIRST_DAY + timedelta(days=offset) for offset in range(n_days)]
    held_out = set(np.random.default_rng(seed).choice(n_days, size=2_000, replace=False).tolist())
    return _task(
        "dates",
        train=[(day.isoformat(), written_date(day)) for index, day in enumerate(days) if index not in held_out],
        held_out=[(days[index].isoformat(), written_date(days[index])) for index in sorted(held_out)],
        also_show=OUT_OF_RANGE_DATES,
        seed=seed,
    )


# --- reversal: 314 -> 413 -----------------------------------------------------------------------------------

MIN_DIGITS, MAX_DIGITS = 3, 8
N_REVERSAL_TRAIN, N_REVERSAL_HELD_OUT = 64_000, 500


def reversal(seed: int = 0) -> Task:
    """Lists of 3 to 8 digits, read backwards: 64,000 lists to learn from and 500 held out, all different.

    Lengths are drawn evenly, so short lists are not lost among the long ones, of which there are far more.
    Repeats are skipped, and so the 1,000 lists of three digits run out on the way.
    """
    rng = np.random.default_rng(seed)
    distinct: dict[str, None] = {}  # a set that remembers the order of arrival
    while len(distinct) < N_REVERSAL_HELD_OUT + N_REVERSAL_TRAIN:
        lengths = rng.integers(MIN_DIGITS, MAX_DIGITS + 1, size=20_000)
        digits = rng.integers(0, 10, size=(20_000, MAX_DIGITS))
        for length, row in zip(lengths.tolist(), digits.tolist(), strict=True):
            distinct.setdefault("".join(map(str, row[:length])))
    pairs = [(text, text[::-1]) for text in distinct]
    return _task(
        "reversal",
        train=pairs[N_REVERSAL_HELD_OUT : N_REVERSAL_HELD_OUT + N_REVERSAL_TRAIN],
        held_out=pairs[:N_REVERSAL_HELD_OUT],
        seed=seed,
    )


# --- numbers: 142 -> one hundred forty two ------------------------------------------------------------------

BELOW_TWENTY = (
    *(
        "zero",
        "one",
        "two",
        "three",
        "four",
        "five",
        "six",
        "seven",
        "eight",
        "nine",
        "ten",
        "eleven",
        "twelve",
    ),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


def number_words(number: int) -> str:
    """Spells out a number from 0 to 999, without "and" and without hyphens."""
    if not 0 <= number <= 999:
        raise ValueError(f"number_words spells 0 to 999, not {number}")
    if number < 20:
        return BELOW_TWENTY[number]
    if number < 100:
        head, rest = TENS[number // 10], number % 10
    else:
        head, rest = f"{BELOW_TWENTY[number // 100]} hundred", number % 100
    return f"{head} {number_words(rest)}" if rest else head


def numbers(seed: int = 0) -> Task:
    """Numbers to words: 0 to 999, of which 100 are held out."""
    # 0 to 19 stay in training: they are the words that the others are made of, and too few to judge by.
    held_out = set((20 + np.random.default_rng(seed).choice(980, size=100, replace=False)).tolist())
    return _task(
        "numbers",
        train=[(str(number), number_words(number)) for number in range(1000) if number not in held_out],
        held_out=[(str(number), number_words(number)) for number in sorted(held_out)],
        seed=seed,
    )


TASKS: dict[str, Callable[..., Task]] = {"dates": dates, "reversal": reversal, "numbers": numbers}


# --- helpers ------------------------------------------------------------------------------------------------


def _task(
    name: str,
    train: Sequence[tuple[str, str]],
    held_out: Sequence[tuple[str, str]],
    seed: int,
    also_show: tuple[str, ...] = (),
) -> Task:
    shown = np.random.default_rng([seed, 1]).choice(len(held_out), size=N_SHOWN, replace=False)
    return Task(
        name=name,
        train=_parallel_text(train),
        held_out=_parallel_text(held_out),
        characters=_characters(line for pair in train for line in pair),
        show=tuple(held_out[index][0] for index in shown.tolist()) + also_show,
    )


def _parallel_text(pairs: Sequence[tuple[str, str]]) -> ParallelText:
    return ParallelText([source for source, _ in pairs], [target for _, target in pairs])


def _characters(lines: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(set().union(*map(set, lines))))
