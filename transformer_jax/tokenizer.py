"""Text to token ids and back.

`SentencePieceTokenizer` speaks the folder layout of OPUS-MT models and of Hugging Face's Marian: one
SentencePiece model per language cuts text into pieces (`source.spm`, `target.spm`), and a table gives each
piece its id (`vocab.json`, and `target_vocab.json` where the vocabularies are separate). The ids inside the
`.spm` files mean nothing to the model. `CharacterTokenizer` is for the tasks that are made by rule.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from transformer_jax.errors import UserError
from transformer_jax.files import read_json, write_whole
from transformer_jax.subword_sampling import Drawing, check_drawing, drawn_pieces

END, UNKNOWN, PAD, START = "</s>", "<unk>", "<pad>", "<s>"

_SPECIAL = (END, UNKNOWN, PAD)  # what every SentencePiece vocabulary must have
_SPACE_MARK = "▁"  # U+2581, SentencePiece's visible space
_SURROGATE = re.compile("[\ud800-\udfff]")
_YAML_CONTROL = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
_LANGUAGE_TAG = re.compile(r">>\S*?<<")  # what stands at the start of a line, up to the first <<


class UnknownTagError(UserError):
    """A source line starts with a language tag that the vocabulary does not have."""


@runtime_checkable
class Tokenizer(Protocol):
    """What data, training and translation ask of a tokenizer."""

    vocab_size: int  # of the target side; of both where the vocabulary is joint
    source_vocab_size: int
    pad_id: int  # of the target side
    source_pad_id: int
    start_id: int  # the decoder's first input
    end_id: int  # of the target side

    def encode_source(self, line: str) -> list[int]:
        """Ids of a source line; the last is the end token."""
        ...

    def encode_target(self, line: str) -> list[int]:
        """Ids of a target line; the last is the end token, and the start token is not among them."""
        ...

    def encode_source_batch(self, lines: Sequence[str]) -> list[list[int]]:
        """`encode_source` of each line, faster."""
        ...

    def encode_target_batch(self, lines: Sequence[str]) -> list[list[int]]:
        """`encode_target` of each line, faster."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of target ids, up to the first end token and without special tokens."""
        ...

    def decode_source(self, ids: Sequence[int]) -> str:
        """Text of source ids, likewise."""
        ...

    def source_pieces(self, line: str) -> list[str]:
        """What the ids of `encode_source` stand for, the end token included; ▁ begins a word of sub-words."""
        ...

    def target_pieces(self, line: str) -> list[str]:
        """What the ids of `encode_target` stand for, likewise."""
        ...

    def pieces_of(self, ids: Sequence[int]) -> list[str]:
        """What target ids stand for, special tokens included: one piece for each."""
        ...

    def save(self, folder: Path) -> None:
        """Writes the files that `load_tokenizer` reads."""
        ...


class CharacterTokenizer:
    """One id per character, on both sides alike: pad 0, start 1, end 2, then the characters as given.

    There is no unknown token: a character outside the vocabulary is left out, and `unknown_characters` names
    it.
    """

    pad_id = source_pad_id = 0
    start_id = 1
    end_id = 2

    def __init__(self, characters: Sequence[str]) -> None:
        if any(len(character) != 1 for character in characters) or len(set(characters)) != len(characters):
            raise UserError("A character vocabulary is made of different single characters: remove what is not one.")
        self._pieces = [PAD, START, END, *characters]
        self._ids = {character: index for index, character in enumerate(self._pieces) if index > self.end_id}
        self.vocab_size = self.source_vocab_size = len(self._pieces)

    def unknown_characters(self, line: str) -> set[str]:
        """The characters of a line that encoding leaves out."""
        return set(line) - self._ids.keys()

    def encode_source(self, line: str) -> list[int]:
        return [self._ids[character] for character in line if character in self._ids] + [self.end_id]

    def encode_target(self, line: str) -> list[int]:
        return self.encode_source(line)

    def encode_source_batch(self, lines: Sequence[str]) -> list[list[int]]:
        return [self.encode_source(line) for line in lines]

    def encode_target_batch(self, lines: Sequence[str]) -> list[list[int]]:
        return self.encode_source_batch(lines)

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(
            self._pieces[token] for token in _until(ids, self.end_id) if self.end_id < token < self.vocab_size
        )

    def decode_source(self, ids: Sequence[int]) -> str:
        return self.decode(ids)

    def source_pieces(self, line: str) -> list[str]:
        return self.pieces_of(self.encode_source(line))

    def target_pieces(self, line: str) -> list[str]:
        return self.source_pieces(line)

    def pieces_of(self, ids: Sequence[int]) -> list[str]:
        return [self._pieces[token] if 0 <= token < self.vocab_size else UNKNOWN for token in ids]

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        _write_json(folder / "vocab.json", {piece: index for index, piece in enumerate(self._pieces)})
        _write_json(
            folder / "tokenizer_config.json",
            {"tokenizer_class": "CharacterTokenizer", "pad_token": PAD, "bos_token": START, "eos_token": END},
        )


