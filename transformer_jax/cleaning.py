"""Which pairs of lines a run trains on: rules with a count each, and the check of held-out lines.

The rules here look at text. What takes tokens to tell (too long, sides of very different length) is in `token_blocks`.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from transformer_jax.config import DataConfig
from transformer_jax.corpus import ParallelText

HeldOutRule = Literal["keep", "drop_pairs", "drop_lines"]

# Of each rule: what it removed. A pair counts under the first rule, in this order, that it falls to.
REMOVED = {
    "blank": "with a blank side",
    "identical": "with identical sides",
    "held_out": "that stand in the validation or test text",
    "duplicate": "that came before",
    "unknown_tag": "with a language tag that the vocabulary lacks",
    "unspelt": "that the vocabulary cannot spell",
    "length_ratio": "whose lengths differ too much",
    "too_long": "over the token limit",
}


@dataclass(frozen=True)
class LineRules:
    """The rules on text; all but the one on blank sides are options."""

    identical: bool = False
    """Drop pairs whose sides are the same but for space around them."""
    duplicates: bool = False
    """Drop pairs that have come before, in this corpus or an earlier one."""
    held_out: HeldOutRule = "keep"
    """drop_pairs: those that stand in a held-out text as they are. drop_lines: also those of which one side does."""

    @classmethod
    def of(cls, config: DataConfig) -> LineRules:
        return cls(config.drop_identical, config.drop_duplicates, config.held_out)


class LineFilter:
    """Says of each pair in turn which rule removes it, and notes which held-out lines it has met."""

    def __init__(self, rules: LineRules, held_out: Mapping[str, ParallelText]) -> None:
        self.rules, self.held_out = rules, held_out
        texts = held_out.values()
        self._sources = {line for text in texts for line in text.source}
        self._targets = {line for text in texts for line in text.target}
        self._pairs = {pair for text in texts for pair in zip(text.source, text.target, strict=True)}
        self._met_sources: set[str] = set()
        self._met_targets: set[str] = set()
        self._met_pairs: set[tuple[str, str]] = set()
        self._seen: set[bytes] = set()

    def removes(self, source: str, target: str) -> str | None:
        """The rule that removes the pair, a key of `REMOVED`; None: the pair is kept."""
        if not source.strip() or not target.strip():
            return "blank"
        leaks = self._meets_held_out(source, target)
        rules = self.rules
        if rules.identical and source.strip() == target.strip():
            return "identical"
        if leaks is not None and (rules.held_out == "drop_lines" or (rules.held_out == "drop_pairs" and leaks)):
            return "held_out"
        if rules.duplicates:
            digest = _short_digest(source, target)
            if digest in self._seen:
                return "duplicate"
            self._seen.add(digest)
        return None

    def _meets_held_out(self, source: str, target: str) -> bool | None:
        """None: neither side is a held-out line. True: the two are a held-out pair. False: one side is held out."""
        source_leaks, target_leaks = source in self._sources, target in self._targets
        if not (source_leaks or target_leaks):
            return None
        if source_leaks:
            self._met_sources.add(source)
        if target_leaks:
            self._met_targets.add(target)
        if source_leaks and target_leaks and (source, target) in self._pairs:
            self._met_pairs.add((source, target))
            return True
        return False

    def held_out_report(self) -> dict[str, dict[str, int]]:
        """For each held-out text how many of its lines have been met, by source, by target and as a pair."""
        return {
            name: {
                "lines": len(text),
                "sources": sum(line in self._met_sources for line in text.source),
                "targets": sum(line in self._met_targets for line in text.target),
                "pairs": sum(pair in self._met_pairs for pair in zip(text.source, text.target, strict=True)),
            }
            for name, text in self.held_out.items()
        }


def _short_digest(source: str, target: str) -> bytes:
    """Eight bytes that tell pairs apart: of ten million, two that differ share them with a chance of 3 in a million."""
    text = f"{len(source)} {source}{target}".encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=8).digest()


# --- the report ---------------------------------------------------------------------------------------------

Report = dict[str, Any]


@dataclass
class CorpusCount:
    """What became of one corpus."""

    name: str
    weight: float
    tag: str
    removed: Counter[str]
    read: int = 0
    cut: int = 0
    kept: int = 0
    seen: int = 0
    """Pairs an epoch, weights included."""

    def to_json(self) -> Report:
        return {
            "name": self.name,
            "weight": self.weight,
            "tag": self.tag,
            "read": self.read,
            "removed": {rule: self.removed[rule] for rule in REMOVED},
            "kept": self.kept,
            "cut": self.cut,
            "pairs_an_epoch": self.seen,
        }


def total_removed(report: Report) -> dict[str, int]:
    """Of each rule the pairs that it removed from all corpora, where there are any."""
    totals = {rule: sum(corpus["removed"][rule] for corpus in report["corpora"]) for rule in REMOVED}
    return {rule: n for rule, n in totals.items() if n}


def describe_report(report: Report) -> list[str]:
    """The report in lines of text: what is trained on, what was removed, and which held-out lines are among it."""
    rules = [f"{n:,} {REMOVED[rule]}" for rule, n in total_removed(report).items()]
    cut = sum(corpus["cut"] for corpus in report["corpora"])
    removed = ([f"left out: {', '.join(rules)}"] if rules else []) + ([f"cut: {cut:,} over the limit"] if cut else [])
    readings = report.get("readings", 1)
    left_out = report.get("left_out_of_readings", 0)
    ways = f" in all {readings} ways to cut them" if readings > 1 else ""
    ways += f" ({left_out:,} too long once cut so)" if left_out else ""
    lines = [
        f"text       {report['pairs']:,} pairs to train on{ways}, {report['source_tokens']:,} + "
        f"{report['target_tokens']:,} tokens" + (f" ({'; '.join(removed)})" if removed else "")
    ]
    if len(report["corpora"]) > 1 or any(corpus["weight"] != 1 or corpus["tag"] for corpus in report["corpora"]):
        for corpus in report["corpora"]:
            tag = f", tag {corpus['tag']}" if corpus["tag"] else ""
            lines.append(
                f"           {corpus['name']}: {corpus['kept']:,} of {corpus['read']:,} pairs, weight "
                f"{corpus['weight']:g}, {corpus['pairs_an_epoch']:,} an epoch{tag}"
            )
    for name, met in report["held_out"].items():
        if met["sources"] or met["targets"]:
            lines.append(
                f"warning    of {met['lines']:,} {name} lines {met['sources']:,} sources, {met['targets']:,} targets "
                f"and {met['pairs']:,} pairs stand in the training text too"
                + ("" if report["held_out_rule"] == "keep" else f" ({_DROPPED[report['held_out_rule']]})")
            )
    return lines


_DROPPED = {"drop_pairs": "equal pairs were left out of it", "drop_lines": "pairs with such a line were left out of it"}


def names_of(corpora: Sequence[CorpusCount]) -> str:
    return ", ".join(corpus.name for corpus in corpora)
