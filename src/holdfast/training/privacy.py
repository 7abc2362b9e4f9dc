"""Checks of a run with differential privacy, before training."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace

import numpy as np
import torch

from holdfast.core.errors import HoldfastError, HoldfastWarning
from holdfast.core.settings import Settings
from holdfast.core.trees import Tensors, leaves, tensors_only
from holdfast.data.federation import Federation
from holdfast.engine.batching import local_steps
from holdfast.engine.clients import (
    Broadcast,
    ClientResult,
    ClientRunner,
    DeviceData,
    Job,
    private_names,
    teacher_outputs,
)
from holdfast.engine.rounds import sampler_of
from holdfast.engine.sequential import SequentialEngine
from holdfast.methods.base import Batch, Local, Method, Server
from holdfast.methods.context import RunContext
from holdfast.models.network import Output, split_extra
from holdfast.updates.privacy import ClientPrivacy, parse_dp
from holdfast.updates.sample_privacy import SampleAccount, parse_dp_samples, participations


def client_privacy(
    method: Method, context: RunContext, data: DeviceData, settings: Settings, federation: Federation
) -> ClientPrivacy | None:
    """The noise and the account of a run with ``settings.dp``; raises an error if the run cannot be protected."""
    if settings.dp is None:
        return None
    dp = parse_dp(settings.dp)
    if settings.max_update_ratio is not None:
        raise HoldfastError(
            "max_update_ratio cannot be combined with dp: one client could change the median, and thereby which "
            "other updates are in the sum; clipping bounds every client's influence, or use max_update_norm"
        )
    _refuse_unprotected(method, context, federation)
    sums = _side_sums(method, context, data, settings)
    if sums and dp.clip_sums is None:
        raise HoldfastError(
            f"dp: {method.name} uploads sums in addition to the weights ({', '.join(sums)}), which need a bound; "
            "set clip_sums, such as clip_sums=1.0, or choose a method that uploads only weights"
        )
    if dp.clip_sums is not None and not sums:
        raise HoldfastError(
            f"dp: clip_sums is given, but {method.name} uploads only weights; leave clip_sums out"
        )
    clients = int(np.count_nonzero(federation.sizes(0)))
    if dp.delta >= 1 / clients:
        warnings.warn(
            f"dp: delta is {dp.delta:g}, which is not below 1 / {clients} clients: a mechanism that publishes one "
            "client in full at random would satisfy it; choose a much smaller delta",
            HoldfastWarning,
            stacklevel=4,
        )
    per_round = min(settings.clients_per_round or clients, clients)
    return ClientPrivacy(dp, clients, per_round, settings.rounds, settings.seed, sums)


def _refuse_unprotected(method: Method, context: RunContext, federation: Federation) -> None:
    """Raise an error if the run would publish values that are neither clipped nor noised."""
    if method.keeps_uploads:
        raise HoldfastError(
            f"dp: {method.name} needs individual uploads, but differential privacy gives the server only noisy "
            "sums; choose another method"
        )
    if method.overrides("final_statistics"):
        raise HoldfastError(
            f"dp: {method.name} collects statistics of all clients' data after the last round, which have no bound "
            "and no noise; choose another method"
        )
    if federation.schedule is not None:
        raise HoldfastError(
            "dp: the clients of a stream take part in all stages of an epoch, so its rounds are not separate "
            "samples of clients, as the privacy accounting assumes; use a federation without stages"
        )
    averaged = set(context.network.buffers) - private_names(method, context) - context.network.kept_local
    if averaged:
        raise HoldfastError(
            f"dp: the model's running statistics ({sorted(averaged)[0]}, …) are averaged without bound and noise; use "
            "batchnorm=local or drop, or a model with another norm, such as resnet18:norm=group"
        )


def _side_sums(method: Method, context: RunContext, data: DeviceData, settings: Settings) -> Tensors:
    """Zeros in the shape of the sums that a client uploads besides its weights, by path."""
    result = sample_upload(method, context, data, settings)
    sums = dict(leaves(result.sums))
    for path, value in sums.items():
        if not value.is_floating_point():
            raise HoldfastError(
                f"dp: {method.name} uploads integers ('{path}'), to which no noise can be added"
            )
    return {path: torch.zeros_like(value) for path, value in sums.items()}


def sample_upload(method: Method, context: RunContext, data: DeviceData, settings: Settings) -> ClientResult:
    """The upload of a client with two samples in the first round."""
    context, sent, job = _first_job(method, context, data, 2)
    return next(SequentialEngine(method, context, data, settings).train(sent, [job]))


def _first_job(
    method: Method, context: RunContext, data: DeviceData, samples: int
) -> tuple[RunContext, Broadcast, Job]:
    """A copy of the context, and the first round's job of a client with this number of samples."""
    network = context.network.clone()
    context = replace(context, network=network)
    state = tensors_only(method.init_server_state(context), method.name, "init_server_state")
    server = Server(dict(network.params), dict(network.buffers), state, 1)
    payload = tensors_only(method.broadcast(server), method.name, "broadcast")
    ids = np.arange(max(0, len(data.x) - samples), len(data.x))
    job = Job(0, ids, 0, tensors_only(method.broadcast_to(server, 0), method.name, "broadcast_to"))
    return context, Broadcast(1, server.params, server.buffers, payload), job


# Samples --------------------------------------------------------------------------------------------------


