"""Methods that learn from frozen models, against their equations in NumPy float64."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from reference.numpy_model import (
    CLASSES,
    Adam,
    Array,
    Forward,
    Weights,
    backward,
    combine,
    cosine,
    cosine_slope,
    cross_entropy_slope,
    dot,
    forward,
    log_softmax,
    softmax,
)
from reference.world import (
    COUNTS,
    LABELS,
    PARTS,
    PUBLIC,
    SAMPLES,
    SETTINGS,
    SIZES,
    Step,
    assert_locals_equal,
    assert_models_equal,
    assert_round_equal,
    ce_gradient,
    descend,
    initial_weights,
    lr_at,
    run,
    settings,
    steps_of,
    weighted,
    weighted_over,
    with_term,
)

from holdfast.core.random import generator
from holdfast.methods.feddf import FedDF
from holdfast.methods.fedka import FedKA
from holdfast.methods.fedntd import FedNTD
from holdfast.methods.flashback import Flashback
from holdfast.methods.moon import Moon

CLIENTS = range(len(PARTS))


def public_order(t: int, epoch: int) -> NDArray[np.int64]:
    """In which order the server meets the public samples: another in each epoch and round."""
    rng = generator(SETTINGS.seed, "public batches", t, epoch)
    return PUBLIC[rng.permutation(len(PUBLIC))]


# FedNTD -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("beta", "tau"), [(1.0, 1.0), (0.6, 2.5)])
def test_fedntd(beta: float, tau: float) -> None:
    """d/dz of β τ² KL(q̃_g ‖ q̃_k) is β τ (q̃_k - q̃_g) on the other classes and 0 on the true one."""
    w = initial_weights()
    for t, got in enumerate(run(FedNTD(beta=beta, tau=tau)).rounds, start=1):

        def not_true(f: Forward, step: Step, sent: Weights = w) -> tuple[Array, float]:
            dz, teacher = np.zeros_like(f.z), forward(sent, step.x).z
            for j, y in enumerate(step.y):
                others = [c for c in range(CLASSES) if c != y]
                student = softmax(f.z[j, others] / tau)
                dz[j, others] = beta * tau * (student - softmax(teacher[j, others] / tau)) / len(step.y)
            return dz, 0.0

        local = [descend(w, steps_of(k, t), with_term(not_true), lr_at(t)) for k in CLIENTS]
        w = weighted(local)
        assert_round_equal(got, local, w)


# FedKA --------------------------------------------------------------------------------------------------


def fedka_classes(k: int, gamma: float) -> tuple[list[int], list[int], list[int]]:
    """Dominant, non-dominant and missing classes of a client."""
    share = COUNTS[k] / SIZES[k]
    dominant = [c for c in range(CLASSES) if share[c] >= gamma]
    missing = [c for c in range(CLASSES) if share[c] == 0]
    return dominant, [c for c in range(CLASSES) if c not in dominant + missing], missing


def fedka_local(
    w: Weights, k: int, t: int, beta: float, gamma: float, anchor: list[int], centred: bool = False,
    plain: bool = False, own_logit: bool = False, entropy: float = 0.0,
) -> Weights:  # fmt: skip
    kept = np.ones((len(anchor), CLASSES))
    if own_logit:
        kept[np.arange(len(anchor)), LABELS[anchor]] = 0
    else:
        kept[:, fedka_classes(k, gamma)[0]] = 0
    x = SAMPLES[anchor]
    taught = forward(w, x).z

    def gradient(now: Weights, step: Step) -> Weights:
        g = ce_gradient(now, step)
        if not anchor:
            return g
        f = forward(now, x)
        apart = f.z - taught
        if centred:
            apart -= apart.mean(1, keepdims=True)
        dz = 2 * beta / len(anchor) * apart * kept
        if plain:  # the slope of (‖·‖² / |T|² + 1e-6)^½
            size = (apart**2 * kept).sum() / len(anchor) ** 2
            dz /= 2 * len(anchor) * np.sqrt(size + 1e-6)
        if centred:  # the mean depends on every logit
            dz -= dz.mean(1, keepdims=True)
        dz += entropy * cross_entropy_slope(f.z, LABELS[anchor])
        return combine((1, g), (1, backward(now, f, dz)))

    return descend(w, steps_of(k, t), gradient, lr_at(t))


def own(k: int, c: int) -> NDArray[np.int64]:
    return PARTS[k][LABELS[PARTS[k]] == c]


SHARED = (1, 4, 11, 14)


@pytest.mark.parametrize(
    ("discard", "anchor_ce"), [("dominant", 0.0), ("own", 0.0), ("dominant", 0.4), ("own", 0.4)]
)
@pytest.mark.parametrize("distance", ["squared", "plain"])
@pytest.mark.parametrize("logits", ["raw", "centred"])
@pytest.mark.parametrize("anchors", ["both", "non-dominant", "missing"])
def test_fedka(anchors: str, logits: str, distance: str, discard: str, anchor_ce: float) -> None:
    """With γ = 0.2 the only non-dominant class, 2 at client 0, has one sample there: no chance is left."""
    beta, gamma, w = 0.3, 0.2, initial_weights()
    method = FedKA(
        beta=beta, gamma=gamma, anchors=anchors, shared=SHARED, logits=logits, distance=distance, discard=discard,
        anchor_ce=anchor_ce,
    )  # fmt: skip
    assert fedka_classes(0, gamma) == ([0, 1], [2], [3])
    for t, got in enumerate(run(method).rounds, start=1):
        local = []
        for k in CLIENTS:
            _, few, missing = fedka_classes(k, gamma)
            anchor = [int(own(k, c)[0]) for c in few if anchors != "missing"]
            anchor += [SHARED[c] for c in missing if anchors != "non-dominant"]
            how: dict[str, Any] = {"centred": logits == "centred", "plain": distance == "plain"}
            how |= {"own_logit": discard == "own", "entropy": anchor_ce}
            local.append(fedka_local(w, k, t, beta, gamma, anchor, **how))
        w = weighted(local)
        assert_round_equal(got, local, w)


@pytest.mark.parametrize("sampling", ["hard", "proficient"])
def test_fedka_picks_by_loss_under_the_sent_model(sampling: str) -> None:
    beta, gamma, w = 0.3, 0.3, initial_weights()
    got = run(
        FedKA(beta=beta, gamma=gamma, sampling=sampling, shared=SHARED, discard="dominant"), rounds=1
    ).rounds[0]
    local = []
    for k in CLIENTS:
        _, few, missing = fedka_classes(k, gamma)
        anchor = []
        for c in few:
            losses = -log_softmax(forward(w, SAMPLES[own(k, c)]).z)[:, c]
            anchor.append(int(own(k, c)[losses.argmax() if sampling == "hard" else losses.argmin()]))
        local.append(fedka_local(w, k, 1, beta, gamma, anchor + [SHARED[c] for c in missing]))
    assert_round_equal(got, local, weighted(local))


def test_fedka_keeps_a_random_mu_of_a_larger_anchor() -> None:
    """Which ones is chance; exactly one choice must explain what each client did."""
    beta, gamma, mu, w = 0.3, 0.2, 1, initial_weights()
    got = run(FedKA(beta=beta, gamma=gamma, mu=mu, shared=SHARED, discard="dominant"), rounds=1).rounds[0]
    for k in CLIENTS:
        _, few, missing = fedka_classes(k, gamma)
        whole = [int(own(k, c)[0]) for c in few] + [SHARED[c] for c in missing]
        assert len(whole) > mu
        explains = [
            all(np.allclose(got.clients[k].params[n], v, rtol=1e-9, atol=1e-9) for n, v in model.items())
            for chosen in combinations(whole, mu)
            for model in [fedka_local(w, k, 1, beta, gamma, list(chosen))]
        ]
        assert sum(explains) == 1


# Flashback ----------------------------------------------------------------------------------------------


def safe_ratio(a: Array, b: Array) -> Array:
    return np.divide(a, b, out=np.zeros(CLASSES), where=b > 0)


def weighted_kl_slope(z: Array, teacher: Array, a: Array) -> Array:
    """d/dz of mean_B Σ_c a_c p_c log(p_c / q_c), q = softmax(z): mean of q Σ(a p) - a p."""
    pull = a * softmax(teacher)
    return (softmax(z) * pull.sum(-1, keepdims=True) - pull) / len(z)


@pytest.mark.parametrize(
    ("half", "batch_size"), [("both", 3), ("both", 2), ("client", 3), ("server", 3), ("server", 1)]
)
def test_flashback(half: str, batch_size: int) -> None:
    """The three public samples make one, two or three batches."""
    chosen = settings(batch_size=batch_size)
    gamma, server_epochs, rounds = 0.4, 2, 4
    w = initial_weights()
    seen = np.zeros(CLASSES)  # π
    method = Flashback(gamma=gamma, server_epochs=server_epochs, half=half)
    for t, got in enumerate(run(method, rounds=rounds, batch_size=batch_size).rounds, start=1):
        local: list[Weights] = []
        for k in CLIENTS:
            a = safe_ratio(seen, COUNTS[k] + seen)

            def flash(f: Forward, step: Step, a: Array = a, t: int = t, sent: Weights = w) -> Any:
                if t == 1 or half == "server":
                    return 0.0, 0.0
                return weighted_kl_slope(f.z, forward(sent, step.x).z, a), 0.0

            local.append(descend(w, steps_of(k, t, chosen), with_term(flash), lr_at(t)))
        student = weighted(local)
        if half != "client":
            teachers = [(m, COUNTS[k].astype(float)) for k, m in enumerate(local)]
            teachers += [(w, seen)] if t > 1 else []
            total = seen + sum(counts for _, counts in teachers)

            def server_gradient(now: Weights, step: Step) -> Weights:
                f = forward(now, step.x)
                dz = cross_entropy_slope(f.z, step.y)
                for model, counts in teachers:
                    dz = dz + weighted_kl_slope(f.z, forward(model, step.x).z, safe_ratio(counts, total))
                return backward(now, f, dz)

            met = [
                order[i : i + batch_size]
                for order in (public_order(t, e) for e in range(server_epochs))
                for i in range(0, len(order), batch_size)
            ]
            steps = [Step(SAMPLES[ids], LABELS[ids], 0, False) for ids in met]
            student = descend(student, steps, server_gradient, lr_at(t))
        w = student
        if gamma * t <= 1:  # everybody has taken part t times
            seen = seen + gamma * COUNTS.sum(0)
        assert_round_equal(got, local, w)
        np.testing.assert_allclose(got.state["pi"], seen)
    np.testing.assert_allclose(seen, 0.8 * COUNTS.sum(0))  # each client counts for at most one of itself


# MOON ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("among", [{}, {"clients_per_round": 1, "seed": 1}], ids=["all", "one"])
@pytest.mark.parametrize("variant", ["original", "fa"])
def test_moon(variant: str, among: dict[str, int]) -> None:
    """With p = e^{s_g/τ} / (e^{s_g/τ} + e^{s_p/τ}): d(-log p)/ds_g = -(1 - p)/τ and d/ds_p = (1 - p)/τ."""
    mu, tau, w = 2.0, 0.5, initial_weights()
    first, chosen = w, settings(**among)
    previous: dict[int, Weights] = {}
    done = run(Moon(mu=mu, tau=tau, variant=variant), rounds=3, **among)
    for t, got in enumerate(done.rounds, start=1):
        local: dict[int, Weights] = {}
        for k in got.clients:
            before = previous.get(k, w if variant == "fa" else first)

            def contrast(f: Forward, step: Step, sent: Weights = w, old: Weights = before) -> Any:
                h_g, h_p = forward(sent, step.x).h, forward(old, step.x).h
                s_g, s_p = cosine(f.h, h_g), cosine(f.h, h_p)
                if variant == "fa":
                    s_g, s_p = s_g.mean(keepdims=True), s_p.mean(keepdims=True)
                missing = 1 - 1 / (1 + np.exp((s_p - s_g) / tau))
                slope = missing[:, None] * (cosine_slope(f.h, h_p) - cosine_slope(f.h, h_g))
                return 0.0, mu / tau * slope / len(step.y)

            local[k] = descend(w, steps_of(k, t, chosen), with_term(contrast), lr_at(t))
        w, previous = weighted_over(local), previous | local
        assert_locals_equal(got, local)
        assert_models_equal(got.params, w)
    assert len(previous) > 1


# FedDF --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("clip", "batch_size"), [(5.0, 128), (5.0, 2), (0.05, 128)])
def test_feddf(clip: float, batch_size: int) -> None:
    """The three public samples make one batch, or two."""
    epochs, lr, w = 3, 0.02, initial_weights()
    method = FedDF(epochs=epochs, lr=lr, clip=clip, batch_size=batch_size)
    for t, got in enumerate(run(method).rounds, start=1):
        local = [descend(w, steps_of(k, t), ce_gradient, lr_at(t)) for k in CLIENTS]
        w, adam = weighted(local), Adam(lr)
        met = [
            order[i : i + batch_size]
            for order in (public_order(t, e) for e in range(epochs))
            for i in range(0, len(order), batch_size)
        ]
        for step, ids in enumerate(met):
            x = SAMPLES[ids]
            taught = softmax(sum(forward(m, x).z for m in local) / len(local))
            f = forward(w, x)
            g = backward(w, f, (softmax(f.z) - taught) / len(x))
            length = np.sqrt(dot(g, g))
            assert (length > clip) == (clip < 1)
            adam.lr = lr * (1 + np.cos(np.pi * step / len(met))) / 2
            w = adam.step(w, combine((min(1.0, clip / length), g)))
        # Clipping divides by the norm + 1e-6 in torch.
        assert_round_equal(got, local, w, tolerance=1e-6 if clip < 1 else 1e-9)
