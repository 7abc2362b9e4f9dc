"""The schedule of a round: which client trains in which lane at which steps, and every lane's batches."""

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
    """One client's time in a lane: the round's steps ``first`` to ``last``, both included."""

    planned: PlannedClient
    lane: int
    first: int
    last: int
    row: int  # its first row in the round's tables, which have one row per sample
    prepared: PreparedClient | None = None

    @property
    def steps(self) -> int:
        return self.last - self.first + 1


def assign_lanes(planned: Sequence[PlannedClient], lanes: int) -> list[LaneSlot]:
    """Assign clients to lanes, longest first to the least loaded; busier lanes get lower numbers."""
    order = sorted(range(len(planned)), key=lambda i: -planned[i].plan.steps)
    queues: list[list[int]] = [[] for _ in range(min(lanes, len(planned)))]
    loads = [(0, queue) for queue in range(len(queues))]  # a heap: the least loaded comes first
    for i in order:
        load, queue = loads[0]
        queues[queue].append(i)
        heapreplace(loads, (load + planned[i].plan.steps, queue))
    rows = list(accumulate((len(p.ids) for p in planned), initial=0))
    slots = []
    for lane, (_, queue) in enumerate(sorted(loads, key=lambda entry: (-entry[0], entry[1]))):
        step = 0
        for i in queues[queue]:
            steps = planned[i].plan.steps
            slots.append(LaneSlot(planned[i], lane, step, step + steps - 1, rows[i]))
            step += steps
    return slots


@dataclass(eq=False)
class RoundSchedule:
    """A round's clients in their lanes, and every lane's batches, step by step.

    ``arrays`` has up to three entries: ``indices`` (the batch's sample ids and table rows, the epoch and the dropout
    key), ``mask`` (0 for padding; only if a batch is padded) and ``draws`` (the random choices of augmentation).
    """

    round: int
    planned: list[PlannedClient]
    slots: list[LaneSlot]
    arrays: dict[str, Tensor]  # each [steps, lanes, ...]
    widths: np.ndarray  # [steps] samples per lane
    padded: np.ndarray  # [steps] bool: whether any lane's batch is padded


def schedule_round(
    round: int,
    planned: list[PlannedClient],
    lanes: int,
    width: int,
    augments: bool,
    allow_half_width: bool = False,
) -> RoundSchedule:
    """Assign the clients to lanes and lay out every lane's batches, each of at most ``width`` samples.

    With ``allow_half_width`` a step takes half as many samples per lane if no lane has more, which is often so at the
    end of an epoch.
    """
    slots = assign_lanes(planned, lanes)
    steps = max(slot.last for slot in slots) + 1
    sizes = np.zeros((steps, lanes), np.int64)
    for slot in slots:
        sizes[slot.first : slot.last + 1, slot.lane] = slot.planned.plan.sizes
    real = np.arange(width) < sizes[..., None]
    # Sample ids, table rows, epoch and dropout key are side by side, so that a step reads them at once.
    indices = np.zeros((steps, lanes, 2 * width + 2), np.int64)
    ids, rows = indices[..., :width], indices[..., width : 2 * width]
    draws = np.zeros((steps, lanes, width, 5) if augments else (0, 0, 0, 5), np.int16)
    for slot in slots:
        plan, span = slot.planned.plan, slice(slot.first, slot.last + 1)
        filled = real[span, slot.lane]
        rows[span, slot.lane][filled] = plan.order + slot.row
        ids[span, slot.lane][filled] = slot.planned.ids[plan.order]
        indices[span, slot.lane, -2] = plan.epoch
        if plan.drawn is not None:
            draws[span, slot.lane][filled] = plan.drawn
        if len(plan.keys):
            indices[span, slot.lane, -1] = plan.keys
    half = -(-width // 2)
    widths = np.where(allow_half_width & (sizes.max(1) <= half), half, width)
    padded = np.where(sizes, sizes, width).min(1) < widths
    arrays: dict[str, np.ndarray] = {"indices": indices}
    if padded.any():
        arrays["mask"] = real.astype(np.float32)
    if augments:
        arrays["draws"] = draws
    tensors = {name: torch.from_numpy(values) for name, values in arrays.items()}
    return RoundSchedule(round, planned, slots, tensors, widths, padded)
