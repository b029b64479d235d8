"""A new vocabulary from text, by SentencePiece: one joint model for both languages (§5.1)."""

import io
import random
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from transformer_jax.errors import UserError
from transformer_jax.tokenizer import (
    PAD,
    SentencePieceTokenizer,
    is_language_tag,
    load_processor,
    without_surrogates,
)


def train_sentencepiece(
    lines: Iterable[str],
    vocab_size: int,
    *,
    model_type: Literal["bpe", "unigram"] = "bpe",
    character_coverage: float = 1.0,
    byte_fallback: bool = False,
    max_lines: int | None = None,
    seed: int = 0,
    tags: Iterable[str] = (),
    source_lang: str | None = None,
    target_lang: str | None = None,
    progress: bool = False,
) -> SentencePieceTokenizer:
    """Trains one joint SentencePiece model on lines of both languages. The same lines give the same model.

    Args:
        lines: source and target lines, in any order.
        vocab_size: the size of the model's table, `</s>`, `<unk>` and `<pad>` included.
        model_type: how pieces are found: byte-pair encoding, as in the paper, or a unigram language model.
        character_coverage: the share of the text's characters that get a piece; the rarest become `<unk>`.
        byte_fallback: spell rare characters in bytes rather than as `<unk>`.
        max_lines: train on a random sample of so many lines, for text that does not fit in memory.
        seed: of that sample.
        tags: those that read `>>name<<` become entries of the table, each one token at the start of a source line.
        source_lang, target_lang: written to the tokenizer's configuration.
        progress: show a bar on standard error while the text is read.
    """
    import sentencepiece

    text = _sample(lines, max_lines, seed, progress)
    language_tags = [tag for tag in dict.fromkeys(tags) if is_language_tag(tag)]
    n_own = 1 + len(language_tags)  # <pad> and tags are in our table only: SentencePiece does not cut text into them
    if not any(line.strip() for line in text):
        raise UserError("There is no text to make a vocabulary from: give files that have text in them.")
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(text),
            model_writer=model,
            vocab_size=vocab_size - n_own,
            model_type=model_type,
            character_coverage=character_coverage,
            byte_fallback=byte_fallback,
            max_sentence_length=1 << 20,  # in bytes; the default leaves out longer lines in silence
            num_threads=16,  # sums depend on it, so not on the machine
            eos_id=0,
            unk_id=1,
            bos_id=-1,
            pad_id=-1,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise _training_error(vocab_size, n_own, error) from error
    proto = model.getvalue()
    vocab = vocabulary_of(proto, language_tags)
    return SentencePieceTokenizer(proto, proto, vocab, source_lang=source_lang, target_lang=target_lang)


def vocabulary_of(model: Path | bytes, tags: Iterable[str] = ()) -> dict[str, int]:
    """A table with the pieces of a SentencePiece model, in its order, then the tags, and `<pad>` last."""
    processor = load_processor(model)
    vocab = {processor.id_to_piece(index): index for index in range(len(processor))}
    for tag in tags:
        vocab.setdefault(tag, len(vocab))
    vocab.setdefault(PAD, len(vocab))
    return vocab


def _sample(lines: Iterable[str], max_lines: int | None, seed: int, progress: bool) -> list[str]:
    """All lines, or an even random sample of them (reservoir sampling), without surrogates."""
    from tqdm import tqdm

    rng = random.Random(seed)
    kept: list[str] = []
    for index, line in enumerate(tqdm(lines, desc="reading text", unit=" lines", disable=not progress)):
        if max_lines is None or len(kept) < max_lines:
            kept.append(without_surrogates(line))
        elif (slot := rng.randrange(index + 1)) < max_lines:
            kept[slot] = without_surrogates(line)
    return kept


def _training_error(vocab_size: int, n_own: int, error: RuntimeError) -> UserError:
    """Says which vocabulary sizes are possible, where SentencePiece's message does; `n_own` entries are ours."""
    if largest := re.search(r"too high .*value <= (\d+)", str(error)):
        limit = f"too large for this text: {int(largest[1]) + n_own} is the largest possible, or give more text."
    elif smallest := re.search(r"required_chars\. \S+ vs (\d+)", str(error)):
        limit = f"too small for this text: its characters alone need {int(smallest[1]) + n_own}."
    else:
        return UserError(f"SentencePiece cannot make a vocabulary of {vocab_size} from this text: {error}")
    return UserError(f"A vocabulary of {vocab_size} is {limit}")
