"""Methods that leave each client something of its own, against their equations in NumPy float64."""

from __future__ import annotations

from itertools import combinations
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
    Array,
    Forward,
    Weights,
    backward,
    classify,
    combine,
    cross_entropy,
    cross_entropy_slope,
    dot,
    forward,
    mean,
    one_hot,
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
    Step,
    as_numpy,
    assert_locals_equal,
    assert_models_equal,
    assert_round_equal,
    ce_gradient,
    data_of,
    descend,
    initial_weights,
    lr_at,
    run,
    settings,
    steps_of,
    weighted,
    with_term,
)

from holdfast.core.errors import HoldfastError
from holdfast.core.random import generator
from holdfast.engine.clients import Job
from holdfast.methods.ditto import Ditto
from holdfast.methods.fedala import FedALA
from holdfast.methods.fedbabu import FedBABU
from holdfast.methods.fedetf import FedETF
from holdfast.methods.fedfomo import FedFomo
from holdfast.methods.fedpac import FedPAC
from holdfast.methods.fedrep import FedRep
from holdfast.methods.fedrod import FedRoD
from holdfast.models.network import Output

CLIENTS = range(len(PARTS))


def head_of(w: Weights) -> Weights:
    return {name: w[name] for name in HEAD}


# FedRep -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("epochs", "body_epochs"), [(2, 1), (3, 1), (3, 2)])
def test_fedrep(epochs: int, body_epochs: int) -> None:
    w, chosen = initial_weights(), settings(local_epochs=epochs)
    heads = [head_of(w) for _ in CLIENTS]
    for t, got in enumerate(
        run(FedRep(body_epochs=body_epochs), rounds=3, local_epochs=epochs).rounds, start=1
    ):
        local = [
            descend(
                w | heads[k],
                steps_of(k, t, chosen),
                ce_gradient,
                lr_at(t),
                only=lambda step: BODY if step.epoch >= epochs - body_epochs else HEAD,
            )
            for k in CLIENTS
        ]
        heads, w = [head_of(m) for m in local], weighted(local)
        assert_round_equal(got, local, w)
        for k in CLIENTS:
            assert_models_equal(got.clients[k].memory["head"], heads[k])


# FedRoD -------------------------------------------------------------------------------------------------


def test_fedrod() -> None:
    w, method = initial_weights(), FedRoD()
    personal = [head_of(w) for _ in CLIENTS]
    for t, got in enumerate(run(method, rounds=3).rounds, start=1):
        local = []
        for k in CLIENTS:
            prior = np.where(COUNTS[k] > 0, np.log(np.maximum(COUNTS[k], 1)), -1e9)

            def gradient(now: Weights, step: Step, k: int = k, t: int = t, prior: Array = prior) -> Weights:
                f = forward(now, step.x)
                dz = cross_entropy_slope(f.z + classify(personal[k], f.h), step.y)
                own = {"2.weight": dz.T @ f.h, "2.bias": dz.sum(0)}
                personal[k] = {name: personal[k][name] - lr_at(t) * own[name] for name in HEAD}
                return backward(now, f, cross_entropy_slope(f.z + prior, step.y))

            local.append(descend(w, steps_of(k, t), gradient, lr_at(t)))
        w = weighted(local)
        assert_round_equal(got, local, w)
        for k in CLIENTS:
            kept = got.clients[k].memory["head"]
            np.testing.assert_allclose(kept[:, :HIDDEN], personal[k]["2.weight"], rtol=1e-9, atol=1e-12)
            np.testing.assert_allclose(kept[:, HIDDEN], personal[k]["2.bias"], rtol=1e-9, atol=1e-12)
            f = forward(local[k], SAMPLES)
            out = Output(torch.from_numpy(f.h), torch.from_numpy(f.z))
            said = method.personal_logits(out, {"head": torch.from_numpy(kept)}).numpy()
            np.testing.assert_allclose(said, f.z + classify(personal[k], f.h), rtol=1e-9, atol=1e-9)


# FedALA -------------------------------------------------------------------------------------------------


def learn_mixture(
    k: int, old: Weights, sent: Weights, mixture: Weights, eta: float, first_time: bool
) -> tuple[Weights, Weights, int]:
    """The start ŵ, the weights W of the top tensors on all samples as one batch, and the passes it took."""
    x, y = data_of(k)

    def mixed() -> Weights:
        return sent | {n: old[n] + (sent[n] - old[n]) * mixture[n] for n in mixture}

    losses: list[float] = []
    while True:
        f = forward(mixed(), x)
        losses.append(cross_entropy(f.z, y))
        g = backward(mixed(), f, cross_entropy_slope(f.z, y))
        mixture = {n: np.clip(mixture[n] - eta * g[n] * (sent[n] - old[n]), 0, 1) for n in mixture}
        if not first_time or (len(losses) > 10 and np.std(losses[-10:]) < 0.1):
            return mixed(), mixture, len(losses)


