"""Scores are sacreBLEU's own, with its signature; the loss of a text is per real token."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest
import sacrebleu

from transformer_jax.batching import Batch, Bucket, Ragged, TokenPairs, every_pair_once
from transformer_jax.errors import UserError
from transformer_jax.evaluation import (
    compound_split_bleu,
    exact_match,
    loss_of,
    per_token,
    score_translations,
    split_compounds,
)
from transformer_jax.loss import LossSums
from transformer_jax.sharding import data_mesh

HYPOTHESES = [
    "Ein Mann fährt mit dem Fahrrad durch die Stadt.",
    "Zwei Hunde spielen im Schnee",
    "Eine Frau liest ein Buch.",
    "Das ist richtig.",
]
REFERENCES = [
    "Ein Mann fährt auf einem Fahrrad durch die Stadt.",
    "Zwei hunde spielen im Schnee mit einem Ball.",
    "Eine Frau liest auf der Bank ein Buch.",
    "Das ist richtig.",
]


def test_scores_are_those_of_sacrebleu_itself() -> None:
    scores = score_translations(HYPOTHESES, REFERENCES, "de")
    assert scores.bleu == pytest.approx(sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES]).score, abs=1e-9)
    lowercase = sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES], lowercase=True).score
    assert scores.bleu_lowercase == pytest.approx(lowercase, abs=1e-9)
    assert lowercase > scores.bleu > 0  # "hunde"
    assert scores.chrf == pytest.approx(sacrebleu.corpus_chrf(HYPOTHESES, [REFERENCES]).score, abs=1e-9)
    assert scores.exact == 0.25


def test_signature_says_how_bleu_was_counted() -> None:
    signature = score_translations(HYPOTHESES, REFERENCES).signature
    assert "nrefs:1" in signature
    assert "case:mixed" in signature
    assert "tok:13a" in signature
    assert f"version:{sacrebleu.__version__}" in signature


def test_perfect_translations_score_100() -> None:
    scores = score_translations(REFERENCES, REFERENCES)
    assert scores.bleu == pytest.approx(100)
    assert scores.chrf == pytest.approx(100)
    assert scores.exact == 1.0


@pytest.mark.parametrize("language", ["zh", "zh-CN", "ZH_tw"])
def test_chinese_is_cut_into_characters_before_it_is_counted(language: str) -> None:
    hypotheses, references = ["我喜欢吃苹果和梨"], ["我喜欢吃香蕉和梨"]
    scores = score_translations(hypotheses, references, language)
    expected = sacrebleu.corpus_bleu(hypotheses, [references], tokenize="zh").score
    assert scores.bleu == pytest.approx(expected, abs=1e-9)
    assert "tok:zh" in scores.signature
    assert expected != pytest.approx(sacrebleu.corpus_bleu(hypotheses, [references]).score)


def test_a_tokenizer_that_is_not_installed_is_a_sentence_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import sacrebleu.metrics

    def refuse(**_: object) -> None:
        raise RuntimeError("Japanese tokenization requires extra dependencies")

    monkeypatch.setattr(sacrebleu.metrics, "BLEU", refuse)
    with pytest.raises(UserError, match=r"sacrebleu\[ja\]"):
        score_translations(["a"], ["a"], "ja")


def test_unequal_numbers_of_lines_are_refused_with_both_numbers() -> None:
    with pytest.raises(UserError, match=r"4 translations but 3 references"):
        score_translations(HYPOTHESES, REFERENCES[:3])


def test_nothing_to_score_is_refused() -> None:
    with pytest.raises(UserError, match="nothing to score"):
        score_translations([], [])


def test_compounds_are_split_at_hyphens_between_letters_only() -> None:
    assert split_compounds("rot-weiß und e-e-e") == "rot ##AT##-##AT## weiß und e ##AT##-##AT## e-e"
    assert split_compounds("er - sie -5 a-") == "er - sie -5 a-"


def test_compound_split_score_by_hand() -> None:
    """Split, both sides have six tokens, of which five are alike: the pairs `ein rot`, `rot -` and `Ball da`, the
    triple `ein rot -`, and no four in a row."""
    hypothesis, reference = ["ein rot-blauer Ball da"], ["ein rot-weißer Ball da"]
    found = compound_split_bleu(hypothesis, reference)
    split = (["ein rot ##AT##-##AT## blauer Ball da"], ["ein rot ##AT##-##AT## weißer Ball da"])
    assert found == pytest.approx(sacrebleu.corpus_bleu(split[0], [split[1]], tokenize="none", force=True).score)
    assert sacrebleu.corpus_bleu(split[0], [split[1]], tokenize="none", force=True).counts == [5, 3, 1, 0]
    assert found > sacrebleu.corpus_bleu(hypothesis, [reference]).score


def test_exact_match_is_to_the_letter() -> None:
    assert exact_match(["a", "b ", "C", "d"], ["a", "b", "c", "d"]) == 0.5


def test_per_token_values_by_hand() -> None:
    sums = LossSums(*(jnp.asarray(x) for x in (12.0, -4 * math.log(5), 3.0, 4.0)))
    values = per_token(sums)
    assert values == pytest.approx({"loss": 3.0, "perplexity": 5.0, "accuracy": 0.75}, rel=1e-6)


def test_a_hopeless_model_has_a_large_perplexity_but_no_overflow() -> None:
    sums = LossSums(*(np.asarray(x) for x in (1e6, -1e6, 0.0, 1.0)))
    assert math.isfinite(per_token(sums)["perplexity"])


def test_a_text_without_tokens_divides_by_nothing() -> None:
    assert per_token(LossSums(*(np.zeros(()) for _ in range(4)))) == {"loss": 0.0, "perplexity": 1.0, "accuracy": 0.0}


def test_loss_of_a_text_sums_over_all_batches_on_all_devices() -> None:
    """With a step that counts: every token once, however uneven the batches."""
    rng = np.random.default_rng(0)
    side = Ragged.pack([rng.integers(3, 9, rng.integers(1, 12)).tolist() for _ in range(37)])
    pairs = TokenPairs(side, side, 0, 1)
    buckets = [Bucket(16, 6, 6), Bucket(8, 12, 12)]

    def step(params: float, batch: Batch) -> LossSums:
        total = jnp.sum(batch.weights_BT)
        return LossSums(total * params, -total, jnp.sum(batch.target_outputs_BT * batch.weights_BT), total)

    for n_devices in (1, 8):
        sums = loss_of(step, 2.0, every_pair_once(pairs, buckets), data_mesh(n_devices))
        assert float(sums.tokens) == len(side.ids)
        assert float(sums.loss) == 2 * len(side.ids)
        assert float(sums.correct) == side.ids.sum()


def test_sums_over_many_batches_do_not_stop_at_the_limit_of_float32() -> None:
    """From 2^24 on float32 does not count by ones."""

    def step(_: float, batch: Batch) -> LossSums:
        return LossSums(*(jnp.sum(batch.weights_BT),) * 4)

    batches = [Batch(*(np.full((1, 1), x, np.float32),) * 8) for x in (2.0**24, 1.0, 1.0, 1.0)]
    assert float(loss_of(step, 0.0, batches, data_mesh(1)).loss) == 2.0**24 + 3
