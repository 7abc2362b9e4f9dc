"""Ray engine: the clients of a round are trained by the workers of a cluster, the server runs in this process.

A worker is an actor with a `vectorized` or `sequential` engine; the workers of one machine share the training
samples in its memory. Clients are sent to workers in chunks. Results are yielded in the order of the clients, so
the bits of a run depend neither on the assignment of chunks to workers nor on failed workers.
"""

from __future__ import annotations

import os
import socket
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, NamedTuple
from uuid import uuid4

import numpy as np
import ray
import torch
from ray.exceptions import RayError, RayTaskError
from torch import Tensor

from holdfast.core.device import choose_precision
from holdfast.core.errors import HoldfastError
from holdfast.core.settings import Settings
from holdfast.core.trees import Tree, tree_map
from holdfast.data.preprocess import Preprocess
from holdfast.engine.base import NO_OVERLAP, Overlap
from holdfast.engine.chunks import Pace, choose_chunk, split_into_chunks
from holdfast.engine.clients import Broadcast, ClientResult, DeviceData, Incident, Job
from holdfast.methods.base import Method
from holdfast.methods.context import RunContext
from holdfast.updates.withheld import no_samples

START_SECONDS = 120.0  # timeout for workers to start while none is training
CHOICE_SECONDS = 1.0  # timeout after which waiting chunks are assigned anew
MAX_DEATHS = 3  # failed workers for one chunk, after which its clients are lost for the round
CHUNKS_PER_WORKER = 4  # balances fast and slow workers


# In a worker ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Setup:
    """Everything a worker needs to train the clients of one run; the tensors of ``context`` are on the CPU."""

    method: Method
    context: RunContext
    x: np.ndarray
    labels: np.ndarray
    targets: np.ndarray
    preprocess: Preprocess
    settings: Settings
    sizes: np.ndarray
    parallel_clients: int
    device: str
    tf32: bool


class Worker:
    """An actor that trains clients; it keeps the engine of the latest run."""

    def __init__(self, paths: Sequence[str]) -> None:
        """``paths`` is the main program's ``sys.path``, for modules such as a user's own method."""
        sys.path.extend(path for path in paths if path not in sys.path)
        self.run = ""
        self.engine: Any = None

    def ready(self) -> int:
        """The process id; the call returns once the worker has started."""
        return os.getpid()

    def train(
        self, run: str, setup: Sequence[Any], sent: dict[str, Any], jobs: Sequence[Job]
    ) -> list[ClientResult]:
        """Train the clients of ``jobs``; ``setup`` holds a reference to the `Setup`, fetched once per run."""
        if run != self.run:
            self.engine = None  # free the old run's memory before allocating the new one's
            self.engine, self.run = make_engine(ray.get(setup[0])), run
        device = self.engine.context.device
        parts = (to_tensors(sent[name], device) for name in ("params", "buffers", "payload"))
        broadcast = Broadcast(sent["round"], *parts)
        on_device = [_map_job(lambda tree: to_tensors(tree, device), job) for job in jobs]
        return [_pack(result) for result in self.engine.train(broadcast, on_device)]


def make_engine(setup: Setup) -> Any:
    """The engine that trains a worker's clients."""
    from holdfast.engine.factory import choose_engine

    context = move_context(setup.context, torch.device(setup.device))
    autocast = context.network.autocast_dtype
    precision = "tf32" if setup.tf32 else "float32"
    if autocast is not None:
        precision = str(autocast).removeprefix("torch.")
    choose_precision(precision, context.device)  # as in the main process
    data = DeviceData(
        _tensor(setup.x, context.device),
        _tensor(setup.targets, context.device),
        setup.labels,
        setup.targets,
        setup.preprocess,
        context.dtype,
    )
    return choose_engine(
        "auto", setup.method, context, data, setup.settings, setup.sizes, setup.parallel_clients
    )


def _pack(result: ClientResult) -> ClientResult:
    """The result with NumPy arrays; ``shared`` is empty where it is ``params``, which are then sent once."""
    same = result.shared is result.params
    return replace(
        result,
        params=to_arrays(result.params),
        buffers=to_arrays(result.buffers),
        shared={} if same else to_arrays(result.shared),
        sums=to_arrays(result.sums),
        client_state=to_arrays(result.client_state),
    )


