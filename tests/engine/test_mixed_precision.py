"""Training in bfloat16 and float16: against plain PyTorch, between engines, and with gradients that overflow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import holdfast as hf
from holdfast.core.settings import Settings
from holdfast.data.dataset import Dataset
from holdfast.data.federation import Federation, federate
from holdfast.engine.clients import Broadcast, ClientResult, Job
from holdfast.engine.loss_scaling import FIRST_SCALE
from holdfast.methods.base import Batch, Local, Method, Tensors, Tree
from holdfast.methods.context import RunContext
from holdfast.models.network import Output
from holdfast.training.session import Training

SIZES = (24, 9, 17, 12)
HALF = ("bfloat16", "float16")
ENGINES = ("sequential", "vectorized")


@pytest.fixture(autouse=True)
def without_onednn() -> Iterator[None]:
    """As runs in half precision, so that no test reaches oneDNN's kernels for it; restored for later tests."""
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    yield
    torch.backends.mkldnn.enabled = before


def federation(scale: float = 1.0, shape: tuple[int, ...] = (6,)) -> Federation:
    """Unequal clients; the samples of client 0 are multiplied by ``scale``."""
    rng = np.random.default_rng(1)
    total = sum(SIZES)
    y = rng.integers(0, 3, total)
    x = (rng.normal(size=(total, *shape)) + y.reshape(-1, *[1] * len(shape))).astype(np.float32)
    parts = np.split(np.arange(total), np.cumsum(SIZES)[:-1])
    x[parts[0]] *= scale
    return federate(Dataset.from_arrays(x, y, x[::2], y[::2]), parts)


