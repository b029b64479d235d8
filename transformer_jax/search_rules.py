"""What a search is asked for: options, length rules, and the rules on which tokens may come next.

A length rule turns the sum of a hypothesis's log-probabilities into the score by which hypotheses are compared. Each
is named after where it comes from:

    hf      sum / len^alpha                             Hugging Face transformers, `generate`
    gnmt    sum / ((5 + len) / 6)^alpha                 Wu et al. 2016, eq. 14, without the coverage penalty
    marian  (sum - word_penalty * len) / len^alpha      Marian, `--normalize alpha --word-penalty`

len counts the hypothesis's own tokens, the end token included and the start token not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.array_types import Array, Bool, Float, Int
from transformer_jax.errors import UserError
from transformer_jax.sampling import Sampling


@dataclass(frozen=True)
class SearchOptions:
    """How to search: the same for all sentences, and static (each is one compiled program)."""

    end_id: int
    beam_size: int = 4
    """1 is greedy search, whatever the length rule."""
    n_best: int = 1
    """So many hypotheses per sentence are final when the search stops."""
    length_rule: str = "hf"
    """"hf", "gnmt" or "marian"."""
    length_penalty: float = 1.0
    """alpha. Above 0 long outputs gain, below 0 short ones do; at 0 the score is the sum."""
    early_stopping: bool | str = False
    """Of the hf rule, as in transformers. True: stop at `beam_size` finished hypotheses. False: stop when the best
    live one, were it to end as it is, would not enter them. "never": stop when no live one can enter them."""
    forced_end: bool = False
    """The last token within a sentence's limit is the end token, at no cost in the score (`forced_eos_token_id`)."""
    word_penalty: float = 0.0
    """Of the marian rule: subtracted per token."""
    suppressed: tuple[int, ...] = ()
    """Ids that are never chosen. The probabilities of the others stay as they are."""
    no_repeat_ngram_size: int = 0
    """No n-gram of this size occurs twice in an output; 0 allows all."""
    repetition_penalty: float = 1.0
    """Log-probabilities of tokens that occurred before are multiplied by it, in the score."""
    sampling: Sampling | None = None
    """Draw the next token instead of taking the best; with beam_size 1."""

    def __post_init__(self) -> None:
        def check(right: bool, sentence: str) -> None:
            if not right:
                raise UserError(sentence)

        alpha, penalty = self.length_penalty, self.repetition_penalty
        check(self.end_id >= 0, f"end_id is {self.end_id}; it must be the id of a token.")
        check(self.beam_size >= 1, f"beam_size is {self.beam_size}; it must be at least 1.")
        check(
            1 <= self.n_best <= self.beam_size,
            f"n_best is {self.n_best}; it must be at least 1 and at most beam_size, which is {self.beam_size}.",
        )
        check(
            self.length_rule in ("hf", "gnmt", "marian"),
            f'length_rule is {self.length_rule!r}; it must be "hf", "gnmt" or "marian".',
        )
        # Beyond that, the powers of long outputs leave the range of float32.
        check(-10 <= alpha <= 10, f"length_penalty is {alpha}; it must be between -10 and 10.")
        check(
            self.early_stopping in (False, True, "never"),
            f'early_stopping is {self.early_stopping!r}; it must be False, True or "never".',
        )
        check(
            self.early_stopping is False or self.length_rule == "hf",
            f'early_stopping belongs to length_rule "hf"; leave it out with "{self.length_rule}".',
        )
        check(
            self.word_penalty == 0 or self.length_rule == "marian",
            f'word_penalty belongs to length_rule "marian"; leave it out with "{self.length_rule}".',
        )
        check(math.isfinite(self.word_penalty), f"word_penalty is {self.word_penalty}; it must be a finite number.")
        check(
            all(i >= 0 for i in self.suppressed), f"suppressed is {self.suppressed}; it must hold ids of tokens only."
        )
        check(
            self.no_repeat_ngram_size >= 0,
            f"no_repeat_ngram_size is {self.no_repeat_ngram_size}; it must be 0 (allow all) or more.",
        )
        check(
            0 < penalty < math.inf,
            f"repetition_penalty is {penalty}; it must be above 0, where 1 is no penalty.",
        )
        check(
            self.sampling is None or self.beam_size == 1,
            f"Sampling follows one hypothesis; set beam_size to 1 instead of {self.beam_size}.",
        )


