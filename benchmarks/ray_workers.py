"""Two Ray workers against one, on a cluster of two nodes on this machine: rounds of compute-bound clients.

Run on two idle cores: ``.venv-ray/bin/python benchmarks/ray_workers.py``. The two alternate, so that whatever else
the machine does meets both; the figure is the median of the rounds' ratios.
"""

from __future__ import annotations

import time

import numpy as np
import ray
from ray.cluster_utils import Cluster

import holdfast as hf
from holdfast.core.settings import Settings
from holdfast.engine.ray import Ray
from holdfast.engine.state_cache import StateCache
from holdfast.training.session import Training

CLIENTS, SAMPLES, ROUNDS = 16, 100, 8
WANTED = 1.6


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
    print(f"two workers are {ratio:.2f} times as fast as one (wanted: {WANTED})")


def measure(address: str) -> float:
    rng = np.random.default_rng(0)
    x, y = (
        rng.integers(0, 255, (CLIENTS * SAMPLES, 3, 32, 32)).astype(np.uint8),
        np.arange(CLIENTS * SAMPLES) % 10,
    )
    federation = hf.federate(hf.Dataset.from_arrays(x, y, x[:20], y[:20]), hf.IID(), clients=CLIENTS)
    settings = Settings(rounds=ROUNDS, batch_size=25, evaluate_locals=False, evaluate_every=ROUNDS)
    model = hf.parse_model("cnn")
    training = Training(
        hf.FedAvg(), model, federation, settings, engine="ray", ray_address=address, device="cpu"
    )
    assert isinstance(training.engine, Ray)
    loop, pool = training.loop(StateCache(None, None)), training.engine.pool
    both = list(pool.members)
    loop.round(1)  # workers start and fetch their data
    ratios = []
    for _ in range(1, ROUNDS):
        took = {}
        for workers in (1, 2):
            pool.members, pool.size = both[:workers], workers
            began = time.perf_counter()
            loop.round(2)
            took[workers] = time.perf_counter() - began
        ratios.append(took[1] / took[2])
    return float(np.median(ratios))


if __name__ == "__main__":
    main()
