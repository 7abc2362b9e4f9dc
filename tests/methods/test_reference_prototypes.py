"""Methods that exchange features of classes, against their equations in NumPy float64."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from reference.numpy_model import (
    BODY,
    CLASSES,
    HEAD,
    HIDDEN,
    Adam,
    Array,
    Forward,
    Weights,
    backward,
    classify,
    cosine,
    cosine_slope,
    cross_entropy_slope,
    forward,
    mean,
    softmax,
)
from reference.world import (
    COUNTS,
    LABELS,
    PARTS,
    SAMPLES,
    SETTINGS,
    SIZES,
    TOTAL,
    Ran,
    Step,
    assert_locals_equal,
    assert_models_equal,
    assert_round_equal,
    data_of,
    dataset,
    descend,
    initial_weights,
    lr_at,
    run,
    settings,
    steps_of,
    weighted,
    weighted_over,
    with_term,
)

from holdfast.data.federation import Federation
from holdfast.data.schedules import GlobalEpochs
from holdfast.methods import clustering
from holdfast.methods.fedfa import FedFA
from holdfast.methods.fedmlp import FedMLP
from holdfast.methods.fedproc import FedProc
from holdfast.methods.fedproto import FedProto
from holdfast.models.network import Output

CLIENTS = range(len(PARTS))


def class_means(h: Array, y: NDArray[np.int64]) -> dict[int, Array]:
    return {int(c): h[y == c].mean(0) for c in np.unique(y)}


# FedFA --------------------------------------------------------------------------------------------------


class FedFAClient:
    """One client-round of FedFA, by the three steps that it takes for every batch."""

    def __init__(self, method: FedFA, anchors: Array, k: int, t: int) -> None:
        self.method, self.anchors, self.k, self.t = method, anchors, k, t
        self.moved = anchors.copy()
        self.sums, self.holding, self.batches = np.zeros((CLASSES, HIDDEN)), np.zeros(CLASSES), 0
        self.adam = Adam(1e-3)

    def train(self, w: Weights) -> Weights:
        return descend(w, steps_of(self.k, self.t), with_term(self.term), lr_at(self.t), after=self.after)

    def term(self, f: Forward, step: Step) -> tuple[float, Array]:
        self.batches += 1
        for c, m in class_means(f.h, step.y).items():
            self.sums[c] += m
            self.holding[c] += 1
        mu = 0.0 if self.method.warmup and self.t == 1 else self.method.mu
        apart = f.h - self.anchors[step.y]
        if self.method.anchor_loss == "paper":
            return 0.0, mu * apart / len(step.y)
        of_class = np.array([(step.y == y).sum() for y in step.y])[:, None]
        return 0.0, 2 * mu * apart / (CLASSES * of_class)

    def after(self, w: Weights, step: Step) -> Weights:
        if self.method.calibrate_each == "step" or step.ends_epoch:
            w = self.calibrated(w)
        if step.ends_epoch:
            self.end_epoch()
        return w

    def calibrated(self, w: Weights) -> Weights:
        if self.method.calibration == "off":
            return w
        dz = cross_entropy_slope(classify(w, self.anchors), np.arange(CLASSES))
        g = {"2.weight": dz.T @ self.anchors, "2.bias": dz.sum(0)}
        head = {name: w[name] for name in HEAD}
        if self.method.calibration == "adam":
            return w | self.adam.step(head, g)
        return w | {name: head[name] - lr_at(self.t) * g[name] for name in HEAD}

    def end_epoch(self) -> None:
        lam = self.method.lam
        for c in np.flatnonzero(COUNTS[self.k]):
            batches = self.batches if self.method.class_means == "faithful" else self.holding[c]
            if self.method.update_anchors:
                self.moved[c] = lam * self.moved[c] + (1 - lam) * self.sums[c] / batches
        self.sums[:], self.holding[:], self.batches = 0, 0, 0


FEDFA = [
    {},
    {"anchor_loss": "paper", "calibration": "sgd"},
    {"calibration": "off", "class_means": "per-class"},
    {"calibrate_each": "epoch", "lam": 1.0},
    {"update_anchors": False, "anchor_init": "random"},
    {"warmup": True, "calibration": "sgd", "calibrate_each": "epoch"},
]


@pytest.mark.parametrize("options", FEDFA, ids=str)
def test_fedfa(options: dict[str, Any]) -> None:
    method = FedFA(**{"mu": 0.5, "lam": 0.3} | options)
    done = run(method, rounds=3)
    w, anchors = initial_weights(), done.start["anchors"]
    assert np.allclose(np.linalg.norm(anchors, axis=1), 1)
    if method.anchor_init == "orthogonal":
        assert np.array_equal(anchors @ anchors.T, np.eye(CLASSES))
        assert np.isin(anchors, (0, 1)).all()
    for t, got in enumerate(done.rounds, start=1):
        clients = [FedFAClient(method, anchors, k, t) for k in CLIENTS]
        local = [client.train(w) for client in clients]
        w = weighted(local)
        anchors = sum(n * c.moved for n, c in zip(SIZES, clients, strict=True)) / TOTAL
        assert_round_equal(got, local, w)
        np.testing.assert_allclose(got.state["anchors"], anchors, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(anchors[3], done.start["anchors"][3])  # the class nobody holds


# FedProc ------------------------------------------------------------------------------------------------


def participants_means(local: dict[int, Weights]) -> dict[int, Array]:
    """Per class, the mean feature over all participants' samples at their trained models."""
    h = np.concatenate([forward(m, data_of(k)[0]).h for k, m in local.items()])
    return class_means(h, np.concatenate([data_of(k)[1] for k in local]))


