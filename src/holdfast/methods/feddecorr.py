"""FedDecorr: a penalty on correlated features, whose dimensions would otherwise collapse."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from holdfast.core.spec import NonNegative
from holdfast.methods.base import Batch, Local, Method, Tree
from holdfast.methods.card import Card
from holdfast.models.network import Output

EPS = 1e-8  # added to a feature's variance


@dataclass(frozen=True)
class FedDecorr(Method):
    """Decorrelation of the features h, the classifier's input.

    Local: CE + β mean_{i≠j} (Σ_n x_ni x_nj)² / N over a batch of N samples, x the batch's features, each dimension
    centred and divided by its standard deviation (with N - 1); 0 for a single sample.  Server: as FedAvg.
    Shi et al., ICLR 2023; the normalisation as in the authors' code, β = 0.1.
    """

    name: ClassVar[str] = "feddecorr"
    card: ClassVar[Card] = Card(
        when="strong label skew leaves the features few effective dimensions, and the classifier's input is wide",
    )
    needs_features: ClassVar[bool] = True
    compares_samples: ClassVar[bool] = True

    beta: NonNegative = 0.1  # β: weight of the penalty

    def loss(self, out: Output, batch: Batch, carry: Tree, local: Local) -> Tensor:
        """β mean_{i≠j} (Σ_n x_ni x_nj)² / N."""
        h = out.features
        real = torch.ones_like(h[:, :1]) if batch.mask is None else batch.mask.unsqueeze(-1)
        count = real.sum()
        centred = (h - (h * real).sum(0) / count.clamp(min=1)) * real
        variance = centred.square().sum(0) / (count - 1).clamp(min=1)
        x = centred / (variance + EPS).sqrt()
        squares = (x.T @ x).square()
        width = h.shape[-1]
        apart = (squares.sum() - squares.diagonal().sum()) / max(width * (width - 1), 1)
        term: Tensor = self.beta * apart / count.clamp(min=1)
        return term
