"""Tasks with a class at every position: sequences and segmentation."""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from holdfast.core.errors import HoldfastError
from holdfast.tasks.base import Task, numbered, whole_numbers

IGNORED = -100
"""The label of positions that count for nothing, as in ``torch.nn.functional.cross_entropy``."""


@dataclass(frozen=True)
class _Positions(Task):
    """One of C classes at every position: ℓ = -log softmax(z)_y, as a mean over all positions of a batch."""

    score: ClassVar[str] = "accuracy"
    strata_groups: ClassVar[tuple[str, ...]] = ("site", "domain", "writer")
    class_dim: ClassVar[int] = -1  # of the outputs

    def targets(self, y: Tensor, name: str) -> Tensor:
        return whole_numbers(y, name, "one class for each position")

    def label_names(self, targets: Several[Tensor]) -> tuple[str, ...]:
        return numbered(1 + int(max(y.max() for y in targets)))

    def check_labels(self, y: Tensor, name: str, labels: int) -> None:
        real = y[y != IGNORED]
        if not len(real):
            raise HoldfastError(
                f"all positions of {name} are {IGNORED}, which is ignored; at least one must have a label"
            )
        low, high = int(real.min()), int(real.max())
        if low < 0 or high >= labels:
            raise HoldfastError(
                f"{name} has labels from {low} to {high}, but they must be from 0 to {labels - 1} (or {IGNORED}, to "
                "leave a position out)"
            )

    def _terms(self, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The loss and the number of a sample's positions: ``[B, P]`` each, 0 for those that are left out."""
        logits = outputs.movedim(self.class_dim, -1).flatten(1, -2)
        labels = y.flatten(1)
        counts = (labels != IGNORED).to(outputs.dtype)
        labels = labels.clamp(min=0)
        return -F.log_softmax(logits, dim=-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1) * counts, counts

    def values(self, outputs: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        """The mean over a sample's positions."""
        losses, counts = self._terms(outputs, y)
        return losses.sum(-1) / counts.sum(-1).clamp(min=1)

    def batch_loss(self, outputs: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        if self.own_loss is not None:
            return super().batch_loss(outputs, y, mask)
        losses, counts = self._terms(outputs, y)
        if mask is not None:
            losses, counts = losses * mask.unsqueeze(-1), counts * mask.unsqueeze(-1)
        return losses.sum() / counts.sum().clamp(min=1)

    def loss_weight(self, y: Tensor, mask: Tensor) -> Tensor:
        """The number of positions, unless the loss is the user's own."""
        if self.own_loss is not None:
            return mask.sum()
        return ((y.flatten(1) != IGNORED) * mask.unsqueeze(-1)).sum()

    def reduce(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Of each sample: the sum of its losses, its positions, the correct ones, and for each class the positions
        that are predicted so and are so, that are predicted so, and that are so: ``[B, 3 + 3C]``."""
        losses, counts = self._terms(outputs, y)
        total = losses.sum(-1)
        if self.own_loss is not None:
            total = self._own_values(outputs, y) * counts.sum(-1)
        predicted = outputs.argmax(self.class_dim).flatten(1)
        right = (predicted == y.flatten(1)).to(counts.dtype) * counts
        sums = torch.stack([total, counts.sum(-1), right.sum(-1)], -1).double()
        return torch.cat([sums, self._by_class(predicted, y.flatten(1), outputs.shape[self.class_dim])], -1)

    def predicted(self, outputs: Tensor) -> Tensor:
        """The class at each position, in the shape of the targets."""
        return outputs.argmax(self.class_dim)

    def probabilities(self, outputs: Tensor) -> Tensor:
        """softmax(z), in the shape of the outputs."""
        return outputs.softmax(self.class_dim)

    def _own_values(self, outputs: Tensor, y: Tensor) -> Tensor:
        assert self.own_loss is not None
        values = self.own_loss(outputs, y)
        return values.expand(len(y)) if values.dim() == 0 else values.reshape(len(y), -1).mean(-1)

    def _by_class(self, predicted: Tensor, labels: Tensor, classes: int) -> Tensor:
        """Nothing, for tasks whose metrics do not need it."""
        return predicted.new_zeros((len(predicted), 0), dtype=torch.float64)

    def test_loss(self, kept: Tensor, y: Tensor) -> Tensor:
        return kept[:, 0].sum() / kept[:, 1].sum()

    def test_losses(self, kept: Tensor, y: Tensor) -> Tensor:
        """The mean over a sample's positions."""
        return kept[:, 0] / kept[:, 1].clamp(min=1)

    def scores(self, kept: Tensor, y: Tensor) -> Tensor:
        """The number of a sample's positions that are predicted correctly."""
        return kept[:, 2]

    def weights(self, kept: Tensor, y: Tensor) -> Tensor:
        return kept[:, 1]


@dataclass(frozen=True)
class Sequence(_Positions):
    """The next token, or another label, at each position of a sequence.

    Outputs: ``[B, T, V]``.  ℓ = -log softmax(z)_y, as a mean over all positions.  Targets: whole numbers from 0,
    ``[N, T]``; -100 leaves a position out.  Strata: sites, domains or writers, if the data has them.
    A text or sequence with one label is a `Multiclass` task.
    """

    name: ClassVar[str] = "sequence"
    metrics: ClassVar[tuple[str, ...]] = ("accuracy", "perplexity")
    default_metrics: ClassVar[tuple[str, ...]] = ("accuracy", "perplexity")

    def targets(self, y: Tensor, name: str) -> Tensor:
        if y.dim() != 2:
            raise HoldfastError(
                f"{name} must hold a label for each position, shape [{len(y)}, length], not {list(y.shape)}; a "
                "sequence with one label is task='multiclass'"
            )
        return super().targets(y, name)

    def output_shapes(self, y: Tensor, labels: int) -> list[tuple[int, ...]]:
        return [(y.shape[1], labels)]


@dataclass(frozen=True)
class Segmentation(_Positions):
    """A class for each pixel.

    Outputs: ``[B, C, H, W]``.  ℓ = -log softmax(z)_y, as a mean over all pixels.  Targets: whole numbers from 0,
    ``[N, H, W]``; -100 leaves a pixel out.  Strata: sites, domains or writers, if the data has them.
    """

    name: ClassVar[str] = "segmentation"
    metrics: ClassVar[tuple[str, ...]] = ("dice", "iou", "accuracy")
    default_metrics: ClassVar[tuple[str, ...]] = ("dice", "iou", "accuracy")
    class_dim: ClassVar[int] = 1

    def targets(self, y: Tensor, name: str) -> Tensor:
        if y.dim() == 4 and y.shape[1] == 1:
            y = y[:, 0]
        if y.dim() != 3:
            raise HoldfastError(
                f"{name} must hold a class for each pixel, shape [{len(y)}, height, width], not {list(y.shape)}"
            )
        return super().targets(y, name)

    def output_shapes(self, y: Tensor, labels: int) -> list[tuple[int, ...]]:
        return [(labels, *y.shape[1:])]

    def _by_class(self, predicted: Tensor, labels: Tensor, classes: int) -> Tensor:
        real = labels != IGNORED
        sums = []
        for c in range(classes):
            labelled, true = (predicted == c) & real, labels == c
            sums += [(labelled & true).sum(-1), labelled.sum(-1), true.sum(-1)]
        return torch.stack(sums, -1).double()
