"""A small federation for the engine's tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from holdfast.core.settings import Settings
from holdfast.data.dataset import Dataset
from holdfast.data.federation import Federation, federate
from holdfast.engine.rounds import RoundLoop
from holdfast.engine.state_cache import StateCache
from holdfast.methods.base import Method, Tensors
from holdfast.training.session import Training

SIZES = (7, 4, 1, 9, 5, 6)
INPUTS, CLASSES = 5, 3


def federation(sizes: tuple[int, ...] = SIZES) -> Federation:
    rng = np.random.default_rng(1)
    total = sum(sizes)
    x, y = rng.normal(size=(total, INPUTS)).astype(np.float32), np.arange(total) % CLASSES
    parts = np.split(rng.permutation(total), np.cumsum(sizes)[:-1])
    return federate(Dataset.from_arrays(x, y, x, y), parts)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(INPUTS, 8), nn.ReLU(), nn.Linear(8, CLASSES))


def norm_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(INPUTS, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES))


def loop(
    method: Method,
    *,
    engine: str = "sequential",
    model: nn.Module | None = None,
    among: Federation | None = None,
    parallel_clients: int | None = None,
    **changes: Any,
) -> RoundLoop:
    """The rounds of a run, not yet begun."""
    chosen = {
        "rounds": 5,
        "local_epochs": 2,
        "batch_size": 3,
        "lr": 0.05,
        "momentum": 0.9,
        "evaluate_locals": False,
    }
    training = Training(
        method,
        model or net(),
        among or federation(),
        Settings(**(chosen | changes)),
        engine=engine,
        device="cpu",
        precision="float64",
        parallel_clients=parallel_clients,
    )
    return training.loop(StateCache(None, None))


def copied(params: Tensors) -> Tensors:
    return {name: p.clone() for name, p in params.items()}


def same_bits(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
