"""Edge cases of the personalised methods: FedRep, FedALA, FedRoD, FedFomo, FedPAC."""

import numpy as np
import pytest
import torch
from small_world import begun, close, finite, learnt, net, prepared, rounds, same, world

from holdfast.core.errors import HoldfastError
from holdfast.methods import FedALA, FedAvg, FedFomo, FedPAC, FedRep, FedRoD, LocalTraining, Method
from holdfast.methods.base import Server, Upload
from holdfast.methods.fedpac import simplex_minimum
from holdfast.models.network import Output
from holdfast.training.execution import execute

MISSING = world([0] * 5 + [1, 1], [2], [1, 2, 2])  # nobody has class 3, one client has one sample
METHODS = [FedRep(), FedALA(), FedALA(top=9), FedRoD(), FedFomo(), FedFomo(models=1), FedPAC()]


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
@pytest.mark.parametrize("bias", [True, False])
def test_one_sample_clients_missing_classes_and_partial_rounds(method: Method, bias: bool) -> None:
    training = prepared(method, MISSING, net(bias=bias), clients_per_round=2, rounds=4, evaluate_locals=True)
    run = execute(training, {})
    assert finite(dict(run.model.state_dict()))
    for record in run.records:
        assert np.isfinite(record["loss"])  # generic
        assert len(record["local_in"]) == 2
        assert not record["incidents"]


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_two_classes_and_a_single_participant(method: Method) -> None:
    assert finite(learnt(method, world([0, 0, 1], [1], classes=2), 3, clients_per_round=1))


# Local training ---------------------------------------------------------------------------------------


def test_a_local_model_is_that_of_a_client_without_a_federation() -> None:
    together = prepared(LocalTraining(), MISSING, momentum=0.9, keep_optimizer=True)
    loop, client_states = rounds(together, 3)
    models = [client_states.get(k)["method"]["params"] for k in range(3)]
    alone = prepared(FedAvg(), world([0] * 5 + [1, 1]), momentum=0.9, keep_optimizer=True)
    assert close(models[0], rounds(alone, 3)[0].server.params)
    for name, tested in loop.server.params.items():
        mean = (7 * models[0][name] + models[1][name] + 3 * models[2][name]) / 11
        torch.testing.assert_close(tested, mean)


def test_local_training_sends_nothing() -> None:
    record = rounds(prepared(LocalTraining(), MISSING), 1)[0].round(2)
    assert (record["bytes_up"], record["bytes_down"]) == (0, 0)


# FedRep -----------------------------------------------------------------------------------------------


def test_fedrep_keeps_heads_apart_and_tests_their_mean() -> None:
    training = prepared(FedRep(), MISSING, momentum=0.9, weight_decay=0.1)
    loop, client_states = rounds(training, 2)
    heads = [client_states.get(k)["method"]["head"] for k in range(3)]
    for name in ("3.weight", "3.bias"):
        assert not torch.equal(heads[0][name], heads[2][name])
        mean = (7 * heads[0][name] + heads[1][name] + 3 * heads[2][name]) / 11
        torch.testing.assert_close(loop.server.params[name], mean)
        assert not training.method.is_shared(name, training.context)
    assert training.method.is_shared("1.bias", training.context)


def test_fedrep_needs_an_epoch_for_each_phase() -> None:
    with pytest.raises(HoldfastError, match="at least 3"):
        prepared(FedRep(body_epochs=2), MISSING, local_epochs=2)


def test_fedrep_newcomer_starts_with_the_initial_head() -> None:
    training = prepared(FedRep(), MISSING)
    client, _ = begun(training)
    received = {k: p + 1 for k, p in client.global_params.items()}
    started = training.method.initial_params(received, {}, training.method.init_client_state(client), client)
    initial = training.context.network.params
    assert same(started, received | {k: initial[k] for k in ("3.weight", "3.bias")})


# FedALA -----------------------------------------------------------------------------------------------


def test_fedala_is_fedavg_in_round_1() -> None:
    assert same(learnt(FedALA(), MISSING, 1), learnt(FedAvg(), MISSING, 1))
    assert not close(learnt(FedALA(), MISSING, 2), learnt(FedAvg(), MISSING, 2))