class _Side:
    """One language's SentencePiece model with its table of ids."""

    def __init__(self, model: Path | bytes, vocab: Mapping[str, int]) -> None:
        self.processor = load_processor(model)
        self.vocab = dict(vocab)
        for token in _SPECIAL:
            if token not in vocab:
                raise UserError(f"The vocabulary has no {token}: add it to vocab.json with the id the model uses.")
        self.end_id, self.unknown_id, self.pad_id = (vocab[token] for token in _SPECIAL)
        self.size = max(vocab.values()) + 1
        self.tags = sorted(piece for piece in vocab if _LANGUAGE_TAG.fullmatch(piece))
        # Text must not turn into a token with a meaning of its own. MarianTokenizer lets it: "</s>" in a
        # user's line becomes the end token. SentencePiece alone does not prevent it, for it gives back a
        # stretch of unknown characters as one piece, which can read "</s>" or ">>fra<<": so these are never
        # looked up.
        controls = {self.processor.id_to_piece(i) for i in range(len(self.processor)) if self.processor.is_control(i)}
        reserved = {*_SPECIAL, *controls, *self.tags}
        self._text_ids = {piece: index for piece, index in vocab.items() if piece not in reserved}
        self._pieces = {index: piece for piece, index in vocab.items() if piece not in _SPECIAL}

    def has_own_ids(self) -> bool:
        """Whether the ids are those inside the SentencePiece model."""
        pieces = {self.processor.id_to_piece(index): index for index in range(len(self.processor))}
        return pieces == {piece: index for piece, index in self.vocab.items() if piece != PAD or piece in pieces}

    def encode(
        self, lines: Sequence[str], refuse_unknown_tags: bool, drawing: Drawing | None = None
    ) -> list[list[int]]:
        tags, texts = zip(*(self._split_tag(line, refuse_unknown_tags) for line in lines), strict=True)
        if drawing is None:
            # Starting threads takes longer than a short line does.
            pieces_of_lines = self.processor.encode(list(texts), out_type=str, num_threads=1 if len(lines) < 64 else -1)
        else:
            pieces_of_lines = drawn_pieces(self.processor, texts, drawing)
        return [
            tag + [self._text_ids.get(piece, self.unknown_id) for piece in pieces] + [self.end_id]
            for tag, pieces in zip(tags, pieces_of_lines, strict=True)
        ]

    def pieces(self, line: str, refuse_unknown_tags: bool) -> list[str]:
        """The pieces that `encode` looks up; those that it does not find are here as they stand in the text."""
        tag, text = self._split_tag(line, refuse_unknown_tags)
        return [self._pieces[token] for token in tag] + self.processor.encode(text, out_type=str) + [END]

    def pieces_of(self, ids: Sequence[int]) -> list[str]:
        special = {self.end_id: END, self.pad_id: PAD}
        return [special.get(token) or self._pieces.get(token, UNKNOWN) for token in ids]

    def _split_tag(self, line: str, refuse_unknown: bool) -> tuple[list[int], str]:
        """Takes a language tag off the start of a line. To a vocabulary without tags all of it is text."""
        match = _LANGUAGE_TAG.match(line) if self.tags else None
        if match and match.group() in self.vocab:
            return [self.vocab[match.group()]], without_surrogates(line[match.end() :])
        if match and refuse_unknown:
            raise UnknownTagError(
                f"The line starts with {match.group()!a}, which is not a language tag of this model: "
                f"use one of {' '.join(self.tags)}."
            )
        return [], without_surrogates(line)

    def decode(self, ids: Sequence[int]) -> str:
        # An id without a piece (a model can have more rows than its vocabulary) is left out, as <unk> is.
        pieces = [self._pieces[token] for token in _until(ids, self.end_id) if token in self._pieces]
        # SentencePiece leaves its space mark in pieces that only vocab.json knows. A line break, which a
        # model with byte pieces can write, would make one line two.
        return self.processor.decode(pieces).replace(_SPACE_MARK, " ").replace("\n", " ").strip()