@pytest.mark.parametrize(("top", "eta"), [(1, 5.0), (2, 5.0), (4, 0.03)])
def test_fedala(top: int, eta: float) -> None:
    """All samples, in one batch: no chance is left."""
    w, whole = initial_weights(), settings(batch_size=7)
    names = [*BODY, *HEAD][-top:]
    old: list[Weights] = [w] * len(PARTS)
    mixtures = [{n: np.ones_like(w[n]) for n in names} for _ in CLIENTS]
    passes = []
    done = run(FedALA(sampled=1.0, top=top, eta=eta), rounds=3, batch_size=7)
    for t, got in enumerate(done.rounds, start=1):
        local = []
        for k in CLIENTS:
            start = w
            if t > 1:
                start, mixtures[k], count = learn_mixture(k, old[k], w, mixtures[k], eta, first_time=t == 2)
                passes.append(count)
            local.append(descend(start, steps_of(k, t, whole), ce_gradient, lr_at(t)))
        old, w = local, weighted(local)
        assert_round_equal(got, local, w)
    assert (max(passes) > 11) == (top == 4)  # at a small rate the losses take longer to settle
    assert any((m[names[0]] < 1).any() for m in mixtures)


# FedFomo ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("models", "sample"), [(5, None), (2, None), (2, 2)])
def test_fedfomo(models: int, sample: int | None) -> None:
    done = run(FedFomo(models=models), rounds=4, clients_per_round=sample)
    plans = [done.training.engine.runner.plan(Job(k, PARTS[k]), 1) for k in CLIENTS]  # type: ignore[attr-defined]
    assert [len(plan.heldout) for plan in plans] == [1, 1, 0]
    w = initial_weights()
    own, old = [w] * len(PARTS), [w] * len(PARTS)
    affinity, known = np.eye(len(PARTS)), set[int]()
    mixtures = 0
    for t, got in enumerate(done.rounds, start=1):
        uploaded, local = list(own), {}
        for k in got.clients:
            held, received = plans[k].heldout, [int(j) for j in got.own_payload[k].get("models", {})]
            assert len(received) == min(models, len(known))
            rest = [affinity[k, j] for j in known if j not in received]
            assert min(affinity[k, received], default=0.0) >= max(rest, default=-np.inf)
            start, gains = own[k], np.zeros(len(PARTS))
            for j in received if len(held) else ():
                assert_models_equal(got.own_payload[k]["models"][str(j)], uploaded[j])
                apart = combine((1, uploaded[j]), (-1, old[k]))
                losses = [
                    cross_entropy(forward(m, SAMPLES[held]).z, LABELS[held]) for m in (old[k], uploaded[j])
                ]
                gains[j] = (losses[0] - losses[1]) / (np.sqrt(dot(apart, apart)) + 1e-5)
            kept = np.maximum(gains, 0)
            if kept.sum() > 0:
                start = combine(*((kept[j] / kept.sum(), uploaded[j]) for j in received))
                mixtures += (kept > 0).sum() > 1
            affinity[k] += gains
            old[k] = start
            local[k] = descend(start, steps_of(k, t, ids=plans[k].ids), ce_gradient, lr_at(t))
        own = [local.get(k, own[k]) for k in CLIENTS]
        known |= local.keys()
        assert_locals_equal(got, local)
        for k in local:
            np.testing.assert_allclose(got.state["affinity"][str(k)], affinity[k], rtol=1e-9, atol=1e-9)
        average = mean([own[k] for k in known], [float(len(plans[k].ids)) for k in known])
        assert_models_equal(as_numpy(done.training.method.eval_params(got.server)), average)
    assert sample or mixtures > 0


# FedPAC -------------------------------------------------------------------------------------------------


def least_quadratic(matrix: Array) -> Array:
    """argmin αᵀMα over α ≥ 0, Σα = 1, by trying every set of positive entries."""
    best, least = None, np.inf
    for size in range(1, len(matrix) + 1):
        for support in combinations(range(len(matrix)), size):
            part = matrix[np.ix_(support, support)]
            if np.linalg.matrix_rank(part) < size > 1:
                continue
            solved = np.linalg.solve(part, np.ones(size)) if size > 1 else np.ones(1)
            alpha = np.zeros(len(matrix))
            alpha[list(support)] = solved / solved.sum()
            if (alpha >= 0).all() and alpha @ matrix @ alpha < least:
                best, least = alpha, float(alpha @ matrix @ alpha)
    assert best is not None
    return best


