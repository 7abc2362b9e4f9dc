"""Gradient accumulation: a step over micro-batches is that of the whole batch, on every engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_world import CLASSES, INPUTS, copied, federation, loop, norm_net, same_bits
from torch import Tensor, nn
from torch.nn import functional as F

import holdfast as hf
from holdfast.core.trees import Tree
from holdfast.engine.micro_batches import micro_batches
from holdfast.methods.base import Batch
from holdfast.models.network import Output
from holdfast.tasks.registry import as_task

ENGINES = ("sequential", "vectorized")
WORLD = federation((9, 5, 7))


def weights(method: str, engine: str, model: nn.Module | None = None, **changes: Any) -> dict[str, Tensor]:
    chosen = {"batch_size": 5, "among": WORLD, "parallel_clients": 2 if engine == "vectorized" else None}
    run = loop(hf.methods.parse_method(method), engine=engine, model=model, **chosen | changes)
    for number in (1, 2):
        run.round(number)
    return copied(run.server.params)


def close(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.allclose(one[name], other[name], rtol=1e-9, atol=1e-11) for name in one)


METHODS_TRIED = (
    "fedprox",
    "scaffold",
    "fedntd",
    "moon",
    "fedsmoo",
    "fedspeed",
    "fedproto",
    "fedlc",
    "fedka",
    "fedmlp:alpha=0",
)


@pytest.mark.parametrize("method", ["fedavg", *METHODS_TRIED])
@pytest.mark.parametrize("engine", ENGINES)
def test_micro_batches_change_nothing_but_rounding(method: str, engine: str) -> None:
    whole = weights(method, engine)
    parts = weights(method, engine, micro_batch_size=3)  # parts of 3 and 2, and shorter last batches
    assert close(whole, parts)
    if method == "fedavg":
        assert not same_bits(whole, parts)


@pytest.mark.parametrize("most", [None, 0.05])
def test_they_are_what_a_loop_accumulates_and_clips(most: float | None) -> None:
    one = federation((12,))
    model, reference = plain_net(), plain_net().double()
    found = weights(
        "fedavg", "sequential", model, among=one, batch_size=12, micro_batch_size=5, local_epochs=1,
        keep_optimizer=True, max_grad_norm=most,
    )  # fmt: skip
    optimiser = torch.optim.SGD(reference.parameters(), 0.05, momentum=0.9)
    x, y = one.dataset.x_train.double(), one.dataset.y_train
    for _ in range(2):
        optimiser.zero_grad()
        for rows in torch.arange(12).split(5):
            loss = nn.functional.cross_entropy(reference(x[rows]), y[rows], reduction="sum") / 12
            loss.backward()  # type: ignore[no-untyped-call]
        if most is not None:
            assert nn.utils.clip_grad_norm_(reference.parameters(), most) > most
        optimiser.step()
    for name, value in reference.named_parameters():
        assert torch.allclose(found[name], value.detach(), rtol=1e-9, atol=1e-12)


def plain_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(INPUTS, 4), nn.Tanh(), nn.Linear(4, CLASSES))


class Watched(nn.Module):
    """Counts the samples of its passes in training."""

    seen: list[int] = []  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(INPUTS, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen.append(len(x))
        out: Tensor = self.layer(x)
        return out


def test_no_pass_has_more_samples() -> None:
    torch.manual_seed(0)
    run = loop(
        hf.FedAvg(),
        model=Watched(),
        among=federation((9, 5)),
        batch_size=7,
        micro_batch_size=3,
        local_epochs=1,
    )
    Watched.seen.clear()
    run.round(1)
    assert sorted(Watched.seen) == [1, 2, 2, 3, 3, 3]


def test_of_positions_each_has_the_same_weight() -> None:
    task = as_task("sequence")
    outputs = torch.randn(5, 4, 3, generator=torch.Generator().manual_seed(0)).double()
    y = torch.tensor([[0, 1, 2, -100]] * 3 + [[-100, -100, 2, -100]] * 2)
    mask = torch.tensor([1.0, 1, 1, 1, 0]).double()
    batch = Batch(outputs, y, torch.tensor(0), mask, task=task)
    parts = micro_batches(batch, 2)
    total = sum(p.add(task.batch_loss(p.batch.x, p.batch.y, p.batch.mask), None) for p in parts)
    expected = nn.functional.cross_entropy(outputs[:4].flatten(0, 1), y[:4].flatten())
    torch.testing.assert_close(torch.as_tensor(total), expected)


def dropout_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(INPUTS, 8), nn.Dropout(0.5), nn.Linear(8, CLASSES))


@pytest.mark.parametrize("method", ["fedavg", "fedsam"])
def test_engines_draw_the_same_masks(method: str) -> None:
    one, other = (weights(method, engine, dropout_net(), micro_batch_size=3) for engine in ENGINES)
    assert close(one, other)
    assert not close(one, weights(method, "sequential", dropout_net()))  # each part has masks of its own


@pytest.mark.parametrize("engine", ENGINES)
def test_a_killed_run_goes_on_with_the_same_bits(engine: str, tmp_path: Path) -> None:
    def train(**where: Any) -> hf.Run:
        return hf.train(
            "fedprox", dropout_net(), WORLD, rounds=3, batch_size=4, micro_batch_size=3, optimizer="adamw",
            engine=engine, checkpoint_seconds=0, progress=False, **where,
        )  # fmt: skip

    def die(record: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    calm = train().model.state_dict()
    with pytest.raises(KeyboardInterrupt):
        train(out=tmp_path, on_round=die)
    assert same_bits(calm, train(out=tmp_path, resume=True).model.state_dict())


@pytest.mark.parametrize(
    ("method", "changes", "cause"),
    [
        ("fedavg", {"micro_batch_size": 6}, "at most batch_size, 5"),
        ("fedavg", {"micro_batch_size": 0}, "micro_batch_size is 0"),
        ("fedavg", {"dp_samples": "epsilon=8,delta=1e-5"}, "gradients of single samples"),
        ("fedreg", {}, "fedreg replaces the local step"),
        ("feddecorr", {}, "loss of feddecorr compares"),
        ("fedprox+fedvls", {}, "loss of fedvls compares"),
        ("fedmlp", {}, "loss of fedmlp compares"),
        ("fedavg", {"model": norm_net()}, "BatchNorm"),
    ],
)
def test_what_cannot_be_accumulated_is_refused(method: str, changes: dict[str, Any], cause: str) -> None:
    with pytest.raises(hf.HoldfastError, match=cause):
        weights(method, "sequential", **{"micro_batch_size": 2} | changes)


def test_a_loss_that_compares_samples_is_refused() -> None:
    rng = np.random.default_rng(0)
    x, times = rng.normal(size=(20, 3)).astype(np.float32), rng.uniform(1, 5, 20)
    y = np.stack([times, np.ones(20)], 1)
    world = hf.federate(hf.Dataset.from_arrays(x, y, x, y, task="survival"), [range(20)])
    with pytest.raises(hf.HoldfastError, match="task 'survival' compares the samples"):
        hf.train("fedavg", nn.Linear(3, 1), world, rounds=1, micro_batch_size=8)


class Plain(hf.Method):
    """A loss in plain PyTorch."""

    def task_loss(self, out: Output, batch: Batch, carry: Tree) -> Tensor:
        return F.cross_entropy(out.logits, batch.y)


def test_a_method_of_ones_own_on_the_vectorized_engine() -> None:
    world = hf.federate(hf.load("digits"), hf.Dirichlet(alpha=0.5), clients=4, seed=0)
    one, other = (
        hf.train(
            Plain(), "mlp:8", world, rounds=1, micro_batch_size=size, engine="vectorized", progress=False
        )
        for size in (None, 8)
    )
    for name, value in one.model.state_dict().items():
        torch.testing.assert_close(other.model.state_dict()[name], value, rtol=1e-4, atol=1e-5)
