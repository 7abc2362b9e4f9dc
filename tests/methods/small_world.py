"""A handful of samples of given classes at a handful of clients, and methods run on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from holdfast.core.settings import Settings
from holdfast.data.dataset import Dataset
from holdfast.data.federation import Federation, federate
from holdfast.engine.clients import Broadcast, ClientRunner, Job
from holdfast.engine.rounds import RoundLoop
from holdfast.engine.state_cache import StateCache
from holdfast.methods.base import Method, Tensors, Tree
from holdfast.methods.context import Client
from holdfast.training.session import Training


def world(
    *clients: Sequence[int], classes: int = 4, public: Sequence[int] = (), preprocess: Any = None
) -> Federation:
    """Clients that hold samples of these labels, in this order; the server holds ``public`` ones."""
    labels = np.concatenate([*clients, public, range(classes)]).astype(
        np.int64
    )  # and one of each with nobody
    rng = np.random.default_rng(1)
    x = rng.integers(0, 150, (len(labels), 1, 3, 3)) + 25 * labels[:, None, None, None]
    x_test = rng.integers(0, 150, (classes, 1, 3, 3)) + 25 * np.arange(classes)[:, None, None, None]
    data = Dataset.from_arrays(
        x.astype(np.uint8), labels, x_test.astype(np.uint8), np.arange(classes), preprocess=preprocess
    )
    ends = np.cumsum([len(held) for held in clients])
    parts = np.split(np.arange(ends[-1]), ends[:-1])
    return federate(data, parts, public=np.arange(ends[-1], ends[-1] + len(public)))


def net(classes: int = 4, width: int = 6, bias: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(9, width), nn.ReLU(), nn.Linear(width, classes, bias=bias))


def prepared(
    method: Method, federation: Federation, model: nn.Module | None = None, **settings: Any
) -> Training:
    """Everything ready for rounds of two epochs in batches of three."""
    given = {"rounds": 3, "local_epochs": 2, "batch_size": 3, "lr": 0.05, "evaluate_locals": False} | settings
    model = net(federation.dataset.num_classes) if model is None else model
    return Training(
        method, model, federation, Settings(**given), engine="sequential", device="cpu", precision="float64"
    )


def rounds(training: Training, number: int) -> tuple[RoundLoop, StateCache]:
    """The rounds' server and the clients' memories after ``number`` rounds."""
    client_states = StateCache(None, None)
    loop = training.loop(client_states)
    for round in range(1, number + 1):
        loop.round(round)
    return loop, client_states


def learnt(method: Method, federation: Federation, number: int = 2, **settings: Any) -> Tensors:
    """The global parameters after some rounds."""
    return rounds(prepared(method, federation, **settings), number)[0].server.params


def begun(training: Training, k: int = 0, state: Tree | None = None, round: int = 1) -> tuple[Client, Tree]:
    """Client ``k`` as the hooks see it, and what it carries into the first step of the first round."""
    method, loop = training.method, training.loop(StateCache(None, None))
    loop.server.round = round
    runner = ClientRunner(method, training.context, training.data, training.settings)
    sent = Broadcast(round, loop.server.params, loop.server.buffers, method.broadcast(loop.server))
    client = runner.client(runner.plan(Job(k, training.federation.client(k)), round), sent)
    state = method.init_client_state(client) if state is None else state
    return client, method.client_init(sent.payload, state, client)


def same(one: Tensors, other: Tensors) -> bool:
    """Equal to the bit."""
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def close(one: Tensors, other: Tensors) -> bool:
    """Equal to rounding."""
    return all(torch.allclose(one[k], other[k], rtol=1e-12, atol=1e-14) for k in one)


def finite(params: Tensors) -> bool:
    return all(bool(p.isfinite().all()) for p in params.values())
