"""Speed on a GPU against the bare sequential loop, in one run on one machine.

    python benchmarks/gpu.py [--json FILE] [--only NAME ...]

Work W: CIFAR-10 shapes, 10 of 100 clients, 500 samples each, batch 50, 5 epochs, the ntd-cifar network, SGD with
momentum, TF32. Each figure is the median of several rounds; data lies on the GPU for both.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor

from holdfast import Dirichlet, Experiment, compare, federate, methods
from holdfast.core.settings import Settings
from holdfast.data.federation import Federation
from holdfast.engine.state_cache import StateCache
from holdfast.methods.registry import parse_method
from holdfast.models import parse_model
from holdfast.training.description import machine
from holdfast.training.session import Training
from work import BareLoop, cifar_shaped, equal_federation, seconds, seconds_in_turns

CUDA = torch.device("cuda")


def rounds_of(
    method,
    model: str,
    federation: Federation,
    sample: int | None,
    engine: str = "vectorized",
    lanes: int | None = None,
    **schedule,
):
    """A function that does one more round and says how many samples it trained; and what the first round took."""
    settings = Settings(
        rounds=10**6, clients_per_round=sample, lr=0.01, momentum=0.9, evaluate_every=10**6, evaluate_locals=False,
        **{"local_epochs": 5, "batch_size": 50} | schedule,
    )  # fmt: skip
    began = time.perf_counter()
    training = Training(
        method, parse_model(model), federation, settings, engine=engine, parallel_clients=lanes, device="cuda"
    )
    loop = training.loop(StateCache(None, None))
    loop.round(1)
    torch.cuda.synchronize()
    first = time.perf_counter() - began
    count = iter(range(2, 10**6))

    def one_more() -> int:
        return settings.local_epochs * sum(loop.round(next(count))["samples"])

    one_more()
    return one_more, first


def bare_rounds(model: str, federation: Federation, sample: int, **schedule):
    net = parse_model(model).build(federation.dataset.shape, federation.dataset.num_classes, 0)
    bare = BareLoop(
        net, federation, CUDA, lr=0.01, momentum=0.9, **{"local_epochs": 5, "batch_size": 50} | schedule
    )
    rng = np.random.default_rng(0)

    def one_more() -> None:
        bare.round(rng.choice(federation.clients, sample, replace=False))

    one_more()
    return one_more


def work_w(report: dict) -> None:
    federation = equal_federation(cifar_shaped(50_000), 100, 500)
    lanes, first, one_by_one = {}, {}, {"bare loop": bare_rounds("ntd-cifar", federation, 10)}
    for name in ("fedavg", "fedntd", "fedka", "fedfa", "flashback:half=client", "moon", "scaffold"):
        method = parse_method(name)
        lanes[name], first[name] = rounds_of(method, "ntd-cifar", federation, 10)
        one_by_one[name], _ = rounds_of(method, "ntd-cifar", federation, 10, "sequential")
    slow = seconds_in_turns(one_by_one, 3, CUDA)  # the host's pace decides these, and it changes
    fast = seconds_in_turns(lanes, 7, CUDA)
    report["W"] = {"bare loop ms": 1e3 * slow["bare loop"]}
    for name, taken in fast.items():
        report["W"][name] = {
            "lanes ms": 1e3 * taken, "x bare loop": slow["bare loop"] / taken, "sequential ms": 1e3 * slow[name],
            "x own sequential": slow[name] / taken, "first round s": first[name],
        }  # fmt: skip
        print(name, report["W"][name], flush=True)


def unequal(report: dict) -> None:
    """Time per trained sample, unequal clients against equal ones."""
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
    for name, (federation, sample) in cases.items():
        one_more, _ = rounds_of(methods.FedAvg(), "ntd-cifar", federation, sample)
        for _ in range(10 if sample else 2):  # capture the graphs of the lane counts that occur
            one_more()
        began, trained = time.perf_counter(), 0
        for _ in range(20 if sample else 3):
            trained += one_more()
        torch.cuda.synchronize()
        sizes = federation.sizes()
        report["unequal"][name] = {
            "smallest": int(sizes.min()), "largest": int(sizes.max()),
            "us a sample": 1e6 * (time.perf_counter() - began) / trained,
        }  # fmt: skip
        print(name, report["unequal"][name], flush=True)


def models(report: dict) -> None:
    """Other networks: lanes against the bare loop."""
    report["models"] = {}
    cases = {
        "resnet18:norm=group,stem=3x3": ((3, 32, 32), 2),
        "mlp-cnn5": ((1, 28, 28), 5),
        "mlp:200,200": ((1, 28, 28), 5),
    }
    for model, (shape, epochs) in cases.items():
        federation = equal_federation(cifar_shaped(10_000, shape=shape), 20, 500)
        bare = seconds(bare_rounds(model, federation, 10, epochs=epochs), 2, CUDA)
        lanes, _ = rounds_of(methods.FedAvg(), model, federation, 10, local_epochs=epochs)
        ours = seconds(lanes, 3, CUDA)
        report["models"][model] = {"bare ms": 1e3 * bare, "lanes ms": 1e3 * ours, "x": bare / ours}
        print(model, report["models"][model], flush=True)


def memory(report: dict) -> None:
    """All 100 clients of W in a round: time and memory by the number of lanes."""
    federation = equal_federation(cifar_shaped(50_000), 100, 500)
    report["lanes"] = {}
    for lanes in (10, 50, 100):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        one_more, _ = rounds_of(methods.FedAvg(), "ntd-cifar", federation, None, parallel_clients=lanes)
        taken = seconds(one_more, 3, CUDA)
        peak = torch.cuda.max_memory_allocated() / 2**30
        report["lanes"][lanes] = {"ms a round": 1e3 * taken, "peak GiB": peak}
        print(lanes, report["lanes"][lanes], flush=True)


def comparison(report: dict) -> None:
    """7 methods, 3 seeds, 20 rounds of W, tested every round and kept on disk, against the training alone."""
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
        )  # random labels: a larger rate would diverge
        compare(
            COMPARED, replace(experiment, rounds=2), seeds=1, out=Path(folder) / "warm"
        )  # compiles kernels
        began = time.perf_counter()
        at = [began]  # each run's start, its rounds' ends, the next one's start, ...
        rounds, tests = experiment.rounds + 1, []

        def on_round(record: dict) -> None:
            at.append(time.perf_counter())
            tests.append(record["seconds"]["evaluate"])

        compare(
            COMPARED, experiment, seeds=3, out=Path(folder) / "runs",
            on_start=lambda *_: at.append(time.perf_counter()), on_round=on_round,
        )  # fmt: skip
        at.append(time.perf_counter())
        total = at[-1] - began
        ends, starts, first = at[::rounds], at[1::rounds], at[2::rounds]
        trained = 3 * sum(training_seconds(replace(experiment, method=name)) for name in COMPARED)
    report["comparison"] = {
        "total s": total, "training s": trained, "ratio": total / trained, "tests s": sum(tests),
        "from start to first round s": sum(first) - sum(starts[:-1]), "between runs s": sum(starts) - sum(ends),
    }  # fmt: skip
    print(report["comparison"], flush=True)


def training_seconds(experiment: Experiment) -> float:
    """A run with nothing but its rounds: no tests, nothing kept. The work is the same for every seed."""
    given = {field.name: getattr(experiment, field.name) for field in fields(Settings)}
    given |= {"evaluate_every": 10**6, "rounds": experiment.rounds + 1}  # whatever else, the last is tested
    settings = Settings(**given)
    method, model = parse_method(experiment.method["name"]), parse_model(experiment.model["name"])
    training = Training(method, model, experiment.build_federation(), settings, device="cuda")
    loop = training.loop(StateCache(None, None))
    began = time.perf_counter()
    for number in range(1, experiment.rounds + 1):
        loop.start_round(number)
    torch.cuda.synchronize()
    return time.perf_counter() - began


COMPARED = ["fedavg", "fedprox", "fedntd", "fedka", "fedfa", "moon", "scaffold"]
PARTS = {"W": work_w, "unequal": unequal, "models": models, "lanes": memory, "comparison": comparison}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--json")
    arguments = parser.parse_args()
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
