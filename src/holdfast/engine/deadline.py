"""A deadline for the local training of a round, for engines that run in this process."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from holdfast.engine.base import NO_OVERLAP, Engine, Overlap
from holdfast.engine.clients import Broadcast, ClientResult, Incident, Job


class DeadlineEngine:
    """Stops the training of a round after ``seconds``. The remaining clients are reported as late."""

    train_masked = None

    def __init__(self, engine: Engine, seconds: float) -> None:
        self.engine, self.seconds = engine, seconds
        self.name, self.group = engine.name, engine.group

    def train(
        self, sent: Broadcast, jobs: Sequence[Job], overlap: Overlap = NO_OVERLAP
    ) -> Iterator[ClientResult | Incident]:
        """Train each client until the deadline."""
        remaining = {job.client for job in jobs}
        results, spent = self.engine.train(sent, jobs, overlap), 0.0
        while remaining:
            start = time.monotonic()
            result = next(results)
            spent += time.monotonic() - start  # excludes the server's work between two results
            if spent > self.seconds:
                break
            remaining.remove(result.client)
            yield result
        yield from (Incident(client, "late", f"after {self.seconds:g} s") for client in sorted(remaining))
