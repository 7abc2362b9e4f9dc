"""A round of lanes on paper: which client is in which lane when, and every lane's batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapreplace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from holdfast.engine.clients import PlannedClient, PreparedClient


@dataclass(eq=False)
class LaneSlot:
    """One client's stay in a lane: the global steps ``first`` to ``last``, both included."""

    planned: PlannedClient
    lane: int
    first: int
    last: int
    row: int  # where its samples lie in the round's tables
    started: PreparedClient | None = None

    @property
    def steps(self) -> int:
        """How many there are."""
        return self.last - self.first + 1


def assign_lanes(planned: Sequence[PlannedClient], lanes: int) -> list[LaneSlot]:
    """Deal clients to lanes, longest first to the least loaded; busier lanes get lower numbers."""
    order = sorted(range(len(planned)), key=lambda i: -planned[i].plan.steps)
    queues: list[list[int]] = [[] for _ in range(min(lanes, len(planned)))]
    loads = [(0, queue) for queue in range(len(queues))]  # a heap: the least loaded comes first
    for i in order:
        load, queue = loads[0]
        queues[queue].append(i)
        heapreplace(loads, (load + planned[i].plan.steps, queue))
    rows = list(accumulate((len(p.ids) for p in planned), initial=0))
    legs = []
    for lane, (_, queue) in enumerate(sorted(loads, key=lambda entry: (-entry[0], entry[1]))):
        at = 0
        for i in queues[queue]:
            steps = planned[i].plan.steps
            legs.append(LaneSlot(planned[i], lane, at, at + steps - 1, rows[i]))
            at += steps
    return legs


@dataclass(eq=False)
class RoundSchedule:
    """A round's clients in their lanes, and every lane's batches, step by step."""

    round: int
    planned: list[PlannedClient]
    legs: list[LaneSlot]
    arrays: dict[str, Tensor]  # each [steps, lanes, ...]
    widths: np.ndarray  # [steps] samples that a step does of each lane
    padded: np.ndarray  # [steps] bool: whether any lane's batch is filled up


def lay_out(
    round: int, planned: list[PlannedClient], lanes: int, width: int, augments: bool, narrow: bool = False
) -> RoundSchedule:
    """Deal the clients to lanes and write down every lane's batches, each of at most ``width`` samples.

    With ``narrow`` a step does only half as many where none has more, as an epoch's last often does.
    """
    legs = assign_lanes(planned, lanes)
    steps = max(leg.last for leg in legs) + 1
    sizes = np.zeros((steps, lanes), np.int64)
    for leg in legs:
        sizes[leg.first : leg.last + 1, leg.lane] = leg.planned.plan.sizes
    real = np.arange(width) < sizes[..., None]
    # Sample ids, rows of tables, epoch and dropout key, side by side: a step picks them up in one go.
    places = np.zeros((steps, lanes, 2 * width + 2), np.int64)
    ids, rows = places[..., :width], places[..., width : 2 * width]
    draws = np.zeros((steps, lanes, width, 5) if augments else (0, 0, 0, 5), np.int16)
    for leg in legs:
        plan, span = leg.planned.plan, slice(leg.first, leg.last + 1)
        taken = real[span, leg.lane]
        rows[span, leg.lane][taken] = plan.order + leg.row
        ids[span, leg.lane][taken] = leg.planned.ids[plan.order]
        places[span, leg.lane, -2] = plan.epoch
        if plan.drawn is not None:
            draws[span, leg.lane][taken] = plan.drawn
        if len(plan.keys):
            places[span, leg.lane, -1] = plan.keys
    half = -(-width // 2)
    widths = np.where(narrow & (sizes.max(1) <= half), half, width)
    padded = np.where(sizes, sizes, width).min(1) < widths
    arrays: dict[str, np.ndarray] = {"places": places}
    if padded.any():
        arrays["mask"] = real.astype(np.float32)
    if augments:
        arrays["draws"] = draws
    tensors = {name: torch.from_numpy(values) for name, values in arrays.items()}
    return RoundSchedule(round, planned, legs, tensors, widths, padded)
