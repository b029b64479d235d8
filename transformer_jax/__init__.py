"""The encoder-decoder Transformer of "Attention Is All You Need" (Vaswani et al. 2017) in JAX and Flax.

Dimension key, used in names and annotations throughout (`x_BTD`, `scores_BHTS`):

    B  batch (rows)            H  attention heads          V  vocabulary
    S  source length           K  size of one head, D / H  W  beam width
    T  target length           F  feed-forward width, d_ff N  layers
    D  model width, d_model
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformer_jax.config import ModelConfig
    from transformer_jax.errors import UserError
    from transformer_jax.model import DecoderState, Transformer
    from transformer_jax.translator import Translation, Translator

__all__ = ["DecoderState", "ModelConfig", "Transformer", "Translation", "Translator", "UserError"]

_MODULES = {
    "ModelConfig": "config",
    "UserError": "errors",
    "DecoderState": "model",
    "Transformer": "model",
    "Translation": "translator",
    "Translator": "translator",
}


def __getattr__(name: str) -> Any:
    # Names are imported when they are asked for: the paper part needs jax, flax and numpy only, and a program can
    # look at its arguments before any of them is loaded.
    if name in _MODULES:
        return getattr(import_module(f"transformer_jax.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
