"""Local work in steps and fractions of an epoch, and learning rates that vary within a round."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from engine_world import federation, loop, net, same_bits
from torch import nn

import holdfast as hf
from holdfast.data.preprocess import Preprocess
from holdfast.engine.batching import BatchPlan, plan_batches
from holdfast.engine.rounds import RoundLoop


def plan(samples: int, epochs: float = 1, steps: int | None = None) -> BatchPlan:
    return plan_batches(
        seed=3, round=2, client=7, samples=samples, epochs=epochs, steps=steps, batch_size=4, merge_single=False,
        preprocess=Preprocess(crop=1), shape=(1, 4, 4), dropout_keys=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("samples", "epochs", "steps", "expected"),
    [
        (10, 0.5, None, [4, 4]),  # 1.5 of 3 batches
        (10, 1.5, None, [4, 4, 2, 4, 4]),
        (10, 0.1, None, [4]),
        (2, 0.5, None, [2]),
        (120, 0.1, None, [4] * 3),
        (10, 1, 2, [4, 4]),
        (10, 1, 7, [4, 4, 2, 4, 4, 2, 4]),
        (2, 1, 3, [2, 2, 2]),
    ],
)
def test_steps_of_a_client(samples: int, epochs: float, steps: int | None, expected: list[int]) -> None:
    found = plan(samples, epochs, steps)
    assert found.sizes.tolist() == expected
    assert [len(rows) for rows in found.rows] == expected
    assert found.draws is not None
    assert [len(draws) for draws in found.draws] == expected
    batches = -(-samples // 4)
    assert found.epoch.tolist() == [step // batches for step in range(len(expected))]
    assert found.epochs == found.epoch[-1] + 1
    assert len(found.keys) == found.steps == len(expected)


def test_a_part_of_an_epoch_is_the_beginning_of_the_whole() -> None:
    whole, part = plan(10, 2), plan(10, 1.5)
    assert np.array_equal(whole.order[: len(part.order)], part.order)
    assert whole.drawn is not None
    assert part.drawn is not None
    assert np.array_equal(whole.drawn[: len(part.drawn)], part.drawn)


def after(method: hf.Method, engine: str, rounds: int = 2, **changes: Any) -> RoundLoop:
    run = loop(method, engine=engine, rounds=rounds, **changes)
    for number in range(1, rounds + 1):
        run.round(number)
    return run


WORK: list[dict[str, Any]] = [
    {"local_epochs": 0.5},
    {"local_epochs": 1.5},
    {"local_steps": 5, "local_epochs": 1},
    {"lr_schedule": "cosine:over=steps,warmup=2"},
    {"lr_schedule": "step:every=2,gamma=0.5,over=steps", "local_steps": 5, "local_epochs": 1},
    {"lr_schedule": "exponential:gamma=0.5,over=steps", "optimizer": "adam", "momentum": 0.0},
]


@pytest.mark.parametrize("method", ["fedavg", "fedrod", "fedproto"])
@pytest.mark.parametrize("work", WORK, ids=str)
def test_engines_agree(work: dict[str, Any], method: str) -> None:
    chosen = hf.methods.parse_method(method)
    one = after(chosen, "sequential", **work).server.params
    other = after(chosen, "vectorized", parallel_clients=2, **work).server.params
    for name, value in one.items():
        assert torch.allclose(value, other[name], rtol=1e-9, atol=1e-11)


@dataclass(frozen=True)
class Plain(hf.Method):
    """A loss as in plain PyTorch, which the vectorized engine trains without padding."""

    name: ClassVar[str] = "plain"

    def loss(self, out: Any, batch: Any, carry: Any, local: Any) -> torch.Tensor:
        return 0.1 * out.logits.square().mean()


@pytest.mark.parametrize("work", WORK[3:], ids=str)
def test_engines_agree_on_batches_without_padding(work: dict[str, Any]) -> None:
    one, other = (after(Plain(), engine, **work).server.params for engine in ("sequential", "vectorized"))
    for name, value in one.items():
        assert torch.allclose(value, other[name], rtol=1e-9, atol=1e-11)


def test_a_rate_that_varies_within_rounds_is_that_of_a_plain_loop() -> None:
    world = federation((12,))
    model, reference = net(), net().double()
    found = after(
        hf.FedAvg(), "vectorized", 2, model=model, among=world, batch_size=12, local_epochs=4, lr=0.4, lr_decay=0.5,
        lr_schedule="cosine:over=steps", momentum=0.0,
    )  # fmt: skip
    x, y = world.dataset.x_train.double(), world.dataset.y_train
    for round in range(2):
        optimiser = torch.optim.SGD(reference.parameters(), 0.4 * 0.5**round)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, 4)
        for _ in range(4):
            optimiser.zero_grad()
            nn.functional.cross_entropy(reference(x), y).backward()
            optimiser.step()
            schedule.step()
    for name, truth in reference.named_parameters():
        assert torch.allclose(found.server.params[name], truth, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_fednova_with_equal_steps_is_fedavg(engine: str) -> None:
    """Clients of 7, 4, 1, 9, 5 and 6 samples take 5 steps each, so that all a_k are equal."""
    changes = {"local_steps": 5, "local_epochs": 1, "momentum": 0.5}
    nova, average = (after(m, engine, **changes) for m in (hf.FedNova(), hf.FedAvg()))
    for name, value in average.server.params.items():
        assert torch.allclose(value, nova.server.params[name], rtol=1e-10, atol=1e-12)


def test_scaffolds_control_variate_counts_the_steps() -> None:
    run = loop(hf.Scaffold(), among=federation((8,)), local_steps=5, local_epochs=1, momentum=0.0, lr=0.1)
    before = {k: p.clone() for k, p in run.server.params.items()}
    run.round(1)
    state = run.client_states.get(0)
    assert state is not None
    for name, w in before.items():
        expected = (w - run.server.params[name]) / (5 * 0.1)
        assert torch.allclose(state["method"]["c_k"][name], expected, rtol=1e-10, atol=1e-12)


def test_schedules_and_steps_resume_with_the_same_bits(tmp_path: Path) -> None:
    chosen: dict[str, Any] = {
        "rounds": 5, "local_steps": 4, "batch_size": 3, "lr": 0.1, "lr_schedule": "cosine:final=0.1,warmup=1",
        "engine": "vectorized", "device": "cpu", "checkpoint_seconds": 0,
    }  # fmt: skip
    calm = hf.train("fedavg", net(), federation(), **chosen)

    def stop(record: dict[str, Any]) -> None:
        if record["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hf.train("fedavg", net(), federation(), **chosen, out=tmp_path / "run", on_round=stop)
    resumed = hf.train("fedavg", net(), federation(), **chosen, out=tmp_path / "run", resume=True)
    assert same_bits(calm.model.state_dict(), resumed.model.state_dict())
    assert [record["lr"] for record in calm.records] == [record["lr"] for record in resumed.records]


@pytest.mark.parametrize(
    ("method", "changes", "sentence"),
    [
        ("fedavg", {"local_steps": 5, "local_epochs": 2}, "local_steps is 5 and local_epochs is 2"),
        ("fedavg", {"local_steps": 0}, "local_steps is 0; it must be at least 1 step"),
        ("fedavg", {"local_epochs": 0}, "local_epochs is 0; it must be above 0"),
        (
            "fedrep",
            {"local_epochs": 2.5},
            "fedrep needs a whole number of local epochs, but local_epochs is 2.5",
        ),
        ("fedpac", {"local_steps": 5}, "fedpac needs a whole number of local epochs, but local_steps is 5"),
        (
            "scaffold",
            {"lr_schedule": "cosine:over=steps"},
            "scaffold assumes local SGD with one learning rate",
        ),
        ("fedreg", {"lr_schedule": "cosine:over=steps"}, "use an lr_schedule over rounds"),
    ],
)
def test_bad_work_is_refused_before_training(method: str, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(hf.HoldfastError, match=sentence):
        hf.train(method, net(), federation(), rounds=1, **changes)


def test_whole_epochs_stay_whole_numbers_in_an_experiment() -> None:
    assert hf.Experiment(local_epochs=2.0).describe()["local_epochs"] == 2
    assert isinstance(hf.Experiment(local_epochs=2.0).local_epochs, int)
    assert hf.Experiment(local_epochs=0.5).describe()["local_epochs"] == 0.5
