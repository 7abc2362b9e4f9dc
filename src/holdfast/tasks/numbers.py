"""Tasks that predict numbers: regression and counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar, Literal, Self

import numpy as np
import torch
from torch import Tensor

from holdfast.core.errors import HoldfastError
from holdfast.core.spec import PositiveCount
from holdfast.tasks.base import Task, finite_numbers, numbered, whole_numbers
from holdfast.tasks.classes import binary_cross_entropy

Bins = PositiveCount | tuple[float, ...]
"""The number of quantile bins, or the values at which bins begin, without the first."""


def bin_edges(y: Tensor, bins: Bins) -> tuple[float, ...]:
    """The quantiles of the targets that divide them into bins; fewer where quantiles are equal."""
    if isinstance(bins, tuple):
        return bins
    quantiles = np.quantile(y.double().numpy(), np.arange(1, bins) / bins)
    lowest = float(y.min())
    return tuple(dict.fromkeys(float(q) for q in quantiles if q > lowest))


def bin_names(edges: tuple[float, ...]) -> tuple[str, ...]:
    """``below 1.5``, ``1.5 to 3``, ``from 3``."""
    if not edges:
        return ("all",)
    between = [f"{low:.6g} to {high:.6g}" for low, high in pairwise(edges)]
    names = (f"below {edges[0]:.6g}", *between, f"from {edges[-1]:.6g}")
    return names if len(set(names)) == len(names) else tuple(f"bin {number}" for number in range(len(names)))


def bins_of(values: Tensor, edges: tuple[float, ...]) -> Tensor:
    """The bin of each value: int64."""
    found = np.searchsorted(np.asarray(edges, np.float64), values.double().numpy(), side="right")
    return torch.from_numpy(found.astype(np.int64))


@dataclass(frozen=True)
class Regression(Task):
    """One number, or several; the model has one output for each.

    ℓ = (z - y)² (``squared``), |z - y| (``absolute``) or Huber's loss with δ = 1 (``huber``), as a mean over the
    numbers of a sample.
    Targets: ``[N]`` or ``[N, D]``.  Strata: quantile bins of the (first) number in the training targets.
    """

    name: ClassVar[str] = "regression"
    metrics: ClassVar[tuple[str, ...]] = ("rmse", "mae", "r2")
    default_metrics: ClassVar[tuple[str, ...]] = ("rmse", "mae", "r2")
    score: ClassVar[str] = "mae"
    less_is_better: ClassVar[bool] = True

    loss: Literal["squared", "absolute", "huber"] = "squared"
    bins: Bins = 5  # strata: their number, or where they begin

    def targets(self, y: Tensor, name: str) -> Tensor:
        y = finite_numbers(y, name)
        if y.dim() > 2:
            raise HoldfastError(
                f"{name} must have shape [{len(y)}] or [{len(y)}, numbers], not {list(y.shape)}"
            )
        return y.flatten() if y.numel() == len(y) else y

    def fit(self, y: Tensor) -> Self:
        return replace(self, edges=bin_edges(_first(y), self.bins))

    def strata(self, y: Tensor) -> Tensor:
        return bins_of(_first(y), self.edges)

    def stratum_names(self, labels: tuple[str, ...]) -> tuple[str, ...]:
        return bin_names(self.edges)

    def outputs(self, y: Tensor, labels: int) -> int:
        return 1 if y.dim() == 1 else y.shape[1]

    def output_shapes(self, y: Tensor, labels: int) -> list[tuple[int, ...]]:
        return [(1,), ()] if y.dim() == 1 else [(y.shape[1],)]

    def values(self, outputs: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        error = outputs.reshape(y.shape) - y
        if self.loss == "squared":
            values = error.square()
        elif self.loss == "absolute":
            values = error.abs()
        else:
            slope = error.clamp(-1, 1)
            values = slope * (error - slope / 2)
        return values if y.dim() == 1 else values.mean(-1)

    def align(self, outputs: Tensor, y: Tensor) -> Tensor:
        return outputs.reshape(y.shape)

    def scores(self, kept: Tensor, y: Tensor) -> Tensor:
        """The negative absolute error."""
        error = (kept - y).abs()
        return -(error if y.dim() == 1 else error.mean(-1))

    def predicted(self, outputs: Tensor) -> Tensor:
        """The numbers: ``[N]``, or ``[N, numbers]`` where there are several."""
        return outputs.flatten() if outputs.numel() == len(outputs) else outputs


@dataclass(frozen=True)
class Counts(Task):
    """A count: 0, 1, 2, …

    ``poisson``: the model's one output is the logarithm of the expected count: ℓ = e^z - y z.
    ``ordinal``: counts from 0 to K, and K outputs: output k is the logit of "more than k";
    ℓ = the sum over k of -[y > k] log σ(z_k) - [y ≤ k] log(1 - σ(z_k)).
    Targets: whole numbers from 0, ``[N]``.  Strata: the counts, or quantile bins where there are more than ten.
    """

    name: ClassVar[str] = "counts"
    metrics: ClassVar[tuple[str, ...]] = ("mae", "rmse", "r2")
    default_metrics: ClassVar[tuple[str, ...]] = ("mae", "rmse")
    score: ClassVar[str] = "mae"
    less_is_better: ClassVar[bool] = True

    loss: Literal["poisson", "ordinal"] = "poisson"
    bins: Bins = 10  # strata: the most there are, or where they begin

    def targets(self, y: Tensor, name: str) -> Tensor:
        if y.numel() != len(y):
            raise HoldfastError(
                f"{name} must hold one count per sample, shape [{len(y)}], not {list(y.shape)}"
            )
        y = whole_numbers(finite_numbers(y.flatten(), name), name, "one count each")
        if y.min() < 0:
            raise HoldfastError(
                f"{name} holds {int(y.min())}; the targets of task 'counts' must be 0 or more"
            )
        return y.float()

    def fit(self, y: Tensor) -> Self:
        found = np.unique(y.numpy()).tolist()
        few = isinstance(self.bins, int) and len(found) <= self.bins
        return replace(self, edges=tuple(found[1:]) if few else bin_edges(y, self.bins))

    def label_names(self, targets: Sequence[Tensor]) -> tuple[str, ...]:
        return () if self.loss == "poisson" else numbered(1 + int(max(y.max() for y in targets)))

    def check_labels(self, y: Tensor, name: str, labels: int) -> None:
        if self.loss == "ordinal" and (labels < 2 or int(y.max()) >= labels):
            raise HoldfastError(
                f"{name} has counts up to {int(y.max())}; with loss 'ordinal' they must be from 0 to {labels - 1}"
            )

    def strata(self, y: Tensor) -> Tensor:
        return bins_of(y, self.edges)

    def stratum_names(self, labels: tuple[str, ...]) -> tuple[str, ...]:
        return bin_names(self.edges)

    def outputs(self, y: Tensor, labels: int) -> int:
        return 1 if self.loss == "poisson" else labels - 1

    def output_shapes(self, y: Tensor, labels: int) -> list[tuple[int, ...]]:
        count = self.outputs(y, labels)
        return [(1,), ()] if count == 1 else [(count,)]

    def values(self, outputs: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        if self.loss == "poisson":
            log_rate = outputs.reshape(y.shape)
            return log_rate.exp() - y * log_rate
        outputs = outputs.reshape(len(y), -1)
        thresholds = torch.arange(outputs.shape[-1], device=y.device)
        return binary_cross_entropy(outputs, (y.unsqueeze(-1) > thresholds).to(outputs.dtype)).sum(-1)

    def align(self, outputs: Tensor, y: Tensor) -> Tensor:
        return outputs.reshape(y.shape if self.loss == "poisson" else (len(y), -1))

    def predicted(self, outputs: Tensor) -> Tensor:
        """The expected count of each sample, e^z or Σ_k σ(z_k): ``[N]``."""
        each = outputs.reshape(len(outputs), -1)
        return each[:, 0].exp() if self.loss == "poisson" else each.sigmoid().sum(-1)

    def scores(self, kept: Tensor, y: Tensor) -> Tensor:
        """The negative absolute error of the expected count."""
        return -(self.predicted(kept) - y).abs()


def _first(y: Tensor) -> Tensor:
    """The first number of each target."""
    return y if y.dim() == 1 else y[:, 0]
