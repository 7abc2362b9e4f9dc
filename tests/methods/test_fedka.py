import numpy as np
import pytest
import torch
from small_world import begun, close, finite, learnt, net, prepared, rounds, same, world

from holdfast.core.errors import HoldfastError
from holdfast.methods import FedAvg, FedKA
from holdfast.methods.base import Batch, Local
from holdfast.models.network import Output

SKEWED = world([0] * 17 + [1] * 2 + [2], [1, 2, 3] * 3, [3])  # client 0: 85 %, 10 %, 5 %, none of class 3


def test_without_strength_it_is_fedavg_to_the_bit() -> None:
    assert same(learnt(FedKA(beta=0), SKEWED), learnt(FedAvg(), SKEWED))
    loop, _ = rounds(prepared(FedKA(beta=0), world([0, 1], [2])), 1)  # nobody holds class 3
    assert loop.server.state == {}


def test_with_strength_it_is_not() -> None:
    assert not close(learnt(FedKA(beta=0.5), SKEWED), learnt(FedAvg(), SKEWED))


def test_an_empty_anchor_adds_nothing() -> None:
    everything = world([0, 1, 2, 3] * 2, [3, 2, 1, 0])
    _, carry = begun(prepared(FedKA(beta=0.5, gamma=0.2), everything))
    assert not carry["counts"].any()
    assert close(learnt(FedKA(beta=0.5, gamma=0.2), everything), learnt(FedAvg(), everything))


def test_dominant_columns_are_left_out_and_missing_classes_borrowed() -> None:
    training = prepared(FedKA(gamma=0.1, discard="dominant"), SKEWED)
    client, carry = begun(training)
    # Class 1 has exactly the share gamma, so it is dominant; class 2 is not, class 3 is missing.
    expected = np.zeros((4, 4))
    expected[:2, 2:] = 1 / 2
    np.testing.assert_allclose(carry["counts"].numpy(), expected)
    assert torch.equal(carry["anchor"][0], client.x[19])
    shared = training.context.one_of_each[3]
    assert SKEWED.dataset.y_train[shared] == 3
    assert torch.equal(carry["anchor"][1], training.data.read(np.array([shared]))[0])


@pytest.mark.parametrize(("anchors", "kept"), [("both", 2), ("non-dominant", 1), ("missing", 1)])
def test_which_classes_the_anchor_is_built_from(anchors: str, kept: int) -> None:
    method = FedKA(gamma=0.1, anchors=anchors, discard="dominant")  # type: ignore[arg-type]
    _, carry = begun(prepared(method, SKEWED))
    assert (carry["counts"].sum(1) > 0).sum() == kept
    assert torch.equal(carry["counts"].any(0), torch.tensor([False, False, True, True]))


def test_the_anchor_is_cut_to_mu_anew_each_round() -> None:
    training = prepared(
        FedKA(mu=2, gamma=1.0, discard="dominant"), world([0, 0, 1, 2], range(12), classes=12)
    )
    anchors = [begun(training, round=round)[1] for round in (1, 2)]
    for carry in anchors:
        assert carry["counts"].shape == (2, 12)
        np.testing.assert_allclose(carry["counts"].numpy(), 1 / 2)
    assert not torch.equal(anchors[0]["anchor"], anchors[1]["anchor"])


@pytest.mark.parametrize("sampling", ["hard", "proficient"])
def test_hard_and_proficient_samples(sampling: str) -> None:
    method = FedKA(gamma=0.5, sampling=sampling)  # type: ignore[arg-type]
    training = prepared(method, world([0] * 20 + [1] * 8, [2, 3]))
    client, carry = begun(training)
    logits = training.context.network.module().double()(client.x[20:]).detach().numpy()
    losses = np.log(np.exp(logits).sum(1)) - logits[:, 1]
    best = losses.argmax() if sampling == "hard" else losses.argmin()
    assert torch.equal(carry["anchor"][0], client.x[20 + int(best)])


