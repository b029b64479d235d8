"""Ranking by both directions: the sum worked out by hand, the tags of a model of both, and what cannot be ranked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax import cli
from transformer_jax.config import DataConfig, DecodeConfig, ModelConfig, RunConfig, TrainConfig
from transformer_jax.dry_run import describe
from transformer_jax.errors import UserError
from transformer_jax.hypotheses import Hypothesis, translation_of
from transformer_jax.model import Transformer
from transformer_jax.model_folder import save_model
from transformer_jax.reranking import Backward, rerank
from transformer_jax.run_model import fit_model
from transformer_jax.sentencepiece_training import train_sentencepiece
from transformer_jax.sharding import data_mesh
from transformer_jax.tokenizer import SentencePieceTokenizer
from transformer_jax.trainer import Trainer
from transformer_jax.translator import Translator

TOKENIZER = train_sentencepiece(
    ["abc def", "a b c d e f", "xyz"] * 3, 26, tags=(">>en<<",), source_lang="en", target_lang="de"
)
CONFIG = fit_model(
    ModelConfig(vocab_size=26, d_model=16, n_heads=2, d_ff=32, n_encoder_layers=1, n_decoder_layers=1, max_length=24),
    TOKENIZER,
)
SEARCH = DecodeConfig(beam_size=4, n_best=4, extra_length=4, batch_tokens=256)
LINES = ["abc", "d e f", "", "xyz a", "fed cba abc", "a"]
WEIGHT = 0.7


def random_params(seed: int) -> Any:
    """Weights so large that outputs and their order depend on the source."""
    ids = jnp.ones((1, 1), jnp.int32)
    params = Transformer(CONFIG).init(jax.random.key(seed), ids, ids)["params"]
    return jax.tree.map(lambda leaf: np.asarray(4 * leaf if leaf.ndim > 1 else leaf), params)


def make_translator(seed: int, backward: Backward | None = None, tokenizer: Any = TOKENIZER) -> Translator:
    return Translator(Transformer(CONFIG), random_params(seed), tokenizer, SEARCH, data_mesh(1), backward=backward)


@pytest.fixture(scope="module")
def back() -> Translator:
    return make_translator(1)


@pytest.fixture(scope="module")
def forward(back: Translator) -> Translator:
    return make_translator(0, Backward(back, ""))


@pytest.mark.parametrize(
    ("rule", "alpha", "penalty"),
    [("hf", 1.0, 0.0), ("hf", 0.0, 0.0), ("gnmt", 0.6, 0.0), ("marian", 0.5, 0.2)],
    ids=["hf", "sums", "gnmt of the paper", "marian"],
)
def test_the_score_of_the_source_is_added_by_the_same_length_rule(
    rule: str, alpha: float, penalty: float, forward: Translator, back: Translator
) -> None:
    asked = {"length_rule": rule, "length_penalty": alpha, "word_penalty": penalty}
    plain = forward.translate(LINES, **asked)
    ranked = forward.translate(LINES, **asked, rerank_weight=WEIGHT)
    n_changed = 0
    for line, before, after in zip(LINES, plain, ranked, strict=True):
        if not line:
            assert (after.text, after.source_log_prob) == ("", 0.0)
            continue
        by_hand = []
        for h in before.n_best:
            (source,) = back.score([h.text], [line])
            n = len(source.token_log_probs)
            divisor = ((5 + n) / 6) ** alpha if rule == "gnmt" else n**alpha
            of_source = (source.log_prob - penalty * n) / divisor
            by_hand.append((h.score + WEIGHT * of_source, source.log_prob, h.tokens))
        by_hand.sort(key=lambda entry: -entry[0])
        assert [h.tokens for h in after.n_best] == [tokens for *_, tokens in by_hand]
        found = [(h.score, h.source_log_prob) for h in after.n_best]
        np.testing.assert_allclose(np.array(found), [entry[:2] for entry in by_hand], rtol=1e-4)
        assert (after.text, after.score) == (after.n_best[0].text, after.n_best[0].score)
        n_changed += after.tokens != before.tokens
    assert n_changed


def test_the_best_comes_from_the_whole_beam_however_few_are_asked_for(forward: Translator) -> None:
    several = forward.translate(LINES, rerank_weight=WEIGHT)
    one = forward.translate(LINES, rerank_weight=WEIGHT, n_best=1)
    assert [t.tokens for t in one] == [t.tokens for t in several]
    assert {len(t.n_best) for t in one} == {1}


def test_the_programs_that_rank_are_counted_and_few(back: Translator) -> None:
    both = make_translator(1)
    both.translate(LINES, rerank_weight=WEIGHT)
    n = both.n_programs()
    both.translate([*LINES * 20, "a b c d e f a b c d e f"], rerank_weight=WEIGHT)
    assert 3 <= n <= both.n_programs() <= 3 * 2 + 2  # rooms of 16 and 24 tokens; of each a scoring program


def test_without_a_weight_nothing_is_asked_of_the_other_direction(
    forward: Translator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Translator, "score_tokens", None)
    assert {h.source_log_prob for t in forward.translate(LINES) for h in t.n_best} == {None}


def test_the_parts_of_a_long_line_are_ranked_by_themselves(forward: Translator) -> None:
    parts = ["a b c d e f a b c", "x y z x y z a b c"]
    line = " ".join(parts)
    joined = forward.translate([line], rerank_weight=WEIGHT)[0]
    found = forward.translate(parts, rerank_weight=WEIGHT)
    assert joined.text == " ".join(t.text for t in found)
    assert joined.score == pytest.approx(sum(t.score for t in found), rel=1e-4)
    assert joined.source_log_prob == pytest.approx(sum(t.source_log_prob or 0 for t in found), rel=1e-4)


def hypothesis(text: str, score: float = 0.0) -> Hypothesis:
    return Hypothesis(text, score, score, (), ())


class Asked:
    """Stands for a model: notes which lines it is asked to translate back, and to what."""

    def __init__(self, tokenizer: SentencePieceTokenizer) -> None:
        self.tokenizer, self.model = tokenizer, Transformer(CONFIG)
        self.pairs: list[tuple[str, str]] = []
        self.ids: Any = []

    def score_tokens(self, pairs: Any, batch_tokens: int) -> Any:
        self.ids, pieces = pairs, self.tokenizer.pieces_of
        self.pairs = [("".join(pieces(x)[:-1]), "".join(pieces(y)[:-1])) for x, y in pairs]
        return make_translator(1).score_tokens(pairs, batch_tokens)


@pytest.mark.parametrize(
    ("source", "output", "tag", "asked"),
    [
        ("abc", "def", "", ("▁def", "▁abc")),
        ("abc", "def", ">>en<<", (">>en<<▁def", "▁abc")),
        (">>en<< abc", "def", ">>en<<", ("▁def", "▁abc")),
        (">>en<< abc", "def", "", ("▁def", "▁abc")),
        ("abc", ">>en<< def", "", ("▁e▁def", "▁abc")),  # what of it the vocabulary can spell
    ],
    ids=["another model", "there", "and back", "a tag of the model that translates", "text like a tag"],
)
def test_the_way_back_has_the_tag_of_its_language(
    source: str, output: str, tag: str, asked: tuple[str, str], back: Translator
) -> None:
    model = Asked(TOKENIZER)
    config = DecodeConfig(beam_size=2, rerank_weight=1.0)
    rerank([source], [(hypothesis(output),)], TOKENIZER.language_tags, (model, tag), config)  # type: ignore[arg-type]
    assert [(x.replace("<unk>", ""), y) for x, y in model.pairs] == [asked]


def test_equal_hypotheses_keep_their_order_and_are_asked_for_once(back: Translator) -> None:
    model = Asked(TOKENIZER)
    twice = (hypothesis("abc", -1.0), hypothesis("abc", -1.0), hypothesis("abc", -0.5))
    config = DecodeConfig(beam_size=3, rerank_weight=1.0)
    (found,) = rerank(["def"], [twice], (), (model, ""), config)  # type: ignore[arg-type]
    assert [h.log_prob for h in found] == [-0.5, -1.0, -1.0]
    assert len(model.pairs) == 1


def test_what_is_beyond_a_limit_of_the_way_back_does_not_count() -> None:
    """Of a line that is cut the end token is kept, as in translating."""
    model = Asked(TOKENIZER)
    config = DecodeConfig(beam_size=2, rerank_weight=1.0)
    rerank(["a" * 60], [(hypothesis("b" * 60),)], (), (model, ">>en<<"), config)  # type: ignore[arg-type]
    ((asked, source),) = model.ids
    assert (len(asked), len(source)) == (CONFIG.max_length, CONFIG.max_length)
    assert (asked[0], asked[-1]) == (TOKENIZER.encode_source(">>en<< b")[0], TOKENIZER.end_id)


def test_a_model_of_both_directions_is_its_own_way_back(back: Translator) -> None:
    both = make_translator(1)
    other = make_translator(1, Backward(back, ">>en<<"))
    found, expected = (t.translate(LINES, rerank_weight=WEIGHT) for t in (both, other))
    assert [t.tokens for t in found] == [t.tokens for t in expected]


def test_with_other_parameters_the_way_back_has_them_too() -> None:
    both = make_translator(1)
    changed = both.with_params(make_translator(2).params)
    found = changed.translate(LINES, rerank_weight=WEIGHT)
    assert [t.tokens for t in found] == [t.tokens for t in make_translator(2).translate(LINES, rerank_weight=WEIGHT)]


TEXT = ["abc def", "a b c d e f", "xyz"] * 3
UNTAGGED = train_sentencepiece(TEXT, 25, source_lang="en")
OTHER_TAGS = train_sentencepiece(TEXT, 26, tags=(">>fr<<",), source_lang="en")
NO_LANGUAGE = train_sentencepiece(TEXT, 26, tags=(">>en<<",))


@pytest.mark.parametrize(
    ("tokenizer", "backward", "tag"),
    [
        (TOKENIZER, Backward(), ">>en<<"),
        (NO_LANGUAGE, Backward(tag=">>en<<"), ">>en<<"),
        (UNTAGGED, Backward(make_translator(1)), ">>en<<"),
        (TOKENIZER, Backward(make_translator(1), ""), ""),
        (TOKENIZER, Backward(make_translator(1, tokenizer=UNTAGGED)), ""),
    ],
    ids=["itself", "itself, told", "one of both directions", "told to do without", "one without tags"],
)
def test_the_tag_is_that_of_the_source_language_where_there_is_one(
    tokenizer: SentencePieceTokenizer, backward: Backward, tag: str
) -> None:
    assert backward.resolve(make_translator(0, tokenizer=tokenizer))[1] == tag


@pytest.mark.parametrize(
    ("tokenizer", "backward", "complaint"),
    [
        (UNTAGGED, Backward(), "does not translate back"),
        (OTHER_TAGS, Backward(), "source language is en, and of the vocabulary's tags it has >>fr<<"),
        (NO_LANGUAGE, Backward(), "source language is not known, and of the vocabulary's tags it has >>en<<"),
        (TOKENIZER, Backward(make_translator(1, tokenizer=OTHER_TAGS)), "it has >>fr<<. Name one as backward_tag"),
        (TOKENIZER, Backward(tag=">>fr<<"), "has no tag '>>fr<<'; it has >>en<<"),
        (UNTAGGED, Backward(tag="en"), "has no tag 'en'; it has none"),
    ],
)
def test_a_way_back_that_is_not_known_is_asked_for(
    tokenizer: SentencePieceTokenizer, backward: Backward, complaint: str
) -> None:
    with pytest.raises(UserError, match=complaint):
        make_translator(0, backward, tokenizer).translate(["abc"], rerank_weight=WEIGHT)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"beam_size": 1, "rerank_weight": 0.3}, "one hypothesis has no rank"),
        ({"beam_size": 4, "rerank_weight": -0.3}, "rerank_weight is -0.3"),
        ({"beam_size": 4, "rerank_weight": float("nan")}, "rerank_weight is nan"),
        ({"beam_size": 1, "rerank_weight": 0.3, "sample": True}, "leave it out where tokens are drawn"),
    ],
)
def test_what_cannot_be_ranked_is_refused(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        DecodeConfig(**options)


def test_joined_parts_that_were_not_ranked_know_nothing_of_the_source() -> None:
    assert translation_of([(hypothesis("a"),), (hypothesis("b"),)]).source_log_prob is None


# --- the command line ---------------------------------------------------------------------------------------


def translate(folder: Path, *options: object) -> int:
    (folder.parent / "in").write_text("".join(f"{line}\n" for line in LINES))
    names = ("--input", folder.parent / "in", "--output", folder.parent / "out")
    arguments = ["translate", folder, *names, "--devices", 1, "--extra-length", 4, *options]
    return cli.run_command(lambda: cli._dispatch([str(argument) for argument in arguments]))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    for seed in (0, 1):
        save_model(folder / str(seed), CONFIG, random_params(seed))
        TOKENIZER.save(folder / str(seed))
    return folder / "0", folder / "1"


def test_the_command_ranks_by_itself_or_by_another_model(
    folders: tuple[Path, Path], back: Translator, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = folders
    assert translate(one, "--backward", other, "--format", "jsonl", "--n-best", 2, "--report", "timing") == 0
    assert ", rank by the way back " in capsys.readouterr().err
    found = [json.loads(line) for line in (one.parent / "out").read_text().splitlines()]
    expected = make_translator(0, Backward(back, ">>en<<")).translate(LINES, rerank_weight=0.3)
    assert [line["text"] for line in found] == [t.text for t in expected]
    assert found[0]["n_best"][0]["source_log_prob"] == pytest.approx(expected[0].source_log_prob, rel=1e-4)
    assert translate(other, "--rerank-weight", WEIGHT) == 0
    own = make_translator(1).translate(LINES, rerank_weight=WEIGHT)
    assert (one.parent / "out").read_text().splitlines() == [t.text for t in own]
    assert translate(other, "--rerank-weight", WEIGHT, "--backward-tag", "") == 0
    untagged = make_translator(1, Backward(back, "")).translate(LINES, rerank_weight=WEIGHT)
    assert (one.parent / "out").read_text().splitlines() == [t.text for t in untagged]
    assert [t.tokens for t in untagged] != [t.tokens for t in own]


def test_a_greedy_search_is_not_ranked(folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert translate(folders[0], "--backward", folders[1], "--beam-size", 1) == 2
    assert "take a beam_size of 2 or more" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--backward", "1", "--rerank-weight", 0), "--rerank-weight 0 does without"),
        (("--backward-tag", ">>fr<<"), "has no tag '>>fr<<'"),
        (("--backward-positions", "marian"), "--backward-positions is of the model that --backward names"),
        (("--backward-tag", ">>en<<", "--sample"), "leave it out where tokens are drawn"),
        (("--backward", "absent"), "absent"),
    ],
)
def test_a_mistake_about_the_way_back_is_told_before_anything_is_written(
    options: tuple[Any, ...], sentence: str, folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    (folders[1].parent / "out").unlink(missing_ok=True)
    assert translate(folders[1], *options) == 2
    assert sentence in capsys.readouterr().err
    assert not (folders[1].parent / "out").exists()


def test_explain_looks_at_the_translation_that_translate_gives(
    folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--rerank-weight", 5, "--devices", 1, "--extra-length", 4, "--format", "json")
    for line, t in zip(LINES[:2], make_translator(1).translate(LINES[:2], rerank_weight=5.0), strict=True):
        assert (
            cli.run_command(lambda line=line: cli._dispatch(["explain", str(folders[1]), line, *map(str, options)]))
            == 0
        )
        assert json.loads(capsys.readouterr().out)["target"] == t.text


# --- in training --------------------------------------------------------------------------------------------


def run_of(folder: Path, **data: Any) -> RunConfig:
    for split in ("train", "val"):
        for language, lines in (("en", TEXT), ("de", [line[::-1] for line in TEXT])):
            (folder / f"{split}.{language}").write_text("".join(f"{line}\n" for line in lines))
    return RunConfig(
        model=ModelConfig(d_model=16, n_heads=2, d_ff=32, n_encoder_layers=1, n_decoder_layers=1, max_length=32),
        data=DataConfig(dir=folder, vocab_size=26, max_tokens=32, n_buckets=1, batch_tokens=256, **data),
        train=TrainConfig(steps=2, evaluate_every=1, n_devices=1),
        decode=DecodeConfig(beam_size=3, rerank_weight=WEIGHT, extra_length=4),
    )


def test_a_run_of_both_directions_evaluates_by_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def noted(sources: Any, found: Any, tags: Any, backward: Any, config: Any) -> Any:
        asked.append(backward[1])
        assert backward[0] is translators[-1]  # the parameters of this evaluation, not of the first
        return rerank(sources, found, tags, backward, config)

    translators: list[Translator] = []
    with_params = Translator.with_params
    monkeypatch.setattr(
        Translator, "with_params", lambda t, params: translators.append(with_params(t, params)) or translators[-1]
    )
    monkeypatch.setattr("transformer_jax.translator.rerank", noted)
    Trainer(run_of(tmp_path, reversed_weight=1.0), tmp_path / "run").train()
    assert asked == [">>en<<"] * 2
    monkeypatch.undo()
    search = run_of(tmp_path).decode
    saved = Translator.from_pretrained(tmp_path / "run", search, mesh=data_mesh(1))
    assert saved.translate(["abc"])[0].source_log_prob is not None


def test_a_run_of_one_direction_is_not_started_with_a_rank_by_both(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not learn to translate back"):
        Trainer(run_of(tmp_path), tmp_path / "run")
    with pytest.raises(UserError, match="does not learn to translate back"):
        describe(run_of(tmp_path), compiled=False)
    with pytest.raises(UserError, match="has no tag '>>en<<'; it has >>bt<<"):
        Trainer(run_of(tmp_path, tags=(">>bt<<",)), tmp_path / "run")
