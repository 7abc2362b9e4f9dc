"""Filter taps that meet only padding: skipped while a client trains, they end up as if updated in every step."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from kernels_world import DEVICE, needs_triton, relative
from torch import nn

import holdfast as hf
from holdfast import kernels
from holdfast.core.settings import Settings
from holdfast.data.federation import Federation
from holdfast.data.preprocess import Preprocess
from holdfast.engine.optim import sgd_
from holdfast.engine.state_cache import StateCache
from holdfast.training.session import Training

pytestmark = [pytest.mark.gpu, needs_triton]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_step_without_padding_taps(momentum):
    from holdfast.kernels.conv import empty_filters

    shapes = [(2, 70, 32, 3, 3), (2, 4000), (2, 40, 24, 5, 5), (2, 7, 3, 3, 3)]
    taps = [range(1, 2), None, range(1, 3), None]
    w, g, v = (
        [
            empty_filters(s, torch.device(DEVICE)).normal_() if len(s) == 5 else torch.randn(s, device=DEVICE)
            for s in shapes
        ]
        for _ in range(3)
    )  # fmt: skip
    expected = []
    for weight, grad, velocity, used in zip(w, g, v, taps, strict=True):
        step = grad.double() + 0.01 * weight.double() + momentum * velocity.double()
        updated = torch.zeros(weight.shape[-2:], dtype=torch.bool, device=DEVICE)
        updated[slice(None) if used is None else used] = True
        if used is not None:
            updated &= updated.T.clone()
        new = weight.double() - 0.1 * step
        expected.append((torch.where(updated, new, weight), torch.where(updated, step, velocity)))
    lr = torch.tensor(0.1, device=DEVICE)
    sgd_(w, g, v if momentum else [], lr=lr, momentum=momentum, weight_decay=0.01, kernels=True, taps=taps)
    for i, (weight, step) in enumerate(expected):
        assert relative(w[i], weight) < 1e-6
        assert relative(v[i], step) < 1e-6 or not momentum


def small_maps():
    """Convolutions of 2 x 2 and of 1 x 1 pixels: 4 taps of 9 meet a pixel in the first, 1 in the second."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1), nn.Tanh(), nn.Conv2d(16, 32, 3, 1, 1), nn.Tanh(), nn.Flatten(), nn.Linear(32, 4)
    )  # fmt: skip


@dataclass(frozen=True)
class Shrinking(hf.Method):
    """A loss that reads all weights, with a gradient in them or (``detached``) without."""

    detached: bool = False

    def loss(self, out, batch, carry, local):
        size = sum(w.square().sum() for w in local.params.values())
        if self.detached:
            return 0.01 * size.detach() * batch.mean(out.logits.square().mean(-1))
        return 0.05 * size


@dataclass(frozen=True)
class Halving(hf.Method):
    """Weights are halved after each local epoch."""

    def after_epoch(self, params, carry):
        return {k: 0.5 * w for k, w in params.items()}, carry


@pytest.mark.parametrize(
    ("method", "skips"),
    [
        (hf.FedAvg(), True),
        (hf.FedNTD(), True),
        (hf.FedProx(mu=1.0), True),
        (hf.Stack(hf.FedProx(mu=1.0), hf.Scaffold()), False),
        (hf.FedRep(body_epochs=1), False),
        (Shrinking(), False),
        (Shrinking(detached=True), False),
        (Halving(), False),
    ],
)
@pytest.mark.parametrize("clipped", [None, 0.5])
def test_padding_taps_end_up_as_if_updated_in_every_step(method, skips, clipped, monkeypatch):
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (14, 3, 2, 2), dtype=np.uint8), rng.integers(0, 4, 14)
    dataset = hf.Dataset.from_arrays(x, y, x, y, preprocess=Preprocess((0.5,) * 3, (0.5,) * 3))
    federation = Federation(dataset, np.arange(14), np.array([0, 7, 10, 14]))
    settings = Settings(
        rounds=2, local_epochs=2, batch_size=4, lr=0.05, momentum=0.9, weight_decay=0.3, max_grad_norm=clipped,
        evaluate_locals=False,
    )  # fmt: skip
    skips &= clipped is None  # scaled gradients are not what convolutions wrote
    trained = []
    for engine in ("sequential", "vectorized"):
        if engine == "vectorized":
            monkeypatch.setattr(kernels, "unavailable", lambda device, dtype: None)
        training = Training(
            method,
            small_maps(),
            federation,
            settings,
            engine=engine,
            parallel_clients=2 if engine == "vectorized" else None,
            device=DEVICE,
            precision="float32",
            own_kernels=engine == "vectorized",
        )
        loop = training.loop(StateCache(None, None))
        loop.round(1)
        loop.round(2)
        trained.append(loop.server.params)
    assert training.engine.conv_filters.used_taps == (
        {"0.weight": range(1, 3), "2.weight": range(1, 2)} if skips else {}
    )
    for name, want in trained[0].items():
        assert relative(trained[1][name], want.double()) < 1e-5, name
    before = training.context.network.params["2.weight"][..., 0, :]
    assert relative(trained[1]["2.weight"][..., 0, :], before.double()) > 0.01
