"""Time and memory by the number of registered clients: a round costs only what its sampled clients cost.

    python benchmarks/population.py
    python benchmarks/population.py --state scaffold

Rounds of 10 sampled clients out of 100 and out of 1,000,000 registered ones, with data of CIFAR-10's size. With
``--state``: rounds of 1,000 out of 100,000 clients that each have a state as large as the model (197 kB), of which
256 MiB may stay in RAM and the rest is stored on disk.
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

from holdfast.data.dataset import Dataset
from holdfast.data.federation import Federation
from holdfast.engine import state_cache
from holdfast.engine.rounds import RoundLoop
from work import cifar_shaped, prepare, rounds_of

STATE_ROUNDS, STATE_BUDGET = 10, 256 << 20


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def population(dataset: Dataset, clients: int) -> Federation:
    """Clients with 20 samples each, drawn with replacement."""
    indices = np.random.default_rng(0).integers(0, 50_000, clients * 20)
    return Federation(dataset, indices, np.arange(clients + 1, dtype=np.int64) * 20)


def rounds(method: str, model: str, federation: Federation, clients_per_round: int) -> RoundLoop:
    training = prepare(
        method, model, federation, engine="sequential", clients_per_round=clients_per_round, batch_size=10
    )
    return rounds_of(training)


def without_state(dataset: Dataset) -> None:
    before = peak_mib()
    print(f"{'registered clients':>20} {'round ms':>10} {'MiB above the data':>20}")
    for clients in (100, 1_000_000):
        loop = rounds("fedavg", "linear", population(dataset, clients), 10)
        times = []
        for number in range(1, 31):
            start = time.perf_counter()
            loop.round(number)
            times.append(time.perf_counter() - start)
        print(
            f"{clients:20,} {1e3 * statistics.median(times[5:]):10.2f} {peak_mib() - before:20.0f}",
            flush=True,
        )


def with_state(dataset: Dataset, method: str) -> None:
    before = peak_mib()
    state_cache.RAM_BYTES = STATE_BUDGET
    with TemporaryDirectory() as folder:
        tempfile.tempdir = folder  # without a run directory, states are spilled to temporary files
        loop = rounds(method, "mlp:16", population(dataset, 100_000), 1000)
        print(
            f"{'round':>6} {'seconds':>8} {'clients on disk':>16} {'MB on disk':>11} {'MiB above the data':>19}"
        )
        for number in range(1, STATE_ROUNDS + 1):
            start = time.perf_counter()
            loop.round(number)
            files = [file.stat().st_size for file in Path(folder).glob("*/*.safetensors")]
            print(
                f"{number:6} {time.perf_counter() - start:8.1f} {len(files):16,} {sum(files) / 1e6:11.0f} "
                f"{peak_mib() - before:19.0f}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--state", metavar="METHOD", help="a method with client states: scaffold or moon")
    arguments = parser.parse_args()
    dataset = cifar_shaped(50_000)
    if arguments.state is None:
        without_state(dataset)
    else:
        with_state(dataset, arguments.state)


if __name__ == "__main__":
    main()
