"""FedLMD: distillation on a client's minority classes, with the other classes masked."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from holdfast.core.spec import NonNegative, Positive
from holdfast.methods.base import Batch, Local, Method, Tree
from holdfast.methods.card import GLOBAL_TEACHER, Card
from holdfast.methods.context import Client
from holdfast.methods.functional import kl_divergence
from holdfast.models.network import Output

EXCLUDED = -1e9  # the logit of a class that is excluded from a softmax


@dataclass(frozen=True)
class FedLMD(Method):
    """Label-masking distillation.

    Local: CE + β τ² KL(p ‖ q). p is the softmax of the global model's logits / τ over the client's minority classes
    other than y, q that of the local logits / τ over all classes other than y; a class is in the minority if the client
    has at most its mean number of samples for each class. 0 for a sample without such classes.  Server: as FedAvg.
    Lu et al., ACM MM 2023, with the teacher, as in the authors' code; β = τ = 1.
    """

    name: ClassVar[str] = "fedlmd"
    card: ClassVar[Card] = Card(
        when="label skew makes local training forget the classes of which a client has few samples or none",
        client=GLOBAL_TEACHER,
    )
    needs_classes: ClassVar[bool] = True
    teachers: ClassVar[tuple[str, ...]] = ("global",)

    beta: NonNegative = 1.0  # β: weight of the distillation term
    tau: Positive = 1.0  # τ: softmax temperature

    def client_init(self, payload: Tree, state: Tree, client: Client) -> Tree:
        """Which classes are in the minority: ``[C]`` of 0 and 1."""
        counts = client.label_counts
        return {"minority": (counts <= counts.mean()).to(counts.dtype)}

    def loss(self, out: Output, batch: Batch, carry: Tree, local: Local) -> Tensor:
        """β τ² KL(p ‖ q)."""
        classes = out.logits.shape[-1]
        other = batch.y.unsqueeze(-1) != torch.arange(classes, device=batch.y.device)
        taught = other & (carry["minority"] > 0)
        teacher = torch.where(taught, batch.teacher["global"].logits / self.tau, EXCLUDED)
        student = torch.where(other, out.logits / self.tau, EXCLUDED)
        divergence = kl_divergence(F.log_softmax(teacher, dim=-1), F.log_softmax(student, dim=-1))
        return self.beta * self.tau**2 * batch.mean(torch.where(taught.any(-1), divergence, 0.0))
