"""The cache of tokens: the same bits whichever way they came, made once, anew when anything that counts has changed."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_files import full_disk
from test_training import free_address, in_processes

from transformer_jax.cleaning import LineRules
from transformer_jax.config import DataConfig, DecodeConfig, ModelConfig, RunConfig, TrainConfig
from transformer_jax.corpus import ParallelText, read_parallel
from transformer_jax.errors import UserError
from transformer_jax.pair_sources import ListedPairs, WeightedSource, open_files
from transformer_jax.run_data import find_tokenizer, read_texts, to_tokens
from transformer_jax.run_options import parse_options
from transformer_jax.sentencepiece_training import train_sentencepiece
from transformer_jax.subword_sampling import Drawing
from transformer_jax.token_blocks import TokenRules
from transformer_jax.token_cache import ABANDONED_SECONDS, CacheWriter, open_cache
from transformer_jax.tokenizer import CharacterTokenizer, SentencePieceTokenizer, load_tokenizer
from transformer_jax.trainer import Trainer
from transformer_jax.training_text import Indexer, TrainingText

WORDS = ["a", "the", "small", "red", "frog", "dog", "house", "tree", "sees", "eats", "likes", "under", "and", "runs"]


def sentences(n: int, seed: int) -> list[str]:
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, rng.integers(1, 12))) + "." for _ in range(n)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a.en and a.de, 300 pairs of which one is blank, and a tokenizer."""
    folder = tmp_path_factory.mktemp("corpus")
    source, target = sentences(300, 0), sentences(300, 1)
    target[7] = ""
    (folder / "a.en").write_text("\n".join(source) + "\n", encoding="utf-8")
    (folder / "a.de").write_text("\n".join(target) + "\n", encoding="utf-8")
    train_sentencepiece(source + target, 90).save(folder / "tokenizer")
    return folder


def indexer(corpus: Path, **changes: Any) -> Indexer:
    """Of the corpus, or of other parts."""
    text: dict[str, Any] = {
        "sources": (WeightedSource(open_files(corpus / "a.en", corpus / "a.de")),),
        "line_rules": LineRules(),
    }
    text |= {"held_out": {}, "limit": None}
    parts: dict[str, Any] = {"rules": TokenRules(20), "start_id": 1, "processes": 1}
    for name, value in changes.items():
        (text if name in ("sources", "held_out", "limit", "line_rules") else parts)[name] = value
    text["rules"] = text.pop("line_rules")
    tokenizer = parts.pop("tokenizer", None) or load_tokenizer(corpus / "tokenizer")
    return Indexer(TrainingText(**text), tokenizer, **parts)


def build(corpus: Path, folder: Path, **changes: Any) -> Any:
    made = indexer(corpus, **changes)
    made.build(folder, corpus / "tokenizer")
    return made.read(folder)[0]


class Refusing:
    """A tokenizer that must not be asked."""

    vocab_size = source_vocab_size = 90
    pad_id = source_pad_id = start_id = 89
    end_id = 0

    def refuse(self, *_: Any) -> Any:
        raise AssertionError("text was encoded once more")

    encode_source = encode_target = encode_source_batch = encode_target_batch = refuse
    decode = decode_source = source_pieces = target_pieces = pieces_of = save = refuse


# --- the same bits ------------------------------------------------------------------------------------------


def test_cache_holds_what_encoding_in_memory_gives(corpus: Path, tmp_path: Path) -> None:
    cached = build(corpus, tmp_path / "cache")
    listed, _ = indexer(corpus).in_memory()
    whole, _ = to_tokens(read_parallel(corpus / "a.en", corpus / "a.de"), load_tokenizer(corpus / "tokenizer"), 20)
    whole = dataclasses.replace(whole, start_id=1)
    for other in (listed, whole):
        for name in ("source", "target"):
            np.testing.assert_array_equal(getattr(cached, name).ids, getattr(other, name).ids)
            np.testing.assert_array_equal(getattr(cached, name).offsets, getattr(other, name).offsets)
        assert cached.fingerprint() == other.fingerprint()
    assert cached.source.ids.dtype == np.uint16
    assert dataclasses.replace(cached, known_fingerprint=None).fingerprint() == cached.known_fingerprint