def _unpack(result: ClientResult, device: torch.device) -> ClientResult:
    """The result with tensors again; inverse of `_pack`."""
    params = to_tensors(result.params, device)
    return replace(
        result,
        params=params,
        buffers=to_tensors(result.buffers, device),
        shared=to_tensors(result.shared, device) or params,
        sums=to_tensors(result.sums, device),
        client_state=to_tensors(result.client_state, device),
    )


# Worker pools -----------------------------------------------------------------------------------------------


@dataclass(eq=False)
class WorkerHandle:
    """A worker of this process."""

    actor: Any
    starting: Any  # a reference that becomes ready when the worker has started; None from then on
    run: str = ""  # the last run that it trained a chunk of
    pace: Pace = field(default_factory=Pace)


class Running(NamedTuple):
    """A chunk that a worker trains, since ``start``."""

    worker: WorkerHandle
    chunk: int
    start: float


@dataclass(eq=False)
class WorkerPool:
    """As many workers as the cluster had free CPUs (or GPUs); they are kept from run to run."""

    size: int
    options: dict[str, Any]
    workers: list[WorkerHandle] = field(default_factory=list)

    def fill(self) -> None:
        """Start workers until there are ``size``."""
        while len(self.workers) < self.size:
            actor = ray.remote(**self.options)(Worker).remote(sys.path)
            self.workers.append(WorkerHandle(actor, actor.ready.remote()))

    def replace(self, worker: WorkerHandle) -> None:
        """Kill a worker and start another."""
        ray.kill(worker.actor)
        self.workers.remove(worker)
        self.fill()


_pools: dict[tuple[str, str], WorkerPool] = {}