def test_fedala_that_does_not_learn_takes_the_global_model() -> None:
    assert same(learnt(FedALA(eta=0), MISSING, 3), learnt(FedAvg(), MISSING, 3))


def test_fedala_weights_stay_between_0_and_1_and_below_them_all_is_global() -> None:
    training = prepared(FedALA(eta=50.0), MISSING)
    _, client_states = rounds(training, 3)
    weights = client_states.get(0)["method"]["weights"]
    assert set(weights) == {"3.weight", "3.bias"}
    flat = torch.cat([w.flatten() for w in weights.values()])
    assert flat.min() >= 0
    assert flat.max() <= 1
    assert flat.min() < 1


# FedRoD -----------------------------------------------------------------------------------------------


def test_fedrod_client_predicts_with_both_heads() -> None:
    loop, client_states = rounds(prepared(FedRoD(), MISSING), 1)
    state = client_states.get(0)["method"]
    features = torch.rand(5, 6, generator=torch.Generator().manual_seed(0)).double()
    generic = torch.rand(5, 4, generator=torch.Generator().manual_seed(1)).double()
    said = loop.method.personal_logits(Output(features, generic), state).numpy()
    head = state["head"].numpy()
    np.testing.assert_allclose(said, generic.numpy() + features.numpy() @ head[:, :6].T + head[:, 6])
    assert not np.allclose(head[:, :6], loop.context.network.params["3.weight"].numpy())


def test_fedrod_of_a_client_with_one_class_learns_nothing_generic() -> None:
    # Under the balanced softmax a client with one class has no error to learn from.
    federation = world([2, 2, 2])
    loop, client_states = rounds(prepared(FedRoD(), federation), 2)
    initial = loop.context.network.params
    assert all(torch.allclose(p, initial[k], atol=1e-9) for k, p in loop.server.params.items())
    head = client_states.get(0)["method"]["head"]
    assert not torch.allclose(head[:, :6], initial["3.weight"])


# FedFomo ----------------------------------------------------------------------------------------------


def test_fedfomo_receives_nothing_in_round_1_and_the_nearest_later() -> None:
    training = prepared(FedFomo(models=2), MISSING)
    loop = rounds(training, 0)[0]
    assert training.method.broadcast_to(loop.server, 0) == {"models": {}}
    loop = rounds(training, 1)[0]
    assert list(training.method.broadcast_to(loop.server, 2)["models"]) == ["2", "0"]  # itself, then a tie


def test_fedfomo_keeps_its_model_where_nobody_helps() -> None:
    training = prepared(FedFomo(), MISSING)
    client, _ = begun(training)
    method, own = training.method, {k: p + 0.5 for k, p in client.global_params.items()}
    # The old model is no worse than the one received, which is the same.
    state, payload = {"own": own, "old": client.global_params}, {"models": {"1": client.global_params}}
    assert same(method.initial_params(client.global_params, payload, state, client), own)
    assert client.notes["fedfomo"]["gains"]["1"] == 0


def test_fedfomo_client_with_one_sample_holds_none_out() -> None:
    training = prepared(FedFomo(), MISSING)
    client, _ = begun(training, 1)
    assert len(client.heldout_y) == 0
    state = training.method.init_client_state(client)
    assert same(
        training.method.initial_params(
            client.global_params, {"models": {"0": client.global_params}}, state, client
        ),
        client.global_params,
    )
    held, _ = begun(training, 0)
    assert len(held.heldout_y) == 1
    assert held.samples == 6


def test_fedfomo_testing_one_held_out_sample_leaves_batch_norm_alone() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.BatchNorm1d(9), torch.nn.Linear(9, 4))
    training = prepared(FedFomo(), world([0, 1], [2, 2, 3]), model)
    network = training.context.network
    buffers = {k: b.clone() for k, b in network.buffers.items()}
    one = torch.ones(1, 1, 3, 3, dtype=torch.float64)
    network.apply(network.params, {k: b.clone() for k, b in buffers.items()}, one, train=True)
    network.apply(network.params, network.buffers, one)
    assert same(network.buffers, buffers)


