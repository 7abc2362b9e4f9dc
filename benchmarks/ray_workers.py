"""Ray workers: the speed-up of two over one, and the efficiency of four workers with unequal speeds.

Run on two idle cores: ``.venv-ray/bin/python benchmarks/ray_workers.py``.

two: compute-bound clients on a cluster of two nodes on this machine. Rounds with one and with two workers alternate, so
that other load affects both alike; the figure is the median of the ratios.
unequal: four nodes with the speeds 1, 0.8, 0.5 and 0.3. A client's training is a wait of its samples' time divided by
the speed of its worker, so that the number of cores does not matter. The figure is the ideal time, all waits divided by
the sum of the speeds, over the median time of a round, which includes transport and aggregation.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import ray
from ray.cluster_utils import Cluster

import holdfast as hf
from holdfast.engine.ray import RayEngine
from waiting import Waits
from work import prepare, rounds_of

CLIENTS, SAMPLES, ROUNDS = 16, 100, 8
TARGET = 1.6
SPEEDS = (1.0, 0.8, 0.5, 0.3)
COHORT, SECONDS_PER_SAMPLE = 40, 0.004
EFFICIENCY = 0.85


@contextmanager
def cluster(nodes: int) -> Iterator[str]:
    """The address of a cluster of nodes with one CPU each."""
    node = {"num_cpus": 1, "object_store_memory": 200 << 20}
    started = Cluster(initialize_head=True, head_node_args=node | {"include_dashboard": False})
    for _ in range(nodes - 1):
        started.add_node(**node)
    started.wait_for_nodes()
    try:
        yield started.address
    finally:
        ray.shutdown()
        started.shutdown()


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def images(samples: int) -> hf.Dataset:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 255, (samples, 3, 32, 32)).astype(np.uint8)
    return hf.Dataset.from_arrays(x, np.arange(samples) % 10, x[:20], np.arange(20) % 10)


def two_workers(address: str) -> float:
    """How many times as fast two workers are as one."""
    federation = hf.federate(images(CLIENTS * SAMPLES), hf.IID(), clients=CLIENTS)
    training = prepare("fedavg", "cnn", federation, engine="ray", ray_address=address, batch_size=25)
    assert isinstance(training.engine, RayEngine)
    loop, pool = rounds_of(training), training.engine.pool
    both = list(pool.workers)
    loop.round(1)  # the workers start and load their data
    ratios = []
    for _ in range(1, ROUNDS):
        seconds = {}
        for workers in (1, 2):
            pool.workers, pool.size = both[:workers], workers
            seconds[workers] = timed(lambda: loop.round(2))
        ratios.append(seconds[1] / seconds[2])
    return statistics.median(ratios)


def unequal_workers(address: str) -> float:
    """The share of the ideal speed that workers of unequal speeds reach."""
    ray.init(address, log_to_driver=False, logging_level="error")
    nodes = sorted(node["NodeID"] for node in ray.nodes())
    speeds = ",".join(f"{node}={speed}" for node, speed in zip(nodes, SPEEDS, strict=True))
    federation = hf.federate(images(COHORT * 50), hf.Dirichlet(1.0), clients=COHORT, seed=0)
    method = Waits(seconds_per_sample=SECONDS_PER_SAMPLE, speeds=speeds)
    training = prepare(method, "linear", federation, engine="ray", ray_address=address, batch_size=1000)
    loop = rounds_of(training)
    loop.round(1)
    seconds = [timed(lambda: loop.round(2)) for _ in range(ROUNDS)]
    ideal = SECONDS_PER_SAMPLE * int(federation.sizes(0).sum()) / sum(SPEEDS)
    return ideal / statistics.median(seconds)


def main() -> None:
    with cluster(2) as address:
        print(f"two workers are {two_workers(address):.2f} times as fast as one (target: {TARGET})")
    with cluster(len(SPEEDS)) as address:
        speeds = ", ".join(map(str, SPEEDS))
        print(
            f"workers of speeds {speeds}: {unequal_workers(address):.0%} of the ideal (target: {EFFICIENCY:.0%})"
        )


if __name__ == "__main__":
    main()
