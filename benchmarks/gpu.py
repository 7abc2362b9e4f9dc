"""Speed on a GPU compared with a plain PyTorch loop on the same machine.

    python benchmarks/gpu.py [--json FILE] [--only NAME ...] [--profile N]

Work W: CIFAR-10 shapes, 10 of 100 clients, 500 samples each, batch 50, 5 epochs, the ntd-cifar network, SGD with
momentum, TF32. Each figure is the median of several rounds. The data is on the GPU for both.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdfast import Dirichlet, Experiment, compare, federate
from holdfast.core.settings import Settings
from holdfast.data.federation import Federation
from holdfast.models import parse_model
from holdfast.training.description import machine
from work import (
    MANY,
    BareLoop,
    cifar_shaped,
    equal_federation,
    kernels_of,
    prepare,
    rounds_of,
    seconds,
    seconds_in_turns,
    text_shaped,
)

CUDA = torch.device("cuda")


def holdfast_rounds(
    method: str,
    model: str,
    federation: Federation,
    clients_per_round: int | None,
    engine: str = "vectorized",
    parallel_clients: int | None = None,
    local_epochs: int = 5,
    **settings: Any,
) -> tuple[Callable[[], int], float]:
    """A function that trains the next round and returns its number of samples, and the seconds of the first round."""
    start = time.perf_counter()
    settings = {"batch_size": 50, "momentum": 0.9} | settings
    loop = rounds_of(
        prepare(
            method, model, federation, engine=engine, device="cuda", parallel_clients=parallel_clients,
            clients_per_round=clients_per_round, local_epochs=local_epochs, **settings,
        )
    )  # fmt: skip
    loop.round(1)
    torch.cuda.synchronize()
    first = time.perf_counter() - start
    numbers = count(2)

    def next_round() -> int:
        return local_epochs * sum(loop.round(next(numbers))["samples"])

    next_round()
    return next_round, first


def bare_rounds(
    model: str, federation: Federation, clients_per_round: int, local_epochs: int = 5, **options: Any
) -> Callable[[], None]:
    net = parse_model(model).build(federation.dataset.shape, federation.dataset.num_outputs, 0)
    options = {"batch_size": 50} | options
    bare = BareLoop(net, federation, CUDA, local_epochs=local_epochs, **options)
    rng = np.random.default_rng(0)

    def next_round() -> None:
        bare.round(rng.choice(federation.clients, clients_per_round, replace=False))

    next_round()
    return next_round


def work_w(report: dict) -> None:
    federation = equal_federation(cifar_shaped(50_000), 100, 500)
    vectorized, first, sequential = {}, {}, {"bare loop": bare_rounds("ntd-cifar", federation, 10)}
    for name in ("fedavg", "fedntd", "fedka", "fedfa", "flashback:half=client", "moon", "scaffold"):
        vectorized[name], first[name] = holdfast_rounds(name, "ntd-cifar", federation, 10)
        sequential[name], _ = holdfast_rounds(name, "ntd-cifar", federation, 10, "sequential")
    slow = seconds_in_turns(sequential, 3, CUDA)  # these depend on the speed of the host, which varies
    fast = seconds_in_turns(vectorized, 7, CUDA)
    report["W"] = {"bare loop ms": 1e3 * slow["bare loop"]}
    for name, taken in fast.items():
        report["W"][name] = {
            "vectorized ms": 1e3 * taken, "x bare loop": slow["bare loop"] / taken, "sequential ms": 1e3 * slow[name],
            "x own sequential": slow[name] / taken, "first round s": first[name],
        }  # fmt: skip
        print(name, report["W"][name], flush=True)


def unequal(report: dict) -> None:
    """Time per trained sample with clients of unequal and of equal size."""
    dataset = cifar_shaped(50_000)
    cases = {
        "100 equal clients, 10 a round": (equal_federation(dataset, 100, 500), 10),
        "100 clients, Dirichlet 0.1, 10 a round": (
            federate(dataset, Dirichlet(0.1), clients=100, seed=0),
            10,
        ),
        "10 equal clients": (equal_federation(dataset, 10, 5000), None),
        "10 clients, Dirichlet 0.1": (federate(dataset, Dirichlet(0.1), clients=10, seed=0), None),
    }
    report["unequal"] = {}
    for name, (federation, clients_per_round) in cases.items():
        next_round, _ = holdfast_rounds("fedavg", "ntd-cifar", federation, clients_per_round)
        for _ in range(10 if clients_per_round else 2):  # capture the graphs of every number of clients
            next_round()
        start, trained = time.perf_counter(), 0
        for _ in range(20 if clients_per_round else 3):
            trained += next_round()
        torch.cuda.synchronize()
        sizes = federation.sizes()
        report["unequal"][name] = {
            "smallest": int(sizes.min()), "largest": int(sizes.max()),
            "us a sample": 1e6 * (time.perf_counter() - start) / trained,
        }  # fmt: skip
        print(name, report["unequal"][name], flush=True)


@dataclass(frozen=True)
class Case:
    """A network, and the work of 10 clients with it."""

    model: str
    shape: tuple[int, ...] = (3, 32, 32)
    samples: int = 500  # of a client
    batch_size: int = 50
    local_epochs: int = 1


IMAGES = (
    Case("resnet18:norm=group,stem=3x3", local_epochs=2),
    Case("resnet50", samples=512, batch_size=128),
    Case("vit"),
    Case("mobilenetv2:resolution=small"),
    Case("mlp-cnn5", (1, 28, 28), local_epochs=5),
    Case("mlp:200,200", (1, 28, 28), local_epochs=5),
)
TEXT = (
    Case("char-lstm", (80,), samples=320, batch_size=32),
    Case("char-transformer", (80,), samples=320, batch_size=32),
)


def compare_networks(report: dict, cases: Sequence[Case]) -> None:
    for case in cases:
        total = 20 * case.samples
        text = len(case.shape) == 1
        dataset = text_shaped(total, *case.shape) if text else cifar_shaped(total, shape=case.shape)
        federation = equal_federation(dataset, 20, case.samples)
        work = {"local_epochs": case.local_epochs, "batch_size": case.batch_size}
        vectorized, first = holdfast_rounds("fedavg", case.model, federation, 10, **work)
        ours = seconds(vectorized, 5, CUDA)
        bare = seconds(bare_rounds(case.model, federation, 10, **work), 2, CUDA)
        steps = case.local_epochs * case.samples // case.batch_size
        report[case.model] = {
            "bare ms": 1e3 * bare, "vectorized ms": 1e3 * ours, "x": bare / ours, "first round s": first,
            "us a step": 1e6 * ours / steps,
        }  # fmt: skip
        print(case.model, report[case.model], flush=True)
        if PROFILE:
            print_kernels(vectorized, steps)


def print_kernels(next_round: Callable[[], object], steps: int) -> None:
    kernels = kernels_of(lambda: (next_round(), torch.cuda.synchronize()), CUDA)
    total, times = (sum(column) / steps for column in zip(*kernels.values(), strict=True))
    print(f"  {total:.0f} us in {times:.1f} kernels a step", flush=True)
    for name, (us, calls) in list(kernels.items())[:PROFILE]:
        print(f"  {us / steps:8.1f} us {calls / steps:6.1f}x  {name[:110]}", flush=True)


def models(report: dict) -> None:
    """Other networks on the vectorized engine and in the plain loop."""
    compare_networks(report.setdefault("models", {}), IMAGES)


def text(report: dict) -> None:
    """Networks for sequences."""
    compare_networks(report.setdefault("text", {}), TEXT)


def optimizers(report: dict) -> None:
    """W with each local optimiser, beside SGD's round, and AdamW in the plain loop."""
    federation = equal_federation(cifar_shaped(50_000), 100, 500)
    rounds = {
        name: holdfast_rounds("fedavg", "ntd-cifar", federation, 10, optimizer=name, momentum=momentum)[0]
        for name, momentum in (
            ("sgd", 0.9),
            ("adam", 0.0),
            ("adamw", 0.0),
            ("rmsprop", 0.0),
            ("adagrad", 0.0),
        )
    }
    taken = seconds_in_turns(rounds, 7, CUDA)
    bare = seconds(bare_rounds("ntd-cifar", federation, 10, optimizer=torch.optim.AdamW), 2, CUDA)
    report["optimizers"] = {
        name: {"ms": 1e3 * one, "x sgd": one / taken["sgd"]} for name, one in taken.items()
    } | {"bare AdamW ms": 1e3 * bare, "x bare AdamW": bare / taken["adamw"]}
    print(report["optimizers"], flush=True)


