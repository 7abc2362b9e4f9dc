"""Methods that change the local loss by the client's label counts or features, against NumPy float64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from reference.numpy_model import (
    Array,
    Weights,
    backward,
    cross_entropy_slope,
    forward,
    one_hot,
    softmax,
)
from reference.world import (
    COUNTS,
    PARTS,
    SIZES,
    Step,
    assert_round_equal,
    descend,
    initial_weights,
    lr_at,
    run,
    steps_of,
    weighted,
)
from small_world import learnt, same, world

from holdfast.methods.balanced import Balanced
from holdfast.methods.base import Method
from holdfast.methods.fedavg import FedAvg
from holdfast.methods.feddecorr import FedDecorr
from holdfast.methods.fedlc import FedLC
from holdfast.methods.fedlmd import FedLMD
from holdfast.methods.fedntd import FedNTD
from holdfast.methods.fedrcl import FedRCL
from holdfast.methods.fedrs import FedRS
from holdfast.methods.fedvls import FedVLS

CLIENTS = range(len(PARTS))
LogitGradient = Callable[[int, Array, NDArray[np.int64]], Array]
TaughtGradient = Callable[[int, Array, Array, NDArray[np.int64]], Array]


def assert_replaces_the_loss(method: Method, slope: LogitGradient, rounds: int = 2) -> None:
    """``slope(client, logits, y)`` is the gradient of the loss of one batch with respect to the logits."""
    w = initial_weights()
    for t, got in enumerate(run(method, rounds=rounds).rounds, start=1):
        local = []
        for k in CLIENTS:

            def gradient(now: Weights, step: Step, k: int = k) -> Weights:
                f = forward(now, step.x)
                return backward(now, f, slope(k, f.z, step.y))

            local.append(descend(w, steps_of(k, t), gradient, lr_at(t)))
        w = weighted(local)
        assert_round_equal(got, local, w)


@pytest.mark.parametrize(("tau", "floor"), [(1.0, 1e-8), (0.5, 0.01)])
def test_balanced(tau: float, floor: float) -> None:
    """Clients lack classes, and the last has a single one."""

    def slope(k: int, z: Array, y: NDArray[np.int64]) -> Array:
        prior = np.maximum(COUNTS[k] / SIZES[k], floor)
        odds = np.exp(z - z.max(-1, keepdims=True)) * prior**tau
        return (odds / odds.sum(-1, keepdims=True) - one_hot(y)) / len(y)

    assert_replaces_the_loss(Balanced(tau=tau, floor=floor), slope)


def test_balanced_is_cross_entropy_without_skew_or_strength() -> None:
    even, uneven = world([0, 1, 2, 3] * 2, [0, 1, 2, 3]), world([0, 0, 0, 1], [2, 3, 3])
    for federation, tau in ((even, 1.0), (uneven, 0.0)):
        plain, shifted = learnt(FedAvg(), federation), learnt(Balanced(tau=tau), federation)
        assert all(torch.allclose(plain[k], shifted[k], rtol=1e-12, atol=1e-14) for k in plain)


def test_fedlc() -> None:
    tau = 1.3

    def slope(k: int, z: Array, y: NDArray[np.int64]) -> Array:
        held = np.flatnonzero(COUNTS[k])
        out = np.zeros_like(z)
        out[:, held] = softmax(z[:, held] - tau * COUNTS[k][held] ** -0.25)
        return (out - one_hot(y)) / len(y)

    assert_replaces_the_loss(FedLC(tau=tau), slope)


def test_fedlc_leaves_absent_classes_alone() -> None:
    """The classifier's rows of a class that nobody holds do not change, as weight decay is 0 here."""
    federation = world([0, 0, 1], [1, 1, 0, 0])
    before = learnt(FedLC(), federation, 0)
    after = learnt(FedLC(), federation, 2)
    assert same({"row": before["3.weight"][2:]}, {"row": after["3.weight"][2:]})
    assert not torch.equal(before["3.weight"][:2], after["3.weight"][:2])


