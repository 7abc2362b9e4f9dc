"""Schedules of streams: the stage that each round trains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Protocol

from holdfast.core.errors import HoldfastError
from holdfast.core.spec import PositiveCount, build, parse_text, validate_fields


class StageSchedule(Protocol):
    """The stage that each round trains. Rounds are counted from 1, stages and epochs from 0.

    Any object with these two functions is a schedule.
    """

    def stage(self, round: int) -> int:
        """The stage that round ``round`` (1, 2, ...) trains on."""
        ...

    def epoch(self, round: int) -> int:
        """The epoch of round ``round``. Rounds of one epoch have the same participants."""
        ...


@dataclass(frozen=True)
class GlobalEpochs:
    """Every epoch consists of all ``stages``, one round each, with the same participants.

    ::

        round   1 2 3  4 5 6  7 8 9
        stage   0 1 2  0 1 2  0 1 2
        epoch   0 0 0  1 1 1  2 2 2

    Guo, Wang and Geng: dynamic heterogeneous federated learning with multi-level prototypes (FedMLP).
    """

    name: ClassVar[str] = "global-epochs"
    stages: PositiveCount

    def __post_init__(self) -> None:
        validate_fields(self, self.name)

    def stage(self, round: int) -> int:
        """The stage that round ``round`` (1, 2, ...) trains on."""
        return (round - 1) % self.stages

    def epoch(self, round: int) -> int:
        """The epoch of round ``round``."""
        return (round - 1) // self.stages


@dataclass(frozen=True)
class EveryN:
    """The stage advances every ``n`` rounds; the last of ``stages`` continues to the end.

    Participants are drawn in each round.
    ::

        round   1 2 3 4 5 6 7 8 9      (n = 3, stages = 2)
        stage   0 0 0 1 1 1 1 1 1
    """

    name: ClassVar[str] = "every-n"
    n: PositiveCount
    stages: PositiveCount

    def __post_init__(self) -> None:
        validate_fields(self, self.name)

    def stage(self, round: int) -> int:
        """The stage that round ``round`` (1, 2, ...) trains on."""
        return min((round - 1) // self.n, self.stages - 1)

    def epoch(self, round: int) -> int:
        """The epoch of round ``round``."""
        return round - 1


SCHEDULES: dict[str, type[GlobalEpochs] | type[EveryN]] = {"global-epochs": GlobalEpochs, "every-n": EveryN}
"""The built-in schedules by the name they have in files."""


def describe_schedule(schedule: StageSchedule) -> dict[str, Any]:
    """Name and parameters as plain values; only the class name for a user-defined schedule."""
    if isinstance(schedule, (GlobalEpochs, EveryN)):
        return {"name": schedule.name} | asdict(schedule)
    return {"name": type(schedule).__name__}


def schedule_from(description: Mapping[str, Any]) -> StageSchedule:
    """The built-in schedule that `describe_schedule` described."""
    return build(SCHEDULES, description, "stage schedule", "every-n:10")


def given_schedule(schedule: StageSchedule | str | None, stages: int) -> StageSchedule | None:
    """A schedule, or that of a text such as ``every-n:10``."""
    if isinstance(schedule, str):
        return schedule_from({"stages": stages, **parse_text(schedule, "stage schedule", ("n",))})
    return schedule


def check_schedule(schedule: StageSchedule, stages: int, rounds: int) -> None:
    """Raise an error if the schedule returns a stage that does not exist in one of ``rounds`` rounds."""
    for round in range(1, rounds + 1):
        stage = schedule.stage(round)
        if not 0 <= stage < stages:
            raise HoldfastError(
                f"the schedule trains stage {stage} in round {round}, but the stages are 0 to {stages - 1}"
            )
