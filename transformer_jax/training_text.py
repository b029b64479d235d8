"""What a run trains on: corpora, cleaned, mixed by weight, and turned into tokens once."""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from transformer_jax.batching import TokenPairs
from transformer_jax.cleaning import CorpusCount, LineFilter, LineRules, Report, names_of
from transformer_jax.corpus import ParallelText
from transformer_jax.errors import UserError
from transformer_jax.pair_sources import Pair, WeightedSource, copies, digest_of_pairs, total_lines
from transformer_jax.subword_sampling import Drawing
from transformer_jax.token_blocks import (
    BLOCK_PAIRS,
    TextBlock,
    TokenBlock,
    TokenRules,
    encode_blocks,
    join_blocks,
    repeat_pairs,
    usable_processes,
)
from transformer_jax.token_cache import CacheWriter, cache_key, folder_digest, open_cache
from transformer_jax.tokenizer import SentencePieceTokenizer, Tokenizer

SERIAL_LINES = 100_000
"""Up to so many lines this process encodes alone: starting others takes longer than that."""
SAMPLE_SEED = 0


@dataclass(frozen=True)
class TrainingText:
    """The corpora of a run, the rules on their lines, and the texts that should not be among them."""

    sources: tuple[WeightedSource, ...]
    rules: LineRules
    held_out: Mapping[str, ParallelText]
    limit: int | None = None
    """Of all corpora together, the first so many pairs that the rules on lines leave; of those that a teacher wrote
    anew, as many of either kind."""

    def kept(
        self, counts: Sequence[CorpusCount], line_filter: LineFilter, exchanged: bool = False
    ) -> Iterator[tuple[int, Pair]]:
        """Each pair that the rules on lines leave, its sides as they are in the text, with the number of its corpus;
        counts as it goes. `exchanged`: of the corpora whose sides are exchanged, else of the others."""
        kept: Counter[str] = Counter()
        for number, (source, count) in enumerate(zip(self.sources, counts, strict=True)):
            if source.exchanged != exchanged:
                continue
            for pair in source.pairs:
                if kept[source.rewritten] == self.limit:
                    break
                count.read += 1
                rule = line_filter.removes(*pair)
                if rule is None:
                    kept[source.rewritten] += 1
                    yield number, pair
                else:
                    count.removed[rule] += 1
        if not (kept or exchanged):
            raise _nothing_left(counts)

    def sample(self, n_lines: int) -> list[str]:
        """Lines to make a vocabulary from: all sources, then all targets; of a corpus with more lines than this, those
        of an even random sample of its pairs, the same one each time."""
        rng = random.Random(SAMPLE_SEED)
        pairs: list[Pair] = []
        for index, (_, pair) in enumerate(self.kept(self.new_counts(), self.new_filter())):
            if len(pairs) < n_lines // 2:
                pairs.append(pair)
            elif (slot := rng.randrange(index + 1)) < len(pairs):  # reservoir sampling
                pairs[slot] = pair
        return [source for source, _ in pairs] + [target for _, target in pairs]

    def blocks(
        self, counts: Sequence[CorpusCount], line_filter: LineFilter, strength: float = 0.0, reading: int = 0
    ) -> Iterator[TextBlock]:
        """The pairs that are kept, a few thousand of one corpus at a time, with the tags on their sources. With a
        `strength`, sub-words are drawn by a chance that follows from the numbers of the block and the reading."""
        block: TextBlock | None = None
        blocks = 0
        # The rules look at the sides as they are, with a filter for each direction: a pair does not duplicate itself.
        both = chain(self.kept(counts, line_filter), self.kept(counts, self.new_filter(), exchanged=True))
        for number, pair in both:
            source, target = reversed(pair) if self.sources[number].exchanged else pair
            if block is None or number != block.corpus or len(block.source) == BLOCK_PAIRS:
                if block is not None:
                    yield block
                drawn = Drawing(strength, (reading << 20) + blocks) if strength else None
                block, blocks = TextBlock(number, [], [], drawn), blocks + 1
            block.source.append(self.sources[number].tagged(source))
            block.target.append(target)
        if block is not None:
            yield block

    def new_counts(self) -> list[CorpusCount]:
        return [CorpusCount(s.name, s.weight, s.tag, Counter()) for s in self.sources]

    def new_filter(self) -> LineFilter:
        return LineFilter(self.rules, self.held_out)

    def made_from(self) -> dict[str, Any]:
        """All that the tokens and the report follow from, but for the tokenizer and its rules; plain JSON."""
        texts = {name: [text.source, text.target] for name, text in self.held_out.items()}
        held_out = {name: digest_of_pairs(zip(*sides, strict=True)) for name, sides in texts.items()}
        return {
            "corpora": [s.made_from() for s in self.sources],
            "line_rules": asdict(self.rules),
            "held_out": held_out,
            "limit": self.limit,
        }


