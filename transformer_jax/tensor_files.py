"""Files of named tensors: safetensors, whole or in shards, and PyTorch's pytorch_model.bin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from transformer_jax.errors import UserError
from transformer_jax.files import read_json

WHOLE, INDEX, PICKLED, PICKLED_INDEX = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


def read_tensors(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of a Hugging Face model folder, in the first of its formats that is there.

    Only pytorch_model.bin needs PyTorch, which reads nothing but tensors from it (weights_only).
    """
    if (folder / WHOLE).is_file():
        return _read_safetensors(folder / WHOLE)
    if (folder / INDEX).is_file():
        return _read_shards(folder, INDEX)
    if (folder / PICKLED).is_file():
        return _read_pickled(folder / PICKLED)
    if (folder / PICKLED_INDEX).is_file():
        return _read_shards(folder, PICKLED_INDEX)
    raise UserError(f"{folder} holds no {WHOLE}, nor shards of it, nor a {PICKLED}; copy the whole model folder.")


def _read_shards(folder: Path, index: str) -> dict[str, np.ndarray]:
    where = read_json(folder / index).get("weight_map")
    if not isinstance(where, dict) or not all(isinstance(name, str) for name in where.values()):
        raise UserError(f"{folder / index} has no weight_map that names the shards; copy it again.")
    tensors: dict[str, np.ndarray] = {}
    for name in sorted(set(where.values())):
        if Path(name).name != name or not (folder / name).is_file():
            raise UserError(f"{folder} lacks the shard {name} that its {index} names; copy the whole model folder.")
        read = _read_pickled if name.endswith(".bin") else _read_safetensors
        tensors |= read(folder / name)
    missing = sorted(where.keys() - tensors.keys())
    if missing:
        raise UserError(f"The shards in {folder} lack {missing[0]}, which {index} promises; copy them again.")
    return tensors


def _read_safetensors(path: Path) -> dict[str, np.ndarray]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
    except SafetensorError as error:
        raise UserError(f"{path} cannot be read ({error}); copy it again.") from error
    except TypeError as error:  # a type that numpy does not have
        raise UserError(f"{path} holds numbers of a type that is not read ({error}); save it in float32.") from error


def _read_pickled(path: Path) -> dict[str, np.ndarray]:
    try:
        import torch
    except ImportError as error:
        raise UserError(
            f"Reading {path.name} needs PyTorch: pip install torch, or save the model as safetensors where it is there."
        ) from error
    try:
        tensors: Any = torch.load(path, map_location="cpu", weights_only=True)
        return {name: _to_numpy(tensor) for name, tensor in tensors.items()}
    except Exception as error:  # a damaged pickle can make PyTorch raise anything
        reason = str(error).split("\n")[0]
        raise UserError(f"{path} is not a file of tensors that PyTorch can read ({reason}); copy it again.") from error


def _to_numpy(tensor: Any) -> np.ndarray:
    return (tensor.float() if tensor.is_floating_point() else tensor).numpy()
