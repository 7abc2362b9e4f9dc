"""FedYogi: Yogi on the server."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from holdfast.methods.card import Card
from holdfast.methods.fedadam import FedAdam


@dataclass(frozen=True)
class FedYogi(FedAdam):
    """Adaptive federated optimisation with Yogi: FedAdam with v ← v - (1-β₂) Δ² sign(v - Δ²).

    Reddi et al., ICLR 2021, Algorithm 2; defaults as in FedAdam.
    """

    name: ClassVar[str] = "fedyogi"
    card: ClassVar[Card] = Card(
        when="as fedadam, if updates are sparse or change in size from round to round; η must be tuned",
        server="keeps two moments of the model's size",
    )

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        """v - (1-β₂) Δ² sign(v - Δ²)."""
        return v - (1 - self.beta2) * square * (v - square).sign()
