"""Clients on several cores at once: the same models as one after another."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from engine_world import copied, same_bits
from torch import nn

from holdfast.core.settings import Settings
from holdfast.data.dataset import Dataset
from holdfast.data.federation import federate
from holdfast.engine import factory as choice
from holdfast.engine.clients import Broadcast, Job
from holdfast.engine.rounds import RoundLoop
from holdfast.engine.sequential import SequentialEngine
from holdfast.engine.state_cache import StateCache
from holdfast.engine.thread_pool import ThreadPoolEngine
from holdfast.methods.registry import parse_method
from holdfast.training.session import Training

SIZES = (9, 4, 1, 7, 5)


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def images_loop(method: str, workers: int | None, **changes: object) -> RoundLoop:
    torch.manual_seed(0)
    total = sum(SIZES)
    x, y = torch.randn(total, 1, 4, 4).numpy(), (torch.arange(total) % 3).numpy()
    parts = [p.numpy() for p in torch.arange(total).split(list(SIZES))]
    federation = federate(Dataset.from_arrays(x, y, x, y), parts)
    net = nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(48, 3)
    )  # fmt: skip
    settings = Settings(
        **({"rounds": 3, "local_epochs": 2, "batch_size": 3, "lr": 0.05, "momentum": 0.9} | changes)
    )  # type: ignore[arg-type]
    engine = "sequential" if workers is None else lambda m, t, d: (
        ThreadPoolEngine(m, t, d, settings, workers) if workers > 1 else SequentialEngine(m, t, d, settings)
    )  # fmt: skip
    training = Training(parse_method(method), net, federation, settings, engine=engine, device="cpu")
    return training.loop(StateCache(None, None))


@pytest.mark.parametrize("method", ["fedavg", "fedntd", "scaffold", "moon", "fedfa", "fedrep", "fedreg"])
def test_a_crew_gives_the_bits_of_one(method: str) -> None:
    many, one = images_loop(method, 2), images_loop(method, 1)
    for number in (1, 2, 3):
        together = many.round(number)
        torch.set_num_threads(1)  # as each of the crew has
        alone = one.round(number)
        torch.set_num_threads(2)
        assert together["participants"] == alone["participants"]
        assert together["train_loss"] == alone["train_loss"]
        assert together["local_in"] == alone["local_in"]
    assert same_bits(copied(many.server.params), copied(one.server.params))
    assert same_bits(copied(many.server.buffers), copied(one.server.buffers))


def test_long_steps_on_two_threads_get_a_crew(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(images_loop("fedavg", None).engine, SequentialEngine)
    monkeypatch.setattr(choice, "SMALL_STEP_BYTES", 1000)
    loop = images_loop("fedavg", None)
    assert isinstance(loop.engine, ThreadPoolEngine)
    assert loop.engine.name == "sequential"
    torch.set_num_threads(1)
    assert isinstance(images_loop("fedavg", None).engine, SequentialEngine)


def test_threads_are_given_back_even_if_a_round_is_left_early() -> None:
    loop = images_loop("fedavg", 2)
    jobs = [Job(k, loop.federation.client(k)) for k in range(5)]
    sent = Broadcast(1, loop.server.params, loop.server.buffers, {})
    results = loop.engine.train(sent, jobs)
    next(results)
    assert torch.get_num_threads() == 1
    results.close()  # type: ignore[attr-defined]
    assert torch.get_num_threads() == 2
    assert [r.client for r in loop.engine.train(sent, jobs)] == [0, 1, 2, 3, 4]  # type: ignore[union-attr]
