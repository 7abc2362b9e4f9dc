"""A registered population costs memory for an index, and a round costs what its sampled clients cost.

    python benchmarks/population.py
    python benchmarks/population.py --state scaffold

Rounds of 10 sampled clients out of 100 and out of 1,000,000 registered ones, over data of CIFAR-10's size. With
``--state``: rounds of 1,000 out of 100,000 clients that remember as much as a model each (197 kB), of which 256 MiB
may stay in RAM; the rest goes to the disk.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import tempfile
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from holdfast.core.settings import Settings
from holdfast.data.dataset import Dataset
from holdfast.data.federation import Federation
from holdfast.engine import state_cache as memories
from holdfast.engine.state_cache import StateCache
from holdfast.methods import FedAvg, parse_method
from holdfast.models import parse_model
from holdfast.training.session import Training
from work import cifar_shaped

STATE_ROUNDS, STATE_BUDGET = 10, 256 << 20


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def population(dataset: Dataset, clients: int) -> Federation:
    """Every client holds 20 samples; with many clients samples are held by several of them."""
    indices = np.random.default_rng(0).integers(0, 50_000, clients * 20)
    return Federation(dataset, indices, np.arange(clients + 1, dtype=np.int64) * 20)


def prepared(method: str, model: str, federation: Federation, sample: int) -> Training:
    settings = Settings(
        rounds=10**6, clients_per_round=sample, batch_size=10, evaluate_every=10**6, evaluate_locals=False
    )
    return Training(
        parse_method(method), parse_model(model), federation, settings, engine="sequential", device="cpu"
    )


def rounds_of_many(dataset: Dataset) -> None:
    before = peak_mib()
    print(f"{'registered clients':>20} {'round ms':>10} {'MiB above the data':>20}")
    for clients in (100, 1_000_000):
        training = prepared(FedAvg.name, "linear", population(dataset, clients), sample=10)
        loop = training.loop(StateCache(None, None))
        times = []
        for number in range(1, 31):
            began = time.perf_counter()
            loop.round(number)
            times.append(time.perf_counter() - began)
        print(
            f"{clients:20,} {1e3 * statistics.median(times[5:]):10.2f} {peak_mib() - before:20.0f}",
            flush=True,
        )


def rounds_that_remember(dataset: Dataset, method: str) -> None:
    before = peak_mib()
    memories.RAM_BYTES = STATE_BUDGET
    training = prepared(method, "mlp:16", population(dataset, 100_000), sample=1000)
    with TemporaryDirectory() as folder:
        tempfile.tempdir = folder  # where memories go that have no run directory
        loop = training.loop(StateCache(None, None))
        print(
            f"{'round':>6} {'seconds':>8} {'clients on disk':>16} {'MB on disk':>11} {'MiB above the data':>19}"
        )
        for number in range(1, STATE_ROUNDS + 1):
            began = time.perf_counter()
            loop.round(number)
            files = [file.stat().st_size for file in Path(folder).glob("*/*.safetensors")]
            print(
                f"{number:6} {time.perf_counter() - began:8.1f} {len(files):16,} {sum(files) / 1e6:11.0f} "
                f"{peak_mib() - before:19.0f}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--state", metavar="METHOD", help="a method whose clients remember: scaffold or moon")
    arguments = parser.parse_args()
    dataset = cifar_shaped(50_000)
    if arguments.state is None:
        rounds_of_many(dataset)
    else:
        rounds_that_remember(dataset, arguments.state)


if __name__ == "__main__":
    main()
