"""Beams of this project and of transformers on the same folder and lines, and how far a line depends on its company.

    python benchmarks/beam_parity.py MODEL_FOLDER --source FILE [--lines 1000]

MODEL_FOLDER is one that transformers reads, such as RUN/model of a run on Multi30k. Each difference is shown with the
scores that both give to both outputs: a tie (within 1e-4), or the one whose search found less by its own score. Needs
torch and transformers.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--lines", type=int, default=1000)
    parser.add_argument("--max-length", type=int, default=100)
    parser.add_argument("--part", choices=("parity", "independence", "ctranslate2", "all"), default="all")
    options = parser.parse_args()
    from transformer_jax.corpus import iterate_file
    from transformer_jax.sharding import data_mesh
    from transformer_jax.translator import Translator

    lines = [line for _, line in zip(range(options.lines), iterate_file(options.source), strict=False)]
    translator = Translator.from_pretrained(options.model, mesh=data_mesh(1))
    if options.part in ("parity", "all"):
        compare_with_transformers(translator, lines, options)
    if options.part in ("independence", "all"):
        check_independence(translator, lines)
    if options.part in ("ctranslate2", "all"):
        compare_with_ctranslate2(translator, lines, options)
    return 0


def compare_with_ctranslate2(translator: Any, lines: list[str], options: argparse.Namespace) -> None:
    import json
    import tempfile

    import ctranslate2

    pieces = {i: piece for piece, i in json.loads((options.model / "vocab.json").read_text()).items()}
    with tempfile.TemporaryDirectory() as folder:
        converted = Path(folder) / "ct2"
        ctranslate2.converters.TransformersConverter(str(options.model)).convert(str(converted))
        other = ctranslate2.Translator(str(converted), device="cpu", compute_type="float32")
    sources = [[pieces[i] for i in ids] for ids in translator.tokenizer.encode_source_batch(lines)]
    theirs = other.translate_batch(sources, beam_size=1, max_decoding_length=options.max_length)
    ours = translator.translate(lines, beam_size=1, extra_length=None, max_length=options.max_length)
    equal = sum(
        [pieces[i] for i in a.tokens if i != translator.model.config.end_id] == b.hypotheses[0]
        for a, b in zip(ours, theirs, strict=True)
    )
    print(f"greedy, CTranslate2: {equal} of {len(lines)} equal", flush=True)


def compare_with_transformers(translator: Any, lines: list[str], options: argparse.Namespace) -> None:
    import torch
    import transformers

    model: Any = transformers.MarianMTModel.from_pretrained(options.model).eval()
    torch.set_num_threads(2)
    sources = translator.tokenizer.encode_source_batch(lines)
    order = sorted(range(len(lines)), key=lambda i: len(sources[i]))
    pad = translator.model.config.pad_id
    for beam_size, penalty in ((1, 1.0), (4, 0.6), (4, 1.0), (5, 0.6), (5, 1.0)):
        ours = translator.translate(
            lines, beam_size=beam_size, length_penalty=penalty, extra_length=None, max_length=options.max_length
        )
        theirs: dict[int, list[int]] = {}
        for first in range(0, len(order), 50):
            group = order[first : first + 50]
            width = max(len(sources[i]) for i in group)
            ids = torch.tensor([sources[i] + [pad] * (width - len(sources[i])) for i in group])
            with torch.no_grad():
                out = model.generate(
                    input_ids=ids,
                    attention_mask=(ids != pad).long(),
                    num_beams=beam_size,
                    length_penalty=penalty,
                    do_sample=False,
                    early_stopping=False,
                    max_new_tokens=options.max_length,
                )
            theirs |= {i: until_end(row, pad) for i, row in zip(group, out[:, 1:].tolist(), strict=True)}
        different = [i for i in order if list(ours[i].tokens) != theirs[i]]
        print(f"beam {beam_size}, length_penalty {penalty}: {len(lines) - len(different)} of {len(lines)} equal")
        for i in different:
            scores = translator.score_tokens([(sources[i], ours[i].tokens), (sources[i], theirs[i])])
            lengths = (len(ours[i].tokens), len(theirs[i]))
            a, b = (s.log_prob / n**penalty for s, n in zip(scores, lengths, strict=True))
            verdict = "tie" if abs(a - b) < 1e-4 else "ours is better" if a > b else "theirs is better"
            print(f"  line {i + 1}: ours {a:.5f}, theirs {b:.5f}: {verdict}", flush=True)


def until_end(row: list[int], pad: int) -> list[int]:
    return row[: row.index(0) + 1] if 0 in row else [i for i in row if i != pad]


def check_independence(translator: Any, lines: list[str]) -> None:
    beam = {"beam_size": 4}
    whole = translator.translate(lines, **beam)
    longest = max(len(ids) for ids in translator.tokenizer.encode_source_batch(lines))
    for size in (1, 7, 64):
        pieces = [lines[i : i + size] for i in range(0, len(lines), size)]
        found = [t for piece in pieces for t in translator.translate(piece, **beam)]
        tell(f"{size} at a time", whole, found)
    mixed = np.random.default_rng(0).permutation(len(lines))
    found = translator.translate([lines[i] for i in mixed], **beam)
    tell("in random order", whole, [found[i] for i in np.argsort(mixed)])
    # As many words as the model has room for.
    room = min(200, translator.model.config.max_length)
    long_line = " ".join([lines[0]] * (room // max(1, longest // 3)))
    tell("with a long line", whole, translator.translate([*lines, long_line], **beam)[:-1])
    one = translator.translate(lines, batch_tokens=512, **beam)
    tell("a quarter of the batch", whole, one)
    scored = translator.score_tokens(
        [(ids, t.tokens) for ids, t in zip(translator.tokenizer.encode_source_batch(lines), whole, strict=True)]
    )
    worst = max(abs(s.log_prob - t.log_prob) for s, t in zip(scored, whole, strict=True))
    print(f"score of the translation against the score returned: at most {worst:.1e} apart")


def tell(name: str, whole: list[Any], found: list[Any]) -> None:
    different = [i for i, (a, b) in enumerate(zip(whole, found, strict=True)) if a.text != b.text]
    gaps = [abs(whole[i].score - found[i].score) for i in different]
    print(f"{name}: {len(different)} of {len(whole)} texts differ {[f'{gap:.1e}' for gap in gaps] or ''}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