def test_the_term_is_zero_where_training_starts_and_as_the_equation_says_elsewhere() -> None:
    method = FedKA(beta=0.3, gamma=0.1, discard="dominant")
    training = prepared(method, SKEWED)
    client, carry = begun(training)
    start = client.forward(client.global_params, carry["anchor"])
    moved = start.logits + torch.tensor([1.0, 2.0, 3.0, -4.0])
    batch = Batch(client.x[:3], client.y[:3], torch.tensor(0))
    nothing = Output(start.features[:0], start.logits[:0])
    at_start = method.loss(
        nothing._replace(extra=start), batch, carry, Local(client.global_params, client.global_params)
    )
    assert float(at_start) == 0  # type: ignore[arg-type]
    extra = Output(start.features, moved)
    later = method.loss(
        nothing._replace(extra=extra), batch, carry, Local(client.global_params, client.global_params)
    )
    assert float(later) == pytest.approx(0.3 * (9 + 16))  # type: ignore[arg-type]


@pytest.mark.parametrize(("logits", "still"), [("raw", False), ("centred", True)])
def test_centred_the_logits_do_not_rise_together(logits: str, still: bool) -> None:
    method = FedKA(beta=0.5, gamma=0.1, logits=logits, discard="dominant")  # type: ignore[arg-type]
    bias = learnt(method, SKEWED)["3.bias"]
    assert (abs(float(bias.sum() - net()[3].bias.detach().sum())) < 1e-6) == still


def test_its_own_logit_is_discarded_for_each_sample() -> None:
    _, carry = begun(prepared(FedKA(gamma=0.1), SKEWED))  # samples of classes 2 and 3
    expected = np.zeros((4, 4))
    expected[0, [0, 1, 3]] = expected[1, [0, 1, 2]] = 1 / 2
    np.testing.assert_allclose(carry["counts"].numpy(), expected)


@pytest.mark.parametrize(("discard", "rises"), [("dominant", True), ("own", False)])
def test_to_the_letter_all_logits_rise(discard: str, rises: bool) -> None:
    """Each of three clients lacks a class and has another as its dominant one."""
    federation = world([0] * 12 + [1], [1] * 12 + [2], [2] * 12 + [0], classes=3)
    method = FedKA(beta=0.5, gamma=0.5, discard=discard)  # type: ignore[arg-type]
    training = prepared(method, federation, rounds=20, lr=0.1)
    loop, _ = rounds(training, 20)
    x = training.data.read(np.arange(len(federation.dataset.y_train)))[0]
    logits = training.context.forward(loop.server.params, loop.server.buffers, x).logits
    assert (float(logits.mean()) > 3) == rises


def test_the_cross_entropy_alone_also_needs_the_anchor() -> None:
    assert not close(learnt(FedKA(beta=0, anchor_ce=1), SKEWED), learnt(FedAvg(), SKEWED))


@pytest.mark.parametrize("classes", [2, 4])
def test_one_sample_and_one_participant(classes: int) -> None:
    assert finite(learnt(FedKA(beta=0.5), world([1], range(classes), classes=classes), clients_per_round=1))


def test_given_samples_are_shared() -> None:
    ids = tuple(int(np.flatnonzero(SKEWED.dataset.y_train.numpy() == c)[-1]) for c in range(4))
    loop, _ = rounds(prepared(FedKA(shared=ids), SKEWED), 1)
    images = SKEWED.dataset.preprocess(SKEWED.dataset.x_train[list(ids)], dtype=torch.float64)
    assert torch.equal(loop.server.state["shared"], images)


@pytest.mark.parametrize("shared", [(0, 1), (0, 17, 19, 19), (0, 17, 19, 10**6), (-1, 17, 19, 22)])
def test_a_wrong_shared_set_is_refused(shared: tuple[int, ...]) -> None:
    with pytest.raises(HoldfastError, match="one of each class"):
        prepared(FedKA(shared=shared), SKEWED)


def test_a_class_nobody_holds_is_refused_unless_it_is_not_needed() -> None:
    lacking = world([0, 0, 1], [1, 2])
    with pytest.raises(HoldfastError, match="class 3"):
        prepared(FedKA(), lacking)
    assert finite(learnt(FedKA(anchors="non-dominant"), lacking))


@pytest.mark.parametrize(
    "wrong",
    [
        {"beta": -1.0},
        {"gamma": 0.0},
        {"gamma": 1.5},
        {"mu": 0},
        {"sampling": "easy"},
        {"anchors": "all"},
        {"logits": "soft"},
        {"discard": "all"},
        {"anchor_ce": -0.1},
    ],
)
def test_bad_values_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(HoldfastError, match=f"fedka: {next(iter(wrong))} is"):
        FedKA(**wrong)  # type: ignore[arg-type]
