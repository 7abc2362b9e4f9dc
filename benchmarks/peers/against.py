"""Rounds of another framework, of Holdfast and of the bare loop in turn, in one process."""

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

from holdfast.core.settings import Settings
from holdfast.engine.state_cache import StateCache
from holdfast.methods import FedAvg
from holdfast.models import parse_model
from holdfast.training.description import machine
from holdfast.training.session import Training
from work import BareLoop, cifar_shaped, equal_federation

LR, MOMENTUM = 0.01, 0.9


@dataclass
class Work:
    """What is trained: all ``clients`` in every round, by SGD with `LR` and `MOMENTUM`."""

    clients: list[tuple[Tensor, Tensor]]  # inputs, ready for the model, and labels; on the device
    net: nn.Module  # on the device too
    batch_size: int
    epochs: int


CASES = {
    "W": {"model": "ntd-cifar", "each": 500, "batch_size": 50},
    "O1": {"model": "linear", "each": 500, "batch_size": 50},
    "O2": {"model": "ntd-cifar", "each": 2, "batch_size": 2},
}
"""W, and the two of overhead.py; 10 clients. On a CPU W has one epoch, on a GPU all five."""


def measure(
    case: dict,
    rounds_of: Callable[[Work], Callable[[], object]],
    passes: int,
    device: torch.device,
    follows: bool,
) -> dict[str, float]:
    batch, cuda = case["batch_size"], device.type == "cuda"
    epochs = 5 if cuda else 1
    federation = equal_federation(cifar_shaped(10 * case["each"] + 1000), 10, case["each"])
    spec = parse_model(case["model"])
    net = spec.build(federation.dataset.shape, 10, 0)
    settings = Settings(
        rounds=10**6, local_epochs=epochs, batch_size=batch, lr=LR, momentum=MOMENTUM, evaluate_every=10**6,
        evaluate_locals=False,
    )  # fmt: skip
    loop = Training(FedAvg(), spec, federation, settings, device=str(device)).loop(StateCache(None, None))
    bare = BareLoop(net, federation, device, batch_size=batch, local_epochs=epochs, lr=LR, momentum=MOMENTUM)
    ids = [torch.from_numpy(federation.client(k)).to(device) for k in range(10)]
    peer = rounds_of(Work([(bare.x[i], bare.y[i]) for i in ids], net.to(device), batch, epochs))
    numbers = iter(range(1, 10**6))
    works = {
        "bare": lambda: bare.round(np.arange(10)),
        "peer": peer,
        "holdfast": lambda: loop.round(next(numbers)),
    }
    if follows:
        works = {"peer": peer}
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(passes + 1):  # the first warms up
        for name, work in works.items():
            began = time.perf_counter()
            work()
            if cuda:
                torch.cuda.synchronize()
            times[name].append(1e3 * (time.perf_counter() - began))
    return {name: statistics.median(taken[1:]) for name, taken in times.items()}


def main(name: str, rounds_of: Callable[[Work], Callable[[], object]], follows: bool = False) -> None:
    """Measure a framework whose ``rounds_of(work)`` gives a function that does one round.

    A process that ``follows`` only takes its part in the framework's rounds, and says nothing.
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
    if follows:
        for case in arguments.only:
            measure(CASES[case], rounds_of, arguments.passes, device, follows)
        return
    print(f"{machine(device)}; medians of {arguments.passes} passes; × bare loop in brackets")
    print(f"{'work':6} {'bare ms':>9} {f'{name} ms':>24} {'holdfast ms':>20}")
    report: dict = {"peer": name, "machine": machine(device), "passes": arguments.passes}
    for case in arguments.only:
        found = report[case] = measure(CASES[case], rounds_of, arguments.passes, device, follows)
        shown = {key: f"{found[key]:.0f} ({found[key] / found['bare']:.2f})" for key in ("peer", "holdfast")}
        print(f"{case:6} {found['bare']:9.0f} {shown['peer']:>24} {shown['holdfast']:>20}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