def class_means(h: Array, y: NDArray[np.int64]) -> dict[int, Array]:
    return {int(c): h[y == c].mean(0) for c in np.unique(y)}


@pytest.mark.parametrize(("sample", "seed"), [(None, 11), (2, 11), (1, 9)])
def test_fedpac(sample: int | None, seed: int) -> None:
    """With one client a round, seed 9 begins with the one that has class 2 alone: the next is on its own."""
    lam, head_lr, w, epochs = 1.5, 0.3, initial_weights(), 3
    heads = [head_of(w) for _ in CLIENTS]
    prototypes: dict[int, Array] = {}
    done = run(
        FedPAC(lam=lam, head_lr=head_lr), rounds=4, clients_per_round=sample, local_epochs=epochs, seed=seed
    )
    shared = own_used = 0
    for t, got in enumerate(done.rounds, start=1):
        present, local = sorted(got.clients), {}
        statistics: dict[int, tuple[float, Array]] = {}
        for k in present:
            x, y = data_of(k)
            h = forward(w, x).h
            before = class_means(h, y)
            share = COUNTS[k] / SIZES[k]
            second = sum(share[c] * (h[y == c] ** 2).sum() / COUNTS[k][c] for c in before)
            first = sum(share[c] ** 2 * (m @ m) for c, m in before.items())
            scaled = np.stack([share[c] * before.get(c, np.zeros(HIDDEN)) for c in range(CLASSES)])
            statistics[k] = (float(second - first) / SIZES[k], scaled)
            own_used += t > 1 and any(c not in prototypes for c in before)

            def align(
                f: Forward, step: Step, before: Any = before, known: Any = prototypes, t: int = t
            ) -> Any:
                target = np.stack([known.get(int(c), before[int(c)]) for c in step.y])
                return 0.0, 2 * lam * (f.h - target) / f.h.size if t > 1 else 0.0

            local[k] = descend(
                w | heads[k],
                steps_of(k, t, settings(local_epochs=epochs, seed=seed)),
                with_term(align),
                lr_at(t),
                only=lambda step: BODY if step.epoch else HEAD,
                rate=lambda step, t=t: lr_at(t) if step.epoch else head_lr,  # type: ignore[misc]
            )
            assert_models_equal(got.clients[k].params, local[k])
        features = np.concatenate([forward(local[k], data_of(k)[0]).h for k in present])
        prototypes = prototypes | class_means(features, np.concatenate([data_of(k)[1] for k in present]))
        for c, p in prototypes.items():
            np.testing.assert_allclose(got.state["prototypes"][c], p, rtol=1e-9, atol=1e-12)
        for i in present:
            apart = np.stack([(statistics[i][1] - statistics[j][1]).ravel() for j in present])
            alpha = least_quadratic(np.diag([statistics[j][0] for j in present]) + apart @ apart.T)
            alpha = np.where(alpha < 1e-3, 0, alpha)
            shared += (alpha > 0).sum() > 1
            mixed = mean([head_of(local[j]) for j in present], list(alpha))
            # The library solves the quadratic programme iteratively.
            assert_models_equal(got.state["heads"][str(i)], mixed, tolerance=1e-6)
            heads[i] = got.state["heads"][str(i)]
        w = mean([local[k] for k in present], [float(SIZES[k]) for k in present])
        assert_models_equal(got.params, w)
    assert (shared > 0) == (sample != 1)
    assert (own_used > 0) == (sample == 1)


# FedETF -------------------------------------------------------------------------------------------------


def etf_products(z: Array) -> Array:
    """f M with the vectors of the simplex as columns of M."""
    simplex = np.sqrt(CLASSES / (CLASSES - 1)) * (np.eye(CLASSES) - np.ones((CLASSES, CLASSES)) / CLASSES)
    return z / np.linalg.norm(z, axis=1, keepdims=True) @ simplex