ALONE = {
    "clients_per_round": 1,
    "seed": 1,
}  # clients 1, 0, 1 and 2 take part, one a round; client 1 lacks class 2


@pytest.mark.parametrize("among", [{}, ALONE], ids=["all", "one"])
@pytest.mark.parametrize("variant", ["original", "official", "fa"])
def test_fedproc(variant: str, among: dict[str, int]) -> None:
    tau, lam, w, rounds = 0.5, 0.3, initial_weights(), 4
    chosen = settings(**among)
    done = run(FedProc(tau=tau, lam=lam, variant=variant), rounds=rounds, **among)
    prototypes: dict[int, Array] = {}
    if variant == "fa":
        prototypes = dict(enumerate(done.start["prototypes"]))
        assert np.array_equal(done.start["prototypes"] @ done.start["prototypes"].T, np.eye(CLASSES))
    for t, got in enumerate(done.rounds, start=1):
        alpha = {"original": t / rounds, "official": min(1.0, (t - 1) / 100), "fa": t / rounds}[variant]
        if t == 1 and variant != "fa":
            alpha = 1.0

        def gradient(
            now: Weights, step: Step, known: dict[int, Array] = prototypes, alpha: float = alpha
        ) -> Any:
            f = forward(now, step.x)
            ce = alpha * cross_entropy_slope(f.z, step.y)
            if not known:
                return backward(now, f, ce)
            classes = list(known) if variant != "official" else list(range(CLASSES))
            sims, slopes = [], []
            for c in classes:
                p = np.broadcast_to(known.get(c, np.zeros(HIDDEN)), f.h.shape)
                if variant == "original":
                    sims.append(cosine(f.h, p) / tau)
                    slopes.append(cosine_slope(f.h, p) / tau)
                else:
                    length = 1.0 if variant == "fa" or c not in known else np.linalg.norm(known[c])
                    sims.append((f.h * p).sum(1) / length)
                    slopes.append(p / length)
            # A sample whose own class has no prototype yet has no such term.
            has = [j for j, y in enumerate(step.y) if y in classes]
            pull = np.zeros((len(step.y), len(classes)))
            place = np.array([classes.index(y) for y in step.y[has]], np.int64)
            if has:
                pull[has] = cross_entropy_slope(np.stack(sims, 1)[has], place) * len(has) / len(step.y)
            return backward(now, f, ce, (1 - alpha) * np.einsum("bc,cbd->bd", pull, np.stack(slopes)))

        local = {k: descend(w, steps_of(k, t, chosen), gradient, lr_at(t)) for k in got.clients}
        w = weighted_over(local)
        assert_locals_equal(got, local)
        assert_models_equal(got.params, w)
        if variant != "fa":
            keep = 0.0 if variant == "official" else lam
            fresh = participants_means(local)
            prototypes = prototypes | {
                c: keep * prototypes.get(c, m) + (1 - keep) * m for c, m in fresh.items()
            }
            for c, p in prototypes.items():
                np.testing.assert_allclose(got.state["prototypes"][c], p, rtol=1e-9, atol=1e-12)


