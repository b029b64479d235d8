"""samples.md: the same sentences after each evaluation, side by side and one under the other."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import Any

from transformer_jax.plots import is_number

Record = dict[str, Any]

MOST_COLUMNS = 5
"""Evaluations side by side: more would leave a sentence too little width."""


def samples_page(records: list[Record]) -> str:
    """A page in Markdown of a run's records of evaluations, in order.

    First a table with a row for each sentence and a column for some evaluations: the first, the last, the best, and
    others between them. Then for each sentence all evaluations, those that agree in one line.
    """
    stages = [r for r in records if samples_of(r)]
    if not stages:
        return "No sentence was translated during this run.\n"
    best = _best(stages)
    shown = choose_stages(len(stages), best)
    heads = [f"step {stages[i]['step']:,}{' (best)' if i == best else ''}" for i in shown]
    lines = ["# Samples", "", "## Side by side", ""]
    lines += [f"| source | {' | '.join(heads)} |", "|---|" + "---|" * len(shown)]
    sources = [source for source, _ in samples_of(stages[-1])]
    for source in sources:
        lines.append(f"| {' | '.join([_cell(source), *(_cell(_translation(stages[i], source)) for i in shown)])} |")
    lines += ["", "## Every evaluation", ""]
    for source in sources:
        lines += [f"### {_code(source)}", "", "| step | translation |", "|---:|---|"]
        for translation, alike in groupby(stages, key=lambda stage: _translation(stage, source)):
            steps = [stage["step"] for stage in alike]
            span = f"{steps[0]:,}" if len(steps) == 1 else f"{steps[0]:,} to {steps[-1]:,}"
            lines.append(f"| {span} | {_cell(translation)} |")
        lines.append("")
    return "\n".join(lines)


def choose_stages(n_stages: int, best: int | None, most: int = MOST_COLUMNS) -> list[int]:
    """Which of so many stages stand side by side: the first, the best, the last, and as many others as fit.

    Most changes early, so each of the others is halfway between the first and the next that is chosen; when no stage is
    left between these, as where the best came early, halfway between the next two.
    """
    if n_stages <= most:
        return list(range(n_stages))
    chosen = {0, n_stages - 1} | ({best} if best is not None else set())
    while len(chosen) < most:
        left, right = next((left, right) for left, right in pairwise(sorted(chosen)) if right - left > 1)
        chosen.add((left + right) // 2)
    return sorted(chosen)


def samples_of(record: Record) -> list[list[str]]:
    """The sentences of an evaluation, each with its translation; none where the record is damaged and says others."""
    samples = record.get("samples")
    return samples if isinstance(samples, list) and all(map(_is_sample, samples)) else []


def _is_sample(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(text, str) for text in value)


def _best(stages: Sequence[Record]) -> int | None:
    """The first of the highest score, whose model the run keeps; None where one has no score, or none a number."""
    scored = [i for i, stage in enumerate(stages) if is_number(stage.get("score"))]
    if not scored or any(stage.get("score") is None for stage in stages):
        return None
    return max(scored, key=lambda i: stages[i]["score"])


def _translation(stage: Record, source: str) -> str:
    """Of a sentence, or nothing where it was not asked for: a run may go on with other sentences."""
    return next((translation for asked, translation in stage["samples"] if asked == source), "")


def _code(text: str) -> str:
    """As code, in which no character is a sign of Markdown's: on one line, a backtick, which would end it, as an
    apostrophe."""
    return "`" + re.sub("[\r\n]", " ", text).replace("`", "'") + "`" if text else ""


def _cell(text: str) -> str:
    return _code(text).replace("|", "\\|")
