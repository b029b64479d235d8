"""Where sentence pairs come from, one pair at a time: a corpus need not fit in memory.

A `PairSource` gives its pairs in the same order whenever it is asked, and a digest of them. A `WeightedSource` says
how often a run sees them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

import numpy as np

from transformer_jax.corpus import check_line_counts, iterate_file, read_file_pair, scan_file
from transformer_jax.errors import UserError

Pair = tuple[str, str]


@runtime_checkable
class PairSource(Protocol):
    """Sentence pairs in a fixed order, blank ones included."""

    @property
    def name(self) -> str:
        """What messages and reports call it."""
        ...

    @property
    def digest(self) -> str:
        """Changes with any of the pairs."""
        ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Pair]: ...


@dataclass(frozen=True)
class ListedPairs:
    """Pairs in memory."""

    pairs: tuple[Pair, ...]
    name: str

    @property
    def digest(self) -> str:
        return digest_of_pairs(self.pairs)

    def __len__(self) -> int:
        return len(self.pairs)

    def __iter__(self) -> Iterator[Pair]:
        return iter(self.pairs)


@dataclass(frozen=True)
class FilePairs:
    """The lines of two text files, plain or gzipped; made by `open_files`."""

    source: Path
    target: Path
    n_lines: int
    digest: str

    @property
    def name(self) -> str:
        return f"{self.source} + {self.target.name}"

    def __len__(self) -> int:
        return self.n_lines

    def __iter__(self) -> Iterator[Pair]:
        n = 0
        for pair in zip(iterate_file(self.source, "replace"), iterate_file(self.target, "replace"), strict=False):
            n += 1
            yield pair
        if n != self.n_lines:
            raise UserError(
                f"{self.source} or {self.target} changed while it was read: there were {self.n_lines} lines, now there "
                f"are {n}; start again when the files are whole."
            )


def open_files(source: Path, target: Path) -> PairSource:
    """A pair of text files as a source, after both have been read once: their line counts are equal."""
    scans: list[tuple[int, str]] = []
    for path in (source, target):
        if path.exists() and not path.is_file() and not path.is_dir():
            # A pipe can be read once only, so it is kept in memory.
            pairs = tuple(read_file_pair(source, target))
            return ListedPairs(pairs, f"{source} + {target.name}")
        scans.append(scan_file(path))
    (n_source, source_digest), (n_target, target_digest) = scans
    check_line_counts(source, n_source, target, n_target)
    return FilePairs(source, target, n_source, f"{source_digest} {target_digest}")


def digest_of_pairs(pairs: Iterable[Pair]) -> str:
    """sha256 of the pairs' texts, in order."""
    digest = hashlib.sha256()
    for pair in pairs:
        for text in pair:
            line = text.encode("utf-8", "surrogatepass")
            digest.update(len(line).to_bytes(8, "little"))
            digest.update(line)
    return digest.hexdigest()


@dataclass(frozen=True)
class WeightedSource:
    """A corpus, how many times an epoch sees it, and a text that is put before each of its sources."""

    pairs: PairSource
    weight: float = 1.0
    tag: str = ""
    exchanged: bool = False
    """Each pair's target is the source, and its source the target."""
    rewritten: Literal["", "target", "source"] = ""
    """The side that a teacher wrote; '': none."""

    @property
    def name(self) -> str:
        return f"{self.pairs.name}, sides exchanged" if self.exchanged else self.pairs.name

    def exchange(self, weight: float, tag: str) -> WeightedSource:
        """The same pairs in the other direction, `weight` times as often."""
        return replace(self, weight=times(self.weight, weight), tag=tag, exchanged=not self.exchanged)

    def made_from(self) -> list[str | float]:
        """All that the pairs of an epoch follow from, as plain values."""
        kind = ["exchanged"] * self.exchanged + [f"new {self.rewritten}"] * bool(self.rewritten)
        return [self.pairs.digest, self.weight, self.tag, *kind]

    def tagged(self, source: str) -> str:
        return f"{self.tag} {source}" if self.tag else source


def times(weight: float, factor: float) -> float:
    """A weight `factor` times as large: the product of the two decimal numbers, so that `copies` is exact."""
    return float(Fraction(str(weight)) * Fraction(str(factor)))


def copies(weight: float, first: int, n: int) -> np.ndarray:
    """How often an epoch sees each of the pairs `first` to `first + n` of a corpus of this weight.

    Pair i is seen floor((i + 1) weight) - floor(i weight) times: of weight 2 each pair twice, of weight 0.5 every
    second pair once, the same ones in every epoch, and of 2.5 two and three times in turn. Exact for any weight that
    a decimal number says, since it is taken as a fraction.
    """
    exact = Fraction(str(weight))
    bounds = [i * exact.numerator // exact.denominator for i in range(first, first + n + 1)]
    return np.diff(np.asarray(bounds, np.int64))


def total_lines(sources: Sequence[WeightedSource]) -> int:
    """Lines of all sources, blank ones included."""
    return sum(len(source.pairs) for source in sources)
