"""Methods that retrain the classifier on the server, against their equations in NumPy float64."""

from __future__ import annotations

import numpy as np
import pytest
from reference.numpy_model import (
    CLASSES,
    HEAD,
    HIDDEN,
    Array,
    Weights,
    classify,
    cross_entropy_slope,
    forward,
    one_hot,
    softmax,
)
from reference.world import (
    COUNTS,
    LABELS,
    PARTS,
    SAMPLES,
    Implementation,
    as_numpy,
    assert_models_equal,
    assert_round_equal,
    ce_gradient,
    data_of,
    descend,
    federation,
    initial_weights,
    lr_at,
    run,
    settings,
    steps_of,
    torch_model,
    weighted,
)

from holdfast.data.dataset import Dataset
from holdfast.data.federation import Federation, federate
from holdfast.methods.ccvr import CCVR
from holdfast.methods.creff import CReFF
from holdfast.methods.fedavg import FedAvg
from holdfast.training.execution import execute
from holdfast.training.session import Training

CLIENTS = range(len(PARTS))


def head_gradient(head: Weights, h: Array, y: np.ndarray) -> Weights:
    dz = cross_entropy_slope(classify(head, h), y)
    return {"2.weight": dz.T @ h, "2.bias": dz.sum(0)}


def head_descent(head: Weights, h: Array, y: np.ndarray, lr: float, times: int) -> Weights:
    """Full-batch gradient descent."""
    for _ in range(times):
        g = head_gradient(head, h, y)
        head = {name: head[name] - lr * g[name] for name in HEAD}
    return head


# CReFF --------------------------------------------------------------------------------------------------


def unlike_slope(a: Array, b: Array) -> Array:
    """d/da of 1 - a·b / (‖a‖‖b‖ + 1e-6)."""
    na, nb = np.linalg.norm(a), np.linalg.norm(b)
    total = na * nb + 1e-6
    return -b / total + (a @ b) * nb * a / (na * total**2)


def matching_slope(psi: Weights, features: Array, c: int, real: Weights) -> Array:
    """d/dfeatures of Σ_rows (1 - cos(synthetic, real)): through the gradient's features and its softmax."""
    count = len(features)
    p = softmax(classify(psi, features))
    off = p - one_hot(np.full(count, c))
    weight, bias = off.T @ features / count, off.mean(0)
    d_weight = np.stack([unlike_slope(weight[r], real["2.weight"][r]) for r in range(CLASSES)])
    d_bias = unlike_slope(bias, real["2.bias"])
    d_p = (features @ d_weight.T + d_bias) / count
    d_z = p * (d_p - (p * d_p).sum(1, keepdims=True))
    return off @ d_weight / count + d_z @ psi["2.weight"]


def test_slope_of_gradient_matching_by_differences() -> None:
    psi, rng = initial_weights(), np.random.default_rng(1)
    features = rng.normal(size=(3, HIDDEN))
    real = head_gradient(psi, rng.normal(size=(2, HIDDEN)), np.array([1, 1]))

    def objective() -> float:
        made = head_gradient(psi, features, np.array([1, 1, 1]))
        rows = [(made["2.weight"][r], real["2.weight"][r]) for r in range(CLASSES)]
        rows.append((made["2.bias"], real["2.bias"]))
        return sum(1 - a @ b / (np.linalg.norm(a) * np.linalg.norm(b) + 1e-6) for a, b in rows)

    got = matching_slope(psi, features, 1, real)
    for place in np.ndindex(features.shape):
        kept, step = features[place], 1e-6
        features[place] = kept + step
        above = objective()
        features[place] = kept - step
        assert got[place] == pytest.approx((above - objective()) / (2 * step), abs=1e-7)
        features[place] = kept


