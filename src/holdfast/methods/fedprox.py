"""FedProx: stay close to the global weights."""

from dataclasses import dataclass
from typing import ClassVar

from holdfast.core.spec import NonNegative
from holdfast.methods.base import Method
from holdfast.methods.card import Card


@dataclass(frozen=True)
class FedProx(Method):
    """Pull local weights towards those the server sent.

    Local: CE + (μ/2) ‖w - w^{t-1}‖² over the parameters.  Server: as FedAvg.
    Li et al., MLSys 2020. μ: 1 in FedNTD's configuration, 0.1 in FedFA's; FedKA tunes it in 0.001 … 1.
    """

    name: ClassVar[str] = "fedprox"
    card: ClassVar[Card] = Card(
        when="clients drift because they take many or unequal numbers of local steps; one number to tune",
    )

    mu: NonNegative = 0.1  # μ: strength of the pull

    def proximal_mu(self) -> float:
        """The proximal term's gradient is μ (w - w^{t-1})."""
        return self.mu
