"""Methods that act on weights and gradients, against their equations in NumPy float64."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from reference.numpy_model import (
    Array,
    Weights,
    backward,
    combine,
    cross_entropy_slope,
    dot,
    forward,
    input_gradient,
    mean,
    softmax,
    zeros,
)
from reference.world import (
    PARTS,
    SAMPLES,
    SETTINGS,
    SIZES,
    TOTAL,
    Step,
    as_numpy,
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
)

from holdfast.core.random import generator
from holdfast.methods.fedavg import FedAvg
from holdfast.methods.fedavgm import FedAvgM
from holdfast.methods.fedcurv import FedCurv
from holdfast.methods.feddyn import FedDyn
from holdfast.methods.fednova import FedNova
from holdfast.methods.fedprox import FedProx
from holdfast.methods.fedreg import FedReg
from holdfast.methods.scaffold import Scaffold

CLIENTS = range(len(PARTS))


def fedavg_locals(w: Weights, t: int) -> list[Weights]:
    return [descend(w, steps_of(k, t), ce_gradient, lr_at(t)) for k in CLIENTS]


def test_fedavg() -> None:
    w = initial_weights()
    for t, got in enumerate(run(FedAvg()).rounds, start=1):
        local = fedavg_locals(w, t)
        w = weighted(local)
        assert_round_equal(got, local, w)


@pytest.mark.parametrize("most", [None, 0.3])
def test_fedprox(most: float | None) -> None:
    mu, w = 0.7, initial_weights()
    for t, got in enumerate(run(FedProx(mu=mu), max_grad_norm=most).rounds, start=1):
        start = w

        def gradient(now: Weights, step: Step, start: Weights = start) -> Weights:
            whole = combine((1, ce_gradient(now, step)), (mu, now), (-mu, start))
            scale = 1.0 if most is None else min(1.0, most / (np.sqrt(dot(whole, whole)) + 1e-6))
            return combine((scale, whole))

        local = [descend(w, steps_of(k, t), gradient, lr_at(t)) for k in CLIENTS]
        w = weighted(local)
        assert_round_equal(got, local, w)


@pytest.mark.parametrize("damped", [False, True])
def test_fedavgm(damped: bool) -> None:
    beta, w = 0.7, initial_weights()
    v = zeros(w)
    for t, got in enumerate(run(FedAvgM(beta=beta, damped=damped), rounds=3).rounds, start=1):
        local = fedavg_locals(w, t)
        delta = combine((1, w), (-1, weighted(local)))
        v = combine((beta, v), (1 - beta if damped else 1, delta))
        w = combine((1, w), (-1, v))
        assert_round_equal(got, local, w)
        assert_models_equal(got.state["velocity"], v)


@pytest.mark.parametrize("variant", ["original", "ntd", "weighted"])
def test_scaffold(variant: str) -> None:
    w = initial_weights()
    c, own = zeros(w), [zeros(w) for _ in CLIENTS]
    rho = SETTINGS.momentum
    for t, got in enumerate(run(Scaffold(variant=variant), rounds=3).rounds, start=1):
        local, new = [], []
        for k in CLIENTS:
            steps = steps_of(k, t)

            def gradient(now: Weights, step: Step, k: int = k, c: Weights = c) -> Weights:
                return combine((1, ce_gradient(now, step)), (-1, own[k]), (1, c))

            trained = descend(w, steps, gradient, lr_at(t))
            count: float = len(steps)
            if variant == "ntd":
                count = (count - rho * (1 - rho**count) / (1 - rho)) / (1 - rho)
            scale = 1 / (count * lr_at(t))
            new.append(combine((1, own[k]), (-1, c), (scale, w), (-scale, trained)))
            local.append(trained)
        # c += (|S|/N) mean Δc, and everybody takes part
        sizes = [len(part) for part in PARTS]
        shares = [n / sum(sizes) if variant == "weighted" else 1 / len(sizes) for n in sizes]
        changes = (combine((1, after), (-1, before)) for after, before in zip(new, own, strict=True))
        c = combine((1, c), *zip(shares, changes, strict=True))
        own, w = new, weighted(local)
        assert_round_equal(got, local, w)
        assert_models_equal(got.state["c"], c)
        for k in CLIENTS:
            assert_models_equal(got.clients[k].memory["c_k"], own[k])


def test_scaffold_control_counts_all_clients_when_few_take_part() -> None:
    """c += (|S|/N) mean_S Δc: with one of three clients a round, c moves by a third of its Δc."""
    w = initial_weights()
    got = run(Scaffold(), rounds=1, clients_per_round=1).rounds[0]
    (k,) = got.clients
    steps = steps_of(k, 1)
    trained = descend(w, steps, ce_gradient, lr_at(1))
    scale = 1 / (len(steps) * lr_at(1))
    assert_models_equal(got.params, trained)
    assert_models_equal(got.state["c"], combine((scale / 3, w), (-scale / 3, trained)))


# FedNova ------------------------------------------------------------------------------------------------


def nova_length(steps: int, rho: float) -> float:
    """a_k: how far so many steps of a constant gradient 1 go at learning rate 1."""
    velocity = position = 0.0
    for _ in range(steps):
        velocity = rho * velocity + 1
        position += velocity
    return position


def nova_server(w: Weights, local: list[Weights], lengths: list[float]) -> Weights:
    shares = np.array(SIZES) / TOTAL
    effective = float(shares @ lengths)
    return combine(
        (1, w),
        *(
            (-effective * p / a, combine((1, w), (-1, m)))
            for p, a, m in zip(shares, lengths, local, strict=True)
        ),
    )


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fednova(momentum: float) -> None:
    w = initial_weights()
    for t, got in enumerate(run(FedNova(), momentum=momentum).rounds, start=1):
        local = [descend(w, steps_of(k, t), ce_gradient, lr_at(t), momentum=momentum) for k in CLIENTS]
        w = nova_server(w, local, [nova_length(len(steps_of(k, t)), momentum) for k in CLIENTS])
        assert_round_equal(got, local, w)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fednova_with_its_proximal_term(momentum: float) -> None:
    """a is how far a constant gradient goes against the pull; without momentum a <- (1 - ημ) a + 1."""
    mu, w = 0.8, initial_weights()
    for t, got in enumerate(run(FedNova(mu=mu), momentum=momentum).rounds, start=1):

        def gradient(now: Weights, step: Step, sent: Weights = w) -> Weights:
            return combine((1, ce_gradient(now, step)), (mu, now), (-mu, sent))

        local, lengths = [], []
        for k in CLIENTS:
            local.append(descend(w, steps_of(k, t), gradient, lr_at(t), momentum=momentum))
            a = velocity = 0.0
            for _ in steps_of(k, t):
                velocity = momentum * velocity + (1 - lr_at(t) * mu * a)
                a += velocity
            lengths.append(a)
        w = nova_server(w, local, lengths)
        assert_round_equal(got, local, w)


def test_fednova_as_in_fedntd() -> None:
    """From the second participation on each gradient is lowered by the client's last d_k / η."""
    w = initial_weights()
    last = [zeros(w) for _ in CLIENTS]
    for t, got in enumerate(run(FedNova(variant="ntd"), rounds=3).rounds, start=1):
        local, lengths = [], []
        for k in CLIENTS:

            def gradient(now: Weights, step: Step, d: Weights = last[k]) -> Weights:
                return combine((1, ce_gradient(now, step)), (-1, d))

            steps = steps_of(k, t)
            trained = descend(w, steps, gradient, lr_at(t))
            lengths.append(nova_length(len(steps), SETTINGS.momentum))
            last[k] = combine((1 / (lengths[-1] * lr_at(t)), combine((1, w), (-1, trained))))
            local.append(trained)
        w = nova_server(w, local, lengths)
        assert_round_equal(got, local, w)


