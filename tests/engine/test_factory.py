"""Which engine ``auto`` takes, and how many lanes: by what a step touches, and by the memory there is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from holdfast.core.device import available_ram_bytes, choose_device, peak_bytes
from holdfast.core.errors import HoldfastError
from holdfast.core.settings import Settings
from holdfast.data.dataset import Dataset
from holdfast.data.federation import federate
from holdfast.engine import factory as choice
from holdfast.engine.factory import SMALL_STEP_BYTES, step_bytes
from holdfast.methods import FedAvg
from holdfast.models import parse_model
from holdfast.training.session import Training


def trained_by(model: str, shape: tuple[int, ...], **changes: Any) -> Training:
    x, y = torch.zeros(40, *shape).numpy(), (torch.arange(40) % 4).numpy()
    federation = federate(Dataset.from_arrays(x, y, x, y), [range(k, 40, 10) for k in range(10)])
    return Training(FedAvg(), parse_model(model), federation, Settings(rounds=1, **changes), device="cpu")


@pytest.mark.parametrize(
    ("model", "shape", "engine"),
    [
        ("mlp", (64,), "vectorized"),
        ("cnn", (1, 8, 8), "vectorized"),
        ("mlp:2000,2000", (64,), "sequential"),  # 17 MB of weights
        ("ntd-cifar", (3, 32, 32), "sequential"),
    ],
)
def test_auto_goes_by_what_a_step_touches(model: str, shape: tuple[int, ...], engine: str) -> None:
    assert trained_by(model, shape).engine.name == engine


def test_a_step_touches_weights_twice_and_what_the_backward_pass_reads() -> None:
    training = trained_by("linear", (100,))
    weights, inputs = 4 * (100 * 4 + 4), 4 * 7 * 100
    found = step_bytes(training.context, training.data, width=7)
    assert 2 * weights + inputs <= found <= 3 * weights + inputs
    assert found < SMALL_STEP_BYTES


def test_lanes_fit_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert trained_by("mlp", (64,)).engine.group == 10  # one for each client of a round
    training = trained_by("mlp", (64,), batch_size=4)
    each = 4 * step_bytes(training.context, training.data, width=4)
    monkeypatch.setattr(choice, "available_ram_bytes", lambda: int(3.5 * each / 0.4))
    assert trained_by("mlp", (64,), batch_size=4).engine.group == 3
    monkeypatch.setattr(choice, "available_ram_bytes", lambda: 0)
    assert trained_by("mlp", (64,), batch_size=4).engine.group == 1


def test_memory_is_measured() -> None:
    before = peak_bytes(torch.device("cpu"))
    held = torch.ones(before // 4 + (64 << 20))  # as much again as was ever held, and more
    assert peak_bytes(torch.device("cpu")) > before
    assert 0 < available_ram_bytes() < 1 << 50
    del held


def test_a_gpu_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert choose_device("cuda:1") == torch.device("cuda", 1)
    assert chosen == [torch.device("cuda", 1)]
    with pytest.raises(
        HoldfastError, match=r"'cuda:2', but PyTorch finds 2 CUDA device\(s\), numbered from 0"
    ):
        choose_device("cuda:2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(HoldfastError, match="PyTorch finds no CUDA device; use --device cpu"):
        choose_device("cuda")
