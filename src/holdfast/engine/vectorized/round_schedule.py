"""The schedule of a round: the lane and the steps of each client, and the batches of each lane.

A step trains batches of several lanes in one program, so all of them have the same width. Either shorter batches are
padded, or only lanes whose batches have the same number of samples take part in a step, and the other lanes wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapreplace
from itertools import accumulate, count
from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdfast.engine.clients import PlannedClient, PreparedClient


@dataclass(eq=False)
class LaneSlot:
    """One client's time in a lane."""

    planned: PlannedClient
    lane: int
    row: int  # its first row in the round's tables, which have one row per sample
    at: np.ndarray  # [K] the round's steps in which its batches are trained, increasing
    prepared: PreparedClient | None = None

    @property
    def first(self) -> int:
        return int(self.at[0])

    @property
    def last(self) -> int:
        return int(self.at[-1])

    @property
    def steps(self) -> int:
        return len(self.at)


def assign_lanes(planned: Sequence[PlannedClient], lanes: int) -> list[LaneSlot]:
    """Assign clients to lanes: the longest client first, to the least loaded lane. Busier lanes have lower numbers."""
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
            slots.append(LaneSlot(planned[i], lane, rows[i], np.arange(step, step + steps)))
            step += steps
    return slots


@dataclass(eq=False)
class RoundSchedule:
    """A round's clients in their lanes, and every lane's batches, step by step.

    ``arrays`` has at most five entries: ``indices`` (the batch's sample ids and table rows, the epoch and the dropout
    key), ``mask`` (0 for padding; only if a batch is padded), ``draws`` (the random choices of augmentation),
    ``lanes`` (the lanes of the step's batches; without this entry, the first ones in order) and ``lr_factors`` (only
    if the learning rate varies within a round).
    """

    round: int
    planned: list[PlannedClient]
    slots: list[LaneSlot]
    arrays: dict[str, Tensor]  # each [steps, lanes, ...]
    active: np.ndarray  # [steps] how many lanes take part
    widths: np.ndarray  # [steps] samples per lane
    padded: np.ndarray  # [steps] bool: whether any lane's batch is padded
    width: int  # the largest number of samples per lane for which the arrays have room


def schedule_round(
    round: int,
    planned: list[PlannedClient],
    lanes: int,
    width: int,
    augments: bool,
    allow_half_width: bool = False,
    pad: bool = True,
    lr_factors: Callable[[int], Sequence[float]] | None = None,
    granularity: int | None = None,
) -> RoundSchedule:
    """Assign the clients to lanes and arrange the batches of each lane, of at most ``width`` samples each.

    With ``allow_half_width`` a step has half as many samples per lane if no lane needs more, as is common at the end of
    an epoch. Without ``pad``, all batches of a step have the same number of samples. ``lr_factors`` are those of the
    learning rate in a client's steps, by their number. With ``granularity``, the width of a step is the smallest
    sufficient multiple of it.
    """
    slots = assign_lanes(planned, lanes)
    where: list[Any]  # the steps and places of each slot's batches
    if pad:
        where = [(slice(slot.first, slot.last + 1), slot.lane) for slot in slots]
    else:
        where = [(slot.at, place) for slot, place in zip(slots, _synchronise(slots, lanes), strict=True)]
    steps = max(slot.last for slot in slots) + 1
    sizes, taken = np.zeros((steps, lanes), np.int64), np.zeros((steps, lanes), bool)
    for slot, at in zip(slots, where, strict=True):
        sizes[at], taken[at] = slot.planned.plan.sizes, True
    real = np.arange(width) < sizes[..., None]
    # Sample ids, table rows, epoch and dropout key are stored together, so that a step reads them in one operation.
    indices = np.zeros((steps, lanes, 2 * width + 2), np.int64)
    draws = np.zeros((steps, lanes, width, 5) if augments else (0, 0, 0, 5), np.int16)
    lane_numbers = np.zeros((steps, lanes), np.int64)
    for slot, at in zip(slots, where, strict=True):
        plan, filled, own = slot.planned.plan, real[at], indices[at]
        own[:, :width][filled] = slot.planned.ids[plan.order]
        own[:, width : 2 * width][filled] = plan.order + slot.row
        # Padding repeats the batch's first sample: another client's might overflow, and 0 times infinity is not 0.
        for part in (own[:, :width], own[:, width : 2 * width]):
            part[:] = np.where(filled, part, part[:, :1])
        own[:, -2] = plan.epoch
        if len(plan.keys):
            own[:, -1] = plan.keys
        if not pad:  # otherwise it is a view
            indices[at] = own
            lane_numbers[at] = slot.lane
        if plan.drawn is not None:
            drawn = draws[at]
            drawn[filled] = plan.drawn
            draws[at] = drawn
    half = -(-width // 2)
    widths = np.where(allow_half_width & (sizes.max(1) <= half), half, width) if pad else sizes.max(1)
    if granularity is not None:
        widths = np.minimum(width, np.maximum(1, -(-sizes.max(1) // granularity)) * granularity)
    padded = np.where(taken, sizes, width).min(1) < widths
    arrays: dict[str, np.ndarray] = {"indices": indices}
    if padded.any():
        arrays["mask"] = real.astype(np.float32)
    if augments:
        arrays["draws"] = draws
    if not pad:
        arrays["lanes"] = lane_numbers
    if lr_factors is not None:
        arrays["lr_factors"] = np.ones((steps, lanes))
        for slot, at in zip(slots, where, strict=True):
            arrays["lr_factors"][at] = lr_factors(slot.steps)
    tensors = {name: torch.from_numpy(values) for name, values in arrays.items()}
    return RoundSchedule(round, planned, slots, tensors, taken.sum(1), widths, padded, width)


def _synchronise(slots: Sequence[LaneSlot], lanes: int) -> list[np.ndarray]:
    """Move the batches of the slots to steps in which all batches have the same size; each lane keeps its order.

    A step trains the batch size that the fewest lanes need next. The other lanes wait, for example until these lanes
    have trained a short last batch. Returns, by slot, the position of each batch among the batches of its step:
    ``[K]``.
    """
    queues: list[list[tuple[int, int, int]]] = [
        [] for _ in range(lanes)
    ]  # slot, its batch, size; the next one last
    for number, slot in enumerate(slots):
        queues[slot.lane] += [(number, i, int(size)) for i, size in enumerate(slot.planned.plan.sizes)]
    for queue in queues:
        queue.reverse()
    places = [np.zeros(slot.steps, np.int64) for slot in slots]
    for slot in slots:
        slot.at = np.zeros(slot.steps, np.int64)
    for step in count():
        waiting = Counter(queue[-1][2] for queue in queues if queue)
        if not waiting:
            return places
        size = min(waiting, key=lambda s: (waiting[s], s))
        ready = (queue for queue in queues if queue and queue[-1][2] == size)
        for place, queue in enumerate(ready):
            number, i, _ = queue.pop()
            slots[number].at[i], places[number][i] = step, place
    raise AssertionError("unreachable")