# FedCurv ------------------------------------------------------------------------------------------------


def fisher(w: Weights, batches: list[tuple[Array, NDArray[np.int64]]]) -> Weights:
    """The mean over batches (of one sample, for the true diagonal) of the squared gradient."""
    squares = [{n: g**2 for n, g in ce_gradient(w, Step(x, y, 0, True)).items()} for x, y in batches]
    return mean(squares)


@pytest.mark.parametrize(("variant", "batch_size"), [("original", 3), ("ntd", 3), ("ntd", 7)])
def test_fedcurv(variant: str, batch_size: int) -> None:
    lam, w = 0.5, initial_weights()
    u = [zeros(w) for _ in CLIENTS]
    v = [zeros(w) for _ in CLIENTS]
    chosen = settings(batch_size=batch_size)
    done = run(FedCurv(lam=lam, variant=variant), rounds=3, batch_size=batch_size)
    for t, got in enumerate(done.rounds, start=1):
        local = []
        for k in CLIENTS:
            pull = combine(*((2 * lam, u[j]) for j in CLIENTS if j != k))
            to = combine(*((2 * lam, v[j]) for j in CLIENTS if j != k))

            def gradient(now: Weights, step: Step, pull: Weights = pull, to: Weights = to) -> Weights:
                g = ce_gradient(now, step)
                return {name: g[name] + pull[name] * now[name] - to[name] for name in g}

            local.append(descend(w, steps_of(k, t, chosen), gradient, lr_at(t)))
        for k in CLIENTS:
            x, y = data_of(k)
            each = 1
            if variant == "ntd":  # in batches that are shuffled, as FedNTD's loader does
                order = generator(SETTINGS.seed, "fisher batches", t, k).permutation(len(y))
                x, y, each = x[order], y[order], batch_size
            cuts = range(0, len(y), each)
            u[k] = fisher(local[k], [(x[i : i + each], y[i : i + each]) for i in cuts])
            v[k] = {name: u[k][name] * local[k][name] for name in w}
        w = weighted(local)
        assert_round_equal(got, local, w)


