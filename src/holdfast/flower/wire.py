"""Encoding of tensors for messages; nothing received is unpickled, and everything is validated before use.

A tree of tensors is sent as one flat array per dtype, in NumPy's ``.npy`` format. The key of an array is its manifest:
one line per tensor with its path and shape, such as ``params/fc.weight 10,64``. The array holds the tensors one after
another without gaps, so they cannot overlap. Its length must be what the manifest and the dtype imply, and its header
must equal the expected one: no header is parsed, and no more memory is allocated than has been received.
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
from holdfast.core.trees import Tree, leaves, unflatten

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
"""The dtypes that can be sent, by NumPy's names."""

MAX_BYTES = 8 << 30  # limit for a message whose exact spec is unknown
MAX_MANIFEST = 16 << 20  # characters: some hundred thousand tensors
MAX_PATH, MAX_DEPTH, MAX_DIMENSIONS = 1_000, 8, 16

_LINE = re.compile(r"(.+) ((?:\d{1,15}(?:,\d{1,15})*)?)", re.ASCII)

TreeSpec = dict[str, tuple[torch.dtype, tuple[int, ...]]]
"""The dtype and shape of each tensor of a tree, by path."""


class WireError(HoldfastError):
    """An error in a received message; ``kind`` is its category in two words."""

    def __init__(self, kind: str, sentence: str) -> None:
        super().__init__(sentence)
        self.kind = kind


@dataclass(frozen=True)
class PackedArray:
    """The tensors of one dtype, as one flat array in ``.npy`` format."""

    dtype: str
    shape: tuple[int, ...]  # of the flat array: its number of values
    data: bytes


def spec_of(tree: Tree) -> TreeSpec:
    """The dtype and shape of each tensor of a tree."""
    return {path: (value.dtype, tuple(value.shape)) for path, value in leaves(tree)}


def pack(tree: Tree) -> dict[str, PackedArray]:
    """Encode a tree of tensors: one array per dtype, by manifest."""
    arrays: dict[str, dict[str, np.ndarray]] = {}
    for path, value in leaves(tree):
        array = value.detach().cpu().numpy()
        dtype = array.dtype.name
        if dtype not in DTYPES:
            raise HoldfastError(f"'{path}' has dtype {dtype}, which cannot be sent; use {', '.join(DTYPES)}")
        arrays.setdefault(dtype, {})[path] = array
    packed = {}
    for dtype, group in arrays.items():
        manifest = "\n".join(f"{path} {','.join(map(str, array.shape))}" for path, array in group.items())
        count = sum(array.size for array in group.values())
        values = (array.tobytes() for array in group.values())
        packed[manifest] = PackedArray(dtype, (count,), b"".join([_header(dtype, count), *values]))
    return packed


def unpack(
    packed: Mapping[str, PackedArray],
    expected: TreeSpec | None = None,
    unchecked: str | None = None,
    max_bytes: int = MAX_BYTES,
) -> Tree:
    """Decode the tree that `pack` encoded; any fault in ``packed`` raises a `WireError`.

    Args:
        packed: the received arrays, by manifest.
        expected: the paths, dtypes and shapes that the tree must have; without it any tree is accepted.
        unchecked: the path of a group of tensors that may have any spec, in addition to those ``expected``.
        max_bytes: limit on the size of ``packed`` where its exact spec is unknown.
    """
    size = sum(len(manifest) + len(array.data) for manifest, array in packed.items())
    if size > (max_bytes if expected is None or unchecked else _max_bytes(expected)):
        raise WireError("absurd size", f"a message of {size} bytes is too large")
    lines = {manifest: _parse_manifest(manifest) for manifest in packed}
    spec: TreeSpec = {}
    for manifest, array in packed.items():
        if array.dtype not in DTYPES:
            raise WireError(
                "wrong dtype", f"tensors have the dtype {array.dtype!r:.40}, which cannot be sent"
            )
        for path, shape in lines[manifest]:
            if path in spec:
                raise WireError("wrong keys", f"'{path:.80}' is sent twice")
            spec[path] = DTYPES[array.dtype], shape
    _check_paths(spec)
    if expected is not None:
        _check_spec(
            {k: v for k, v in spec.items() if unchecked is None or not k.startswith(f"{unchecked}/")},
            expected,
        )
    flat: dict[str, Tensor] = {}
    for manifest, array in packed.items():
        flat |= _tensors(array, lines[manifest])
    return unflatten({path: flat[path] for path in expected or ()} | flat)  # in the order of ``expected``


