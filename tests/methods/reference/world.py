"""The small federation on which methods are compared with NumPy, in both worlds.

Three unequal clients (7, 4 and 1 samples) and four classes, of which client 1 lacks one, client 2 has one and
nobody has the last; three public samples. Two epochs in batches of 3, so that the last batch is short.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from reference.numpy_model import (
    CLASSES,
    HIDDEN,
    INPUTS,
    Array,
    Forward,
    Weights,
    backward,
    cross_entropy_slope,
    forward,
    mean,
    zeros,
)
from torch import nn

from holdfast.core.settings import Settings
from holdfast.data.dataset import Dataset
from holdfast.data.federation import Federation, federate
from holdfast.data.preprocess import Preprocess
from holdfast.engine.base import NO_OVERLAP, Overlap
from holdfast.engine.batching import plan_batches
from holdfast.engine.clients import Broadcast, ClientResult, Job
from holdfast.engine.state_cache import StateCache
from holdfast.methods.base import Method, Server
from holdfast.training.session import Training

LABELS = np.array([0, 0, 0, 0, 1, 1, 2, 0, 1, 1, 1, 2, 0, 1, 3])
PARTS = [np.arange(7), np.arange(7, 11), np.arange(11, 12)]
PUBLIC = np.arange(12, 15)
SIZES = [len(part) for part in PARTS]
TOTAL = sum(SIZES)
COUNTS = np.stack([np.bincount(LABELS[part], minlength=CLASSES) for part in PARTS])
SAMPLES = np.random.default_rng(5).normal(size=(len(LABELS), INPUTS)).astype(np.float32).astype(np.float64)

SETTINGS = Settings(
    rounds=3,
    local_epochs=2,
    batch_size=3,
    lr=0.1,
    momentum=0.9,
    weight_decay=0.01,
    lr_decay=0.9,
    seed=11,
    evaluate_locals=False,
)


def settings(**changes: Any) -> Settings:
    return replace(SETTINGS, **changes)


def dataset(labels: NDArray[np.int64] = LABELS, classes: int = CLASSES) -> Dataset:
    x = SAMPLES.astype(np.float32)
    return Dataset.from_arrays(x, labels, x, labels, classes=tuple("abcdefgh")[:classes])


def federation() -> Federation:
    return federate(dataset(), PARTS, public=PUBLIC)


def initial_weights(classes: int = CLASSES) -> Weights:
    rng = np.random.default_rng(3)
    shapes = {
        "0.weight": (HIDDEN, INPUTS),
        "0.bias": (HIDDEN,),
        "2.weight": (classes, HIDDEN),
        "2.bias": (classes,),
    }
    return {name: 0.6 * rng.normal(size=shape) for name, shape in shapes.items()}


def torch_model(classes: int = CLASSES) -> nn.Module:
    net = nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, classes)).double()
    net.load_state_dict({name: torch.from_numpy(w) for name, w in initial_weights(classes).items()})
    return net


# What the implementation does ---------------------------------------------------------------------------


@dataclass
class Sent:
    """One client's result, copied."""

    params: Weights
    shared: Weights
    sums: dict[str, Any]
    memory: dict[str, Any]
    weight: float


@dataclass
class Ran:
    """One round of the implementation: what was sent out, what came back, and the server after it."""

    payload: dict[str, Any]
    own_payload: dict[int, dict[str, Any]]
    clients: dict[int, Sent]
    params: Weights
    state: dict[str, Any]
    server: Server


