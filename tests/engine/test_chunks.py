"""Chunks of clients and their assignment to workers, against simulated rounds."""

import heapq
from itertools import pairwise

import numpy as np
import pytest

from holdfast.engine.chunks import Pace, choose_chunk, split_into_chunks
from holdfast.engine.clients import Job


def jobs(sizes):
    return [Job(client, np.arange(size), 0) for client, size in enumerate(sizes)]


@pytest.mark.parametrize(("clients", "workers", "largest"), [(1, 4, 1), (40, 4, 2), (1000, 3, 80), (7, 8, 1)])
def test_chunks_are_consecutive_and_become_smaller(clients, workers, largest):
    chunks = split_into_chunks(jobs([1] * clients), workers, largest)
    assert [job.client for chunk in chunks for job in chunk] == list(range(clients))
    sizes = [len(chunk) for chunk in chunks]
    assert max(sizes) <= largest
    # The last chunk holds what the others leave.
    assert all(a >= b for a, b in pairwise(sizes[:-1]))


def test_the_latest_chunk_has_half_of_the_weight():
    pace = Pace()
    assert pace.speed is None
    pace.add(10, 1.0)
    assert pace.speed == 10
    pace.add(10, 2.0)
    assert pace.speed == pytest.approx((10 / 2 + 10) / (1 / 2 + 2))


def round_time(work, speeds, choose):
    """The time of a round in which every free worker takes the chunk that ``choose`` names."""
    waiting, now, busy = list(work), 0.0, []
    free = set(range(len(speeds)))
    while waiting or busy:
        for worker in sorted(free, key=lambda w: -speeds[w]):
            others = []
            for other, speed in enumerate(speeds):
                if other != worker:
                    left = sum((end - now) * speed for end, w, _ in busy if w == other)
                    others.append((left, speed))
            place = choose(waiting, speeds[worker], others) if waiting else None
            if place is not None:
                chunk = waiting.pop(place)
                heapq.heappush(busy, (now + chunk / speeds[worker], worker, chunk))
                free.discard(worker)
        assert busy, "no worker takes a chunk"
        now, worker, _ = heapq.heappop(busy)
        free.add(worker)
    return now


@pytest.mark.parametrize("seed", range(20))
def test_workers_of_unequal_speeds_end_together(seed):
    """The round is close to the ideal time, and not slower than first come, first served."""
    rng = np.random.default_rng(seed)
    speeds = [1.0, 0.8, 0.5, 0.3]
    sizes = rng.multinomial(2000, rng.dirichlet([1.0] * 40)) + 1
    work = [float(sum(len(job.ids) for job in chunk)) for chunk in split_into_chunks(jobs(sizes), 4, 2)]
    ideal = max(sum(work) / sum(speeds), max(work) / max(speeds))
    chosen = round_time(work, speeds, choose_chunk)
    first = round_time(work, speeds, lambda waiting, speed, others: 0)
    assert chosen <= first * 1.02
    assert chosen <= ideal * 1.2


def test_the_assignment_is_better_than_first_come_first_served_on_average():
    ratios = []
    for seed in range(50):
        rng = np.random.default_rng(seed)
        work = (rng.multinomial(2000, rng.dirichlet([1.0] * 25)) + 1.0).tolist()
        speeds = [1.0, 0.8, 0.5, 0.3]
        chosen = round_time(work, speeds, choose_chunk)
        ratios.append(chosen / round_time(work, speeds, lambda waiting, speed, others: 0))
    assert np.mean(ratios) < 0.9


def test_a_slow_worker_leaves_the_last_chunk_to_a_fast_one():
    assert (
        choose_chunk([10.0], 1.0, [(5.0, 10.0)]) is None
    )  # the other ends it after 1.5 s, this one after 10
    assert choose_chunk([10.0], 1.0, [(95.0, 10.0)]) == 0
    assert choose_chunk([10.0, 30.0], 10.0, [(0.0, 1.0)]) == 1  # the largest that fits
    assert choose_chunk([], 1.0, []) is None
