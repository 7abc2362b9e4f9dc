"""The rounds: who takes part, what is refused and recorded, and that the same seed gives the same bits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from engine_world import SIZES, copied, federation, loop, norm_net, same_bits
from torch import Tensor

from holdfast.core.errors import HoldfastError
from holdfast.data.federation import federate
from holdfast.engine.aggregation import validate_update
from holdfast.engine.clients import Broadcast, Job
from holdfast.methods.base import Batch, Method, Tensors, Tree
from holdfast.methods.context import Client
from holdfast.methods.fedavg import FedAvg
from holdfast.methods.registry import METHODS
from holdfast.models.network import Output

NOT_HERE = (1, 3)  # clients whose upload is spoilt


@dataclass(frozen=True)
class Spoilt(Method):
    """FedAvg in which some clients send nonsense."""

    name: ClassVar[str] = "spoilt"
    how: str = "nan"
    whom: tuple[int, ...] = NOT_HERE

    def client_init(self, payload: Tree, state: Tree, client: Client) -> Tree:
        """By what the loss is multiplied."""
        factor = {"nan": float("nan"), "infinite": float("inf")}.get(self.how, 1.0)
        return {"factor": torch.tensor(factor if client.id in self.whom else 1.0, dtype=torch.float64)}

    def task_loss(self, out: Output, batch: Batch, carry: Tree) -> Tensor:
        """Weights that are no numbers, by a loss that is none."""
        return carry["factor"] * super().task_loss(out, batch, carry)

    def upload_params(self, params: Tensors, carry: Tree, client: Client) -> Tensors:
        """Other kinds of nonsense, from weights that are sound."""
        if client.id not in self.whom:
            return params
        first = next(iter(params))
        changed = {
            "shared": {first: params[first] * float("nan")},
            "shape": {first: params[first][:1]},
            "dtype": {first: params[first].float()},
            "extra": {"more": params[first]},
        }.get(self.how, {})
        return {k: v for k, v in params.items() if self.how != "fewer" or k != first} | changed

    def client_final(self, params: Tensors, carry: Tree, client: Client) -> tuple[Tree, Tree]:
        """Clients remember in which round they last took part."""
        bad = self.how == "sums" and client.id in self.whom
        return {"ones": torch.tensor(float("nan") if bad else 1.0)}, {"round": torch.tensor(client.round)}


# What becomes of it -------------------------------------------------------------------------------------


def test_batch_norm_statistics_are_averaged_by_samples_and_counters_are_the_largest() -> None:
    rounds, sent = loop(FedAvg(), model=norm_net()), []
    train = rounds.engine.train
    rounds.engine.train = lambda *given: (sent.append(copied(r.buffers)) or r for r in train(*given))  # type: ignore[func-returns-value, method-assign]
    rounds.round(1)
    shares = np.array(SIZES) / sum(SIZES)
    for name in ("1.running_mean", "1.running_var"):
        mean = sum(share * told[name].numpy() for share, told in zip(shares, sent, strict=True))
        np.testing.assert_allclose(rounds.server.buffers[name].numpy(), mean, rtol=1e-12)
    assert int(rounds.server.buffers["1.num_batches_tracked"]) == 2 * 3  # nine samples in batches of three


# Who takes part -----------------------------------------------------------------------------------------


def test_sampled_clients_are_the_same_for_every_method() -> None:
    def chosen(method: Method) -> list[list[int]]:
        rounds = loop(method, clients_per_round=3, among=with_public())
        return [rounds.sampler.sample(t)[0].tolist() for t in range(1, 6)]

    first = chosen(FedAvg())
    assert all(len(set(round)) == 3 for round in first)
    assert len({tuple(round) for round in first}) > 1
    for method in METHODS.values():
        assert chosen(method()) == first, method.name


def with_public() -> Any:
    whole = federation()
    return federate(whole.dataset, [whole.client(k) for k in range(5)], public=whole.client(5))


def test_everybody_takes_part_without_a_sample() -> None:
    assert loop(FedAvg()).round(1)["participants"] == list(range(len(SIZES)))


def test_clients_without_data_are_never_drawn() -> None:
    whole = federation()
    parts = [whole.client(0), np.empty(0, np.int64), whole.client(3)]
    rounds = loop(FedAvg(), among=federate(whole.dataset, parts), clients_per_round=2)
    assert all(sorted(rounds.sampler.sample(t)[0]) == [0, 2] for t in range(1, 6))


def test_in_a_cycle_every_client_takes_part_once() -> None:
    sampler = loop(FedAvg(), clients_per_round=4, sampling="cyclic").sampler
    orders = []
    for first in range(1, 13, 2):  # a cycle of six clients has two rounds
        one, two = (sampler.sample(number)[0].tolist() for number in (first, first + 1))
        assert (len(one), len(two)) == (4, 2)
        assert sorted(one + two) == list(range(len(SIZES)))
        orders.append(one + two)
    assert len({tuple(order) for order in orders}) > 1


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_one_client_a_round_in_cycles_is_cyclic_weight_transfer(engine: str) -> None:
    rounds = loop(FedAvg(), clients_per_round=1, sampling="cyclic", engine=engine)
    whole, reference = federation(), loop(FedAvg()).engine
    weights = copied(rounds.server.params)
    for number in range(1, 9):
        (client,) = rounds.round(number)["participants"]
        (trained,) = reference.train(Broadcast(number, weights, {}, {}), [Job(client, whole.client(client))])
        weights = copied(trained.params)
        for name, value in weights.items():
            torch.testing.assert_close(rounds.server.params[name], value, rtol=1e-9, atol=1e-12)


def test_a_cycle_of_all_clients_is_refused() -> None:
    with pytest.raises(HoldfastError, match="all clients take part in every round; set clients_per_round"):
        loop(FedAvg(), sampling="cyclic")
    with pytest.raises(
        HoldfastError, match="the privacy accounting of dp assumes random sampling of clients"
    ):
        loop(FedAvg(), sampling="cyclic", clients_per_round=2, dp="epsilon=8,delta=0.01")


def test_lost_clients_are_recorded_and_left_out() -> None:
    rounds = loop(FedAvg(), client_dropout=0.5)
    lost = []
    for t in range(1, 5):
        record = rounds.round(t)
        gone = [i["client"] for i in record["incidents"]]
        assert {i["kind"] for i in record["incidents"]} <= {"dropout"}
        assert sorted(gone + record["participants"]) == list(range(len(SIZES)))
        lost += gone
    assert lost


def test_a_round_in_which_all_are_lost_changes_nothing() -> None:
    rounds = loop(FedAvg(), client_dropout=0.999999)
    before = copied(rounds.server.params)
    record = rounds.round(1)
    assert len(record["incidents"]) == len(SIZES)
    assert same_bits(rounds.server.params, before)
    assert "accuracy" in record


# What is refused ----------------------------------------------------------------------------------------

KINDS = {
    "nan": "not finite",
    "infinite": "not finite",
    "shared": "not finite",
    "sums": "not finite",
    "shape": "wrong shape",
    "dtype": "wrong dtype",
    "extra": "wrong keys",
    "fewer": "wrong keys",
}


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("how", KINDS)
def test_a_broken_update_is_recorded_and_left_out(how: str, engine: str) -> None:
    rounds = loop(Spoilt(how=how), engine=engine)
    record = rounds.round(1)
    incidents = sorted(record["incidents"], key=lambda i: i["client"])
    assert incidents == [{"client": k, "kind": KINDS[how]} for k in NOT_HERE]
    good = [k for k in range(len(SIZES)) if k not in NOT_HERE]
    assert sorted(record["participants"]) == good
    # The model is the mean of the others', as if the broken clients had not been asked.
    asked = loop(FedAvg(), engine=engine)
    asked.sampler.sample = lambda round: (np.array(good), np.array([], int))  # type: ignore[method-assign]
    asked.round(1)
    for name, value in asked.server.params.items():
        torch.testing.assert_close(rounds.server.params[name], value, rtol=1e-12, atol=1e-12)


def test_a_refused_client_remembers_nothing_of_the_round() -> None:
    rounds = loop(Spoilt())
    rounds.round(1)
    remembered = [rounds.client_states.get(k) is not None for k in range(len(SIZES))]
    assert remembered == [k not in NOT_HERE for k in range(len(SIZES))]


def test_a_round_without_any_usable_update_is_an_error() -> None:
    rounds = loop(Spoilt(whom=tuple(range(len(SIZES)))))
    with pytest.raises(HoldfastError, match="round 1: no usable update is left") as error:
        rounds.round(1)
    assert "client 0: not finite" in str(error.value)


def test_statistics_of_batch_norm_must_be_finite_too() -> None:
    """They are averaged like the weights, so one client's NaN would be everybody's."""
    rounds = loop(FedAvg(), model=norm_net())
    server, sizes = rounds.server, federation().client(0)
    sent = Broadcast(1, server.params, server.buffers, {})
    result = next(iter(rounds.engine.train(sent, [Job(0, sizes)])))
    assert validate_update(result, server) is None
    spoilt = {k: v * float("nan") if v.is_floating_point() else v for k, v in result.buffers.items()}
    assert validate_update(replace(result, buffers=spoilt), server) == "not finite"


# Sameness -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fedntd", "fedfa"])
def test_same_seed_same_bits(name: str, engine: str) -> None:
    def trained(seed: int) -> Tensors:
        rounds = loop(METHODS[name](), engine=engine, clients_per_round=4, seed=seed, client_dropout=0.2)
        for t in (1, 2, 3):
            rounds.round(t)
        return rounds.server.params

    assert same_bits(trained(7), trained(7))
    assert not same_bits(trained(7), trained(8))


def test_same_bits_whatever_torch_and_numpy_were_seeded_with() -> None:
    def trained(seed: int) -> Tensors:
        rounds = loop(METHODS["fedfa"](), clients_per_round=4)
        torch.manual_seed(seed)
        np.random.seed(seed)
        rounds.round(1)
        return rounds.server.params

    assert same_bits(trained(1), trained(2))


def test_testing_local_models_does_not_change_training() -> None:
    def trained(evaluate: bool) -> Tensors:
        rounds = loop(METHODS["fedntd"](), evaluate_locals=evaluate)
        for t in (1, 2):
            rounds.round(t)
        return rounds.server.params

    assert same_bits(trained(True), trained(False))


def test_the_record_of_a_round() -> None:
    rounds = loop(FedAvg(), evaluate_locals=True, lr_decay=0.5)
    record = [rounds.round(t) for t in (1, 2)][-1]
    assert record["round"] == 2
    assert record["lr"] == pytest.approx(0.025)
    assert record["samples"] == list(SIZES)
    assert len(record["class_accuracy"]) == 3
    assert len(record["locals"]["class_accuracy"]) == len(SIZES)
    weights = sum(p.numel() * p.element_size() for p in rounds.server.params.values())
    assert record["bytes_down"] == record["bytes_up"] == weights * len(SIZES)


@pytest.mark.parametrize(
    ("name", "floats_up"),
    [
        ("fedavg", 75),
        ("fedrep", 48),
        ("fedpac", 75 + 2 * 24 + 3 + 1),
        ("fedmlp", 48 + 24 + 3),
        ("fedproto", 24 + 3),
    ],
)
def test_bytes_are_those_of_what_travels(name: str, floats_up: int) -> None:
    """A body of 48 weights and a head of 27; prototypes of 3 classes are 24 numbers, and come with 3 counts."""
    record = loop(METHODS[name]()).round(1)
    assert record["bytes_up"] == 8 * floats_up * len(SIZES)
