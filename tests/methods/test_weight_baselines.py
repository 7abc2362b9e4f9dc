"""Edge cases of the baselines that act on weights: FedNova, FedCurv, FedDyn, FedReg, FedDF."""

from typing import Any

import numpy as np
import pytest
import torch
from small_world import begun, close, finite, learnt, net, prepared, rounds, same, world
from torch.nn import functional as F

from holdfast.core.errors import HoldfastError
from holdfast.core.random import generator
from holdfast.data.preprocess import Preprocess
from holdfast.engine.clients import Broadcast, Job
from holdfast.methods import FedAvg, FedCurv, FedDF, FedDyn, FedNova, FedReg, Method, fedcurv

UNEQUAL = world([0] * 5 + [1, 1], [2], [1, 2, 2], public=[0, 1, 2, 3, 3])  # class 3 is only public
ALONE = world([0, 1, 1, 2, 3])
METHODS = [
    FedNova(),
    FedNova(mu=0.1),
    FedNova(variant="ntd"),
    FedCurv(lam=0.1),
    FedCurv(lam=0.1, variant="ntd"),
    FedDyn(alpha=0.1),
    FedDyn(alpha=0.1, variant="official"),
    FedDyn(alpha=0.1, variant="ntd"),
    FedDyn(alpha=0.1, variant="fa"),
    FedReg(),
    FedDF(),
]


@pytest.mark.parametrize("method", METHODS, ids=lambda m: f"{m.name}-{getattr(m, 'variant', '')}")
def test_one_sample_clients_missing_classes_and_partial_rounds(method: Method) -> None:
    assert finite(learnt(method, UNEQUAL, 3, clients_per_round=2, momentum=0.9))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fednova_of_one_client_is_fedavg_to_rounding(momentum: float) -> None:
    one, other = (learnt(m, ALONE, 2, momentum=momentum) for m in (FedNova(), FedAvg()))
    assert close(one, other)


@pytest.mark.parametrize(("mu", "momentum"), [(0.0, 0.9), (0.7, 0.0), (0.7, 0.9)])
def test_fednova_distance_is_how_far_unit_gradients_move(mu: float, momentum: float) -> None:
    client, _ = begun(prepared(FedNova(mu=mu), UNEQUAL, momentum=momentum))
    w = torch.zeros((), dtype=torch.float64, requires_grad=True)
    sgd = torch.optim.SGD([w], client.lr, momentum)
    for _ in range(client.steps):
        sgd.zero_grad()
        (w + mu / 2 * w**2).backward()
        sgd.step()
    assert FedNova(mu=mu).distance(client) == pytest.approx(-w.item() / client.lr, rel=1e-12)


def test_fednova_averages_batch_norm_statistics_like_fedavg() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.BatchNorm1d(9), torch.nn.Linear(9, 4))
    federation = world([0, 0, 1, 1, 2, 3], [1, 2])
    one, other = (rounds(prepared(m, federation, model), 1)[0].server.buffers for m in (FedNova(), FedAvg()))
    assert same(one, other)


def test_fedcurv_has_no_penalty_in_round_1_nor_ever_for_a_single_client() -> None:
    assert same(learnt(FedCurv(lam=10), UNEQUAL, 1), learnt(FedAvg(), UNEQUAL, 1))
    assert not close(learnt(FedCurv(lam=10), UNEQUAL, 2), learnt(FedAvg(), UNEQUAL, 2))
    one, other = learnt(FedCurv(lam=10), ALONE, 3), learnt(FedAvg(), ALONE, 3)
    assert all(torch.allclose(one[k], other[k], rtol=1e-9) for k in one)


def test_fedcurv_server_holds_the_sum_of_what_clients_remember() -> None:
    loop, client_states = rounds(prepared(FedCurv(lam=0.1), UNEQUAL, clients_per_round=2), 4)
    for part in ("u", "v"):
        held = [client_states.get(k) for k in range(3)]
        for name, total in loop.server.state[part].items():
            parts = [m["method"][part][name] for m in held if m is not None]
            torch.testing.assert_close(total, torch.stack(parts).sum(0), rtol=1e-10, atol=1e-14)
            assert (total >= -1e-12).all() or part == "v"


@pytest.mark.parametrize("variant", ["original", "ntd"])
def test_fedcurv_does_not_depend_on_how_many_gradients_fit_in_memory(variant: Any, monkeypatch: Any) -> None:
    federation = world([0, 1, 2, 3] * 4, [1] * 5)  # for ntd five whole batches and one of one sample
    all_at_once = rounds(prepared(FedCurv(variant=variant), federation), 1)[0].server.state["u"]
    monkeypatch.setattr(fedcurv, "PER_SAMPLE_VALUES", 200)  # of a network of 88 weights two at once
    assert close(rounds(prepared(FedCurv(variant=variant), federation), 1)[0].server.state["u"], all_at_once)


@pytest.mark.parametrize(("batch_size", "looked_at"), [(50, 550), (7, 504), (501, 501)])
def test_fedcurv_as_in_fedntd_stops_once_it_has_seen_more_than_500_samples(
    batch_size: int, looked_at: int
) -> None:
    """The client holds its samples class by class; batches are mixed, and no class is left out."""
    by_class = np.repeat(range(4), (200, 200, 200, 20))
    training = prepared(FedCurv(lam=0.1, variant="ntd"), world(by_class), batch_size=batch_size)
    loop, client_states = rounds(training, 1)
    client, _ = begun(training)
    order = generator(0, "fisher batches", 1, 0).permutation(620)[:looked_at]
    assert set(by_class[order]) == {0, 1, 2, 3}
    network = net().double()
    network.load_state_dict(loop.server.params)  # of the only client
    batches = range(0, looked_at, batch_size)
    expected = [torch.zeros_like(p) for p in network.parameters()]
    for start in batches:
        chosen = torch.from_numpy(order[start : start + batch_size])
        loss = F.cross_entropy(network(client.x[chosen]), client.y[chosen])
        for total, g in zip(expected, torch.autograd.grad(loss, list(network.parameters())), strict=True):
            total += g**2 / len(batches)
    remembered = client_states.get(0)
    assert remembered is not None
    torch.testing.assert_close(list(remembered["method"]["u"].values()), expected)


