"""Scores with their signatures: sacreBLEU, chrF, exact match, and the loss of a held-out text."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from transformer_jax.batching import Batch
from transformer_jax.errors import UserError
from transformer_jax.loss import LossSums
from transformer_jax.sharding import shard_rows

TOKENIZERS = {"zh": "zh", "ja": "ja-mecab", "ko": "ko-mecab"}
"""sacreBLEU's tokenizer by target language; 13a for all others."""


@dataclass(frozen=True)
class TranslationScores:
    """How hypotheses compare with references. BLEU and chrF run from 0 to 100, exact match from 0 to 1."""

    bleu: float
    bleu_lowercase: float
    chrf: float
    exact: float
    signature: str
    """sacreBLEU's signature of `bleu`."""


def score_translations(
    hypotheses: Sequence[str], references: Sequence[str], target_lang: str = "de"
) -> TranslationScores:
    """Detokenised lines against one reference each."""
    from sacrebleu.metrics import BLEU, CHRF  # pyright: ignore[reportPrivateImportUsage]

    if len(hypotheses) != len(references):
        raise UserError(f"{len(hypotheses)} translations but {len(references)} references; they must be as many.")
    if not hypotheses:
        raise UserError("There is nothing to score: no translation and no reference.")
    language = re.split("[-_]", target_lang.lower())[0]
    tokenize = TOKENIZERS.get(language, "13a")
    try:
        metric, lowercase = BLEU(tokenize=tokenize), BLEU(tokenize=tokenize, lowercase=True)
    except (ImportError, RuntimeError) as error:
        raise UserError(
            f"BLEU of {target_lang} needs a tokenizer that is missing; pip install 'sacrebleu[{language}]'."
        ) from error
    bleu = metric.corpus_score(hypotheses, [references]).score
    return TranslationScores(
        bleu=bleu,
        bleu_lowercase=lowercase.corpus_score(hypotheses, [references]).score,
        chrf=CHRF().corpus_score(hypotheses, [references]).score,
        exact=exact_match(hypotheses, references),
        signature=str(metric.get_signature()),
    )


def compound_split_bleu(hypotheses: Sequence[str], references: Sequence[str]) -> float:
    """BLEU as the paper counts it for German, after the script of tensor2tensor: tokenised, and words split at hyphens.

    The split makes more n-grams match, so that it comes out higher than sacreBLEU's and compares with the paper only.
    The tokenizer is 13a here, the Moses one there.
    """
    from sacrebleu.metrics import BLEU  # pyright: ignore[reportPrivateImportUsage]
    from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

    tokenizer = Tokenizer13a()
    split = [[split_compounds(tokenizer(line)) for line in side] for side in (hypotheses, references)]
    return BLEU(tokenize="none", force=True).corpus_score(split[0], [split[1]]).score


def split_compounds(line: str) -> str:
    """`rot-weiß` -> `rot ##AT##-##AT## weiß`."""
    return re.sub(r"(\S)-(\S)", r"\1 ##AT##-##AT## \2", line)


def exact_match(hypotheses: Sequence[str], references: Sequence[str]) -> float:
    """The share of lines that are equal to their reference."""
    return sum(h == r for h, r in zip(hypotheses, references, strict=True)) / len(references)


def loss_of(loss_step: Callable[[Any, Batch], LossSums], params: Any, batches: Iterable[Batch], mesh: Mesh) -> LossSums:
    """The sums over all batches, added in float64."""
    total: Any = LossSums(*[np.zeros(())] * len(LossSums._fields))  # type: ignore[arg-type]
    for batch in batches:
        sums = jax.device_get(loss_step(params, shard_rows(batch, mesh)))
        total = jax.tree.map(lambda a, b: a + np.float64(b), total, sums)
    return total


def per_token(sums: LossSums) -> dict[str, float]:
    """Loss (smoothed, nats), perplexity (unsmoothed) and accuracy per token."""
    tokens = max(float(sums.tokens), 1.0)
    return {
        "loss": float(sums.loss) / tokens,
        "perplexity": math.exp(min(-float(sums.log_likelihood) / tokens, 700.0)),
        "accuracy": float(sums.correct) / tokens,
    }