def net(norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    norms = [nn.BatchNorm1d(16)] if norm else []
    return nn.Sequential(nn.Linear(6, 16), *norms, nn.ReLU(), nn.Linear(16, 3))


def train(method: Any, precision: str, engine: str = "sequential", **changes: Any) -> Any:
    settings: dict[str, Any] = {
        "rounds": 2, "local_epochs": 2, "batch_size": 8, "lr": 0.1, "seed": 3, "evaluate_locals": False,
        "progress": False, "device": "cpu", "model": net(), "federation": federation(),
    }  # fmt: skip
    settings |= changes
    model, among = settings.pop("model"), settings.pop("federation")
    return hf.train(method, model, among, engine=engine, precision=precision, **settings)


def flat(tensors: Tensors) -> Tensor:
    return torch.cat([value.double().flatten() for value in tensors.values()])


def weights(*arguments: Any, **changes: Any) -> Tensor:
    return flat(train(*arguments, **changes).model.state_dict())


def trained(
    method: Method,
    precision: str,
    engine: str,
    among: Federation,
    model: nn.Module | None = None,
    **changes: Any,
) -> tuple[Training, dict[int, ClientResult]]:
    """The clients' results of a round, with copies of their weights."""
    settings = Settings(**({"rounds": 1, "local_epochs": 2, "batch_size": 8, "lr": 0.1, "seed": 3} | changes))
    training = Training(
        method, model or net(), among, settings, engine=engine, device="cpu", precision=precision,
        parallel_clients=2 if engine == "vectorized" else None,
    )  # fmt: skip
    network = training.context.network
    sent = Broadcast(1, dict(network.params), dict(network.buffers), {})
    jobs = [Job(k, among.client(k, 0)) for k in range(among.clients)]
    results = {}
    for result in training.engine.train(sent, jobs):
        assert isinstance(result, ClientResult)
        result.params = {name: p.detach().clone() for name, p in result.params.items()}
        result.buffers = {name: b.clone() for name, b in result.buffers.items()}
        results[result.client] = result
    return training, results


# Against plain PyTorch ----------------------------------------------------------------------------------------


def plain_round(among: Federation, dtype: torch.dtype | None, steps: int, max_norm: float | None) -> Tensor:
    """A round of FedAvg with ``torch.autocast`` and ``torch.amp.GradScaler``; a step takes all samples of a client."""
    mean = torch.zeros(())
    for client in range(among.clients):
        ids = among.client(client, 0)
        x, y = among.dataset.x_train[ids], among.dataset.y_train[ids]
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=FIRST_SCALE, enabled=dtype == torch.float16)
        for _ in range(steps):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
                logits = model(x)
            loss = nn.functional.cross_entropy(logits.float(), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            if max_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            scaler.step(optimizer)
            scaler.update()
        mean = mean + flat(model.state_dict()) * len(ids) / sum(SIZES)
    return mean


@pytest.mark.parametrize("max_norm", [None, 0.2])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("precision", HALF)
def test_a_round_is_that_of_plain_pytorch(precision: str, engine: str, max_norm: float | None) -> None:
    found = weights(
        hf.FedAvg(), precision, engine, rounds=1, batch_size=100, local_epochs=3, momentum=0.9, weight_decay=0.01,
        max_grad_norm=max_norm,
    )  # fmt: skip
    half, full = (plain_round(federation(), d, 3, max_norm) for d in (getattr(torch, precision), None))
    # Rounding is part of the result. On lanes, the sum with a bias is a second operation, which rounds again.
    assert float((found - half).norm()) < float((found - full).norm()) / (2 if engine == "sequential" else 1)
    assert float((found - half).norm() / (full - flat(net().state_dict())).norm()) < 3e-3


# Between engines ----------------------------------------------------------------------------------------------


def assert_near(method: Any, precision: str, tolerance: float = 0.1, **changes: Any) -> None:
    """Both engines are as near to each other and to float32 as the precision permits."""
    full = weights(method, "float32", **changes)
    start = flat((changes.get("model") or net()).state_dict())
    one, other = (weights(method, precision, engine, **changes) for engine in ENGINES)
    update = float((full - start).norm())
    assert 0 < float((one - full).norm()) < tolerance * update
    assert float((one - other).norm()) < tolerance * update


METHODS = [
    hf.FedProx(mu=0.1),  # a term of the optimiser
    hf.FedNTD(),  # a teacher
    hf.Scaffold(),  # edited gradients
    hf.FedSAM(),  # perturbed weights
    hf.FedReg(),  # a step of its own
]


@pytest.mark.parametrize("precision", HALF)
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_hooks(method: Method, precision: str) -> None:
    assert_near(method, precision)


@pytest.mark.parametrize("precision", HALF)
@pytest.mark.parametrize("optimizer", ["sgd:nesterov=true", "adam", "adamw", "rmsprop", "adagrad"])
def test_optimizers(optimizer: str, precision: str) -> None:
    momentum = 0.9 if optimizer.startswith("sgd") else 0.0
    # RMSprop's first steps are ten times as long as the learning rate, whatever the gradient's size.
    tolerance = 0.3 if optimizer == "rmsprop" else 0.1
    assert_near(hf.FedAvg(), precision, tolerance, optimizer=optimizer, lr=0.02, momentum=momentum)


@pytest.mark.parametrize("precision", HALF)
def test_an_optimizer_of_torchs(precision: str) -> None:
    full, half = (
        weights(hf.FedAvg(), p, optimizer=torch.optim.RAdam, lr=0.02) for p in ("float32", precision)
    )
    assert 0 < float((half - full).norm()) < 0.05 * float((full - flat(net().state_dict())).norm())


@pytest.mark.parametrize("precision", HALF)
@pytest.mark.parametrize("changes", [
    {"micro_batch_size": 3}, {"model": net(norm=True), "drop_last": True}, {"lr_schedule": "cosine:over=steps"},
    {"momentum": 0.9, "keep_optimizer": True},
], ids=["micro-batches", "batchnorm", "schedule", "kept-state"])  # fmt: skip
def test_settings(changes: dict[str, Any], precision: str) -> None:
    assert_near(hf.FedAvg(), precision, **changes)


class Recurrent(nn.Module):
    """A recurrent layer over the three pairs of a sample's values."""

    def __init__(self, layer: type[nn.LSTM | nn.GRU]) -> None:
        super().__init__()
        self.layer, self.last = layer(2, 16, batch_first=True), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.last(self.layer(x.view(-1, 3, 2))[0][:, -1])
        return logits


@pytest.mark.parametrize("precision", HALF)
@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU])
def test_recurrent_layers(layer: type[nn.LSTM | nn.GRU], precision: str) -> None:
    torch.manual_seed(0)
    assert_near(hf.FedAvg(), precision, model=Recurrent(layer))


@pytest.mark.parametrize("engine", ENGINES)
def test_gradients_of_single_samples_in_bfloat16(engine: str) -> None:
    pytest.importorskip("dp_accounting")
    dp = {"epsilon": 1e4, "delta": 1e-2, "noise_multiplier": 0.3, "noise_seed": "run"}
    full, half = (weights(hf.FedAvg(), p, engine, dp_samples=dp) for p in ("float32", "bfloat16"))
    assert 0 < float((half - full).norm()) < 0.05 * float((full - flat(net().state_dict())).norm())
    with pytest.raises(hf.HoldfastError, match=r"in float16, a sample whose gradient overflows .* bfloat16"):
        train(hf.FedAvg(), "float16", engine, dp_samples=dp)


