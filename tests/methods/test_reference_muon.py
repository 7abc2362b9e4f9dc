"""FedMuon against its equations in NumPy float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from reference.numpy_model import Array, Weights, combine, mean, zeros
from reference.world import (
    assert_locals_equal,
    assert_models_equal,
    ce_gradient,
    initial_weights,
    lr_at,
    run,
    steps_of,
)
from small_world import finite, learnt, world

from holdfast.methods.fedmuon import FedMuon, orthogonal
from holdfast.methods.registry import parse_method

MATRICES = ("0.weight", "2.weight")


def newton_schulz(g: Array) -> Array:
    x = g / (np.linalg.norm(g) + 1e-7)
    for _ in range(5):
        x = 3.4445 * x - 4.7750 * x @ x.T @ x + 2.0315 * x @ x.T @ x @ x.T @ x
    return x


def trained(
    w: Weights, k: int, t: int, shared: Weights, direction: Weights, method: FedMuon
) -> tuple[Weights, Weights]:
    """A client's weights and momentum after its steps."""
    w, momentum, eta = dict(w), dict(shared), lr_at(t)
    first, second = zeros(w), zeros(w)
    for number, step in enumerate(steps_of(k, t), start=1):
        g = ce_gradient(w, step)
        for name in w:
            rate = (1 - method.alpha) * eta
            if name in MATRICES:
                rate *= method.scale
                momentum[name] = method.beta * momentum[name] + (1 - method.beta) * g[name]
                outputs, inputs = g[name].shape
                mixed = (1 - method.beta) * g[name] + method.beta * momentum[name]
                update = np.sqrt(max(1, outputs / inputs)) * newton_schulz(mixed)
            else:
                first[name] = 0.9 * first[name] + 0.1 * g[name]
                second[name] = 0.95 * second[name] + 0.05 * g[name] ** 2
                root = np.sqrt(second[name] / (1 - 0.95**number))
                update = first[name] / (1 - 0.9**number) / (root + 1e-10)
            w[name] = (1 - rate * method.decay) * w[name] - rate * update
            w[name] = w[name] + method.alpha * eta * direction[name]
    return w, {name: momentum[name] for name in MATRICES}


@pytest.mark.parametrize("sample", [None, 2])
def test_fedmuon(sample: int | None) -> None:
    """Clients of 6, 4 and 2 steps a round."""
    method, w = FedMuon(alpha=0.3, beta=0.7, scale=0.6, decay=0.05), initial_weights()
    shared, direction = {name: 0.0 * w[name] for name in MATRICES}, zeros(w)
    done = run(method, rounds=3, clients_per_round=sample)
    for t, got in enumerate(done.rounds, start=1):
        local, momenta, moves = {}, [], []
        for k in got.clients:
            local[k], momentum = trained(w, k, t, shared, direction, method)
            momenta.append(momentum)
            path = len(steps_of(k, t)) * lr_at(t)
            moves.append(combine((1 / path, local[k]), (-1 / path, w)))
        assert_locals_equal(got, local)
        w, shared, direction = mean(list(local.values())), mean(momenta), mean(moves)
        assert_models_equal(got.params, w)
        assert_models_equal(got.state["momentum"], shared)
        assert_models_equal(got.state["direction"], direction)


def test_singular_values_are_brought_near_one() -> None:
    """Of tall and wide matrices and of filters, and the singular vectors stay."""
    torch.manual_seed(0)
    for shape in ((12, 5), (5, 12), (8, 3, 3, 3)):
        weight = torch.randn(shape, dtype=torch.float64)
        matrix = orthogonal(weight).flatten(1).numpy()
        values = np.linalg.svd(matrix, compute_uv=False)
        assert values.min() > 0.3
        assert values.max() < 1.3
        u, _, v = np.linalg.svd(weight.flatten(1).numpy(), full_matrices=False)
        inside = u.T @ matrix @ v.T
        assert np.abs(inside - np.diag(np.diag(inside))).max() < 1e-10


def test_a_weight_without_gradient_stays_finite() -> None:
    """The classes' rows have none where a client holds a single class and its loss is 0 in floating point."""
    params = learnt(FedMuon(), world([0], [0, 0, 0]), 3, lr=1.0)
    assert finite(params)
    assert np.isfinite(orthogonal(torch.zeros(3, 2)).numpy()).all()


def test_it_takes_the_place_of_the_step_and_of_nothing_else() -> None:
    federation = world([0, 0, 1, 1], [1, 2, 2, 3])
    alone, averaged = learnt(FedMuon(), federation), learnt(parse_method("fedmuon+ema"), federation)
    assert all(torch.equal(alone[k], averaged[k]) for k in alone)
    with pytest.raises(Exception, match="fedmuon replaces the whole step"):
        parse_method("fedmuon+fedntd")
