"""Parameters under other people's names: a table says where each of ours stands, and how the two arrays relate.

Reading goes through the whole table and accounts for the whole source: every parameter of ours is filled, in the shape
that it must have, and every tensor there is used or explained. What is neither is an error that names it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from transformer_jax.config import ModelConfig
from transformer_jax.errors import UserError

Params = dict[str, Any]
Tensors = Mapping[str, np.ndarray]


class Entry(NamedTuple):
    """One parameter: its path in our tree, its name there, and how the two arrays relate."""

    path: tuple[str, ...]
    name: str
    transposed: bool = False
    width_axes: tuple[int, ...] = ()
    """Our axes that run over the model's channels: those that positions of another layout permute."""
    row: bool = False
    """A vector here, a matrix of one row there."""
    aliases: tuple[str, ...] = ()
    """Other names under which the same tensor may stand, instead or as well."""
    zeros: bool = False
    """Left out, it is all zeros there: a bias that Marian's layout can do without."""


@dataclass(frozen=True)
class Account:
    """What became of the tensors of a source."""

    n_tensors: int
    n_used: int
    """How many became a parameter."""
    n_parameters: int
    """Numbers in our parameters, without the output bias."""
    n_bias: int
    """Numbers in the output bias, which PyTorch does not count (it is a buffer there)."""
    explained: Mapping[str, str] = field(default_factory=dict)
    """The others, each with the reason why it is not a parameter of its own."""

    def __str__(self) -> str:
        reasons: dict[str, int] = {}
        for reason in self.explained.values():
            reasons[reason] = reasons.get(reason, 0) + 1
        rest = ", ".join(f"{n} {reason}" for reason, n in reasons.items())
        return (
            f"{self.n_tensors} tensors: {self.n_used} carried over, {len(self.explained)} not"
            + (f" ({rest})" if rest else "")
            + f"; {self.n_parameters:,} parameters"
            + (f" and an output bias of {self.n_bias:,}" if self.n_bias else "")
        )


def parameter_shapes(config: ModelConfig) -> Params:
    """The tree of our parameters' shapes; nothing is computed."""
    import jax
    import jax.numpy as jnp

    from transformer_jax.model import Transformer

    ids = jnp.ones((1, 1), jnp.int32)
    return jax.eval_shape(Transformer(config).init, jax.random.key(0), ids, ids)["params"]


def read_entries(
    entries: Sequence[Entry],
    tensors: Tensors,
    shapes: Params,
    explained: Mapping[str, str],
    order: np.ndarray | None = None,
) -> tuple[Params, Account]:
    """Our parameters, float32, out of the tensors of a source.

    `shapes` is a tree of our parameters' shapes; `explained` names tensors that are no parameters of ours, and why;
    `order` is the permutation that `write_entries` was given.
    """
    params: Params = {}
    reasons = {name: reason for name, reason in explained.items() if name in tensors}
    used = set()
    for entry in entries:
        name = _find(entry, tensors)
        expected = tuple(at(shapes, entry.path).shape)
        if name is None:
            put(params, entry.path, np.zeros(expected, np.float32))
            continue
        used.add(name)
        reasons |= {alias: "the tied table again" for alias in _present(entry, tensors) if alias != name}
        put(params, entry.path, _from_there(entry, name, tensors[name], expected, order))
    unknown = sorted(set(tensors) - used - set(reasons))
    if unknown:
        shown = ", ".join(unknown[:5]) + (f" and {len(unknown) - 5} more" if unknown[5:] else "")
        raise UserError(f"The weights hold tensors that this model has no place for: {shown}.")
    sizes = {entry.path: int(np.prod(at(shapes, entry.path).shape)) for entry in entries}
    n_bias = sizes.pop(("logits_bias",), 0)
    return params, Account(len(tensors), len(used), sum(sizes.values()), n_bias, reasons)


def write_entries(entries: Iterable[Entry], params: Params, order: np.ndarray | None = None) -> dict[str, np.ndarray]:
    """Our parameters under the table's names, float32. `order`: which of our channels comes n-th there."""
    tensors = {}
    for entry in entries:
        array = np.asarray(at(params, entry.path), np.float32)
        if order is not None:
            for axis in entry.width_axes:
                array = np.take(array, order, axis)
        array = array.T if entry.transposed else array
        tensors[entry.name] = np.ascontiguousarray(array[None] if entry.row else array)
    return tensors


def _find(entry: Entry, tensors: Tensors) -> str | None:
    """The name under which the source holds it; None for zeros that were left out."""
    names = _present(entry, tensors)
    if not names:
        if entry.zeros:
            return None
        others = f" (nor {', '.join(entry.aliases)})" if entry.aliases else ""
        raise UserError(f"The weights hold no tensor {entry.name}{others}; they are of another model, or damaged.")
    for name in names[1:]:
        if not np.array_equal(tensors[name], tensors[names[0]], equal_nan=True):
            raise UserError(
                f"Tensors {names[0]} and {name} should be one table, but differ; the weights are not of this model."
            )
    return names[0]


def _present(entry: Entry, tensors: Tensors) -> list[str]:
    return [name for name in (entry.name, *entry.aliases) if name in tensors]


def _from_there(
    entry: Entry, name: str, array: np.ndarray, expected: tuple[int, ...], order: np.ndarray | None
) -> np.ndarray:
    if not np.issubdtype(array.dtype, np.floating) and array.dtype.name != "bfloat16":
        raise UserError(
            f"Tensor {name} holds {array.dtype}, not floating-point numbers; quantised weights are not read."
        )
    array = array.astype(np.float32)
    there = array.shape
    if entry.row and array.ndim == 2 and len(array) == 1:
        array = array[0]
    array = array.T if entry.transposed else array
    if array.shape != expected:
        wanted = expected[::-1] if entry.transposed else (1, *expected) if entry.row and len(there) == 2 else expected
        raise UserError(f"Tensor {name} has shape {list(there)}, but the configuration says {list(wanted)}.")
    if order is not None:
        for axis in entry.width_axes:
            array = np.take(array, np.argsort(order), axis)
    return np.ascontiguousarray(array)


def at(tree: Params, path: tuple[str, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def put(tree: Params, path: tuple[str, ...], value: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value