def cold(report: dict) -> None:
    """A first round of W from the start of the command, without compiled kernels and with them."""
    with TemporaryDirectory() as folder:
        data, dataset = Path(folder) / "random.npz", cifar_shaped(50_000)
        np.savez(
            data, x_train=dataset.x_train, y_train=dataset.y_train, x_test=dataset.x_train[:10_000],
            y_test=dataset.y_train[:10_000],
        )  # fmt: skip
        command = (
            f"{sys.executable} -m holdfast run --data {data} --partition iid --clients 100 --clients-per-round 10 "
            "--model ntd-cifar --rounds 1 --local-epochs 5 --batch-size 50 --lr 0.001 --momentum 0.9"
        ).split()
        report["cold"] = {}
        for name in ("cold", "warm", "warm again"):
            start = time.perf_counter()
            subprocess.run(
                [*command, "--out", f"{folder}/{name}"], check=True, stdout=subprocess.DEVNULL,
                env=os.environ | {"TRITON_CACHE_DIR": f"{folder}/cache"},
            )  # fmt: skip
            report["cold"][f"{name} s"] = time.perf_counter() - start
    print(report["cold"], flush=True)


def memory(report: dict) -> None:
    """Time and memory of a round of all 100 clients of W, by the number of clients that train in parallel."""
    federation = equal_federation(cifar_shaped(50_000), 100, 500)
    report["memory"] = {}
    for clients in (10, 50, 100):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        next_round, _ = holdfast_rounds("fedavg", "ntd-cifar", federation, None, parallel_clients=clients)
        taken = seconds(next_round, 3, CUDA)
        peak = torch.cuda.max_memory_allocated() / 2**30
        report["memory"][clients] = {"ms a round": 1e3 * taken, "peak GiB": peak}
        print(clients, report["memory"][clients], flush=True)