def sample_privacy(
    method: Method,
    context: RunContext,
    data: DeviceData,
    settings: Settings,
    federation: Federation,
    clients: ClientPrivacy | None,
) -> SampleAccount | None:
    """The account of a run with ``settings.dp_samples``; raises an error if the run cannot be protected."""
    if settings.dp_samples is None:
        return None
    dp = parse_dp_samples(settings.dp_samples)
    refuse_unprotected_samples(method, context)
    if federation.schedule is not None:
        raise HoldfastError(
            "dp_samples: the clients of a stream have different samples in each stage, but the privacy "
            "accounting assumes the same samples in every round; use a federation without stages"
        )
    if settings.drop_last:
        raise HoldfastError(
            "drop_last has no effect with dp_samples, which draws every batch from all samples; leave it out"
        )
    sample_upload(
        method, context, data, settings
    )  # raises an error if the method reads samples outside of its loss
    _refuse_mixed_losses(method, context, data, settings)
    samples = federation.sizes(0)
    largest = int(samples.max())
    if dp.delta >= 1 / largest:
        warnings.warn(
            f"dp_samples: delta is {dp.delta:g}, which is not below 1 / {largest}, the samples of the largest client: "
            "a mechanism that publishes one sample in full at random would satisfy it; choose a much smaller delta",
            HoldfastWarning,
            stacklevel=4,
        )
    sampler = sampler_of(federation, settings, clients)
    rounds = range(1, settings.rounds + 1)
    taken = participations(federation.clients, (sampler.sample(round)[0].tolist() for round in rounds))
    steps = np.array(
        [
            local_steps(-(-int(n) // settings.batch_size), settings.local_epochs, settings.local_steps)
            for n in samples
        ]
    )
    return SampleAccount(dp, settings.batch_size, samples, steps, taken)


def refuse_unprotected_samples(method: Method, context: RunContext) -> None:
    """Raise an error if the clients' uploads depend on their samples other than through gradients."""
    hooks = {
        "step": "computes whole steps itself, so that the gradients of single samples are not known",
        "after_step": "keeps what the model computes for a batch, which has no bound and no noise",
        "final_statistics": "collects statistics of the clients' data after the last round, which have no bound and "
        "no noise",
    }
    reason = next((why for hook, why in hooks.items() if method.overrides(hook)), None)
    if reason is None and method.overrides("perturb") and method.ascends:
        reason = (
            "moves the weights by a gradient of the batch before the step, which has no bound and no noise"
        )
    if reason is None and method.holdout:
        reason = "measures the model on held-out samples, which have no bound and no noise"
    if reason is not None:
        raise HoldfastError(f"dp_samples: {method.name} {reason}; choose another method")
    if context.network.has_batch_norm or not context.network.ignores_padding:
        raise HoldfastError(
            "dp_samples: the model's output for a sample depends on the other samples of its batch, as with "
            "BatchNorm, so the gradient of a single sample cannot be bounded; use a model with another norm, "
            "such as resnet18:norm=group"
        )
    if context.network.autocast_dtype == torch.float16:
        raise HoldfastError(
            "dp_samples: in float16, a sample whose gradient overflows decides whether a step is skipped, which has no "
            "bound and no noise; use precision bfloat16"
        )


def _refuse_mixed_losses(method: Method, context: RunContext, data: DeviceData, settings: Settings) -> None:
    """Raise an error unless the method's loss of a batch is the mean of its losses of single samples."""
    context, sent, job = _first_job(method, context, data, 4)
    runner = ClientRunner(method, context, data, settings)
    (prepared,) = runner.start([runner.plan(job, 1)], sent)
    rng = np.random.default_rng(0)
    # Perturbed weights: at the initial weights themselves, proximal terms vanish.
    params = {
        k: w + 0.1 * torch.from_numpy(rng.normal(size=w.shape)).to(w) for k, w in prepared.params.items()
    }
    x, y = data.read_labelled(job.ids)
    extra = method.extra_inputs(prepared.carry)
    with torch.no_grad():
        out = context.network.apply(params, dict(sent.buffers), x if extra is None else torch.cat([extra, x]))
        if extra is not None:
            out = split_extra(out, len(extra))
        teachers = {
            name: context.forward(weights, sent.buffers, x) for name, weights in prepared.teachers.items()
        } | teacher_outputs(prepared.tables, method.teachers if runner.cache_teachers else ())

        def loss(rows: slice) -> float:
            batch = Batch(
                x[rows],
                y[rows],
                torch.zeros((), dtype=torch.int64, device=x.device),
                None,
                {k: Output(t.features[rows], t.logits[rows]) for k, t in teachers.items()},
                {k: v[rows] for k, v in prepared.tables.items()},
                context.task,
            )
            outputs = Output(out.features[rows], out.logits[rows], out.extra)
            value = method.task_loss(outputs, batch, prepared.carry)
            term = method.loss(outputs, batch, prepared.carry, Local(params, sent.params))
            return float(value if term is None else value + term)

        whole = loss(slice(None))
        mean = sum(loss(slice(i, i + 1)) for i in range(len(x))) / len(x)
    if not math.isclose(whole, mean, rel_tol=1e-4, abs_tol=1e-6):
        raise HoldfastError(
            f"dp_samples: the loss of {method.name} compares the samples of a batch with each other, so it is not "
            "a mean over samples; choose another method"
        )
