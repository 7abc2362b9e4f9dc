"""When what arrives: which stage of a stream a round trains on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Protocol

from holdfast.core.errors import HoldfastError, unknown


class StageSchedule(Protocol):
    """Which stage a round trains. Rounds are counted from 1, stages and epochs from 0.

    Write your own as any object with these three functions.
    """

    def stage(self, round: int) -> int:
        """The stage that round ``round`` (1, 2, ...) trains on."""
        ...

    def epoch(self, round: int) -> int:
        """The epoch round ``round`` belongs to. Rounds of one epoch share their participants."""
        ...

    def rounds(self, epochs: int) -> int:
        """How many rounds ``epochs`` epochs take."""
        ...


@dataclass(frozen=True)
class GlobalEpochs:
    """Every epoch runs through all ``stages``, one round each, with the same participants.

    ::

        round   1 2 3  4 5 6  7 8 9
        stage   0 1 2  0 1 2  0 1 2
        epoch   0 0 0  1 1 1  2 2 2

    Guo, Wang and Geng: dynamic heterogeneous federated learning with multi-level prototypes (FedMLP).
    """

    name: ClassVar[str] = "global-epochs"
    stages: int

    def __post_init__(self) -> None:
        if self.stages < 1:
            raise HoldfastError(f"a schedule needs at least 1 stage, not {self.stages}")

    def stage(self, round: int) -> int:
        """The stage that round ``round`` (1, 2, ...) trains on."""
        return (round - 1) % self.stages

    def epoch(self, round: int) -> int:
        """The epoch round ``round`` belongs to."""
        return (round - 1) // self.stages

    def rounds(self, epochs: int) -> int:
        """How many rounds ``epochs`` epochs take."""
        return epochs * self.stages


@dataclass(frozen=True)
class EveryN:
    """The stage changes every ``n`` rounds and never comes back; the last of ``stages`` stays.

    Participants are drawn anew each round.
    ::

        round   1 2 3 4 5 6 7 8 9      (n = 3, stages = 2)
        stage   0 0 0 1 1 1 1 1 1
    """

    name: ClassVar[str] = "every-n"
    n: int
    stages: int

    def __post_init__(self) -> None:
        if self.n < 1 or self.stages < 1:
            raise HoldfastError(f"n ({self.n}) and stages ({self.stages}) of a schedule must be 1 or more")

    def stage(self, round: int) -> int:
        """The stage that round ``round`` (1, 2, ...) trains on."""
        return min((round - 1) // self.n, self.stages - 1)

    def epoch(self, round: int) -> int:
        """The epoch round ``round`` belongs to."""
        return round - 1

    def rounds(self, epochs: int) -> int:
        """How many rounds ``epochs`` epochs take."""
        return epochs


SCHEDULES: dict[str, type[GlobalEpochs] | type[EveryN]] = {"global-epochs": GlobalEpochs, "every-n": EveryN}
"""The built-in schedules by the name they have in files."""


def describe_schedule(schedule: StageSchedule) -> dict[str, Any]:
    """Name and parameters as plain values; a schedule of the user's own has only its class's name."""
    if isinstance(schedule, (GlobalEpochs, EveryN)):
        return {"name": schedule.name} | asdict(schedule)
    return {"name": type(schedule).__name__}


def schedule_from(description: Mapping[str, Any]) -> StageSchedule:
    """The built-in schedule that `describe_schedule` described."""
    values = dict(description)
    name = str(values.pop("name", ""))
    if name not in SCHEDULES:
        raise unknown("stage schedule", name, SCHEDULES)
    wanted = [field.name for field in fields(SCHEDULES[name])]
    for key in values:
        if key not in wanted:
            raise unknown(f"parameter of stage schedule '{name}'", key, wanted)
    missing = [key for key in wanted if not isinstance(values.get(key), int)]
    if missing:
        raise HoldfastError(
            f"stage schedule '{name}' needs a whole number for {missing[0]}, as in every-n:10"
        )
    return SCHEDULES[name](**values)


def check_schedule(schedule: StageSchedule, stages: int, rounds: int) -> None:
    """Refuse a schedule that names a stage which does not exist in any of ``rounds`` rounds."""
    for round in range(1, rounds + 1):
        stage = schedule.stage(round)
        if not 0 <= stage < stages:
            raise HoldfastError(
                f"the schedule trains stage {stage} in round {round}, but the stages are 0 to {stages - 1}"
            )
