"""What differential privacy requires of a run, checked before training."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import torch

from holdfast.core.errors import HoldfastError, HoldfastWarning
from holdfast.core.settings import Settings
from holdfast.core.trees import Tensors, leaves, tensors_only
from holdfast.data.federation import Federation
from holdfast.engine.clients import Broadcast, ClientResult, DeviceData, Job, private_names
from holdfast.engine.sequential import SequentialEngine
from holdfast.methods.base import Method, Server
from holdfast.methods.context import RunContext
from holdfast.updates.privacy import ClientPrivacy, parse_dp


def client_privacy(
    method: Method, context: RunContext, data: DeviceData, settings: Settings, federation: Federation
) -> ClientPrivacy | None:
    """The noise and the account of a run with ``settings.dp``; raises where something could not be protected."""
    if settings.dp is None:
        return None
    dp = parse_dp(settings.dp)
    _refuse_unprotected(method, context, federation)
    sums = _side_sums(method, context, data, settings)
    if sums and dp.clip_sums is None:
        raise HoldfastError(
            f"dp: {method.name} uploads sums besides the weights ({', '.join(sums)}), which have no bound yet; give "
            "one by clip_sums, such as clip_sums=1.0, or choose a method that uploads weights alone"
        )
    if dp.clip_sums is not None and not sums:
        raise HoldfastError(f"dp: clip_sums is given, but {method.name} uploads nothing besides the weights")
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
    """Raise if the run would publish something that neither clipping nor noise reaches."""
    if method.keeps_uploads:
        raise HoldfastError(
            f"dp: {method.name} needs every client's upload by itself, and differential privacy gives the server "
            "noisy sums alone; choose another method"
        )
    if method.overrides("final_statistics"):
        raise HoldfastError(
            f"dp: {method.name} collects statistics of all clients' data after the last round, which have no bound "
            "and no noise; choose another method"
        )
    if federation.schedule is not None:
        raise HoldfastError(
            "dp: the clients of a stream take part in all stages of an epoch, so that its rounds are not separate "
            "samples of clients, as the account assumes; use a federation without stages"
        )
    averaged = set(context.network.buffers) - private_names(method, context) - context.network.kept_local
    if averaged:
        raise HoldfastError(
            f"dp: the model's running statistics ({sorted(averaged)[0]}, …) are averaged without bound and noise; use "
            "batchnorm=local or drop, or a model with another norm, such as resnet18:norm=group"
        )


def _side_sums(method: Method, context: RunContext, data: DeviceData, settings: Settings) -> Tensors:
    """Zeros in the shape of what a client uploads besides its weights, by path."""
    result = sample_upload(method, context, data, settings)
    sums = dict(leaves(result.sums))
    for path, value in sums.items():
        if not value.is_floating_point():
            raise HoldfastError(
                f"dp: {method.name} uploads integers ('{path}'), to which no noise can be added"
            )
    return {path: torch.zeros_like(value) for path, value in sums.items()}


def sample_upload(method: Method, context: RunContext, data: DeviceData, settings: Settings) -> ClientResult:
    """What a client with two of the samples would upload in the first round."""
    network = context.network.clone()
    context = replace(context, network=network)
    state = tensors_only(method.init_server_state(context), method.name, "init_server_state")
    server = Server(dict(network.params), dict(network.buffers), state, 1)
    payload = tensors_only(method.broadcast(server), method.name, "broadcast")
    sent = Broadcast(1, server.params, server.buffers, payload)
    ids = np.arange(max(0, len(data.x) - 2), len(data.x))
    job = Job(0, ids, 0, tensors_only(method.broadcast_to(server, 0), method.name, "broadcast_to"))
    return next(SequentialEngine(method, context, data, settings).train(sent, [job]))
