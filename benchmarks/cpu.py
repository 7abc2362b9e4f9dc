"""Training on a CPU: convolutions against the bare loop, and small models as lanes.

    python benchmarks/cpu.py [--only W small] [--passes 7] [--threads N] [--json FILE]

W: CIFAR-10 shapes, 10 of 100 clients a round, 500 samples each, batches of 50, one epoch, the ntd-cifar network,
SGD with momentum; the bare loop (NCHW, torch.optim.SGD) against what Holdfast chooses, each in a process of its own
(Holdfast lets its process keep freed memory, which the bare loop's does not). The memory is Holdfast's.
small: digits' shapes, 10 clients of 144 samples; one client after another against lanes.

Passes of all alternate; figures are medians, and ratios those of medians. On a busy machine compare the CPU times
of a single thread: --threads 1.
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

from holdfast.core.device import peak_bytes
from holdfast.core.settings import Settings
from holdfast.data.federation import Federation
from holdfast.engine.rounds import RoundLoop
from holdfast.engine.state_cache import StateCache
from holdfast.methods import parse_method
from holdfast.models import parse_model
from holdfast.training.description import machine
from holdfast.training.session import Training
from work import BareLoop, cifar_shaped, equal_federation

CPU = torch.device("cpu")
SMALL = (
    ("fedavg", "mlp", 10),
    ("fedavg", "mlp", 32),
    ("fedntd", "mlp", 10),
    ("fedavg", "linear", 10),
    ("fedavg", "cnn", 10),
)  # method, model, batch size


def rounds_of(
    method: str, model: str, federation: Federation, engine: str, *, batch: int, sample: int | None = None
) -> RoundLoop:
    settings = Settings(
        rounds=10**6,
        clients_per_round=sample,
        local_epochs=1,
        batch_size=batch,
        lr=0.01,
        momentum=0.9,
        evaluate_every=10**6,
        evaluate_locals=False,
    )
    return Training(
        parse_method(method), parse_model(model), federation, settings, engine=engine, device="cpu"
    ).loop(StateCache(None, None))


Times = tuple[float, float]
"""Of a pass: by the clock and of the CPU, in seconds."""


def timed(work: Callable[[int], object], number: int) -> Times:
    wall, used = time.perf_counter(), time.process_time()
    work(number)
    return time.perf_counter() - wall, time.process_time() - used


def alternate(
    works: dict[str, Callable[[int], Times]], passes: int, warm: int
) -> dict[str, dict[str, float]]:
    """Medians of each work's wall and CPU time in milliseconds; the first ``warm`` passes do not count."""
    times: dict[str, list[Times]] = {name: [] for name in works}
    for number in range(1, warm + passes + 1):
        for name, work in works.items():
            times[name].append(work(number))
    return {
        name: {
            "ms": 1e3 * statistics.median(wall for wall, _ in taken[warm:]),
            "cpu_ms": 1e3 * statistics.median(used for _, used in taken[warm:]),
        }
        for name, taken in times.items()
    }


@cache
def work_w(name: str) -> Callable[[int], object]:
    """A round of W: the bare loop's, or Holdfast's."""
    federation = equal_federation(cifar_shaped(50_000), 100, 500)
    if name == "holdfast":
        return rounds_of("fedavg", "ntd-cifar", federation, "auto", batch=50, clients_per_round=10).round
    net = parse_model("ntd-cifar").build(federation.dataset.shape, 10, 0)
    bare = BareLoop(net, federation, CPU, batch_size=50, local_epochs=1, lr=0.01, momentum=0.9)
    return lambda number: bare.round(np.random.default_rng(number).choice(100, 10, replace=False))


def pass_of_w(name: str, number: int) -> Times:
    return timed(work_w(name), number)


@contextmanager
def process() -> Iterator[ProcessPoolExecutor]:
    """One process that keeps what it has made from call to call."""
    threads = torch.get_num_threads()
    with ProcessPoolExecutor(1, get_context("spawn"), torch.set_num_threads, (threads,)) as pool:
        yield pool


def measure_w(passes: int) -> list[dict]:
    with process() as bare, process() as holdfast:
        works = {
            "bare": lambda n: bare.submit(pass_of_w, "bare", n).result(),
            "holdfast": lambda n: holdfast.submit(pass_of_w, "holdfast", n).result(),
        }
        taken = alternate(works, passes, 1)
        peak = holdfast.submit(peak_bytes, CPU).result() / 2**20
    ratio = taken["holdfast"]["ms"] / taken["bare"]["ms"]
    print(f"{'W, one epoch':24} {'bare ms':>9} {'holdfast ms':>12} {'ratio':>6} {'peak MiB':>9}")
    print(f"{'':24} {taken['bare']['ms']:9.0f} {taken['holdfast']['ms']:12.0f} {ratio:6.2f} {peak:9.0f}\n")
    return [{"bare": taken["bare"], "holdfast": taken["holdfast"], "ratio": ratio, "peak_mib": peak}]


def measure_small(passes: int) -> list[dict]:
    rows = []
    print(f"{'small models':24} {'sequential ms':>14} {'lanes ms':>9} {'times':>6} {'times by CPU time':>18}")
    federation = equal_federation(cifar_shaped(1440, shape=(1, 8, 8)), 10, 144)
    for method, model, batch in SMALL:
        loops = {
            e: rounds_of(method, model, federation, e, batch=batch) for e in ("sequential", "vectorized")
        }
        works = {engine: partial(timed, loop.round) for engine, loop in loops.items()}
        taken = alternate(works, 3 * passes, 3)
        times, by_cpu = (taken["sequential"][key] / taken["vectorized"][key] for key in ("ms", "cpu_ms"))
        print(
            f"{f'{method}, {model}, batch {batch}':24} {taken['sequential']['ms']:14.1f} "
            f"{taken['vectorized']['ms']:9.1f} {times:6.2f} {by_cpu:18.2f}",
            flush=True,
        )
        rows.append(
            {"method": method, "model": model, "batch": batch, **taken, "times": times, "by_cpu": by_cpu}
        )
    return rows


PARTS = {"W": measure_w, "small": measure_small}


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
