"""FedSAM: sharpness-aware minimisation on the clients."""

from dataclasses import dataclass
from typing import ClassVar

from holdfast.core.spec import NonNegative
from holdfast.methods.base import Local, Method, Tensors, Tree
from holdfast.methods.card import Card
from holdfast.methods.functional import ascend


@dataclass(frozen=True)
class FedSAM(Method):
    """Local sharpness-aware minimisation.

    Each step: ε = ρ g / ‖g‖ with g = ∇L(w), the norm over all parameters; the optimiser moves w by ∇L(w + ε), on the
    same batch. L is the loss of the whole stack; momentum, weight decay and clipping act on ∇L(w + ε).
    BatchNorm's statistics are those at w.  Server: as FedAvg.
    Qu et al., ICML 2022, and Caldarola et al., ECCV 2022. ρ = 0.1 is the default of the first's re-implementation by
    the authors of FedSMOO; the papers tune it.
    """

    name: ClassVar[str] = "fedsam"
    card: ClassVar[Card] = Card(
        when="the global model generalises worse than a centrally trained one, and clients have time for twice the "
        "work",
        client="two gradients in each step",
    )

    rho: NonNegative = 0.1  # ρ: length of the perturbation

    def perturb(self, grads: Tensors, carry: Tree, local: Local) -> tuple[Tensors, Tree]:
        """w + ρ g / ‖g‖."""
        return ascend(local.params, grads, self.rho), carry