def test_fedrs() -> None:
    alpha = 0.3

    def slope(k: int, z: Array, y: NDArray[np.int64]) -> Array:
        scale = np.where(COUNTS[k] > 0, 1.0, alpha)
        return scale * (softmax(z * scale) - one_hot(y)) / len(y)

    assert_replaces_the_loss(FedRS(alpha=alpha), slope)


def test_fedrs_without_restraint_is_fedavg() -> None:
    federation = world([0, 0, 0, 1], [2, 3, 3])
    plain, restrained = learnt(FedAvg(), federation), learnt(FedRS(alpha=1), federation)
    assert same(plain, restrained)


# FedDecorr ----------------------------------------------------------------------------------------------


def correlation_penalty(h: Array) -> float:
    n, width = h.shape
    if n == 1:
        return 0.0
    x = (h - h.mean(0)) / np.sqrt(h.var(0, ddof=1) + 1e-8)
    squares = (x.T @ x) ** 2
    off = squares.sum() - np.trace(squares)
    return float(off / (width * (width - 1)) / n)


def numerical_slope(function: Callable[[Array], float], at: Array) -> Array:
    """Central differences."""
    slope, step = np.zeros_like(at), 1e-6
    for place in np.ndindex(*at.shape):
        moved = at.copy()
        moved[place] += step
        above = function(moved)
        moved[place] -= 2 * step
        slope[place] = (above - function(moved)) / (2 * step)
    return slope


def test_feddecorr() -> None:
    """Batches of 3, 1 and 2 samples; the penalty's gradient by differences."""
    beta, w = 0.7, initial_weights()
    sizes = set()
    for t, got in enumerate(run(FedDecorr(beta=beta)).rounds, start=1):
        local = []
        for k in CLIENTS:

            def gradient(now: Weights, step: Step) -> Weights:
                f = forward(now, step.x)
                sizes.add(len(step.y))
                return backward(
                    now, f, cross_entropy_slope(f.z, step.y), beta * numerical_slope(correlation_penalty, f.h)
                )

            local.append(descend(w, steps_of(k, t), gradient, lr_at(t)))
        w = weighted(local)
        assert_round_equal(got, local, w, 1e-6)
    assert sizes == {1, 3}


# FedRCL -------------------------------------------------------------------------------------------------


def contrast(h: Array, y: NDArray[np.int64], tau: float, lam: float, beta: float) -> float:
    """Sample by sample, by lists of cosines."""
    total = 0.0
    for i in range(len(y)):
        cosines = h @ h[i] / np.linalg.norm(h, axis=1) / np.linalg.norm(h[i])
        own = [cosines[j] for j in range(len(y)) if j != i and y[j] == y[i]]
        others = sorted(cosines[j] for j in range(len(y)) if y[j] != y[i])[-2:]
        hardest = min(own, default=1.0)
        total += np.log1p(sum(np.exp((s - hardest) / tau) for s in others))
        if own and hardest >= lam:
            total += beta * np.log1p(np.exp((hardest - 1) / tau))
    return total / len(y)


@pytest.mark.parametrize("lam", [0.2, 0.9])
def test_fedrcl(lam: float) -> None:
    """Batches with and without a second sample of a class; the gradient by differences."""
    tau, beta, w = 0.4, 0.7, initial_weights()
    for t, got in enumerate(run(FedRCL(tau=tau, lam=lam, beta=beta)).rounds, start=1):
        local = []
        for k in CLIENTS:

            def gradient(now: Weights, step: Step) -> Weights:
                f = forward(now, step.x)
                dh = numerical_slope(lambda h: contrast(h, step.y, tau, lam, beta), f.h)
                return backward(now, f, cross_entropy_slope(f.z, step.y), dh)

            local.append(descend(w, steps_of(k, t), gradient, lr_at(t)))
        w = weighted(local)
        assert_round_equal(got, local, w, 1e-6)


