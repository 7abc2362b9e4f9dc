"""Edge cases of the baselines that act on features: MOON, FedProc, FedProto, CReFF, CCVR."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from small_world import begun, close, finite, learnt, net, prepared, rounds, same, world
from torch.nn import functional as F

from holdfast.core.errors import HoldfastError
from holdfast.data.schedules import GlobalEpochs
from holdfast.engine.clients import Job
from holdfast.methods import CCVR, CReFF, FedAvg, FedProc, FedProto, Method, Moon, Stack
from holdfast.methods.base import Batch, Local
from holdfast.models.network import Output
from holdfast.training.execution import execute

MISSING = world([0] * 5 + [1, 1], [2], [1, 2, 2])  # nobody has class 3
LIGHT = {"features": 3, "match_steps": 2, "epochs": 2}
METHODS = [
    Moon(),
    Moon(variant="fa"),
    FedProc(),
    FedProc(variant="official"),
    FedProc(variant="fa"),
    FedProto(),
    CReFF(**LIGHT),
    CCVR(),
]


def batch_of(*labels: int, epoch: int = 0) -> Batch:
    return Batch(torch.zeros(len(labels), 1, dtype=torch.float64), torch.tensor(labels), torch.tensor(epoch))


def said(features: torch.Tensor) -> Output:
    return Output(features, torch.zeros(len(features), 4, dtype=torch.float64))


@pytest.mark.parametrize("method", METHODS, ids=lambda m: f"{m.name}-{getattr(m, 'variant', '')}")
@pytest.mark.parametrize("bias", [True, False])
def test_one_sample_clients_missing_classes_and_partial_rounds(method: Method, bias: bool) -> None:
    training = prepared(method, MISSING, net(bias=bias), clients_per_round=2, rounds=3)
    run = execute(training, {})
    assert np.isfinite(run.records[-1]["loss"])
    assert finite(dict(run.model.state_dict()))


@pytest.mark.parametrize("method", METHODS, ids=lambda m: f"{m.name}-{getattr(m, 'variant', '')}")
def test_two_classes(method: Method) -> None:
    assert finite(learnt(method, world([0, 0, 1], [1], classes=2), 2))


# MOON -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["original", "fa"])
def test_moon_has_no_effect_in_round_1(variant: str) -> None:
    one, other = learnt(Moon(mu=5, variant=variant), MISSING, 1), learnt(FedAvg(), MISSING, 1)
    assert close(one, other)
    assert not close(learnt(Moon(mu=5, variant=variant), MISSING, 2), learnt(FedAvg(), MISSING, 2))


def test_moon_compares_a_newcomer_with_the_initial_model() -> None:
    training = prepared(Moon(), MISSING)
    client, _ = begun(training)
    client.global_params = {k: p + 1 for k, p in client.global_params.items()}
    assert same(Moon().init_client_state(client)["previous"], training.context.network.params)
    assert same(Moon(variant="fa").init_client_state(client)["previous"], client.global_params)


def test_moon_of_dead_features_is_finite() -> None:
    features = torch.zeros(2, 6, dtype=torch.float64, requires_grad=True)
    batch = batch_of(0, 1)
    batch.teacher = {name: said(torch.zeros(2, 6, dtype=torch.float64)) for name in ("global", "previous")}
    loss = Moon().loss(said(features), batch, {}, Local({}, {}))
    assert loss is not None
    assert loss.item() == pytest.approx(np.log(2))
    assert torch.autograd.grad(loss, features)[0].isfinite().all()


# FedProc ----------------------------------------------------------------------------------------------


def test_fedproc_starts_with_cross_entropy_alone() -> None:
    for variant in ("original", "official"):
        assert close(learnt(FedProc(variant=variant), MISSING, 1), learnt(FedAvg(), MISSING, 1))
    assert not close(learnt(FedProc(variant="fa"), MISSING, 1), learnt(FedAvg(), MISSING, 1))


def test_fedproc_ends_with_cross_entropy_alone() -> None:
    _, carry = begun(prepared(FedProc(), MISSING, rounds=4), round=4)
    assert carry["alpha"] == 1
    _, carry = begun(prepared(FedProc(), MISSING, rounds=4), round=3)
    assert carry["alpha"] == 0.75
    _, carry = begun(prepared(FedProc(variant="official"), MISSING, rounds=400), round=51)
    assert carry["alpha"] == 0.5
    _, carry = begun(prepared(FedProc(variant="official"), MISSING, rounds=400), round=300)
    assert carry["alpha"] == 1


def test_fedproc_leaves_classes_without_prototype_out() -> None:
    prototypes = torch.eye(4, 6, dtype=torch.float64)
    carry = {
        "prototypes": prototypes,
        "known": torch.tensor([1.0, 1, 0, 0]).double(),
        "alpha": torch.tensor(0.0).double(),
    }
    features = torch.randn(3, 6, generator=torch.Generator().manual_seed(0)).double().requires_grad_()
    loss = FedProc().loss(said(features), batch_of(0, 1, 3), carry, Local({}, {}))
    h = F.normalize(features.detach(), dim=-1).numpy() / 0.5
    first, second = (-h[i, i] + np.log(np.exp(h[i, 0]) + np.exp(h[i, 1])) for i in (0, 1))
    assert loss.item() == pytest.approx((first + second) / 3)  # the third sample's class has no prototype
    assert (torch.autograd.grad(loss, features)[0][2] == 0).all()


def test_fedproc_prototypes_of_unseen_classes_do_not_appear_and_of_absent_ones_stay() -> None:
    training = prepared(FedProc(), MISSING)
    loop, _ = rounds(training, 1)
    assert loop.server.state["known"].tolist() == [1, 1, 1, 0]
    before = loop.server.state["prototypes"].clone()
    labels = torch.tensor([0.0, 2, 0, 0]).double()
    sums = {"labels": labels, "features": 2 * torch.ones(4, 6).double()}
    after = training.method.update(loop.server, sums, [], training.context)["prototypes"]
    assert torch.equal(after[[0, 2, 3]], before[[0, 2, 3]])
    torch.testing.assert_close(after[1], 0.5 * before[1] + 0.5)


def test_fedproc_fa_keeps_its_anchors() -> None:
    loop, _ = rounds(prepared(FedProc(variant="fa"), MISSING), 2)
    anchors = loop.server.state["prototypes"]
    assert torch.equal(anchors @ anchors.T, torch.eye(4, dtype=torch.float64))
    assert torch.equal(anchors, loop.method.init_server_state(loop.context)["prototypes"])


# FedProto ---------------------------------------------------------------------------------------------


def test_fedproto_clients_train_their_own_models() -> None:
    loop, client_states = rounds(prepared(FedProto(lam=0), MISSING), 2)
    models = [client_states.get(k)["method"]["params"] for k in range(3)]
    assert close(models[0], learnt(FedAvg(), world([0] * 5 + [1, 1]), 2))  # as if it were alone
    for name, mean in loop.server.params.items():
        torch.testing.assert_close(mean, torch.stack([m[name] for m in models]).mean(0))
        assert not torch.equal(models[0][name], models[1][name])


def test_fedproto_predicts_only_classes_it_knows() -> None:
    loop, client_states = rounds(prepared(FedProto(), MISSING), 1)
    out = said(torch.rand(50, 6, generator=torch.Generator().manual_seed(0)).double())
    assert 3 not in loop.method.global_logits(out, loop.server).argmax(-1)
    own = loop.method.personal_logits(out, client_states.get(1)["method"])
    assert (own.argmax(-1) == 2).all()
    assert own.isfinite().all()


def test_fedproto_puts_unknown_classes_behind_the_farthest_known() -> None:
    features = torch.tensor([[3.0, 4.0], [0.0, 0.0]])  # class 0, at the origin, is nearest but unknown
    prototypes = torch.tensor([[0.0, 0.0], [6.0, 8.0], [-30.0, -40.0]])
    state = {"prototypes": prototypes, "known": torch.tensor([0.0, 1.0, 1.0])}
    scores = FedProto().personal_logits(Output(features, torch.zeros(2, 3)), state)
    torch.testing.assert_close(scores[:, 1:], -torch.tensor([[25.0, 55.0**2], [100.0, 50.0**2]]) / 2)
    assert (scores[:, 0] < scores[:, 2]).all()


def test_fedproto_global_prototypes_are_unweighted_means_of_holders() -> None:
    loop, client_states = rounds(prepared(FedProto(), MISSING), 1)
    held = [client_states.get(k)["method"]["prototypes"] for k in range(3)]
    prototypes = loop.server.state["prototypes"]
    torch.testing.assert_close(prototypes[1], (held[0][1] + held[2][1]) / 2)
    torch.testing.assert_close(prototypes[2], (held[1][2] + held[2][2]) / 2)
    torch.testing.assert_close(prototypes[0], held[0][0])
    assert (prototypes[3] == 0).all()


@pytest.mark.parametrize("seed", [0, 1, 6])
def test_fedproto_prototypes_are_means_over_what_was_visited(seed: int) -> None:
    """Seven samples in batches of three: drop_last leaves one out, with seed 6 the only one of class 2."""
    federation = world([0, 0, 0, 0, 1, 1, 2])
    training = prepared(FedProto(), federation, local_epochs=1, lr=1e-15, drop_last=True, seed=seed)
    loop, client_states = rounds(training, 1)
    visited = loop.runner.plan(Job(0, federation.client(0)), 1).plan.order
    client, _ = begun(training)
    h, y = client.forward(client.global_params).features.numpy()[visited], client.labels[visited]
    assert len(visited) == 6
    for told in (loop.server.state, client_states.get(0)["method"]):
        assert told["known"].tolist() == [float(c in y) for c in range(4)]
        for c in np.unique(y):
            np.testing.assert_allclose(told["prototypes"][c], h[y == c].mean(0))


def test_fedproto_still_knows_the_classes_of_earlier_tasks() -> None:
    dealt = world([0, 0, 1, 2, 3, 3], [2, 3, 3, 0, 2])  # classes 0 and 1, then 2 and 3; 2 and 3, then 0 and 2
    stream = replace(dealt, offsets=np.array([0, 3, 6, 9, 11]), stages=2, schedule=GlobalEpochs(2))
    earlier, now = (rounds(prepared(FedProto(), stream, rounds=2), n)[1].get(0)["method"] for n in (1, 2))
    assert earlier["known"].tolist() == [1, 1, 0, 0]
    assert now["known"].tolist() == [1, 1, 1, 1]
    assert torch.equal(now["prototypes"][:2], earlier["prototypes"][:2])
    assert FedProto().personal_logits(said(now["prototypes"]), now).argmax(-1).tolist() == [0, 1, 2, 3]


# CReFF ------------------------------------------------------------------------------------------------


def test_creff_trains_as_fedavg_and_tests_another_classifier() -> None:
    loop, _ = rounds(prepared(CReFF(**LIGHT), MISSING), 2)
    assert same(loop.server.params, learnt(FedAvg(), MISSING, 2))
    tested = loop.method.eval_params(loop.server)
    assert [k for k in tested if not torch.equal(tested[k], loop.server.params[k])] == ["3.weight", "3.bias"]


def test_creff_features_of_a_class_nobody_holds_rest() -> None:
    training = prepared(CReFF(**LIGHT), MISSING)
    before = training.method.init_server_state(training.context)["features"]
    after = rounds(training, 1)[0].server.state["features"]
    assert torch.equal(after[3], before[3])
    assert not torch.equal(after[0], before[0])


def test_creff_matching_brings_gradients_together() -> None:
    def mismatch(steps: int) -> float:
        training = prepared(CReFF(features=5, match_steps=steps, epochs=0), world([0, 0, 1, 1, 2, 3, 3]))
        loop, _ = rounds(training, 1)
        method, context = training.method, training.context
        client, _ = begun(training)
        psi = torch.cat(
            [
                v if v.ndim == 2 else v[:, None]
                for v in method.init_server_state(context)["classifier"].values()
            ],
            1,
        )
        real = client.notes["creff"]
        apart = 0.0
        for c, features in enumerate(loop.server.state["features"]):
            h = torch.cat([features, torch.ones(5, 1).double()], 1)
            error = (h @ psi.T).softmax(-1) - torch.eye(4).double()[c]
            made = error.T @ h / 5
            apart += float((1 - F.cosine_similarity(made[:, :-1], real[c][:, :-1])).sum())
        return apart

    assert mismatch(100) < 0.5 * mismatch(0)


# CCVR -------------------------------------------------------------------------------------------------


def test_ccvr_is_fedavg_but_for_the_classifier_at_the_end() -> None:
    training, plain = (execute(prepared(m, MISSING), {}) for m in (CCVR(), FedAvg()))
    ours, theirs = training.model.state_dict(), plain.model.state_dict()
    assert [k for k in ours if not torch.equal(ours[k], theirs[k])] == ["3.weight", "3.bias"]
    none = execute(prepared(CCVR(epochs=0), MISSING), {}).model.state_dict()
    assert all(torch.equal(none[k], theirs[k]) for k in none)


def test_ccvr_class_with_one_sample_or_none() -> None:
    method, training = CCVR(draws=50), prepared(CCVR(), world([0, 0, 0, 1]))
    client, _ = begun(training)
    sums = method.final_statistics(client.global_params, client)
    assert sums["count"].tolist() == [3, 1, 0, 0]
    drawn = method._draw(1, sums["count"][1], sums["sum"][1], sums["moment"][1], training.context)
    spread = (drawn - client.forward(client.global_params).features[3]).abs().max()
    assert 0 < spread < 0.01  # the covariance of one sample is 1e-6 I
    loop = rounds(training, 1)[0]
    assert finite(method.finalize(loop.server, sums, training.context).params)


def test_ccvr_union_of_clients_has_the_moments_of_all_their_samples() -> None:
    training = prepared(CCVR(draws=20_000), world([0, 0, 0, 0], [0, 0, 0], [0]))
    clients = [begun(training, k)[0] for k in range(3)]
    sums = [training.method.final_statistics(c.global_params, c) for c in clients]
    total = {k: sum(s[k] for s in sums) for k in sums[0]}
    features = torch.cat([c.forward(c.global_params).features for c in clients]).numpy()
    drawn = training.method._draw(
        0, *(total[k][0] for k in ("count", "sum", "moment")), training.context
    ).numpy()
    scale = np.cov(features.T).max()
    np.testing.assert_allclose(drawn.mean(0), features.mean(0), atol=0.05 * np.sqrt(scale))
    np.testing.assert_allclose(np.cov(drawn.T), np.cov(features.T), atol=0.05 * scale)


def test_ccvr_on_top_of_another_method() -> None:
    run = execute(prepared(Stack(FedProc(), CCVR()), MISSING), {})
    assert np.isfinite(run.records[-1]["loss"])


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Moon, {"mu": -1}),
        (Moon, {"tau": 0}),
        (Moon, {"variant": "ntd"}),
        (FedProc, {"tau": 0}),
        (FedProc, {"lam": 1.5}),
        (FedProc, {"variant": "x"}),
        (FedProto, {"lam": -1}),
        (CReFF, {"features": 0}),
        (CReFF, {"images": 0}),
        (CReFF, {"match_lr": 0}),
        (CReFF, {"epochs": -1}),
        (CCVR, {"draws": 0}),
        (CCVR, {"lr": 0}),
    ],
)
def test_options_out_of_range_are_refused(kind: type[Method], options: dict[str, object]) -> None:
    with pytest.raises(HoldfastError, match=next(iter(options))):
        kind(**options)
