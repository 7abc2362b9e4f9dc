"""Many machines: the clients of a round spread over Ray workers, the server half in this process.

A worker is an actor that holds the training samples once, in its machine's shared memory, and an inner
`vectorized` or `sequential` engine. Clients are handed out in chunks of neighbours; which worker trains a chunk,
and how many died over it, leaves no trace: results are summed in the order of the clients.
"""

from __future__ import annotations

import os
import socket
import sys
import time
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any
from uuid import uuid4

import numpy as np
import ray
import torch
from ray.exceptions import RayError, RayTaskError
from torch import Tensor

from holdfast.core.errors import HoldfastError
from holdfast.core.settings import Settings
from holdfast.data.preprocess import Preprocess
from holdfast.engine.base import NO_OVERLAP, Overlap
from holdfast.engine.clients import Broadcast, ClientResult, DeviceData, Incident, Job
from holdfast.methods.base import Method, Tree
from holdfast.methods.context import RunContext

START_SECONDS = 120.0  # in which a worker must come up where none is at work
MOST_DEATHS = 3  # of workers over one chunk of clients, before these are given up
CHUNKS_PER_WORKER = 4  # so that fast workers make up for slow ones


# In a worker ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Setup:
    """What a worker needs to train the clients of one run; tensors of ``task`` lie on the CPU."""

    method: Method
    context: RunContext
    x: np.ndarray
    labels: np.ndarray
    preprocess: Preprocess
    settings: Settings
    sizes: np.ndarray
    parallel_clients: int
    device: str
    tf32: bool


class Worker:
    """One actor; it keeps the engine of the run that it last worked for."""

    def __init__(self, paths: Sequence[str]) -> None:
        """``paths`` are where the main program finds modules, such as a user's own method."""
        sys.path.extend(path for path in paths if path not in sys.path)
        self.run = ""
        self.engine: Any = None

    def ready(self) -> int:
        """Say that it is up, by its process id."""
        return os.getpid()

    def train(
        self, run: str, setup: Sequence[Any], sent: dict[str, Any], jobs: Sequence[Job]
    ) -> list[ClientResult]:
        """Train these clients; ``setup`` holds a reference, which is fetched once a run."""
        if run != self.run:
            self.engine = None  # the old run's memory goes before the new one's comes
            self.engine, self.run = inner_engine(ray.get(setup[0])), run
        device = self.engine.context.device
        parts = (tensors(sent[name], device) for name in ("params", "buffers", "payload"))
        broadcast = Broadcast(sent["round"], *parts)
        here = [_converted(job, lambda tree: tensors(tree, device)) for job in jobs]
        return [_packed(result) for result in self.engine.train(broadcast, here)]


def inner_engine(setup: Setup) -> Any:
    """The engine that trains a worker's clients."""
    from holdfast.engine.factory import choose_engine, choose_precision

    context = on_device(setup.context, torch.device(setup.device))
    choose_precision("tf32" if setup.tf32 else "float32", context.device)  # as in the process that asks
    data = DeviceData(
        _tensor(setup.x, context.device),
        _tensor(setup.labels, context.device),
        setup.labels,
        setup.preprocess,
        context.dtype,
    )
    return choose_engine(
        "auto", setup.method, context, data, setup.settings, setup.sizes, setup.parallel_clients
    )


def _packed(result: ClientResult) -> ClientResult:
    """The result as arrays of its own; what most methods send, the trained parameters, goes once."""
    same = result.shared is result.params
    return replace(
        result,
        params=arrays(result.params),
        buffers=arrays(result.buffers),
        shared={} if same else arrays(result.shared),
        sums=arrays(result.sums),
        memory=arrays(result.memory),
    )


# The workers of this process --------------------------------------------------------------------------------


@dataclass(eq=False)
class Member:
    """A worker as this process knows it."""

    actor: Any
    starting: Any  # a reference that is there once the worker is up; None from then on


