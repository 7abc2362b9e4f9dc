"""Tasks with classes: one of several, one of two, any number of labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from holdfast.core.errors import HoldfastError
from holdfast.core.spec import NonNegative, Range
from holdfast.tasks.base import Task, finite_numbers, numbered, whole_numbers

Smoothing = Annotated[float, Range(ge=0, lt=1)]
ClassWeights = Literal["balanced"] | tuple[NonNegative, ...] | None
"""One weight for each class, or n / (C n_c) from the federation's n_c samples of each of its C classes."""


@lru_cache
def as_tensor(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The numbers on a device, one tensor for all steps, since CUDA graphs read it at its address."""
    return torch.tensor(numbers, dtype=dtype, device=device)


def resolved(weights: ClassWeights, counts: Tensor) -> ClassWeights:
    """The weights as numbers; raises unless there is one for each class. A class without samples weighs 0."""
    if isinstance(weights, tuple) and len(weights) != len(counts):
        raise HoldfastError(f"class_weights has {len(weights)} numbers, but there are {len(counts)} classes")
    if weights != "balanced":
        return weights
    n = counts.double().cpu()
    present = n > 0
    return tuple(torch.where(present, n.sum() / (present.sum() * n.clamp(min=1)), 0.0).tolist())


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
class _OneOfClasses(Task):
    """A task with one class for each sample."""

    class_weights: ClassWeights = None  # balanced, or one for each class
    label_smoothing: Smoothing = 0.0

    def describe(self) -> dict[str, Any]:
        """Without the two options where they have no effect."""
        return {
            key: v
            for key, v in super().describe().items()
            if v or key not in ("class_weights", "label_smoothing")
        }

    @property
    def changes_loss(self) -> bool:
        return self.class_weights is not None or self.label_smoothing > 0

    def with_counts(self, counts: Tensor) -> Self:
        return replace(self, class_weights=resolved(self.class_weights, counts))


@dataclass(frozen=True)
class Multiclass(_OneOfClasses):
    """One of C classes; the model has C outputs.

    ℓ = -log softmax(z)_y.  Targets: whole numbers from 0, ``[N]``.  Strata: the classes.
    In training, with ``label_smoothing`` ε and ``class_weights`` w: ℓ = -(1 - ε) w_y log p_y - (ε/C) Σ_c w_c log p_c.
    A batch's loss is the mean of ℓ, not divided by the mean weight, so that weights matter to a client of one class.
    """

    name: ClassVar[str] = "multiclass"
    metrics: ClassVar[tuple[str, ...]] = (
        "accuracy", "balanced_accuracy", "f1", "f1_weighted", "auroc", "auroc_weighted", "auprc", "auprc_weighted",
        "ece", "perplexity",
    )  # fmt: skip
    default_metrics: ClassVar[tuple[str, ...]] = ("accuracy",)

    @property
    def is_cross_entropy(self) -> bool:
        return self.own_loss is None and not self.changes_loss

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
        if not self.changes_loss:
            return cross_entropy(outputs, y)
        log_p, weights = F.log_softmax(outputs, dim=-1), self.class_weights
        if isinstance(weights, tuple):
            log_p = log_p * as_tensor(weights, outputs.dtype, outputs.device)
        own = log_p.gather(-1, y.unsqueeze(-1)).squeeze(-1)
        return -(1 - self.label_smoothing) * own - self.label_smoothing * log_p.mean(-1)

    def test_loss(self, kept: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(kept, y) if self.own_loss is None else super().test_loss(kept, y)

    def test_losses(self, kept: Tensor, y: Tensor) -> Tensor | None:
        return cross_entropy(kept, y) if self.own_loss is None else super().test_losses(kept, y)

    def scores(self, kept: Tensor, y: Tensor) -> Tensor:
        return kept.argmax(-1) == y

    def predicted(self, outputs: Tensor) -> Tensor:
        """The classes' indices: ``[N]``."""
        return outputs.argmax(-1)

    def probabilities(self, outputs: Tensor) -> Tensor:
        """softmax(z): ``[N, C]``."""
        return outputs.softmax(-1)


@dataclass(frozen=True)
class Binary(_OneOfClasses):
    """One of two classes; the model has one output, the logit of the second class.

    ℓ = -y log σ(z) - (1 - y) log(1 - σ(z)).  Targets: 0 or 1, ``[N]``.  Strata: the two classes.
    With ``label_smoothing`` ε, y becomes (1 - ε) y + ε/2; with ``class_weights`` w, ℓ becomes w_y ℓ; in training only.
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
        labels, logits = y.to(outputs.dtype), outputs.reshape(y.shape)
        if not self.changes_loss:
            return binary_cross_entropy(logits, labels)
        smooth = (1 - self.label_smoothing) * labels + self.label_smoothing / 2
        losses = binary_cross_entropy(logits, smooth)
        if isinstance(self.class_weights, tuple):
            rest, own = as_tensor(self.class_weights, outputs.dtype, outputs.device)
            losses = losses * (rest + (own - rest) * labels)
        return losses

    def test_loss(self, kept: Tensor, y: Tensor) -> Tensor:
        if self.own_loss is not None:
            return super().test_loss(kept, y)
        return binary_cross_entropy(kept, y.to(kept.dtype)).mean()

    def test_losses(self, kept: Tensor, y: Tensor) -> Tensor | None:
        if self.own_loss is not None:
            return super().test_losses(kept, y)
        return binary_cross_entropy(kept, y.to(kept.dtype))

    def align(self, outputs: Tensor, y: Tensor) -> Tensor:
        return outputs.reshape(y.shape)

    def scores(self, kept: Tensor, y: Tensor) -> Tensor:
        return (kept > 0) == (y > 0)

    def predicted(self, outputs: Tensor) -> Tensor:
        """0 or 1: ``[N]``."""
        return (outputs.flatten() > 0).long()

    def probabilities(self, outputs: Tensor) -> Tensor:
        """Those of both classes: ``[N, 2]``."""
        second = outputs.flatten().sigmoid()
        return torch.stack([1 - second, second], -1)


@dataclass(frozen=True)
class Multilabel(Task):
    """Any number of L labels; the model has one output, a logit, for each label.

    ℓ = the mean over labels of -y log σ(z) - (1 - y) log(1 - σ(z)).  Targets: 0 or 1, ``[N, L]``.
    Strata: a sample's first label, or ``none``.
    """

    name: ClassVar[str] = "multilabel"
    metrics: ClassVar[tuple[str, ...]] = (
        "auroc", "auroc_weighted", "accuracy", "f1", "f1_weighted", "auprc", "auprc_weighted", "ece",
    )  # fmt: skip
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

    def predicted(self, outputs: Tensor) -> Tensor:
        """0 or 1 for each label: ``[N, L]``."""
        return (outputs > 0).long()

    def probabilities(self, outputs: Tensor) -> Tensor:
        """That of each label: ``[N, L]``."""
        return outputs.sigmoid()
