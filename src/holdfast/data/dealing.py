"""Array arithmetic for dealing samples out: cuts, runs and class-wise draws without a list per client."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]


def offsets_of(sizes: Ints) -> Ints:
    """Where runs of these sizes begin and end when laid end to end: ``[len(sizes) + 1]``, from 0."""
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])


def even_sizes(total: int, parts: int) -> Ints:
    """``total`` things in ``parts`` parts that differ by one at most, the larger parts first."""
    sizes = np.full(parts, total // parts, np.int64)
    sizes[: total % parts] += 1
    return sizes


def ranges(starts: Ints, sizes: Ints) -> Ints:
    """The integers ``start .. start + size - 1`` of every run, laid end to end."""
    ends = np.cumsum(sizes)
    return np.repeat(starts - (ends - sizes), sizes) + np.arange(ends[-1] if len(ends) else 0)


def in_order_of(keys: Ints) -> Ints:
    """A stable order by small non-negative keys (a class, a writer)."""
    # NumPy sorts 16-bit integers by radix, ten times faster than 64-bit ones.
    small = keys.astype(np.uint16) if len(keys) and keys.max() < 1 << 16 else keys
    return np.argsort(small, kind="stable")


def shuffled_by_class(labels: Ints, rng: np.random.Generator) -> Ints:
    """All positions, class after class, in random order within each class."""
    order = rng.permutation(len(labels))
    return order[in_order_of(labels[order])]


def draw_per_class(labels: Ints, wanted: Ints, rng: np.random.Generator) -> Ints:
    """Random positions with ``wanted[c]`` of class c (all of them where there are fewer), in rising order."""
    counts = np.bincount(labels, minlength=len(wanted))
    order = shuffled_by_class(labels, rng)
    starts = offsets_of(counts)[:-1]
    return np.sort(order[ranges(starts, np.minimum(counts, wanted))])
