"""Choice of the engine."""

from __future__ import annotations

import warnings

import numpy as np
import torch
from torch import Tensor
from torch.func import grad, vmap

from holdfast.core.device import available_ram_bytes, free_gpu_bytes
from holdfast.core.errors import HoldfastError, HoldfastWarning, unknown
from holdfast.core.settings import Settings
from holdfast.engine.base import Engine
from holdfast.engine.batching import widest_batch
from holdfast.engine.clients import DeviceData, held_out
from holdfast.engine.deadline import DeadlineEngine
from holdfast.engine.sequential import SequentialEngine
from holdfast.engine.thread_pool import ThreadPoolEngine
from holdfast.engine.vectorized.engine import VectorizedEngine
from holdfast.methods.base import Method, Tensors
from holdfast.methods.context import RunContext

ENGINES = ("auto", "sequential", "vectorized", "ray")
SMALL_STEP_BYTES = 8 << 20  # bytes a step may touch for a CPU to train clients faster as lanes than one by one
MAX_LANES = 64
MAX_WORKERS = 16


_lane_bytes_by_shape: dict[tuple[object, ...], int] = {}


def choose_engine(
    name: str,
    method: Method,
    context: RunContext,
    data: DeviceData,
    settings: Settings,
    sizes: np.ndarray,
    parallel_clients: int | None = None,
    ray_address: str | None = None,
) -> Engine:
    """The engine by name; ``auto`` is the faster one for this machine and model.

    ``sizes`` [stages, clients] are how many samples clients have.
    """
    if name not in ENGINES:
        raise unknown("engine", name, ENGINES)
    if parallel_clients is not None and parallel_clients < 1:
        raise HoldfastError(f"parallel_clients is {parallel_clients}; it must be at least 1")
    if parallel_clients is not None and name == "sequential":
        raise HoldfastError(
            "parallel_clients is given, but engine 'sequential' trains one client at a time; use engine 'vectorized'"
        )
    if name == "ray":
        from holdfast.engine.ray import RayEngine

        return RayEngine(method, context, data, settings, sizes, parallel_clients, ray_address)
    if ray_address is not None:
        raise HoldfastError(
            f"ray_address is given, but engine '{name}' works in this process alone; use engine 'ray'"
        )
    engine = _local_engine(name, method, context, data, settings, sizes, parallel_clients)
    return engine if settings.deadline is None else DeadlineEngine(engine, settings.deadline)


def _local_engine(
    name: str,
    method: Method,
    context: RunContext,
    data: DeviceData,
    settings: Settings,
    sizes: np.ndarray,
    lanes: int | None,
) -> Engine:
    """One of the engines that work in this process."""
    clients = sizes.shape[1]
    cohort = min(settings.clients_per_round or clients, clients)
    trained = sizes - held_out(sizes, method.holdout)
    width = widest_batch(trained, settings.batch_size, context.network.has_batch_norm, settings.drop_last)
    on_cpu = context.device.type == "cpu"
    large_steps = on_cpu and name != "vectorized" and step_bytes(context, data, width) > SMALL_STEP_BYTES
    if name == "vectorized" or (name == "auto" and not large_steps):
        reason = _vmap_error(context, data, width, lanes)
        if reason is None:
            lanes = lanes or fitting_lanes(context, data, cohort, width)
            return VectorizedEngine(method, context, data, settings, lanes, width, sizes)
        if name == "vectorized":
            raise HoldfastError(
                f"this model cannot train on the vectorized engine ({reason}); use engine 'sequential', or auto"
            )
        text = f"this model cannot train on the vectorized engine ({reason}); its clients train one after another"
        warnings.warn(text, HoldfastWarning, stacklevel=5)
    # Short steps would wait for one another in the interpreter; long ones are spent outside of it.
    workers = min(torch.get_num_threads(), cohort, MAX_WORKERS) if large_steps else 1
    if workers > 1:
        return ThreadPoolEngine(method, context, data, settings, workers)
    return SequentialEngine(method, context, data, settings)


