"""The recipe is its three parts, to the bit, and composes like any method."""

import pytest
import torch
from small_world import net, world

import holdfast as hf
from holdfast.core.errors import HoldfastError
from holdfast.methods.registry import parse_method

PARTS = "balanced:tau=0.25+fedavgm:beta=0.7+ema:beta=0.9"
FEDERATION = world([0] * 5 + [1] * 3, [1, 2, 3] * 2, [3, 0], [2] * 4)


def trained(method: str, model: torch.nn.Module | None = None) -> hf.Run:
    return hf.train(
        parse_method(method), model or net(), FEDERATION, rounds=4, clients_per_round=2, local_epochs=2,
        batch_size=3, lr=0.05, momentum=0.5, engine="sequential", device="cpu", progress=False,
    )  # fmt: skip


def normalised() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [torch.nn.Flatten(), torch.nn.Linear(9, 6), torch.nn.BatchNorm1d(6), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(6, 4))


@pytest.mark.parametrize("model", [net, normalised])
def test_it_is_the_stack_of_its_parts_to_the_bit(model) -> None:
    one, other = trained("steady", model()), trained(PARTS, model())
    for a, b in zip(one.model.state_dict().values(), other.model.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert [r["accuracy"] for r in one.records] == [r["accuracy"] for r in other.records]
    assert [r["train_loss"] for r in one.records] == [r["train_loss"] for r in other.records]


def test_a_calibration_can_be_added() -> None:
    one, other = trained("steady+ccvr"), trained(f"{PARTS}+ccvr")
    for a, b in zip(one.model.state_dict().values(), other.model.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_there_is_nothing_to_tune() -> None:
    assert parse_method("steady").describe() == {"name": "steady"}
    with pytest.raises(HoldfastError, match="steady has no options"):
        parse_method("steady:tau=1")


def test_a_second_part_that_replaces_the_aggregation_is_refused() -> None:
    with pytest.raises(
        HoldfastError, match="steady and fedavgm cannot be stacked: both replace the aggregation"
    ):
        parse_method("steady+fedavgm")