def _max_bytes(expected: TreeSpec) -> int:
    """The largest size that is decoded: twice the expected one, so that a wrong dtype is reported as such."""
    values = sum(math.prod(shape) * dtype.itemsize for dtype, shape in expected.values())
    manifests = sum(len(path) + 20 * (len(shape) + 1) for path, (_, shape) in expected.items())
    return 2 * values + manifests + 256 * len(DTYPES)


def _parse_manifest(manifest: str) -> list[tuple[str, tuple[int, ...]]]:
    """The path and shape of each tensor."""
    if len(manifest) > MAX_MANIFEST:
        raise WireError("absurd size", f"a manifest of {len(manifest)} characters is too large")
    lines = []
    for line in manifest.split("\n"):
        match = _LINE.fullmatch(line)
        if match is None:
            raise WireError("wrong keys", f"{line!r:.80} is not a tensor's path and shape")
        path, sizes = match.groups()
        _check_path(path)
        shape = tuple(int(size) for size in sizes.split(",") if size)
        # The other sizes of an empty tensor are limited too: no array can have them.
        if len(shape) > MAX_DIMENSIONS or math.prod(size or 1 for size in shape) > MAX_BYTES:
            raise WireError("wrong shape", f"'{path:.80}' has the impossible shape {shape!r:.80}")
        lines.append((path, shape))
    return lines


def _check_path(path: str) -> None:
    parts = path.split("/")
    if len(path) > MAX_PATH or not path.isprintable() or not all(parts) or len(parts) > MAX_DEPTH:
        raise WireError("wrong keys", f"{path!r:.80} is not a valid path of a tensor")


def _check_paths(spec: TreeSpec) -> None:
    """Raise an error if a path is both a tensor and a prefix of another path."""
    groups = {path.rsplit("/", depth)[0] for path in spec for depth in range(1, path.count("/") + 1)}
    both = groups & spec.keys()
    if both:
        raise WireError("wrong keys", f"'{min(both)}' is both a tensor and a group of tensors")


def _check_spec(spec: TreeSpec, expected: TreeSpec) -> None:
    if spec.keys() != expected.keys():
        path = min(spec.keys() ^ expected.keys())
        raise WireError("wrong keys", f"'{path:.80}' is {'missing' if path in expected else 'not expected'}")
    for path, (dtype, shape) in spec.items():
        expected_dtype, expected_shape = expected[path]
        if dtype != expected_dtype:
            raise WireError("wrong dtype", f"'{path}' has the dtype {dtype}; it must be {expected_dtype}")
        if shape != expected_shape:
            raise WireError("wrong shape", f"'{path}' has the shape {shape}; it must be {expected_shape}")


def _tensors(
    array: PackedArray, lines: Sequence[tuple[str, tuple[int, ...]]]
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of an array, as copies, so that none keeps the others in memory."""
    dtype = np.dtype(array.dtype).newbyteorder("<")
    count = sum(math.prod(shape) for _, shape in lines)
    if array.shape != (count,):
        raise WireError(
            "wrong size", f"an array has the shape {array.shape!r:.80}; its manifest names {count} values"
        )
    header = _header(array.dtype, count)
    if len(array.data) != len(header) + count * dtype.itemsize or not array.data.startswith(header):
        raise WireError(
            "wrong size", f"an array's {len(array.data)} bytes are not {count} values of {array.dtype}"
        )
    values = np.frombuffer(array.data, dtype, offset=len(header))
    if dtype == np.bool_ and values.view(np.uint8).max(initial=0) > 1:
        raise WireError("wrong dtype", "an array of dtype bool holds other values than 0 and 1")
    start = 0
    for path, shape in lines:
        end = start + math.prod(shape)
        yield path, torch.from_numpy(values[start:end].astype(dtype.newbyteorder("=")).reshape(shape))
        start = end


@lru_cache(256)
def _header(dtype: str, count: int) -> bytes:
    """The header of a ``.npy`` file with ``count`` values."""
    stream = io.BytesIO()
    descr = np.lib.format.dtype_to_descr(np.dtype(dtype).newbyteorder("<"))
    np.lib.format.write_array_header_1_0(stream, {"descr": descr, "fortran_order": False, "shape": (count,)})
    return stream.getvalue()
