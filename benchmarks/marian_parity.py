"""A model of opus-mt-en-de's size beside transformers: encoder output, logits, greedy ids.

    python benchmarks/marian_parity.py [FOLDER]

Without FOLDER the weights are random (seeded), with an output bias and a row for <pad> that are not zero; with FOLDER,
a downloaded OPUS-MT model for instance, they are real. Needs torch and transformers.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

SENTENCES = 32


def random_model() -> Any:
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.MarianConfig(
        vocab_size=58_101,
        d_model=512,
        encoder_layers=6,
        decoder_layers=6,
        encoder_attention_heads=8,
        decoder_attention_heads=8,
        encoder_ffn_dim=2048,
        decoder_ffn_dim=2048,
        max_position_embeddings=512,
        activation_function="swish",
        scale_embedding=True,
        pad_token_id=58_100,
        decoder_start_token_id=58_100,
        eos_token_id=0,
        forced_eos_token_id=None,
    )
    model = transformers.MarianMTModel(config)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "embed_positions" not in name:
                tensor.add_(torch.randn_like(tensor) * 0.02)
        model.final_logits_bias.copy_(torch.randn_like(model.final_logits_bias))
        # Sharper layer norms, so that values are as large as those of the released model (up to 9).
        for name, tensor in model.named_parameters():
            if name.endswith("layer_norm.weight"):
                tensor.mul_(2.0)
    return model.eval()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?")
    folder = parser.parse_args().folder
    import torch
    import transformers

    model = random_model() if folder is None else transformers.MarianMTModel.from_pretrained(folder).eval()
    with tempfile.TemporaryDirectory() as made:
        if folder is None:
            folder = Path(made)
            model.save_pretrained(folder)
        return compare(model, folder, torch)


def compare(model: Any, folder: Path, torch: Any) -> int:
    import jax

    from transformer_jax import Transformer
    from transformer_jax.decoding import make_decode
    from transformer_jax.model_folder import load_model
    from transformer_jax.sharding import data_mesh

    loaded = load_model(folder)
    print(loaded.account)
    c = loaded.config
    rng = np.random.default_rng(0)
    lengths = rng.integers(4, 24, SENTENCES)
    source = np.full((SENTENCES, 24), c.pad_id, np.int32)
    for row, length in zip(source, lengths, strict=True):
        row[: length - 1] = rng.integers(2, c.vocab_size - 1, length - 1)
        row[length - 1] = c.end_id
    mask = source != c.pad_id
    target = rng.integers(2, c.vocab_size - 1, (SENTENCES, 16)).astype(np.int32)
    target[:, 0] = c.start_id

    inputs = {"input_ids": torch.tensor(source).long(), "attention_mask": torch.tensor(mask).long()}
    with torch.no_grad():
        theirs = model(**inputs, decoder_input_ids=torch.tensor(target).long())
        generated = model.generate(
            **inputs, num_beams=1, do_sample=False, max_new_tokens=24, bad_words_ids=[[c.pad_id]]
        ).numpy()[:, 1:]
    golden = theirs.encoder_last_hidden_state.numpy()

    ours, variables = Transformer(c), {"params": jax.device_put(loaded.params)}
    memory = np.asarray(jax.jit(lambda v, s: ours.apply(v, s, method="encode"))(variables, source))
    logits = np.asarray(jax.jit(ours.apply)(variables, source, target))
    reference = theirs.logits.numpy()
    largest = np.abs(golden[mask]).max()
    print(
        f"encoder output  largest {largest:.2f}, difference {np.abs(memory - golden)[mask].max():.2e} "
        f"({np.abs(memory - golden)[mask].max() / largest:.2e} of it)"
    )
    print(
        f"logits          largest {np.abs(reference).max():.2f}, difference {np.abs(logits - reference).max():.2e}, "
        f"same top token at {(logits.argmax(-1) == reference.argmax(-1)).mean():.2%}"
    )

    decode = make_decode(ours, data_mesh(1))
    found = decode(variables["params"], source, mask.astype(np.int32), np.full(SENTENCES, 24, np.int32), length=24)
    rows = zip(np.asarray(found.tokens_BT), np.asarray(found.lengths_B), generated, strict=True)
    same = sum(row[:n].tolist() == other[:n].tolist() for row, n, other in rows)
    distinct = len({tuple(row) for row in generated})
    print(f"greedy ids      {same} of {SENTENCES} sentences equal ({distinct} different outputs)")
    return 0 if same == SENTENCES else 1


if __name__ == "__main__":
    sys.exit(main())
