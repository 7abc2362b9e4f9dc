"""Schedules of the learning rate by name, with their options."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

from holdfast.core.spec import (
    Count,
    Fraction,
    PositiveCount,
    PositiveFraction,
    build,
    parse_text,
    validate_fields,
)


@dataclass(frozen=True, kw_only=True)
class LRSchedule:
    """A factor of the learning rate at each position, counted from 0.

    Positions are rounds, or with ``over="steps"`` a client's local steps, which begin at 0 in every round. During
    ``warmup`` positions the factor rises linearly, from 1 / (warmup + 1); the schedule itself begins after them.
    """

    name: ClassVar[str] = "constant"

    warmup: Count = 0
    over: Literal["rounds", "steps"] = "rounds"

    def __post_init__(self) -> None:
        validate_fields(self, self.name)

    def describe(self) -> dict[str, Any]:
        """Name and options as plain values."""
        return {"name": self.name} | asdict(self)

    def factor(self, position: int, total: int) -> float:
        """The factor at a position of ``total``."""
        if position < self.warmup:
            return (position + 1) / (self.warmup + 1)
        return self.after_warmup(position - self.warmup, max(total - self.warmup, 1))

    def after_warmup(self, position: int, total: int) -> float:
        """The factor at a position of the ``total`` after the warm-up."""
        return 1.0


@dataclass(frozen=True, kw_only=True)
class Exponential(LRSchedule):
    """gamma^p."""

    name: ClassVar[str] = "exponential"

    gamma: PositiveFraction

    def after_warmup(self, position: int, total: int) -> float:
        return float(self.gamma**position)


@dataclass(frozen=True, kw_only=True)
class Step(LRSchedule):
    """gamma^⌊p / every⌋."""

    name: ClassVar[str] = "step"

    every: PositiveCount
    gamma: PositiveFraction

    def after_warmup(self, position: int, total: int) -> float:
        return float(self.gamma ** (position // self.every))


@dataclass(frozen=True, kw_only=True)
class Cosine(LRSchedule):
    """final + (1 - final) (1 + cos(π p / total)) / 2, which reaches ``final`` after the last position."""

    name: ClassVar[str] = "cosine"

    final: Fraction = 0.0

    def after_warmup(self, position: int, total: int) -> float:
        return self.final + (1 - self.final) * (1 + math.cos(math.pi * position / total)) / 2


LR_SCHEDULES: dict[str, type[LRSchedule]] = {
    kind.name: kind for kind in (LRSchedule, Exponential, Step, Cosine)
}


def lr_schedule_from(written: str | Mapping[str, Any]) -> LRSchedule:
    """The schedule written as ``step:every=30,gamma=0.1`` or as a mapping."""
    description = parse_text(written, "lr_schedule") if isinstance(written, str) else written
    example = "step:every=30,gamma=0.1" if description.get("name") == "step" else "exponential:gamma=0.99"
    return build(LR_SCHEDULES, description, "lr_schedule", example)