# FedProto -----------------------------------------------------------------------------------------------


def nearest(h: Array, prototypes: dict[int, Array]) -> list[int]:
    return [min(prototypes, key=lambda c: ((row - prototypes[c]) ** 2).mean()) for row in h]


@pytest.mark.parametrize("among", [{}, ALONE], ids=["all", "one"])
def test_fedproto(among: dict[str, int]) -> None:
    """Weights stay at home: each client goes on from its own."""
    lam, models = 3.0, [initial_weights() for _ in CLIENTS]
    prototypes: dict[int, Array] = {}
    method, chosen = FedProto(lam=lam), settings(**among)
    for t, got in enumerate(run(method, rounds=4, **among).rounds, start=1):
        own: list[dict[int, Array]] = []
        for k in got.clients:
            seen: list[tuple[Array, NDArray[np.int64]]] = []

            def pull(
                f: Forward, step: Step, seen: Any = seen, known: Any = prototypes
            ) -> tuple[float, Array]:
                if step.epoch == SETTINGS.local_epochs - 1:
                    seen.append((f.h, step.y))
                target = np.stack([known.get(int(y), h) for h, y in zip(f.h, step.y, strict=True)])
                return 0.0, 2 * lam * (f.h - target) / f.h.size

            models[k] = descend(models[k], steps_of(k, t, chosen), with_term(pull), lr_at(t))
            own.append(
                class_means(np.concatenate([h for h, _ in seen]), np.concatenate([y for _, y in seen]))
            )
        held = {c for means in own for c in means}
        prototypes = prototypes | {c: np.mean([m[c] for m in own if c in m], axis=0) for c in held}
        local = {k: models[k] for k in got.clients}
        average = mean(list(local.values()))
        assert_locals_equal(got, local)
        assert_models_equal(got.params, average)
        for c, p in prototypes.items():
            np.testing.assert_allclose(got.state["prototypes"][c], p, rtol=1e-9, atol=1e-12)
        features = forward(average, SAMPLES).h
        out = Output(torch.from_numpy(features), torch.zeros(len(features), CLASSES).double())
        assert method.global_logits(out, got.server).argmax(1).tolist() == nearest(features, prototypes)
        for k in local:
            state = {
                name: torch.from_numpy(v) for name, v in got.clients[k].memory.items() if name != "params"
            }
            assert (COUNTS[k][method.personal_logits(out, state).argmax(1).numpy()] > 0).all()


# FedMLP -------------------------------------------------------------------------------------------------


def finch(points: Array) -> NDArray[np.int64]:
    """The coarsest partition of FINCH with more than one cluster (the first, where that has only one).

    Each point is linked to its nearest by cosine; connected points are a cluster, whose mean is a point anew.
    """
    labels, partitions = np.arange(len(points)), []
    means = points
    while len(means) > 1:
        unit = means / np.linalg.norm(means, axis=1, keepdims=True)
        similar = unit @ unit.T
        np.fill_diagonal(similar, -np.inf)
        group = np.arange(len(means))
        for i, j in enumerate(similar.argmax(1)):
            group[group == group[i]] = group[j]
        group = np.unique(group, return_inverse=True)[1]
        labels = group[labels]
        partitions.append(labels)
        if group.max() == 0:
            break
        means = np.stack([points[labels == g].mean(0) for g in range(group.max() + 1)])
    several = [p for p in partitions if p.max() > 0]
    return several[-1] if several else np.zeros(len(points), np.int64)