@dataclass(eq=False)
class WorkerPool:
    """As many workers as the cluster had free CPUs (or GPUs); they serve one run after another."""

    size: int
    options: dict[str, Any]
    members: list[Member] = field(default_factory=list)

    def fill(self) -> None:
        """Start the workers that are missing."""
        while len(self.members) < self.size:
            actor = ray.remote(**self.options)(Worker).remote(sys.path)
            self.members.append(Member(actor, actor.ready.remote()))

    def replace(self, member: Member) -> None:
        """Give up a worker that is dead or too late, and start another."""
        ray.kill(member.actor)
        self.members.remove(member)
        self.fill()


_pools: dict[tuple[str, str], WorkerPool] = {}


def connect(address: str | None) -> None:
    """Join the cluster at ``address``, or start one on this machine."""
    if ray.is_initialized():
        return
    _pools.clear()
    if address is None:
        ray.init(include_dashboard=False, log_to_driver=False, logging_level="error")
        return
    try:
        host, _, port = address.removeprefix("ray://").rpartition(":")
        if port.isdecimal():  # Ray itself would try for minutes
            socket.create_connection((host, int(port)), timeout=10).close()
        ray.init(address, log_to_driver=False, logging_level="error")
    except (OSError, ValueError, RuntimeError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise HoldfastError(
            f"there is no Ray cluster at '{address}' that takes this process ({first}); start one with "
            "`ray start --head`, or give this process the cluster's token by RAY_AUTH_TOKEN_PATH"
        ) from None


def pool(address: str | None, kind: str) -> WorkerPool:
    """The workers of this process at an address; ``kind`` is what each has for itself, a CPU or a GPU."""
    connect(address)
    key = (ray.get_runtime_context().gcs_address, kind)
    if key not in _pools:
        free = int(ray.available_resources().get(kind, 0))
        if not free:
            raise HoldfastError(
                f"of the Ray cluster's {ray.cluster_resources().get(kind, 0):g} {kind}s none is free; stop "
                "what holds them, or add a machine with `ray start --address`"
            )
        _pools[key] = WorkerPool(free, {"num_gpus": 1} if kind == "GPU" else {"num_cpus": 1})
    _pools[key].fill()
    return _pools[key]


# The engine -------------------------------------------------------------------------------------------------


class RayEngine:
    """Trains the clients of a round on the workers of a cluster."""

    name = "ray"
    group = 1

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
        self.pool = pool(address, "GPU" if context.device.type == "cuda" else "CPU")
        clients = sizes.shape[1]
        cohort = min(settings.clients_per_round or clients, clients)
        self.chunk = max(1, cohort // (self.pool.size * CHUNKS_PER_WORKER))
        self.run = uuid4().hex
        # What only the server needs stays here.
        told = replace(
            context,
            read=_no_samples,
            draw_one_of_each=partial(np.asarray, context.one_of_each),  # not what it is drawn from
            public_x=context.public_x[:0],
            public_y=context.public_y[:0],
        )
        self.setup = ray.put(
            Setup(
                method,
                on_device(told, torch.device("cpu")),
                data.x.cpu().numpy(),
                data.labels,
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
        tensors = {"params": sent.params, "buffers": sent.buffers, "payload": sent.payload}
        broadcast = ray.put({"round": sent.round} | arrays(tensors))
        chunks = [jobs[at : at + self.chunk] for at in range(0, len(jobs), self.chunk)]
        ends = None if self.deadline is None else time.monotonic() + self.deadline
        waiting, deaths = deque(range(len(chunks))), [0] * len(chunks)
        running: dict[Any, tuple[Member, int]] = {}
        finished: dict[int, list[ClientResult | Incident]] = {}
        turn = 0
        while turn < len(chunks):
            busy = [member for member, _ in running.values()]
            for member in self.pool.members:
                if waiting and member.starting is None and member not in busy:
                    at = waiting.popleft()
                    work = [_converted(job, arrays) for job in chunks[at]]
                    running[member.actor.train.remote(self.run, [self.setup], broadcast, work)] = member, at
            ready = self._wait(list(running), ends)
            if ready is None:  # the deadline has passed
                for member, _ in running.values():
                    self.pool.replace(member)
                late = [*waiting, *(at for _, at in running.values())]
                finished |= {at: _lost(chunks[at], "late", f"after {self.deadline:g} s") for at in late}
                waiting.clear()
                running.clear()
            for ref in ready or ():
                member, at = running.pop(ref)
                try:
                    finished[at] = ray.get(ref)
                except RayTaskError as error:
                    raise error.cause if isinstance(error.cause, HoldfastError) else error from None
                except RayError:  # the worker or its machine is gone
                    self.pool.replace(member)
                    deaths[at] += 1
                    if deaths[at] < MOST_DEATHS:
                        waiting.appendleft(at)
                        yield from _lost(chunks[at], "worker died", "trained again by another")
                    else:
                        finished[at] = _lost(chunks[at], "worker died", f"{MOST_DEATHS} times; given up")
            while turn in finished:
                for one in finished.pop(turn):
                    yield one if isinstance(one, Incident) else self._unpacked(one)
                turn += 1

    def _wait(self, running: list[Any], ends: float | None) -> list[Any] | None:
        """The work that has ended (none: only workers came up); None once the deadline has passed."""
        starting = {m.starting: m for m in self.pool.members if m.starting is not None}
        left = START_SECONDS if ends is None else min(START_SECONDS, max(0.0, ends - time.monotonic()))
        ready, _ = ray.wait([*running, *starting], num_returns=1, timeout=left, fetch_local=False)
        if ready:
            for ref in ready:
                if ref in starting:
                    self._started(starting[ref])
            return [ref for ref in ready if ref not in starting]
        if ends is not None and time.monotonic() >= ends:
            return None
        if not running:
            raise HoldfastError(
                f"no Ray worker came up within {START_SECONDS:g} s; the cluster must have a CPU (or GPU) "
                "free and Holdfast installed on every machine"
            )
        return []

    def _started(self, member: Member) -> None:
        try:
            ray.get(member.starting)
            member.starting = None
        except RayTaskError as error:
            raise HoldfastError(f"a Ray worker cannot start: {error.cause}") from None
        except RayError:
            self.pool.replace(member)

    def _unpacked(self, result: ClientResult) -> ClientResult:
        params = tensors(result.params, self.device)
        return replace(
            result,
            params=params,
            buffers=tensors(result.buffers, self.device),
            shared=tensors(result.shared, self.device) or params,
            sums=tensors(result.sums, self.device),
            memory=tensors(result.memory, self.device),
        )


def _lost(jobs: Sequence[Job], kind: str, detail: str) -> list[ClientResult | Incident]:
    return [Incident(job.client, kind, detail) for job in jobs]


def _no_samples(ids: np.ndarray) -> tuple[Tensor, Tensor]:
    raise RuntimeError("only the server half of a method reads samples by id")


# Between tensors and what travels ---------------------------------------------------------------------------


def arrays(tree: Tree) -> Tree:
    """A tree's tensors as NumPy arrays of their own, which workers on one machine share."""
    return {k: arrays(v) if isinstance(v, dict) else v.detach().cpu().numpy().copy() for k, v in tree.items()}


def tensors(tree: Tree, device: torch.device) -> Tree:
    """Those arrays as tensors; on the CPU they are the very same memory, for reading only."""
    return {k: tensors(v, device) if isinstance(v, dict) else _tensor(v, device) for k, v in tree.items()}


def on_device(context: RunContext, device: torch.device) -> RunContext:
    """The task with all its tensors on a device."""
    own = {f.name: getattr(context, f.name) for f in fields(context)}
    moved: dict[str, Any] = {k: v.to(device) for k, v in own.items() if isinstance(v, Tensor)}
    return replace(context, network=context.network.to(device), device=device, **moved)


def _tensor(array: np.ndarray, device: torch.device) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it cannot be written to: nobody does
        return torch.from_numpy(array).to(device)


def _converted(job: Job, convert: Any) -> Job:
    memory = None if job.memory is None else convert(job.memory)
    return replace(job, payload=convert(job.payload), memory=memory)