def connect(address: str | None) -> None:
    """Connect to the cluster at ``address``; None starts one on this machine."""
    if ray.is_initialized():
        return
    _pools.clear()
    if address is None:
        ray.init(include_dashboard=False, log_to_driver=False, logging_level="error")
        return
    try:
        host, _, port = address.removeprefix("ray://").rpartition(":")
        if port.isdecimal():  # fail fast: Ray itself retries for minutes
            socket.create_connection((host, int(port)), timeout=10).close()
        ray.init(address, log_to_driver=False, logging_level="error")
    except (OSError, ValueError, RuntimeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise HoldfastError(
            f"there is no Ray cluster at '{address}' that accepts this process ({reason}); start one with "
            "`ray start --head`, or set RAY_AUTH_TOKEN_PATH to the file of the cluster's token"
        ) from None


def worker_pool(address: str | None, kind: str) -> WorkerPool:
    """This process's workers at an address; ``kind``, ``"CPU"`` or ``"GPU"``, is the resource of each worker."""
    connect(address)
    key = (ray.get_runtime_context().gcs_address, kind)
    if key not in _pools:
        free = int(ray.available_resources().get(kind, 0))
        if not free:
            raise HoldfastError(
                f"none of the Ray cluster's {ray.cluster_resources().get(kind, 0):g} {kind}s is free; stop "
                "the processes that hold them, or add a machine with `ray start --address`"
            )
        _pools[key] = WorkerPool(free, {"num_gpus": 1} if kind == "GPU" else {"num_cpus": 1})
    _pools[key].fill()
    return _pools[key]


# The engine -------------------------------------------------------------------------------------------------


class RayEngine:
    """Trains the clients of a round on the workers of a cluster."""

    name = "ray"
    group = 1
    train_masked = None

    def __init__(
        self,
        method: Method,
        context: RunContext,
        data: DeviceData,
        settings: Settings,
        sizes: np.ndarray,
        parallel_clients: int | None,
        address: str | None,
    ) -> None:
        self.device, self.deadline = context.device, settings.deadline
        self.fixed_steps = settings.local_steps is not None
        self.pool = worker_pool(address, "GPU" if context.device.type == "cuda" else "CPU")
        clients = sizes.shape[1]
        cohort = min(settings.clients_per_round or clients, clients)
        self.chunk = max(1, cohort // (self.pool.size * CHUNKS_PER_WORKER))
        self.run = uuid4().hex
        # Leave out what only the server needs.
        worker_context = replace(
            context,
            read=_no_samples,
            # The ids, without the data; workers get no label counts that are withheld.
            draw_one_of_each=no_samples
            if settings.withholds_counts
            else partial(np.asarray, context.one_of_each),
            public_x=context.public_x[:0],
            public_y=context.public_y[:0],
        )
        self.setup = ray.put(
            Setup(
                method,
                move_context(worker_context, torch.device("cpu")),
                data.x.cpu().numpy(),
                data.labels,
                data.targets,
                data.preprocess,
                replace(settings, deadline=None),
                sizes,
                parallel_clients or self.chunk,
                context.device.type,
                torch.backends.cudnn.allow_tf32,
            )
        )

    def train(
        self, sent: Broadcast, jobs: Sequence[Job], overlap: Overlap = NO_OVERLAP
    ) -> Iterator[ClientResult | Incident]:
        """Train each client; results come in the order of ``jobs``."""
        model = {"params": sent.params, "buffers": sent.buffers, "payload": sent.payload}
        broadcast = ray.put({"round": sent.round} | to_arrays(model))
        chunks = split_into_chunks(jobs, self.pool.size, self.chunk)
        work = [
            float(len(chunk) if self.fixed_steps else sum(len(job.ids) for job in chunk)) for chunk in chunks
        ]
        deadline = None if self.deadline is None else time.monotonic() + self.deadline
        waiting, deaths = list(range(len(chunks))), [0] * len(chunks)
        running: dict[Any, Running] = {}  # by the reference to its results
        finished: dict[int, list[ClientResult | Incident]] = {}
        next_chunk = 0
        while next_chunk < len(chunks):
            for worker in self._free_workers(running):
                place = self._choose(worker, waiting, work, running)
                if place is not None:
                    chunk = waiting.pop(place)
                    packed = [_map_job(to_arrays, job) for job in chunks[chunk]]
                    ref = worker.actor.train.remote(self.run, [self.setup], broadcast, packed)
                    running[ref] = Running(worker, chunk, time.monotonic())
            ready = self._wait(list(running), deadline, bool(waiting))
            if ready is None:  # the deadline has passed
                for one in running.values():
                    self.pool.replace(one.worker)
                late = [*waiting, *(one.chunk for one in running.values())]
                finished |= {
                    chunk: _incidents(chunks[chunk], "late", f"after {self.deadline:g} s") for chunk in late
                }
                waiting.clear()
                running.clear()
            for ref in ready or ():
                one = running.pop(ref)
                worker, chunk = one.worker, one.chunk
                try:
                    finished[chunk] = ray.get(ref)
                    if worker.run == self.run:
                        worker.pace.add(work[chunk], time.monotonic() - one.start)
                    else:  # its first chunk includes the preparation of the run
                        worker.run, worker.pace = self.run, Pace()
                except RayTaskError as error:
                    raise error.cause if isinstance(error.cause, HoldfastError) else error from None
                except RayError:  # the worker or its machine has failed
                    self.pool.replace(worker)
                    deaths[chunk] += 1
                    if deaths[chunk] < MAX_DEATHS:
                        waiting.insert(0, chunk)
                        yield from _incidents(chunks[chunk], "worker died", "trained again by another")
                    else:
                        detail = f"{MAX_DEATHS} times; given up"
                        finished[chunk] = _incidents(chunks[chunk], "worker died", detail)
            while next_chunk in finished:
                for result in finished.pop(next_chunk):
                    yield result if isinstance(result, Incident) else _unpack(result, self.device)
                next_chunk += 1

    def _free_workers(self, running: Mapping[Any, Running]) -> list[WorkerHandle]:
        """The workers that have started and do nothing, the fastest first."""
        busy = [one.worker for one in running.values()]
        free = [worker for worker in self.pool.workers if worker.starting is None and worker not in busy]
        return sorted(free, key=self._speed, reverse=True)

    def _speed(self, worker: WorkerHandle) -> float:
        """The worker's speed; that of an average worker until it is measured."""
        measured = [w.pace.speed for w in self.pool.workers if w.run == self.run]
        known = [speed for speed in measured if speed is not None]
        own = worker.pace.speed if worker.run == self.run else None
        return own or (sum(known) / len(known) if known else 1.0)

    def _choose(
        self,
        worker: WorkerHandle,
        waiting: Sequence[int],
        work: Sequence[float],
        running: Mapping[Any, Running],
    ) -> int | None:
        """The place in ``waiting`` of the chunk that this worker should train now, if any.

        In the order of the clients, since results are returned in this order, until few chunks are left.
        """
        if not waiting or len(waiting) > 2 * self.pool.size:
            return 0 if waiting else None
        now, others = time.monotonic(), []
        for other in self.pool.workers:
            if other is not worker and other.starting is None:
                speed = self._speed(other)
                # A worker that is late is expected to need as long again.
                left = [
                    abs(work[r.chunk] - speed * (now - r.start))
                    for r in running.values()
                    if r.worker is other
                ]
                others.append((sum(left), speed))
        return choose_chunk([work[chunk] for chunk in waiting], self._speed(worker), others)

    def _wait(self, running: list[Any], deadline: float | None, waits: bool) -> list[Any] | None:
        """References to finished work (none if only a worker has started); None if the deadline has passed.

        ``waits``: whether chunks wait for a worker, so that the choice of the worker is soon repeated.
        """
        starting = {w.starting: w for w in self.pool.workers if w.starting is not None}
        left = CHOICE_SECONDS if waits and running else START_SECONDS
        if deadline is not None:
            left = min(left, max(0.0, deadline - time.monotonic()))
        ready, _ = ray.wait([*running, *starting], num_returns=1, timeout=left, fetch_local=False)
        if ready:
            for ref in ready:
                if ref in starting:
                    self._finish_start(starting[ref])
            return [ref for ref in ready if ref not in starting]
        if deadline is not None and time.monotonic() >= deadline:
            return None
        if not running:
            raise HoldfastError(
                f"no Ray worker started within {START_SECONDS:g} s; the cluster must have a free CPU (or GPU) "
                "and Holdfast installed on every machine"
            )
        return []

    def _finish_start(self, worker: WorkerHandle) -> None:
        try:
            ray.get(worker.starting)
            worker.starting = None
        except RayTaskError as error:
            raise HoldfastError(f"a Ray worker cannot start: {error.cause}") from None
        except RayError:
            self.pool.replace(worker)


def _incidents(jobs: Sequence[Job], kind: str, detail: str) -> list[ClientResult | Incident]:
    return [Incident(job.client, kind, detail) for job in jobs]


def _no_samples(ids: np.ndarray) -> tuple[Tensor, Tensor]:
    raise RuntimeError("only the server half of a method reads samples by id")


# Conversion for transport -------------------------------------------------------------------------------------


def to_arrays(tree: Tree) -> Tree:
    """Copies of a tree's tensors as NumPy arrays, which Ray shares between the workers of a machine."""
    return tree_map(lambda value: value.detach().cpu().numpy().copy(), tree)


def to_tensors(tree: Tree, device: torch.device) -> Tree:
    """A tree's arrays as tensors; on the CPU they share the arrays' memory and must not be written to."""
    return tree_map(lambda array: _tensor(array, device), tree)


def move_context(context: RunContext, device: torch.device) -> RunContext:
    """The context with its tensors and its network on a device."""
    values = {f.name: getattr(context, f.name) for f in fields(context)}
    moved: dict[str, Any] = {k: v.to(device) for k, v in values.items() if isinstance(v, Tensor)}
    return replace(context, network=context.network.to(device), device=device, **moved)


def _tensor(array: np.ndarray, device: torch.device) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the array is read-only
        return torch.from_numpy(array).to(device)


def _map_job(function: Callable[[Tree], Tree], job: Job) -> Job:
    """The job with ``function`` applied to its payload and memory."""
    client_state = None if job.client_state is None else function(job.client_state)
    return replace(job, payload=function(job.payload), client_state=client_state)
