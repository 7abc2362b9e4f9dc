"""The interface of a task."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from holdfast.core.errors import HoldfastError
from holdfast.core.spec import validate_fields

Loss = Callable[[Tensor, Tensor], Tensor]
"""A loss of the user's own: from outputs and targets ``[B, ...]`` to one value a sample, or to a scalar.

Where a target is a number, outputs have the shape of the targets.
"""


FOUND = ("own_loss", "edges")
"""Fields of a task that are not options."""


@dataclass(frozen=True)
class Task:
    """A learning task. Its fields are its options.

    Every sample has a *stratum*, an index into the names that the data set calls ``classes``: its class where there
    are classes, otherwise a bin of its target or its site. Partitions, label counts, balanced test subsets and
    forgetting use strata.

    ``batch_loss`` and ``values`` run under ``torch.func.vmap``: static shapes, no branch on a tensor's value.
    """

    name: ClassVar[str] = ""
    metrics: ClassVar[tuple[str, ...]] = ()
    """All metrics of the task."""
    default_metrics: ClassVar[tuple[str, ...]] = ()
    """The metrics that are measured by default; the first is the primary one."""
    score: ClassVar[str] = "accuracy"
    """The metric that is a mean over samples, and is measured by stratum and for local models."""
    less_is_better: ClassVar[bool] = False
    """Whether that metric is an error."""
    compares_samples: ClassVar[bool] = False
    """Whether the loss and the score compare samples with each other, so that they are not means over samples."""
    strata_groups: ClassVar[tuple[str, ...]] = ()
    """Groups of a data set, of which the first that exists decides the strata."""

    own_loss: Loss | None = field(default=None, kw_only=True, repr=False)  # replaces the task's loss
    edges: tuple[float, ...] = field(
        default=(), kw_only=True, repr=False, compare=False
    )  # of bins, from `fit`

    def __post_init__(self) -> None:
        validate_fields(self, self.name)

    def describe(self) -> dict[str, Any]:
        """The name and the options as plain values."""
        names = [f.name for f in fields(self) if f.name not in FOUND]
        options = {name: getattr(self, name) for name in names}
        if self.own_loss is not None:
            options["loss"] = {
                "name": getattr(self.own_loss, "__name__", type(self.own_loss).__name__),
                "own": True,
            }
        return {"name": self.name} | options

    @property
    def is_cross_entropy(self) -> bool:
        """Whether the loss is the plain cross-entropy of logits ``[B, C]``, for which there is a kernel."""
        return False

    @property
    def changes_loss(self) -> bool:
        """Whether options, such as class weights, change the loss, so that a method must not replace it."""
        return False

    def with_counts(self, counts: Tensor) -> Self:
        """The task for a federation with these samples of each stratum; raises if the options do not fit them."""
        return self

    # Targets --------------------------------------------------------------------------------------------

    def targets(self, y: Tensor, name: str) -> Tensor:
        """Targets as given, in the type that the loss takes; raises if they are of another kind."""
        raise NotImplementedError

    def fit(self, y: Tensor) -> Self:
        """The task with the edges of bins, which depend on the training targets."""
        return self

    def label_names(self, targets: Sequence[Tensor]) -> tuple[str, ...]:
        """The default names of what is predicted; empty where that has no names."""
        return ()

    def check_labels(self, y: Tensor, name: str, labels: int) -> None:
        """Raise unless the targets agree with the number of label names."""

    def strata(self, y: Tensor) -> Tensor:
        """The stratum of each sample: int64 ``[N]``."""
        return torch.zeros(len(y), dtype=torch.int64)

    def stratum_names(self, labels: tuple[str, ...]) -> tuple[str, ...]:
        """The names of the strata."""
        return ("all",)

    # Outputs and loss -----------------------------------------------------------------------------------

    def outputs(self, y: Tensor, labels: int) -> int:
        """The number of values in the last layer of a model."""
        return labels

    def output_shapes(self, y: Tensor, labels: int) -> list[tuple[int, ...]]:
        """The shapes that a model's outputs for one sample may have."""
        return [(self.outputs(y, labels),)]

    def align(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Outputs in the shape of the targets, where there is one output for each number of a target."""
        return outputs

    def values(self, outputs: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        """The loss of each sample: ``[B]``."""
        raise NotImplementedError

    def batch_loss(self, outputs: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        """The mean loss over the samples whose ``mask`` is 1, as a scalar."""
        if self.own_loss is None:
            return masked_mean(self.values(outputs, y, mask), mask)
        return masked_mean(self.own_loss(self.align(outputs, y), y), mask)

    def loss_weight(self, y: Tensor, mask: Tensor) -> Tensor:
        """The weight of ``batch_loss`` where those of several batches are averaged: the number of samples."""
        return mask.sum()

    # Prediction -----------------------------------------------------------------------------------------

    def predicted(self, outputs: Tensor) -> Tensor:
        """What the task predicts for each sample, in the form of its targets, from a model's outputs."""
        raise NotImplementedError

    def probabilities(self, outputs: Tensor) -> Tensor:
        """The probability of each class or label; an error for a task that has none."""
        raise HoldfastError(
            f"task '{self.name}' predicts values, which have no probabilities; use predict instead of predict_proba"
        )

    # Evaluation -----------------------------------------------------------------------------------------

    def reduce(self, outputs: Tensor, y: Tensor) -> Tensor:
        """What evaluation keeps of the outputs for each sample: ``[B, ...]``."""
        return self.align(outputs, y)

    def test_loss(self, kept: Tensor, y: Tensor) -> Tensor:
        """The loss over the test set, from what `reduce` kept."""
        return self.batch_loss(kept, y)

    def test_losses(self, kept: Tensor, y: Tensor) -> Tensor | None:
        """Each sample's loss, of which `test_loss` is the mean with `weights`; None where it is no such mean."""
        if self.compares_samples:
            return None
        values = self.values(kept, y) if self.own_loss is None else self.own_loss(kept, y)
        return None if values.dim() == 0 else values.reshape(len(y), -1).mean(1)

    def scores(self, kept: Tensor, y: Tensor) -> Tensor:
        """Each sample's part in the metric ``score``, negative where less is better: bool or float ``[N]``."""
        raise NotImplementedError

    def weights(self, kept: Tensor, y: Tensor) -> Tensor | None:
        """Each sample's weight: the metric is the sum of the scores over the sum of these, ``[N]``; None for 1 each."""
        return None


def masked_mean(values: Tensor, mask: Tensor | None) -> Tensor:
    """The mean of one value a sample over the samples whose mask is 1; a scalar is returned unchanged."""
    if values.dim() == 0:
        return values
    if values.dim() > 1:
        values = values.flatten(1).mean(1)
    if mask is None:
        return values.mean()
    return (values * mask).sum() / mask.sum().clamp(min=1)


def whole_numbers(y: Tensor, name: str, what: str) -> Tensor:
    """Targets as int64; raises unless they are whole numbers."""
    labels = y.long()
    if y.is_floating_point() and not torch.equal(labels.to(y.dtype), y):
        raise HoldfastError(f"{name} must hold whole numbers, {what}")
    return labels


def finite_numbers(y: Tensor, name: str) -> Tensor:
    """Targets as float32; raises if one is NaN or infinite."""
    bad = ~y.isfinite().reshape(len(y), -1).all(1)
    if bad.any():
        raise HoldfastError(
            f"{name} holds NaN or infinite values in {int(bad.sum())} of {len(y)} targets, the first in sample "
            f"{int(bad.nonzero()[0])}; leave these samples out or fill in their targets"
        )
    return y.float()


def numbered(count: int) -> tuple[str, ...]:
    """The numbers from 0 as names."""
    return tuple(map(str, range(count)))
