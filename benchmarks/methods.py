"""The time of a round of FedNTD, FedKA and FedFA, as a multiple of FedAvg's.

    python benchmarks/methods.py [--passes 5] [--samples 200] [--json FILE]

ntd-cifar on CIFAR shapes, 2 clients a round, 5 local epochs in batches of 50 with momentum, one client after
another on the CPU. Methods alternate in each pass. A figure is the median of the ratios to the FedAvg round of the
same pass, because other load on the machine affects the rounds of a pass alike.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace

import numpy as np
import torch

from holdfast.data.federation import Federation
from holdfast.engine.rounds import RoundLoop
from holdfast.methods import FedAvg, FedFA, FedKA, FedNTD, Method
from work import cifar_shaped, equal_federation, prepare, rounds_of

CLIENTS = 2
CASES: dict[str, tuple[Method, bool, float]] = {
    "fedntd, augmented inputs": (FedNTD(), True, 1.35),
    "fedntd, cached teacher": (FedNTD(), False, 1.1),
    "fedka": (FedKA(), False, 1.25),
    "fedfa": (FedFA(), False, 1.3),
}
"""The method, whether inputs are augmented, and the highest acceptable ratio."""


def federation(samples: int, augment: bool) -> Federation:
    dataset = cifar_shaped(CLIENTS * samples)
    augmentation = replace(dataset.preprocess, crop=4, flip=True) if augment else dataset.preprocess
    return equal_federation(replace(dataset, preprocess=augmentation), CLIENTS, samples)


def rounds(method: Method, data: Federation) -> RoundLoop:
    training = prepare(
        method, "ntd-cifar", data, engine="sequential", local_epochs=5, batch_size=50, momentum=0.9, weight_decay=1e-5
    )  # fmt: skip
    return rounds_of(training)


def measure(passes: int, samples: int) -> dict[str, dict[str, float]]:
    data = {augment: federation(samples, augment) for augment in (False, True)}
    loops = {name: rounds(method, data[augment]) for name, (method, augment, _) in CASES.items()}
    base = {augment: rounds(FedAvg(), data[augment]) for augment in data}
    ratios: dict[str, list[np.ndarray]] = {name: [] for name in CASES}
    for number in range(1, passes + 2):
        fedavg = {augment: _seconds(loop, number) for augment, loop in base.items()}
        for name, loop in loops.items():
            ratios[name].append(_seconds(loop, number) / fedavg[CASES[name][1]])
    results = {}
    for name, rows in ratios.items():
        clock, processor = np.array(rows[1:]).T  # the first pass warms up
        results[name] = {
            "clock": float(np.median(clock)), "clock_lowest": float(clock.min()),
            "clock_highest": float(clock.max()), "processor": float(np.median(processor)),
            "target": CASES[name][2],
        }  # fmt: skip
    return results


def _seconds(loop: RoundLoop, number: int) -> np.ndarray:
    """Wall time and CPU time of a round in seconds; the latter depends less on other load."""
    start = np.array([time.perf_counter(), time.process_time()])
    loop.round(number)
    return np.array([time.perf_counter(), time.process_time()]) - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--samples", type=int, default=200, help="of each client")
    parser.add_argument("--json", help="where to write the figures")
    arguments = parser.parse_args()
    results = measure(arguments.passes, arguments.samples)
    print(f"{'round × FedAvg':26} {'clock':>6} {'from':>6} {'to':>6} {'processor':>10} {'target':>7}")
    for name, row in results.items():
        print(f"{name:26} " + " ".join(
            f"{row[key]:{width}.2f}"
            for key, width in zip(("clock", "clock_lowest", "clock_highest", "processor", "target"),
                                  (6, 6, 6, 10, 7), strict=True)
        ))  # fmt: skip
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(
                {
                    "threads": torch.get_num_threads(), "torch": torch.__version__,
                    "passes": arguments.passes, "samples": arguments.samples, "results": results,
                },
                file, indent=1,
            )  # fmt: skip


if __name__ == "__main__":
    main()
