"""What the decoder's heads look at on the dates task, counted: who copies digits, who reads the month.

On this task it is known where the answer to each step stands in the source, so that a head can be asked whether it
looks there. Row t of a map is the step that writes target token t.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.array_types import Array, Int
from transformer_jax.attention import ATTENTION_WEIGHTS
from transformer_jax.errors import UserError
from transformer_jax.model import Transformer
from transformer_jax.tasks import Task, dates
from transformer_jax.tokenizer import CharacterTokenizer, Tokenizer

DATES = "dates"
# Places in the source YYYY-MM-DD and its end token.
YEAR, MONTH, DAY = (0, 1, 2, 3), (5, 6), (8, 9)
DASHES_AND_END = (4, 7, 10)

KINDS: Mapping[str, str] = {
    "digits": "digits, on the digit that they copy",
    "first_letter": "first letter of the month, on the month's digits",
    "month": "all letters of the month, on the month's digits",
    "rest": "spaces and end, on a dash or the end",
}
"""The questions, each about some tokens of the target: which, and where their strongest weight should be."""


@dataclass(frozen=True)
class HeadStatistics:
    """Shares of tokens whose strongest weight is where the answer stands, for N decoder layers with H heads."""

    shares_NH: Mapping[str, np.ndarray]
    """For each of `KINDS`."""
    counts: Mapping[str, int]
    """How many tokens each share is of."""

    def best(self, kind: str) -> tuple[int, int]:
        """Layer and head with the largest share, counted from 0."""
        layer, head = np.unravel_index(np.argmax(self.shares_NH[kind]), self.shares_NH[kind].shape)
        return int(layer), int(head)


def answers(source: str, target: str) -> list[tuple[tuple[str, ...], tuple[int, ...]]]:
    """For each token of a written date, its end token last: the kinds that it counts for, and the places in the source
    that hold what it is made from.

    The digits of the year are those of the source, in order. So are the two digits of the day; of a day that is written
    with one digit it is the second, as the 5 of 1965-10-05.
    """
    day, month, year = target.split(" ")
    if len(source) != 10 or len(year) != 4 or len(day) > 2:
        raise ValueError(f"{source!r} -> {target!r} is no pair of the dates task")
    space = (("rest",), DASHES_AND_END)
    return [
        *((("digits",), (place,)) for place in DAY[-len(day) :]),
        space,
        *((("first_letter", "month") if i == 0 else ("month",), MONTH) for i in range(len(month))),
        space,
        *((("digits",), (place,)) for place in YEAR),
        space,
    ]


def count_shares(strongest: Sequence[np.ndarray], pairs: Sequence[tuple[str, str]]) -> HeadStatistics:
    """The shares, given for each pair the source place of the largest weight, (N, H, T)."""
    right: dict[str, Any] = dict.fromkeys(KINDS, 0)
    counts = dict.fromkeys(KINDS, 0)
    for strongest_NHT, pair in zip(strongest, pairs, strict=True):
        for t, (kinds, places) in enumerate(answers(*pair)):
            found_NH = np.isin(strongest_NHT[:, :, t], places)
            for kind in kinds:
                right[kind] = right[kind] + found_NH
                counts[kind] += 1
    return HeadStatistics({kind: right[kind] / counts[kind] for kind in KINDS}, counts)


def head_statistics(
    model: Transformer, params: Any, tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]]
) -> HeadStatistics:
    """The shares over these dates, each read with the right answer given up to the token that is to be written
    (teacher forcing): so they are defined for a model that cannot write dates yet, too."""
    check_task(tokenizer)
    sources = np.asarray(tokenizer.encode_source_batch([source for source, _ in pairs]), np.int32)
    targets = tokenizer.encode_target_batch([target for _, target in pairs])
    # One shape for all: what is read after a sentence's end is looked at by nobody before it.
    inputs_BT = np.full((len(pairs), max(map(len, targets))), model.config.pad_id, np.int32)
    inputs_BT[:, 0] = model.config.start_id
    for row, target in zip(inputs_BT, targets, strict=True):
        row[1 : len(target)] = target[:-1]
    strongest_BNHT = np.asarray(_strongest(model, params, jnp.asarray(sources), jnp.asarray(inputs_BT)))
    return count_shares(list(strongest_BNHT), pairs)


@jax.jit(static_argnums=0)
def _strongest(
    model: Transformer, params: Any, source_ids_BS: Int[Array, "B S"], inputs_BT: Int[Array, "B T"]
) -> Int[Array, "B N H T"]:
    """The source place of the largest weight of every step's attention to the encoder."""
    found: Any
    _, found = model.apply({"params": params}, source_ids_BS, inputs_BT, mutable=[ATTENTION_WEIGHTS])
    layers = found[ATTENTION_WEIGHTS]["decoder"]
    weights = [layers[f"layer_{n}"]["cross_attention"]["BHTS"][0] for n in range(len(layers))]
    return jnp.stack([jnp.argmax(weights_BHTS, axis=-1) for weights_BHTS in weights], axis=1)


@functools.cache
def _task() -> Task:
    """The corpus, which always is the same; making its 73,000 pairs takes longer than asking for its letters."""
    return dates()


def check_task(tokenizer: Tokenizer) -> None:
    """The questions make sense for models of the dates task only, which are known by their alphabet: the task's
    characters and no others.

    Another task with these very characters, such as the same dates the other way round, would pass; what a run folder
    says of its training tells them apart, see `check_training`. What a model answers is not asked: that of an early
    checkpoint may be no date at all, and its heads are worth counting.
    """
    characters = _task().characters
    if (
        not isinstance(tokenizer, CharacterTokenizer)
        or tokenizer.unknown_characters("".join(characters))
        or tokenizer.vocab_size != CharacterTokenizer(characters).vocab_size
    ):
        raise _another_task("its alphabet is another")


def check_training(run: str, config: Mapping[str, Any]) -> None:
    """What the config.json of a run says that it was trained on must be the dates task; it may say nothing."""
    data = config.get("data")
    if isinstance(data, Mapping) and data.get("task", DATES) != DATES:
        task = data["task"]
        raise _another_task(f"{run} was trained on {'text from files' if task is None else f'the task {task}'}")


def _another_task(reason: str) -> UserError:
    return UserError(
        f"The model is not one of the dates task ({reason}), for which alone it is known where each answer stands; "
        "train one with python train.py."
    )


def held_out_dates(n: int) -> list[tuple[str, str]]:
    """So many of the 2,000 days that no model of the task was trained on, spread evenly over the years."""
    held_out = _task().held_out
    total = len(held_out.source)
    if not 1 <= n <= total:
        raise UserError(f"{n} dates are asked for; it must be 1 to {total:,}, as many as are held out.")
    chosen = [i * total // n for i in range(n)]
    return [(held_out.source[i], held_out.target[i]) for i in chosen]
