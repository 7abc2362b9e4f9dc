"""Survival: the time to an event, which may be censored."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from holdfast.core.errors import HoldfastError
from holdfast.tasks.base import Task, finite_numbers
from holdfast.tasks.numbers import Bins, bin_edges, bin_names, bins_of

ROWS_AT_ONCE = 1024  # samples that are compared with all others at a time


@dataclass(frozen=True)
class Survival(Task):
    """Cox's partial likelihood of a batch; the model's one output is the logarithm of the relative risk, η.

    A sample i with an event has ℓ_i = log Σ_{j: t_j ≥ t_i} e^{η_j} - η_i, a censored one ℓ_i = 0; the loss is the mean
    over all samples. Events at the same time: ``breslow`` as written; ``efron`` subtracts (r/d) Σ e^η over the d tied
    events from the sum, with r = 0, …, d - 1 for each of them in turn.
    Targets: time and event, ``[N, 2]``; the event is 1 if it was observed at that time, 0 if the sample was censored.
    Strata: whether the event was observed, and bins of the time.
    """

    name: ClassVar[str] = "survival"
    metrics: ClassVar[tuple[str, ...]] = ("concordance",)
    default_metrics: ClassVar[tuple[str, ...]] = ("concordance",)
    score: ClassVar[str] = "concordance"
    compares_samples: ClassVar[bool] = True

    ties: Literal["breslow", "efron"] = "breslow"
    bins: Bins = 2  # strata: bins of the time, or where they begin

    def targets(self, y: Tensor, name: str) -> Tensor:
        if y.dim() != 2 or y.shape[1] != 2:
            raise HoldfastError(
                f"{name} must hold time and event (1 observed, 0 censored) of each sample, shape [{len(y)}, 2], not "
                f"{list(y.shape)}"
            )
        y = finite_numbers(y, name)
        if (y[:, 0] < 0).any():
            first = int((y[:, 0] < 0).nonzero()[0])
            raise HoldfastError(
                f"{name} holds the time {y[first, 0].item():g} in sample {first}; survival times must be 0 or more"
            )
        event = y[:, 1]
        if not ((event == 0) | (event == 1)).all():
            wrong = event[(event != 0) & (event != 1)][0].item()
            raise HoldfastError(
                f"{name} holds the event {wrong:g}; it must be 1 (observed) or 0 (censored), in the second column"
            )
        return y

    def fit(self, y: Tensor) -> Self:
        return replace(self, edges=bin_edges(y[:, 0], self.bins))

    def strata(self, y: Tensor) -> Tensor:
        return bins_of(y[:, 0], self.edges) + y[:, 1].long() * (1 + len(self.edges))

    def stratum_names(self, labels: tuple[str, ...]) -> tuple[str, ...]:
        times = bin_names(self.edges)
        return tuple(f"{kind}, {time}" for kind in ("censored", "event") for time in times)

    def outputs(self, y: Tensor, labels: int) -> int:
        return 1

    def output_shapes(self, y: Tensor, labels: int) -> list[tuple[int, ...]]:
        return [(1,), ()]

    def values(self, outputs: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        risk, present = outputs.reshape(y.shape[0]), torch.ones_like(y[:, 0]) if mask is None else mask
        event = y[:, 1].to(risk.dtype) * present
        rows = torch.split(torch.arange(len(risk), device=risk.device), ROWS_AT_ONCE)
        return torch.cat([self._rows(chosen, risk, y[:, 0], event, present) for chosen in rows])

    def _rows(self, rows: Tensor, risk: Tensor, time: Tensor, event: Tensor, present: Tensor) -> Tensor:
        """The values of some samples; those that are not ``present`` count for nobody."""
        own = time[rows].unsqueeze(-1)
        at_risk = (time >= own) & (present > 0)
        top = torch.where(at_risk, risk, -torch.inf).amax(-1, keepdim=True).detach()
        top = torch.where(top > -torch.inf, top, 0.0)
        relative = torch.where(at_risk, risk - top, -torch.inf).exp()
        total = relative.sum(-1)
        if self.ties == "efron":
            tied = (time == own).to(relative.dtype) * event
            earlier = torch.arange(len(time), device=time.device) < rows.unsqueeze(-1)
            rank, count = (tied * earlier).sum(-1), tied.sum(-1)
            total = total - rank / count.clamp(min=1) * (tied * relative).sum(-1)
        smallest = torch.finfo(relative.dtype).tiny
        return event[rows] * (total.clamp(min=smallest).log() + top.squeeze(-1) - risk[rows])

    def align(self, outputs: Tensor, y: Tensor) -> Tensor:
        return outputs.reshape(y.shape[0])

    def predicted(self, outputs: Tensor) -> Tensor:
        """η, the logarithm of the relative risk: ``[N]``."""
        return outputs.flatten()

    def scores(self, kept: Tensor, y: Tensor) -> Tensor:
        """The comparable pairs with each sample in which the event that came first has more risk; equal risks: 1/2."""
        return self._pairs(kept, y)[0]

    def weights(self, kept: Tensor, y: Tensor) -> Tensor:
        """The comparable pairs with each sample."""
        return self._pairs(kept, y)[1]

    def _pairs(self, risk: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        rows = torch.split(torch.arange(len(y), device=y.device), ROWS_AT_ONCE)
        right, pairs = zip(*(concordant_pairs(risk, y, chosen) for chosen in rows), strict=True)
        return torch.cat(right), torch.cat(pairs)


def concordant_pairs(risk: Tensor, y: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The pairs of some samples with all others that are concordant, and those that are comparable: float64.

    A pair is comparable if the one with the earlier time had its event; at equal times, an event came before a
    censored time.
    """
    time, event = y[:, 0], y[:, 1] > 0
    own_time, own_event, own_risk = (values[rows].unsqueeze(-1) for values in (time, event, risk))
    before = own_event & ((own_time < time) | ((own_time == time) & ~event))
    after = event & ((time < own_time) | ((time == own_time) & ~own_event))
    right = torch.sign(own_risk - risk).double() * (before.double() - after.double())
    pairs = (before | after).double()
    return ((right + 1) / 2 * pairs).sum(-1), pairs.sum(-1)