def test_fedfomo_global_model_is_the_mean_of_all_stored() -> None:
    training = prepared(FedFomo(), MISSING, clients_per_round=1)
    loop, client_states = rounds(training, 6)
    kept = {k: client_states.get(k) for k in range(3) if client_states.get(k) is not None}
    assert len(kept) > 1
    trained = np.array([{0: 6, 1: 1, 2: 2}[k] for k in kept], float)  # less a fifth, at least one
    for name, mean in loop.server.params.items():
        models = np.stack([m["method"]["own"][name].numpy() for m in kept.values()])
        expected = np.tensordot(trained / trained.sum(), models, 1)
        np.testing.assert_allclose(mean.numpy(), expected, rtol=1e-9)


# FedPAC -----------------------------------------------------------------------------------------------


def test_fedpac_needs_an_epoch_for_each_phase() -> None:
    with pytest.raises(HoldfastError, match="at least 2"):
        prepared(FedPAC(), MISSING, local_epochs=1)


def test_fedpac_alone_keeps_its_own_head() -> None:
    loop, _ = rounds(prepared(FedPAC(), world([0, 1, 1, 2])), 1)
    head = loop.server.state["heads"]["0"]
    assert all(torch.equal(head[k], loop.server.params[k]) for k in head)


def test_fedpac_aligns_from_round_2_and_falls_back_to_own_prototypes() -> None:
    training = prepared(FedPAC(), MISSING)
    client, carry = begun(training)
    assert carry["lam"] == 0
    features = client.forward(client.global_params).features
    torch.testing.assert_close(carry["prototypes"][0], features[:5].mean(0))
    assert (carry["prototypes"][3] == 0).all()
    assert begun(training, round=2)[1]["lam"] == 1


def test_the_best_mixture_is_on_the_simplex_and_minimal() -> None:
    rng = np.random.default_rng(0)
    for n in (1, 2, 5, 9):
        root = rng.normal(size=(n, 4))
        q = root @ root.T + np.diag(rng.random(n) * 0.1)
        best = simplex_minimum(q)
        assert best.min() >= 0
        assert best.sum() == pytest.approx(1)
        others = rng.dirichlet(np.full(n, 0.3), 20_000)
        assert best @ q @ best <= np.einsum("ni,ij,nj->n", others, q, others).min() + 1e-12
        # At the minimum no admissible direction descends: (Qα)_i is least, and equal, where α_i > 0.
        slope = q @ best
        np.testing.assert_allclose(slope[best > 1e-9], slope.min(), rtol=1e-8)


def test_the_mixture_of_clients_that_do_not_differ() -> None:
    np.testing.assert_allclose(simplex_minimum(np.eye(3)), 1 / 3)
    assert simplex_minimum(np.zeros((3, 3))).sum() == pytest.approx(1)
    np.testing.assert_allclose(simplex_minimum(1e12 * np.diag([1.0, 1.0, 2.0])), [0.4, 0.4, 0.2])


def test_fedpac_leaves_out_tiny_shares_and_the_others_still_sum_to_one() -> None:
    context = prepared(FedPAC(), MISSING).context
    feature, label = torch.zeros(4, 6, dtype=torch.float64), torch.ones(4, dtype=torch.float64)

    def upload(client: int, variance: float) -> Upload:
        """With equal means α is proportional to 1/v, and every head is a constant."""
        params = {name: torch.full_like(p, float(client)) for name, p in context.network.params.items()}
        sums = {"means": feature, "features": feature, "labels": label, "variance": context.scalar(variance)}
        return Upload(client, 1.0, params, {}, sums)

    uploads = [upload(1, 1.0), upload(2, 1.0), upload(10**6, 5000.0)]  # the last would have a share of 1e-4
    server = Server(context.network.params, {}, FedPAC().init_server_state(context), 1)
    state = FedPAC().update(server, {"features": feature, "labels": label}, uploads, context)
    for head in state["heads"].values():
        for tensor in head.values():
            torch.testing.assert_close(tensor, torch.full_like(tensor, 1.5), rtol=1e-9, atol=0)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (FedRep, {"body_epochs": 0}),
        (FedALA, {"top": 0}),
        (FedALA, {"sampled": 0}),
        (FedALA, {"eta": -1}),
        (FedFomo, {"models": 0}),
        (FedPAC, {"lam": -1}),
        (FedPAC, {"head_lr": 0}),
    ],
)
def test_options_out_of_range_are_refused(kind: type[Method], options: dict[str, object]) -> None:
    with pytest.raises(HoldfastError, match=next(iter(options))):
        kind(**options)
