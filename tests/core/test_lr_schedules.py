"""Schedules of the learning rate, against torch.optim.lr_scheduler."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    ExponentialLR,
    LinearLR,
    LRScheduler,
    SequentialLR,
    StepLR,
)

import holdfast as hf
from holdfast.core.settings import Settings

ROUNDS, LR = 12, 0.4
SCHEDULES: dict[str, Callable[[Optimizer, int], LRScheduler]] = {
    "constant": lambda optimizer, total: ConstantLR(optimizer, factor=1.0),
    "exponential:gamma=0.9": lambda optimizer, total: ExponentialLR(optimizer, 0.9),
    "step:every=3,gamma=0.5": lambda optimizer, total: StepLR(optimizer, 3, 0.5),
    "cosine:final=0.1": lambda optimizer, total: CosineAnnealingLR(optimizer, total, eta_min=0.1 * LR),
    "cosine": lambda optimizer, total: CosineAnnealingLR(optimizer, total),
}


def by_torch(schedule: str, warmup: int, total: int) -> list[float]:
    optimizer = SGD([torch.nn.Parameter(torch.zeros(1))], LR)
    scheduler = SCHEDULES[schedule](optimizer, total - warmup)
    if warmup:
        optimizer.param_groups[0]["lr"] = LR
        rising = LinearLR(optimizer, 1 / (warmup + 1), total_iters=warmup)
        scheduler = SequentialLR(optimizer, [rising, scheduler], [warmup])
    rates = []
    for _ in range(total):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def with_options(schedule: str, **options: Any) -> str:
    name, colon, rest = schedule.partition(":")
    return f"{name}:" + ",".join([*([rest] if colon else []), *(f"{k}={v}" for k, v in options.items())])


@pytest.mark.filterwarnings("ignore:The epoch parameter")
@pytest.mark.parametrize("warmup", [0, 1, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_rates_of_rounds_as_in_torch(schedule: str, warmup: int) -> None:
    settings = Settings(rounds=ROUNDS, lr=LR, lr_schedule=with_options(schedule, warmup=warmup))
    rates = [settings.lr_at(round) for round in range(1, ROUNDS + 1)]
    assert rates == pytest.approx(by_torch(schedule, warmup, ROUNDS), rel=1e-12)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_factors_of_steps_as_in_torch(schedule: str) -> None:
    settings = Settings(rounds=3, lr=LR, lr_decay=0.5, lr_schedule=with_options(schedule, over="steps"))
    assert [settings.lr_at(round) for round in (1, 2, 3)] == [LR, LR / 2, LR / 4]
    rates = [LR * factor for factor in settings.step_factors(9)]
    assert rates == pytest.approx(by_torch(schedule, 0, 9), rel=1e-12)


def test_lr_decay_is_an_exponential_schedule_and_multiplies_others() -> None:
    decay, schedule = (
        Settings(rounds=9, lr=LR, **changes)
        for changes in ({"lr_decay": 0.9}, {"lr_schedule": "exponential:gamma=0.9"})
    )
    both = Settings(rounds=9, lr=LR, lr_decay=0.9, lr_schedule="step:every=4,gamma=0.1")
    for round in range(1, 10):
        assert decay.lr_at(round) == pytest.approx(schedule.lr_at(round), rel=1e-14)
        expected = LR * 0.9 ** (round - 1) * 0.1 ** ((round - 1) // 4)
        assert both.lr_at(round) == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize(
    ("schedule", "sentence"),
    [
        ("cosin", "did you mean cosine"),
        ("step:gamma=0.1", "step needs every, such as step:every=30,gamma=0.1"),
        ("exponential:gama=0.9", "did you mean gamma"),
        ("exponential:gamma=1.5", "gamma is 1.5; it must be above 0 and at most 1"),
        ("cosine:over=epochs", "it must be rounds or steps"),
        ("cosine:warmup=-1", "warmup is -1"),
    ],
)
def test_bad_schedules_are_refused(schedule: str, sentence: str) -> None:
    with pytest.raises(hf.HoldfastError, match=sentence):
        Settings(rounds=1, lr_schedule=schedule)
