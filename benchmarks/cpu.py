"""Training on a CPU: convolutions against the bare loop, and small models as lanes.

    python benchmarks/cpu.py [--only W small] [--passes 7] [--threads N] [--json FILE]

W: CIFAR-10 shapes, 10 of 100 clients a round, 500 samples each, batches of 50, one epoch, the ntd-cifar network,
SGD with momentum; the bare loop (NCHW, torch.optim.SGD) against what Holdfast chooses; the memory is that of a
process that does nothing else.
small: digits' shapes, 10 clients of 144 samples; one client after another against lanes.

Passes of all alternate; figures are medians, and ratios those of medians. On a busy machine compare the CPU times
of a single thread: --threads 1.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch

from holdfast.data.federation import Federation
from holdfast.describing import machine
from holdfast.engine.loop import Loop
from holdfast.engine.memory import peak_bytes
from holdfast.engine.settings import Settings
from holdfast.methods import parse_method
from holdfast.models import parse_model
from holdfast.training import Memories, Training
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
) -> Loop:
    settings = Settings(
        rounds=10**6, sample=sample, epochs=1, batch_size=batch, lr=0.01, momentum=0.9, evaluate_every=10**6,
        evaluate_locals=False,
    )  # fmt: skip
    return Training(
        parse_method(method), parse_model(model), federation, settings, engine=engine, device="cpu"
    ).loop(Memories(None, None))


def alternate(
    works: dict[str, Callable[[int], object]], passes: int, warm: int
) -> dict[str, dict[str, float]]:
    """Medians of each work's wall and CPU time in milliseconds; the first ``warm`` passes do not count."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
    for number in range(1, warm + passes + 1):
        for name, work in works.items():
            wall, used = time.perf_counter(), time.process_time()
            work(number)
            times[name].append((time.perf_counter() - wall, time.process_time() - used))
    return {
        name: {
            "ms": 1e3 * statistics.median(wall for wall, _ in taken[warm:]),
            "cpu_ms": 1e3 * statistics.median(used for _, used in taken[warm:]),
        }
        for name, taken in times.items()
    }


def work_w() -> tuple[Federation, Loop]:
    federation = equal_federation(cifar_shaped(50_000), 100, 500)
    return federation, rounds_of("fedavg", "ntd-cifar", federation, "auto", batch=50, sample=10)


def measure_w(passes: int) -> list[dict]:
    federation, loop = work_w()
    net = parse_model("ntd-cifar").build(federation.dataset.shape, 10, 0)
    bare = BareLoop(net, federation, CPU, batch_size=50, epochs=1, lr=0.01, momentum=0.9)
    taken = alternate({"bare": lambda n: bare.round(loop.participants(n)), "holdfast": loop.round}, passes, 1)
    alone = subprocess.run(
        [sys.executable, __file__, "--memory-of-w", "--threads", str(torch.get_num_threads())],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    ratio = taken["holdfast"]["ms"] / taken["bare"]["ms"]
    print(f"{'W, one epoch':24} {'bare ms':>9} {'holdfast ms':>12} {'ratio':>6} {'peak MiB':>9}")
    peak = int(alone.stdout) / 2**20
    print(f"{'':24} {taken['bare']['ms']:9.0f} {taken['holdfast']['ms']:12.0f} {ratio:6.2f} {peak:9.0f}\n")
    return [{"bare": taken["bare"], "holdfast": taken["holdfast"], "ratio": ratio, "peak_mib": peak}]


def measure_small(passes: int) -> list[dict]:
    rows = []
    print(f"{'small models':24} {'sequential ms':>14} {'lanes ms':>9} {'times':>6} {'times by CPU time':>18}")
    federation = equal_federation(cifar_shaped(1440, shape=(1, 8, 8)), 10, 144)
    for method, model, batch in SMALL:
        loops = {e: rounds_of(method, model, federation, e, batch=batch) for e in ("sequential", "lanes")}
        taken = alternate({engine: loop.round for engine, loop in loops.items()}, 3 * passes, 3)
        times, by_cpu = (taken["sequential"][key] / taken["lanes"][key] for key in ("ms", "cpu_ms"))
        print(
            f"{f'{method}, {model}, batch {batch}':24} {taken['sequential']['ms']:14.1f} "
            f"{taken['lanes']['ms']:9.1f} {times:6.2f} {by_cpu:18.2f}",
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
    parser.add_argument("--memory-of-w", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.memory_of_w:
        work_w()[1].round(1)
        print(peak_bytes(CPU))
        return
    print(f"{machine(CPU)}, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}\n")
    report = {"machine": machine(CPU), "load": os.getloadavg()[0], "torch": str(torch.__version__)}
    report |= {name: PARTS[name](arguments.passes) for name in arguments.only}
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