class SentencePieceTokenizer:
    """The tokenizer of OPUS-MT and Hugging Face Marian folders, equal to transformers' MarianTokenizer.

    Args:
        source_model: the SentencePiece model of the source language, a `.spm` file or its bytes.
        target_model: that of the target language.
        vocab: the id of every piece, of both languages or, with a `target_vocab`, of the source language.
        target_vocab: the id of every piece of the target language, for separate vocabularies.
        source_lang, target_lang, model_max_length: kept for the tools that read a saved folder.
    """

    def __init__(
        self,
        source_model: Path | bytes,
        target_model: Path | bytes,
        vocab: Mapping[str, int],
        target_vocab: Mapping[str, int] | None = None,
        *,
        source_lang: str | None = None,
        target_lang: str | None = None,
        model_max_length: int = 512,
    ) -> None:
        self._source_model, self._target_model = model_bytes(source_model), model_bytes(target_model)
        self.separate_vocabs = target_vocab is not None
        self._source = _Side(source_model, vocab)
        self._target = _Side(target_model, vocab if target_vocab is None else target_vocab)
        self.source_lang, self.target_lang = source_lang, target_lang
        self._config = {
            "clean_up_tokenization_spaces": False,
            "eos_token": END,
            "model_max_length": model_max_length,
            "pad_token": PAD,
            "separate_vocabs": self.separate_vocabs,
            "source_lang": source_lang,
            "target_lang": target_lang,
            "tokenizer_class": "MarianTokenizer",
            "unk_token": UNKNOWN,
        }
        self.vocab_size, self.source_vocab_size = self._target.size, self._source.size
        # MarianTokenizer takes the special ids of both sides from the source table. Where the tables differ
        # in size, so do the ids of <pad>, and it skips a real target piece: here each side has its own.
        self.pad_id, self.source_pad_id = self._target.pad_id, self._source.pad_id
        self.start_id = self.pad_id  # Marian's convention: decoding starts from the pad token
        self.end_id, self.unknown_id = self._target.end_id, self._target.unknown_id

    @property
    def joint(self) -> bool:
        """Whether both sides are cut alike and share their ids."""
        return not self.separate_vocabs and self._source_model == self._target_model

    @property
    def language_tags(self) -> list[str]:
        """The tags, such as `>>fra<<`, that can start a source line; most models have none."""
        return list(self._source.tags)

    def encode_source(self, line: str) -> list[int]:
        return self.encode_source_batch([line])[0]

    def encode_target(self, line: str) -> list[int]:
        return self.encode_target_batch([line])[0]

    def encode_source_batch(self, lines: Sequence[str], drawing: Drawing | None = None) -> list[list[int]]:
        """Source ids with the end token; with a `drawing`, of sub-words that are drawn."""
        return self._source.encode(lines, refuse_unknown_tags=True, drawing=drawing) if lines else []

    def encode_target_batch(self, lines: Sequence[str], drawing: Drawing | None = None) -> list[list[int]]:
        """Target ids with the end token; with a `drawing`, of sub-words that are drawn."""
        return self._target.encode(lines, refuse_unknown_tags=False, drawing=drawing) if lines else []

    def check_drawing(self, source: Sequence[str], target: Sequence[str]) -> None:
        """Refuses a vocabulary whose sub-words cannot be drawn; the lines are some to try it on."""
        check_drawing(self._source.processor, [without_surrogates(line) for line in source])
        check_drawing(self._target.processor, [without_surrogates(line) for line in target])

    def decode(self, ids: Sequence[int]) -> str:
        return self._target.decode(ids)

    def decode_source(self, ids: Sequence[int]) -> str:
        return self._source.decode(ids)

    def source_pieces(self, line: str) -> list[str]:
        return self._source.pieces(line, refuse_unknown_tags=True)

    def target_pieces(self, line: str) -> list[str]:
        return self._target.pieces(line, refuse_unknown_tags=False)

    def pieces_of(self, ids: Sequence[int]) -> list[str]:
        return self._target.pieces_of(ids)

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "source.spm").write_bytes(self._source_model)
        (folder / "target.spm").write_bytes(self._target_model)
        _write_json(folder / "vocab.json", self._source.vocab)
        if self.separate_vocabs:
            _write_json(folder / "target_vocab.json", self._target.vocab)
        _write_json(folder / "tokenizer_config.json", self._config)

    def save_native(self, folder: Path) -> list[str]:
        """Writes the vocabularies as native Marian reads them, and returns their names, source and target.

        Where the ids are those inside the SentencePiece models, the models are all it needs; else `.vocab.yml` files
        say them, and text is cut by the models beforehand. Marian has no `<pad>`, which is left out where it is last.
        """
        folder.mkdir(parents=True, exist_ok=True)
        sides = {"source": (self._source, self._source_model), "target": (self._target, self._target_model)}
        built_in = all(side.has_own_ids() for side, _ in sides.values())
        shared = not self.separate_vocabs
        if built_in and shared and self._source_model == self._target_model:
            (folder / "vocab.spm").write_bytes(self._source_model)
            return ["vocab.spm"] * 2
        for name, (_, model) in sides.items():
            (folder / f"{name}.spm").write_bytes(model)
        if built_in and not shared:
            return ["source.spm", "target.spm"]
        names = ["vocab.yml"] * 2 if shared else ["source.vocab.yml", "target.vocab.yml"]
        for name, (side, _) in zip(names, sides.values(), strict=True):
            table = {piece: i for piece, i in side.vocab.items() if piece != PAD or i < side.size - 1}
            lines = [f"{_yaml_string(piece)}: {i}\n" for piece, i in table.items()]
            write_whole(folder / name, "".join(lines))
        return names


