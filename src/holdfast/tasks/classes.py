"""Tasks with classes: one of several, one of two, any number of labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from holdfast.core.errors import HoldfastError
from holdfast.tasks.base import Task, finite_numbers, numbered, whole_numbers


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """-log softmax(z)_y for each sample: ``[B]`` from logits ``[B, C]``."""
    # Under vmap, F.cross_entropy takes about 24 operations.
    if torch._C._functorch.is_functorch_wrapped_tensor(logits):
        return -F.log_softmax(logits, dim=-1).gather(-1, y.unsqueeze(-1)).squeeze(-1)
    return F.cross_entropy(logits, y, reduction="none")


def binary_cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """-y log σ(z) - (1 - y) log(1 - σ(z)) of each value."""
    return F.softplus(logits) - logits * y


@dataclass(frozen=True)
class Multiclass(Task):
    """One of C classes; the model has C outputs.

    ℓ = -log softmax(z)_y.  Targets: whole numbers from 0, ``[N]``.  Strata: the classes.
    """

    name: ClassVar[str] = "multiclass"
    metrics: ClassVar[tuple[str, ...]] = (
        "accuracy", "balanced_accuracy", "f1", "auroc", "auprc", "ece", "perplexity",
    )  # fmt: skip
    default_metrics: ClassVar[tuple[str, ...]] = ("accuracy",)

    @property
    def is_cross_entropy(self) -> bool:
        return self.own_loss is None

    def targets(self, y: Tensor, name: str) -> Tensor:
        if y.numel() != len(y):
            raise HoldfastError(
                f"{name} must hold one label per sample, shape [{len(y)}], not {list(y.shape)}; other targets need a "
                "task, such as task='multilabel'"
            )
        return whole_numbers(y.flatten(), name, "one class each; other numbers need task='regression'")

    def label_names(self, targets: Sequence[Tensor]) -> tuple[str, ...]:
        return numbered(1 + int(max(y.max() for y in targets)))

    def check_labels(self, y: Tensor, name: str, labels: int) -> None:
        low, high = int(y.min()), int(y.max())
        if low < 0 or high >= labels:
            raise HoldfastError(
                f"{name} has labels from {low} to {high}, but they must be from 0 to {labels - 1}"
            )

    def strata(self, y: Tensor) -> Tensor:
        return y

    def stratum_names(self, labels: tuple[str, ...]) -> tuple[str, ...]:
        return labels

    def values(self, outputs: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        return cross_entropy(outputs, y)

    def test_loss(self, kept: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(kept, y) if self.own_loss is None else super().test_loss(kept, y)

    def scores(self, kept: Tensor, y: Tensor) -> Tensor:
        return kept.argmax(-1) == y


@dataclass(frozen=True)
class Binary(Task):
    """One of two classes; the model has one output, the logit of the second class.

    ℓ = -y log σ(z) - (1 - y) log(1 - σ(z)).  Targets: 0 or 1, ``[N]``.  Strata: the two classes.
    """

    name: ClassVar[str] = "binary"
    metrics: ClassVar[tuple[str, ...]] = ("auroc", "accuracy", "balanced_accuracy", "f1", "auprc", "ece")
    default_metrics: ClassVar[tuple[str, ...]] = ("auroc", "accuracy")

    def targets(self, y: Tensor, name: str) -> Tensor:
        if y.numel() != len(y):
            raise HoldfastError(
                f"{name} must hold one label per sample, shape [{len(y)}], not {list(y.shape)}"
            )
        y = y.flatten()
        if not ((y == 0) | (y == 1)).all():
            wrong = y[(y != 0) & (y != 1)][0].item()
            raise HoldfastError(f"{name} holds {wrong:g}; the targets of task 'binary' must be 0 or 1")
        return y.long()

    def label_names(self, targets: Sequence[Tensor]) -> tuple[str, ...]:
        return ("0", "1")

    def check_labels(self, y: Tensor, name: str, labels: int) -> None:
        if labels != 2:
            raise HoldfastError(f"task 'binary' has 2 classes, but {labels} class names are given")

    def strata(self, y: Tensor) -> Tensor:
        return y

    def stratum_names(self, labels: tuple[str, ...]) -> tuple[str, ...]:
        return labels

    def outputs(self, y: Tensor, labels: int) -> int:
        return 1

    def output_shapes(self, y: Tensor, labels: int) -> list[tuple[int, ...]]:
        return [(1,), ()]

    def values(self, outputs: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        return binary_cross_entropy(outputs.reshape(y.shape), y.to(outputs.dtype))

    def reduce(self, outputs: Tensor, y: Tensor) -> Tensor:
        return outputs.reshape(y.shape)

    def scores(self, kept: Tensor, y: Tensor) -> Tensor:
        return (kept > 0) == (y > 0)


@dataclass(frozen=True)
class Multilabel(Task):
    """Any number of L labels; the model has one output, a logit, for each label.

    ℓ = the mean over labels of -y log σ(z) - (1 - y) log(1 - σ(z)).  Targets: 0 or 1, ``[N, L]``.
    Strata: a sample's first label, or ``none``.
    """

    name: ClassVar[str] = "multilabel"
    metrics: ClassVar[tuple[str, ...]] = ("auroc", "accuracy", "f1", "auprc", "ece")
    default_metrics: ClassVar[tuple[str, ...]] = ("auroc", "accuracy", "f1")

    def targets(self, y: Tensor, name: str) -> Tensor:
        if y.dim() != 2:
            raise HoldfastError(
                f"{name} must have a column of 0 and 1 for each label, shape [{len(y)}, labels], not {list(y.shape)}"
            )
        y = finite_numbers(y, name)
        if not ((y == 0) | (y == 1)).all():
            wrong = y[(y != 0) & (y != 1)][0].item()
            raise HoldfastError(f"{name} holds {wrong:g}; the targets of task 'multilabel' must be 0 or 1")
        return y

    def label_names(self, targets: Sequence[Tensor]) -> tuple[str, ...]:
        return numbered(targets[0].shape[1])

    def check_labels(self, y: Tensor, name: str, labels: int) -> None:
        if y.shape[1] != labels:
            raise HoldfastError(f"{name} has {y.shape[1]} columns, but there are {labels} labels")

    def strata(self, y: Tensor) -> Tensor:
        return torch.where(y.any(1), y.argmax(1), y.shape[1])

    def stratum_names(self, labels: tuple[str, ...]) -> tuple[str, ...]:
        return (*labels, "none")

    def values(self, outputs: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        return binary_cross_entropy(outputs, y).mean(-1)

    def scores(self, kept: Tensor, y: Tensor) -> Tensor:
        """The share of a sample's labels that are predicted correctly."""
        return ((kept > 0) == (y > 0)).double().mean(-1)