# FedDyn -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["original", "official", "ntd"])
@pytest.mark.parametrize("sample", [None, 2])
def test_feddyn(variant: str, sample: int | None) -> None:
    alpha, w = 0.1, initial_weights()
    linear = [zeros(w) for _ in CLIENTS]
    h = zeros(w)
    method = FedDyn(alpha=alpha, variant=variant)
    for t, got in enumerate(run(method, rounds=3, clients_per_round=sample).rounds, start=1):
        trained: dict[int, Weights] = {}
        for k in got.clients:
            own = alpha * TOTAL / (len(PARTS) * SIZES[k]) if variant == "official" else alpha

            def gradient(
                now: Weights, step: Step, k: int = k, own: float = own, sent: Weights = w
            ) -> Weights:
                return combine((1, ce_gradient(now, step)), (-1, linear[k]), (own, now), (-own, sent))

            trained[k] = descend(w, steps_of(k, t), gradient, lr_at(t))
            linear[k] = combine((1, linear[k]), (-own, trained[k]), (own, w))
            assert_models_equal(got.clients[k].params, trained[k])
        moved = [combine((1, m), (-1, w)) for m in trained.values()]
        h = combine((1, h), *((-alpha / len(PARTS), m) for m in moved))
        average = mean(
            list(trained.values()), [float(SIZES[k]) if variant == "ntd" else 1.0 for k in trained]
        )
        w = combine((1, average), (-1 / alpha, h))
        assert_models_equal(got.params, w)
        tested = as_numpy(method.eval_params(got.server))
        assert_models_equal(tested, average if variant == "official" else w)


def test_feddyn_as_in_fedfa() -> None:
    """CE + α_k ⟨w, w_k^{prev} - w^{t-1}⟩, FedAvg's server."""
    alpha, w = 0.1, initial_weights()
    previous: list[Weights | None] = [None] * len(PARTS)
    for t, got in enumerate(run(FedDyn(alpha=alpha, variant="fa"), rounds=3).rounds, start=1):
        local = []
        for k in CLIENTS:
            own = alpha * TOTAL / (len(PARTS) * SIZES[k])
            push = combine((own, previous[k] or w), (-own, w))

            def gradient(now: Weights, step: Step, push: Weights = push) -> Weights:
                return combine((1, ce_gradient(now, step)), (1, push))

            local.append(descend(w, steps_of(k, t), gradient, lr_at(t)))
        previous, w = list(local), weighted(local)
        assert_round_equal(got, local, w)


# FedReg -------------------------------------------------------------------------------------------------


def ascend(w: Weights, x: Array, y: NDArray[np.int64], rate: float, times: int) -> Array:
    for _ in range(times):
        f = forward(w, x)
        x = x + rate * np.sign(input_gradient(w, f, cross_entropy_slope(f.z, y)))
        x = np.clip(x, SAMPLES.min(), SAMPLES.max())  # the range of valid inputs
    return x


@pytest.mark.parametrize("lr", [0.1, 2.0])
def test_fedreg(lr: float) -> None:
    """At the large rate steps overshoot, and only then does the second projection (b) do anything."""
    gamma, eta, times, w = 0.4, 0.1, 4, initial_weights()
    projected = [0, 0]
    for t, got in enumerate(run(FedReg(gamma=gamma, eta_s=eta, steps=times), lr=lr).rounds, start=1):
        local, rate = [], lr_at(t, settings(lr=lr))
        for k in CLIENTS:
            now = w
            for step in steps_of(k, t):
                pseudo = ascend(w, step.x, step.y, eta, times)
                perturbed = ascend(w, step.x, step.y, eta / 100, times)
                g1 = ce_gradient(combine((gamma, now), (1 - gamma, w)), step)
                now = combine((1, now), (-rate, g1))
                halfway = combine((0.5, now), (0.5, w))
                f = forward(halfway, pseudo)
                g2 = backward(halfway, f, (softmax(f.z) - softmax(forward(w, pseudo).z)) / len(step.y))
                g3 = ce_gradient(halfway, Step(perturbed, step.y, 0, False))
                moved = combine((1, now), (-1, w))
                a = max(0.0, dot(moved, g2) / dot(g2, g2))
                b = max(0.0, dot(combine((1, moved), (-a, g2)), g3) / dot(g3, g3))
                projected = [projected[0] + (a > 0), projected[1] + (b > 0)]
                now = combine((1, now), (-a, g2), (-b, g3))
            local.append(now)
        w = mean(local)
        assert_round_equal(got, local, w)
    assert projected[0] > 0
    assert (projected[1] > 0) == (lr > 1)


def test_the_references_differ_from_each_other() -> None:
    """The terms are large enough here for a missing one to be noticed."""
    plain = run(FedAvg()).rounds[-1].params
    for method in (FedProx(mu=0.7), FedAvgM(), Scaffold()):
        other = run(method).rounds[-1].params
        assert max(np.abs(other[name] - plain[name]).max() for name in plain) > 1e-3
