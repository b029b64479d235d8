"""An explanation as a page: one HTML file that needs no network and no other file."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

import numpy as np

from transformer_jax.alignment import Step, pharaoh
from transformer_jax.explain import KINDS, Explanation, labels

TEMPLATE = "pages/attention.html"
DATA = "/*DATA*/"
"""Where the template takes its data, as JSON."""
UNIT = 10_000
"""Weights are whole numbers in the page: so many are 1."""
STEPS: tuple[Step, ...] = ("writes", "reads")


def attention_page(
    explanation: Explanation, layer: int | None = None, head: int | None = None, step: Step = "writes"
) -> str:
    """The page; it opens with cross-attention of this layer (the last one) and head (the mean of all)."""
    data = page_data(explanation) | {
        "start": {"layer": layer or len(explanation.maps.cross_NHTS), "head": head or 0, "step": step}
    }
    template = (files("transformer_jax") / TEMPLATE).read_text(encoding="utf-8")
    before, after = template.split(DATA)
    return before + json_in_html(data) + after


def page_data(explanation: Explanation) -> dict[str, Any]:
    """What the page shows. Word links are made here, by the rules of `alignment`: the page only draws them."""
    maps = {}
    for kind in KINDS:
        weights = explanation.weights(kind)
        rows, columns = explanation.labels(kind)
        maps[kind] = {
            "layers": weights.shape[0],
            "heads": weights.shape[1],
            "rows": rows,
            "columns": columns,
            "weights": np.rint(weights * UNIT).astype(int).ravel().tolist(),
        }
    n_layers, n_heads = explanation.maps.cross_NHTS.shape[:2]
    return {
        "source": explanation.source,
        "target": explanation.target,
        "given": explanation.given,
        "unit": UNIT,
        "maps": maps,
        "probabilities": [round(float(np.exp(p)), 4) for p in explanation.token_log_probs],
        "logProb": round(sum(explanation.token_log_probs), 4),
        "sourceWords": labels([word.text for word in explanation.source_words]),
        "targetWords": labels([word.text for word in explanation.target_words]),
        "links": {
            step: [
                [pharaoh(explanation.links(layer + 1, head or None, step)) for head in range(n_heads + 1)]
                for layer in range(n_layers)
            ]
            for step in STEPS
        },
    }


def json_in_html(data: Any) -> str:
    """JSON that stands inside a script element: no text in it can end the element or begin another."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text.encode("utf-8", "replace").decode("utf-8")
