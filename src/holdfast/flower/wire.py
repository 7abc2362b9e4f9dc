"""Tensors that come from another machine: nothing is unpickled, and nothing is believed before it is checked.

A tree of tensors travels as a flat array for each dtype that occurs in it, in NumPy's ``.npy`` format, under the name
of its manifest: a line for each tensor in it, path and shape, such as ``params/fc.weight 10,64``. The tensors lie one
after another without gaps, so they cannot overlap. An array must be exactly as long as its manifest and dtype say and
begin with the header that these make; no header is parsed, and no memory is taken beyond what has already arrived.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from holdfast.core.errors import HoldfastError
from holdfast.core.trees import leaves, unflatten
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
LONGEST_MANIFEST = 16 << 20  # letters: some hundred thousand tensors
LONGEST_PATH, DEEPEST, MOST_DIMENSIONS = 1_000, 8, 16

_LINE = re.compile(r"(.+) ((?:\d{1,15}(?:,\d{1,15})*)?)", re.ASCII)

Form = dict[str, tuple[torch.dtype, tuple[int, ...]]]
"""The dtype and shape of each tensor of a tree, by path."""


class WireError(HoldfastError):
    """What is wrong with something received; ``kind`` is the fault in two words, for counting."""

    def __init__(self, kind: str, sentence: str) -> None:
        super().__init__(sentence)
        self.kind = kind


@dataclass(frozen=True)
class Packed:
    """All tensors of one dtype on their way."""

    dtype: str
    shape: tuple[int, ...]  # of the flat array: the number of its values
    data: bytes


def form_of(tree: Tree) -> Form:
    """The form a tree has."""
    return {path: (value.dtype, tuple(value.shape)) for path, value in leaves(tree)}


def pack(tree: Tree) -> dict[str, Packed]:
    """A tree of tensors, ready to be sent: manifests, and what they are of."""
    arrays: dict[str, dict[str, np.ndarray]] = {}
    for path, value in leaves(tree):
        array = value.detach().cpu().numpy()
        dtype = array.dtype.name
        if dtype not in DTYPES:
            raise HoldfastError(
                f"'{path}' is of type {dtype}, which does not travel; use {', '.join(DTYPES)}"
            )
        arrays.setdefault(dtype, {})[path] = array
    packed = {}
    for dtype, named in arrays.items():
        manifest = "\n".join(f"{path} {','.join(map(str, array.shape))}" for path, array in named.items())
        count = sum(array.size for array in named.values())
        values = (array.tobytes() for array in named.values())
        packed[manifest] = Packed(dtype, (count,), b"".join([_header(dtype, count), *values]))
    return packed


def unpack(
    packed: Mapping[str, Packed],
    expected: Form | None = None,
    free: str | None = None,
    most_bytes: int = MOST_BYTES,
) -> Tree:
    """The tree that was packed; `WireError` where anything is not as it must be.

    ``expected``: the very paths, dtypes and shapes that must come; beside them only what is in the group ``free``
    may be anything. Without it any tree of at most ``most_bytes`` is accepted.
    """
    size = sum(len(manifest) + len(one.data) for manifest, one in packed.items())
    if size > (most_bytes if expected is None or free else _limit(expected)):
        raise WireError("absurd size", f"{size} bytes are more than can be meant")
    lines = {manifest: _lines(manifest) for manifest in packed}
    form: Form = {}
    for manifest, one in packed.items():
        if one.dtype not in DTYPES:
            raise WireError("wrong dtype", f"tensors are of type {one.dtype!r:.40}, which does not travel")
        for path, shape in lines[manifest]:
            if path in form:
                raise WireError("wrong keys", f"'{path:.80}' comes twice")
            form[path] = DTYPES[one.dtype], shape
    _check_tree(form)
    if expected is not None:
        told = {path: of for path, of in form.items() if free is None or not path.startswith(f"{free}/")}
        _check_form(told, expected)
    flat: dict[str, Tensor] = {}
    for manifest, one in packed.items():
        flat |= _tensors(one, lines[manifest])
    return unflatten({path: flat[path] for path in expected or ()} | flat)  # in the order expected


def _limit(expected: Form) -> int:
    """The most bytes that are looked at: twice the values, so that doubles for singles are named as what they are."""
    values = sum(math.prod(shape) * dtype.itemsize for dtype, shape in expected.values())
    manifests = sum(len(path) + 20 * (len(shape) + 1) for path, (_, shape) in expected.items())
    return 2 * values + manifests + 256 * len(DTYPES)


def _lines(manifest: str) -> list[tuple[str, tuple[int, ...]]]:
    """The path and shape of each tensor that a manifest names."""
    if len(manifest) > LONGEST_MANIFEST:
        raise WireError("absurd size", f"a manifest of {len(manifest)} letters is more than can be meant")
    lines = []
    for line in manifest.split("\n"):
        said = _LINE.fullmatch(line)
        if said is None:
            raise WireError("wrong keys", f"{line!r:.80} is not a tensor's name and shape")
        path, sizes = said.groups()
        _check_path(path)
        shape = tuple(int(size) for size in sizes.split(",") if size)
        # An empty tensor's other sizes are bounded too: no array can have them.
        if len(shape) > MOST_DIMENSIONS or math.prod(size or 1 for size in shape) > MOST_BYTES:
            raise WireError("wrong shape", f"'{path:.80}' has the impossible shape {shape!r:.80}")
        lines.append((path, shape))
    return lines


def _check_path(path: str) -> None:
    parts = path.split("/")
    if len(path) > LONGEST_PATH or not path.isprintable() or not all(parts) or len(parts) > DEEPEST:
        raise WireError("wrong keys", f"{path!r:.80} is no name for a tensor")


def _check_tree(form: Form) -> None:
    """A path that leads on cannot also be a tensor's own."""
    inner = {path.rsplit("/", depth)[0] for path in form for depth in range(1, path.count("/") + 1)}
    both = inner & form.keys()
    if both:
        raise WireError("wrong keys", f"'{min(both)}' is both a tensor and a group of tensors")


