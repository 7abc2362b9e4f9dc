"""Validation data: the samples of each client that are used for tests of models, not for training."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from holdfast.core.errors import HoldfastError
from holdfast.core.random import counter_key, counter_keys
from holdfast.data.federation import Federation
from holdfast.data.indexing import Ints, offsets_of


def hold_out(federation: Federation, share: float, seed: int, clients: Ints | None = None) -> Federation:
    """The federation with a share of each client's samples held out as validation data, at least one sample.

    The share is held out of each of a client's strata (and stages of a stream), rounded up or down. The selection
    depends only on the seed, the client's number and the strata of its own samples. ``clients`` gives these numbers if
    they differ from those of this federation.
    """
    numbers = np.arange(federation.clients) if clients is None else clients
    if len(federation.validation):
        raise HoldfastError(
            f"validation is {share:g}, but the clients already have validation data; leave validation out"
        )
    cell_sizes = np.diff(federation.offsets)
    _, first = np.unique(federation.indices, return_index=True)
    if len(first) < len(
        federation.indices
    ):  # a stream that repeats samples; each is drawn where it occurs first
        once = np.zeros(len(federation.indices), bool)
        once[first] = True
        cells = np.repeat(np.arange(len(cell_sizes)), cell_sizes)[once]
        offsets = offsets_of(np.bincount(cells, minlength=len(cell_sizes)))
        distinct = replace(federation, indices=federation.indices[once], offsets=offsets)
        chosen = hold_out(distinct, share, seed, clients).validation
        return federation.with_held_out(np.isin(federation.indices, chosen))
    sizes = cell_sizes.reshape(-1, federation.stages).sum(1)
    _refuse_single_samples(sizes, share, numbers)
    cell = np.repeat(np.arange(len(cell_sizes)), cell_sizes)
    owner = cell // federation.stages
    position = np.arange(len(owner)) - offsets_of(sizes)[owner]  # within the client
    keys = np.array([counter_key(seed, "validation", int(k)) for k in numbers], np.uint64)
    strata = federation.dataset.strata_train[federation.indices]
    order = np.lexsort((counter_keys(keys[owner], position), strata, cell))
    # Of n samples in this order, m are held out at equal distances, from a random one on.
    held_sizes = np.where(sizes > 0, np.clip(np.rint(share * sizes).astype(np.int64), 1, sizes - 1), 0)
    n, m = sizes[owner], held_sizes[owner]
    first = (keys[owner] % np.maximum(n, 1).astype(np.uint64)).astype(np.int64)
    held = np.empty(len(owner), bool)
    held[order] = ((position + 1) * m + first) // n > (position * m + first) // n
    return federation.with_held_out(held)


def _refuse_single_samples(sizes: Ints, share: float, numbers: Ints) -> None:
    single = np.flatnonzero(sizes == 1)
    if len(single):
        some = (
            f"client {numbers[single[0]]} has"
            if len(single) == 1
            else (f"{len(single)} of {len(sizes)} clients, such as client {numbers[single[0]]}, have")
        )
        raise HoldfastError(
            f"validation is {share:g}, but {some} a single sample, which cannot be used for both training and "
            "validation; use a partition in which every client has either no samples or at least 2"
        )