def step_bytes(context: RunContext, data: DeviceData, width: int) -> int:
    """What one client's step touches: weights, their gradient, and what the backward pass needs of a batch."""
    network = context.network
    weights = sum(p.numel() * p.element_size() for p in network.params.values())
    if weights > SMALL_STEP_BYTES:
        return 2 * weights
    params = {k: v.detach().requires_grad_() for k, v in network.params.items()}
    buffers = {k: v.clone() for k, v in network.buffers.items()}
    x = torch.zeros((width, *data.x.shape[1:]), dtype=context.dtype, device=context.device)
    saved_bytes: dict[int, int] = {}  # bytes, by address

    def save(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved_bytes[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # itself it would hold the graph that holds it, for ever

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        network.apply(params, buffers, network.to_fast_layout(x), train=True)
    return 2 * weights + sum(saved_bytes.values())


def _vmap_error(context: RunContext, data: DeviceData, width: int, lanes: int | None) -> str | None:
    """Why a model cannot be trained and tested for many clients at once, or None if it can."""
    if not context.network.ignores_padding:
        return "what it says of a sample depends on the others of its batch"
    try:
        if context.device.type == "cpu":
            _run_one_lane(context, (1, 2, *data.x.shape[1:]))
        elif lanes is None:  # which is then needed to find how many fit
            _lane_bytes(context, data, width)
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        return (str(error) or type(error).__name__).splitlines()[0].split(". ")[0]
    return None


def fitting_lanes(context: RunContext, data: DeviceData, cohort: int, width: int) -> int:
    """As many lanes as clients a round, as long as they fit the memory several times over."""
    limit = min(cohort, MAX_LANES)
    if context.device.type != "cuda":
        return int(max(1, min(limit, 0.4 * available_ram_bytes() // (4 * step_bytes(context, data, width)))))
    weights = sum(p.numel() * p.element_size() for p in context.network.params.values())
    each = _lane_bytes(context, data, width) + 8 * weights
    return int(max(1, min(limit, 0.4 * free_gpu_bytes(context.device) // each)))


def _lane_bytes(context: RunContext, data: DeviceData, width: int) -> int:
    """What one lane's gradient takes of a GPU's memory: tried once for runs that are alike."""
    shape = (1, width, *data.x.shape[1:])
    key = (str(context.network.net), shape, context.dtype, context.network.uses_kernels)
    if key not in _lane_bytes_by_shape:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        _run_one_lane(context, shape)
        _lane_bytes_by_shape[key] = torch.cuda.max_memory_allocated() - before
    return _lane_bytes_by_shape[key]


def _run_one_lane(context: RunContext, shape: tuple[int, ...]) -> None:
    """Take the gradient on inputs ``[1, B, ...]``, as lanes do, and the outputs, as their tests do."""
    params = {k: v.unsqueeze(0) for k, v in context.network.params.items()}
    # Some layers change their buffers; those of the network must stay as they are.
    buffers = {k: v.clone().unsqueeze(0) for k, v in context.network.buffers.items()}
    x = torch.zeros(shape, dtype=context.dtype, device=context.device)
    keys = torch.zeros(1, dtype=torch.int64, device=context.device)

    def gradient(p: Tensors, b: Tensors, v: Tensor, key: Tensor) -> Tensors:
        # As in a step, it gets the weights alone as an argument: what it does not get it must not change in place.
        def objective(w: Tensors) -> Tensor:
            return context.network.pure(w, b, v, key=key)[0].logits.logsumexp(-1).mean()

        found: Tensors = grad(objective)(p)
        return found

    vmap(gradient)(params, buffers, x, keys)
    with torch.no_grad():  # in which some of torch's layers go another way
        vmap(lambda p, b, v: context.network.pure(p, b, v, train=False)[0].logits)(params, buffers, x)
