"""Translation speed beside CTranslate2 and transformers: same weights, same sentences, same work, turn by turn.

    python benchmarks/decode.py --source FILE --tokenizer MODEL_FOLDER

FILE holds sentences (English news, say); the first --lines of it are cut into pieces by the tokenizer of MODEL_FOLDER
(its ids are spread over the larger vocabulary). The weights have the shapes of opus-mt-en-de (73.9 million parameters)
and are random, seeded; every output is made --length tokens long, so that all do equal work. float32, the same number
of threads. A line of results is the median over --repeats turns; ratios are medians of the
turns' ratios. Needs torch, transformers and ctranslate2.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

SETTINGS = {"greedy, batch 32": (1, 32), "beam 4, batch 32": (4, 32), "greedy, one by one": (1, 1)}
Run = Callable[[list[list[int]], int, int], int]
"""(sentences, beam size, batch size) -> tokens made"""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--lines", type=int, default=200)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peers", nargs="*", default=["ctranslate2", "transformers"])
    parser.add_argument("--settings", nargs="*", default=list(SETTINGS))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)

    from marian_parity import random_model

    from transformer_jax.corpus import iterate_file
    from transformer_jax.tokenizer import SentencePieceTokenizer, load_tokenizer

    tokenizer = load_tokenizer(options.tokenizer)
    lines = [line for _, line in zip(range(options.lines), iterate_file(options.source), strict=False)]
    sentences = [[2 + 9973 * i % 58_000 for i in ids[:-1]] + [0] for ids in tokenizer.encode_source_batch(lines)]
    print(f"{len(sentences)} sentences, {sum(map(len, sentences)):,} tokens, longest {max(map(len, sentences))}")
    model = random_model()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / "model"
        model.save_pretrained(folder)
        vocab = {"</s>": 0, "<unk>": 1, **{f"t{i}": i for i in range(2, 58_100)}, "<pad>": 58_100}
        spm = options.tokenizer / "source.spm"
        SentencePieceTokenizer(spm, spm, vocab).save(folder)
        runs: dict[str, Run] = {"ours": prepare_ours(folder, options)}
        if "ctranslate2" in options.peers:
            runs["ctranslate2"] = prepare_ctranslate2(folder, list(vocab), options)
        if "transformers" in options.peers:
            runs["transformers"] = prepare_transformers(model, options)
        for name in options.settings:
            report(name, runs, sentences, options)
    return 0


def report(name: str, runs: dict[str, Run], sentences: list[list[int]], options: argparse.Namespace) -> None:
    beam_size, batch_size = SETTINGS[name]
    if batch_size == 1:
        sentences = sentences[:: max(1, len(sentences) // 20)]
    speeds: dict[str, list[float]] = {peer: [] for peer in runs}
    for turn in range(options.repeats + 1):  # the first compiles and warms up
        for peer, run in runs.items():
            began = time.perf_counter()
            tokens = run(sentences, beam_size, batch_size)
            if turn:
                speeds[peer].append(tokens / (time.perf_counter() - began))
    result: dict[str, Any] = {peer: statistics.median(values) for peer, values in speeds.items()}
    ratios = {
        peer: statistics.median(a / b for a, b in zip(speeds["ours"], values, strict=True))
        for peer, values in speeds.items()
        if peer != "ours"
    }
    if options.json:
        print(json.dumps({"setting": name, "tokens_per_second": result, "ratios": ratios}))
        return
    shown = ", ".join(f"{peer} {speed:,.0f}" for peer, speed in result.items())
    against = ", ".join(f"{ratio:.2f}x {peer}" for peer, ratio in ratios.items())
    print(f"{name:<20} tokens/s: {shown}   ({against})", flush=True)


def prepare_ours(folder: Path, options: argparse.Namespace) -> Run:
    from transformer_jax.config import DecodeConfig
    from transformer_jax.sharding import data_mesh, use_compilation_cache
    from transformer_jax.translator import Translator

    use_compilation_cache()
    translator = Translator.from_pretrained(folder, mesh=data_mesh(1))

    def run(sentences: list[list[int]], beam_size: int, batch_size: int) -> int:
        made = 0
        for request in [sentences] if batch_size > 1 else [[sentence] for sentence in sentences]:
            config = DecodeConfig(
                beam_size=beam_size,
                min_length=options.length,
                max_length=options.length,
                extra_length=None,
                batch_tokens=batch_size * 128,  # so many rows of up to 128 tokens
            )
            made += sum(len(found[0].tokens) for found in translator.translate_tokens(request, config))
        return made

    return run


def prepare_ctranslate2(folder: Path, names: list[str], options: argparse.Namespace) -> Run:
    import ctranslate2

    converted = folder.parent / "ct2"
    ctranslate2.converters.TransformersConverter(str(folder)).convert(str(converted))
    translator = ctranslate2.Translator(
        str(converted), device="cpu", compute_type="float32", intra_threads=options.threads, inter_threads=1
    )

    def run(sentences: list[list[int]], beam_size: int, batch_size: int) -> int:
        texts = [[names[i] for i in sentence[:-1]] for sentence in sentences]
        made = 0
        for request in [texts] if batch_size > 1 else [[text] for text in texts]:
            results = translator.translate_batch(
                request,
                beam_size=beam_size,
                max_batch_size=batch_size,
                min_decoding_length=options.length,
                max_decoding_length=options.length,
                length_penalty=1.0,
            )
            made += sum(len(result.hypotheses[0]) for result in results)
        return made

    return run


def prepare_transformers(model: Any, options: argparse.Namespace) -> Run:
    import torch

    torch.set_num_threads(options.threads)

    def run(sentences: list[list[int]], beam_size: int, batch_size: int) -> int:
        made = 0
        ordered = sorted(sentences, key=len)
        for first in range(0, len(ordered), batch_size):
            group = ordered[first : first + batch_size]
            longest = max(map(len, group))
            ids = torch.tensor([s + [58_100] * (longest - len(s)) for s in group])
            with torch.no_grad():
                out = model.generate(
                    input_ids=ids,
                    attention_mask=(ids != 58_100).long(),
                    num_beams=beam_size,
                    do_sample=False,
                    min_new_tokens=options.length,
                    max_new_tokens=options.length,
                    bad_words_ids=[[58_100]],
                )
            made += out[:, 1:].numel()
        return made

    return run


if __name__ == "__main__":
    sys.exit(main())