def test_fedrcl_of_a_single_class_is_the_penalty_alone() -> None:
    """Without samples of other classes nothing is drawn together."""
    federation = world([0] * 4, [1] * 4)
    plain, held, driven = (learnt(method, federation) for method in (FedAvg(), FedRCL(beta=0), FedRCL()))
    assert all(torch.allclose(plain[k], held[k], rtol=1e-12, atol=1e-14) for k in plain)
    assert any(not torch.allclose(plain[k], driven[k], atol=1e-6) for k in plain)


# Distillation of some classes ---------------------------------------------------------------------------


def assert_distils(method: Method, slope: TaughtGradient) -> None:
    """``slope(client, logits, teacher's logits, y)`` is the gradient of the loss of one batch by the logits."""
    w = initial_weights()
    for t, got in enumerate(run(method).rounds, start=1):
        local = []
        for k in CLIENTS:

            def gradient(now: Weights, step: Step, k: int = k, sent: Weights = w) -> Weights:
                f = forward(now, step.x)
                return backward(now, f, slope(k, f.z, forward(sent, step.x).z, step.y))

            local.append(descend(w, steps_of(k, t), gradient, lr_at(t)))
        w = weighted(local)
        assert_round_equal(got, local, w, 1e-8)


def test_fedvls() -> None:
    """Client 0 lacks one class, client 2 three."""
    lam, beta = 0.8, 0.4

    def slope(k: int, z: Array, teacher: Array, y: NDArray[np.int64]) -> Array:
        n, classes = z.shape
        prior = COUNTS[k] / SIZES[k]
        out = (softmax(z + np.log(prior + 1e-9)) - one_hot(y)) / n
        absent = np.flatnonzero(COUNTS[k] == 0)
        out[:, absent] += lam * (softmax(z[:, absent]) - softmax(teacher[:, absent])) / n
        for c in range(classes):
            a = z[:, c] - np.log(prior[c] + 1e-9) + np.log(1 / classes + 1e-9)
            a[y == c] = 0
            share = np.exp(a - a.max()) / np.exp(a - a.max()).sum()
            out[:, c] += beta * prior[c] * np.where(y == c, 0, share)
        return out

    assert_distils(FedVLS(lam=lam, beta=beta), slope)


def test_fedvls_of_a_client_with_all_classes_distils_nothing() -> None:
    federation = world([0, 1, 2, 3, 0])
    one, other = learnt(FedVLS(lam=0), federation), learnt(FedVLS(lam=5), federation)
    assert same(one, other)


def test_fedlmd() -> None:
    beta, tau = 0.8, 2.0

    def slope(k: int, z: Array, teacher: Array, y: NDArray[np.int64]) -> Array:
        n, classes = z.shape
        out = (softmax(z) - one_hot(y)) / n
        minority = np.flatnonzero(COUNTS[k] <= COUNTS[k].mean())
        for i in range(n):
            taught, other = np.setdiff1d(minority, [y[i]]), np.setdiff1d(np.arange(classes), [y[i]])
            p, q = np.zeros(classes), np.zeros(classes)
            if len(taught):
                p[taught] = softmax(teacher[i, taught] / tau)
                q[other] = softmax(z[i, other] / tau)
            out[i] += beta * tau * (q - p) / n
        return out

    assert_distils(FedLMD(beta=beta, tau=tau), slope)


def test_fedlmd_without_majorities_is_fedntd() -> None:
    federation = world([0, 1, 2, 3] * 2, [0, 1, 2, 3])
    one, other = learnt(FedLMD(), federation), learnt(FedNTD(), federation)
    assert all(torch.allclose(one[k], other[k], rtol=1e-9, atol=1e-12) for k in one)


def test_fedlmd_where_a_sample_has_no_class_to_distil() -> None:
    """Three of four classes are in the majority, so that samples of the fourth have no minority class but their own."""
    params = learnt(FedLMD(), world([0, 0, 0, 1, 1, 1, 2, 2, 2, 3]))
    assert all(bool(p.isfinite().all()) for p in params.values())
