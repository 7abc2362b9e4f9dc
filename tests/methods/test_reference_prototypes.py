"""Methods that exchange features of classes, against their equations in NumPy float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from reference.numpy_model import (
    CLASSES,
    HEAD,
    HIDDEN,
    Adam,
    Array,
    Forward,
    Weights,
    classify,
    cross_entropy_slope,
    forward,
    softmax,
)
from reference.world import (
    COUNTS,
    PARTS,
    SIZES,
    TOTAL,
    Step,
    assert_round_equal,
    data_of,
    descend,
    initial_weights,
    lr_at,
    run,
    steps_of,
    weighted,
    with_term,
)

from holdfast.methods.fedfa import FedFA

CLIENTS = range(len(PARTS))


def class_means(h: Array, y: NDArray[np.int64]) -> dict[int, Array]:
    return {int(c): h[y == c].mean(0) for c in np.unique(y)}


# FedFA --------------------------------------------------------------------------------------------------


class FedFAClient:
    """One client-round of FedFA, step by step as METHODS' three steps."""

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
