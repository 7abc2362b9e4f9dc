"""Index arithmetic for assigning samples to clients: offsets, ranges and draws by class, without a list per client."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from holdfast.core.errors import HoldfastError

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]


def offsets_of(sizes: Ints) -> Ints:
    """The start and end positions of consecutive runs of these sizes: ``[len(sizes) + 1]``, from 0."""
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])


def even_sizes(total: int, parts: int) -> Ints:
    """Sizes of ``parts`` parts of ``total`` that differ by one at most, the larger parts first."""
    sizes = np.full(parts, total // parts, np.int64)
    sizes[: total % parts] += 1
    return sizes


def ranges(starts: Ints, sizes: Ints) -> Ints:
    """The integers ``start .. start + size - 1`` of every run, concatenated."""
    ends = np.cumsum(sizes)
    return np.repeat(starts - (ends - sizes), sizes) + np.arange(ends[-1] if len(ends) else 0)


def stable_argsort(keys: Ints) -> Ints:
    """`numpy.argsort` for small non-negative keys (classes, writers); equal keys keep their order."""
    # NumPy has a radix sort for 16-bit integers, ten times faster than its sort of 64-bit integers.
    small = keys.astype(np.uint16) if len(keys) and keys.max() < 1 << 16 else keys
    return np.argsort(small, kind="stable")


def shuffled_by_class(labels: Ints, rng: np.random.Generator) -> Ints:
    """All positions, ordered by class, in random order within each class."""
    order = rng.permutation(len(labels))
    return order[stable_argsort(labels[order])]


def draw_per_class(labels: Ints, sizes: Ints, rng: np.random.Generator) -> Ints:
    """Random positions of ``sizes[c]`` samples of class c (or all, if there are fewer), in ascending order."""
    counts = np.bincount(labels, minlength=len(sizes))
    order = shuffled_by_class(labels, rng)
    starts = offsets_of(counts)[:-1]
    return np.sort(order[ranges(starts, np.minimum(counts, sizes))])


def check_test_share(share: object) -> None:
    """Raise unless it is a share of samples that leaves some for training; 0 leaves all."""
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share < 1:
        raise HoldfastError(f"test is {share!r}; it must be a share of at least 0 and below 1, such as 0.2")


def stratified_split(
    labels: np.ndarray, rng: np.random.Generator, share: float = 0.2
) -> tuple[np.ndarray, np.ndarray]:
    """Sorted indices (train, test), with a share of each class for testing: one sample at least, of two or more.

    A share of 0 leaves all samples for training.
    """
    if not share:
        return np.arange(len(labels)), np.arange(0)
    order = rng.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    rank = np.arange(len(labels)) - np.searchsorted(labels[order], labels[order])  # within the class
    size = np.bincount(labels)[labels[order]]
    in_test = rank < np.where(size > 1, np.clip(np.rint(size * share), 1, size - 1), 0)
    return np.sort(order[~in_test]), np.sort(order[in_test])
