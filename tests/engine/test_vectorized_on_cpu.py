"""The vectorized engine on a CPU: samples preprocessed once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from engine_world import copied, loop, same_bits
from torch import nn

from holdfast.data.dataset import Dataset
from holdfast.data.federation import Federation, federate
from holdfast.data.preprocess import Preprocess
from holdfast.engine.vectorized import engine as vectorized
from holdfast.engine.vectorized.engine import VectorizedEngine
from holdfast.methods import FedAvg


def images(preprocess: Preprocess) -> Federation:
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (40, 3, 4, 4), dtype=np.uint8), np.arange(40) % 4
    dataset = replace(Dataset.from_arrays(x, y, x, y), preprocess=preprocess)
    return federate(dataset, np.split(np.arange(40), [10, 25]))


def trained(preprocess: Preprocess) -> tuple[torch.dtype, dict[str, torch.Tensor]]:
    """The dtype of the stored samples, and the weights after three rounds."""
    torch.manual_seed(0)
    rounds = loop(
        FedAvg(),
        engine="vectorized",
        model=nn.Sequential(nn.Flatten(), nn.Linear(48, 4)),
        among=images(preprocess),
    )
    for number in (1, 2, 3):
        rounds.round(number)
    assert isinstance(rounds.engine, VectorizedEngine)
    return rounds.engine.data.x.dtype, copied(rounds.server.params)


def test_samples_preprocessed_once_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    preprocess = Preprocess((0.5, 0.4, 0.3), (0.2, 0.3, 0.4))
    stored, once = trained(preprocess)
    assert stored == torch.float64
    monkeypatch.setattr(vectorized, "PREPROCESSED_BYTES", 0)
    stored, in_every_step = trained(preprocess)
    assert stored == torch.uint8
    assert same_bits(once, in_every_step)


def test_samples_that_are_augmented_stay_as_they_are_stored() -> None:
    assert trained(Preprocess((0.5,), (0.2,), crop=1))[0] == torch.uint8
