"""FedVLS: distillation on the classes that a client lacks, and suppression of wrong logits."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from holdfast.core.spec import NonNegative
from holdfast.methods.base import Batch, Local, Method, Tree
from holdfast.methods.card import GLOBAL_TEACHER, Card
from holdfast.methods.context import Client
from holdfast.methods.functional import cross_entropy, kl_divergence
from holdfast.models.network import Output

EPS = 1e-9  # added to class frequencies before the logarithm
EXCLUDED = -1e9  # the logit of a class or sample that is excluded from a softmax


@dataclass(frozen=True)
class FedVLS(Method):
    """Vacant-class distillation and logit suppression, with the client's class frequencies π.

    Local: CE(z + log π, y)
    + λ KL(p_g ‖ p), the softmax of the global model's (teacher, w^{t-1}) and the local logits over the classes that the
      client lacks; 0 where it lacks none
    + β Σ_c π_c log mean_n exp(a_nc),  a_nc = z_nc - log π_c - log C for samples of other classes, 0 for those of c.
    Server: as FedAvg.
    Guo et al., AAAI 2025, as in the authors' code; λ = 0.1 as in its example for CIFAR-10, β = 0.005.
    """

    name: ClassVar[str] = "fedvls"
    card: ClassVar[Card] = Card(
        when="clients lack classes and hold others in very unequal numbers",
        client=GLOBAL_TEACHER,
    )
    needs_classes: ClassVar[bool] = True
    compares_samples: ClassVar[bool] = True
    teachers: ClassVar[tuple[str, ...]] = ("global",)

    lam: NonNegative = 0.1  # λ: weight of the distillation
    beta: NonNegative = 0.005  # β: weight of the suppression

    def client_init(self, payload: Tree, state: Tree, client: Client) -> Tree:
        """π, log π, and the classes that the client lacks: ``[C]`` each."""
        prior = client.label_counts / client.samples
        absent = (~client.owned).to(prior.dtype)
        return {"prior": prior, "log_prior": (prior + EPS).log(), "absent": absent}

    def task_loss(self, out: Output, batch: Batch, carry: Tree) -> Tensor:
        """CE(z + log π, y)."""
        return batch.mean(cross_entropy(out.logits + carry["log_prior"], batch.y))

    def loss(self, out: Output, batch: Batch, carry: Tree, local: Local) -> Tensor:
        """The distillation and the suppression."""
        return self.lam * self._distillation(out, batch, carry) + self.beta * self._suppression(
            out, batch, carry
        )

    def _distillation(self, out: Output, batch: Batch, carry: Tree) -> Tensor:
        absent = carry["absent"] > 0
        p, q = (
            F.log_softmax(torch.where(absent, z, EXCLUDED), dim=-1)
            for z in (batch.teacher["global"].logits, out.logits)
        )
        return batch.mean(kl_divergence(p, q))  # 0 if no class is absent, as both are uniform

    def _suppression(self, out: Output, batch: Batch, carry: Tree) -> Tensor:
        classes = out.logits.shape[-1]
        own = batch.y.unsqueeze(-1) == torch.arange(classes, device=batch.y.device)
        shifted = out.logits - carry["log_prior"] + math.log(1 / classes + EPS)
        spread = torch.where(own, 0.0, shifted)
        count = spread.new_tensor(len(spread))
        if batch.mask is not None:
            spread = torch.where(batch.mask.unsqueeze(-1) > 0, spread, EXCLUDED)
            count = batch.mask.sum().clamp(min=1)
        total: Tensor = (carry["prior"] * (spread.logsumexp(0) - count.log())).sum()
        return total
