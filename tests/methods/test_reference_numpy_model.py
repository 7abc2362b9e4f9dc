"""The hand-written gradients of the reference model, against finite differences."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from reference.numpy_model import (
    Array,
    Weights,
    backward,
    cosine,
    cosine_slope,
    cross_entropy,
    cross_entropy_slope,
    forward,
    input_gradient,
)
from reference.world import LABELS, SAMPLES, initial_weights

X, Y = SAMPLES[:5], LABELS[:5]


def slope(f: Callable[[], float], values: Array, step: float = 1e-6) -> Array:
    """df/dvalues by central differences."""
    out = np.empty_like(values)
    for place in np.ndindex(values.shape):
        kept = values[place]
        values[place] = kept + step
        above = f()
        values[place] = kept - step
        out[place] = (above - f()) / (2 * step)
        values[place] = kept
    return out


def objective(w: Weights) -> float:
    f = forward(w, X)
    return cross_entropy(f.z, Y) + float((f.h**2).sum())


@pytest.mark.parametrize("name", ["0.weight", "0.bias", "2.weight", "2.bias"])
def test_gradient_of_every_parameter_matches_differences(name: str) -> None:
    w = initial_weights()
    f = forward(w, X)
    g = backward(w, f, cross_entropy_slope(f.z, Y), 2 * f.h)
    np.testing.assert_allclose(g[name], slope(lambda: objective(w), w[name]), atol=1e-7)


def test_gradient_of_inputs_matches_differences() -> None:
    w, x = initial_weights(), X.copy()
    f = forward(w, x)
    got = input_gradient(w, f, cross_entropy_slope(f.z, Y))
    np.testing.assert_allclose(got, slope(lambda: cross_entropy(forward(w, x).z, Y), x), atol=1e-7)


def test_gradient_of_cosine_matches_differences() -> None:
    a, b = SAMPLES[:3].copy(), SAMPLES[3:6]
    np.testing.assert_allclose(cosine_slope(a, b), slope(lambda: float(cosine(a, b).sum()), a), atol=1e-7)
