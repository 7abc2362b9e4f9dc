"""Filters in half precision, kept beside themselves while a client trains.

Convolutions multiply halves. Where they read filters in the order in which these lie, the optimiser, which has every
weight at hand, writes its half along with it, and nobody has to go through all weights again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from holdfast.kernels.amax import place


@dataclass
class Reading:
    """What convolutions read: filters that have halves, ``kept``, and all whose halves they could do with."""

    kept: Sequence[tuple[Tensor, Tensor]]
    wanted: list[tuple[Tensor, range]] = field(default_factory=list)  # and those rows and columns of them

    def wants(self, w: Tensor) -> range | None:
        """The rows and columns of filters ``w`` that are read in half precision, if they are the same everywhere."""
        taps = {taps for filters, taps in self.wanted if place(filters) == place(w)}
        return taps.pop() if len(taps) == 1 else None


_reading: Reading | None = None  # of this process


@contextmanager
def reading(kept: Sequence[tuple[Tensor, Tensor]]) -> Iterator[Reading]:
    """What convolutions read in here; filters ``[L, O, C, R, S]`` have the halves that are ``kept`` with them."""
    global _reading
    _reading = Reading(kept)
    try:
        yield _reading
    finally:
        _reading = None


def halves_of(w: Tensor, taps: range) -> Tensor | None:
    """The halves of filters ``w`` [L, O, C, R, S] at ``taps``, if they are kept: ``[L, O, taps, taps C]``."""
    if _reading is None:
        return None
    _reading.wanted.append((w, taps))
    return next((halves for filters, halves in _reading.kept if place(filters) == place(w)), None)