def test_feddyn_server_sees_all_clients_not_only_participants() -> None:
    loop, _ = rounds(prepared(FedDyn(alpha=0.1), UNEQUAL, clients_per_round=1), 1)
    initial = loop.context.network.params
    for name, h in loop.server.state["h"].items():
        # w = w_k - h/α and h = -(α/3)(w_k - w_0), so w - w_0 = (4/3)(w_k - w_0) and h = -(α/4)(w - w_0).
        torch.testing.assert_close(h, -0.1 / 4 * (loop.server.params[name] - initial[name]))


def test_feddyn_official_tests_the_mean_and_sends_another_model() -> None:
    loop, _ = rounds(prepared(FedDyn(alpha=0.1, variant="official"), UNEQUAL), 2)
    tested = loop.method.eval_params(loop.server)
    assert not close(tested, loop.server.params)


def test_feddyn_fa_is_fedavg_until_a_client_returns() -> None:
    assert same(learnt(FedDyn(variant="fa"), UNEQUAL, 1), learnt(FedAvg(), UNEQUAL, 1))
    assert not close(learnt(FedDyn(alpha=1, variant="fa"), UNEQUAL, 2), learnt(FedAvg(), UNEQUAL, 2))


def test_fedreg_generates_from_plain_samples_and_stays_in_range() -> None:
    preprocess = Preprocess(mean=(0.5,), std=(0.25,), flip=True)
    federation = world([0, 1, 2, 3, 3], preprocess=preprocess)
    method = FedReg(eta_s=1.0)
    client, _ = begun(prepared(method, federation))
    tables = method.tables({}, {}, client)
    assert tables["pseudo"].min() >= -2
    assert tables["pseudo"].max() <= 2
    assert (tables["perturbed"] - client.x).abs().max() <= 10 * 1.0 / 100 + 1e-9
    own = F.cross_entropy(client.forward(client.global_params).logits, client.y)
    assert F.cross_entropy(client.forward(client.global_params, tables["pseudo"]).logits, client.y) > own
    torch.testing.assert_close(tables["soft"].sum(-1), torch.ones(5, dtype=torch.float64))


@pytest.mark.parametrize("method", [FedReg(), FedDyn(), FedDyn(variant="official")], ids=lambda m: m.name)
def test_clients_count_alike(method: Method) -> None:
    training = prepared(method, UNEQUAL)
    loop, _ = rounds(training, 0)
    sent = Broadcast(1, loop.server.params, loop.server.buffers, method.broadcast(loop.server))
    jobs = [Job(k, UNEQUAL.client(k)) for k in range(3)]
    assert [result.weight for result in training.engine.train(sent, jobs)] == [1, 1, 1]


def test_feddf_without_epochs_is_fedavg_and_needs_no_labels() -> None:
    assert same(learnt(FedDF(epochs=0), UNEQUAL), learnt(FedAvg(), UNEQUAL))
    relabelled = world([0] * 5 + [1, 1], [2], [1, 2, 2], public=[0, 1, 2, 3, 3])
    relabelled.dataset.y_train[relabelled.public] = 0
    assert same(learnt(FedDF(), UNEQUAL), learnt(FedDF(), relabelled))


def test_feddf_of_one_teacher_stays_where_it_agrees() -> None:
    one, other = (learnt(m, world([0, 1, 1, 2, 3], public=[0, 1]), 1) for m in (FedDF(epochs=1), FedAvg()))
    # The teacher is the student: KL is 0 and so is its gradient, up to what Adam makes of rounding.
    assert all(torch.allclose(one[k], other[k], atol=3e-3) for k in one)


def test_feddf_student_learns_in_training_mode() -> None:
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.BatchNorm1d(9), torch.nn.Linear(9, 4))
    federation = world([0, 1, 2], [1, 2, 3], public=[0, 1, 2, 3, 0, 1])
    loop, _ = rounds(prepared(FedDF(epochs=4, batch_size=3), federation, model), 1)
    # a batch in each of a client's two epochs, then two in each of the server's four
    assert int(loop.server.buffers["1.num_batches_tracked"]) == 2 + 4 * 2


def test_feddf_refuses_a_federation_without_public_data() -> None:
    with pytest.raises(HoldfastError, match="public"):
        prepared(FedDF(), ALONE)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (FedNova, {"mu": -1}),
        (FedNova, {"variant": "fa"}),
        (FedCurv, {"lam": -0.1}),
        (FedCurv, {"variant": "x"}),
        (FedDyn, {"alpha": 0}),
        (FedDyn, {"variant": "x"}),
        (FedReg, {"gamma": 1.1}),
        (FedReg, {"eta_s": -1}),
        (FedReg, {"steps": 0}),
        (FedDF, {"epochs": -1}),
        (FedDF, {"lr": 0}),
        (FedDF, {"batch_size": 0}),
        (FedDF, {"clip": 0}),
    ],
)
def test_options_out_of_range_are_refused(kind: type[Method], options: dict[str, object]) -> None:
    with pytest.raises(HoldfastError, match=next(iter(options))):
        kind(**options)


def test_a_model_without_bias_is_fine() -> None:
    for method in METHODS:
        loop, _ = rounds(prepared(method, UNEQUAL, net(bias=False)), 1)
        assert np.isfinite(loop.evaluate_final()["loss"])
