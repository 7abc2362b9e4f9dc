"""The overhead of the engine over a plain PyTorch loop, on workloads so small that it shows.

    python benchmarks/overhead.py [--passes 15] [--json FILE]

O1: a linear model on CIFAR shapes, 10 clients, 100 steps a round: the cost of a step.
O2: the ntd-cifar network (2.2 million parameters), 10 clients with one batch of 2 samples: the cost of starting a
client, loading its data and aggregating.
Both loops run alternately; the figure is the ratio of their medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import numpy as np
import torch

from holdfast.models import parse_model
from work import BareLoop, cifar_shaped, equal_federation, prepare, rounds_of

CASES = {
    "O1 linear, 100 steps": {"model": "linear", "each": 500, "batch_size": 50},
    "O2 ntd-cifar, 1 step of 2": {"model": "ntd-cifar", "each": 2, "batch_size": 2},
}


def measure(case: dict, passes: int) -> dict[str, float]:
    federation = equal_federation(cifar_shaped(10 * case["each"] + 1000), 10, case["each"])
    model, batch_size = case["model"], case["batch_size"]
    training = prepare("fedavg", model, federation, engine="sequential", batch_size=batch_size, momentum=0.9)
    loop = rounds_of(training)
    net = parse_model(model).build(federation.dataset.shape, 10, 0)
    bare = BareLoop(net, federation, torch.device("cpu"), batch_size=batch_size, local_epochs=1)
    everyone = np.arange(10)
    our_times, bare_times = [], []
    for number in range(1, passes + 4):
        start = time.perf_counter()
        bare.round(everyone)
        middle = time.perf_counter()
        loop.round(number)
        end = time.perf_counter()
        if number > 3:  # the first passes warm up
            bare_times.append(middle - start)
            our_times.append(end - middle)
    bare_ms, our_ms = 1e3 * statistics.median(bare_times), 1e3 * statistics.median(our_times)
    return {"bare_ms": bare_ms, "holdfast_ms": our_ms, "ratio": our_ms / bare_ms}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--passes", type=int, default=15)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    results = {name: measure(case, arguments.passes) for name, case in CASES.items()}
    print(
        f"{'work':28} {'bare ms':>9} {'holdfast ms':>12} {'ratio':>6}   ({torch.get_num_threads()} threads)"
    )
    for name, row in results.items():
        print(f"{name:28} {row['bare_ms']:9.1f} {row['holdfast_ms']:12.1f} {row['ratio']:6.2f}")
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(
                {"threads": torch.get_num_threads(), "torch": torch.__version__, "results": results}, file
            )


if __name__ == "__main__":
    main()