def comparison(report: dict) -> None:
    """7 methods, 3 seeds and 20 rounds of W, evaluated every round and stored on disk, against training alone."""
    with TemporaryDirectory() as folder:
        data, dataset = Path(folder) / "random.npz", cifar_shaped(50_000)
        arrays = (dataset.x_train, dataset.y_train, dataset.x_train[:10_000], dataset.y_train[:10_000])
        np.savez(
            data,
            **dict(zip(("x_train", "y_train", "x_test", "y_test"), map(Tensor.numpy, arrays), strict=True)),
        )
        experiment = Experiment(
            data=str(data),
            partition="iid",
            clients=100,
            clients_per_round=10,
            model="ntd-cifar",
            rounds=20,
            local_epochs=5,
            batch_size=50,
            lr=0.001,
            momentum=0.9,
            evaluate_locals=False,
            device="cuda",
        )  # a larger learning rate would diverge on random labels
        compare(
            COMPARED, replace(experiment, rounds=2), seeds=1, out=Path(folder) / "warm"
        )  # compiles kernels
        start = time.perf_counter()
        at = [start]  # the start of each run and the ends of its rounds
        rounds, tests = experiment.rounds + 1, []

        def on_round(record: dict) -> None:
            at.append(time.perf_counter())
            tests.append(record["seconds"]["evaluate"])

        compare(
            COMPARED, experiment, seeds=3, out=Path(folder) / "runs",
            on_start=lambda *_: at.append(time.perf_counter()), on_round=on_round,
        )  # fmt: skip
        at.append(time.perf_counter())
        total = at[-1] - start
        ends, starts, first = at[::rounds], at[1::rounds], at[2::rounds]
        trained = 3 * sum(training_seconds(replace(experiment, method=name)) for name in COMPARED)
    report["comparison"] = {
        "total s": total, "training s": trained, "ratio": total / trained, "tests s": sum(tests),
        "from start to first round s": sum(first) - sum(starts[:-1]), "between runs s": sum(starts) - sum(ends),
    }  # fmt: skip
    print(report["comparison"], flush=True)


def training_seconds(experiment: Experiment) -> float:
    """The seconds of a run's rounds without evaluation or storage; they are the same for every seed."""
    settings = {field.name: getattr(experiment, field.name) for field in fields(Settings)}
    settings |= {"evaluate_every": MANY, "rounds": experiment.rounds + 1}  # the last is always evaluated
    method, model = experiment.method["name"], experiment.model["name"]
    loop = rounds_of(prepare(method, model, experiment.build_federation(), device="cuda", **settings))
    start = time.perf_counter()
    for number in range(1, experiment.rounds + 1):
        loop.start_round(number)
    torch.cuda.synchronize()
    return time.perf_counter() - start


COMPARED = ["fedavg", "fedprox", "fedntd", "fedka", "fedfa", "moon", "scaffold"]
PARTS = {
    "cold": cold,
    "W": work_w,
    "unequal": unequal,
    "models": models,
    "text": text,
    "optimizers": optimizers,
    "memory": memory,
    "comparison": comparison,
}
PROFILE = 0  # how many kernels of a network are printed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument(
        "--profile", type=int, default=0, metavar="N", help="print each network's N longest kernels"
    )
    parser.add_argument("--json")
    arguments = parser.parse_args()
    global PROFILE
    PROFILE = arguments.profile
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    report: dict = {"machine": machine(CUDA), "torch": torch.__version__}
    for name in arguments.only:
        PARTS[name](report)
    report["peak GiB"] = torch.cuda.max_memory_allocated() / 2**30
    print(json.dumps(report, indent=1))
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
