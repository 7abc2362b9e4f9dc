"""Throughput of several processes on one GPU, and the kernels of a step.

    nvidia-cuda-mps-control -d              # without it the processes take turns
    python benchmarks/side_by_side.py --processes 1 7 [--method fedavg] [--profile] [--json FILE]

They train FedMLP's ResNet-18 on CIFAR shapes with augmentation, 10 clients of 960 samples in parallel, batches of 32.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from dataclasses import replace
from typing import Any

import torch

from holdfast.core.device import gpu_is_time_sliced, share_gpu
from holdfast.training.description import machine
from work import cifar_shaped, equal_federation, kernels_of, prepare, rounds_of

CLIENTS, SAMPLES, BATCH, EPOCHS = 10, 960, 32, 4
SECONDS = 6.0  # for which processes are timed


class Work:
    """Rounds of a run, one after another."""

    def __init__(self, method: str, device: str) -> None:
        dataset = cifar_shaped(CLIENTS * SAMPLES)
        dataset = replace(dataset, preprocess=replace(dataset.preprocess, crop=4, flip=True))
        federation = equal_federation(dataset, CLIENTS, SAMPLES)
        training = prepare(
            method, "mlp-resnet18", federation, engine="vectorized", device=device,
            local_epochs=EPOCHS, batch_size=BATCH, momentum=0.9, weight_decay=1e-5,
        )  # fmt: skip
        self.loop, self.number = rounds_of(training), 0

    def round(self) -> None:
        self.number += 1
        self.loop.round(self.number)
        if torch.cuda.is_available():
            torch.cuda.synchronize()


def train(method: str, device: str, processes: int, ready: Any, rates: Any) -> None:
    """In each process: wait until all are ready, and measure images per second."""
    if device == "cuda":
        share_gpu(processes)
    work = Work(method, device)
    work.round()
    ready.wait()
    start, rounds = time.perf_counter(), 0
    while time.perf_counter() - start < SECONDS:
        work.round()
        rounds += 1
    rates.put(rounds * CLIENTS * SAMPLES * EPOCHS / (time.perf_counter() - start))


def throughput(method: str, device: str, processes: int) -> float:
    """Images per second of all processes together."""
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    ready, rates = context.Barrier(processes), context.Queue()
    started = [
        context.Process(target=train, args=(method, device, processes, ready, rates))
        for _ in range(processes)
    ]
    for process in started:
        process.start()
    total = sum(rates.get() for _ in started)
    for process in started:
        process.join()
    return total


def profile(method: str, device: str) -> dict[str, Any]:
    """The time of each kernel in a step, in µs, and its number of calls."""
    work = Work(method, device)
    work.round()
    steps = EPOCHS * SAMPLES // BATCH
    kernels = {
        name: {"us": us / steps, "times": times / steps}
        for name, (us, times) in kernels_of(work.round, torch.device(device)).items()
    }
    return {"us a step": sum(k["us"] for k in kernels.values()), "kernels": kernels}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 7])
    parser.add_argument("--method", default="fedavg")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    method, device = arguments.method, arguments.device
    report: dict[str, Any] = {
        "machine": machine(torch.device(device)),
        "method": method,
        "images a second": {},
    }
    if device == "cuda":
        report["take turns"] = gpu_is_time_sliced()
    if arguments.profile:
        report["profile"] = profile(method, device)
        print(f"{report['profile']['us a step']:.0f} us a step")
        for name, kernel in list(report["profile"]["kernels"].items())[:40]:
            print(f"{kernel['us']:8.1f} {kernel['times']:6.1f}  {name[:100]}", flush=True)
    for processes in arguments.processes:
        rate = report["images a second"][processes] = throughput(method, device, processes)
        print(f"{processes} processes: {rate:,.0f} images/s", flush=True)
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
