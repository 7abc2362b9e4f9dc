"""FedAvg: local training and the average weighted by sample counts."""

from dataclasses import dataclass
from typing import ClassVar

from holdfast.methods.base import Method
from holdfast.methods.card import Card


@dataclass(frozen=True)
class FedAvg(Method):
    """Federated averaging.

    Local: CE.  Server: w^t = Σ_k n_k w_k / Σ_k n_k over the participants.
    McMahan et al., AISTATS 2017.
    """

    name: ClassVar[str] = "fedavg"
    card: ClassVar[Card] = Card(
        when="as the baseline; sufficient if clients have similar data",
    )
