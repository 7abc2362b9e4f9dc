"""FedProx: a proximal term that keeps local weights close to the global ones."""

from dataclasses import dataclass
from typing import ClassVar

from holdfast.core.spec import NonNegative
from holdfast.methods.base import Method
from holdfast.methods.card import Card


@dataclass(frozen=True)
class FedProx(Method):
    """A proximal term between the local and the global weights.

    Local: CE + (μ/2) ‖w - w^{t-1}‖² over the parameters.  Server: as FedAvg.
    Li et al., MLSys 2020. μ: 1 in FedNTD's configuration, 0.1 in FedFA's; FedKA tunes it over 0.001 … 1.
    """

    name: ClassVar[str] = "fedprox"
    card: ClassVar[Card] = Card(
        when="clients drift because they take many or unequal numbers of local steps; it has one hyper-parameter",
    )

    mu: NonNegative = 0.1  # μ: weight of the proximal term

    def proximal_mu(self) -> float:
        return self.mu
