"""A multilayer perceptron with one hidden ReLU layer in NumPy float64, its gradients written out by hand.

Weights are named as in ``torch.nn.Sequential(Linear(5, 6), ReLU(), Linear(6, 4))``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Weights = dict[str, Array]

BODY = ("0.weight", "0.bias")
HEAD = ("2.weight", "2.bias")
INPUTS, HIDDEN, CLASSES = 5, 6, 4


@dataclass
class Forward:
    """What the model computes for a batch."""

    x: Array
    before: Array  # the hidden layer before ReLU
    h: Array  # features
    z: Array  # logits


def forward(w: Weights, x: Array) -> Forward:
    before = x @ w["0.weight"].T + w["0.bias"]
    h = np.maximum(before, 0)
    return Forward(x, before, h, classify(w, h))


def classify(w: Weights, h: Array) -> Array:
    return h @ w["2.weight"].T + w["2.bias"]


def backward(w: Weights, f: Forward, dz: Array, dh: Array | float = 0.0) -> Weights:
    """The gradient of L, given dL/dlogits and what L gains directly from the features, dL/dh."""
    into_hidden = (dz @ w["2.weight"] + dh) * (f.before > 0)
    return {
        "0.weight": into_hidden.T @ f.x,
        "0.bias": into_hidden.sum(0),
        "2.weight": dz.T @ f.h,
        "2.bias": dz.sum(0),
    }


def input_gradient(w: Weights, f: Forward, dz: Array) -> Array:
    """dL/dx."""
    return ((dz @ w["2.weight"]) * (f.before > 0)) @ w["0.weight"]


def log_softmax(z: Array) -> Array:
    shifted = z - z.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def softmax(z: Array) -> Array:
    return np.exp(log_softmax(z))


def one_hot(y: NDArray[np.int64], classes: int = CLASSES) -> Array:
    return np.eye(classes)[y]


def cross_entropy(z: Array, y: NDArray[np.int64]) -> float:
    return float(-log_softmax(z)[np.arange(len(y)), y].mean())


def cross_entropy_slope(z: Array, y: NDArray[np.int64]) -> Array:
    """d CE / d logits, where CE is the mean over the batch."""
    return (softmax(z) - one_hot(y, z.shape[1])) / len(y)


def cosine(a: Array, b: Array) -> Array:
    """Row by row."""
    return (a * b).sum(-1) / (np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1))


def cosine_slope(a: Array, b: Array) -> Array:
    """d cosine(a, b) / da, row by row."""
    na, nb = np.linalg.norm(a, axis=-1, keepdims=True), np.linalg.norm(b, axis=-1, keepdims=True)
    return b / (na * nb) - (a * b).sum(-1, keepdims=True) * a / (na**3 * nb)


# Arithmetic on whole models -----------------------------------------------------------------------------


def combine(*terms: tuple[float, Weights]) -> Weights:
    """A linear combination of models: ``combine((1, a), (-lr, g))``."""
    return {name: sum(factor * w[name] for factor, w in terms) for name in terms[0][1]}  # type: ignore[misc]


def mean(models: list[Weights], weights: list[float] | None = None) -> Weights:
    """Weighted mean; uniform without weights."""
    shares = np.ones(len(models)) if weights is None else np.asarray(weights, float)
    return combine(*zip(shares / shares.sum(), models, strict=True))


def zeros(w: Weights) -> Weights:
    return {name: np.zeros_like(value) for name, value in w.items()}


def dot(a: Weights, b: Weights) -> float:
    return float(sum((a[name] * b[name]).sum() for name in a))


class Adam:
    """Kingma & Ba's, without weight decay."""

    def __init__(self, lr: float, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8) -> None:
        self.lr, self.betas, self.eps = lr, betas, eps
        self.count, self.first, self.second = 0, {}, {}  # type: ignore[var-annotated]

    def step(self, w: Weights, g: Weights) -> Weights:
        self.count += 1
        b1, b2 = self.betas
        new = {}
        for name in w:
            self.first[name] = b1 * self.first.get(name, 0.0) + (1 - b1) * g[name]
            self.second[name] = b2 * self.second.get(name, 0.0) + (1 - b2) * g[name] ** 2
            m = self.first[name] / (1 - b1**self.count)
            v = self.second[name] / (1 - b2**self.count)
            new[name] = w[name] - self.lr * m / (np.sqrt(v) + self.eps)
        return new