def test_creff() -> None:
    """All features fit into one batch, all samples into one draw: the order does not matter."""
    options = {"features": 2, "match_steps": 3, "match_lr": 0.3, "epochs": 4, "repeats": 2}
    lr, rounds = 0.2, 2
    method = CReFF(lr=lr, **options)
    done = run(method, rounds=rounds)
    # With a rate of next to nothing a round's new classifier is the fresh one it starts from.
    fresh = [ran.state["classifier"] for ran in run(CReFF(lr=1e-300, **options), rounds=rounds).rounds]
    w, features, psi = initial_weights(), done.start["features"].copy(), done.start["classifier"]
    assert features.shape == (CLASSES, 2, HIDDEN)
    for t, got in enumerate(done.rounds, start=1):
        local = [descend(w, steps_of(k, t), ce_gradient, lr_at(t)) for k in CLIENTS]
        for c in np.flatnonzero(COUNTS.sum(0)):
            gradients = []
            for k in np.flatnonzero(COUNTS[:, c]):
                x, y = data_of(k)
                gradients.append(head_gradient(psi, forward(w, x[y == c]).h, y[y == c]))
            real = {name: np.mean([g[name] for g in gradients], axis=0) for name in HEAD}
            for _ in range(options["match_steps"]):
                features[c] = features[c] - options["match_lr"] * matching_slope(psi, features[c], c, real)
        labels = np.repeat(np.arange(CLASSES), 2)
        psi = head_descent(fresh[t - 1], features.reshape(-1, HIDDEN), labels, lr, options["epochs"])
        w = weighted(local)
        assert_round_equal(got, local, w)
        np.testing.assert_allclose(got.state["features"], features, rtol=1e-9, atol=1e-9)
        assert_models_equal(got.state["classifier"], psi)
        assert_models_equal(as_numpy(method.eval_params(got.server)), w | psi)
    np.testing.assert_array_equal(features[3], done.start["features"][3])  # held by nobody


# CCVR ---------------------------------------------------------------------------------------------------


def ccvr_model(method: CCVR, among: Federation, **changes: float) -> Weights:
    training = Training(
        method,
        torch_model(),
        among,
        settings(rounds=2, **changes),
        engine="sequential",
        device="cpu",
        precision="float64",
    )
    return as_numpy(execute(training, {}).model.state_dict())


def fedavg_model(among: Federation, **changes: float) -> Weights:
    done: Implementation = run(FedAvg(), rounds=2, among=among, **changes)
    return done.rounds[-1].params


def test_ccvr_draws_from_the_pooled_mean_and_covariance() -> None:
    """One full-batch step on many draws, against NumPy's own with the covariance of the pooled features."""
    draws, lr, whole = 40_000, 0.5, 1_000_000
    w = fedavg_model(federation(), batch_size=whole)
    got = ccvr_model(CCVR(draws=draws, epochs=1, lr=lr), federation(), batch_size=whole)
    rng = np.random.default_rng(0)
    ids = np.concatenate(PARTS)
    h, y = forward(w, SAMPLES[ids]).h, LABELS[ids]
    virtual = [
        rng.multivariate_normal(h[y == c].mean(0), np.cov(h[y == c].T) + 1e-6 * np.eye(HIDDEN), draws)
        for c in (0, 1, 2)
    ]
    head = head_descent(w, np.concatenate(virtual), np.repeat([0, 1, 2], draws), lr, 1)
    spread = max(np.abs(head[name] - w[name]).max() for name in HEAD)
    for name in w:
        exact = head[name] if name in HEAD else w[name]
        np.testing.assert_allclose(got[name], exact, atol=0.01 if name in HEAD else 1e-9)
    assert spread > 0.1


def test_ccvr_trains_the_classifier_by_plain_descent() -> None:
    """Clients that hold copies of one sample a class have no covariance: draws are the means but for 1e-3."""
    copies = np.array([0, 4, 6])
    y = np.tile([0, 1, 2], 4)
    x = SAMPLES[copies][y].astype(np.float32)
    data = Dataset.from_arrays(x, y, x, y, classes=tuple("abcd"))
    same = federate(data, [np.arange(0, 7), np.arange(7, 12)])
    lr, epochs = 0.3, 6
    w = fedavg_model(same, batch_size=10_000)
    got = ccvr_model(CCVR(draws=500, epochs=epochs, lr=lr), same, batch_size=10_000)
    head = head_descent(w, forward(w, SAMPLES[copies]).h, np.array([0, 1, 2]), lr, epochs)
    for name in HEAD:
        np.testing.assert_allclose(got[name], head[name], atol=1e-3)
    assert max(np.abs(head[name] - w[name]).max() for name in HEAD) > 0.05
