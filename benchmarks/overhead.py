"""What the engine adds to a bare PyTorch loop, where it shows: on work that is almost nothing.

    python benchmarks/overhead.py [--passes 15] [--json FILE]

O1: a linear model on CIFAR shapes, 10 clients, 100 steps a round: the steps' own cost.
O2: the ntd-cifar network (2.2 million parameters), 10 clients with one batch of 2 samples: start, load, aggregate.
Passes of both loops alternate; the figure is the ratio of their medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import numpy as np
import torch

from holdfast.core.settings import Settings
from holdfast.engine.state_cache import StateCache
from holdfast.methods import FedAvg
from holdfast.models import parse_model
from holdfast.training.session import Training
from work import BareLoop, cifar_shaped, equal_federation

CASES = {
    "O1 linear, 100 steps": {"model": "linear", "each": 500, "batch_size": 50},
    "O2 ntd-cifar, 1 step of 2": {"model": "ntd-cifar", "each": 2, "batch_size": 2},
}


def measure(case: dict, passes: int) -> dict[str, float]:
    federation = equal_federation(cifar_shaped(10 * case["each"] + 1000), 10, case["each"])
    spec, batch = parse_model(case["model"]), case["batch_size"]
    settings = Settings(
        rounds=10**6, local_epochs=1, batch_size=batch, lr=0.01, momentum=0.9, evaluate_every=10**6,
        evaluate_locals=False,
    )  # fmt: skip
    loop = Training(FedAvg(), spec, federation, settings, engine="sequential", device="cpu").loop(
        StateCache(None, None)
    )
    net = spec.build(federation.dataset.shape, 10, 0)
    cpu = torch.device("cpu")
    bare = BareLoop(net, federation, cpu, batch_size=batch, local_epochs=1, lr=0.01, momentum=0.9)
    everyone = np.arange(10)
    ours, theirs = [], []
    for number in range(1, passes + 4):
        began = time.perf_counter()
        bare.round(everyone)
        between = time.perf_counter()
        loop.round(number)
        ended = time.perf_counter()
        if number > 3:  # the first passes warm up
            theirs.append(between - began)
            ours.append(ended - between)
    bare_ms, our_ms = 1e3 * statistics.median(theirs), 1e3 * statistics.median(ours)
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
