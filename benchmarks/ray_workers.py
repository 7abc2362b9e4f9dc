"""Speed-up of two Ray workers over one, with compute-bound clients on a cluster of two nodes on this machine.

Run on two idle cores: ``.venv-ray/bin/python benchmarks/ray_workers.py``. Rounds with one and with two workers
alternate, so that other load affects both alike; the figure is the median of the ratios.
"""

from __future__ import annotations

import time

import numpy as np
import ray
from ray.cluster_utils import Cluster

import holdfast as hf
from holdfast.engine.ray import Ray
from work import prepare, rounds_of

CLIENTS, SAMPLES, ROUNDS = 16, 100, 8
TARGET = 1.6


def main() -> None:
    node = {"num_cpus": 1, "object_store_memory": 200 << 20}
    cluster = Cluster(initialize_head=True, head_node_args=node | {"include_dashboard": False})
    cluster.add_node(**node)
    cluster.wait_for_nodes()
    try:
        ratio = measure(cluster.address)
    finally:
        ray.shutdown()
        cluster.shutdown()
    print(f"two workers are {ratio:.2f} times as fast as one (target: {TARGET})")


def measure(address: str) -> float:
    rng = np.random.default_rng(0)
    x, y = (
        rng.integers(0, 255, (CLIENTS * SAMPLES, 3, 32, 32)).astype(np.uint8),
        np.arange(CLIENTS * SAMPLES) % 10,
    )
    federation = hf.federate(hf.Dataset.from_arrays(x, y, x[:20], y[:20]), hf.IID(), clients=CLIENTS)
    training = prepare("fedavg", "cnn", federation, engine="ray", ray_address=address, batch_size=25)
    assert isinstance(training.engine, Ray)
    loop, pool = rounds_of(training), training.engine.pool
    both = list(pool.members)
    loop.round(1)  # the workers start and load their data
    ratios = []
    for _ in range(1, ROUNDS):
        seconds = {}
        for workers in (1, 2):
            pool.members, pool.size = both[:workers], workers
            start = time.perf_counter()
            loop.round(2)
            seconds[workers] = time.perf_counter() - start
        ratios.append(seconds[1] / seconds[2])
    return float(np.median(ratios))


if __name__ == "__main__":
    main()
