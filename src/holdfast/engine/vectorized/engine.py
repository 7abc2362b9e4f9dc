"""Many clients as the lanes of one program: one batched step trains one batch of every lane.

The parameters of L clients are stacked, ``[L, ...]``; the step is the method's own code under
``torch.func.vmap``; on a GPU it is captured in a CUDA graph and replayed. Clients differ in size: a lane that has
finished one client takes the next, and lanes are ordered so that those still at work are always the first n.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from holdfast import kernels
from holdfast.core.settings import Settings
from holdfast.core.trees import (
    changes,
    copies_of_lanes,
    copy_,
    first_lanes,
    leaves,
    stack_like,
    where,
    write_lanes,
)
from holdfast.engine.base import NO_OVERLAP, Overlap
from holdfast.engine.clients import (
    READY_BYTES,
    Broadcast,
    ClientResult,
    ClientRunner,
    DeviceData,
    Job,
    PreparedClient,
    learning_rates,
)
from holdfast.engine.optim import sgd_
from holdfast.engine.vectorized.client_step import ClientStep
from holdfast.engine.vectorized.conv_filters import ConvFilters
from holdfast.engine.vectorized.round_schedule import LaneSlot, RoundSchedule, lay_out
from holdfast.engine.vectorized.step_cache import StepCache
from holdfast.kernels.amax import noting
from holdfast.methods.base import Method, Tensors, Tree
from holdfast.methods.context import RunContext


class VectorizedEngine:
    """Trains the clients of a round side by side."""

    name = "vectorized"

    def __init__(
        self,
        method: Method,
        context: RunContext,
        data: DeviceData,
        settings: Settings,
        lanes: int,
        width: int,
        sizes: np.ndarray,
    ) -> None:
        """``width`` is the size of the largest batch that any client can have; ``sizes`` [stages, clients] are how many
        samples clients have."""
        self.method, self.context, self.data, self.settings = method, context, data, settings
        self.side = ClientRunner(method, context, data, settings)
        self.lanes, self.width = lanes, width
        self.group = lanes
        self.graphs = context.device.type == "cuda"
        ready_bytes = data.x.numel() * data.dtype.itemsize
        if not self.graphs and not data.preprocess.augments and ready_bytes <= READY_BYTES:
            self.data = data.made_ready()
        self.ahead: RoundSchedule | None = None  # of the next round, made while the GPU was at work
        self.programs = StepCache(self.graphs)
        self.sent = {k: self._stacked(v, 1)[0].copy_(v) for k, v in context.network.params.items()}
        self.params = {k: self._stacked(v, lanes) for k, v in context.network.params.items()}
        self.buffers = {k: self._stacked(v, lanes) for k, v in context.network.buffers.items()}
        self.frozen_buffers = {k: v.clone() for k, v in self.buffers.items()}  # as each client started
        self.momentum = {k: torch.zeros_like(v) for k, v in self.params.items()} if settings.momentum else {}
        self.loss = torch.zeros(lanes, dtype=context.dtype, device=context.device)
        self.zero = self.loss.new_zeros(())
        self.lr = torch.zeros((), dtype=torch.float64 if context.dtype == torch.float64 else torch.float32,
                              device=context.device)  # fmt: skip
        self.lane = ClientStep(method, context, settings, self.side.cache_teachers, self.sent, self.lr)
        self.filters = ConvFilters(method, settings, self.params, self.momentum, self.sent)
        self.rates = self.lr.new_zeros(
            (settings.local_epochs, len(self.params))
        )  # where a method has its own
        self.cursor = torch.zeros(1, dtype=torch.int64, device=context.device)
        self.carry: Tree = {}
        self.teachers: dict[str, Tensors] = {}
        self.tables: Tensors = {}
        self.steps: dict[str, Tensor] = {}
        # What the largest clients need, so that programs, which know addresses, seldom have to be made anew.
        self.longest = settings.local_epochs * -(-int(sizes.max()) // settings.batch_size)
        cohort = settings.clients_per_round or sizes.shape[1]
        self.rows = int(np.sort(sizes.max(0))[-cohort:].sum())  # one for each sample

    def _stacked(self, value: Tensor, lanes: int) -> Tensor:
        """Room for such a tensor in so many lanes."""
        if value.dim() == 4 and self.context.network.uses_kernels:
            from holdfast.kernels.conv import filters

            return filters((lanes, *value.shape), value.device)
        return torch.empty((lanes, *value.shape), dtype=value.dtype, device=value.device)

    # A round --------------------------------------------------------------------------------------------

    def train(
        self, sent: Broadcast, jobs: Sequence[Job], overlap: Overlap = NO_OVERLAP
    ) -> Iterator[ClientResult]:
        """Train all clients; results come as clients finish, always in the same order."""
        layout = self._take(sent.round, jobs)
        legs = layout.legs
        copy_(self.sent, sent.params)
        lr = self.settings.lr_at(sent.round)
        self.lr.fill_(lr)
        if self.method.overrides("learning_rate"):
            own = [
                learning_rates(self.method, e, lr, self.context) for e in range(self.settings.local_epochs)
            ]
            rates = torch.tensor(own, dtype=self.rates.dtype)
            self.rates.copy_(rates.pin_memory() if self.graphs else rates, non_blocking=True)
        for name, values in layout.arrays.items():
            self._put(name, values)
        self.cursor.zero_()
        starts, ends = {}, {}  # type: dict[int, list[LaneSlot]], dict[int, list[LaneSlot]]
        for leg in legs:
            starts.setdefault(leg.first, []).append(leg)
            ends.setdefault(leg.last, []).append(leg)
        epochs = self._epoch_ends(legs) if self.method.overrides("after_epoch") else {}
        last_step = np.zeros(self.lanes, np.int64) - 1  # of each lane; falls with the lane's number
        for leg in legs:
            last_step[leg.lane] = max(last_step[leg.lane], leg.last)
        # Asking for a result makes a GPU wait: those in lanes that nobody else needs are asked for at the end.
        patient, resting = self.settings.deadline is None, []  # type: bool, list[LaneSlot]
        final = max(ends)
        for at in range(final + 1):
            self._enter(starts.get(at, ()), sent)
            self._program(int((last_step >= at).sum()), int(layout.widths[at]), bool(layout.padded[at]))()
            if at in epochs:
                self._end_epoch(epochs[at])
            if at == final // 4 and self.graphs:
                self._prefetch(sent.round + 1, overlap)
            if at == final:
                overlap.finish_last_round()
            ended = ends.get(at, [])
            rest = [leg for leg in ended if patient and leg.last == last_step[leg.lane]]
            yield from self._leave([leg for leg in ended if leg not in rest], lr)
            resting += rest
        yield from self._leave(resting, lr)

    def _prefetch(self, round: int, overlap: Overlap) -> None:
        """Prepare the next round, and start the last model's test, while the GPU has much of this round queued."""
        jobs = overlap.next_jobs()
        self.ahead = self._lay_out(round, jobs) if jobs else None
        overlap.test_last_model()

    def _take(self, round: int, jobs: Sequence[Job]) -> RoundSchedule:
        """The layout of a round: made ahead, or now."""
        ahead, self.ahead = self.ahead, None
        if ahead is None or ahead.round != round:
            return self._lay_out(round, jobs)
        if [p.job.client for p in ahead.planned] != [job.client for job in jobs]:
            return self._lay_out(round, jobs)
        for planned, job in zip(ahead.planned, jobs, strict=True):
            planned.job = job  # which now knows what the server sends, and what the client remembers
        return ahead

    def _lay_out(self, round: int, jobs: Sequence[Job]) -> RoundSchedule:
        planned = [self.side.plan(job, round) for job in jobs]
        layout = lay_out(
            round, planned, self.lanes, self.width, self.data.preprocess.augments, narrow=not self.graphs
        )
        if "mask" in layout.arrays:
            layout.arrays["mask"] = layout.arrays["mask"].to(self.context.dtype)
        if self.graphs:
            device = self.context.device  # from pinned memory, so that nobody waits for the copy
            layout.arrays = {
                name: values.pin_memory().to(device, non_blocking=True)
                for name, values in layout.arrays.items()
            }
        return layout

    def _put(self, name: str, values: Tensor) -> None:
        """Copy to the front of a buffer that keeps its place on the device, and grows when it must."""
        held = self.steps.get(name)
        if held is None or len(held) < len(values):
            self.programs.forget()  # they hold the old addresses
            steps = max(len(values) if held is None else int(1.5 * len(values)), self.longest)
            room = (steps, *values.shape[1:])
            held = self.steps[name] = torch.zeros(room, dtype=values.dtype, device=self.context.device)
        held[: len(values)].copy_(values)

    def _epoch_ends(self, legs: Sequence[LaneSlot]) -> dict[int, list[int]]:
        ends: dict[int, list[int]] = {}
        for leg in legs:
            for step in leg.first + np.flatnonzero(leg.planned.plan.ends_epoch):
                ends.setdefault(int(step), []).append(leg.lane)
        return ends

    # Entering and leaving a lane -------------------------------------------------------------------------

    def _enter(self, legs: Sequence[LaneSlot], sent: Broadcast) -> None:
        """Start these clients in their lanes."""
        if not legs:
            return
        started = self.side.start([leg.planned for leg in legs], sent)
        for leg, one in zip(legs, started, strict=True):
            leg.started = one
            self._fit(one, leg)
        self._write(started, [leg.lane for leg in legs])
        for leg, one in zip(legs, started, strict=True):
            for name, values in one.tables.items():
                self.tables[name][leg.row : leg.row + len(values)].copy_(values)

    def _write(self, started: Sequence[PreparedClient], lanes: Sequence[int]) -> None:
        """Put what these clients begin with into their lanes."""
        buffers = [one.client.buffers for one in started]
        write_lanes(self.params, [one.params for one in started], lanes)
        write_lanes(self.buffers, buffers, lanes)
        write_lanes(self.carry, [one.carry for one in started], lanes)
        if started[0].teachers:
            write_lanes(self.frozen_buffers, buffers, lanes)
        for name in self.teachers:
            whole = [{**one.client.buffers, **one.teachers[name]} for one in started]
            write_lanes(self.teachers[name], whole, lanes)
        still = dict.fromkeys(self.momentum, self.zero)
        write_lanes(self.momentum, [one.momentum or still for one in started], lanes)
        write_lanes({"loss": self.loss}, [{"loss": self.zero}] * len(lanes), lanes)
        self.filters.halve(slice(min(lanes), max(lanes) + 1))

    def _fit(self, started: PreparedClient, leg: LaneSlot) -> None:
        """Make room for what this client carries; shapes are the same for every client of a method."""
        if not self.carry and started.carry:
            self.programs.forget()  # they know of none
            self.carry = stack_like(started.carry, self.lanes)
        for name, weights in started.teachers.items():
            # Every client has the same global teacher: it is not stacked but read where it lies.
            if weights is not started.client.global_params and name not in self.teachers:
                self.programs.forget()
                sent, whole = {**self.frozen_buffers, **self.sent}, {**started.client.buffers, **weights}
                self.teachers[name] = {
                    k: self._stacked(v, self.lanes).copy_(sent[k]) for k, v in whole.items()
                }
        for name, values in started.tables.items():
            held, need = self.tables.get(name), leg.row + len(values)
            if held is None or len(held) < need:
                self.programs.forget()
                room = int(need * (1.0 if held is None else 1.5))
                grown = values.new_zeros((max(room, self.rows), *values.shape[1:]))
                if held is not None:
                    grown[: len(held)] = held
                self.tables[name] = grown

    def _leave(self, legs: Sequence[LaneSlot], lr: float) -> Iterator[ClientResult]:
        """The results of the clients that have just had their last step."""
        if not legs:
            return
        self.filters.move_rims({leg.lane: leg.steps for leg in legs}, lr)
        sums = torch.stack(
            [v.sum(tuple(range(1, v.dim()))) if v.dim() > 1 else v for v in self.params.values()]
        ).sum(0)
        kept = (self.params, self.buffers, self.momentum if self.settings.keep_momentum else {})
        trained = [{k: v.unbind() for k, v in tensors.items()} for tensors in kept]
        carried = copies_of_lanes(self.carry, [leg.lane for leg in legs])  # it may outlive the lane
        finite, losses = torch.isfinite(sums).tolist(), self.loss.tolist()  # here the GPU is waited for
        for leg, carry in zip(legs, carried, strict=True):
            assert leg.started is not None
            lane = leg.lane
            params, buffers, momentum = ({k: v[lane] for k, v in views.items()} for views in trained)
            loss = losses[lane] / leg.steps
            yield self.side.finish(leg.started, params, buffers, momentum, carry, loss, finite[lane])

    # A step ---------------------------------------------------------------------------------------------

    def _program(self, active: int, width: int, masked: bool) -> Callable[[], None]:
        """One step of the first ``active`` lanes, with ``width`` samples of each."""
        ready, network = len(self.programs.ready), self.context.network
        program = self.programs.get(
            (active, width, masked), lambda: self._step(active, width, masked), self._state
        )
        if len(self.programs.ready) > ready and network.uses_kernels:  # now they are compiled
            kernels.remember(network.net, tuple(self.data.x.shape[1:]), self.settings.batch_size)
            self.filters.halve(slice(None))  # the program was tried out on the weights, which were put back
        return program

    def _state(self) -> list[Tensor]:
        """All that a step changes."""
        kept = (self.params, self.buffers, self.momentum, self.carry)
        return [self.loss, self.cursor, *(leaf for tree in kept for _, leaf in leaves(tree))]

    def _step(self, n: int, width: int, masked: bool) -> None:
        """One batch of each of the first n lanes."""
        method, settings = self.method, self.settings
        with torch.no_grad(), noting():
            lanes = self._batches(n, width, masked)
            params = {k: v[:n] for k, v in self.params.items()}
            buffers = {k: v[:n] for k, v in self.buffers.items()}
            carry = first_lanes(self.carry, n)
            if method.overrides("step"):
                new, loss, fresh = vmap(self.lane.whole_step)(params, buffers, carry, *lanes)
                copy_(params, new)
                copy_(buffers, fresh)
                self._count(loss)
                return
            with self.filters.watched(n) as watched:
                grads, loss, features, logits, fresh = vmap(self.lane.gradient)(
                    params, buffers, carry, *lanes
                )
            copy_(buffers, fresh)
            momentum = {k: v[:n] for k, v in self.momentum.items()}
            self.filters.find(*watched, grads, self.lane.looked)
            sgd_(
                list(params.values()),
                [grads[k] for k in params],
                list(momentum.values()),
                lr=self.rates.index_select(0, lanes[3]) if method.overrides("learning_rate") else self.lr,
                momentum=settings.momentum,
                weight_decay=settings.weight_decay,
                kernels=self.context.network.uses_kernels,
                taps=self.filters.moving(),
                pull=self.filters.pull,
                sent=[self.sent[k] for k in params],
                halves=self.filters.halves_of(n),
            )
            if method.overrides("after_step"):
                new, kept = vmap(self.lane.after_step)(params, features, logits, carry, *lanes)
                copy_(params, new)
                copy_(carry, kept)
            self._count(loss)

    def _batches(self, n: int, width: int, masked: bool) -> tuple[Any, ...]:
        """This step's samples, labels, masks, epochs, dropout keys, tables and teachers, lane by lane."""
        x, y, rows, mask, epoch, key = self._read(n, width, masked)
        tables = {}
        if self.tables:
            flat = rows.reshape(-1)
            tables = {k: v.index_select(0, flat).view(n, width, *v.shape[1:]) for k, v in self.tables.items()}
        teachers = {name: {k: v[:n] for k, v in w.items()} for name, w in self.teachers.items()}
        frozen = {k: v[:n] for k, v in self.frozen_buffers.items()}
        return x, y, mask, epoch, key, tables, teachers, frozen

    def _read(self, n: int, width: int, masked: bool) -> tuple[Tensor, ...]:
        """Samples, ready for the model, labels, rows of tables and mask ``[n, B]``, epoch and dropout key ``[n]``."""
        data, steps, augments = self.data, self.steps, self.data.preprocess.augments
        if self.context.network.uses_kernels and data.x.dim() == 4 and data.x.is_contiguous():
            from holdfast.kernels.load_batch import read

            return read(
                data.x, data.y, self.cursor, steps["places"], steps["mask"] if masked else None,
                steps["draws"] if augments else None, n, data.preprocess,
            )  # fmt: skip
        at = {name: values.index_select(0, self.cursor)[0, :n] for name, values in steps.items()
              if name != "mask" or masked}  # fmt: skip
        places = at["places"]
        ids, rows = places[:, :width], places[:, self.width : self.width + width]
        flat = ids.reshape(-1)
        draws = at["draws"][:, :width].reshape(-1, 5) if augments else None
        x = data.preprocess(data.x.index_select(0, flat), draws, dtype=data.dtype)
        y = data.y.index_select(0, flat).view(ids.shape)
        mask = at["mask"][:, :width] if masked else x.new_empty((n, 0))
        return x.view(*ids.shape, *x.shape[1:]), y, rows, mask, places[:, -2], places[:, -1]

    def _count(self, loss: Tensor) -> None:
        """The step is done: losses ``[n]`` are added up, and the next step is next."""
        if self.context.network.uses_kernels:
            from holdfast.kernels.step_counter import count_

            count_(self.loss, loss, self.cursor)
        else:
            self.loss[: len(loss)].add_(loss)
            self.cursor.add_(1)

    def _end_epoch(self, lanes: Sequence[int]) -> None:
        """``after_epoch`` for the lanes that have just finished one."""
        ended = torch.zeros(self.lanes, dtype=torch.bool, device=self.context.device)
        ended[list(lanes)] = True
        n = max(lanes) + 1
        params, carry = {k: v[:n] for k, v in self.params.items()}, first_lanes(self.carry, n)

        def one(w: Tensors, c: Tree, done: Tensor) -> tuple[Tree, Tree]:
            new, kept = self.method.after_epoch(w, c)
            return where(done, changes(new, w), w), where(done, changes(kept, c), c)

        with torch.no_grad():
            new, kept = vmap(one)(params, carry, ended[:n])
            copy_(params, new)
            copy_(carry, kept)
