"""Choice of the engine."""

from __future__ import annotations

import math
import warnings
from contextlib import nullcontext
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.func import grad, vmap

from holdfast.core.device import available_ram_bytes, free_gpu_bytes
from holdfast.core.errors import HoldfastError, HoldfastWarning, unknown
from holdfast.core.optimizers import OPTIMIZERS, Factory, factory_name
from holdfast.core.settings import Settings
from holdfast.engine.base import Engine
from holdfast.engine.batching import widest_batch
from holdfast.engine.clients import DeviceData, held_out
from holdfast.engine.deadline import DeadlineEngine
from holdfast.engine.method_trial import try_on_lanes
from holdfast.engine.sequential import SequentialEngine
from holdfast.engine.thread_pool import ThreadPoolEngine
from holdfast.engine.vectorized.engine import VectorizedEngine
from holdfast.kernels.building import can_build, trial
from holdfast.methods.base import Method, Tensors
from holdfast.methods.context import RunContext
from holdfast.methods.masking import is_own, respects_mask

ENGINES = ("auto", "sequential", "vectorized", "ray")
SMALL_STEP_BYTES = 8 << 20  # largest model that a CPU trains faster with the vectorized engine
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
    """Create an engine by name; ``auto`` selects the faster one for this machine and model.

    ``sizes`` [stages, clients] are the clients' numbers of samples.
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
            f"ray_address is given, but engine '{name}' runs in this process only; use engine 'ray'"
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
    """Create an engine that runs in this process."""
    clients = sizes.shape[1]
    cohort = min(settings.clients_per_round or clients, clients)
    trained = sizes - held_out(sizes, method.holdout)
    width = widest_batch(trained, settings.batch_size, context.network.has_batch_norm, settings.drop_last)
    if settings.dp_samples is not None:  # batch sizes vary by the square root of their mean
        width = min(int(trained.max()), width + 4 * math.isqrt(width) + 1)
        context.network.own_kernels = False
    pass_width = width  # of a forward pass
    if settings.micro_batch_size is not None:
        pass_width = min(width, settings.micro_batch_size)
        context.network.own_kernels = False  # they require one pass per step
    on_cpu = context.device.type == "cpu"
    large_steps = on_cpu and name != "vectorized" and step_bytes(context, data, pass_width) > SMALL_STEP_BYTES
    own = settings.optimizer_spec is None
    if own and name == "vectorized":
        raise HoldfastError(
            f"optimizer {factory_name(cast('Factory', settings.optimizer))} runs only on engine 'sequential'; the "
            f"vectorized engine supports {', '.join(OPTIMIZERS)}"
        )
    if name == "vectorized" or (name == "auto" and not large_steps and not own):
        # DP-SGD computes a loss per sample and leaves out padding.
        private = settings.dp_samples is not None
        pad = private or (respects_mask(method) and context.task.own_loss is None)
        if not pad:  # Holdfast's kernels would be compiled for every size of a batch
            context.network.own_kernels = False
        reason = vmap_error(context, data, pass_width, lanes)
        unfit = None
        if reason is None and not private and (is_own(method) or context.task.own_loss is not None):
            unfit = try_on_lanes(method, context, data, settings, pad)
        if reason is None and unfit is None:
            lanes = lanes or fitting_lanes(context, data, cohort, pass_width)
            return VectorizedEngine(method, context, data, settings, lanes, width, sizes, pad)
        if unfit is not None and name == "vectorized":
            raise HoldfastError(f"{unfit.reason}; or use engine 'sequential'")
        if name == "vectorized":
            raise HoldfastError(
                f"this model cannot train on the vectorized engine ({reason}); use engine 'sequential', or auto"
            )
        text = f"this model cannot train on the vectorized engine ({reason}); its clients train one after another"
        if unfit is not None:
            text = f"{unfit.reason}; its clients train one after another, on engine 'sequential'"
        warnings.warn(text, HoldfastWarning, stacklevel=5)
    # Threads speed up large steps only, which spend most of their time outside the interpreter lock.
    workers = min(torch.get_num_threads(), cohort, MAX_WORKERS) if large_steps else 1
    if workers > 1:
        return ThreadPoolEngine(method, context, data, settings, workers)
    return SequentialEngine(method, context, data, settings)


def step_bytes(context: RunContext, data: DeviceData, width: int) -> int:
    """Bytes that one client's step uses: weights, gradients and the tensors saved for the backward pass."""
    network = context.network
    weights = sum(p.numel() * p.element_size() for p in network.params.values())
    if weights > SMALL_STEP_BYTES:
        return 2 * weights
    params = {k: v.detach().requires_grad_() for k, v in network.params.items()}
    buffers = {k: v.clone() for k, v in network.buffers.items()}
    x = _blank(context, (width, *data.x.shape[1:]))
    saved_bytes: dict[int, int] = {}  # by address

    def save(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved_bytes[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # not detached, it would form a reference cycle with the graph

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor), network.autocast():
        network.apply(params, buffers, network.to_fast_layout(x), train=True)
    return 2 * weights + sum(saved_bytes.values())


def _blank(context: RunContext, shape: tuple[int, ...]) -> Tensor:
    """Inputs of this shape: zeros, or the smallest value of all samples where these are integers."""
    lowest = context.lowest[0]
    return lowest.expand(shape).clone() if lowest.dtype == torch.int64 else lowest.new_zeros(shape)


def vmap_error(context: RunContext, data: DeviceData, width: int, lanes: int | None) -> str | None:
    """Why a model cannot be trained and tested with ``vmap`` over clients, or None if it can."""
    if not context.network.ignores_padding:
        return "its output for a sample depends on the other samples of the batch"
    try:
        if context.device.type == "cpu":
            _run_one_lane(context, (1, 2, *data.x.shape[1:]))
        elif lanes is None:  # needed later to choose the number of lanes
            _lane_bytes(context, data, width)
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        return (str(error) or type(error).__name__).splitlines()[0].split(". ")[0]
    return None


def fitting_lanes(context: RunContext, data: DeviceData, cohort: int, width: int) -> int:
    """The number of lanes: the clients per round, limited by `MAX_LANES` and a fraction of the free memory."""
    limit = min(cohort, MAX_LANES)
    if context.device.type != "cuda":
        return int(max(1, min(limit, 0.4 * available_ram_bytes() // (4 * step_bytes(context, data, width)))))
    weights = sum(p.numel() * p.element_size() for p in context.network.params.values())
    lane_bytes = _lane_bytes(context, data, width) + 8 * weights
    return int(max(1, min(limit, 0.4 * free_gpu_bytes(context.device) // lane_bytes)))


def _lane_bytes(context: RunContext, data: DeviceData, width: int) -> int:
    """GPU memory of one lane's gradient; measured once for each network, input shape and precision."""
    shape = (1, width, *data.x.shape[1:])
    network = context.network
    key = (str(network.net), shape, context.dtype, network.autocast_dtype, network.uses_kernels)
    if key not in _lane_bytes_by_shape:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        _run_one_lane(context, shape)
        _lane_bytes_by_shape[key] = torch.cuda.max_memory_allocated() - before
    return _lane_bytes_by_shape[key]


def _run_one_lane(context: RunContext, shape: tuple[int, ...]) -> None:
    """Compute one lane's gradient in training mode and outputs in evaluation mode, on inputs ``[1, B, ...]``."""
    params = {k: v.unsqueeze(0) for k, v in context.network.params.items()}
    # Some layers change their buffers in place; the network's own must not change.
    buffers = {k: v.clone().unsqueeze(0) for k, v in context.network.buffers.items()}
    x = _blank(context, shape)
    keys = torch.zeros(1, dtype=torch.int64, device=context.device)

    def gradient(p: Tensors, b: Tensors, v: Tensor, key: Tensor) -> Tensors:
        # As in a step, only the weights are arguments: an in-place change of other tensors is an error.
        def objective(w: Tensors) -> Tensor:
            with context.network.autocast():
                out, _ = context.network.pure(w, b, v, key=key)
            return out.logits.logsumexp(-1).mean()

        grads: Tensors = grad(objective)(p)
        return grads

    # Kernels for one lane would be compiled for this alone, so they are not launched.
    with trial() if context.network.uses_kernels and can_build() else nullcontext():
        vmap(gradient)(params, buffers, x, keys)
        with torch.no_grad():  # some of torch's layers have another code path without gradients
            vmap(lambda p, b, v: context.network.pure(p, b, v, train=False)[0].logits)(params, buffers, x)
