"""A trial of a user-defined method before training: a few steps on two engines, which must agree."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from holdfast.core.errors import HoldfastError
from holdfast.core.settings import Settings
from holdfast.core.trees import Tree, leaves
from holdfast.engine.base import Engine
from holdfast.engine.batching import widest_batch
from holdfast.engine.clients import Broadcast, ClientResult, DeviceData, Job, held_out
from holdfast.engine.sequential import SequentialEngine
from holdfast.engine.vectorized.engine import VectorizedEngine
from holdfast.methods.base import Method, Server
from holdfast.methods.context import RunContext
from holdfast.methods.guard import vmap_reason, watching_draws

BATCH_SIZE = 3
SIZES = (8, 3, 4)  # the last batch: two samples, full, one sample; padding repeats a sample of its batch
TOLERANCE = {
    torch.float64: 1e-6,
    torch.float32: 1e-2,
}  # relative; the trial checks for mistakes, not for rounding

Results = list[dict[str, Tensor]]


@dataclass(frozen=True)
class Unfit:
    """The reason why the vectorized engine cannot train a method, as a sentence without a full stop."""

    reason: str


def try_on_lanes(
    method: Method, context: RunContext, data: DeviceData, settings: Settings, pad: bool
) -> Unfit | None:
    """Train three small clients for a few steps on both engines; None if the results agree.

    Raises an error if the method also fails on the ``sequential`` engine. The trial uses float64 if the method supports
    it, and copies of the method and the model. It restores the random generators.
    """
    with generators_kept([context.device] if context.device.type == "cuda" else []):
        try:
            return _Trial(method, context, data, settings, pad, torch.float64).unfit()
        except (HoldfastError, RuntimeError, TypeError, ValueError):
            if context.dtype == torch.float64:
                raise
        return _Trial(method, context, data, settings, pad, context.dtype).unfit()


@contextmanager
def generators_kept(devices: Sequence[torch.device]) -> Iterator[None]:
    """Save and restore the global random generators of the CPU, of ``devices``, of NumPy and of Python."""
    numpy_state, python_state = np.random.get_state(), random.getstate()
    try:
        with torch.random.fork_rng(list(devices)):
            yield
    finally:
        np.random.set_state(numpy_state)
        random.setstate(python_state)


class _Trial:
    def __init__(
        self,
        method: Method,
        context: RunContext,
        data: DeviceData,
        settings: Settings,
        pad: bool,
        dtype: torch.dtype,
    ) -> None:
        self.method, self.dtype, self.pad = method, dtype, pad
        targets = torch.from_numpy(data.targets)
        self.data = replace(data, y=_cast(data.y, dtype), targets=_cast(targets, dtype).numpy(), dtype=dtype)
        self.settings = replace(
            settings,
            local_epochs=min(settings.local_epochs, 2),
            local_steps=settings.local_steps and min(settings.local_steps, 4),
            batch_size=BATCH_SIZE,
            micro_batch_size=settings.micro_batch_size and min(settings.micro_batch_size, BATCH_SIZE - 1),
            lr=min(settings.lr, 0.05),
        )
        self.context = replace(
            context,
            dtype=dtype,
            class_counts=context.class_counts.to(dtype),
            lowest=_cast(context.lowest, dtype),
            highest=_cast(context.highest, dtype),
            public_x=_cast(context.public_x, dtype),
            read=self.data.read_labelled,
        )
        self.ids = self._ids()

    def _ids(self) -> list[np.ndarray]:
        """The samples of each client: few classes each, from the whole data set."""
        order, sizes = np.argsort(self.data.labels, kind="stable"), SIZES[: self.context.num_clients]
        chosen = order[np.linspace(0, len(order) - 1, min(sum(sizes), len(order))).astype(int)]
        ends = np.minimum(np.cumsum(sizes), len(chosen))[:-1]
        return [ids for ids in np.split(chosen, ends) if len(ids)]

    def unfit(self) -> Unfit | None:
        with watching_draws() as draws:
            expected = self._results(vectorized=False)
        name = self.method.name
        if draws:
            return Unfit(
                f"{name}: {draws[0]} draws from a global random generator, so that results depend on the order of the "
                "clients; draw with client.generator(...) or context.generator(...)"
            )
        if _difference(expected, self._results(vectorized=False), 0.0):
            return Unfit(
                f"{name} gives other results when it trains the same clients again: it keeps values outside of its "
                "carry and states, or depends on something that changes"
            )
        try:
            side_by_side = self._results(vectorized=True)
        except HoldfastError as error:
            return Unfit(str(error))
        except (RuntimeError, TypeError, ValueError, IndexError, KeyError) as error:
            first = (str(error) or type(error).__name__).splitlines()[0].rstrip(".")
            return Unfit(f"{name} fails when many clients train in parallel: {vmap_reason(first) or first}")
        different = _difference(expected, side_by_side, TOLERANCE[self.dtype])
        if different is not None:
            return Unfit(
                f"{name} gives different results when many clients train in parallel: {different}; hooks within a "
                "step must be functions of their arguments and leave out what batch.mask marks as padding"
                if self.pad
                else f"{name} gives different results when many clients train in parallel: {different}; hooks within a "
                "step must be functions of their arguments alone"
            )
        return None

    def _results(self, vectorized: bool) -> Results:
        """The results of the clients of one round, in order, with a new copy of the method."""
        method, network = copy.deepcopy(self.method), self.context.network.to(self.context.device, self.dtype)
        network.own_kernels = False  # kernels would be compiled for these batches only
        context = replace(self.context, network=network)
        engine = self._engine(method, context, vectorized)
        server = Server(dict(network.params), dict(network.buffers), method.init_server_state(context), 1)
        jobs = [Job(k, ids, 0, method.broadcast_to(server, k)) for k, ids in enumerate(self.ids)]
        sent = Broadcast(1, server.params, server.buffers, method.broadcast(server))
        results = {r.client: _values(r) for r in engine.train(sent, jobs) if isinstance(r, ClientResult)}
        return [results[job.client] for job in jobs]

    def _engine(self, method: Method, context: RunContext, vectorized: bool) -> Engine:
        if not vectorized:
            return SequentialEngine(method, context, self.data, self.settings)
        sizes = np.array([[len(ids) for ids in self.ids]])
        trained = sizes - held_out(sizes, method.holdout)
        width = widest_batch(trained, BATCH_SIZE, context.network.has_batch_norm, self.settings.drop_last)
        return VectorizedEngine(method, context, self.data, self.settings, 2, width, sizes, self.pad)


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if x.is_floating_point() else x


def _values(result: ClientResult) -> dict[str, Tensor]:
    trees: Tree = {
        "the trained weights": result.params,
        "the buffers": result.buffers,
        "the upload": result.shared,
        "the sums of client_final": result.sums,
        "the client's state": result.client_state,
    }
    return {path: value.detach().clone() for path, value in leaves(trees)} | {
        "the loss": torch.tensor(result.loss, dtype=torch.float64)
    }


def _difference(expected: Results, found: Results, tolerance: float) -> str | None:
    """The first difference between the results of the same client."""
    for client, (one, other) in enumerate(zip(expected, found, strict=True)):
        apart = difference(one, other, tolerance, f" of client {client}")
        if apart is not None:
            return apart
    return None


def difference(
    one: Mapping[str, Tensor], other: Mapping[str, Tensor], tolerance: float, whose: str = ""
) -> str | None:
    """The first tensor that differs by more than the tolerance, relative to its largest entry; None if none does."""
    if one.keys() != other.keys():
        return f"{', '.join(sorted(one.keys() ^ other.keys()))}{whose} is in one of the results only"
    for path, value in one.items():
        if value.shape != other[path].shape:
            return f"{path}{whose} has other shapes"
        a, b = (torch.nan_to_num(v.double()) for v in (value, other[path]))
        apart = float((a - b).abs().max()) if a.numel() else 0.0
        scale = max(1e-3, float(a.abs().max())) if a.numel() else 1.0
        if apart > tolerance * scale:
            return f"{path}{whose} differs by {apart:.2g}, where the largest entry is {scale:.2g}"
    return None
