"""fp16 copies of filters, written by the optimiser: the same bits as if convolutions cast the filters in every step."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from kernels_world import DEVICE, needs_triton
from torch import nn

import holdfast as hf
from holdfast import kernels
from holdfast.core.settings import Settings
from holdfast.data.federation import Federation
from holdfast.data.preprocess import Preprocess
from holdfast.engine.optim import sgd_
from holdfast.engine.state_cache import StateCache
from holdfast.kernels.fp16_weights import Fp16Filters
from holdfast.training.session import Training

pytestmark = [pytest.mark.gpu, needs_triton]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_optimiser_writes_fp16_copies(momentum):
    from holdfast.kernels.conv import copy_to_fp16_, empty_filters

    shapes = [(2, 70, 32, 3, 3), (2, 4000), (2, 40, 24, 5, 5), (2, 7, 8, 3, 3)]
    taps = [range(1, 2), None, None, range(1, 3)]
    w, g, v = (
        [
            empty_filters(s, torch.device(DEVICE)).normal_() if len(s) == 5 else torch.randn(s, device=DEVICE)
            for s in shapes
        ]
        for _ in range(3)
    )  # fmt: skip
    copied = [range(1, 2), None, range(5), None]  # the taps of each copy; the last filters have none
    copies = [
        None if used is None else torch.zeros(2, t.shape[1], len(used), len(used) * t.shape[2], device=DEVICE).half()
        for t, used in zip(w, copied, strict=True)
    ]  # fmt: skip
    lr = torch.tensor(0.1, device=DEVICE)
    sgd_(
        w, g, v if momentum else [], lr=lr, momentum=momentum, weight_decay=0.01, kernels=True, taps=taps,
        fp16_copies=copies,
    )  # fmt: skip
    for weight, used, copy in zip(w, copied, copies, strict=True):
        if copy is not None:
            expected = torch.empty_like(copy)
            copy_to_fp16_(expected, weight, used)
            assert torch.equal(copy, expected)
            assert copy.any()


@dataclass(frozen=True)
class Halving(hf.Method):
    """Weights are halved after each local epoch."""

    def after_epoch(self, params, carry):
        return {k: 0.5 * w for k, w in params.items()}, carry


def small_maps():
    """Convolutions whose filters have 9 and 4 used taps, and one whose outputs share windows, for which filters are
    packed."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, 1, 1), nn.Tanh(), nn.Conv2d(32, 32, 3, 1, 1), nn.Tanh(), nn.Conv2d(32, 32, 3, 3, 1),
        nn.Tanh(), nn.Flatten(), nn.Linear(32, 4),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("method", "copied"),
    [
        (hf.FedAvg(), {"2.weight", "4.weight"}),
        (hf.FedProx(mu=1.0), {"2.weight", "4.weight"}),
        (hf.Scaffold(), {"2.weight"}),  # whose optimiser also updates padding taps
        (Halving(), set()),
    ],
)
def test_fp16_copies_do_not_change_a_bit(method, copied, monkeypatch):
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (14, 3, 3, 3), dtype=np.uint8), rng.integers(0, 4, 14)
    dataset = hf.Dataset.from_arrays(x, y, x, y, preprocess=Preprocess((0.5,) * 3, (0.5,) * 3))
    federation = Federation(dataset, np.arange(14), np.array([0, 7, 10, 14]))
    settings = Settings(
        rounds=1, local_epochs=2, batch_size=4, lr=0.05, momentum=0.9, weight_decay=0.3, evaluate_locals=False
    )
    monkeypatch.setattr(kernels, "unavailable", lambda device, dtype: None)
    trained = []
    for without_copies in (False, True):
        if without_copies:
            monkeypatch.setattr(Fp16Filters, "requested_taps", lambda self, w: None)
        training = Training(
            method,
            small_maps(),
            federation,
            settings,
            engine="vectorized",
            parallel_clients=2,
            device=DEVICE,
            own_kernels=True,
        )
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
        loop = training.loop(StateCache(None, None))
        loop.round(1)
        assert set(training.engine.conv_filters.fp16_copies) == (set() if without_copies else copied)
        trained.append(loop.server.params)
    for name, want in trained[1].items():
        assert torch.equal(trained[0][name], want), name
