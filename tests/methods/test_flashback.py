import numpy as np
import pytest
import torch
from small_world import begun, close, finite, learnt, net, prepared, rounds, same, world
from torch import nn

from holdfast.core.errors import HoldfastError
from holdfast.methods import FedAvg, Flashback

CLIENTS = ([0] * 5 + [1], [1, 2, 2], [2])
PUBLIC = [0, 1, 2, 3, 0, 1, 2]


def test_the_client_half_is_fedavg_to_the_bit_in_the_first_round() -> None:
    federation = world(*CLIENTS)
    method = Flashback(half="client")
    assert same(learnt(method, federation, 1), learnt(FedAvg(), federation, 1))
    assert not close(learnt(method, federation, 2), learnt(FedAvg(), federation, 2))


def test_without_server_epochs_and_with_vanishing_gamma_it_is_fedavg_to_rounding() -> None:
    """Where every client holds every class: of a class it lacks, a = π / (0 + π) is 1 however small π is."""
    federation = world([0, 0, 0, 1], [1, 0], [1, 1, 0], classes=2)
    assert close(learnt(Flashback(gamma=1e-300, server_epochs=0), federation), learnt(FedAvg(), federation))
    assert not close(learnt(Flashback(server_epochs=0), federation), learnt(FedAvg(), federation))


def test_the_server_half_leaves_the_clients_alone() -> None:
    federation = world(*CLIENTS, public=PUBLIC)
    assert same(learnt(Flashback(half="server", server_epochs=0), federation), learnt(FedAvg(), federation))


def test_a_class_nobody_has_seen_weighs_nothing() -> None:
    federation = world(*CLIENTS, public=PUBLIC)  # nobody but the server has class 3
    loop, _ = rounds(prepared(Flashback(gamma=0.5), federation), 2)
    assert finite(loop.server.params)
    np.testing.assert_allclose(loop.server.state["pi"].numpy(), [5, 2, 3, 0])
    _, carry = begun(prepared(Flashback(), federation))
    assert not carry["a"].any()  # 0 / 0 for classes 1 to 3 of nobody, 0 / n for the rest


@pytest.mark.parametrize(("gamma", "times"), [(1.0, 1), (0.5, 2), (0.3, 3), (0.1, 10), (1 / 3, 3)])
def test_pi_grows_until_a_client_has_counted_once_in_full(gamma: float, times: int) -> None:
    federation = world(*CLIENTS)
    loop, _ = rounds(
        prepared(Flashback(gamma=gamma, half="client"), federation, rounds=12, local_epochs=1), 12
    )
    counts = np.array([5.0, 2.0, 3.0, 0.0])
    np.testing.assert_allclose(loop.server.state["pi"].numpy(), gamma * times * counts)
    assert loop.server.state["rounds"].tolist() == [12, 12, 12]


def test_only_participants_count() -> None:
    loop, _ = rounds(prepared(Flashback(half="client", gamma=0.5), world(*CLIENTS), clients_per_round=1), 3)
    taken = loop.server.state["rounds"].numpy()
    assert taken.sum() == 3
    counts = np.array([[5, 1, 0, 0], [0, 1, 2, 0], [0, 0, 1, 0]])
    np.testing.assert_allclose(loop.server.state["pi"].numpy(), 0.5 * np.minimum(taken, 2) @ counts)


def test_the_next_rounds_extra_teacher_is_the_model_that_was_sent() -> None:
    loop, _ = rounds(prepared(Flashback(), world(*CLIENTS, public=PUBLIC)), 2)
    assert same(loop.server.state["previous"]["params"], loop.server.params)


def test_a_single_participant_with_one_sample() -> None:
    assert finite(
        learnt(Flashback(server_epochs=2), world([1], public=[0, 1], classes=2), clients_per_round=1)
    )


def test_batch_norm_never_sees_a_public_batch_of_one() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(9, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 4))
    federation = world([0, 1, 2], [1, 2, 3], public=PUBLIC)  # seven in batches of three
    loop, _ = rounds(prepared(Flashback(), federation, model), 2)
    assert finite(loop.server.params)
    assert finite(loop.server.buffers)
    assert int(loop.server.buffers["2.num_batches_tracked"]) == 2 * (2 + 2)


def test_the_servers_rate_decays_like_the_clients() -> None:
    federation = world(*CLIENTS, public=PUBLIC)
    still = prepared(Flashback(half="server"), federation, lr_decay=1e-12)
    loop, _ = rounds(still, 1)
    first = dict(loop.server.params)
    loop.round(2)
    assert all(torch.allclose(first[k], p, atol=1e-9) for k, p in loop.server.params.items())


def test_a_model_without_bias() -> None:
    federation = world(*CLIENTS, public=PUBLIC)
    assert finite(rounds(prepared(Flashback(), federation, net(bias=False)), 2)[0].server.params)


def test_the_server_half_needs_public_data() -> None:
    for half in ("both", "server"):
        with pytest.raises(HoldfastError, match="public"):
            prepared(Flashback(half=half), world(*CLIENTS))  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [{"gamma": 0.0}, {"gamma": 1.1}, {"server_epochs": -1}, {"half": "left"}])
def test_bad_values_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(HoldfastError, match=f"flashback: {next(iter(wrong))} is"):
        Flashback(**wrong)  # type: ignore[arg-type]
