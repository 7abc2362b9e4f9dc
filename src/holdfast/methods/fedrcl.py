"""FedRCL: contrastive learning of features within a batch, relaxed to prevent the collapse of a class."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from holdfast.core.spec import NonNegative, Positive, PositiveFraction
from holdfast.methods.base import Batch, Local, Method, Tree
from holdfast.methods.card import Card
from holdfast.models.network import Output

NEGATIVES = 2  # number of negatives: the most similar samples of other classes
EXCLUDED = -1e9  # the logit of a pair that is excluded from a softmax


@dataclass(frozen=True)
class FedRCL(Method):
    """Relaxed contrastive learning.

    For sample i of a batch, with s_ij the cosine of two features and p_i = min_j s_ij over the samples j ≠ i of its
    class (its hardest positive; 1 if there is none):
    Local: CE + mean_i [log(1 + Σ_n exp((s_in - p_i)/τ)) + β 1[p_i ≥ λ] log(1 + exp((p_i - 1)/τ))]
    with n the two most similar samples of other classes. The first term increases p_i, the second one bounds it:
    pairs of a class that exceed λ are pushed apart. A sample without others of its class has no second term.
    Server: as FedAvg.
    Seo et al., CVPR 2024, as in the authors' code: the hardest positive, two negatives, τ = 0.05, λ = 0.7, β = 1,
    gradients clipped (train with ``max_grad_norm=10``). The paper averages the loss over the outputs of all five stages
    of a ResNet-18, pooled; here it acts only on the last level, the features, which every network has.
    """

    name: ClassVar[str] = "fedrcl"
    card: ClassVar[Card] = Card(
        when="clients hold few classes, batches are large enough to hold several samples of a class, and features "
        "should serve other tasks as well",
        client="the cosines of all pairs in a batch",
    )
    needs_classes: ClassVar[bool] = True
    needs_features: ClassVar[bool] = True
    compares_samples: ClassVar[bool] = True

    tau: Positive = 0.05  # τ: temperature of the cosines
    lam: PositiveFraction = 0.7  # λ: cosine from which a pair of one class is pushed apart
    beta: NonNegative = 1.0  # β: weight of that term

    def loss(self, out: Output, batch: Batch, carry: Tree, local: Local) -> Tensor:
        """The contrastive term and the penalty."""
        features = F.normalize(out.features, dim=-1)
        cosines = features @ features.T
        samples = torch.arange(len(batch.y), device=batch.y.device)
        real = batch.mask.bool() if batch.mask is not None else torch.ones_like(samples, dtype=torch.bool)
        same = (batch.y.unsqueeze(-1) == batch.y) & real
        partner = same & (samples.unsqueeze(-1) != samples)
        hardest = torch.where(partner, cosines, 1.0).amin(-1)
        others = torch.where(~same & real, cosines, EXCLUDED)
        negatives = others.topk(min(NEGATIVES, len(samples)), dim=-1).values
        apart = (negatives - hardest.unsqueeze(-1)) / self.tau
        contrast = F.softplus(apart.logsumexp(-1))
        close = partner.any(-1) & (hardest >= self.lam)
        penalty = torch.where(close, F.softplus((hardest - 1) / self.tau), 0.0)
        return batch.mean(contrast + self.beta * penalty)
