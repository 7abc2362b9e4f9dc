"""Memory does not grow with the rounds, and is used again."""

from __future__ import annotations

import gc
import platform
import subprocess
import sys
import tracemalloc

import pytest
import torch
from engine_world import loop

from holdfast.methods.registry import METHODS


def tensors_alive() -> int:
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("name", ["scaffold", "moon"])
def test_memory_is_flat_over_rounds(name: str, engine: str) -> None:
    """Python's own memory and the number of tensors, after rounds in which every client has taken part."""
    rounds = loop(METHODS[name](), engine=engine, rounds=40)
    for t in range(1, 5):
        rounds.round(t)
    alive = tensors_alive()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for t in range(5, 11):
        rounds.round(t)
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert tensors_alive() <= alive + 2
    assert grown < 100_000  # bytes over 6 rounds; one round's weights, plans and records are far more


FAULTS = """
import resource, sys, torch
from concurrent.futures import ThreadPoolExecutor
from torch import nn
from holdfast.core.device import keep_freed_memory

if "keep" in sys.argv:
    keep_freed_memory()
torch.set_num_threads(1)
net = nn.Sequential(nn.Conv2d(3, 32, 5, padding=2), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8192, 256))
x = torch.ones(50, 3, 32, 32)

def step(_):
    torch.autograd.grad(net(x).sum(), list(net.parameters()))

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

with ThreadPoolExecutor(1) as pool:
    list(pool.map(step, range(10)))
    before = faults()
    list(pool.map(step, range(10)))
    print(faults() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library's memory")
def test_what_a_step_frees_serves_the_next() -> None:
    def faults_in_ten_steps(*said: str) -> int:
        told = subprocess.run(
            [sys.executable, "-c", FAULTS, *said], capture_output=True, text=True, check=True
        )
        return int(told.stdout)

    assert faults_in_ten_steps("keep") < faults_in_ten_steps() / 3
