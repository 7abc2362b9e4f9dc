"""Training in bfloat16 and float16 on a GPU: in CUDA graphs, with the same bits, and with gradients that overflow."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.data.federation import Federation
from holdfast.methods.base import Method
from holdfast.models.resnet import ResNet

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
HALF = [
    pytest.param(
        "bfloat16",
        marks=pytest.mark.skipif(
            torch.cuda.is_available() and not torch.cuda.is_bf16_supported(including_emulation=False),
            reason="the GPU does not support bfloat16",
        ),
    ),
    "float16",
]
ENGINES = ["sequential", "vectorized"]


def unequal_federation(scale=1.0):
    """Images of clients of unequal size; those of client 0 are multiplied by ``scale``."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 10, 504)
    x = rng.normal(size=(504, 3, 32, 32)).astype(np.float32)
    x[:, 0] += y[:, None, None] / 5
    x[:100] *= scale
    dataset = hf.Dataset.from_arrays(x, y, x[100:300], y[100:300])
    offsets = np.cumsum([0, 100, 37, 205, 12, 150])
    return Federation(dataset, np.arange(offsets[-1]), offsets.astype(np.int64))


def resnet(norm):
    torch.manual_seed(0)
    return ResNet((1, 1), (3, 3), 1, norm=norm).build((3, 32, 32), 10)


def lstm():
    class Rows(nn.Module):
        """Reads an image row by row."""

        def __init__(self):
            super().__init__()
            self.lstm, self.last = nn.LSTM(96, 32, batch_first=True), nn.Linear(32, 10)

        def forward(self, x):
            return self.last(self.lstm(x.transpose(1, 2).flatten(2))[0][:, -1])

    torch.manual_seed(0)
    return Rows()


def train(precision, engine, method=None, model="cnn", federation=None, **changes):
    settings = {"rounds": 1, "local_epochs": 2, "batch_size": 16, "lr": 0.01, "momentum": 0.9} | changes
    return hf.train(
        method or hf.FedAvg(), model, federation or unequal_federation(), engine=engine, device="cuda",
        precision=precision, evaluate_locals=False, progress=False,
        parallel_clients=3 if engine == "vectorized" else None, **settings,
    )  # fmt: skip


def weights(*arguments, **changes):
    state = train(*arguments, **changes).model.state_dict()
    return torch.cat([value.flatten().double() for value in state.values()])


def assert_near(precision, tolerance=0.3, **changes):
    """Both engines are as near to float32 as the precision permits, in relation to the round's update."""
    full = weights("float32", "sequential", **changes)
    update = float((full - weights("float32", "sequential", **changes | {"lr": 1e-12})).norm())
    for engine in ENGINES:
        apart = float((weights(precision, engine, **changes) - full).norm())
        assert 0 < apart < tolerance * update, (engine, apart / update)


@pytest.mark.parametrize("precision", HALF)
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_residual_networks(norm, precision):
    assert_near(precision, model=resnet(norm), lr=0.001, drop_last=True)


@pytest.mark.parametrize("precision", HALF)
def test_recurrent_networks(precision):
    assert_near(precision, model=lstm())


@pytest.mark.parametrize("precision", HALF)
@pytest.mark.parametrize(
    "method", [hf.FedProx(mu=0.1), hf.FedNTD(), hf.Scaffold(), hf.FedSAM(), hf.Moon()], ids=lambda m: m.name
)
def test_hooks(method, precision):
    assert_near(precision, method=method)


@pytest.mark.parametrize("precision", HALF)
@pytest.mark.parametrize("optimizer", ["sgd:nesterov=true", "adam", "adamw", "rmsprop", "adagrad"])
def test_optimizers(optimizer, precision):
    momentum = 0.9 if optimizer.startswith("sgd") else 0.0
    # The steps of the others do not become smaller where the gradient is nothing but rounding.
    tolerance = 0.3 if optimizer.startswith("sgd") else 0.5
    assert_near(precision, tolerance, optimizer=optimizer, lr=0.001, momentum=momentum)


@pytest.mark.parametrize("precision", HALF)
def test_micro_batches_and_clipping(precision):
    assert_near(precision, micro_batch_size=5, max_grad_norm=1.0)


def test_gradients_of_single_samples():
    pytest.importorskip("dp_accounting")
    dp = {"epsilon": 1e4, "delta": 1e-3, "noise_multiplier": 0.3, "noise_seed": "run"}
    assert_near("bfloat16", dp_samples=dp)


@pytest.mark.parametrize("precision", HALF)
@pytest.mark.parametrize("engine", ENGINES)
def test_same_seed_same_bits_and_a_stopped_run_too(engine, precision, tmp_path):
    whole = weights(precision, engine, rounds=3)
    assert torch.equal(whole, weights(precision, engine, rounds=3))
    train(precision, engine, rounds=3, out=tmp_path / "run", stop_after=1)
    assert torch.equal(whole, weights(precision, engine, rounds=3, out=tmp_path / "run", resume=True))


@dataclass(frozen=True)
class Spike(Method):
    """The gradient of the second epoch is too large for float16."""

    name: ClassVar[str] = "spike"

    def loss(self, out, batch, carry, local):
        return 1e8 * (batch.epoch == 1) * batch.mean(out.logits.sum(-1))


@dataclass(frozen=True)
class Pause(Method):
    """Nothing changes in the second epoch."""

    name: ClassVar[str] = "pause"

    def learning_rate(self, name, epoch, lr, context):
        return 0.0 if epoch == 1 else None


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "rmsprop"])
def test_a_step_that_overflows_changes_nothing(optimizer, engine):
    momentum = 0.9 if optimizer == "sgd" else 0.0
    found, expected, start = (
        weights(
            "float16", engine, method=method, optimizer=optimizer, lr=lr, momentum=momentum, local_epochs=3
        )
        for method, lr in ((Spike(), 0.002), (Pause(), 0.002), (Pause(), 1e-12))
    )
    # The scale is another one after the overflow, and float16 has few digits for its smallest numbers.
    assert float((found - expected).norm()) < 0.02 * float((expected - start).norm())


@pytest.mark.parametrize("engine", ENGINES)
def test_a_client_whose_every_step_overflows_is_left_out(engine):
    run = train("float16", engine, federation=unequal_federation(scale=1e6), rounds=2)
    assert [[i["client"], i["kind"]] for r in run.records for i in r["incidents"]] == [[0, "not finite"]] * 2
    assert all(value.isfinite().all() for value in run.model.state_dict().values())


@pytest.mark.parametrize("precision", HALF)
def test_digits(precision):
    """The accuracy of float32, as the mean over seeds."""
    accuracy = {"float32": [], precision: []}
    for seed in range(3):
        federation = hf.federate(hf.load("digits"), "dirichlet:0.3", clients=8, seed=seed)
        for name, found in accuracy.items():
            run = train(name, "vectorized", model="cnn", federation=federation, rounds=10, lr=0.05, seed=seed)
            found.append(run.accuracy)
    mean = {name: float(np.mean(found)) for name, found in accuracy.items()}
    assert mean["float32"] > 0.85
    assert abs(mean[precision] - mean["float32"]) < 0.02
