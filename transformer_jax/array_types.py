"""Shapes in annotations: `Float[Array, "B T D"]`, in the letters of the package's dimension key.

The tests check every such annotation with jaxtyping and beartype. On a machine that has neither, the same
annotations are plain arrays, so that the model runs with jax, flax and numpy alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jax import Array

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
else:
    try:
        from jaxtyping import Bool, Float, Int
    except ModuleNotFoundError:

        class _Shaped:
            def __class_getitem__(cls, array_and_shape: tuple[Any, str]) -> Any:
                return array_and_shape[0]

        Bool = Float = Int = _Shaped

__all__ = ["Array", "Bool", "Float", "Int"]
