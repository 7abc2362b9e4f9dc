"""A round of lanes on paper: which client is in which lane when, and every lane's batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from holdfast.engine.local import Planned, Started


@dataclass(eq=False)
class Leg:
    """One client's stay in a lane: the global steps ``first`` to ``last``, both included."""

    planned: Planned
    lane: int
    first: int
    last: int
    row: int  # where its samples lie in the round's tables
    started: Started | None = None

    @property
    def steps(self) -> int:
        """How many there are."""
        return self.last - self.first + 1


def assign_lanes(planned: Sequence[Planned], lanes: int) -> list[Leg]:
    """Deal clients to lanes, longest first to the least loaded; busier lanes get lower numbers."""
    order = sorted(range(len(planned)), key=lambda i: -planned[i].plan.steps)
    queues: list[list[int]] = [[] for _ in range(min(lanes, len(planned)))]
    loads = np.zeros(len(queues), np.int64)
    for i in order:
        lane = int(loads.argmin())
        queues[lane].append(i)
        loads[lane] += planned[i].plan.steps
    rows = np.concatenate([[0], np.cumsum([len(p.ids) for p in planned])])
    legs = []
    for lane, queue in enumerate(sorted(range(len(queues)), key=lambda q: -loads[q])):
        at = 0
        for i in queues[queue]:
            steps = planned[i].plan.steps
            legs.append(Leg(planned[i], lane, at, at + steps - 1, int(rows[i])))
            at += steps
    return legs


@dataclass(eq=False)
class Layout:
    """A round's clients in their lanes, and every lane's batches, step by step."""

    round: int
    planned: list[Planned]
    legs: list[Leg]
    arrays: dict[str, Tensor]  # each [steps, lanes, ...]
    widths: np.ndarray  # [steps] samples that a step does of each lane
    padded: np.ndarray  # [steps] bool: whether any lane's batch is filled up


def lay_out(
    round: int, planned: list[Planned], lanes: int, width: int, augments: bool, narrow: bool = False
) -> Layout:
    """Deal the clients to lanes and write down every lane's batches, each of at most ``width`` samples.

    With ``narrow`` a step does only half as many where none has more, as an epoch's last often does.
    """
    legs = assign_lanes(planned, lanes)
    steps = max(leg.last for leg in legs) + 1
    shape = (steps, lanes, width)
    # Sample ids, rows of tables, epoch and dropout key, side by side: a step picks them up in one go.
    places = np.zeros((steps, lanes, 2 * width + 2), np.int64)
    ids, rows = places[..., :width], places[..., width : 2 * width]
    mask = np.zeros(shape, np.float32)
    draws = np.zeros((*shape, 5) if augments else (0, 0, 0, 5), np.int16)
    largest, smallest = np.zeros(steps, np.int64), np.full(steps, width)
    for leg in legs:
        plan, span = leg.planned.plan, slice(leg.first, leg.last + 1)
        real = np.arange(width) < plan.sizes[:, None]
        np.maximum(largest[span], plan.sizes, out=largest[span])
        np.minimum(smallest[span], plan.sizes, out=smallest[span])
        rows[span, leg.lane][real] = plan.order + leg.row
        ids[span, leg.lane][real] = leg.planned.ids[plan.order]
        mask[span, leg.lane] = real
        places[span, leg.lane, -2] = plan.epoch
        if plan.drawn is not None:
            draws[span, leg.lane][real] = plan.drawn
        if len(plan.keys):
            places[span, leg.lane, -1] = plan.keys
    half = -(-width // 2)
    widths = np.where(narrow & (largest <= half), half, width)
    padded = smallest < widths
    arrays: dict[str, np.ndarray] = {"places": places}
    if padded.any():
        arrays["mask"] = mask
    if augments:
        arrays["draws"] = draws
    tensors = {name: torch.from_numpy(values) for name, values in arrays.items()}
    return Layout(round, planned, legs, tensors, widths, padded)
