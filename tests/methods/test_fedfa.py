import numpy as np
import pytest
import torch
from small_world import begun, close, finite, learnt, net, prepared, rounds, same, world
from torch import Tensor
from torch.nn import functional as F

from holdfast.core.errors import HoldfastError
from holdfast.methods import FedAvg, FedFA
from holdfast.methods.base import Batch, Local
from holdfast.models.network import Output

FEDERATION = world([0] * 5 + [1], [1, 2, 2], [2])  # nobody has class 3


def batch_of(*labels: int) -> Batch:
    return Batch(torch.zeros(len(labels), 1, dtype=torch.float64), torch.tensor(labels), torch.tensor(0))


def said(features: Tensor) -> Output:
    return Output(features, torch.zeros(len(features), 4, dtype=torch.float64))


def test_without_pull_and_calibration_it_is_fedavg_to_the_bit() -> None:
    assert same(learnt(FedFA(mu=0, calibration="off"), FEDERATION), learnt(FedAvg(), FEDERATION))


@pytest.mark.parametrize("method", [FedFA(mu=0), FedFA(calibration="off")])
def test_either_alone_changes_the_model(method: FedFA) -> None:
    assert not close(learnt(method, FEDERATION, 1), learnt(FedAvg(), FEDERATION, 1))


def test_orthogonal_anchors_are_distinct_rows_of_the_identity() -> None:
    anchors = prepared(FedFA(), FEDERATION).loop(None).server.state["anchors"]  # type: ignore[arg-type]
    np.testing.assert_array_equal((anchors @ anchors.T).numpy(), np.eye(4))
    assert set(anchors.flatten().tolist()) == {0.0, 1.0}


@pytest.mark.parametrize(("init", "width"), [("random", 6), ("orthogonal", 3)])
def test_other_anchors_have_length_one(init: str, width: int) -> None:
    training = prepared(FedFA(anchor_init=init), FEDERATION, net(width=width))  # type: ignore[arg-type]
    anchors = training.loop(None).server.state["anchors"]  # type: ignore[arg-type]
    assert anchors.shape == (4, width)
    np.testing.assert_allclose(anchors.norm(dim=1).numpy(), 1)
    assert (anchors != 0).all()


@pytest.mark.parametrize("method", [FedFA(lam=1.0), FedFA(update_anchors=False)])
def test_frozen_anchors_stay_to_the_bit(method: FedFA) -> None:
    loop, _ = rounds(prepared(method, FEDERATION), 0)
    first = loop.server.state["anchors"].clone()
    for number in (1, 2):
        loop.round(number)
    assert torch.equal(loop.server.state["anchors"], first)


def test_only_classes_that_someone_trained_on_move() -> None:
    loop, _ = rounds(prepared(FedFA(), FEDERATION), 0)
    first = loop.server.state["anchors"].clone()
    loop.round(1)
    moved = (loop.server.state["anchors"] != first).any(1)
    assert moved.tolist() == [True, True, True, False]


@pytest.mark.parametrize(("means", "seen"), [("faithful", 0.5), ("per-class", 1.0)])
def test_a_class_absent_from_a_batch(means: str, seen: float) -> None:
    method = FedFA(class_means=means, calibration="off", lam=0.25)  # type: ignore[arg-type]
    client, carry = begun(prepared(method, FEDERATION))
    first = torch.full((3, 6), 4.0, dtype=torch.float64)
    params = client.global_params
    params, carry = method.after_step(params, said(first), batch_of(0, 0, 1), carry)
    params, carry = method.after_step(params, said(first[:2] * 2), batch_of(0, 0), carry)
    params, carry = method.after_epoch(params, carry)
    start = carry["anchors"]
    np.testing.assert_allclose(carry["updated"][0].numpy(), 0.25 * start[0] + 0.75 * 6)
    np.testing.assert_allclose(carry["updated"][1].numpy(), 0.25 * start[1] + 0.75 * 4 * seen)
    assert torch.equal(carry["updated"][2:], start[2:])
    assert not carry["sums"].any()
    assert not carry["batches"].any()
    assert all(params[name] is value for name, value in client.global_params.items())


