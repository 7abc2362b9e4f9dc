"""A round that closes in time on an engine that works in this process."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from holdfast.engine.clients import Broadcast, ClientResult, Incident, Job
from holdfast.engine.rounds import Engine


class DeadlineEngine:
    """An engine whose rounds close after ``seconds`` of training; clients that are not ready by then are late."""

    def __init__(self, engine: Engine, seconds: float) -> None:
        self.engine, self.seconds = engine, seconds
        self.name, self.group = engine.name, engine.group

    def train(self, sent: Broadcast, jobs: Sequence[Job]) -> Iterator[ClientResult | Incident]:
        """Train each client as long as there is time; what was begun too late is not finished."""
        left = {job.client for job in jobs}
        results, spent = self.engine.train(sent, jobs), 0.0
        while left:
            began = time.monotonic()
            result = next(results)
            spent += time.monotonic() - began  # not what the server does between two results
            if spent > self.seconds:
                break
            left.remove(result.client)
            yield result
        yield from (Incident(client, "late", f"after {self.seconds:g} s") for client in sorted(left))
