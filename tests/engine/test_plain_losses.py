"""Losses in plain PyTorch, which know nothing of padding, on every engine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from engine_world import CLASSES, federation, loop, norm_net
from torch import Tensor, nn
from torch.nn import functional as F

from holdfast.core.trees import leaves
from holdfast.data.dataset import Dataset
from holdfast.data.federation import federate
from holdfast.data.preprocess import Preprocess
from holdfast.engine.sequential import SequentialEngine
from holdfast.engine.thread_pool import ThreadPoolEngine
from holdfast.engine.vectorized.engine import VectorizedEngine
from holdfast.methods import FedAvg, FedKA, FedNTD, FedRoD, Stack
from holdfast.methods.base import Batch, Local, Method, Tensors, Trainer, Tree
from holdfast.methods.context import Client
from holdfast.methods.masking import respects_mask
from holdfast.models.network import Output

UNEQUAL = (
    7,
    4,
    1,
    9,
    5,
    6,
    3,
    2,
)  # in batches of 3: short last batches of 1 and 2, and clients without a full one


@dataclass(frozen=True)
class PlainLoss(Method):
    name: ClassVar[str] = "plain"

    def task_loss(self, out: Output, batch: Batch, carry: Tree) -> Tensor:
        return F.cross_entropy(out.logits, batch.y, label_smoothing=0.1)


def decorrelation(features: Tensor) -> Tensor:
    """Barlow Twins' redundancy term: the squared correlations of different features over the batch."""
    standard = (features - features.mean(0)) / (features.var(0, unbiased=False) + 1e-2).sqrt()
    correlation = standard.T @ standard / len(standard)
    return correlation.square().sum() - correlation.diagonal().square().sum()


@dataclass(frozen=True)
class Decorrelated(Method):
    name: ClassVar[str] = "decorrelated"

    def loss(self, out: Output, batch: Batch, carry: Tree, local: Local) -> Tensor:
        return 0.1 * decorrelation(out.features)


@dataclass(frozen=True)
class Everything(Method):
    """Every hook within a step, each with a plain mean over the batch: teachers, tables, a carry, weights."""

    name: ClassVar[str] = "everything"
    teachers: ClassVar[tuple[str, ...]] = ("global", "past")

    def teacher(self, name: str, payload: Tree, state: Tree, client: Client) -> Tensors:
        past: Tensors = state.get("past", client.global_params)
        return past if name == "past" else client.global_params

    def client_init(self, payload: Tree, state: Tree, client: Client) -> Tree:
        return {
            "mean": client.context.scalar(0.0).expand(CLASSES).clone(),
            "steps": torch.zeros((), dtype=torch.int64),
        }

    def tables(self, payload: Tree, state: Tree, client: Client) -> Tensors:
        return {"rank": torch.arange(client.samples).to(client.context.dtype)}

    def loss(self, out: Output, batch: Batch, carry: Tree, local: Local) -> Tensor:
        apart = F.mse_loss(out.logits, batch.teacher["global"].logits)
        past = (out.logits - batch.teacher["past"].logits).square().amax(1).mean()
        return apart + 0.1 * past + 0.01 * (out.features.sum(1) * batch.table["rank"]).mean()

    def after_step(self, params: Tensors, out: Output, batch: Batch, carry: Tree) -> tuple[Tensors, Tree]:
        smaller = {name: 0.99 * p for name, p in params.items()}
        return smaller, {"mean": 0.5 * carry["mean"] + out.logits.mean(0), "steps": carry["steps"] + 1}

    def after_epoch(self, params: Tensors, carry: Tree) -> tuple[Tensors, Tree]:
        return params, {**carry, "mean": carry["mean"] * 0.5}

    def client_final(self, params: Tensors, carry: Tree, client: Client) -> tuple[Tree, Tree]:
        return {"mean": carry["mean"], "steps": carry["steps"]}, {"past": {**params, **client.buffers}}

    def update(self, server: Any, sums: Tree, uploads: Any, context: Any) -> Tree:
        return {"mean": sums["mean"], "steps": sums["steps"]}