@dataclass(frozen=True)
class Own(Method):
    """A method that the vectorized engine tries before training."""

    name: ClassVar[str] = "own"

    def loss(self, out: Output, batch: Batch, carry: Tree, local: Local) -> Tensor | None:
        assert out.logits.dtype == out.features.dtype == batch.x.dtype
        return batch.mean(out.features.square().mean(1))


@pytest.mark.filterwarnings("error::holdfast.core.errors.HoldfastWarning")
@pytest.mark.parametrize("precision", HALF)
def test_hooks_receive_outputs_in_float32(precision: str) -> None:
    training, results = trained(Own(), precision, "vectorized", federation())
    assert training.engine.name == "vectorized"
    assert all(value.dtype == torch.float32 for r in results.values() for value in r.params.values())


@pytest.mark.parametrize("precision", HALF)
def test_steps_on_lanes_are_recorded(precision: str) -> None:
    training, _ = trained(hf.FedProx(), precision, "vectorized", federation(), local_epochs=6)
    compiled = training.engine.step_cache.compiled  # type: ignore[attr-defined]
    assert compiled
    assert all(step is not None for step in compiled.values())


# The same bits ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("precision", HALF)
def test_same_seed_same_bits_and_a_stopped_run_too(precision: str, engine: str, tmp_path: Path) -> None:
    given: dict[str, Any] = {"rounds": 4, "momentum": 0.9, "keep_optimizer": True}
    whole = weights(hf.Scaffold(), precision, engine, **given)
    assert torch.equal(whole, weights(hf.Scaffold(), precision, engine, **given))
    train(hf.Scaffold(), precision, engine, out=tmp_path / "run", stop_after=2, **given)
    with pytest.raises(hf.HoldfastError, match="cannot be resumed with another precision"):
        train(hf.Scaffold(), "float32", engine, out=tmp_path / "run", resume=True, **given)
    assert torch.equal(
        whole, weights(hf.Scaffold(), precision, engine, out=tmp_path / "run", resume=True, **given)
    )


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("precision", HALF)
def test_a_client_does_not_depend_on_its_neighbours(precision: str, engine: str) -> None:
    _, usual = trained(hf.FedAvg(), precision, engine, federation())
    _, beside = trained(hf.FedAvg(), precision, engine, federation(scale=1e6))  # infinite in float16
    for client in range(1, len(SIZES)):
        assert torch.equal(flat(usual[client].params), flat(beside[client].params))
    assert not torch.equal(flat(usual[0].params), flat(beside[0].params))


# Overflow -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spike(Method):
    """The gradient of the second epoch is too large for float16."""

    name: ClassVar[str] = "spike"

    def loss(self, out: Output, batch: Batch, carry: Tree, local: Local) -> Tensor | None:
        return 1e8 * (batch.epoch == 1) * batch.mean(out.logits.sum(-1))


@dataclass(frozen=True)
class Pause(Method):
    """Nothing changes in the second epoch."""

    name: ClassVar[str] = "pause"

    def learning_rate(self, name: str, epoch: int, lr: float, context: RunContext) -> float | None:
        return 0.0 if epoch == 1 else None


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("optimizer", ["sgd", "sgd:nesterov=true", "adam", "adamw", "rmsprop", "adagrad"])
def test_a_step_that_overflows_changes_nothing(optimizer: str, engine: str) -> None:
    how: dict[str, Any] = {
        "optimizer": optimizer, "lr": 0.02, "local_epochs": 3, "rounds": 2,
        "momentum": 0.9 if optimizer.startswith("sgd") else 0.0,
    }  # fmt: skip
    spike, pause = (train(method, "float16", engine, **how) for method in (Spike(), Pause()))
    found, expected = flat(spike.model.state_dict()), flat(pause.model.state_dict())
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)  # the scale is another one afterwards
    assert all(record["train_loss"] < 2 for record in spike.records)  # of the steps that were taken


@dataclass(frozen=True)
class Multiple(Method):
    """A multiple of the cross-entropy."""

    name: ClassVar[str] = "multiple"
    factor: float = 1.0

    def task_loss(self, out: Output, batch: Batch, carry: Tree) -> Tensor:
        return self.factor * batch.mean(nn.functional.cross_entropy(out.logits, batch.y, reduction="none"))


@pytest.mark.parametrize("engine", ENGINES)
def test_small_gradients_are_kept(engine: str) -> None:
    full, half = (weights(Multiple(factor=1e-6), p, engine, lr=1e5) for p in ("float32", "float16"))
    assert float((half - full).norm()) < 0.02 * float((full - flat(net().state_dict())).norm())


