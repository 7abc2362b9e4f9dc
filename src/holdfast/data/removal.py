"""Removal: a client loses samples of a class from stage to stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from holdfast.core.errors import HoldfastError
from holdfast.core.random import generator
from holdfast.core.spec import validate
from holdfast.data.federation import Federation
from holdfast.data.indexing import offsets_of
from holdfast.data.schedules import EveryN, StageSchedule, given_schedule

REMOVAL = "removal"
"""The name of this kind of stream in files."""


def remove_samples(
    federation: Federation,
    *,
    client: int,
    label: int,
    keeps: Sequence[int],
    schedule: StageSchedule | str | None = None,
) -> Federation:
    """A stream in which one client keeps fewer samples of a class at each stage; everything else stays the same.

    ::

                   stage 0   stage 1   stage 2      (client=1, keeps=[3, 1, 0]; # are samples of the class)
        client 0   ##....    ##....    ##....
        client 1   ###...    #...      ...

    Which samples are removed is drawn with the federation's seed. Each stage has all samples that remain, so counts
    over all stages count a sample once for each stage that has it.

    Args:
        federation: the data before any removal, which is not a stream.
        client: the client that loses samples.
        label: the class of these samples; for tasks without classes, their stratum.
        keeps: for each stage the number of them that the client has, in descending order; at most those it holds.
        schedule: the stage that each round trains; one round for each by default, and the last one to the end.
    """
    if federation.schedule is not None:
        raise HoldfastError("samples cannot be removed from a stream; give a federation without stages")
    client, label = (_integer(name, value) for name, value in (("client", client), ("label", label)))
    keeps = validate("keeps", np.asarray(keeps).tolist(), tuple[int, ...])
    for name, value, count in (
        ("client", client, federation.clients),
        ("label", label, federation.dataset.num_classes),
    ):
        if not 0 <= value < count:
            raise HoldfastError(f"{name} is {value}; it must be from 0 to {count - 1}")
    own = federation.client(client)
    of_class = np.flatnonzero(federation.dataset.strata_train[own] == label)
    if not keeps or list(keeps) != sorted(keeps, reverse=True) or keeps[-1] < 0 or keeps[0] > len(of_class):
        raise HoldfastError(
            f"keeps is {list(keeps)}; its numbers must not increase, and must be from 0 to {len(of_class)}, the number "
            f"of samples of class {label} that client {client} holds"
        )
    order = generator(federation.partition.get("seed", 0), REMOVAL).permutation(of_class)
    remaining = [np.delete(own, order[count:]) for count in keeps]
    parts = [
        part
        for k in range(federation.clients)
        for part in (remaining if k == client else [federation.client(k)] * len(keeps))
    ]
    described: dict[str, Any] = {"name": REMOVAL, "client": client, "label": label, "keeps": list(keeps)}
    return replace(
        federation,
        indices=np.concatenate(parts),
        offsets=offsets_of(np.array([len(part) for part in parts])),
        stages=len(keeps),
        partition=federation.partition | {"stream": described},
        schedule=given_schedule(schedule, len(keeps)) or EveryN(1, len(keeps)),
    )


def _integer(name: str, value: object) -> int:
    return int(validate(name, value.item() if isinstance(value, np.integer) else value, int))
