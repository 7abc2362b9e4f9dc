"""Conversion of arrays from any framework, shape checks, and statistics that leave out NaN."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from holdfast.core.errors import HoldfastError

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]


def _without_torch(values: Any) -> Any:
    """Tensors (also inside lists) as NumPy arrays, in double precision because NumPy has no bfloat16."""
    if hasattr(values, "detach"):
        return values.detach().cpu().double().numpy()
    if isinstance(values, list | tuple):
        return [_without_torch(value) for value in values]
    return values


def as_array(values: ArrayLike, name: str, axes: str) -> FloatArray:
    """``values`` as float64, one axis for each word of ``axes``; a leading ``...`` allows any further axes.

    Takes NumPy arrays, nested lists (``None`` becomes NaN) and torch tensors on any device.
    """
    names = axes.split()
    shape = f"[{', '.join(names)}]"
    try:
        array = np.asarray(_without_torch(values), dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise HoldfastError(f"{name} must be an array of numbers of shape {shape}: {error}") from error
    matches = array.ndim >= len(names) - 1 if names[0] == "..." else array.ndim == len(names)
    if not matches:
        raise HoldfastError(f"{name} must have the shape {shape}, not {list(array.shape)}")
    return array


def as_labels(values: ArrayLike, name: str) -> NDArray[np.int64]:
    """``values`` as int64 class labels of shape [N], counting from 0."""
    array = as_array(values, name, "N")
    if not np.all((array >= 0) & (array < 2**53) & (array == np.floor(array))):
        raise HoldfastError(f"{name} must be whole numbers from 0 on, one for each sample")
    return array.astype(np.int64)


def as_counts(values: ArrayLike, name: str, axes: str) -> FloatArray:
    """``values`` as numbers of samples: like `as_array`, with an error for negative numbers."""
    array = as_array(values, name, axes)
    if not np.all(array >= 0):
        raise HoldfastError(f"{name} must be numbers of samples, 0 or more")
    return array


def agree(axis: str, **sizes: int) -> None:
    """Raise an error unless the arrays, given as ``name=size``, have equal sizes along ``axis``."""
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name} has {size}" for name, size in sizes.items())
        raise HoldfastError(f"arrays must agree on {axis}: {listed}")


def broadcast(**shapes: tuple[int, ...]) -> None:
    """Raise an error unless the arrays, given as ``name=shape``, broadcast against each other."""
    try:
        np.broadcast_shapes(*shapes.values())
    except ValueError as error:
        listed = " and ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        raise HoldfastError(f"leading axes must be equal or absent: {listed}") from error


def mean_measured(values: FloatArray) -> FloatArray:
    """Mean over the last axis, leaving out NaN; NaN where no value is left."""
    measured = ~np.isnan(values)
    total = np.where(measured, values, 0.0).sum(axis=-1)
    return divide(total, measured.sum(axis=-1))


def deviation_measured(values: FloatArray) -> FloatArray:
    """Sample standard deviation over the last axis, leaving out NaN; NaN for fewer than 2 values."""
    measured = ~np.isnan(values)
    with np.errstate(invalid="ignore"):
        differences = values - np.expand_dims(mean_measured(values), -1)
    squares = np.where(measured, differences**2, 0.0).sum(axis=-1)
    return np.sqrt(divide(squares, np.maximum(measured.sum(axis=-1) - 1, 0)))


def divide(numerator: ArrayLike, denominator: ArrayLike) -> FloatArray:
    """Quotient in which 0 / 0 is NaN, without a warning."""
    with np.errstate(invalid="ignore"):
        return cast(FloatArray, np.true_divide(numerator, denominator))


def unit_vectors(vectors: FloatArray) -> FloatArray:
    """Vectors along the last axis, scaled to length 1; those shorter than 1e-8 are divided by 1e-8."""
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return np.asarray(vectors / np.maximum(lengths, 1e-8))