class Asked(NamedTuple):
    """What one sentence asks for and another may not."""

    start_B: Int[Array, "B"]
    """The token before the first."""
    limits_B: Int[Array, "B"]
    """At most so many tokens, the end token included."""
    min_lengths_B: Int[Array, "B"]
    """At least so many, the end token included, where the limit allows it."""
    prefix_BP: Int[Array, "B P"]
    """The first tokens, where they are given (a target prefix, a language tag)."""
    prefix_lengths_B: Int[Array, "B"]
    keys_B: Any
    """A random key per sentence, for sampling; None where nothing is drawn."""


# Length rules


def length_divisors(options: SearchOptions, length: int) -> np.ndarray:
    """(length + 1,) float32: what the sum is divided by, for outputs of 0, 1, .. length tokens.

    A table, and computed in double precision: powers on an accelerator differ in the last bits.
    """
    lengths = np.arange(length + 1, dtype=np.float64)
    if options.length_rule == "gnmt":
        lengths = (5 + lengths) / 6
    lengths[0] = 1.0  # an empty output has sum 0; 0 to a negative power would be infinite
    return (lengths**options.length_penalty).astype(np.float32)


def hypothesis_scores(sums_BC: Float[Array, "B C"], length: Array, divisors: Array, options: SearchOptions) -> Array:
    """The scores of hypotheses that have so many tokens and such sums."""
    if options.word_penalty:
        sums_BC = sums_BC - options.word_penalty * length
    return sums_BC / divisors[length]


def settled(
    best_live_B: Float[Array, "B"],
    scores_BW: Float[Array, "B W"],
    length: Array,
    limits_B: Int[Array, "B"],
    divisors: Array,
    options: SearchOptions,
) -> Bool[Array, "B"]:
    """Sentences whose search is over although live hypotheses are left.

    `best_live_B` is the highest sum of the live hypotheses, which have `length` tokens, fewer than the limit;
    `scores_BW` are those of the finished hypotheses, best first, -inf where there is none.
    """
    if options.length_rule == "marian":
        return jnp.zeros(limits_B.shape, bool)  # it goes on until no hypothesis is open
    if options.length_rule == "hf" and options.early_stopping is True:
        return scores_BW[:, -1] > -jnp.inf
    if options.length_rule == "hf" and options.early_stopping is False:
        # Not a proof: with alpha > 0 a live hypothesis can still win by growing longer.
        return best_live_B / divisors[length] <= scores_BW[:, -1]
    # gnmt and hf "never". A live hypothesis with sum s ends with a sum s' <= s <= 0, as log-probabilities are not
    # above 0 (multiplied by a repetition penalty neither), and with a length L, length < L <= limit. Its score is
    # s' / divisor(L) <= s / divisor(L). As s <= 0, that is highest where the divisor is largest: at the limit when
    # alpha > 0, at length + 1 when alpha < 0; at alpha = 0 all divisors are 1. Rounding keeps the order (float
    # addition and division are monotone), and what only equals a finished hypothesis is ranked behind it. So once
    # the n-th finished score reaches this bound, the first n are final, in their order.
    longest_or_next_B = limits_B if options.length_penalty > 0 else jnp.full_like(limits_B, length + 1)
    return best_live_B / divisors[longest_or_next_B] <= scores_BW[:, options.n_best - 1]


# Rules on the next token


