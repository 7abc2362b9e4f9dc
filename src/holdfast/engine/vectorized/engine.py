"""The vectorized engine: one batched step trains one batch of every lane.

The parameters of L clients are stacked, ``[L, ...]``. The step is the method's code under ``torch.func.vmap``. On a GPU
it is captured in a CUDA graph and replayed; on a CPU it is recorded and replayed. Clients differ in size: when a lane
has finished one client, it continues with the next. Batches also differ in size. For a method that respects the mask
they are padded, and the active lanes are always the first n. For other methods, only lanes whose batches have the same
size take part in a step; their weights are gathered before the step and written back after it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from holdfast.core.errors import HoldfastError
from holdfast.core.settings import Settings
from holdfast.core.trees import (
    changes,
    copies_of_lanes,
    copy_,
    first_lanes,
    leaves,
    stack_like,
    tree_map,
    where,
    write_lanes,
)
from holdfast.engine.base import NO_OVERLAP, Overlap
from holdfast.engine.batching import local_steps
from holdfast.engine.clients import (
    PREPROCESSED_BYTES,
    Broadcast,
    ClientResult,
    ClientRunner,
    DeviceData,
    Job,
    PreparedClient,
    learning_rates,
)
from holdfast.engine.local_optimizer import LocalOptimizer
from holdfast.engine.loss_scaling import after_step, new_scaling
from holdfast.engine.vectorized.client_step import ClientStep, UsualStep
from holdfast.engine.vectorized.conv_filters import ConvFilters
from holdfast.engine.vectorized.round_schedule import LaneSlot, RoundSchedule, schedule_round
from holdfast.engine.vectorized.step_cache import StepCache
from holdfast.kernels.amax import recording_amax
from holdfast.methods.base import Method, Tensors, Tree
from holdfast.methods.context import RunContext


class VectorizedEngine:
    """Trains the clients of a round in the lanes of one program."""

    name = "vectorized"
    train_masked = None

    def __init__(
        self,
        method: Method,
        context: RunContext,
        data: DeviceData,
        settings: Settings,
        lanes: int,
        width: int,
        sizes: np.ndarray,
        pad: bool = True,
    ) -> None:
        """``width`` is the size of the largest batch of any client; ``sizes`` [stages, clients] are sample counts.

        ``pad``: whether shorter batches are padded, for methods whose hooks respect the mask.
        """
        self.method, self.context, self.data, self.settings = method, context, data, settings
        self.runner = ClientRunner(method, context, data, settings)
        self.lanes, self.width, self.pad = lanes, width, pad
        self.group = lanes
        self.graphs = context.device.type == "cuda"
        ready_bytes = data.x.numel() * data.dtype.itemsize
        if not self.graphs and not data.preprocess.augments and ready_bytes <= PREPROCESSED_BYTES:
            self.data = data.preprocessed()
        self.next_schedule: RoundSchedule | None = None  # prepared while the GPU was busy
        self.step_cache = StepCache(self.graphs)
        self.global_params = {
            k: self._empty_lanes(v, 1)[0].copy_(v) for k, v in context.network.params.items()
        }
        self.params = {k: self._empty_lanes(v, lanes) for k, v in context.network.params.items()}
        self.buffers = {k: self._empty_lanes(v, lanes) for k, v in context.network.buffers.items()}
        self.frozen_buffers = {k: v.clone() for k, v in self.buffers.items()}  # as each client started
        self.optimizer = LocalOptimizer(settings)
        self.optimizer_state = self.optimizer.new_state(self.params, lanes)
        self.loss = torch.zeros(lanes, dtype=context.dtype, device=context.device)
        self.zero = self.loss.new_zeros(())
        self.scaling = new_scaling(context.network, lanes)
        self.first_scaling = new_scaling(context.network)
        self.lr = torch.zeros((), dtype=torch.float64 if context.dtype == torch.float64 else torch.float32,
                              device=context.device)  # fmt: skip
        self.client_step = ClientStep(
            method, context, settings, self.runner.cache_teachers, self.global_params, self.lr
        )
        self.conv_filters = ConvFilters(
            method, settings, self.params, self.global_params, self.optimizer, self.optimizer_state
        )
        # The learning rate of each epoch and parameter, if the method sets them.
        epochs = settings.local_steps or math.ceil(settings.local_epochs)
        self.rates = self.lr.new_zeros((epochs, len(self.params)))
        self.cursor = torch.zeros(1, dtype=torch.int64, device=context.device)  # the current step's number
        # For DP-SGD: the noise of every lane as one vector, and the expected batch sizes.
        self.noise: Tensor | None = None
        if self.runner.sample_dp is not None:
            self.noise = self.loss.new_zeros((lanes, sum(p.numel() for p in context.network.params.values())))
        self.expected = self.loss.new_ones(lanes)
        self.carry: Tree = {}
        self.teachers: dict[str, Tensors] = {}
        self.tables: Tensors = {}
        self.schedule_arrays: dict[str, Tensor] = {}
        # Capacities for the largest clients, so that buffers are rarely reallocated, which would invalidate compiled
        # steps.
        batches = -(-int(sizes.max()) // settings.batch_size)
        self.min_steps = local_steps(batches, settings.local_epochs, settings.local_steps)
        cohort = settings.clients_per_round or sizes.shape[1]
        self.min_rows = int(np.sort(sizes.max(0))[-cohort:].sum())  # one per sample

    def _empty_lanes(self, value: Tensor, lanes: int) -> Tensor:
        """An uninitialised tensor for such a value in each lane."""
        if value.dim() == 4 and self.context.network.uses_kernels:
            from holdfast.kernels.conv import empty_filters

            return empty_filters((lanes, *value.shape), value.device)
        return torch.empty((lanes, *value.shape), dtype=value.dtype, device=value.device)

    # A round --------------------------------------------------------------------------------------------

    def train(
        self, sent: Broadcast, jobs: Sequence[Job], overlap: Overlap = NO_OVERLAP
    ) -> Iterator[ClientResult]:
        """Train all clients and yield their results as they finish, always in the same order."""
        schedule = self._schedule(sent.round, jobs)
        slots = schedule.slots
        copy_(self.global_params, sent.params)
        lr = self.settings.lr_at(sent.round)
        self.lr.fill_(lr)
        if self.method.overrides("learning_rate"):
            begun = max(planned.plan.epochs for planned in schedule.planned)
            by_epoch = [learning_rates(self.method, e, lr, self.context) for e in range(begun)]
            rates = torch.tensor(by_epoch, dtype=self.rates.dtype)
            self.rates[:begun].copy_(rates.pin_memory() if self.graphs else rates, non_blocking=True)
        if schedule.width != self.width:
            self.width = schedule.width
            self.schedule_arrays.clear()
            self.step_cache.clear()
        for name, values in schedule.arrays.items():
            self._load_schedule_array(name, values)
        self.cursor.zero_()
        noisy: dict[int, list[tuple[LaneSlot, int]]] = {}
        for slot in slots if self.noise is not None else ():
            for number, at in enumerate(slot.at.tolist()):
                noisy.setdefault(at, []).append((slot, number))
        starts, ends = {}, {}  # type: dict[int, list[LaneSlot]], dict[int, list[LaneSlot]]
        for slot in slots:
            starts.setdefault(slot.first, []).append(slot)
            ends.setdefault(slot.last, []).append(slot)
        method = self.method
        epochs = self._epoch_ends(slots) if method.overrides("after_epoch") else {}
        resets: dict[int, list[int]] = {}
        if method.overrides("resets_optimizer"):
            resets = self._epoch_ends(slots, lambda epoch: method.resets_optimizer(epoch, self.context))
        last_step = np.zeros(self.lanes, np.int64) - 1  # of each lane; decreases with the lane's number
        for slot in slots:
            last_step[slot.lane] = max(last_step[slot.lane], slot.last)
        # Reading a result blocks the host until the GPU is done, so lanes that are not reused are read at the end.
        may_defer, deferred = self.settings.deadline is None, []  # type: bool, list[LaneSlot]
        final = max(ends)
        for step in range(final + 1):
            self._start_clients(starts.get(step, ()), sent, step == 0)
            active, width = int(schedule.active[step]), int(schedule.widths[step])
            if self.noise is not None:
                self._load_noise(sent.round, noisy.get(step, ()))
            self._compiled_step(active, width, bool(schedule.padded[step]))()
            if step in epochs:
                self._end_epoch(epochs[step])
            if step in resets:
                self._load_optimizer_state([{}] * len(resets[step]), resets[step])
            if step == final // 4 and self.graphs:
                self._prefetch(sent.round + 1, overlap)
            if step == final:
                overlap.finish_last_round()
            ended = ends.get(step, [])
            lane_done = [slot for slot in ended if may_defer and slot.last == last_step[slot.lane]]
            yield from self._finish_clients([slot for slot in ended if slot not in lane_done], lr)
            deferred += lane_done
        yield from self._finish_clients(deferred, lr)

    def _prefetch(self, round: int, overlap: Overlap) -> None:
        """Prepare the next round and start the test of the last model while the GPU computes the queued steps."""
        jobs = overlap.next_jobs()
        self.next_schedule = self._new_schedule(round, jobs) if jobs else None
        overlap.test_last_model()

    def _schedule(self, round: int, jobs: Sequence[Job]) -> RoundSchedule:
        """The schedule of a round: the prefetched one if it is for the same jobs, otherwise a new one."""
        prefetched, self.next_schedule = self.next_schedule, None
        if prefetched is None or prefetched.round != round:
            return self._new_schedule(round, jobs)
        if [p.job.client for p in prefetched.planned] != [job.client for job in jobs]:
            return self._new_schedule(round, jobs)
        for planned, job in zip(prefetched.planned, jobs, strict=True):
            planned.job = job  # now with its payload from the server and the client's memory
        return prefetched

    def _new_schedule(self, round: int, jobs: Sequence[Job]) -> RoundSchedule:
        planned = [self.runner.plan(job, round) for job in jobs]
        widest = max(int(one.plan.sizes.max()) for one in planned)
        schedule = schedule_round(
            round,
            planned,
            self.lanes,
            self.width if self.noise is None else max(self.width, widest),
            self.data.preprocess.augments,
            allow_half_width=not self.graphs,
            pad=self.pad,
            lr_factors=self.settings.step_factors if self.settings.lr_varies_in_round else None,
            granularity=None if self.noise is None else max(1, self.settings.batch_size // 4),
        )
        for name, dtype in (("mask", self.context.dtype), ("lr_factors", self.lr.dtype)):
            if name in schedule.arrays:
                schedule.arrays[name] = schedule.arrays[name].to(dtype)
        if self.graphs:
            device = self.context.device  # a copy from pinned memory does not block the host
            schedule.arrays = {
                name: values.pin_memory().to(device, non_blocking=True)
                for name, values in schedule.arrays.items()
            }
        return schedule

    def _load_noise(self, round: int, steps: Sequence[tuple[LaneSlot, int]]) -> None:
        """Draw the noise of this step of the lanes that take part; ``steps`` are its numbers within each client."""
        assert self.noise is not None
        for slot, number in steps:
            samples = len(slot.planned.ids)
            self.noise[slot.lane] = self.runner.noise(self.noise[0], slot.planned.job, samples, round, number)
            if number == 0:
                self.expected[slot.lane] = self.runner.expected_batch(samples)

    def _load_schedule_array(self, name: str, values: Tensor) -> None:
        """Copy an array of the schedule to a buffer on the device, which keeps its address unless it is too small."""
        buffer = self.schedule_arrays.get(name)
        if buffer is None or len(buffer) < len(values):
            self.step_cache.clear()  # its steps contain the old addresses
            steps = max(len(values) if buffer is None else int(1.5 * len(values)), self.min_steps)
            shape = (steps, *values.shape[1:])
            buffer = torch.zeros(shape, dtype=values.dtype, device=self.context.device)
            self.schedule_arrays[name] = buffer
        buffer[: len(values)].copy_(values)

    def _epoch_ends(
        self, slots: Sequence[LaneSlot], chosen: Callable[[int], bool] = lambda epoch: True
    ) -> dict[int, list[int]]:
        """By step, the lanes in which a ``chosen`` local epoch ends with this step."""
        ends: dict[int, list[int]] = {}
        for slot in slots:
            plan = slot.planned.plan
            for index in np.flatnonzero(plan.ends_epoch):
                if chosen(int(plan.epoch[index])):
                    ends.setdefault(int(slot.at[index]), []).append(slot.lane)
        return ends

    # Clients --------------------------------------------------------------------------------------------

    def _start_clients(self, slots: Sequence[LaneSlot], sent: Broadcast, first: bool) -> None:
        """Load these clients into their lanes; ``first``: no lane is in use yet."""
        if not slots:
            return
        clients = self.runner.start([slot.planned for slot in slots], sent)
        for slot, prepared in zip(slots, clients, strict=True):
            slot.prepared = prepared
            self._allocate(prepared, slot, first and slot is slots[0])
        self._write_lanes(clients, [slot.lane for slot in slots])
        for slot, prepared in zip(slots, clients, strict=True):
            for name, values in prepared.tables.items():
                self.tables[name][slot.row : slot.row + len(values)].copy_(values)

    def _write_lanes(self, clients: Sequence[PreparedClient], lanes: Sequence[int]) -> None:
        """Write the initial state of these clients to their lanes."""
        buffers = [prepared.client.buffers for prepared in clients]
        write_lanes(self.params, [prepared.params for prepared in clients], lanes)
        write_lanes(self.buffers, buffers, lanes)
        write_lanes(self.carry, [prepared.carry for prepared in clients], lanes)
        if clients[0].teachers:
            write_lanes(self.frozen_buffers, buffers, lanes)
        for name in self.teachers:
            models = [{**prepared.client.buffers, **prepared.teachers[name]} for prepared in clients]
            write_lanes(self.teachers[name], models, lanes)
        self._load_optimizer_state([prepared.optimizer for prepared in clients], lanes)
        write_lanes({"loss": self.loss}, [{"loss": self.zero}] * len(lanes), lanes)
        write_lanes(self.scaling, [self.first_scaling] * len(lanes), lanes)
        self.conv_filters.refresh_fp16_copies(slice(min(lanes), max(lanes) + 1))

    def _load_optimizer_state(self, states: Sequence[Tree], lanes: Sequence[int]) -> None:
        """Write these states of the optimiser to their lanes; an empty state is the initial state."""
        zeros = tree_map(lambda _: self.zero, self.optimizer_state)
        write_lanes(self.optimizer_state, [state or zeros for state in states], lanes)

    def _allocate(self, prepared: PreparedClient, slot: LaneSlot, first: bool) -> None:
        """Allocate the lanes' carry, teachers and tables as this client needs; shapes are the same for all clients.

        The ``first`` client of a round may have different shapes from those of the previous round.
        """
        if not _fits(prepared.carry, self.carry):
            if not first:
                raise HoldfastError(
                    f"{self.method.name}: client_init returns tensors of different shapes for client "
                    f"{prepared.client.id} than for other clients; the shapes must be the same for every client"
                )
            self.step_cache.clear()  # its steps contain the old addresses
            self.carry = stack_like(prepared.carry, self.lanes)
        for name, weights in prepared.teachers.items():
            # The global model, the same teacher for every client, is not stacked but read directly.
            if weights is not prepared.client.global_params and name not in self.teachers:
                self.step_cache.clear()
                initial = {**self.frozen_buffers, **self.global_params}
                model = {**prepared.client.buffers, **weights}
                self.teachers[name] = {
                    k: self._empty_lanes(v, self.lanes).copy_(initial[k]) for k, v in model.items()
                }
        for name, values in prepared.tables.items():
            table, rows = self.tables.get(name), slot.row + len(values)
            if table is not None and table.shape[1:] != values.shape[1:]:
                if not first:
                    raise HoldfastError(
                        f"{self.method.name}: tables returns '{name}' with different shapes for client "
                        f"{prepared.client.id} than for other clients; the shapes must be the same for every "
                        "client"
                    )
                table = None
            if table is None or len(table) < rows:
                self.step_cache.clear()
                capacity = max(int(rows * (1.0 if table is None else 1.5)), self.min_rows)
                grown = values.new_zeros((capacity, *values.shape[1:]))
                if table is not None:
                    grown[: len(table)] = table
                self.tables[name] = grown

    def _finish_clients(self, slots: Sequence[LaneSlot], lr: float) -> Iterator[ClientResult]:
        """The results of clients after their last step."""
        if not slots:
            return
        self.conv_filters.update_padding_taps({slot.lane: slot.steps for slot in slots}, lr)
        sums = torch.stack(
            [v.sum(tuple(range(1, v.dim()))) if v.dim() > 1 else v for v in self.params.values()]
        ).sum(0)
        kept = self.optimizer_state if self.settings.keep_optimizer else {}
        unbound = [{k: v.unbind() for k, v in tensors.items()} for tensors in (self.params, self.buffers)]
        carries = copies_of_lanes(
            self.carry, [slot.lane for slot in slots]
        )  # may be used after the lane is reused
        finite, losses = torch.isfinite(sums).tolist(), self.loss.tolist()  # the host waits for the GPU here
        taken = self.scaling["steps"].tolist() if self.scaling else None
        for slot, carry in zip(slots, carries, strict=True):
            assert slot.prepared is not None
            lane = slot.lane
            steps = slot.steps if taken is None else int(taken[lane])
            params, buffers = ({k: v[lane] for k, v in views.items()} for views in unbound)
            state = tree_map(operator.itemgetter(lane), kept)
            loss = losses[lane] / steps if steps else math.nan
            yield self.runner.finish(
                slot.prepared, params, buffers, state, carry, loss, finite[lane] and steps > 0
            )

    # A step ---------------------------------------------------------------------------------------------

    def _compiled_step(self, active: int, width: int, masked: bool) -> Callable[[], None]:
        """One step of the first ``active`` lanes, with ``width`` samples of each."""
        compiled, network = len(self.step_cache.compiled), self.context.network
        step = self.step_cache.get(
            (active, width, masked), lambda: self._step(active, width, masked), self._state
        )
        if len(self.step_cache.compiled) > compiled and network.uses_kernels:
            # Compiling ran a step, after which the weights were restored, but not their fp16 copies.
            self.conv_filters.refresh_fp16_copies(slice(None))
        return step

    def _state(self) -> list[Tensor]:
        """All tensors that a step changes."""
        trees = (self.params, self.buffers, self.optimizer_state, self.carry, self.scaling)
        return [self.loss, self.cursor, *(leaf for tree in trees for _, leaf in leaves(tree))]

    def _step(self, n: int, width: int, masked: bool) -> None:
        """One batch of each active lane."""
        method = self.method
        with torch.no_grad(), recording_amax():
            rows = self._active_lanes(n)
            batch = self._load_step(n, width, masked, rows)
            params, buffers = self._of_lanes(self.params, n, rows), self._of_lanes(self.buffers, n, rows)
            carry, scaling = self._of_lanes(self.carry, n, rows), self._of_lanes(self.scaling, n, rows)
            if method.overrides("step"):
                try:
                    new_params, loss, changed, new_carry, taken = vmap(self.client_step.whole_step)(
                        params, buffers, carry, scaling, *batch
                    )
                except UsualStep:
                    pass
                else:
                    copy_(params, new_params)
                    copy_(buffers, changed)
                    copy_(carry, new_carry)
                    if taken:
                        copy_(scaling, after_step(scaling, taken["taken"]))
                    self._write_back(
                        rows,
                        (self.params, params),
                        (self.buffers, buffers),
                        (self.carry, carry),
                        (self.scaling, scaling),
                    )
                    self._count_step(loss, rows)
                    return
            with self.conv_filters.recording(n) as recorded:
                grads, loss, features, logits, changed, new_carry, taken = vmap(self.client_step.gradient)(
                    params, buffers, carry, scaling, *batch
                )
            copy_(buffers, changed)
            copy_(carry, new_carry)
            if taken:
                copy_(scaling, after_step(scaling, taken["taken"]))
            optimizer_state = self._of_lanes(self.optimizer_state, n, rows)
            self.conv_filters.update(*recorded, grads, self.client_step.loss_reads_weights)
            self.optimizer.step_(
                list(params.values()),
                [grads[k] for k in params],
                {slot: list(by_name.values()) for slot, by_name in optimizer_state.items()},
                lr=self._learning_rate(n, batch[3], taken),
                proximal_mu=self.conv_filters.proximal_mu,
                global_params=[self.global_params[k] for k in params],
                kernels=self.context.network.uses_kernels,
                taps=self.conv_filters.updated_taps(),
                fp16_copies=self.conv_filters.fp16_copies_of(n),
            )
            if method.overrides("after_step"):
                new_params, new_carry = vmap(self.client_step.after_step)(
                    params, features, logits, carry, taken, *batch
                )
                copy_(params, new_params)
                copy_(carry, new_carry)
            self._write_back(
                rows,
                (self.params, params),
                (self.buffers, buffers),
                (self.optimizer_state, optimizer_state),
                (self.carry, carry),
                (self.scaling, scaling),
            )
            self._count_step(loss, rows)

    def _active_lanes(self, n: int) -> Tensor | None:
        """The lanes of this step, ``[n]``; None for the first n."""
        return None if self.pad else self.schedule_arrays["lanes"].index_select(0, self.cursor)[0, :n]

    def _of_lanes(self, stacked: Tree, n: int, rows: Tensor | None) -> Tree:
        """The part of these lanes: a view of the first n, or a copy of the given ``rows``."""
        if rows is None:
            return first_lanes(stacked, n)
        return tree_map(lambda value: value.index_select(0, rows), stacked)

    def _write_back(self, rows: Tensor | None, *pairs: tuple[Tree, Tree]) -> None:
        """Write the changed tensors back to their lanes, unless the step worked on views."""
        for stacked, values in pairs if rows is not None else ():
            tree_map(lambda target, value: target.index_copy_(0, rows, value), stacked, values)

    def _learning_rate(self, n: int, epoch: Tensor, taken: Tensors) -> Tensor:
        """The learning rate: a scalar if it is the same for all lanes and parameters, otherwise ``[n, parameters]``.

        It is 0, with which optimisers change nothing, for lanes whose step is not ``taken``.
        """
        varies = self.method.overrides("learning_rate")
        rates = self.rates.index_select(0, epoch) if varies else self.lr
        by_lane = [value[:, None] for value in taken.values()]
        if "lr_factors" in self.schedule_arrays:
            by_lane.append(self.schedule_arrays["lr_factors"].index_select(0, self.cursor)[0, :n, None])
        for factors in by_lane:
            rates = rates * factors
        return rates.expand(n, len(self.params)).contiguous() if by_lane else rates

    def _load_step(self, n: int, width: int, masked: bool, lanes: Tensor | None) -> tuple[Any, ...]:
        """This step's samples, targets, masks, epochs, dropout keys, tables, teachers and their buffers, by lane.

        For DP-SGD, the noise and the expected batch sizes follow.
        """
        x, y, rows, mask, epoch, key = self._load_batch(n, width, masked)
        tables = {}
        if self.tables:
            flat = rows.reshape(-1)
            tables = {k: v.index_select(0, flat).view(n, width, *v.shape[1:]) for k, v in self.tables.items()}
        teachers = {name: self._of_lanes(weights, n, lanes) for name, weights in self.teachers.items()}
        frozen = self._of_lanes(self.frozen_buffers, n, lanes) if self.method.teachers else {}
        protection: tuple[Any, ...] = ()
        if self.noise is not None:
            parts = torch.split(self.noise[:n], [p[0].numel() for p in self.params.values()], 1)
            noise = {
                k: part.view(n, *p.shape[1:]) for (k, p), part in zip(self.params.items(), parts, strict=True)
            }
            protection = noise, self.expected[:n]
        return x, y, mask, epoch, key, tables, teachers, frozen, *protection

    def _load_batch(self, n: int, width: int, masked: bool) -> tuple[Tensor, ...]:
        """Preprocessed samples, targets, table rows and mask ``[n, B]``, epoch and dropout key ``[n]``."""
        data, arrays, augments = self.data, self.schedule_arrays, self.data.preprocess.augments
        images = data.x.dim() == 4 and data.x.is_contiguous()
        if self.context.network.uses_kernels and images and data.y.dim() == 1:
            from holdfast.kernels.load_batch import load_batch

            return load_batch(
                data.x, data.y, self.cursor, arrays["indices"], arrays["mask"] if masked else None,
                arrays["draws"] if augments else None, n, data.preprocess,
            )  # fmt: skip
        current = {name: values.index_select(0, self.cursor)[0, :n] for name, values in arrays.items()
                   if name not in ("lanes", "lr_factors") and (name != "mask" or masked)}  # fmt: skip
        indices = current["indices"]
        ids, rows = indices[:, :width], indices[:, self.width : self.width + width]
        flat = ids.reshape(-1)
        draws = current["draws"][:, :width].reshape(-1, 5) if augments else None
        x = data.preprocess(data.x.index_select(0, flat), draws, dtype=data.dtype)
        y = data.y.index_select(0, flat).view(*ids.shape, *data.y.shape[1:])
        mask = current["mask"][:, :width] if masked else x.new_empty((n, 0))
        return x.view(*ids.shape, *x.shape[1:]), y, rows, mask, indices[:, -2], indices[:, -1]

    def _count_step(self, loss: Tensor, rows: Tensor | None) -> None:
        """Add the losses ``[n]`` to the lanes' sums and move to the next step."""
        if rows is not None:
            self.loss.index_add_(0, rows, loss)
            self.cursor.add_(1)
        elif self.context.network.uses_kernels:
            from holdfast.kernels.step_counter import count_step_

            count_step_(self.loss, loss, self.cursor)
        else:
            self.loss[: len(loss)].add_(loss)
            self.cursor.add_(1)

    def _end_epoch(self, lanes: Sequence[int]) -> None:
        """Call ``after_epoch`` for these lanes."""
        ended = torch.zeros(self.lanes, dtype=torch.bool, device=self.context.device)
        ended[list(lanes)] = True
        n = max(lanes) + 1
        params, carry = {k: v[:n] for k, v in self.params.items()}, first_lanes(self.carry, n)

        def one_lane(w: Tensors, c: Tree, done: Tensor) -> tuple[Tree, Tree]:
            new_w, new_c = self.method.after_epoch(w, c)
            return where(done, changes(new_w, w), w), where(done, changes(new_c, c), c)

        with torch.no_grad():
            new_params, new_carry = vmap(one_lane)(params, carry, ended[:n])
            copy_(params, new_params)
            copy_(carry, new_carry)


def _fits(carry: Tree, stacked: Tree) -> bool:
    """Whether each lane of ``stacked`` has the keys, shapes and dtypes of ``carry``."""
    of_lanes = {path: (value.shape[1:], value.dtype) for path, value in leaves(stacked)}
    return of_lanes == {path: (value.shape, value.dtype) for path, value in leaves(carry)}
