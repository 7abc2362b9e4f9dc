"""Conversion of the user's arrays to tensors; anything but an array of numbers raises an error that names it."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from holdfast.core.errors import HoldfastError

LABELS_HINT = "; pass the names as classes and their indices, from 0, as labels"
_WIDE_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
_FLOATS = (torch.float16, torch.float32, torch.float64)


def as_tensor(values: ArrayLike | Tensor, name: str, hint: str = "") -> Tensor:
    """A dense tensor on the CPU, from an array, a tensor, or an object that NumPy converts.

    Wide unsigned integers become int64; float types that NumPy lacks become float32. ``hint`` is appended to the error
    for strings.
    """
    try:
        if isinstance(values, Tensor):
            values = _plain_tensor(values)
        if not isinstance(values, Tensor):
            values = _plain_array(values, hint)
        tensor = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        if "inhomogeneous" in str(error):
            raise HoldfastError(
                f"{name} has samples of different lengths; make them equal, for instance by cropping or padding"
            ) from error
        raise HoldfastError(f"{name} must be an array of numbers: {error}") from error
    if tensor.is_complex():
        raise HoldfastError(f"{name} must be real numbers, not complex ones")
    return tensor


def _plain_tensor(values: Tensor) -> Tensor | np.ndarray:
    if values.is_meta:
        raise TypeError("it is a meta tensor, which contains no values")
    if values.layout is not torch.strided:
        raise TypeError("it is a sparse tensor; pass its to_dense()")
    if values.is_quantized:
        raise TypeError("it is a quantized tensor; pass its dequantize()")
    values = values.detach().cpu()
    if values.dtype in _WIDE_UNSIGNED:
        return values.numpy()
    return values.float() if values.is_floating_point() and values.dtype not in _FLOATS else values


def _plain_array(values: ArrayLike, hint: str) -> np.ndarray:
    """An array that torch accepts: torch needs writable memory and has few operations for wide unsigned integers."""
    if hasattr(values, "toarray"):
        raise TypeError("it is a sparse matrix; pass its toarray()")
    if np.ma.isMaskedArray(values) and np.ma.is_masked(values):
        raise TypeError("it is a masked array; replace the masked values, for example by its filled(0)")
    array = np.require(values, requirements=["C", "W"])
    if array.dtype.kind in "OSUT":
        raise TypeError(f"it contains strings or other objects{hint}")
    if array.dtype.kind in "mM":
        raise TypeError("it contains dates or times; convert them to numbers, such as the days since a date")
    if array.dtype.kind == "V":
        raise TypeError("it is a structured array; pass it to Dataset.from_frame as a mapping of columns")
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        if array.size and array.max() > np.iinfo(np.int64).max:
            raise TypeError("it contains integers above 2^63 - 1")
        array = array.astype(np.int64)
    elif array.dtype.kind == "f" and array.dtype.itemsize > 8:
        array = array.astype(np.float64)
    return array.astype(array.dtype.newbyteorder("="), copy=False)
