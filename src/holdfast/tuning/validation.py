"""Federations whose test set is the clients' validation samples, so that a search never uses the real test set."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from holdfast.data.dataset import Group
from holdfast.data.federation import Federation
from holdfast.data.indexing import Ints
from holdfast.data.validation import hold_out


def judged_on_validation(federation: Federation, share: float, seed: int) -> Federation:
    """The federation with the clients' validation samples as its test set.

    These are the clients' own validation samples, or a share of each client's samples, drawn by ``seed``.
    """
    held = federation if len(federation.validation) else hold_out(federation, share, seed)
    data, ids = held.dataset, held.validation
    none: Ints = np.empty(0, np.int64)
    return replace(
        held,
        dataset=replace(
            data,
            x_test=data.x_train[ids],
            y_test=data.y_train[ids],
            groups={
                name: Group(group.names, group.train, group.train[ids]) for name, group in data.groups.items()
            },
        ),
        validation=none,
        validation_offsets=none,
    )