@pytest.mark.parametrize("kind", ["code", "paper"])
def test_the_anchor_loss_of_two_classes_in_a_batch(kind: str) -> None:
    method = FedFA(mu=0.2, anchor_loss=kind)  # type: ignore[arg-type]
    client, carry = begun(prepared(method, FEDERATION))
    h = np.random.default_rng(0).normal(size=(3, 6))
    d = [np.sum((h[i] - carry["anchors"][c].numpy()) ** 2) for i, c in enumerate((0, 0, 2))]
    expected = 0.2 / 4 * ((d[0] + d[1]) / 2 + d[2]) if kind == "code" else 0.1 * sum(d) / 3
    got = method.loss(
        said(torch.from_numpy(h)), batch_of(0, 0, 2), carry, Local(client.global_params, client.global_params)
    )
    assert float(got) == pytest.approx(expected)  # type: ignore[arg-type]


def test_padding_counts_for_nothing() -> None:
    method = FedFA()
    client, carry = begun(prepared(method, FEDERATION))
    h = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    padded = batch_of(0, 1, 1, 0, 0)
    padded.mask = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    local = Local(client.global_params, client.global_params)
    whole = method.loss(said(h[:3]), batch_of(0, 1, 1), carry, local)
    assert torch.allclose(method.loss(said(h), padded, carry, local), whole)  # type: ignore[arg-type]
    _, kept = method.after_step(client.global_params, said(h), padded, carry)
    _, expected = method.after_step(client.global_params, said(h[:3]), batch_of(0, 1, 1), carry)
    assert torch.allclose(kept["sums"], expected["sums"])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("calibration", ["adam", "sgd"])
@pytest.mark.parametrize("each", ["step", "epoch"])
def test_calibration_is_the_optimiser_on_the_anchors(calibration: str, bias: bool, each: str) -> None:
    method = FedFA(calibration=calibration, calibrate_each=each, update_anchors=False)  # type: ignore[arg-type]
    training = prepared(method, FEDERATION, net(bias=bias), lr=0.3)
    client, carry = begun(training)
    names, anchors = training.context.network.head.names, carry["anchors"]
    ours = {name: client.global_params[name].clone().requires_grad_() for name in names}
    optimiser = (
        torch.optim.Adam(ours.values()) if calibration == "adam" else torch.optim.SGD(ours.values(), 0.3)
    )
    params = client.global_params
    for _ in range(3):
        optimiser.zero_grad()
        F.cross_entropy(F.linear(anchors, *ours.values()), torch.arange(4)).backward()
        optimiser.step()
        hooked, _ = method.after_step(params, said(anchors), batch_of(0, 1, 2, 3), carry)
        assert (hooked is not params) == (each == "step")
        if each == "step":
            params, carry = method.after_step(params, said(anchors), batch_of(0, 1, 2, 3), carry)
        else:
            params, carry = method.after_epoch(params, carry)
    for name, value in params.items():
        assert torch.allclose(
            value, ours[name] if name in ours else client.global_params[name], rtol=1e-9, atol=1e-12
        )


def test_warmup_rests_the_pull_in_round_one_only() -> None:
    training = prepared(FedFA(warmup=True), FEDERATION)
    assert float(begun(training, round=1)[1]["mu"]) == 0
    assert float(begun(training, round=2)[1]["mu"]) == 0.1
    assert close(learnt(FedFA(warmup=True), FEDERATION, 1), learnt(FedFA(mu=0), FEDERATION, 1))


@pytest.mark.parametrize("classes", [2, 4])
def test_one_participant_with_one_sample(classes: int) -> None:
    assert finite(learnt(FedFA(), world([1], [0], classes=classes), clients_per_round=1))


@pytest.mark.parametrize(
    "wrong",
    [
        {"mu": -0.1},
        {"lam": 1.2},
        {"lam": -0.1},
        {"anchor_loss": "both"},
        {"calibration": "lbfgs"},
        {"calibrate_each": "round"},
        {"anchor_init": "zeros"},
        {"class_means": "median"},
    ],
)
def test_bad_values_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(HoldfastError, match=f"fedfa: {next(iter(wrong))} is"):
        FedFA(**wrong)  # type: ignore[arg-type]
