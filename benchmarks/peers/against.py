"""Times rounds of another framework, of Holdfast and of a plain loop, which alternate in one process."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent))

import work as workload
from holdfast.models import parse_model
from holdfast.training.description import machine

LR, MOMENTUM = 0.01, 0.9


@dataclass
class Work:
    """The workload: all ``clients`` train in every round, by SGD with `LR` and `MOMENTUM`."""

    clients: list[tuple[Tensor, Tensor]]  # preprocessed inputs and labels, on the device
    net: nn.Module  # on the device
    batch_size: int
    epochs: int


CASES = {
    "W": {"model": "ntd-cifar", "each": 500, "batch_size": 50},
    "O1": {"model": "linear", "each": 500, "batch_size": 50},
    "O2": {"model": "ntd-cifar", "each": 2, "batch_size": 2},
}
"""W and the two cases of overhead.py, with 10 clients; one local epoch on a CPU, five on a GPU."""


def measure(
    case: dict,
    rounds_of: Callable[[Work], Callable[[], object]],
    passes: int,
    device: torch.device,
    peer_only: bool,
) -> dict[str, float]:
    """Median milliseconds of a round of the plain loop, the other framework and Holdfast."""
    cuda = device.type == "cuda"
    schedule = {
        "batch_size": case["batch_size"], "local_epochs": 5 if cuda else 1, "lr": LR, "momentum": MOMENTUM
    }  # fmt: skip
    dataset = workload.cifar_shaped(10 * case["each"] + 1000)
    federation = workload.equal_federation(dataset, 10, case["each"])
    net = parse_model(case["model"]).build(federation.dataset.shape, 10, 0)
    training = workload.prepare("fedavg", case["model"], federation, device=str(device), **schedule)
    loop = workload.rounds_of(training)
    bare = workload.BareLoop(net, federation, device, **schedule)
    ids = [torch.from_numpy(federation.client(k)).to(device) for k in range(10)]
    clients = [(bare.x[i], bare.y[i]) for i in ids]
    peer = rounds_of(Work(clients, net.to(device), schedule["batch_size"], schedule["local_epochs"]))
    numbers = iter(range(1, 10**6))
    works = {
        "bare": lambda: bare.round(np.arange(10)),
        "peer": peer,
        "holdfast": lambda: loop.round(next(numbers)),
    }
    if peer_only:
        works = {"peer": peer}
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(passes + 1):  # the first warms up
        for name, work in works.items():
            start = time.perf_counter()
            work()
            if cuda:
                torch.cuda.synchronize()
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(passes[1:]) for name, passes in times.items()}


def main(name: str, rounds_of: Callable[[Work], Callable[[], object]], peer_only: bool = False) -> None:
    """Measure a framework whose ``rounds_of(work)`` returns a function that trains one round.

    With ``peer_only`` the process only takes part in the framework's rounds, and prints nothing.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device = torch.device(arguments.device)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    if peer_only:
        for case in arguments.only:
            measure(CASES[case], rounds_of, arguments.passes, device, peer_only)
        return
    print(f"{machine(device)}; medians of {arguments.passes} passes; × bare loop in brackets")
    print(f"{'work':6} {'bare ms':>9} {f'{name} ms':>24} {'holdfast ms':>20}")
    report: dict = {"peer": name, "machine": machine(device), "passes": arguments.passes}
    for case in arguments.only:
        times = report[case] = measure(CASES[case], rounds_of, arguments.passes, device, peer_only)
        cells = {key: f"{times[key]:.0f} ({times[key] / times['bare']:.2f})" for key in ("peer", "holdfast")}
        print(f"{case:6} {times['bare']:9.0f} {cells['peer']:>24} {cells['holdfast']:>20}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
