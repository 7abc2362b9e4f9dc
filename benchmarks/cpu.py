"""Training on a CPU: convolutions compared with a plain loop, and small models on both engines.

    python benchmarks/cpu.py [--only W small table] [--passes 7] [--threads N] [--json FILE]

W: CIFAR-10 shapes, 10 of 100 clients a round, 500 samples each, batches of 50, one epoch, the ntd-cifar network,
SGD with momentum; the plain loop (NCHW, torch.optim.SGD) and Holdfast's default, each in a separate process, because
Holdfast makes its process keep freed memory. The memory is Holdfast's.
small: the shapes of digits, 10 clients of 144 samples; the sequential and the vectorized engine.
table: heart disease ($HOLDFAST_DATA), 4 hospitals, a linear model, batches of 4, one epoch; the plain loop and engine
auto.

The compared programs run alternately; figures are medians, ratios those of medians. On a busy machine compare the CPU
times of a single thread: --threads 1.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from multiprocessing import get_context

import numpy as np
import torch

from holdfast import BySite, federate, load
from holdfast.core.device import peak_bytes
from holdfast.models import parse_model
from holdfast.training.description import machine
from work import BareLoop, cifar_shaped, equal_federation, prepare, rounds_of

CPU = torch.device("cpu")
SMALL = (
    ("fedavg", "mlp", 10),
    ("fedavg", "mlp", 32),
    ("fedntd", "mlp", 10),
    ("fedavg", "linear", 10),
    ("fedavg", "cnn", 10),
)  # method, model, batch size


Times = tuple[float, float]
"""Wall time and CPU time of a pass in seconds."""


def timed(work: Callable[[int], object], number: int) -> Times:
    wall, cpu = time.perf_counter(), time.process_time()
    work(number)
    return time.perf_counter() - wall, time.process_time() - cpu


def alternate(
    works: dict[str, Callable[[int], Times]], passes: int, warm: int
) -> dict[str, dict[str, float]]:
    """Median wall and CPU times of each in milliseconds, in alternating passes without the first ``warm`` ones."""
    times: dict[str, list[Times]] = {name: [] for name in works}
    for number in range(1, warm + passes + 1):
        for name, work in works.items():
            times[name].append(work(number))
    return {
        name: {
            "ms": 1e3 * statistics.median(wall for wall, _ in passes[warm:]),
            "cpu_ms": 1e3 * statistics.median(cpu for _, cpu in passes[warm:]),
        }
        for name, passes in times.items()
    }


@cache
def work_w(name: str) -> Callable[[int], object]:
    """A function that trains a round of W by its number, with the plain loop or with Holdfast."""
    federation = equal_federation(cifar_shaped(50_000), 100, 500)
    if name == "holdfast":
        return rounds_of(
            prepare("fedavg", "ntd-cifar", federation, clients_per_round=10, batch_size=50, momentum=0.9)
        ).round
    net = parse_model("ntd-cifar").build(federation.dataset.shape, 10, 0)
    bare = BareLoop(net, federation, CPU, batch_size=50, local_epochs=1)
    return lambda number: bare.round(np.random.default_rng(number).choice(100, 10, replace=False))


def pass_of_w(name: str, number: int) -> Times:
    return timed(work_w(name), number)


@contextmanager
def process() -> Iterator[ProcessPoolExecutor]:
    """A single process that keeps its objects from call to call."""
    threads = torch.get_num_threads()
    with ProcessPoolExecutor(1, get_context("spawn"), torch.set_num_threads, (threads,)) as pool:
        yield pool


def measure_w(passes: int) -> list[dict]:
    with process() as bare, process() as holdfast:
        works = {
            "bare": lambda n: bare.submit(pass_of_w, "bare", n).result(),
            "holdfast": lambda n: holdfast.submit(pass_of_w, "holdfast", n).result(),
        }
        times = alternate(works, passes, 1)
        peak = holdfast.submit(peak_bytes, CPU).result() / 2**20
    ratio = times["holdfast"]["ms"] / times["bare"]["ms"]
    print(f"{'W, one epoch':24} {'bare ms':>9} {'holdfast ms':>12} {'ratio':>6} {'peak MiB':>9}")
    print(f"{'':24} {times['bare']['ms']:9.0f} {times['holdfast']['ms']:12.0f} {ratio:6.2f} {peak:9.0f}\n")
    return [{"bare": times["bare"], "holdfast": times["holdfast"], "ratio": ratio, "peak_mib": peak}]


def measure_small(passes: int) -> list[dict]:
    rows = []
    print(
        f"{'small models':24} {'sequential ms':>14} {'vectorized ms':>14} {'ratio':>6} {'ratio of CPU time':>18}"
    )
    federation = equal_federation(cifar_shaped(1440, shape=(1, 8, 8)), 10, 144)
    for method, model, batch in SMALL:
        loops = {
            engine: rounds_of(
                prepare(method, model, federation, engine=engine, batch_size=batch, momentum=0.9)
            )
            for engine in ("sequential", "vectorized")
        }
        works = {engine: partial(timed, loop.round) for engine, loop in loops.items()}
        times = alternate(works, 3 * passes, 3)
        ratio, cpu_ratio = (times["sequential"][key] / times["vectorized"][key] for key in ("ms", "cpu_ms"))
        print(
            f"{f'{method}, {model}, batch {batch}':24} {times['sequential']['ms']:14.1f} "
            f"{times['vectorized']['ms']:14.1f} {ratio:6.2f} {cpu_ratio:18.2f}",
            flush=True,
        )
        rows.append(
            {"method": method, "model": model, "batch": batch, **times, "times": ratio, "by_cpu": cpu_ratio}
        )
    return rows


def binary_cross_entropy(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.binary_cross_entropy_with_logits(logits[:, 0], y.to(logits.dtype))


def measure_table(passes: int) -> list[dict]:
    federation = federate(load("heart-disease"), BySite())
    net = parse_model("linear").build(federation.dataset.shape, 1, 0)
    hospitals, rows = np.arange(federation.clients), []
    print(f"{'heart disease':24} {'bare ms':>9} {'holdfast ms':>12} {'ratio':>6} {'ratio of CPU time':>18}")
    for name, kind in (("sgd", torch.optim.SGD), ("adam", torch.optim.Adam)):
        bare = BareLoop(
            net, federation, CPU, batch_size=4, local_epochs=1, optimizer=kind, loss=binary_cross_entropy
        )
        loop = rounds_of(prepare("fedavg", "linear", federation, optimizer=name, lr=0.001, batch_size=4))
        works = {
            "bare": partial(timed, lambda _, bare=bare: bare.round(hospitals)),
            "holdfast": partial(timed, loop.round),
        }
        times = alternate(works, 3 * passes, 3)
        ratio, cpu_ratio = (times["holdfast"][key] / times["bare"][key] for key in ("ms", "cpu_ms"))
        print(
            f"{f'{name}, {loop.engine.name}':24} {times['bare']['ms']:9.1f} {times['holdfast']['ms']:12.1f} "
            f"{ratio:6.2f} {cpu_ratio:18.2f}",
            flush=True,
        )
        rows.append({"optimizer": name, **times, "ratio": ratio, "by_cpu": cpu_ratio})
    return rows


PARTS = {"W": measure_w, "small": measure_small, "table": measure_table}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--passes", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"{machine(CPU)}, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}\n")
    report = {"machine": machine(CPU), "load": os.getloadavg()[0], "torch": str(torch.__version__)}
    report |= {name: PARTS[name](arguments.passes) for name in arguments.only}
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
