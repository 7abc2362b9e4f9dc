"""What every metric shares: arrays from any framework, checked shapes, means over what was measured."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from holdfast.core.errors import HoldfastError

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]


def _without_torch(values: Any) -> Any:
    """Tensors (also inside lists) as NumPy arrays; ``double`` because NumPy knows no bfloat16."""
    if hasattr(values, "detach"):
        return values.detach().cpu().double().numpy()
    if isinstance(values, list | tuple):
        return [_without_torch(value) for value in values]
    return values


def as_array(values: ArrayLike, name: str, axes: str) -> FloatArray:
    """``values`` as float64, one axis for each word of ``axes``; a leading ``...`` allows any further axes.

    Takes NumPy arrays, nested lists (``None`` becomes NaN) and torch tensors on any device.
    """
    wanted = axes.split()
    shape = f"[{', '.join(wanted)}]"
    try:
        array = np.asarray(_without_torch(values), dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise HoldfastError(f"{name} must be an array of numbers of shape {shape}: {error}") from error
    fits = array.ndim >= len(wanted) - 1 if wanted[0] == "..." else array.ndim == len(wanted)
    if not fits:
        raise HoldfastError(f"{name} must have the shape {shape}, not {list(array.shape)}")
    return array


def as_labels(values: ArrayLike, name: str) -> NDArray[np.int64]:
    """``values`` as int64 class labels of shape [N], counting from 0."""
    array = as_array(values, name, "N")
    if not np.all((array >= 0) & (array < 2**53) & (array == np.floor(array))):
        raise HoldfastError(f"{name} must be whole numbers from 0 on, one for each sample")
    return array.astype(np.int64)


def as_counts(values: ArrayLike, name: str, axes: str) -> FloatArray:
    """``values`` as numbers of samples: like `as_array`, and none below zero."""
    array = as_array(values, name, axes)
    if not np.all(array >= 0):
        raise HoldfastError(f"{name} must be numbers of samples, 0 or more")
    return array


def agree(axis: str, **sizes: int) -> None:
    """Refuse arrays, given as ``name=size``, whose sizes along ``axis`` differ."""
    if len(set(sizes.values())) > 1:
        told = ", ".join(f"{name} has {size}" for name, size in sizes.items())
        raise HoldfastError(f"arrays must agree on {axis}: {told}")


def broadcast(**shapes: tuple[int, ...]) -> None:
    """Refuse arrays, given as ``name=shape``, that do not broadcast against each other."""
    try:
        np.broadcast_shapes(*shapes.values())
    except ValueError as error:
        told = " and ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        raise HoldfastError(f"leading axes must be equal or absent: {told}") from error


def mean_measured(values: FloatArray) -> FloatArray:
    """Mean over the last axis of what is not NaN; NaN where nothing is left."""
    measured = ~np.isnan(values)
    total = np.where(measured, values, 0.0).sum(axis=-1)
    return divide(total, measured.sum(axis=-1))


def divide(numerator: ArrayLike, denominator: ArrayLike) -> FloatArray:
    """Quotient in which 0 / 0 is NaN without a warning."""
    with np.errstate(invalid="ignore"):
        return cast(FloatArray, np.true_divide(numerator, denominator))


def unit_vectors(vectors: FloatArray) -> FloatArray:
    """Vectors along the last axis, scaled to length 1; below a length of 1e-8 they shrink to zero instead."""
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return np.asarray(vectors / np.maximum(lengths, 1e-8))