@dataclass(frozen=True)
class WholeStep(Method):
    """Two plain gradient steps on every batch."""

    name: ClassVar[str] = "whole-step"

    def step(
        self, trainer: Trainer, params: Tensors, batch: Batch, carry: Tree, local: Local
    ) -> Tensors | None:
        for _ in range(2):
            grads, _ = trainer.gradient(
                lambda w: F.cross_entropy(trainer.forward(w, batch.x).logits, batch.y), params
            )
            params = {name: p - trainer.lr * grads[name] for name, p in params.items()}
        return params


@dataclass(frozen=True)
class UsualStep(Method):
    """``step`` returns None: the usual step, with all hooks that belong to it."""

    name: ClassVar[str] = "usual-step"

    def step(
        self, trainer: Trainer, params: Tensors, batch: Batch, carry: Tree, local: Local
    ) -> Tensors | None:
        return None

    def task_loss(self, out: Output, batch: Batch, carry: Tree) -> Tensor:
        return F.cross_entropy(out.logits, batch.y, label_smoothing=0.1)


def learnt(method: Method, engine: str, rounds: int = 2, **options: Any) -> dict[str, Tensor]:
    """The global model, the server's state and the training losses, after some rounds in float64."""
    chosen = {"among": federation(UNEQUAL), "clients_per_round": 6, "weight_decay": 0.01, **options}
    run = loop(method, engine=engine, **chosen)
    losses = [run.round(number)["train_loss"] for number in range(1, rounds + 1)]
    values = {"params": run.server.params, "buffers": run.server.buffers, "state": run.server.state}
    return {name: value.clone() for name, value in leaves(values)} | {"loss": torch.tensor(losses)}


def assert_engines_agree(method: Method, **options: Any) -> None:
    """Three lanes for six clients, so that clients wait for a lane, and lanes for each other."""
    reference = learnt(method, "sequential", **options)
    vectorized = learnt(method, "vectorized", parallel_clients=3, **options)
    assert reference.keys() == vectorized.keys()
    for name, value in reference.items():
        torch.testing.assert_close(vectorized[name], value, rtol=1e-9, atol=1e-10, msg=name)


OWN: list[Method] = [PlainLoss(), Decorrelated(), Everything(), WholeStep(), UsualStep()]


@pytest.mark.parametrize("method", OWN, ids=lambda m: m.name)
def test_engines_agree_on_clients_of_unequal_size(method: Method) -> None:
    assert_engines_agree(method)


@pytest.mark.parametrize("method", [Everything(), WholeStep()], ids=lambda m: m.name)
def test_engines_agree_with_batch_norm(method: Method) -> None:
    assert_engines_agree(
        method, model=norm_net(), among=federation((7, 4, 1, 9, 6, 3)), clients_per_round=None
    )


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_engines_agree_with_clipping_and_an_optimizer_state_that_is_kept(optimizer: str) -> None:
    momentum = {"momentum": 0.9} if optimizer == "sgd" else {"momentum": 0.0, "lr": 0.01}
    assert_engines_agree(
        Everything(),
        max_grad_norm=0.5,
        optimizer=optimizer,
        keep_optimizer=True,
        clients_per_round=4,
        **momentum,
    )


def test_engines_agree_on_augmented_images() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (33, 1, 4, 4), dtype=np.uint8), np.arange(33) % CLASSES
    dataset = replace(
        Dataset.from_arrays(x, y, x, y), preprocess=Preprocess((0.5,), (0.2,), crop=1, flip=True)
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, CLASSES))
    among = federate(dataset, np.split(np.arange(33), [9, 14, 22, 23]))
    assert_engines_agree(Everything(), among=among, model=model, clients_per_round=None)


def test_threads_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    run = loop(PlainLoss(), among=federation(UNEQUAL), weight_decay=0.01, clients_per_round=6)
    engine = run.engine
    assert isinstance(engine, SequentialEngine)
    run.engine = ThreadPoolEngine(run.method, run.context, engine.data, run.settings, workers=2)
    for number in (1, 2):
        run.round(number)
    expected = learnt(PlainLoss(), "sequential", rounds=2)
    for name, value in run.server.params.items():
        assert torch.equal(value, expected[f"params/{name}"])


