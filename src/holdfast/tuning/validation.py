"""Federations whose test set is held out from the clients' training data, so that a search never sees the real one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from holdfast.core.errors import HoldfastError
from holdfast.core.random import generator
from holdfast.data.dataset import Group
from holdfast.data.federation import Federation
from holdfast.data.indexing import Ints, offsets_of


def judged_on_validation(federation: Federation, share: float, seed: int) -> Federation:
    """The federation with a share of each client's samples as its test set, in the place of that of its data.

    The share is drawn from every class of a client, by ``seed``. The server's public samples stay as they are.
    """
    held = _held_out(federation, share, seed)
    if not held.any():
        raise HoldfastError(
            f"validation is {share:g}, which leaves no validation sample: every client has too few samples"
        )
    data, ids = federation.dataset, federation.indices[held]
    groups = {name: Group(group.names, group.train, group.train[ids]) for name, group in data.groups.items()}
    slices = np.repeat(np.arange(len(federation.offsets) - 1), np.diff(federation.offsets))
    return replace(
        federation,
        dataset=replace(data, x_test=data.x_train[ids], y_test=data.y_train[ids], groups=groups),
        indices=federation.indices[~held],
        offsets=offsets_of(np.bincount(slices[~held], minlength=len(federation.offsets) - 1)),
    )


def _held_out(federation: Federation, share: float, seed: int) -> Ints:
    """Which entries of ``indices`` are held out: bool ``[M]``."""
    sizes = np.diff(federation.offsets)
    slices = np.repeat(np.arange(len(sizes)), sizes)  # a client's, or its of a stage
    strata = federation.dataset.strata_train[federation.indices]
    rng = generator(seed, "validation")
    order = np.lexsort((rng.random(len(slices)), strata, slices))
    position = np.arange(len(order)) - federation.offsets[slices]
    first = rng.random(len(sizes))[slices]
    taken = np.minimum(np.floor((position + 1) * share + first), sizes[slices] - 1)
    before = np.minimum(np.floor(position * share + first), sizes[slices] - 1)
    held = np.empty(len(order), bool)
    held[order] = taken > before
    return held
