"""Rounds with a deadline, on any engine of this process."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from holdfast.engine.base import NO_OVERLAP, Engine, Overlap
from holdfast.engine.clients import Broadcast, ClientResult, Incident, Job


class DeadlineEngine:
    """An engine whose rounds close after ``seconds`` of training; clients that are not ready by then are late."""

    def __init__(self, engine: Engine, seconds: float) -> None:
        self.engine, self.seconds = engine, seconds
        self.name, self.group = engine.name, engine.group

    def train(
        self, sent: Broadcast, jobs: Sequence[Job], overlap: Overlap = NO_OVERLAP
    ) -> Iterator[ClientResult | Incident]:
        """Train each client until the deadline."""
        left = {job.client for job in jobs}
        results, spent = self.engine.train(sent, jobs, overlap), 0.0
        while left:
            began = time.monotonic()
            result = next(results)
            spent += time.monotonic() - began  # without the server's work between two results
            if spent > self.seconds:
                break
            left.remove(result.client)
            yield result
        yield from (Incident(client, "late", f"after {self.seconds:g} s") for client in sorted(left))
