"""Methods whose gradient is computed at perturbed weights, against their equations in NumPy float64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from reference.numpy_model import Weights, backward, combine, dot, forward, mean, softmax, zeros
from reference.world import (
    PARTS,
    Step,
    assert_locals_equal,
    assert_models_equal,
    assert_round_equal,
    ce_gradient,
    descend,
    initial_weights,
    lr_at,
    run,
    steps_of,
    weighted,
    weighted_over,
)
from small_world import learnt, prepared, rounds, same, world
from torch import nn

from holdfast.methods.balanced import Balanced
from holdfast.methods.fedavg import FedAvg
from holdfast.methods.fedlesam import FedLESAM
from holdfast.methods.fedsam import FedSAM
from holdfast.methods.fedsmoo import FedSMOO
from holdfast.methods.fedsol import FedSOL
from holdfast.methods.fedspeed import FedSpeed
from holdfast.methods.mofedsam import MoFedSAM
from holdfast.methods.registry import parse_method

CLIENTS = range(len(PARTS))


def length(w: Weights) -> float:
    return float(np.sqrt(dot(w, w)))


def uphill(w: Weights, direction: Weights, rho: float) -> Weights:
    size = length(direction)
    return combine((1, w), (rho / size if size else 0.0, direction))


def sam_gradient(rho: float) -> Callable[[Weights, Step], Weights]:
    return lambda w, step: ce_gradient(uphill(w, ce_gradient(w, step), rho), step)


@pytest.mark.parametrize("most", [None, 0.3])
def test_fedsam(most: float | None) -> None:
    """Momentum and weight decay act as in SGD, and clipping on the second gradient."""
    rho, w = 0.3, initial_weights()
    for t, got in enumerate(run(FedSAM(rho=rho), max_grad_norm=most).rounds, start=1):

        def gradient(now: Weights, step: Step) -> Weights:
            g = sam_gradient(rho)(now, step)
            return combine((1.0 if most is None else min(1.0, most / (length(g) + 1e-6)), g))

        local = [descend(w, steps_of(k, t), gradient, lr_at(t)) for k in CLIENTS]
        w = weighted(local)
        assert_round_equal(got, local, w)


@pytest.mark.parametrize("sample", [None, 2])
def test_mofedsam(sample: int | None) -> None:
    rho, alpha, w = 0.3, 0.4, initial_weights()
    direction = zeros(w)
    done = run(MoFedSAM(rho=rho, alpha=alpha), rounds=3, clients_per_round=sample)
    for t, got in enumerate(done.rounds, start=1):

        def gradient(now: Weights, step: Step, push: Weights = direction) -> Weights:
            return combine((alpha, sam_gradient(rho)(now, step)), (1 - alpha, push))

        local = {k: descend(w, steps_of(k, t), gradient, lr_at(t)) for k in got.clients}
        assert_locals_equal(got, local)
        path = lr_at(t) * float(np.mean([len(steps_of(k, t)) for k in local]))
        new = weighted_over(local)
        direction = combine((1 / path, w), (-1 / path, new))
        w = new
        assert_models_equal(got.params, w)


@pytest.mark.parametrize("sample", [None, 2])
def test_fedspeed(sample: int | None) -> None:
    rho, lam, w = 0.3, 0.2, initial_weights()
    h, mean_h = [zeros(w) for _ in CLIENTS], zeros(w)
    done = run(FedSpeed(rho=rho, lam=lam), rounds=3, clients_per_round=sample)
    for t, got in enumerate(done.rounds, start=1):
        local = {}
        for k in got.clients:

            def gradient(now: Weights, step: Step, k: int = k, sent: Weights = w) -> Weights:
                return combine((1, sam_gradient(rho)(now, step)), (lam, now), (-lam, sent), (lam, h[k]))

            local[k] = descend(w, steps_of(k, t), gradient, lr_at(t))
            h[k] = combine((1, h[k]), (1, local[k]), (-1, w))
        assert_locals_equal(got, local)
        mean_h = mean(h)  # of all clients
        w = combine((1, mean(list(local.values()))), (1, mean_h))
        assert_models_equal(got.params, w)


@pytest.mark.parametrize("sample", [None, 2])
def test_fedsmoo(sample: int | None) -> None:
    rho, lam, w = 0.3, 0.2, initial_weights()
    h, mu, s = [zeros(w) for _ in CLIENTS], [zeros(w) for _ in CLIENTS], zeros(w)
    done = run(FedSMOO(rho=rho, lam=lam), rounds=3, clients_per_round=sample)
    for t, got in enumerate(done.rounds, start=1):
        local = {}
        for k in got.clients:

            def gradient(now: Weights, step: Step, k: int = k, sent: Weights = w, s: Weights = s) -> Weights:
                direction = combine((1, ce_gradient(now, step)), (-1, mu[k]), (-1, s))
                epsilon = combine((rho / length(direction), direction))
                mu[k] = combine((1, mu[k]), (1, epsilon), (-1, s))
                at_point = ce_gradient(combine((1, now), (1, epsilon)), step)
                return combine((1, at_point), (lam, now), (-lam, sent), (lam, h[k]))

            local[k] = descend(w, steps_of(k, t), gradient, lr_at(t))
            h[k] = combine((1, h[k]), (1, local[k]), (-1, w))
            assert_models_equal(got.clients[k].memory["mu"], mu[k])
        assert_locals_equal(got, local)
        m = mean([mu[k] for k in local])
        s = combine((rho / length(m), m))
        w = combine((1, mean(list(local.values()))), (1, mean(h)))
        assert_models_equal(got.params, w)
        assert_models_equal(got.state["s"], s)


@pytest.mark.parametrize("sample", [None, 2])
def test_fedlesam(sample: int | None) -> None:
    rho, w = 0.3, initial_weights()
    received: dict[int, Weights] = {}
    done = run(FedLESAM(rho=rho), rounds=3, clients_per_round=sample)
    for t, got in enumerate(done.rounds, start=1):
        local = {}
        for k in got.clients:
            back = combine((1, received.get(k, w)), (-1, w))

            def gradient(now: Weights, step: Step, back: Weights = back) -> Weights:
                return ce_gradient(uphill(now, back, rho), step)

            local[k] = descend(w, steps_of(k, t), gradient, lr_at(t))
            received[k] = w
        assert_locals_equal(got, local)
        w = weighted_over(local)
        assert_models_equal(got.params, w)


def test_fedsol() -> None:
    rho, tau, w = 2.0, 3.0, initial_weights()
    for t, got in enumerate(run(FedSOL(rho=rho, tau=tau)).rounds, start=1):

        def gradient(now: Weights, step: Step, sent: Weights = w) -> Weights:
            f, teacher = forward(now, step.x), forward(sent, step.x)
            apart = (softmax(f.z / tau) - softmax(teacher.z / tau)) / tau / len(step.y)
            g = backward(now, f, apart)
            point, size = dict(now), length(g)
            for name in now:
                distance = np.abs(now[name] - sent[name])
                columns = np.sqrt((distance**2).sum(0, keepdims=True))
                scaled = distance / np.maximum(columns, 1e-12)
                point[name] = now[name] + (rho * scaled * g[name] / size if size else 0.0)
            return ce_gradient(point, step)

        local = [descend(w, steps_of(k, t), gradient, lr_at(t)) for k in CLIENTS]
        w = weighted(local)
        assert_round_equal(got, local, w, 1e-8)


def test_without_a_perturbation_it_is_fedavg() -> None:
    federation = world([0, 0, 1, 1], [1, 2, 2, 3])
    plain = learnt(FedAvg(), federation)
    for method in (FedSAM(rho=0), FedLESAM(rho=0), FedSOL(rho=0), MoFedSAM(rho=0, alpha=1)):
        perturbed = learnt(method, federation)
        assert all(torch.allclose(plain[k], perturbed[k], rtol=1e-12, atol=1e-14) for k in plain)


def test_the_ascent_follows_the_loss_of_the_stack() -> None:
    """FedSAM with the balanced loss differs from both of its parts, and equals the sum of their equations."""
    federation = world([0, 0, 0, 1], [1, 2, 2, 3])
    both = learnt(parse_method("fedsam:rho=0.5+balanced"), federation)
    for alone in (FedSAM(rho=0.5), Balanced()):
        other = learnt(alone, federation)
        assert any(not torch.allclose(both[k], other[k], atol=1e-5) for k in both)
    swapped = learnt(parse_method("balanced+fedsam:rho=0.5"), federation)
    assert all(torch.allclose(both[k], swapped[k], rtol=1e-12, atol=1e-14) for k in both)


def with_norm() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(9, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4))


def test_statistics_of_batch_norm_are_those_at_the_weights() -> None:
    """After a single step they are FedAvg's, though a second pass has seen the batch at other weights."""
    federation, options = world([0, 0, 1, 1]), {"local_epochs": 1, "batch_size": 4}
    plain, sharp = (
        rounds(prepared(method, federation, with_norm(), **options), 1)[0].server
        for method in (FedAvg(), FedSAM(rho=5))
    )
    assert same(plain.buffers, sharp.buffers)
    assert not same(plain.params, sharp.params)


def test_the_passes_share_their_dropout_masks() -> None:
    """The gradient of a linear model's loss is nearly the same at weights a tiny step away."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(9, 4))
    federation, options = world([0, 0, 1, 1]), {"local_epochs": 1, "batch_size": 4}
    plain, sharp = (
        rounds(prepared(method, federation, model, **options), 1)[0].server.params
        for method in (FedAvg(), FedSAM(rho=1e-9))
    )
    assert all(torch.allclose(plain[k], sharp[k], rtol=1e-6, atol=1e-8) for k in plain)


def test_perturbations_do_not_stack() -> None:
    with pytest.raises(Exception, match="choose where gradients are computed"):
        parse_method("fedsam+fedsol")
    with pytest.raises(Exception, match="replaces the whole step"):
        parse_method("fedsam+fedreg")