@dataclass(frozen=True)
class Indexer:
    """Turns a training text into tokens, in memory or in a cache."""

    text: TrainingText
    tokenizer: Tokenizer
    rules: TokenRules
    start_id: int
    processes: int | None = None
    """How many share the work; None: one, and for a large text one per processor."""
    say: Callable[[str], object] = lambda _: None

    def in_memory(self) -> tuple[TokenPairs, Report]:
        """For corpora that are made by rule, each time anew."""
        counts, line_filter = self.text.new_counts(), self.text.new_filter()
        blocks = list(self._blocks(counts, line_filter, None))
        source, target = join_blocks([b.source for b in blocks]), join_blocks([b.target for b in blocks])
        pairs = TokenPairs(source, target, self.tokenizer.pad_id, self.start_id)
        return pairs, self._report(counts, line_filter, len(pairs), len(source.ids), len(target.ids))

    def key(self, tokenizer_folder: Path) -> str:
        """The name of the cache folder: another with any change of the text, the rules or the tokenizer."""
        return cache_key(
            **self.text.made_from(),
            token_rules=asdict(self.rules),
            tokenizer=folder_digest(tokenizer_folder),
            pad_id=self.tokenizer.pad_id,
            start_id=self.start_id,
        )

    def build(self, folder: Path, tokenizer_folder: Path) -> None:
        """Makes the cache folder, unless it is there and whole."""
        if open_cache(folder) is not None:
            return
        counts, line_filter = self.text.new_counts(), self.text.new_filter()
        began = time.monotonic()
        with CacheWriter(folder, max(self.tokenizer.vocab_size, self.tokenizer.source_vocab_size)) as writer:
            for block in self._blocks(counts, line_filter, tokenizer_folder):
                writer.add(block)
            report = self._report(counts, line_filter, writer.pairs, *writer.tokens.values())
            writer.finish(self.tokenizer.pad_id, self.start_id, report)
        seconds = time.monotonic() - began
        read = sum(count.read for count in counts)
        if read > SERIAL_LINES:
            self.say(
                f"tokens     {read:,} pairs of lines in {seconds:.0f} s ({read / seconds:,.0f} a second): {folder}"
            )

    def read(self, folder: Path) -> tuple[TokenPairs, Report]:
        """The tokens of a cache folder that `build` made, and their report."""
        found = open_cache(folder)
        if found is None:
            raise UserError(f"{folder} holds no tokens: all processes must see the same files; is it on a shared disk?")
        pairs, report = found
        for corpus, source in zip(report["corpora"], self.text.sources, strict=True):
            corpus["name"] = source.name  # the same text may have had another name when it was read
        return pairs, report

    def _blocks(
        self, counts: Sequence[CorpusCount], line_filter: LineFilter, tokenizer_folder: Path | None
    ) -> Iterator[TokenBlock]:
        """All blocks, cleaned, counted and weighted."""
        from tqdm import tqdm

        self._check()
        n_lines, rules = total_lines(self.text.sources), self.rules
        processes = self.processes or (usable_processes() if n_lines * rules.readings > SERIAL_LINES else 1)
        shown = sys.stderr.isatty() and n_lines * rules.readings > SERIAL_LINES // 10
        with tqdm(total=n_lines * rules.readings, desc="text to tokens", unit=" pairs", disable=not shown) as bar:
            for reading in range(rules.readings):
                # What is counted is the text, not how often it is read.
                of_reading = counts if reading == 0 else self.text.new_counts()
                of_lines = line_filter if reading == 0 else self.text.new_filter()
                blocks = self.text.blocks(of_reading, of_lines, rules.sampling if reading else 0.0, reading)
                for block in encode_blocks(blocks, self.tokenizer, rules, folder=tokenizer_folder, processes=processes):
                    count = of_reading[block.corpus]
                    count.removed.update(block.removed)
                    count.cut += block.cut
                    times = copies(count.weight, count.kept, len(block.source))
                    count.kept += len(block.source)
                    count.seen += int(times.sum())
                    bar.update(n_lines * reading + sum(c.read for c in of_reading) - bar.n)
                    yield repeat_pairs(block, times)
        if not sum(count.seen for count in counts):
            raise _nothing_left(counts, self.rules.max_tokens)

    def _check(self) -> None:
        """What would otherwise leave out a whole corpus, line by line, or all readings but one."""
        for source in self.text.sources:
            if source.tag:
                self.tokenizer.encode_source(source.tagged("a"))
            if source.exchanged and isinstance(self.tokenizer, SentencePieceTokenizer) and not self.tokenizer.joint:
                raise UserError(
                    "The tokenizer has a vocabulary for each language, so it cannot read the target language: set "
                    "data.reversed_weight to 0, or take a joint vocabulary."
                )
        if self.rules.readings > 1:
            if not isinstance(self.tokenizer, SentencePieceTokenizer):
                raise UserError("subword_sampling cuts sub-words, but the vocabulary is of characters; set it to 0.")
            kept = self.text.kept(self.text.new_counts(), self.text.new_filter())
            tried = [pair for _, (_, pair) in zip(range(200), kept, strict=False)]
            self.tokenizer.check_drawing([s for s, _ in tried], [t for _, t in tried])

    def _report(
        self,
        counts: Sequence[CorpusCount],
        line_filter: LineFilter,
        n_pairs: int,
        source_tokens: int,
        target_tokens: int,
    ) -> Report:
        return {
            "pairs": n_pairs,
            "source_tokens": source_tokens,
            "target_tokens": target_tokens,
            "corpora": [count.to_json() for count in counts],
            "held_out": line_filter.held_out_report(),
            "held_out_rule": self.text.rules.held_out,
            "max_tokens": self.rules.max_tokens,
            "readings": self.rules.readings,
            # Cut in another way, a pair may have too many tokens, and is left out of that reading.
            "left_out_of_readings": self.rules.readings * sum(count.seen for count in counts) - n_pairs,
        }


def _nothing_left(counts: Sequence[CorpusCount], max_tokens: int | None = None) -> UserError:
    """Why no pair is left: by the rule that took the most, since the user will want to change that."""
    removed: Counter[str] = sum((count.removed for count in counts), Counter())
    names = names_of(counts)
    rule = max(removed, key=removed.__getitem__, default="")
    if any(count.kept for count in counts):
        return UserError(f"The weights of {names} are so low that no pair is seen: raise data.weights.")
    if rule == "unspelt":
        return UserError(f"The tokenizer knows none of the text in {names}: it does not belong to it; name another.")
    if rule == "too_long":
        return UserError(
            f"No sentence pair is left: those in {names} are longer than max_tokens, {max_tokens}; raise it."
        )
    if rule == "unknown_tag":
        return UserError(
            f"The lines of {names} begin with language tags that the vocabulary does not have: use those that it has."
        )
    if rule in ("", "blank"):
        return UserError(f"No pair of lines in {names} has text on both sides: check that these are the right files.")
    return UserError(f"The rule on {rule} pairs leaves no pair of lines in {names}: leave it out, or give other text.")
