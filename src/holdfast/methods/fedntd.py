"""FedNTD: distillation of the global model's predictions for the classes other than a sample's own."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from holdfast.core.spec import NonNegative, Positive
from holdfast.methods.base import Batch, Local, Method, Tree
from holdfast.methods.card import GLOBAL_TEACHER, Card
from holdfast.methods.functional import not_true_distillation
from holdfast.models.network import Output


@dataclass(frozen=True)
class FedNTD(Method):
    """Not-true distillation, which preserves the global model's knowledge of classes outside the local data.

    Local: CE(z_k, y) + β τ² KL(q̃_g ‖ q̃_k), where q̃ is the softmax over the C-1 classes other than y of the
    logits / τ, of the global model (teacher, w^{t-1}) and the local one.  Server: as FedAvg.
    Lee et al., NeurIPS 2022, Eq. 10-11; β = τ = 1 and the factor τ² from the authors' code.
    """

    name: ClassVar[str] = "fedntd"
    card: ClassVar[Card] = Card(
        when="label skew makes local training forget the classes a client lacks, and nothing more may be sent "
        "or kept",
        client=GLOBAL_TEACHER,
    )
    needs_classes: ClassVar[bool] = True
    teachers: ClassVar[tuple[str, ...]] = ("global",)

    beta: NonNegative = 1.0  # β: weight of the distillation term
    tau: Positive = 1.0  # τ: softmax temperature

    def loss(self, out: Output, batch: Batch, carry: Tree, local: Local) -> Tensor:
        """β times the mean over the batch of τ² KL(q̃_g ‖ q̃_k)."""
        teacher = batch.teacher["global"].logits
        return self.beta * batch.mean(not_true_distillation(out.logits, teacher, batch.y, self.tau))