@pytest.mark.parametrize("seed", range(8))
def test_finch_finds_the_reference_partition(seed: int) -> None:
    points = np.abs(np.random.default_rng(seed).normal(size=(4 + 5 * seed, HIDDEN)))
    got, expected = clustering.finch(points), finch(points)
    assert len(set(zip(got.tolist(), expected.tolist(), strict=True))) == len(set(expected.tolist()))
    assert len(set(got.tolist())) == len(set(expected.tolist()))


@dataclass
class Prototypes:
    """Class prototypes by class, and the semantic prototype of each one's cluster."""

    of: dict[int, Array]

    def semantic(self) -> dict[int, Array]:
        classes = sorted(self.of)
        if not classes:
            return {}
        points = np.stack([self.of[c] for c in classes])
        labels = finch(points)
        return {c: points[labels == label].mean(0) for c, label in zip(classes, labels, strict=True)}


def smooth_l1_slope(h: Array, target: Array, method: FedMLP) -> Array:
    """Of the mean over feature dimensions, or of their sum."""
    return np.clip(h - target, -1, 1) / (len(h) if method.smooth_l1 == "mean" else 1)


def fedmlp_term(
    f: Forward, step: Step, method: FedMLP, shared: Prototypes, memory: Prototypes, minority: set[int]
) -> tuple[float, Array]:
    dh = np.zeros_like(f.h)
    semantic, own_semantic = shared.semantic(), list(memory.semantic().values())
    rare = [j for j, y in enumerate(step.y) if y in minority]
    for j, (h, y) in enumerate(zip(f.h, step.y, strict=True)):
        if method.use_prototype and y in shared.of:
            dh[j] += method.strength * smooth_l1_slope(h, shared.of[y], method) / len(step.y)
        if method.use_semantic and y in shared.of and j in rare:
            among = len(rare) if method.minority == "mean" else int((step.y == y).sum())
            dh[j] += method.alpha * smooth_l1_slope(h, semantic[y], method) / among
        if method.use_inter_task and own_semantic:
            near = memory.of.get(y)
            if near is None:
                near = min(own_semantic, key=lambda o: np.linalg.norm(o - h))
            p, q = softmax(h), softmax(near)
            if method.inter_task_kl == "feature-memory":
                ratio = np.log(p) - np.log(q)
                dh[j] += method.strength * p * (ratio - (p * ratio).sum()) / len(step.y)
            else:
                dh[j] += method.strength * (p - q) / len(step.y)
    return 0.0, dh


FEDMLP = [
    {},
    {"use_inter_task": False, "alpha": 0.4},
    {"use_prototype": False, "use_semantic": False, "inter_task_kl": "memory-feature", "memory": "ema"},
    {"head": "shared", "alpha": 0.1},
    {"smooth_l1": "sum", "alpha": 0.3},
    {"strength": 0.5, "minority": "sum", "alpha": 3.0},
    {"head_epochs": 1, "weights": "uniform"},
]


