"""What the kernels of a step note for each other: the peaks of images, which are at hand where these are written.

A convolution needs the largest value of its images to scale them. Finding it takes a kernel of its own, unless
whoever wrote the images has noted it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch
from torch import Tensor

_LATEST = 4  # images that are remembered: they are held as long, and soon read
_MOST_PARTS = 1024  # of a lane: all who read its images read the peaks of all of them

_noted: deque[tuple[Tensor, Tensor]] | None = (
    None  # of this process: gradients are computed in threads of torch's
)


@contextmanager
def noting() -> Iterator[None]:
    """In here notes are kept."""
    global _noted
    _noted = deque(maxlen=_LATEST)
    try:
        yield
    finally:
        _noted = None


def note_peaks(x: Tensor, peaks: Tensor) -> None:
    """The ``peaks`` [L, P] of each lane's parts of the images ``x`` [L, ...], as in `padded_images`."""
    if _noted is not None and peaks.shape[1] <= _MOST_PARTS:
        _noted.append((x, peaks))


def note_bound(x: Tensor, largest: float) -> None:
    """That no value of the images ``x`` [L, ...] is larger."""
    note_peaks(x, _bounds(largest, len(x), x.device))


@lru_cache(256)
def _bounds(largest: float, lanes: int, device: torch.device) -> Tensor:
    """Kept: a CUDA graph cannot copy new ones from the host."""
    with torch.inference_mode(False):
        return torch.full((lanes, 1), largest, device=device).view(torch.int32)


def noted_peaks(x: Tensor) -> Tensor | None:
    """The peaks of ``x``, if they were noted and it is among the latest."""
    for images, peaks in _noted or ():
        # They are held until now, so no other tensor can have got their memory.
        if place(images) == place(x):
            return peaks
    return None


def place(tensor: Tensor) -> tuple[int, ...]:
    """What tells a tensor from others while it is held: where it lies in memory, and how."""
    return (tensor.data_ptr(), *tensor.shape, *tensor.stride())
