"""The order of a client's samples in local training; counter-based, so the same on every engine."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial

import numpy as np

from holdfast.core.random import counter_key, generator
from holdfast.data.preprocess import Preprocess


def batch_sizes(samples: int, batch_size: int, merge_single: bool, drop_last: bool = False) -> list[int]:
    """Sizes of an epoch's batches. ``drop_last`` drops a last, smaller batch unless it is the only one.

    A batch of one sample has no variance for BatchNorm; ``merge_single`` adds such a last sample to the batch before.
    """
    full, rest = divmod(samples, batch_size)
    if drop_last and full:
        rest = 0
    sizes = [batch_size] * full + ([rest] if rest else [])
    if merge_single and rest == 1 and full:
        sizes[-2:] = [batch_size + 1]
    return sizes


def widest_batch(samples: np.ndarray, batch_size: int, merge_single: bool, drop_last: bool = False) -> int:
    """The largest batch size of clients with these numbers of ``samples``."""
    single = (samples > batch_size) & (samples % batch_size == 1)
    merged = merge_single and not drop_last and bool(single.any())
    return min(batch_size + merged, int(samples.max()))


def local_steps(batches: int, epochs: float, steps: int | None) -> int:
    """The number of local steps of a client with this number of batches per epoch: from ``epochs``, or ``steps``."""
    if steps is not None:
        return steps
    return max(1, math.ceil(round(epochs * batches, 9)))  # 0.1 · 30 is more than 3 in binary


@dataclass(frozen=True, eq=False)
class BatchPlan:
    """All steps of one client in one round. Random draws are computed on first access."""

    sizes: np.ndarray  # [steps] batch sizes
    epoch: np.ndarray  # [steps]
    _order: Callable[[], np.ndarray]
    _drawn: Callable[[], np.ndarray | None]
    _keys: Callable[[], np.ndarray]

    @cached_property
    def order(self) -> np.ndarray:
        """Positions of the client's samples in the order of training: ``[visits]``."""
        return self._order()

    @cached_property
    def drawn(self) -> np.ndarray | None:
        """Augmentation draws ``[visits, 5]``; None without augmentation."""
        return self._drawn()

    @cached_property
    def keys(self) -> np.ndarray:
        """Keys of the model's dropout masks, ``[steps]``; empty without dropout."""
        return self._keys()

    @property
    def steps(self) -> int:
        """The number of optimiser steps."""
        return len(self.sizes)

    @property
    def epochs(self) -> int:
        """The number of epochs, of which the last may be incomplete."""
        return int(self.epoch[-1]) + 1

    @cached_property
    def ends_epoch(self) -> np.ndarray:
        """Whether each step is the last of its epoch: bool ``[steps]``."""
        return np.append(self.epoch[1:] != self.epoch[:-1], True)

    @cached_property
    def rows(self) -> list[np.ndarray]:
        """Each step's sample positions."""
        return self._split(self.order)

    @cached_property
    def draws(self) -> list[np.ndarray] | None:
        """Each step's augmentation draws."""
        return None if self.drawn is None else self._split(self.drawn)

    def _split(self, visits: np.ndarray) -> list[np.ndarray]:
        ends = np.cumsum(self.sizes)
        return [visits[end - size : end] for end, size in zip(ends, self.sizes, strict=True)]


def plan_batches(
    *,
    seed: int,
    round: int,
    client: int,
    samples: int,
    epochs: float,
    batch_size: int,
    merge_single: bool,
    preprocess: Preprocess,
    shape: tuple[int, ...],
    drop_last: bool = False,
    dropout_keys: bool = False,
    steps: int | None = None,
) -> BatchPlan:
    """Shuffle a client's samples for each epoch and split them into batches.

    The number of steps is that of ``epochs``, or ``steps`` if given; the last epoch may be incomplete.
    """
    visits, sizes, epoch_of = _steps(samples, epochs, steps, batch_size, merge_single, drop_last)
    begun, total = int(epoch_of[-1]) + 1, int(sizes.sum())

    def order() -> np.ndarray:
        shuffles = (generator(seed, "batches", round, client, epoch) for epoch in range(begun))
        return np.concatenate([shuffle.permutation(samples)[:visits] for shuffle in shuffles])[:total]

    def drawn() -> np.ndarray | None:
        if not preprocess.augments:
            return None
        sources = (generator(seed, "augmentation", round, client, epoch) for epoch in range(begun))
        return np.concatenate([preprocess.draw(source, visits, shape) for source in sources])[:total]

    return BatchPlan(
        sizes, epoch_of, order, drawn, partial(_keys, seed, round, client, len(sizes), dropout_keys)
    )


def plan_private_batches(
    *,
    seed: int,
    round: int,
    client: int,
    samples: int,
    epochs: float,
    batch_size: int,
    sampling: str,
    preprocess: Preprocess,
    shape: tuple[int, ...],
    dropout_keys: bool = False,
    steps: int | None = None,
) -> BatchPlan:
    """Batches for DP-SGD, sampled as the privacy account assumes: each step draws from all samples.

    ``sampling``: ``poisson`` takes each sample with probability ``batch_size / samples``, so that batches differ in
    size and may be empty; ``fixed`` takes ``batch_size`` distinct samples. The number of steps is the same as without
    privacy.
    """
    count = local_steps(-(-samples // batch_size), epochs, steps)
    epoch_of = np.arange(count) // -(-samples // batch_size)
    sizes = np.full(count, min(batch_size, samples), np.int64)
    if sampling == "poisson" and batch_size < samples:
        sizes = generator(seed, "private sizes", round, client).binomial(
            samples, batch_size / samples, size=count
        )

    def order() -> np.ndarray:
        draws = (generator(seed, "private batches", round, client, step) for step in range(count))
        rows = [draw.choice(samples, size, replace=False) for draw, size in zip(draws, sizes, strict=True)]
        return np.concatenate(rows)

    def drawn() -> np.ndarray | None:
        if not preprocess.augments:
            return None
        return preprocess.draw(generator(seed, "augmentation", round, client), int(sizes.sum()), shape)

    return BatchPlan(sizes, epoch_of, order, drawn, partial(_keys, seed, round, client, count, dropout_keys))


def _keys(seed: int, round: int, client: int, steps: int, wanted: bool) -> np.ndarray:
    """A key of dropout masks for each step; none unless ``wanted``."""
    numbers = range(steps if wanted else 0)
    return np.array([counter_key(seed, "dropout", round, client, step) >> 32 for step in numbers], np.int64)


@lru_cache(1024)
def _steps(
    samples: int, epochs: float, steps: int | None, batch_size: int, merge_single: bool, drop_last: bool
) -> tuple[int, np.ndarray, np.ndarray]:
    """The number of samples visited in an epoch, and the size and epoch of each step; cached by client size."""
    sizes = batch_sizes(samples, batch_size, merge_single, drop_last)
    positions = np.arange(local_steps(len(sizes), epochs, steps))
    of_steps = np.array(sizes, np.int64)[positions % len(sizes)], positions // len(sizes)
    for array in of_steps:
        array.flags.writeable = False
    return sum(sizes), *of_steps