# --- training -----------------------------------------------------------------------------------------------


def load_tokenizer(folder: Path) -> Tokenizer:
    """Loads the tokenizer of a model folder: ours, or Hugging Face's Marian layout."""
    if not folder.is_dir():
        raise UserError(f"There is no folder {folder}: name a folder that holds a model.")
    config = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
    name = config.get("tokenizer_class") or "MarianTokenizer"  # OPUS-MT folders of 2020 do not say
    if name == "CharacterTokenizer":
        _require_files(folder, ["vocab.json"])
        vocab = _read_vocab(folder / "vocab.json")
        return CharacterTokenizer(sorted(vocab.keys() - {PAD, START, END}, key=vocab.__getitem__))
    if name != "MarianTokenizer":
        raise UserError(f"{folder} has a {name}, which is not supported: use a Marian (OPUS-MT) model folder.")
    separate = config.get("separate_vocabs", (folder / "target_vocab.json").is_file())
    _require_files(folder, ["source.spm", "target.spm", "vocab.json", *(["target_vocab.json"] if separate else [])])
    return SentencePieceTokenizer(
        folder / "source.spm",
        folder / "target.spm",
        _read_vocab(folder / "vocab.json"),
        _read_vocab(folder / "target_vocab.json") if separate else None,
        source_lang=config.get("source_lang"),
        target_lang=config.get("target_lang"),
        model_max_length=config.get("model_max_length", 512),
    )


def _require_files(folder: Path, names: Sequence[str]) -> None:
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise UserError(f"{folder} lacks {', '.join(missing)}: copy the whole model folder, tokenizer files included.")


def _read_vocab(path: Path) -> dict[str, int]:
    vocab = read_json(path)
    if not vocab or not all(type(index) is int and index >= 0 for index in vocab.values()):
        raise UserError(f"{path} is not a vocabulary: it must give every piece a whole number from 0 up.")
    return vocab


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_whole(path, json.dumps(content, indent=2) + "\n")


def _yaml_string(text: str) -> str:
    """A double-quoted YAML scalar: a JSON string in which what YAML takes for a line break or a control is escaped."""
    quoted = json.dumps(text, ensure_ascii=False)
    return _YAML_CONTROL.sub(lambda match: f"\\u{ord(match.group()):04x}", quoted)


def model_bytes(model: Path | bytes) -> bytes:
    if isinstance(model, bytes):
        return model
    if not model.is_file():
        raise UserError(f"There is no file {model}: name a SentencePiece model.")
    return model.read_bytes()


def load_processor(model: Path | bytes) -> Any:
    import sentencepiece

    content = model_bytes(model)
    try:
        if not content:
            raise RuntimeError("it is empty")  # SentencePiece would load nothing, and crash later
        return sentencepiece.SentencePieceProcessor(model_proto=content)
    except RuntimeError as error:
        name = "This" if isinstance(model, bytes) else model
        raise UserError(f"{name} is not a SentencePiece model ({error}): copy or download it again.") from error


# --- helpers ------------------------------------------------------------------------------------------------


def _until(ids: Sequence[int], end_id: int) -> Iterable[int]:
    for token in map(int, ids):
        if token == end_id:
            return
        yield token


def is_language_tag(text: str) -> bool:
    """Whether a text reads `>>name<<`, which is one token where the vocabulary has it."""
    return _LANGUAGE_TAG.fullmatch(text) is not None


def without_surrogates(line: str) -> str:
    """Replaces lone surrogates, which UTF-8 cannot hold, by U+FFFD; two that make a character become it."""
    if line.isascii() or not _SURROGATE.search(line):
        return line
    return line.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