@dataclass
class Stream:
    """Who gets which samples at which of two stages, and the rarer half of the classes."""

    labels: NDArray[np.int64]
    stages: list[list[NDArray[np.int64]]]
    minority: set[int]

    @property
    def classes(self) -> int:
        return int(self.labels.max()) + 1

    def federation(self) -> Federation:
        parts = [self.stages[s][k] for k in CLIENTS for s in (0, 1)]
        counts = np.bincount(self.labels[np.concatenate(parts)])
        assert self.minority == set(np.argsort(counts)[: self.classes // 2].tolist())
        ends = np.cumsum([0, *map(len, parts)])
        data = dataset(self.labels, self.classes)
        return Federation(data, np.concatenate(parts), ends, stages=2, schedule=GlobalEpochs(2))


STREAM = Stream(
    LABELS,
    [
        [np.array([0, 1, 2, 4, 5]), np.array([7]), np.array([11, 14])],
        [np.array([3, 6]), np.array([8, 9, 10]), np.array([12, 13])],
    ],
    minority={2, 3},
)
# Client 0 remembers five classes, in two clusters, when it meets class 5.
MANY_CLASSES = Stream(
    np.array([0, 1, 2, 3, 4, 0, 1, 2, 5, 3, 4, 5, 0, 1, 5]),
    [
        [np.arange(8), np.array([10, 11]), np.array([13])],
        [np.array([8, 9]), np.array([12]), np.array([14])],
    ],
    minority={2, 3, 4},
)


@pytest.mark.parametrize("stream", [STREAM, MANY_CLASSES], ids=["four", "six"])
@pytest.mark.parametrize("options", FEDMLP, ids=str)
def test_fedmlp(options: dict[str, Any], stream: Stream) -> None:
    """Two stages: each client meets classes in the second which it has never seen."""
    method, labels, minority = FedMLP(**options), stream.labels, stream.minority
    done = run(method, rounds=4, among=stream.federation())
    w = initial_weights(stream.classes)
    heads = [{name: w[name] for name in HEAD} for _ in CLIENTS]
    shared, client_states = Prototypes({}), [Prototypes({}) for _ in CLIENTS]
    choices = 0
    for t, got in enumerate(done.rounds, start=1):
        parts = stream.stages[(t - 1) % 2]
        local, means = [], []
        for k, ids in enumerate(parts):
            memory = client_states[k]
            clusters = {tuple(o) for o in memory.semantic().values()}
            choices += len(clusters) > 1 and not set(labels[ids].tolist()) <= memory.of.keys()
            term = partial(fedmlp_term, method=method, shared=shared, memory=memory, minority=minority)
            start = w | (heads[k] if method.head == "personal" else {})
            steps = steps_of(k, t, ids=ids, labels=labels)
            local.append(descend(start, steps, with_term(term), lr_at(t), only=partial(trained, method)))
            heads[k] = {name: local[k][name] for name in HEAD}
            means.append(class_means(forward(local[k], SAMPLES[ids]).h, labels[ids]))
            half = method.memory == "ema"
            mixed = {c: (memory.of[c] + m) / 2 if half and c in memory.of else m for c, m in means[k].items()}
            client_states[k] = Prototypes(memory.of | mixed)
        w = mean(local, [1.0 if method.weights == "uniform" else float(len(ids)) for ids in parts])
        seen = {c for m in means for c in m}
        fresh = {c: np.mean([m[c] for m in means if c in m], axis=0) for c in seen}  # clients alike
        shared = Prototypes(shared.of | fresh)
        assert_round_equal(got, local, w)
        if method.use_prototype:
            check_shared(got, shared)
        for k in CLIENTS if method.use_inter_task else ():
            for c, m in client_states[k].of.items():
                np.testing.assert_allclose(got.clients[k].memory["memory"][c], m, rtol=1e-9, atol=1e-12)
    assert (choices > 0) == (stream is MANY_CLASSES)


def trained(method: FedMLP, step: Step) -> tuple[str, ...]:
    """The parameters that a step changes: with ``head_epochs`` either the classifier or the body."""
    if not method.head_epochs:
        return BODY + HEAD
    return HEAD if step.epoch < method.head_epochs else BODY


def check_shared(got: Ran, shared: Prototypes) -> None:
    for c, g in shared.of.items():
        np.testing.assert_allclose(got.state["prototypes"][c], g, rtol=1e-9, atol=1e-12)
        cluster = got.state["semantic"][int(got.state["cluster"][c])]
        np.testing.assert_allclose(cluster, shared.semantic()[c], rtol=1e-9, atol=1e-12)
