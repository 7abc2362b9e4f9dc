"""Which samples a client visits in which step: drawn from counters, so the same on every engine."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from holdfast.data.preprocess import Preprocess
from holdfast.random import counter_key, generator


def batch_sizes(samples: int, batch_size: int, merge_single: bool) -> list[int]:
    """Sizes of an epoch's batches: the last, shorter one is kept.

    With BatchNorm a batch of one sample has no variance; ``merge_single`` adds such a last sample to the batch
    before it.
    """
    whole, rest = divmod(samples, batch_size)
    sizes = [batch_size] * whole + ([rest] if rest else [])
    if merge_single and rest == 1 and whole:
        sizes[-2:] = [batch_size + 1]
    return sizes


@dataclass(frozen=True, eq=False)
class Plan:
    """All steps of one client in one round."""

    rows: list[np.ndarray]  # per step: positions among the client's samples
    draws: list[np.ndarray] | None  # per step: augmentation draws [B, 5], None without augmentation
    epoch: list[int]  # per step
    ends_epoch: list[bool]  # per step: whether it is its epoch's last
    keys: list[int]  # per step: where the model's dropout masks are drawn from; empty without dropout


def plan_client(
    *,
    seed: int,
    round: int,
    client: int,
    samples: int,
    epochs: int,
    batch_size: int,
    merge_single: bool,
    preprocess: Preprocess,
    shape: tuple[int, ...],
    dropout_keys: bool = False,
) -> Plan:
    """Shuffle a client's samples for each epoch and cut them into batches."""
    cuts = np.cumsum(batch_sizes(samples, batch_size, merge_single))[:-1]
    rows: list[np.ndarray] = []
    draws: list[np.ndarray] = []
    epoch_of: list[int] = []
    ends: list[bool] = []
    for epoch in range(epochs):
        order = generator(seed, "batches", round, client, epoch).permutation(samples)
        rows += np.split(order, cuts)
        if preprocess.augments:
            drawn = preprocess.draw(generator(seed, "augmentation", round, client, epoch), samples, shape)
            draws += np.split(drawn, cuts)
        epoch_of += [epoch] * (len(cuts) + 1)
        ends += [False] * len(cuts) + [True]
    steps = range(len(rows)) if dropout_keys else ()
    keys = [counter_key(seed, "dropout", round, client, step) >> 32 for step in steps]
    return Plan(rows, draws if preprocess.augments else None, epoch_of, ends, keys)
