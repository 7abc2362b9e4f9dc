"""Recorded steps: what a tape does again is what was done, with whatever its inputs hold by then."""

from __future__ import annotations

import pytest
import torch
from engine_world import copied, loop, same_bits
from torch import Tensor
from torch.func import grad_and_value, vmap
from torch.nn import functional as F

from holdfast.engine.vectorized import step_cache as programs
from holdfast.engine.vectorized.engine import VectorizedEngine
from holdfast.engine.vectorized.recorded_step import BlockPool, NotReplayable, RecordedStep
from holdfast.methods import FedAvg

PLENTY = 2**30


def network(w: Tensor, v: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(F.relu(x @ w) @ v, y)


def test_replays_follow_their_inputs() -> None:
    torch.manual_seed(0)
    w, v = torch.randn(3, 5, 8), torch.randn(3, 8, 4)
    inputs, labels = torch.randn(6, 3, 10, 5), torch.randint(0, 4, (6, 3, 10))
    at, rate = torch.zeros(1, dtype=torch.int64), torch.tensor(0.1)

    def step() -> None:
        x, y = inputs.index_select(0, at)[0], labels.index_select(0, at)[0]
        (dw, dv), _ = vmap(grad_and_value(network, argnums=(0, 1)))(w, v, x, y)
        w.sub_(rate * dw)
        v.sub_(rate * dv)
        at.add_(1)

    state = (w, v, at)
    start = [t.clone() for t in state]
    for _ in range(6):
        step()
        rate.mul_(0.5)
    expected = [t.clone() for t in state]
    for tensor, value in zip(state, start, strict=True):
        tensor.copy_(value)
    rate.fill_(0.1)
    tape = RecordedStep(step, BlockPool(PLENTY))  # the first step
    for _ in range(5):
        rate.mul_(0.5)
        tape()
    assert all(torch.equal(*pair) for pair in zip(state, expected, strict=True))


def test_results_that_are_given_another_shape_later(capfd: pytest.CaptureFixture[str]) -> None:
    x, out = torch.randn(2, 3, 4, 4), torch.zeros(3, 1, 2)

    def work() -> None:
        mean = x.mean((2, 3))  # [2, 3]
        out.copy_(mean.t_().unsqueeze_(1))

    tape = RecordedStep(work, BlockPool(PLENTY))
    for _ in range(3):
        x.normal_()
        tape()
        assert torch.equal(out, x.mean((2, 3)).T.unsqueeze(1))
    assert not capfd.readouterr().err  # torch warns there of memory that has another shape


def test_changes_in_place_begin_anew() -> None:
    x, total = torch.arange(4.0), torch.zeros(4)

    def work() -> None:
        scratch = torch.zeros(4)
        scratch[1:].add_(x[1:])  # written through a view
        total.add_(scratch.clone().mul_(2))

    tape = RecordedStep(work, BlockPool(PLENTY))
    x.fill_(1.0)
    tape()
    assert total.tolist() == [0.0, 4.0, 6.0, 8.0]


def test_constants_and_unread_results_are_left_out() -> None:
    x, out = torch.ones(4), torch.zeros(4)

    def work() -> None:
        places = torch.arange(4.0) * 2 + torch.ones_like(x)
        _ = x.exp().sum()
        torch.add(x, places, out=out)

    tape = RecordedStep(work, BlockPool(PLENTY))
    x.fill_(10.0)
    tape()
    assert len(tape.calls) == 1
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
def test_what_depends_on_values_or_chance_is_refused(work: object) -> None:
    with pytest.raises(NotReplayable):
        RecordedStep(work, BlockPool(PLENTY))  # type: ignore[arg-type]


def test_memory_is_bounded() -> None:
    out = torch.zeros(100)
    room = BlockPool(1200)
    RecordedStep(lambda: out.add_((out + 1) * torch.ones(100)), room)
    assert room.left == 0  # two results and a constant, 400 bytes each
    with pytest.raises(NotReplayable):
        RecordedStep(lambda: out + 1, room)


def test_results_take_the_place_of_those_nobody_reads_any_more() -> None:
    x, out, room = torch.randn(100), torch.zeros(100), BlockPool(PLENTY)

    def work() -> None:
        early = x.exp()
        late = early
        for _ in range(5):
            late = late.sin() + 1
        out.copy_(early * late)

    def other() -> None:
        out.add_(x.exp().cos())

    tapes = [(RecordedStep(each, room), each) for each in (work, other)]
    assert [block.nbytes() for block in room.blocks] == [400] * 3  # early, and two in turns
    for tape, each in tapes * 2:
        x.normal_()
        before = out.clone()
        each()
        expected = out.clone()
        out.copy_(before)
        tape()
        assert torch.equal(out, expected)


def test_lanes_replay_tapes_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    taped = loop(FedAvg(), engine="vectorized", parallel_clients=3)
    monkeypatch.setattr(programs, "TAPE_BYTES", 0)
    eager = loop(FedAvg(), engine="vectorized", parallel_clients=3)
    for number in (1, 2, 3):
        monkeypatch.setattr(programs, "TAPE_BYTES", PLENTY)
        taped.round(number)
        monkeypatch.setattr(programs, "TAPE_BYTES", 0)
        eager.round(number)
    assert isinstance(taped.engine, VectorizedEngine)
    assert isinstance(eager.engine, VectorizedEngine)
    assert any(isinstance(program, RecordedStep) for program in taped.engine.programs.ready.values())
    assert not any(isinstance(program, RecordedStep) for program in eager.engine.programs.ready.values())
    assert same_bits(copied(taped.server.params), copied(eager.server.params))
