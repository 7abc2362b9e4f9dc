"""FedProx: stay close to the global weights."""

from dataclasses import dataclass
from typing import ClassVar

from holdfast.methods.base import Method


@dataclass(frozen=True)
class FedProx(Method):
    """Pull local weights towards those the server sent.

    Local: CE + (μ/2) ‖w - w^{t-1}‖² over the parameters.  Server: as FedAvg.
    Li et al., MLSys 2020. μ: 1 in FedNTD's configuration, 0.1 in FedFA's; FedKA tunes it in 0.001 … 1.
    """

    name: ClassVar[str] = "fedprox"

    mu: float = 0.1  # μ: strength of the pull

    def check(self) -> None:
        """μ is a strength."""
        self.require(mu=(self.mu >= 0, "at least 0"))

    def proximal_mu(self) -> float:
        """The proximal term's gradient is μ (w - w^{t-1})."""
        return self.mu
