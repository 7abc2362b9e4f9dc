"""The largest absolute values (amax) of images, recorded by the kernels that write the images.

A convolution scales its images by their amax. A separate kernel computes the amax, unless the kernel that wrote the
images has already computed and recorded it here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch
from torch import Tensor

_MAX_RECORDS = 4  # a record keeps its images in memory, and is read soon after its creation
_MAX_BLOCKS = 1024  # of a lane: each program that reads the lane's images reads the amax of all of them

# Shared by all threads of the process, since autograd computes gradients in other threads.
_records: deque[tuple[Tensor, Tensor]] | None = None


@contextmanager
def recording_amax() -> Iterator[None]:
    """Keep records within this context, and drop them at its end."""
    global _records
    _records = deque(maxlen=_MAX_RECORDS)
    try:
        yield
    finally:
        _records = None


def record_amax(x: Tensor, block_amax: Tensor) -> None:
    """Record the amax of each block of each lane of the images ``x`` [L, ...].

    ``block_amax`` [L, P] holds the bits of float32 values as int32, as `padded_images.block_amax` does.
    """
    if _records is not None and block_amax.shape[1] <= _MAX_BLOCKS:
        _records.append((x, block_amax))


def record_amax_bound(x: Tensor, bound: float) -> None:
    """Record that no absolute value of the images ``x`` [L, ...] is larger than ``bound``."""
    record_amax(x, _constant_amax(bound, len(x), x.device))


@lru_cache(256)
def _constant_amax(bound: float, lanes: int, device: torch.device) -> Tensor:
    """Cached, since a CUDA graph cannot copy new tensors from the host."""
    with torch.inference_mode(False):
        return torch.full((lanes, 1), bound, device=device).view(torch.int32)


def recorded_amax(x: Tensor) -> Tensor | None:
    """The block amax of ``x``, if it is among the latest records."""
    for images, block_amax in _records or ():
        # The record keeps its images allocated, so no other tensor can use their memory.
        if memory_key(images) == memory_key(x):
            return block_amax
    return None


def memory_key(tensor: Tensor) -> tuple[int, ...]:
    """Address, shape and strides, which identify a tensor's values while its memory is allocated."""
    return (tensor.data_ptr(), *tensor.shape, *tensor.stride())
