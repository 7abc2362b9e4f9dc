"""Safe reading of arrays from pickles, such as CIFAR's batches.

A pickle is a program that may import and call any function. This reader allows only the names by which NumPy arrays
are pickled, and replaces each by a class that stores the array's type, shape and bytes.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
from typing import Any, Self

import numpy as np

from holdfast.core.errors import HoldfastError


class _Type:
    """Replaces ``numpy.dtype``."""

    def __init__(self, code: str | bytes, *_: object) -> None:
        self.dtype = np.dtype(code.decode("ascii") if isinstance(code, bytes) else code)
        if self.dtype.kind not in "buif":
            raise pickle.UnpicklingError(f"an array of type {self.dtype}")

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        big_endian = state[1] in (">", b">")
        self.dtype = self.dtype.newbyteorder(">" if big_endian else "<")


class _Array:
    """Replaces ``numpy.ndarray`` and the function that makes an array whose state is set later."""

    def __init__(self, *_: object) -> None:
        self.value = np.empty(0)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, kind, fortran, raw = state
        self.value = _to_array(raw, kind, shape, "F" if fortran else "C")


class _ArrayFromBuffer:
    """Replaces the function that makes an array from a buffer, in pickles of protocol 5."""

    def __init__(self, raw: bytes, kind: _Type, shape: tuple[int, ...], order: str) -> None:
        self.value = _to_array(raw, kind, shape, order)

    def __setstate__(self, state: object) -> None:
        raise pickle.UnpicklingError("an array with a state")


class _Encoded(bytes):
    """Replaces ``_codecs.encode``, which Python 3 uses for bytes in old protocols."""

    def __new__(cls, text: str, encoding: str) -> Self:
        if encoding != "latin1":
            raise pickle.UnpicklingError(f"bytes encoded as {encoding}")
        return super().__new__(cls, text.encode("latin1"))

    def __setstate__(self, state: object) -> None:
        raise pickle.UnpicklingError("bytes with a state")


def _to_array(raw: bytes, kind: _Type, shape: tuple[int, ...], order: str) -> np.ndarray:
    if not isinstance(kind, _Type) or len(raw) != math.prod(shape) * kind.dtype.itemsize:
        raise pickle.UnpicklingError("an array whose bytes do not fit its shape")
    return np.frombuffer(raw, kind.dtype).reshape(shape, order="F" if order == "F" else "C")


_REPLACEMENTS = {
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Type,
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy.core.numeric", "_frombuffer"): _ArrayFromBuffer,
    ("numpy._core.numeric", "_frombuffer"): _ArrayFromBuffer,
    ("_codecs", "encode"): _Encoded,
}


class _SafeUnpickler(pickle.Unpickler):
    """An unpickler that finds no class or function except the replacements."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) not in _REPLACEMENTS:
            raise pickle.UnpicklingError(
                f"it names {module_name}.{global_name}, which pickled arrays do not need"
            )
        return _REPLACEMENTS[module_name, global_name]


def _check_memo(content: bytes) -> None:
    """Raise an error for memo indices above the possible number of objects: memory is allocated up to the index."""
    for instruction, argument, _ in pickletools.genops(content):
        if instruction.name in ("PUT", "BINPUT", "LONG_BINPUT") and int(argument or 0) >= len(content):
            raise pickle.UnpicklingError(f"it has the memo index {argument}")


def _plain(value: Any, converted: dict[int, Any]) -> Any:
    """The value with arrays in place of the replacements; ``converted`` caches values that occur more than once."""
    if isinstance(value, bytes):
        return value.decode("latin1")
    if isinstance(value, _Array | _ArrayFromBuffer):
        return value.value
    if not isinstance(value, dict | list | tuple):
        return value
    if id(value) not in converted:
        if isinstance(value, dict):
            result: Any = {_plain(key, converted): _plain(item, converted) for key, item in value.items()}
        else:
            result = type(value)(_plain(item, converted) for item in value)
        converted[id(value)] = result
    return converted[id(value)]


def read_pickled_arrays(content: bytes, name: str) -> Any:
    """The dictionaries, lists, strings, numbers and numeric arrays of a pickle; arrays are read-only.

    Any other content, and so anything that could run code, raises an error. ``name`` is the file's name in errors.
    """
    try:
        _check_memo(content)
        return _plain(_SafeUnpickler(io.BytesIO(content), encoding="bytes").load(), {})
    except Exception as error:  # a damaged pickle may raise any error
        raise HoldfastError(f"{name} is refused as a file of arrays: {error}") from error
