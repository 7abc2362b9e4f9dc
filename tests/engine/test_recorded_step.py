"""Recorded steps: a replay computes the same operations on the present values of its inputs."""

from __future__ import annotations

import pytest
import torch
from engine_world import copied, loop, same_bits
from torch import Tensor
from torch.func import grad_and_value, vmap
from torch.nn import functional as F

from holdfast.engine.vectorized import step_cache
from holdfast.engine.vectorized.engine import VectorizedEngine
from holdfast.engine.vectorized.recorded_step import BlockPool, NotReplayable, RecordedStep
from holdfast.methods import FedAvg

PLENTY = 2**30


def network(w: Tensor, v: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(F.relu(x @ w) @ v, y)


def test_a_replay_uses_the_present_values_of_its_inputs() -> None:
    torch.manual_seed(0)
    w, v = torch.randn(3, 5, 8), torch.randn(3, 8, 4)
    inputs, labels = torch.randn(6, 3, 10, 5), torch.randint(0, 4, (6, 3, 10))
    cursor, rate = torch.zeros(1, dtype=torch.int64), torch.tensor(0.1)

    def step() -> None:
        x, y = inputs.index_select(0, cursor)[0], labels.index_select(0, cursor)[0]
        (dw, dv), _ = vmap(grad_and_value(network, argnums=(0, 1)))(w, v, x, y)
        w.sub_(rate * dw)
        v.sub_(rate * dv)
        cursor.add_(1)

    state = (w, v, cursor)
    start = [t.clone() for t in state]
    for _ in range(6):
        step()
        rate.mul_(0.5)
    expected = [t.clone() for t in state]
    for tensor, value in zip(state, start, strict=True):
        tensor.copy_(value)
    rate.fill_(0.1)
    recorded = RecordedStep(step, BlockPool(PLENTY))  # runs the first step
    for _ in range(5):
        rate.mul_(0.5)
        recorded()
    assert all(torch.equal(*pair) for pair in zip(state, expected, strict=True))


def test_results_whose_shape_changes_later(capfd: pytest.CaptureFixture[str]) -> None:
    x, out = torch.randn(2, 3, 4, 4), torch.zeros(3, 1, 2)

    def work() -> None:
        mean = x.mean((2, 3))  # [2, 3]
        out.copy_(mean.t_().unsqueeze_(1))

    recorded = RecordedStep(work, BlockPool(PLENTY))
    for _ in range(3):
        x.normal_()
        recorded()
        assert torch.equal(out, x.mean((2, 3)).T.unsqueeze(1))
    assert not capfd.readouterr().err  # where torch warns if it resizes an output


def test_in_place_changes_are_not_accumulated_over_replays() -> None:
    x, total = torch.arange(4.0), torch.zeros(4)

    def work() -> None:
        scratch = torch.zeros(4)
        scratch[1:].add_(x[1:])  # written through a view
        total.add_(scratch.clone().mul_(2))

    recorded = RecordedStep(work, BlockPool(PLENTY))
    x.fill_(1.0)
    recorded()
    assert total.tolist() == [0.0, 4.0, 6.0, 8.0]


def test_constants_and_unused_results_are_not_recomputed() -> None:
    x, out = torch.ones(4), torch.zeros(4)

    def work() -> None:
        constant = torch.arange(4.0) * 2 + torch.ones_like(x)
        _ = x.exp().sum()
        torch.add(x, constant, out=out)

    recorded = RecordedStep(work, BlockPool(PLENTY))
    x.fill_(10.0)
    recorded()
    assert len(recorded.calls) == 1
    assert out.tolist() == [11.0, 13.0, 15.0, 17.0]


@pytest.mark.parametrize(
    "work",
    [
        lambda: torch.ones(2).sum().item(),
        lambda: torch.rand(3),
        lambda: torch.arange(4)[torch.arange(4) > 1],
        lambda: torch.arange(4.0).nonzero(),
    ],
    ids=["value in Python", "random", "mask", "number of rows"],
)
def test_steps_that_depend_on_values_or_random_numbers_are_refused(work: object) -> None:
    with pytest.raises(NotReplayable):
        RecordedStep(work, BlockPool(PLENTY))  # type: ignore[arg-type]


def test_memory_is_bounded() -> None:
    out = torch.zeros(100)
    pool = BlockPool(1200)
    RecordedStep(lambda: out.add_((out + 1) * torch.ones(100)), pool)
    assert pool.bytes_left == 0  # two results and a constant, 400 bytes each
    with pytest.raises(NotReplayable):
        RecordedStep(lambda: out + 1, pool)


def test_results_reuse_the_memory_of_earlier_results() -> None:
    x, out, pool = torch.randn(100), torch.zeros(100), BlockPool(PLENTY)

    def work() -> None:
        early = x.exp()
        late = early
        for _ in range(5):
            late = late.sin() + 1
        out.copy_(early * late)

    def other() -> None:
        out.add_(x.exp().cos())

    pairs = [(RecordedStep(step, pool), step) for step in (work, other)]
    assert [block.nbytes() for block in pool.blocks] == [400] * 3  # early, and two in turns
    for recorded, step in pairs * 2:
        x.normal_()
        before = out.clone()
        step()
        expected = out.clone()
        out.copy_(before)
        recorded()
        assert torch.equal(out, expected)


def test_the_engine_replays_recorded_steps_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = loop(FedAvg(), engine="vectorized", parallel_clients=3)
    monkeypatch.setattr(step_cache, "MAX_RECORDED_BYTES", 0)
    eager = loop(FedAvg(), engine="vectorized", parallel_clients=3)
    for number in (1, 2, 3):
        monkeypatch.setattr(step_cache, "MAX_RECORDED_BYTES", PLENTY)
        recorded.round(number)
        monkeypatch.setattr(step_cache, "MAX_RECORDED_BYTES", 0)
        eager.round(number)
    assert isinstance(recorded.engine, VectorizedEngine)
    assert isinstance(eager.engine, VectorizedEngine)
    assert any(isinstance(step, RecordedStep) for step in recorded.engine.step_cache.compiled.values())
    assert not any(isinstance(step, RecordedStep) for step in eager.engine.step_cache.compiled.values())
    assert same_bits(copied(recorded.server.params), copied(eager.server.params))
