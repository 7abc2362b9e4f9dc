"""Class weights and label smoothing: against PyTorch and scikit-learn, on every engine, refused without effect."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.utils.class_weight import compute_class_weight
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional as F

import holdfast as hf
from holdfast.tasks.registry import parse_task

RNG = np.random.default_rng(0)
LABELS = torch.from_numpy(RNG.choice(4, 60, p=[0.5, 0.3, 0.15, 0.05]))
LOGITS = torch.from_numpy(RNG.normal(size=(60, 4)))
WEIGHTS = (0.5, 1.0, 2.0, 5.0)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_the_multiclass_loss_is_that_of_torch(weights: Any, smoothing: float) -> None:
    options = f"label_smoothing={smoothing}" + ("" if weights is None else f",class_weights={list(weights)}")
    task = parse_task(f"multiclass:{options}")
    found = task.values(LOGITS, LABELS)
    given = None if weights is None else torch.tensor(weights, dtype=torch.float64)
    truth = F.cross_entropy(LOGITS, LABELS, given, reduction="none", label_smoothing=smoothing)
    assert torch.allclose(found, truth, rtol=1e-12)
    assert torch.allclose(task.batch_loss(LOGITS, LABELS), truth.mean(), rtol=1e-12)
    lanes = vmap(task.values)(LOGITS.view(6, 10, 4), LABELS.view(6, 10))
    assert torch.allclose(lanes.flatten(), truth, rtol=1e-12)
    assert torch.allclose(task.test_loss(LOGITS, LABELS), F.cross_entropy(LOGITS, LABELS), rtol=1e-12)


def test_the_binary_loss_is_that_of_torch() -> None:
    task = parse_task("binary:class_weights=[0.5,3],label_smoothing=0.1")
    logits, y = LOGITS[:, :1], LABELS % 2
    smooth = y.double() * 0.9 + 0.05
    each = F.binary_cross_entropy_with_logits(logits[:, 0], smooth, reduction="none")
    weights = torch.where(y > 0, 3.0, 0.5)
    assert torch.allclose(task.values(logits, y), each * weights, rtol=1e-12)
    plain = F.binary_cross_entropy_with_logits(logits[:, 0], y.double())
    assert torch.allclose(task.test_loss(task.reduce(logits, y), y), plain, rtol=1e-12)


def test_balanced_weights_are_those_of_scikit_learn() -> None:
    counts = torch.bincount(LABELS, minlength=5)  # and one class without samples
    found = parse_task("multiclass:class_weights=balanced").with_counts(counts)
    truth = compute_class_weight("balanced", classes=np.arange(4), y=LABELS.numpy())
    assert found.class_weights == pytest.approx([*truth, 0.0])  # type: ignore[attr-defined]


def federation(labels: Tensor = LABELS) -> hf.Federation:
    x = RNG.normal(size=(60, 5)).astype(np.float32)
    dataset = hf.Dataset.from_arrays(x, labels.numpy(), x, labels.numpy())
    return hf.federate(dataset, np.split(np.arange(60), [25, 35]))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4))


SETTINGS: dict[str, Any] = {
    "rounds": 2, "local_epochs": 2, "batch_size": 8, "lr": 0.1, "precision": "float64", "device": "cpu",
    "evaluate_locals": False,
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:fedavg. the accuracy")
@pytest.mark.parametrize("method", ["fedavg", "fedntd"])
def test_engines_agree(method: str) -> None:
    world, task = federation(), "multiclass:class_weights=balanced,label_smoothing=0.1"
    one, other, plain = (
        hf.train(method, model(), world, **SETTINGS, engine=engine, task=chosen)
        for engine, chosen in (("sequential", task), ("vectorized", task), ("vectorized", "multiclass"))
    )
    for p, q, r in zip(
        one.model.parameters(), other.model.parameters(), plain.model.parameters(), strict=True
    ):
        assert torch.allclose(p, q, rtol=1e-10, atol=1e-12)
        assert not torch.allclose(p, r, atol=1e-4)
    assert one.experiment["task"]["class_weights"] == "balanced"


@pytest.mark.filterwarnings("ignore:fedavg. the accuracy")
def test_one_round_of_one_step_is_the_weighted_gradient() -> None:
    world = federation()
    changes = SETTINGS | {"rounds": 1, "local_epochs": 1, "batch_size": 60, "clients_per_round": None}
    found = hf.train("fedavg", model(), world, **changes, task=f"multiclass:class_weights={list(WEIGHTS)}")
    reference = model().double()
    x, y = world.dataset.x_train.double(), world.dataset.y_train
    loss = F.cross_entropy(reference(x), y, torch.tensor(WEIGHTS).double(), reduction="none").mean()
    loss.backward()
    for p, q in zip(found.model.parameters(), reference.parameters(), strict=True):
        assert q.grad is not None
        assert torch.allclose(p.double(), q - 0.1 * q.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("method", "task", "sentence"),
    [
        ("fedavg", "multiclass:class_weights=[1,2]", "class_weights has 2 numbers, but there are 4 classes"),
        ("fedavg", "multiclass:class_weights=balance", "it must be balanced or a list of numbers"),
        ("fedavg", "multiclass:class_weights=[1,2,-1,3]", "it must be balanced or a list of numbers"),
        ("fedavg", "multiclass:label_smoothing=1.0", "label_smoothing is 1.0"),
        ("fedlc", "multiclass:class_weights=balanced", "fedlc replaces the task's loss"),
        ("fedreg", "multiclass:label_smoothing=0.1", "fedreg replaces the task's loss"),
    ],
)
def test_weights_that_do_not_fit_are_refused_before_training(method: str, task: str, sentence: str) -> None:
    with pytest.raises(hf.HoldfastError, match=sentence):
        hf.train(method, model(), federation(), **SETTINGS, task=task)
