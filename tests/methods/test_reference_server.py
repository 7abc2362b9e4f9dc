"""Methods that act on the server alone, against their equations in NumPy float64."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from reference.numpy_model import Weights, combine, dot, zeros
from reference.world import (
    PARTS,
    SIZES,
    TOTAL,
    Step,
    as_numpy,
    assert_models_equal,
    assert_round_equal,
    ce_gradient,
    descend,
    initial_weights,
    lr_at,
    run,
    steps_of,
    weighted,
)
from small_world import net, prepared, rounds, same, world
from torch import nn

import holdfast as hf
from holdfast.engine.rounds import evaluated_model
from holdfast.methods.ema import EMA
from holdfast.methods.fedacg import FedACG
from holdfast.methods.fedadagrad import FedAdagrad
from holdfast.methods.fedadam import FedAdam
from holdfast.methods.fedavg import FedAvg
from holdfast.methods.fedexp import FedExP
from holdfast.methods.fedyogi import FedYogi
from holdfast.methods.registry import parse_method

CLIENTS = range(len(PARTS))


def fedavg_locals(w: Weights, t: int) -> list[Weights]:
    return [descend(w, steps_of(k, t), ce_gradient, lr_at(t)) for k in CLIENTS]


# EMA ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [False, True])
def test_ema(start: bool) -> None:
    beta, w = 0.6, initial_weights()
    method, seen = EMA(beta=beta, start=start), list[Weights]()
    for t, got in enumerate(run(method, rounds=3).rounds, start=1):
        local = fedavg_locals(w, t)
        w = weighted(local)
        seen.append(w)
        shares = beta ** np.arange(t - 1, -1, -1.0)
        mean = combine(*zip(shares / shares.sum(), seen, strict=True))
        w = mean if start else w
        assert_round_equal(got, local, w)
        assert_models_equal(as_numpy(method.eval_params(got.server)), mean)


def with_norm() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(9, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4))


def test_ema_averages_the_statistics_of_batch_norm() -> None:
    federation = world([0, 0, 1, 1], [1, 2, 2, 3])
    training = prepared(EMA(beta=0.5), federation, with_norm())
    plain = prepared(FedAvg(), federation, with_norm())
    one, three = (rounds(plain, number)[0].server.buffers for number in (1, 2))
    server = rounds(training, 2)[0].server
    _, buffers = evaluated_model(training.method, server)
    for name in ("2.running_mean", "2.running_var"):
        assert torch.equal(server.buffers[name], three[name])  # training does not change
        assert torch.allclose(buffers[name], (one[name] + 2 * three[name]) / 3, rtol=1e-12)
    assert torch.equal(buffers["2.num_batches_tracked"], three["2.num_batches_tracked"])


def trained(method: str, federation: hf.Federation, **options: object) -> hf.Run:
    settings = {"rounds": 3, "lr": 0.05, "batch_size": 3, "engine": "sequential", "device": "cpu"}
    return hf.train(parse_method(method), net(), federation, **(settings | options))  # type: ignore[arg-type]


def test_the_tested_mean_is_the_final_model(tmp_path: Path) -> None:
    federation = world([0, 0, 1], [1, 2, 3, 3])
    averaged = trained("ema", federation)
    models = [trained("fedavg", federation, rounds=t).model.state_dict() for t in (1, 2, 3)]
    shares = [0.81, 0.9, 1.0]
    for name, value in averaged.model.state_dict().items():
        mean = sum(share * model[name] for share, model in zip(shares, models, strict=True)) / sum(shares)
        assert torch.allclose(value, mean, rtol=1e-5, atol=1e-6)


def test_no_averaging_is_fedavg() -> None:
    federation = world([0, 0, 1], [1, 2, 3, 3])
    plain, averaged = trained("fedavg", federation), trained("ema:beta=0", federation)
    assert same(plain.model.state_dict(), averaged.model.state_dict())
    assert [r["accuracy"] for r in plain.records] == [r["accuracy"] for r in averaged.records]


def test_a_calibration_starts_from_the_mean(tmp_path: Path) -> None:
    """The body is that of the mean, the classifier is calibrated, and a finished run that is opened again agrees."""
    federation = world([0, 0, 1], [1, 2, 3, 3])
    mean, calibrated = trained("ema", federation), trained("ema+ccvr", federation, out=tmp_path)
    for name in ("1.weight", "1.bias"):
        assert torch.equal(mean.model.state_dict()[name], calibrated.model.state_dict()[name])
    assert not torch.equal(mean.model.state_dict()["3.weight"], calibrated.model.state_dict()["3.weight"])
    again = trained("ema+ccvr", federation, out=tmp_path, resume=True)
    assert same(again.model.state_dict(), calibrated.model.state_dict())


@pytest.mark.parametrize("other", ["fedavgm", "feddyn", "fedrep", "fedfomo", "fedrod", "moon"])
def test_ema_composes(other: str) -> None:
    """It tests the mean of what the other method makes, and leaves its training alone."""
    federation = world([0, 0, 1], [1, 2, 3, 3])
    alone = [rounds(prepared(parse_method(other), federation), number)[0].server.params for number in (1, 2)]
    stack = prepared(parse_method(f"{other}+ema:beta=0.5"), federation)
    server = rounds(stack, 2)[0].server
    assert same(server.params, alone[1])
    tested, _ = evaluated_model(stack.method, server)
    for name, value in tested.items():
        assert torch.allclose(value, (alone[0][name] + 2 * alone[1][name]) / 3, rtol=1e-9, atol=1e-12)


# Adaptive server optimisers -----------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["adam", "yogi", "adagrad", "adagrad with momentum"])
def test_adaptive_server_optimisers(rule: str) -> None:
    eta, b1, b2, tau = 0.1, 0.8, 0.9, 0.05
    methods = {
        "adam": FedAdam(lr=eta, beta1=b1, beta2=b2, tau=tau),
        "yogi": FedYogi(lr=eta, beta1=b1, beta2=b2, tau=tau),
        "adagrad": FedAdagrad(lr=eta, tau=tau),
        "adagrad with momentum": FedAdagrad(lr=eta, beta1=b1, tau=tau),
    }
    w = initial_weights()
    m, v = zeros(w), {name: np.full_like(value, tau**2) for name, value in w.items()}
    for t, got in enumerate(run(methods[rule], rounds=3).rounds, start=1):
        local = fedavg_locals(w, t)
        delta = combine((1, weighted(local)), (-1, w))
        new = {}
        for name, d in delta.items():
            m[name] = d if rule == "adagrad" else b1 * m[name] + (1 - b1) * d
            if rule == "adam":
                v[name] = b2 * v[name] + (1 - b2) * d**2
            elif rule == "yogi":
                v[name] = v[name] - (1 - b2) * d**2 * np.sign(v[name] - d**2)
            else:
                v[name] = v[name] + d**2
            new[name] = w[name] + eta * m[name] / (np.sqrt(v[name]) + tau)
        w = new
        assert_round_equal(got, local, w)


# FedExP -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("eps", "extrapolates"), [(1e-3, True), (10.0, False)])
def test_fedexp(eps: float, extrapolates: bool) -> None:
    """At a small learning rate, as updates are small there; the extrapolation exceeds 1 in some round."""
    method, w, rates = FedExP(eps=eps), initial_weights(), []
    for t, got in enumerate(run(method, rounds=3).rounds, start=1):
        local = fedavg_locals(w, t)
        moved = [combine((1, w), (-1, m)) for m in local]
        delta = combine(*((n / TOTAL, d) for n, d in zip(SIZES, moved, strict=True)))
        squares = sum(n / TOTAL * dot(d, d) for n, d in zip(SIZES, moved, strict=True))
        rates.append(max(1.0, squares / (2 * (dot(delta, delta) + eps))))
        new = combine((1, w), (-rates[-1], delta))
        assert_round_equal(got, local, new)
        tested = new if t == 1 else combine((0.5, new), (0.5, w))
        assert_models_equal(as_numpy(method.eval_params(got.server)), tested)
        w = new
    assert (max(rates) > 1) == extrapolates


def test_fedexp_of_one_client_is_fedavg() -> None:
    """‖Δ_k‖² = ‖Δ‖², so that η = 1."""
    federation = world([0, 0, 1, 2, 3])
    training = prepared(FedExP(average=False), federation)
    one, other = (rounds(t, 2)[0].server.params for t in (training, prepared(FedAvg(), federation)))
    assert all(torch.allclose(one[k], other[k], rtol=1e-12, atol=1e-14) for k in one)


# FedACG -------------------------------------------------------------------------------------------------


def test_fedacg() -> None:
    lam, beta, w = 0.7, 0.2, initial_weights()
    momentum, method = zeros(w), FedACG(lam=lam, beta=beta)
    for t, got in enumerate(run(method, rounds=3).rounds, start=1):
        ahead = combine((1, w), (lam, momentum))

        def gradient(now: Weights, step: Step, to: Weights = ahead) -> Weights:
            return combine((1, ce_gradient(now, step)), (2 * beta, now), (-2 * beta, to))

        local = [descend(ahead, steps_of(k, t), gradient, lr_at(t)) for k in CLIENTS]
        momentum = combine((lam, momentum), (1, weighted(local)), (-1, ahead))
        w = combine((1, w), (1, momentum))
        assert_round_equal(got, local, combine((1, w), (lam, momentum)))
        assert_models_equal(as_numpy(method.eval_params(got.server)), w)
