"""A registered population costs memory for an index, and a round costs what its sampled clients cost.

    python benchmarks/population.py

Rounds of 10 sampled clients out of 100 and out of 1,000,000 registered ones, over data of CIFAR-10's size.
"""

from __future__ import annotations

import resource
import statistics
import time

import numpy as np

from holdfast.data.federation import Federation
from holdfast.engine.settings import Settings
from holdfast.methods import FedAvg
from holdfast.models import parse_model
from holdfast.training import Memories, Training
from work import cifar_shaped


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    dataset = cifar_shaped(50_000)
    rng = np.random.default_rng(0)
    before = peak_mib()
    print(f"{'registered clients':>20} {'round ms':>10} {'MiB above the data':>20}")
    for clients in (100, 1_000_000):
        # Every client holds 20 samples; with many clients samples are held by several of them.
        indices = rng.integers(0, 50_000, clients * 20)
        offsets = np.arange(clients + 1, dtype=np.int64) * 20
        federation = Federation(dataset, indices, offsets)
        settings = Settings(
            rounds=10**6, sample=10, batch_size=10, evaluate_every=10**6, evaluate_locals=False
        )
        training = Training(
            FedAvg(), parse_model("linear"), federation, settings, engine="sequential", device="cpu"
        )
        loop = training.loop(Memories(None, None))
        times = []
        for number in range(1, 31):
            began = time.perf_counter()
            loop.round(number)
            times.append(time.perf_counter() - began)
        print(
            f"{clients:20,} {1e3 * statistics.median(times[5:]):10.2f} {peak_mib() - before:20.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