class _Recorder:
    """An engine that keeps a copy of what passes through it."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.name, self.group = engine, engine.name, engine.group
        self.sent: Broadcast | None = None
        self.jobs: Sequence[Job] = ()
        self.results: dict[int, Sent] = {}

    def train(
        self, sent: Broadcast, jobs: Sequence[Job], overlap: Overlap = NO_OVERLAP
    ) -> Iterator[ClientResult]:
        self.sent, self.jobs, self.results = sent, jobs, {}
        for result in self.engine.train(sent, jobs, overlap):
            self.results[result.client] = Sent(
                as_numpy(result.params),
                as_numpy(result.shared),
                as_numpy(result.sums),
                as_numpy(result.client_state.get("method", {})),
                result.weight,
            )
            yield result


def as_numpy(tree: Any) -> Any:
    """A copy of a tree of tensors as NumPy arrays."""
    if isinstance(tree, dict):
        return {key: as_numpy(value) for key, value in tree.items()}
    return tree.detach().cpu().numpy().copy()


@dataclass
class Implementation:
    """A run of the library, round by round."""

    training: Training
    start: dict[str, Any]  # the server's state before round 1
    rounds: list[Ran]


def run(method: Method, rounds: int = 2, among: Federation | None = None, **changes: Any) -> Implementation:
    """Train with the reference engine in float64 and keep everything that was exchanged."""
    among = federation() if among is None else among
    training = Training(
        method,
        torch_model(among.dataset.num_classes),
        among,
        settings(rounds=rounds, **changes),
        engine="sequential",
        device="cpu",
        precision="float64",
    )
    loop = training.loop(StateCache(None, None))
    recorder = loop.engine = _Recorder(training.engine)  # type: ignore[assignment]
    start = as_numpy(loop.server.state)
    done = []
    for number in range(1, rounds + 1):
        loop.round(number)
        assert recorder.sent is not None
        own = {job.client: as_numpy(job.payload) for job in recorder.jobs}
        state = as_numpy(loop.server.state)
        params = as_numpy(loop.server.params)
        done.append(Ran(as_numpy(recorder.sent.payload), own, recorder.results, params, state, loop.server))
    return Implementation(training, start, done)


# What the equations say ---------------------------------------------------------------------------------


@dataclass
class Step:
    """One mini-batch of a client."""

    x: Array
    y: NDArray[np.int64]
    epoch: int
    ends_epoch: bool


Gradient = Callable[[Weights, Step], Weights]


def data_of(k: int) -> tuple[Array, NDArray[np.int64]]:
    return SAMPLES[PARTS[k]], LABELS[PARTS[k]]


def steps_of(
    k: int,
    round: int,
    chosen: Settings = SETTINGS,
    ids: NDArray[np.int64] | None = None,
    labels: NDArray[np.int64] = LABELS,
) -> list[Step]:
    """The client's batches in the library's order: the only thing taken from it."""
    ids = PARTS[k] if ids is None else ids
    plan = plan_batches(
        seed=chosen.seed,
        round=round,
        client=k,
        samples=len(ids),
        epochs=chosen.local_epochs,
        batch_size=chosen.batch_size,
        merge_single=False,
        preprocess=Preprocess(),
        shape=(INPUTS,),
    )
    places = zip(plan.rows, plan.epoch, plan.ends_epoch, strict=True)
    return [Step(SAMPLES[ids[r]], labels[ids[r]], epoch, ends) for r, epoch, ends in places]


def lr_at(round: int, chosen: Settings = SETTINGS) -> float:
    return chosen.lr * chosen.lr_decay ** (round - 1)


def ce_gradient(w: Weights, step: Step) -> Weights:
    f = forward(w, step.x)
    return backward(w, f, cross_entropy_slope(f.z, step.y))


def with_term(term: Callable[[Forward, Step], tuple[Array | float, Array | float]]) -> Gradient:
    """Cross-entropy plus a term of which ``term`` gives d/dlogits and d/dfeatures."""

    def gradient(w: Weights, step: Step) -> Weights:
        f = forward(w, step.x)
        dz, dh = term(f, step)
        return backward(w, f, cross_entropy_slope(f.z, step.y) + dz, dh)

    return gradient


def descend(
    w: Weights,
    steps: list[Step],
    gradient: Gradient,
    lr: float,
    *,
    momentum: float = SETTINGS.momentum,
    weight_decay: float = SETTINGS.weight_decay,
    only: Callable[[Step], tuple[str, ...]] | None = None,
    rate: Callable[[Step], float] | None = None,
    after: Callable[[Weights, Step], Weights] | None = None,
) -> Weights:
    """SGD as torch defines it: v <- momentum v + g + weight_decay w, w <- w - lr v, with v from 0."""
    w, v = dict(w), zeros(w)
    for step in steps:
        g = gradient(w, step)
        names = tuple(w) if only is None else only(step)
        new = dict(w)
        for name in names:
            v[name] = momentum * v[name] + g[name] + weight_decay * w[name]
            new[name] = w[name] - (lr if rate is None else rate(step)) * v[name]
        w = new if after is None else after(new, step)
    return w


def weighted(models: list[Weights]) -> Weights:
    """The n_k-weighted mean over the three clients."""
    return mean(models, [float(n) for n in SIZES])


def assert_models_equal(got: Weights, expected: Weights, tolerance: float = 1e-9) -> None:
    assert set(got) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=tolerance, atol=tolerance, err_msg=name)


def weighted_over(models: dict[int, Weights]) -> Weights:
    """The n_k-weighted mean over the clients that took part."""
    return mean(list(models.values()), [float(SIZES[k]) for k in models])


def assert_locals_equal(got: Ran, expected: dict[int, Weights]) -> None:
    """Those who took part, and their trained weights."""
    assert got.clients.keys() == expected.keys()
    for k, model in expected.items():
        assert_models_equal(got.clients[k].params, model)


def assert_round_equal(
    got: Ran, locals_expected: Sequence[Weights], server_expected: Weights, tolerance: float = 1e-9
) -> None:
    """Every client's trained weights, and the global ones."""
    assert sorted(got.clients) == list(range(len(locals_expected)))
    for k, expected in enumerate(locals_expected):
        assert_models_equal(got.clients[k].params, expected, tolerance)
    assert_models_equal(got.params, server_expected, tolerance)
