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
from holdfast.methods.fedlc import FedLC

CLIENTS = range(len(PARTS))
LogitGradient = Callable[[int, Array, NDArray[np.int64]], Array]


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
