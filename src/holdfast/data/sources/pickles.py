"""Read arrays out of pickled files (CIFAR's batches) without letting the pickle run anything.

A pickle is a program; what makes it dangerous is that it may name any function and call it. This reader lets
it name only what describes a NumPy array, and answers each name with a class of its own that does nothing but
remember the array's type, shape and bytes.
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
    """Stands for ``numpy.dtype``."""

    def __init__(self, code: str | bytes, *_: object) -> None:
        self.dtype = np.dtype(code.decode("ascii") if isinstance(code, bytes) else code)
        if self.dtype.kind not in "buif":
            raise pickle.UnpicklingError(f"an array of type {self.dtype}")

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        big_endian = state[1] in (">", b">")
        self.dtype = self.dtype.newbyteorder(">" if big_endian else "<")


class _Array:
    """Stands for ``numpy.ndarray`` and for the function that makes one, to be filled by its state."""

    def __init__(self, *_: object) -> None:
        self.value = np.empty(0)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, kind, fortran, raw = state
        self.value = _fill(raw, kind, shape, "F" if fortran else "C")


class _ArrayFromBuffer:
    """Stands for the function by which pickles of protocol 5 make an array in one go."""

    def __init__(self, raw: bytes, kind: _Type, shape: tuple[int, ...], order: str) -> None:
        self.value = _fill(raw, kind, shape, order)

    def __setstate__(self, state: object) -> None:
        raise pickle.UnpicklingError("an array with a state")


class _Encoded(bytes):
    """Stands for ``_codecs.encode``, by which Python 3 writes bytes in old protocols."""

    def __new__(cls, text: str, encoding: str) -> Self:
        if encoding != "latin1":
            raise pickle.UnpicklingError(f"bytes encoded as {encoding}")
        return super().__new__(cls, text.encode("latin1"))

    def __setstate__(self, state: object) -> None:
        raise pickle.UnpicklingError("bytes with a state")


def _fill(raw: bytes, kind: _Type, shape: tuple[int, ...], order: str) -> np.ndarray:
    if not isinstance(kind, _Type) or len(raw) != math.prod(shape) * kind.dtype.itemsize:
        raise pickle.UnpicklingError("an array whose bytes do not fit its shape")
    return np.frombuffer(raw, kind.dtype).reshape(shape, order="F" if order == "F" else "C")


_STANDS_FOR = {
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Type,
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy.core.numeric", "_frombuffer"): _ArrayFromBuffer,
    ("numpy._core.numeric", "_frombuffer"): _ArrayFromBuffer,
    ("_codecs", "encode"): _Encoded,
}


class _Reader(pickle.Unpickler):
    """An unpickler for which no class or function exists but the stand-ins."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) not in _STANDS_FOR:
            raise pickle.UnpicklingError(f"it names {module_name}.{global_name}, which array data never does")
        return _STANDS_FOR[module_name, global_name]


def _check_memo(content: bytes) -> None:
    """Refuse places in the memo beyond any that this pickle can need: room would be made for all before them."""
    for instruction, argument, _ in pickletools.genops(content):
        if instruction.name in ("PUT", "BINPUT", "LONG_BINPUT") and int(argument or 0) >= len(content):
            raise pickle.UnpicklingError(f"it keeps a value at place {argument}")


def _plain(value: Any, known: dict[int, Any]) -> Any:
    """Without the stand-ins; ``known`` holds what was done before: a value may be named in many places."""
    if isinstance(value, bytes):
        return value.decode("latin1")
    if isinstance(value, _Array | _ArrayFromBuffer):
        return value.value
    if not isinstance(value, dict | list | tuple):
        return value
    if id(value) not in known:
        if isinstance(value, dict):
            made: Any = {_plain(key, known): _plain(item, known) for key, item in value.items()}
        else:
            made = type(value)(_plain(item, known) for item in value)
        known[id(value)] = made
    return known[id(value)]


def read_pickled_arrays(content: bytes, name: str) -> Any:
    """The dictionaries, lists, strings, numbers and numeric arrays that a pickle holds.

    ``name`` is what errors call the file. Anything else in it, and so anything that could run code, is
    refused. Arrays are read-only.
    """
    try:
        _check_memo(content)
        return _plain(_Reader(io.BytesIO(content), encoding="bytes").load(), {})
    except Exception as error:  # a broken pickle may raise anything at all
        raise HoldfastError(f"{name} is refused as a file of arrays: {error}") from error
