"""Clients that take too long: the round closes without them and says so, or stops where too few are left."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import pytest
from engine_world import SIZES, copied, loop, same_bits

from holdfast.core.errors import HoldfastError
from holdfast.methods import FedAvg
from holdfast.methods.base import Method, Tree
from holdfast.methods.context import Client

SLOW, DEADLINE = 2, 2.0  # the smallest client: side by side it comes last


@dataclass(frozen=True)
class Sleepy(Method):
    """FedAvg in which one client is too slow in round 2."""

    name: ClassVar[str] = "sleepy"
    seconds: float = DEADLINE + 0.2

    def client_init(self, payload: Tree, state: Tree, client: Client) -> Tree:
        if client.round == 2 and client.id == SLOW:
            time.sleep(self.seconds)
        return {}


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_a_round_closes_without_the_late(engine: str) -> None:
    loop(Sleepy(), engine=engine).round(1)  # what torch does only once in a process is no client's fault
    rounds = loop(
        Sleepy(), engine=engine, parallel_clients=2 if engine == "vectorized" else None, deadline=DEADLINE
    )
    everyone = set(range(len(SIZES)))
    for number in (1, 2, 3):
        before = copied(rounds.server.params)
        record = rounds.round(number)
        late = {i["client"] for i in record["incidents"]}
        assert late | set(record["participants"]) == everyone
        assert not late & set(record["participants"])
        assert {i["kind"] for i in record["incidents"]} <= {"late"}
        assert (SLOW in late) == (number == 2)
        assert number == 2 or not late
        assert not same_bits(rounds.server.params, before)  # those in time were heard


def test_who_is_in_time_is_not_touched() -> None:
    punctual, free = loop(Sleepy(0), deadline=600), loop(Sleepy(0))
    for number in (1, 2):
        assert punctual.round(number)["incidents"] == free.round(number)["incidents"] == []
    assert same_bits(punctual.server.params, free.server.params)


def test_too_few_in_time_stop_the_run() -> None:
    rounds = loop(Sleepy(), deadline=DEADLINE, min_clients=5)
    rounds.round(1)
    with pytest.raises(
        HoldfastError, match=r"round 2: 2 usable updates were received, but min_clients is 5 .*client 2: late"
    ):
        rounds.round(2)


def test_a_deadline_does_not_turn_off_what_the_engine_overlaps() -> None:
    """The wrapper passes the loop's work on, so that the next round is prepared and the last record completed."""
    rounds = loop(FedAvg(), engine="vectorized", parallel_clients=2, deadline=60.0)
    finished: list[int] = []
    for number in (1, 2):
        rounds.finish_round(rounds.start_round(number, partial(finished.append, number)))
    assert finished == [1, 2]
