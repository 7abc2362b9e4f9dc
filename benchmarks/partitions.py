"""Time and memory to build large federations: `python benchmarks/partitions.py`.

Each case runs in a separate process, to measure its peak memory without that of imports and data. CPU time is
reported as well as wall time, because it hardly depends on other load on the machine.
"""

from __future__ import annotations

import multiprocessing
import resource
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import numpy as np
import torch

from holdfast.data.dataset import Dataset
from holdfast.data.federation import Federation, federate
from holdfast.data.partitions import IID, Dirichlet
from holdfast.data.streams import stream


def read_labelled(samples: int, classes: int = 10) -> Dataset:
    """Labels without images, which partitions do not use."""
    y = torch.arange(samples) % classes
    return Dataset(
        "labels", torch.zeros(samples, 1), y, torch.zeros(1, 1), y[:1], tuple(map(str, range(classes)))
    )


CASES: dict[str, tuple[int, Callable[[Dataset], Federation]]] = {
    "CIFAR-10 sizes, 100 clients, Dirichlet 0.05, min_size 10, seed 0": (
        50_000,
        lambda data: federate(data, Dirichlet(0.05), clients=100),
    ),
    "CIFAR-10 sizes, 100 clients, Dirichlet 0.05, min_size 10, seed 1": (
        50_000,
        lambda data: federate(data, Dirichlet(0.05), clients=100, seed=1),
    ),
    "CIFAR-10 sizes, 1,000,000 clients, Dirichlet 0.1, min_size 0": (
        50_000,
        lambda data: federate(data, Dirichlet(0.1, min_size=0), clients=1_000_000),
    ),
    "stream, 100,000 clients x 5 stages, Dirichlet 0.1, min_size 0": (
        50_000,
        lambda data: stream(data, Dirichlet(0.1, min_size=0), clients=100_000, tasks_per_client=5),
    ),
    "10,000,000 samples, 1,000,000 clients, IID": (
        10_000_000,
        lambda data: federate(data, IID(), clients=1_000_000),
    ),
    "10,000,000 samples, 1,000,000 clients, Dirichlet 0.1, min_size 0": (
        10_000_000,
        lambda data: federate(data, Dirichlet(0.1, min_size=0), clients=1_000_000),
    ),
    "10,000,000 samples, 1,000,000 clients, Dirichlet 10, min_size 1": (
        10_000_000,
        lambda data: federate(data, Dirichlet(10.0, min_size=1), clients=1_000_000),
    ),
}


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(name: str, results: Connection) -> None:
    samples, build = CASES[name]
    data = read_labelled(samples)
    before, wall, cpu = peak_mib(), time.perf_counter(), time.process_time()
    federation = build(data)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    peak = peak_mib() - before
    size = sum(array.nbytes for array in (federation.indices, federation.offsets)) / 2**20
    start = time.perf_counter()
    clients = np.flatnonzero(federation.sizes())[:10]
    for k in clients:
        federation.client(int(k))
    federation.label_counts(clients)
    results.send((wall, cpu, peak, size, (time.perf_counter() - start) * 1000))


def main() -> None:
    print(f"{'':66s} {'s':>7s} {'CPU s':>12s} {'peak MiB':>9s} {'size MiB':>9s} {'10 clients, ms':>15s}")
    for name in CASES:
        receive, send = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.get_context("spawn").Process(target=measure, args=(name, send))
        process.start()
        wall, cpu, peak, size, lookup = receive.recv()
        process.join()
        print(f"{name:66s} {wall:7.2f} {cpu:12.2f} {peak:9.0f} {size:9.1f} {lookup:15.2f}", flush=True)


if __name__ == "__main__":
    main()