@pytest.mark.parametrize("engine", ENGINES)
def test_a_scale_that_is_too_large_is_halved(engine: str) -> None:
    given: dict[str, Any] = {"local_epochs": 12, "lr": 1e-5}
    _, half = trained(Multiple(factor=1e3), "float16", engine, federation(), **given)
    _, full = trained(Multiple(factor=1e3), "float32", engine, federation(), **given)
    start = flat(net().state_dict())
    for client, result in half.items():
        moved, whole = (float((flat(r.params) - start).norm()) for r in (result, full[client]))
        assert 0.5 * whole < moved < whole  # but for the first steps


@pytest.mark.parametrize("engine", ENGINES)
def test_a_client_whose_every_step_overflows_is_left_out(engine: str) -> None:
    run = train(
        hf.FedAvg(), "float16", engine, federation=federation(scale=1e6), model=net(norm=True), drop_last=True
    )
    assert [[i["client"], i["kind"]] for r in run.records for i in r["incidents"]] == [[0, "not finite"]] * 2
    assert all(value.isfinite().all() for value in run.model.state_dict().values())
    with pytest.raises(hf.HoldfastError, match="no usable update is left"):
        train(hf.FedAvg(), "float16", engine, loss=lambda out, y: 1e30 * out.square().sum(1))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_skipped_step_leaves_buffers_and_carry(engine: str) -> None:
    @dataclass(frozen=True)
    class Counted(Method):
        """Counts its steps in the carry."""

        name: ClassVar[str] = "counted"

        def client_init(self, payload: Tree, state: Tree, client: Any) -> Tree:
            return {"steps": torch.zeros(())}

        def after_step(self, params: Tensors, out: Output, batch: Batch, carry: Tree) -> tuple[Tensors, Tree]:
            return params, {"steps": carry["steps"] + 1}

        def client_final(self, params: Tensors, carry: Tree, client: Any) -> tuple[Tree, Tree]:
            return {}, {"steps": carry["steps"]}

    # In its first batches, 1 in 4 of the samples is infinite in float16.
    among = federation(shape=(6,))
    ids = among.client(2, 0)
    among.dataset.x_train[ids[0]] = 1e6
    _, results = trained(
        Counted(), "float16", engine, among, net(norm=True), local_epochs=3, batch_size=4, drop_last=True
    )
    steps = {k: float(r.client_state["method"]["steps"]) for k, r in results.items()}
    batches = [3 * (n // 4) for n in SIZES]
    assert [steps[k] for k in (0, 1, 3)] == [batches[k] for k in (0, 1, 3)]
    assert batches[2] - 3 <= steps[2] < batches[2]  # without those with the sample, which is in most epochs
    assert results[2].buffers["1.num_batches_tracked"] == steps[2]
    assert all(value.isfinite().all() for value in results[2].buffers.values())


# Convolutions, evaluation, accuracy ---------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_filters_that_meet_only_padding(engine: str) -> None:
    """OneDNN leaves their gradients uninitialised in bfloat16."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Unflatten(1, (64, 1, 1)), nn.Conv2d(64, 64, 5, 2, 2), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
    )
    among = federation(shape=(64,))
    torch.backends.mkldnn.enabled = True  # type: ignore[assignment]  # the run must see to it
    full, half = (
        weights(hf.FedAvg(), p, engine, model=model, federation=among) for p in ("float32", "bfloat16")
    )
    assert float((half - full).norm()) < 0.05 * float((full - flat(model.state_dict())).norm())


@pytest.mark.parametrize("precision", HALF)
def test_tests_are_in_float32(precision: str) -> None:
    run, dataset = train(hf.FedAvg(), precision), federation().dataset
    with torch.no_grad():
        loss = nn.functional.cross_entropy(run.model(dataset.x_test), dataset.y_test)
    assert run.records[-1]["loss"] == pytest.approx(float(loss), rel=1e-6)


@pytest.mark.parametrize("precision", HALF)
def test_digits(precision: str) -> None:
    """The accuracy of float32, as the mean over seeds."""
    accuracies: dict[str, list[float]] = {"float32": [], precision: []}
    for seed in range(3):
        among = hf.federate(hf.load("digits"), "dirichlet:0.3", clients=8, seed=seed)
        for name, found in accuracies.items():
            run = train(
                "fedntd",
                name,
                "vectorized",
                model="mlp:64",
                federation=among,
                rounds=10,
                batch_size=16,
                seed=seed,
            )
            found.append(run.accuracy)
    mean = {name: float(np.mean(found)) for name, found in accuracies.items()}
    assert mean["float32"] > 0.85
    assert abs(mean[precision] - mean["float32"]) < 0.02