def test_cached_tokens_stay_on_disk_and_are_for_reading_only(corpus: Path, tmp_path: Path) -> None:
    ids = build(corpus, tmp_path / "cache").source.ids
    assert type(ids) is np.ndarray
    assert isinstance(ids.base, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        ids[0] = 1


def test_large_vocabularies_are_kept_in_32_bits(tmp_path: Path) -> None:
    with CacheWriter(tmp_path / "a", 1 << 16) as small, CacheWriter(tmp_path / "b", (1 << 16) + 1) as large:
        assert (small.dtype, large.dtype) == (np.uint16, np.int32)


def test_two_processes_make_the_same_files_as_one(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformer_jax.training_text.BLOCK_PAIRS", 16)
    again = WeightedSource(open_files(corpus / "a.en", corpus / "a.de"), 0.5, "red")
    sources = (*indexer(corpus).text.sources, again)
    for folder, processes in (("one", 1), ("two", 2)):
        build(corpus, tmp_path / folder, sources=sources, processes=processes)
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes(), path.name


# --- made once, and anew ------------------------------------------------------------------------------------


def test_a_cache_that_is_there_is_not_made_again(corpus: Path, tmp_path: Path) -> None:
    build(corpus, tmp_path / "cache")
    again = build(corpus, tmp_path / "cache", tokenizer=Refusing())
    assert len(again) == 299


def test_key_is_that_of_the_content_not_of_names_or_packing(corpus: Path, tmp_path: Path) -> None:
    for name in ("a.en", "a.de"):
        (tmp_path / f"other.{name}.gz").write_bytes(gzip.compress((corpus / name).read_bytes()))
    packed = (WeightedSource(open_files(tmp_path / "other.a.en.gz", tmp_path / "other.a.de.gz")),)
    tokenizer = corpus / "tokenizer"
    assert indexer(corpus, sources=packed).key(tokenizer) == indexer(corpus).key(tokenizer)


def test_key_changes_with_all_that_tokens_and_report_follow_from(corpus: Path, tmp_path: Path) -> None:
    other_text = tmp_path / "text"
    shutil.copytree(corpus, other_text)
    content = (other_text / "a.de").read_text()
    (other_text / "a.de").write_text(content[:-3] + content[-2:])
    other_vocabulary = tmp_path / "vocabulary"
    train_sentencepiece(sentences(200, 5), 89).save(other_vocabulary)
    (same,) = indexer(corpus).text.sources
    held_out = {"test": ParallelText(["a"], ["b"])}
    keys = [
        indexer(corpus).key(corpus / "tokenizer"),
        indexer(other_text).key(corpus / "tokenizer"),
        indexer(corpus).key(other_vocabulary),
    ]
    changes: list[dict[str, Any]] = [
        {"sources": (dataclasses.replace(same, weight=0.5),)},
        {"sources": (dataclasses.replace(same, tag=">>bt<<"),)},
        {"sources": (same, same)},
        {"sources": (same, same.exchange(1, ""))},
        {"limit": 100},
        {"line_rules": LineRules(duplicates=True)},
        {"held_out": held_out},
        {"held_out": {"validation": held_out["test"]}},
        {"rules": TokenRules(19)},
        {"rules": TokenRules(20, "cut")},
        {"rules": TokenRules(20, max_length_ratio=3.0)},
        {"start_id": 2},
    ]
    keys += [indexer(corpus, **change).key(corpus / "tokenizer") for change in changes]
    assert len(set(keys)) == len(keys)


def test_report_of_a_cache_has_the_names_of_now(corpus: Path, tmp_path: Path) -> None:
    indexer(corpus).build(tmp_path / "cache", corpus / "tokenizer")
    moved = tmp_path / "moved"
    shutil.copytree(corpus, moved)
    _, report = indexer(moved).read(tmp_path / "cache")
    assert str(moved) in report["corpora"][0]["name"]


# --- interrupted and damaged --------------------------------------------------------------------------------


def test_an_interrupted_build_leaves_nothing(corpus: Path, tmp_path: Path) -> None:
    class Interrupted(SentencePieceTokenizer):
        def encode_target_batch(self, lines: Any) -> Any:
            raise KeyboardInterrupt

    tokenizer = load_tokenizer(corpus / "tokenizer")
    tokenizer.__class__ = Interrupted
    with pytest.raises(KeyboardInterrupt):
        build(corpus, tmp_path / "tokens" / "cache", tokenizer=tokenizer)
    assert list((tmp_path / "tokens").iterdir()) == []


def test_what_a_killed_build_left_is_never_read_and_removed_when_it_is_old(corpus: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    build(corpus, whole)
    tokens = tmp_path / "tokens"
    old, new = (tokens / f".cache.{name}.part" for name in ("old", "new"))
    for part in (old, new):
        shutil.copytree(whole, part)
        (part / "meta.json").unlink()
    long_ago = (old / "source_ids.bin").stat().st_mtime - ABANDONED_SECONDS - 60
    for path in (*old.iterdir(), old):
        os.utime(path, (long_ago, long_ago))
    assert open_cache(tokens / "cache") is None
    assert len(build(corpus, tokens / "cache")) == 299
    assert sorted(path.name for path in tokens.iterdir()) == [".cache.new.part", "cache"]


@pytest.mark.parametrize("damage", ["cut", "garbled", "missing"])
def test_a_damaged_cache_is_made_again(corpus: Path, tmp_path: Path, damage: str) -> None:
    cache = tmp_path / "cache"
    before = build(corpus, cache).fingerprint()
    if damage == "cut":
        os.truncate(cache / "target_ids.bin", 100)
    elif damage == "garbled":
        (cache / "meta.json").write_text('{"pairs": ')
    else:
        (cache / "source_offsets.bin").unlink()
    assert open_cache(cache) is None
    assert build(corpus, cache).fingerprint() == before
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


def test_a_folder_that_cannot_be_written_is_named(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file cannot be written .*--data\.cache"):
        build(corpus, tmp_path / "file" / "cache")


def test_where_the_disk_is_full_the_folder_is_named_and_nothing_left(corpus: Path, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    with full_disk(100), pytest.raises(UserError) as caught:
        build(corpus, tokens / "cache")
    assert str(caught.value) == (
        f"The folder for tokens {tokens} cannot be written (File too large); name another with --data.cache."
    )
    assert not list(tokens.iterdir())


# --- in a run -----------------------------------------------------------------------------------------------


def run_config(corpus: Path, **data: Any) -> RunConfig:
    paths = {"source": (corpus / "a.en",), "target": (corpus / "a.de",)}
    settings = paths | {"vocab_size": 90, "max_tokens": 24, "batch_tokens": None, "batch_size": 16, "n_buckets": 1}
    return RunConfig(
        model=ModelConfig.tiny(d_model=16, n_heads=2, d_ff=32, n_encoder_layers=1, n_decoder_layers=1, max_length=24),
        data=DataConfig(**(settings | data)),
        train=TrainConfig(steps=2, warmup_steps=10, log_every=1, evaluate_every=None, n_devices=1),
        decode=DecodeConfig(),
    )


def test_a_run_keeps_tokens_and_report_and_a_second_start_reads_them(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    held_out = {"validation_source": corpus / "a.en", "validation_target": corpus / "a.de"}
    config = run_config(corpus, **held_out)
    Trainer(config, tmp_path / "run").train()
    report = json.loads((tmp_path / "run" / "data_report.json").read_text())
    assert report["corpora"][0]["removed"]["blank"] == 1
    assert report["held_out"] == {"validation": {"lines": 299, "sources": 299, "targets": 299, "pairs": 299}}
    (cache,) = (tmp_path / "run" / "tokens").iterdir()
    assert report["tokens"] == str(cache)
    said = capsys.readouterr().err
    assert "299 pairs to train on" in said
    assert "1 with a blank side" in said
    assert "of 299 validation lines 299 sources" in said

    monkeypatch.setattr("transformer_jax.training_text.CacheWriter", None)
    again = Trainer(config, tmp_path / "run")
    assert again.batches.fingerprint == open_cache(cache)[0].fingerprint()  # type: ignore[index]


def test_two_runs_share_a_cache_that_is_named(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = run_config(corpus, cache=tmp_path / "cache", tokenizer=corpus / "tokenizer")
    first = Trainer(config, tmp_path / "one")
    monkeypatch.setattr("transformer_jax.training_text.CacheWriter", None)
    second = Trainer(config, tmp_path / "two")
    assert first.batches.fingerprint == second.batches.fingerprint
    assert not (tmp_path / "one" / "tokens").exists()


def test_corpora_come_in_the_order_folder_then_files(corpus: Path, tmp_path: Path) -> None:
    for split in ("train", "val"):
        (tmp_path / f"{split}.en").write_text("from the folder\n")
        (tmp_path / f"{split}.de").write_text("aus dem Ordner\n")
    config = run_config(corpus, dir=tmp_path, weights=(3.0, 1.0), tags=("", "the old")).data
    texts = read_texts(config)
    assert [source.weight for source in texts.train.sources] == [3, 1]
    assert texts.validation is not None
    assert texts.validation.source == ["from the folder"]
    block = next(texts.train.blocks(texts.train.new_counts(), texts.train.new_filter()))
    assert block.source == ["from the folder"]


def test_one_weight_is_for_all_corpora(corpus: Path) -> None:
    files = {side: (getattr(run_config(corpus).data, side)[0],) * 2 for side in ("source", "target")}
    texts = read_texts(run_config(corpus, **files, weights=(2.0,)).data)
    assert [source.weight for source in texts.train.sources] == [2, 2]


def test_a_tag_is_one_token_of_a_vocabulary_that_is_trained(corpus: Path) -> None:
    config = run_config(corpus, tags=(">>bt<<",)).data
    texts = read_texts(config)
    tokenizer = find_tokenizer(config, texts, progress=False)
    assert isinstance(tokenizer, SentencePieceTokenizer)
    assert tokenizer.vocab_size == 90
    assert tokenizer.language_tags == [">>bt<<"]
    (source,) = texts.train.sources
    tagged, plain = tokenizer.encode_source(source.tagged("a frog")), tokenizer.encode_source("a frog")
    assert tagged[1:] == plain
    assert tokenizer.pad_id == 89  # still the last row, as Marian folders have it


def test_the_other_direction_is_learnt_under_a_tag_of_its_own(corpus: Path) -> None:
    config = run_config(corpus, weights=(2.0,), reversed_weight=0.5).data
    texts = read_texts(config)
    plain, exchanged = texts.train.sources
    assert (plain.weight, plain.tag, plain.exchanged) == (2, "", False)
    assert (exchanged.weight, exchanged.tag, exchanged.exchanged) == (1, ">>en<<", True)
    assert texts.train.sample(10**6) == read_texts(run_config(corpus).data).train.sample(10**6)
    tokenizer = find_tokenizer(config, texts, progress=False)
    assert isinstance(tokenizer, SentencePieceTokenizer)
    assert tokenizer.language_tags == [">>en<<"]
    assert (tokenizer.source_lang, tokenizer.target_lang) == ("en", "de")  # it can be asked for the way back
    blocks = list(texts.train.blocks(texts.train.new_counts(), texts.train.new_filter()))
    assert blocks[-1].source == [f">>en<< {line}" for line in blocks[0].target]
    assert blocks[-1].target == blocks[0].source


def test_a_vocabulary_for_each_language_cannot_learn_both_directions(corpus: Path) -> None:
    one, other = train_sentencepiece(sentences(300, 0), 90), train_sentencepiece(sentences(300, 1), 91)
    one.save(corpus / "one")
    other.save(corpus / "other")
    vocab = json.loads((corpus / "one" / "vocab.json").read_text())
    files = corpus / "one" / "source.spm", corpus / "other" / "target.spm"
    tokenizer = SentencePieceTokenizer(*files, vocab)
    (source,) = indexer(corpus).text.sources
    with pytest.raises(UserError, match="a vocabulary for each language"):
        indexer(corpus, sources=(source, source.exchange(1, "")), tokenizer=tokenizer).in_memory()


def test_a_vocabulary_is_made_from_a_sample_of_a_large_text() -> None:
    pairs = tuple((f"s{i}", f"t{i}") for i in range(1000))
    text = TrainingText((WeightedSource(ListedPairs(pairs, "many")),), LineRules(), {})
    sample = text.sample(100)
    assert len(set(sample)) == 100
    assert [line[1:] for line in sample[:50]] == [line[1:] for line in sample[50:]]  # sources and targets of pairs
    assert sample == text.sample(100)
    assert 300 < np.mean([int(line[1:]) for line in sample]) < 700
    whole = text.sample(10_000)
    assert whole == [source for source, _ in pairs] + [target for _, target in pairs]


def test_options_of_the_corpus_are_read_from_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "c.py").write_text("from transformer_jax.config import RunConfig\nconfig = RunConfig()\n")
    line = ["--data.source", "a", "b", "--data.target", "c", "d", "--data.weights", "2", "0.5"]
    line += ["--data.drop-duplicates", "--data.tags", "", ">>bt<<"]
    data = parse_options(line, tmp_path / "c.py").run.data
    assert (data.weights, data.tags, data.drop_duplicates) == ((2.0, 0.5), ("", ">>bt<<"), True)


# --- several processes --------------------------------------------------------------------------------------

WORKER = """
import sys
import jax
jax.config.update("jax_platforms", "cpu")
from transformer_jax.sharding import is_main_process, join_processes
join_processes(sys.argv[1], 2, int(sys.argv[2]))
sys.path.insert(0, sys.argv[3])
from pathlib import Path
import test_corpus_cache as t
from transformer_jax.run_data import read_texts, training_pairs
from transformer_jax.run_folder import RunFolder
from transformer_jax.tokenizer import load_tokenizer
corpus, run = Path(sys.argv[4]), RunFolder(Path(sys.argv[5]))
data = t.run_config(corpus).data
tokenizer = load_tokenizer(run.tokenizer)
if not is_main_process():
    tokenizer = t.Refusing()
    tokenizer.start_id = tokenizer.pad_id = load_tokenizer(run.tokenizer).pad_id
pairs, report = training_pairs(data, read_texts(data), tokenizer, 1, run)
print("RESULT", pairs.fingerprint(), len(pairs))
"""


def test_of_several_processes_the_main_one_builds_and_all_read(corpus: Path, tmp_path: Path) -> None:
    shutil.copytree(corpus / "tokenizer", tmp_path / "run" / "tokenizer")
    address, here = free_address(), str(Path(__file__).parent)
    rest = [here, str(corpus), str(tmp_path / "run")]
    outputs = in_processes([["-c", WORKER, address, str(i), *rest] for i in range(2)])
    results = {line for out in outputs for line in out.splitlines() if line.startswith("RESULT")}
    assert len(results) == 1
    assert results.pop().endswith(" 299")


# --- sub-words cut by chance ----------------------------------------------------------------------------------


@pytest.fixture
def bpe(corpus: Path) -> SentencePieceTokenizer:
    tokenizer = load_tokenizer(corpus / "tokenizer")
    assert isinstance(tokenizer, SentencePieceTokenizer)
    return tokenizer


def test_drawn_sub_words_spell_the_text_and_follow_from_the_seed(bpe: SentencePieceTokenizer) -> None:
    lines = ["the small frog runs under a tree.", "a red dog likes the house and eats."] * 20
    plain = bpe.encode_source_batch(lines)
    drawn = bpe.encode_source_batch(lines, Drawing(0.3, 7))
    assert drawn == bpe.encode_source_batch(lines, Drawing(0.3, 7))
    assert drawn != bpe.encode_source_batch(lines, Drawing(0.3, 8))
    assert len({tuple(ids) for ids in drawn[::2]}) > 5  # the same line is cut in many ways
    assert sum(map(len, drawn)) > sum(map(len, plain))
    assert [bpe.decode_source(ids) for ids in drawn] == [bpe.decode_source(ids) for ids in plain] == lines
    assert bpe.encode_source_batch(lines, Drawing(1e-9, 7)) == plain  # no merge is left out


def test_each_pair_comes_once_in_each_reading_the_first_as_in_use(bpe: SentencePieceTokenizer, tmp_path: Path) -> None:
    """One process and two make the same tokens of all three readings; the report counts lines once."""
    lines = ["the small frog runs under a tree", "the dog likes the house", "a red frog", ""]
    pairs = ListedPairs(tuple(zip(lines, lines, strict=True)), "text")
    text = TrainingText((WeightedSource(pairs),), LineRules(), {})
    bpe.save(tmp_path / "tokenizer")
    found = []
    for processes in (1, 2):
        indexer = Indexer(text, bpe, TokenRules(40, sampling=0.4, readings=3), bpe.start_id, processes)
        folder = tmp_path / f"by{processes}"
        indexer.build(folder, tmp_path / "tokenizer")
        found.append(indexer.read(folder))
    (tokens, report), (again, _) = found
    assert tokens.fingerprint() == again.fingerprint()
    assert len(tokens) == report["pairs"] == 9
    assert report["corpora"][0]["read"] == 4
    plain = bpe.encode_source_batch(lines[:3])
    assert [tokens.source[i].tolist() for i in range(3)] == plain
    assert [tokens.source[i].tolist() for i in range(3, 6)] != plain
    assert [tokens.source[i].tolist() for i in range(3, 6)] != [tokens.source[i].tolist() for i in range(6, 9)]
    assert [bpe.decode_source(tokens.source[i].tolist()) for i in range(9)] == lines[:3] * 3


def test_characters_cannot_be_cut_by_chance() -> None:
    pairs = ListedPairs((("ab", "b"),), "text")
    text = TrainingText((WeightedSource(pairs),), LineRules(), {})
    indexer = Indexer(text, CharacterTokenizer(("a", "b")), TokenRules(9, sampling=0.1, readings=2), 1)
    with pytest.raises(UserError, match="subword_sampling cuts sub-words, but the vocabulary is of characters"):
        indexer.in_memory()


def test_a_tag_that_a_given_vocabulary_lacks_is_refused_instead_of_dropping_its_corpus(corpus: Path) -> None:
    """In the text such a line is left out, one among many; asked for by name it is a mistake."""
    tokenizer = train_sentencepiece(sentences(300, 0), 90, tags=(">>xx<<",))
    sources = (WeightedSource(open_files(corpus / "a.en", corpus / "a.de"), tag=">>bt<<"),)
    with pytest.raises(UserError, match="starts with '>>bt<<', which is not a language tag of this model: use one of"):
        indexer(corpus, sources=sources, tokenizer=tokenizer).in_memory()


@pytest.mark.parametrize("damage", ["offset", "id", "report"])
def test_a_cache_with_other_numbers_than_were_written_is_made_again(damage: str, corpus: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    golden = build(corpus, folder).fingerprint()
    if damage == "report":
        meta = json.loads((folder / "meta.json").read_text())
        (folder / "meta.json").write_text(json.dumps(meta | {"report": {}}))
    else:
        path = folder / ("source_ids.bin" if damage == "id" else "target_offsets.bin")
        numbers = np.fromfile(path, np.uint16 if damage == "id" else np.int64)
        numbers[5] = 60_000
        numbers.tofile(path)
    assert open_cache(folder) is None
    assert build(corpus, folder).fingerprint() == golden
