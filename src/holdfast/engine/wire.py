"""Tensors that come from another machine: nothing is unpickled, and nothing is believed before it is checked.

A tree of tensors travels as a flat dictionary, path to `Packed`: the dtype's name, the shape, and the content
in NumPy's ``.npy`` format. What arrives must be exactly as long as its dtype and shape say and begin with the
header that these make; no header is parsed, and no memory is taken beyond what has already arrived.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from holdfast.engine.trees import leaves, unflatten
from holdfast.errors import HoldfastError
from holdfast.methods.base import Tree

DTYPES = {
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
    "int8": torch.int8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
"""What may travel, by NumPy's names."""

MOST_BYTES = 8 << 30  # of one message, where no exact form is expected
MOST_TENSORS = 1_000_000
LONGEST_PATH, DEEPEST, MOST_DIMENSIONS = 1_000, 8, 16

Form = dict[str, tuple[torch.dtype, tuple[int, ...]]]
"""The dtype and shape of each tensor of a tree, by path."""


class WireError(HoldfastError):
    """What is wrong with something received; ``kind`` is the fault in two words, for counting."""

    def __init__(self, kind: str, sentence: str) -> None:
        super().__init__(sentence)
        self.kind = kind


@dataclass(frozen=True)
class Packed:
    """One tensor on its way."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def form_of(tree: Tree) -> Form:
    """The form a tree has."""
    return {path: (value.dtype, tuple(value.shape)) for path, value in leaves(tree)}


def pack(tree: Tree) -> dict[str, Packed]:
    """A tree of tensors, ready to be sent."""
    packed = {}
    for path, value in leaves(tree):
        array = np.ascontiguousarray(value.detach().cpu().numpy())
        dtype = array.dtype.name
        if dtype not in DTYPES:
            raise HoldfastError(
                f"'{path}' is of type {dtype}, which does not travel; use {', '.join(DTYPES)}"
            )
        shape = tuple(value.shape)
        packed[path] = Packed(dtype, shape, _header(dtype, shape) + array.tobytes())
    return packed


def unpack(packed: Mapping[str, Packed], expected: Form | None = None, most_bytes: int = MOST_BYTES) -> Tree:
    """The tree that was packed; `WireError` where anything is not as it must be.

    ``expected``: the very paths, dtypes and shapes that must come. Without it any tree of at most
    ``most_bytes`` is accepted.
    """
    size = sum(len(one.data) for one in packed.values())
    if len(packed) > MOST_TENSORS or size > _limit(expected, most_bytes):
        raise WireError("absurd size", f"{len(packed)} tensors of {size} bytes are more than can be meant")
    if expected is not None and packed.keys() != expected.keys():
        odd = min(packed.keys() ^ expected.keys(), key=str)
        fault = "missing" if odd in expected else "not expected"
        raise WireError("wrong keys", f"{odd!r:.80} is {fault}")
    flat = {}
    for path, one in packed.items():
        _check_path(path)
        if expected is not None:
            _check_form(path, one, *expected[path])
        flat[path] = _tensor(path, one)
    _check_tree(flat)
    return unflatten(flat)


def _limit(expected: Form | None, most_bytes: int) -> int:
    if expected is None:
        return most_bytes
    headers = 256 * len(expected)
    return headers + sum(math.prod(shape) * dtype.itemsize for dtype, shape in expected.values())


def _check_path(path: object) -> None:
    right = isinstance(path, str) and 0 < len(path) <= LONGEST_PATH and path.isprintable()
    if not right or not all(parts := str(path).split("/")) or len(parts) > DEEPEST:
        raise WireError("wrong keys", f"{path!r:.80} is no name for a tensor")


def _check_form(path: str, one: Packed, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if DTYPES.get(one.dtype) != dtype:
        raise WireError("wrong dtype", f"'{path}' is of type {one.dtype!r:.40}; it must be {dtype}")
    if tuple(one.shape) != shape:
        raise WireError("wrong shape", f"'{path}' has the shape {one.shape!r:.80}; it must be {shape}")


def _tensor(path: str, one: Packed) -> Tensor:
    if one.dtype not in DTYPES:
        raise WireError("wrong dtype", f"'{path}' is of type {one.dtype!r:.40}, which does not travel")
    shape = tuple(one.shape)
    if len(shape) > MOST_DIMENSIONS or any(type(n) is not int or not 0 <= n < 2**48 for n in shape):
        raise WireError("wrong shape", f"'{path}' has the impossible shape {shape!r:.80}")
    dtype = np.dtype(one.dtype).newbyteorder("<")
    size = math.prod(shape) * dtype.itemsize
    header = _header(one.dtype, shape) if size <= len(one.data) <= size + 1024 else b""
    if not header or len(one.data) != len(header) + size or not one.data.startswith(header):
        sentence = f"'{path}' has {len(one.data)} bytes, which are not {shape!r:.80} of {one.dtype}"
        raise WireError("wrong size", sentence)
    content = np.frombuffer(one.data, dtype, offset=len(header))
    if dtype == np.bool_ and content.view(np.uint8).max(initial=0) > 1:
        raise WireError("wrong dtype", f"'{path}' is of type bool, but holds other values than 0 and 1")
    return torch.from_numpy(content.astype(dtype.newbyteorder("=")).reshape(shape))


def _check_tree(flat: Mapping[str, Tensor]) -> None:
    """A path that leads on cannot also be a tensor's own."""
    inner = {path.rsplit("/", depth)[0] for path in flat for depth in range(1, path.count("/") + 1)}
    both = inner & flat.keys()
    if both:
        raise WireError("wrong keys", f"'{min(both)}' is both a tensor and a group of tensors")


@lru_cache(4096)
def _header(dtype: str, shape: tuple[int, ...]) -> bytes:
    """What stands before the values in a ``.npy`` file of this dtype and shape."""
    head = io.BytesIO()
    descr = np.lib.format.dtype_to_descr(np.dtype(dtype).newbyteorder("<"))
    np.lib.format.write_array_header_1_0(head, {"descr": descr, "fortran_order": False, "shape": shape})
    return head.getvalue()
