"""FedSOL: gradients at weights perturbed along the gradient of the distillation loss."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn import functional as F

from holdfast.core.spec import NonNegative, Positive
from holdfast.methods.base import Batch, Local, Method, Tensors, Tree
from holdfast.methods.card import GLOBAL_TEACHER, Card
from holdfast.methods.functional import kl_divergence, norm
from holdfast.models.network import Output


@dataclass(frozen=True)
class FedSOL(Method):
    """Stabilised orthogonal learning.

    Each step: g_p = ∇ KL(softmax(z_g/τ) ‖ softmax(z/τ)), with the logits z_g of the global model w^{t-1} and z of the
    local one;  ε = ρ Λ ∘ g_p / ‖g_p‖, Λ = |w - w^{t-1}|, each parameter tensor of it scaled to norm 1 along its first
    dimension;  the optimiser moves w by ∇CE(w + ε).  Server: as FedAvg.
    Lee et al., CVPR 2024: the adaptive variant of the authors' code, with its ρ = 1, τ = 3, and the perturbation of
    all layers.
    """

    name: ClassVar[str] = "fedsol"
    card: ClassVar[Card] = Card(
        when="label skew makes local training forget, a distillation term slows learning down, and clients have time "
        "for twice the work",
        client=f"two gradients in each step; {GLOBAL_TEACHER}",
    )
    needs_classes: ClassVar[bool] = True
    teachers: ClassVar[tuple[str, ...]] = ("global",)

    rho: NonNegative = 1.0  # ρ: strength of the perturbation
    tau: Positive = 3.0  # τ: softmax temperature of the distillation

    def ascent_loss(self, out: Output, batch: Batch, carry: Tree, local: Local) -> Tensor:
        """KL(softmax(z_g/τ) ‖ softmax(z/τ))."""
        teacher = batch.teacher["global"].logits
        p, q = (F.log_softmax(z / self.tau, dim=-1) for z in (teacher, out.logits))
        return batch.mean(kl_divergence(p, q))

    def perturb(self, grads: Tensors, carry: Tree, local: Local) -> tuple[Tensors, Tree]:
        """w + ρ Λ ∘ g_p / ‖g_p‖."""
        scale = self.rho / (norm(grads) + 1e-12)
        point = {}
        for k, w in local.params.items():
            distance = F.normalize((w - local.global_params[k]).abs(), dim=0)
            point[k] = w + scale * distance * grads[k]
        return point, carry