def test_engines_agree_on_stacks_with_built_in_methods() -> None:
    assert_engines_agree(Stack(FedNTD(), FedKA(beta=0.1), Decorrelated()))


def test_the_plain_mean_is_that_of_the_built_in_loss() -> None:
    @dataclass(frozen=True)
    class Plain(Method):
        name: ClassVar[str] = "plain"

        def task_loss(self, out: Output, batch: Batch, carry: Tree) -> Tensor:
            return F.cross_entropy(out.logits, batch.y)

    for engine in ("sequential", "vectorized"):
        own, built_in = (learnt(method, engine) for method in (Plain(), FedAvg()))
        for name, value in built_in.items():
            torch.testing.assert_close(own[name], value, rtol=1e-9, atol=1e-10, msg=f"{engine}: {name}")


class OwnAnchors(FedKA):
    """Redefines a function that the built-in method calls before its steps; it might call it within them."""

    def _representative(self, label: np.int64, client: Client, rng: np.random.Generator) -> int:
        return 0


@dataclass(frozen=True)
class Masked(PlainLoss):
    name: ClassVar[str] = "masked"
    uses_mask: ClassVar[bool] = True

    def task_loss(self, out: Output, batch: Batch, carry: Tree) -> Tensor:
        return batch.mean(F.cross_entropy(out.logits, batch.y, reduction="none"))


@dataclass(frozen=True)
class PlainAgain(Masked):
    def loss(self, out: Output, batch: Batch, carry: Tree, local: Local) -> Tensor:
        return out.logits.mean()


@dataclass(frozen=True)
class OwnServer(FedNTD):
    eta: float = 0.5

    def client_weight(self, client: Client) -> float:
        return 1.0

    def edit_gradient(self, grads: Tensors, carry: Tree, local: Local) -> Tensors:
        return {name: self.eta * g for name, g in grads.items()}


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (FedNTD(), True),
        (Stack(FedNTD(), FedRoD()), True),
        (OwnServer(), True),  # its own hooks do not see the batch
        (Masked(), False),  # what it inherits from a plain class counts too
        (PlainLoss(), False),
        (PlainAgain(), False),
        (OwnAnchors(), False),
        (Stack(FedNTD(), PlainLoss()), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_which_methods_are_trained_on_padded_batches(method: Method, expected: bool) -> None:
    assert respects_mask(method) == expected
    engine = loop(method, engine="vectorized").engine
    assert isinstance(engine, VectorizedEngine)
    assert engine.pad == expected


def test_a_declared_mask_is_trained_on_padded_batches() -> None:
    @dataclass(frozen=True)
    class Declared(Method):
        name: ClassVar[str] = "declared"
        uses_mask: ClassVar[bool] = True

        def task_loss(self, out: Output, batch: Batch, carry: Tree) -> Tensor:
            return batch.mean(F.cross_entropy(out.logits, batch.y, reduction="none"))

    engine = loop(Declared(), engine="vectorized").engine
    assert isinstance(engine, VectorizedEngine)
    assert engine.pad
    assert_engines_agree(Declared())


def test_a_step_has_batches_of_one_size_and_every_batch_is_trained_once() -> None:
    run = loop(PlainLoss(), engine="vectorized", among=federation(UNEQUAL), parallel_clients=3)
    engine = run.engine
    assert isinstance(engine, VectorizedEngine)
    schedule = engine._schedule(1, run.upcoming(1))
    assert "mask" not in schedule.arrays
    assert not schedule.padded.any()
    assert len(schedule.slots) == len(UNEQUAL)
    lanes, indices = schedule.arrays["lanes"].numpy(), schedule.arrays["indices"].numpy()
    for slot in schedule.slots:
        plan, seen = slot.planned.plan, []
        assert (np.diff(slot.at) > 0).all()
        for i, step in enumerate(slot.at):
            (place,) = np.flatnonzero(lanes[step, : schedule.active[step]] == slot.lane)
            assert schedule.widths[step] == plan.sizes[i]
            seen += indices[step, place, : plan.sizes[i]].tolist()
        assert seen == slot.planned.ids[plan.order].tolist()
    assert schedule.active.sum() == sum(slot.steps for slot in schedule.slots)
