"""The time of a round by the number of sampled clients and by the number of registered clients.

    python benchmarks/scale.py [--json FILE] [--plot FILE.svg]

Rounds of 10 to 1,000 sampled clients out of 10,000, and of 10 out of 100 to 1,000,000 registered ones. Every client
has 20 samples of CIFAR-10's shape; a linear model, batches of 10, one epoch, one thread. Times are CPU times, which
hardly depend on other load; medians of the rounds after the first three.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np
import torch

from holdfast.data.dataset import Dataset
from holdfast.data.federation import Federation
from holdfast.engine.rounds import RoundLoop
from work import cifar_shaped, prepare, rounds_of

SAMPLED, REGISTERED = (10, 30, 100, 300, 1000), (100, 1_000, 10_000, 100_000, 1_000_000)


def rounds(dataset: Dataset, registered: int, sampled: int) -> RoundLoop:
    """The rounds of a federation whose clients have 20 samples each, drawn with replacement."""
    indices = np.random.default_rng(0).integers(0, len(dataset.y_train), registered * 20)
    federation = Federation(dataset, indices, np.arange(registered + 1, dtype=np.int64) * 20)
    return rounds_of(prepare("fedavg", "linear", federation, clients_per_round=sampled, batch_size=10))


def curve(loops: dict[int, RoundLoop], rounds: int) -> list[dict[str, float]]:
    """The median CPU time of a round in milliseconds for each number of clients; the numbers alternate."""
    times: dict[int, list[float]] = {clients: [] for clients in loops}
    for number in range(1, rounds + 4):
        for clients, loop in loops.items():
            start = time.process_time()
            loop.round(number)
            times[clients].append(time.process_time() - start)
    return [{"clients": n, "cpu_ms": 1e3 * statistics.median(ms[3:])} for n, ms in times.items()]


def draw(report: dict, path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "holdfast"
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(8, 3), sharey=True, layout="constrained")
    for axis, (label, points) in zip(axes, report["curves"].items(), strict=True):
        axis.loglog(
            [p["clients"] for p in points], [p["cpu_ms"] for p in points], marker="o", color="#2a6f97"
        )
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("CPU ms a round")
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dataset = cifar_shaped(50_000)
    report: dict = {"torch": str(torch.__version__), "curves": {}}
    cases = {
        "sampled clients, of 10,000": ({n: (10_000, n) for n in SAMPLED}, 12),
        "registered clients, 10 sampled": ({n: (n, 10) for n in REGISTERED}, 60),
    }
    for label, (pairs, count) in cases.items():
        loops = {n: rounds(dataset, registered, sampled) for n, (registered, sampled) in pairs.items()}
        points = report["curves"][label] = curve(loops, count)
        print(f"{label:>32} {'CPU ms a round':>15} {'a client':>9}")
        for point in points:
            each = point["cpu_ms"] / pairs[point["clients"]][1]
            print(f"{point['clients']:32,} {point['cpu_ms']:15.2f} {each:9.3f}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if arguments.plot:
        draw(report, arguments.plot)


if __name__ == "__main__":
    main()
