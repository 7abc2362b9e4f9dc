"""Memory does not grow with the rounds."""

from __future__ import annotations

import gc
import tracemalloc

import pytest
import torch
from engine_world import loop

from holdfast.methods.registry import METHODS


def tensors_alive() -> int:
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


@pytest.mark.parametrize("engine", ["sequential", "lanes"])
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