def _check_form(form: Form, expected: Form) -> None:
    if form.keys() != expected.keys():
        odd = min(form.keys() ^ expected.keys())
        raise WireError("wrong keys", f"'{odd:.80}' is {'missing' if odd in expected else 'not expected'}")
    for path, (dtype, shape) in form.items():
        right_dtype, right_shape = expected[path]
        if dtype != right_dtype:
            raise WireError("wrong dtype", f"'{path}' is of type {dtype}; it must be {right_dtype}")
        if shape != right_shape:
            raise WireError("wrong shape", f"'{path}' has the shape {shape}; it must be {right_shape}")


def _tensors(one: Packed, lines: Sequence[tuple[str, tuple[int, ...]]]) -> Iterator[tuple[str, Tensor]]:
    """Cut an array into the tensors that lie in it; each is a copy, so that none keeps the others in memory."""
    dtype = np.dtype(one.dtype).newbyteorder("<")
    count = sum(math.prod(shape) for _, shape in lines)
    if one.shape != (count,):
        raise WireError(
            "wrong size", f"an array of shape {one.shape!r:.80} is not the {count} values of its manifest"
        )
    header = _header(one.dtype, count)
    if len(one.data) != len(header) + count * dtype.itemsize or not one.data.startswith(header):
        raise WireError(
            "wrong size", f"an array has {len(one.data)} bytes, which are not {count} of {one.dtype}"
        )
    values = np.frombuffer(one.data, dtype, offset=len(header))
    if dtype == np.bool_ and values.view(np.uint8).max(initial=0) > 1:
        raise WireError("wrong dtype", "an array is of type bool, but holds other values than 0 and 1")
    start = 0
    for path, shape in lines:
        end = start + math.prod(shape)
        yield path, torch.from_numpy(values[start:end].astype(dtype.newbyteorder("=")).reshape(shape))
        start = end


@lru_cache(256)
def _header(dtype: str, count: int) -> bytes:
    """What stands before the values in a ``.npy`` file of so many of them."""
    head = io.BytesIO()
    descr = np.lib.format.dtype_to_descr(np.dtype(dtype).newbyteorder("<"))
    np.lib.format.write_array_header_1_0(head, {"descr": descr, "fortran_order": False, "shape": (count,)})
    return head.getvalue()
