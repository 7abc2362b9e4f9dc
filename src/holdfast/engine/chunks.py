"""Chunks of clients, and which worker of a cluster trains which one, where workers have unequal speeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.engine.clients import Job


def split_into_chunks(jobs: Sequence[Job], workers: int, largest: int) -> list[Sequence[Job]]:
    """Consecutive chunks of at most ``largest`` clients, smaller towards the end, so that workers end together."""
    chunks, start = list[Sequence[Job]](), 0
    while start < len(jobs):
        size = min(largest, max(1, largest // 4, (len(jobs) - start) // (2 * workers)))
        chunks.append(jobs[start : start + size])
        start += size
    return chunks


@dataclass(eq=False)
class Pace:
    """The speed of a worker, measured on its last chunks: half of the weight is on the latest."""

    work: float = 0.0
    seconds: float = 0.0

    def add(self, work: float, seconds: float) -> None:
        """Count a chunk."""
        self.work, self.seconds = self.work / 2 + work, self.seconds / 2 + seconds

    @property
    def speed(self) -> float | None:
        """The work done in a second; None before the first chunk."""
        return self.work / self.seconds if self.seconds > 0 and self.work > 0 else None


def choose_chunk(waiting: Sequence[float], speed: float, others: Sequence[tuple[float, float]]) -> int | None:
    """The place in ``waiting`` of the chunk that a free worker should train; None if it should wait.

    ``waiting`` is the work of each chunk; ``others`` are the other workers' remaining work and speed. The worker takes
    the largest chunk that it can finish by the time at which all workers together would finish all work. If there is
    none, it takes the smallest chunk unless another worker would finish that sooner, after what it is doing.
    """
    left = sum(waiting) + sum(remaining for remaining, _ in others)
    end = left / (speed + sum(other for _, other in others))
    order = sorted(range(len(waiting)), key=lambda place: -waiting[place])
    fitting = next((place for place in order if waiting[place] / speed <= end), None)
    if fitting is not None or not order:
        return fitting
    smallest = waiting[order[-1]]
    sooner = any((remaining + smallest) / other < smallest / speed for remaining, other in others)
    return None if sooner else order[-1]