def next_token_scores(
    log_probs_BWV: Float[Array, "B W V"],
    tokens_BWT: Int[Array, "B W T"],
    t: Int[Array, ""],
    asked: Asked,
    options: SearchOptions,
) -> Float[Array, "B W V"]:
    """What each token adds to the sum of its hypothesis, in the search: -inf where it may not come next.

    t tokens of each hypothesis are there. The rules apply in the order of transformers, so that the later win: a
    penalty on what occurred before; repeated n-grams, suppressed tokens and an end that comes too early; the given
    prefix; the forced end. Nothing is renormalised.
    """
    B, W, V = log_probs_BWV.shape
    scores_BWV = log_probs_BWV
    ids_V = jnp.arange(V)
    if options.repetition_penalty != 1.0 or options.no_repeat_ngram_size:
        # The start token counts as a token of the output, as it does in transformers.
        start_BW1 = jnp.broadcast_to(asked.start_B[:, None, None], (B, W, 1))
        outputs_RL = jnp.concatenate([start_BW1, tokens_BWT], axis=-1).reshape(B * W, -1)
        if options.repetition_penalty != 1.0:
            seen_BWV = seen_tokens(outputs_RL, t + 1, V).reshape(B, W, V)
            # A log-probability of 0 stays 0: transformers divides what is not negative.
            scores_BWV = jnp.where(seen_BWV, scores_BWV * options.repetition_penalty, scores_BWV)
        if options.no_repeat_ngram_size:
            repeats_RV = repeated_ngrams(outputs_RL, t + 1, options.no_repeat_ngram_size, V)
            scores_BWV = jnp.where(repeats_RV.reshape(B, W, V), -jnp.inf, scores_BWV)
    too_early_BV = (t + 1 < asked.min_lengths_B)[:, None] & (ids_V == options.end_id)
    never_V = np.isin(np.arange(V), options.suppressed)
    scores_BWV = jnp.where((too_early_BV | never_V)[:, None], -jnp.inf, scores_BWV)
    P = asked.prefix_BP.shape[1]
    if P:
        given_B1V = asked.prefix_BP[:, jnp.minimum(t, P - 1)][:, None, None] == ids_V
        forced_B11 = (t < asked.prefix_lengths_B)[:, None, None]
        scores_BWV = jnp.where(forced_B11, jnp.where(given_B1V, log_probs_BWV, -jnp.inf), scores_BWV)
    if options.forced_end:
        last_B11 = (t + 1 >= asked.limits_B)[:, None, None]
        scores_BWV = jnp.where(last_B11, jnp.where(ids_V == options.end_id, 0.0, -jnp.inf), scores_BWV)
    return scores_BWV


def seen_tokens(outputs_RL: Int[Array, "R L"], known: Int[Array, ""], V: int) -> Bool[Array, "R V"]:
    """Tokens that occur among the first `known` of each row."""
    R, L = outputs_RL.shape
    ids_RL = jnp.where(jnp.arange(L) < known, outputs_RL, V)  # V is no token, and is dropped
    return jnp.zeros((R, V), bool).at[jnp.arange(R)[:, None], ids_RL].set(True, mode="drop")


def repeated_ngrams(outputs_RL: Int[Array, "R L"], known: Int[Array, ""], n: int, V: int) -> Bool[Array, "R V"]:
    """Tokens that, after the first `known` of each row, would complete an n-gram that is there already."""
    R, L = outputs_RL.shape
    places = max(0, L - n + 1)
    # An n-gram at place i matches when its first n - 1 tokens are the last n - 1 known ones.
    matches_RI = jnp.broadcast_to(jnp.arange(places) + n <= known, (R, places))
    for j in range(min(n, L) - 1):
        recent_R1 = jax.lax.dynamic_slice_in_dim(outputs_RL, known + 1 - n + j, 1, axis=1)
        matches_RI &= outputs_RL[:, j : j + places] == recent_R1
    last_RI = outputs_RL[:, L - places :]
    ids_RI = jnp.where(matches_RI, last_RI, V)
    return jnp.zeros((R, V), bool).at[jnp.arange(R)[:, None], ids_RI].set(True, mode="drop")
