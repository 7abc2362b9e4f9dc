"""Copies of filters in fp16, which the optimiser writes and convolutions read.

Convolutions multiply in half precision. If they read filters in the memory order of the parameter, the optimiser writes
the fp16 copy together with the weights, so that the convolutions need no additional pass over all weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from holdfast.kernels.amax import memory_key


@dataclass
class Fp16Filters:
    """The filters whose fp16 copies are ``available``, and those for which convolutions have ``requested`` one."""

    available: Sequence[tuple[Tensor, Tensor]]
    requested: list[tuple[Tensor, range]] = field(
        default_factory=list
    )  # with the rows and columns to be read

    def requested_taps(self, w: Tensor) -> range | None:
        """The rows and columns of filters ``w`` that convolutions read in fp16; None if none are, or they differ."""
        taps = {taps for filters, taps in self.requested if memory_key(filters) == memory_key(w)}
        return taps.pop() if len(taps) == 1 else None


_current: Fp16Filters | None = None  # shared by all threads of the process


@contextmanager
def fp16_filters(available: Sequence[tuple[Tensor, Tensor]]) -> Iterator[Fp16Filters]:
    """Within this context convolutions read the ``available`` copies: pairs of filters ``[L, O, C, R, S]`` and copy."""
    global _current
    _current = Fp16Filters(available)
    try:
        yield _current
    finally:
        _current = None


def find_fp16_copy(w: Tensor, taps: range) -> Tensor | None:
    """The fp16 copy of filters ``w`` [L, O, C, R, S] at ``taps``, ``[L, O, taps, taps C]``, if it is available."""
    if _current is None:
        return None
    _current.requested.append((w, taps))
    return next((copy for filters, copy in _current.available if memory_key(filters) == memory_key(w)), None)