def test_fedetf() -> None:
    w, scale, method = initial_weights(), 1.0, FedETF()
    rho, decay = SETTINGS.momentum, SETTINGS.weight_decay
    for t, got in enumerate(run(method, rounds=3).rounds, start=1):
        local, scales = [], []
        for k in CLIENTS:
            prior = np.where(COUNTS[k] > 0, np.log(np.maximum(COUNTS[k], 1)), -1e9)
            own, velocity = [scale], [0.0]

            def gradient(
                now: Weights, step: Step, prior: Array = prior, own: list[float] = own,
                velocity: list[float] = velocity, t: int = t,
            ) -> Weights:  # fmt: skip
                f = forward(now, step.x)
                u, s = etf_products(f.z), own[0]
                error = (softmax(s * u + prior) - one_hot(step.y)) / len(step.y)
                to_f = s * np.sqrt(CLASSES / (CLASSES - 1)) * (error - error.mean(1, keepdims=True))
                size = np.linalg.norm(f.z, axis=1, keepdims=True)
                unit = f.z / size
                dz = (to_f - unit * (to_f * unit).sum(1, keepdims=True)) / size
                velocity[0] = rho * velocity[0] + float((error * u).sum()) + decay * s
                own[0] = s - lr_at(t) * velocity[0]
                return backward(now, f, dz)

            local.append(descend(w, steps_of(k, t), gradient, lr_at(t)))
            scales.append(own[0])
        w, scale = weighted(local), float(np.dot(SIZES, scales) / TOTAL)
        assert_round_equal(got, local, w)
        np.testing.assert_allclose(got.state["scale"], scale, rtol=1e-9)
        f = forward(w, SAMPLES)
        out = Output(torch.from_numpy(f.h), torch.from_numpy(f.z))
        said = method.global_logits(out, got.server).numpy()
        np.testing.assert_allclose(said, scale * etf_products(f.z), rtol=1e-9)
        np.testing.assert_array_equal(said.argmax(1), f.z.argmax(1))  # as of the model by itself
        memory = {"scale": torch.from_numpy(got.clients[1].memory["scale"])}
        said = method.personal_logits(out, memory).numpy()
        np.testing.assert_allclose(said, scales[1] * etf_products(f.z), rtol=1e-9)


# FedBABU ------------------------------------------------------------------------------------------------


def test_fedbabu() -> None:
    w, method, epochs = initial_weights(), FedBABU(finetune=2), 2
    fixed = head_of(w)
    for t, got in enumerate(run(method, rounds=2).rounds, start=1):
        local = [descend(w, steps_of(k, t), ce_gradient, lr_at(t), only=lambda _: BODY) for k in CLIENTS]
        w = weighted(local) | fixed
        assert_round_equal(got, local, w)
        for k in CLIENTS:
            x, y = data_of(k)
            h, head = forward(local[k], x).h, dict(fixed)
            rng = generator(SETTINGS.seed, "classifier batches", t, k)
            for _ in range(epochs):
                order = rng.permutation(len(y))
                for at in range(0, len(y), SETTINGS.batch_size):
                    rows = order[at : at + SETTINGS.batch_size]
                    dz = cross_entropy_slope(classify(head, h[rows]), y[rows])
                    head = {
                        "2.weight": head["2.weight"] - lr_at(t) * dz.T @ h[rows],
                        "2.bias": head["2.bias"] - lr_at(t) * dz.sum(0),
                    }
            kept = got.clients[k].memory["head"]
            np.testing.assert_allclose(kept[:, :HIDDEN], head["2.weight"], rtol=1e-9, atol=1e-12)
            np.testing.assert_allclose(kept[:, HIDDEN], head["2.bias"], rtol=1e-9, atol=1e-12)
            f = forward(local[k], SAMPLES)
            out = Output(torch.from_numpy(f.h), torch.from_numpy(f.z))
            said = method.personal_logits(out, {"head": torch.from_numpy(kept)}).numpy()
            np.testing.assert_allclose(said, classify(head, f.h), rtol=1e-9, atol=1e-12)


# Ditto --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("epochs", "personal"), [(2, 1), (3, 2)])
def test_ditto(epochs: int, personal: int) -> None:
    lam, w, chosen = 0.4, initial_weights(), settings(local_epochs=epochs)
    own = [w for _ in CLIENTS]
    method = Ditto(lam=lam, personal_epochs=personal)
    for t, got in enumerate(run(method, rounds=3, local_epochs=epochs).rounds, start=1):
        shared = []
        for k in CLIENTS:
            steps = steps_of(k, t, chosen)

            def pulled(now: Weights, step: Step, sent: Weights = w) -> Weights:
                return combine((1, ce_gradient(now, step)), (lam, now), (-lam, sent))

            first = [step for step in steps if step.epoch < epochs - personal]
            last = [step for step in steps if step.epoch >= epochs - personal]
            shared.append(descend(w, first, ce_gradient, lr_at(t)))
            own[k] = descend(own[k], last, pulled, lr_at(t))  # with momentum from 0
            assert_models_equal(got.clients[k].params, own[k])
            assert_models_equal(got.clients[k].shared, shared[k])
        w = weighted(shared)
        assert_models_equal(got.params, w)


def test_ditto_needs_an_epoch_for_each_model() -> None:
    with pytest.raises(HoldfastError, match="local_epochs is 1 and must be at least 2"):
        run(Ditto(), local_epochs=1)
