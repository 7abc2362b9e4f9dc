"""Balanced: cross-entropy on logits shifted by the logarithms of the client's class frequencies."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from holdfast.core.spec import NonNegative, PositiveFraction
from holdfast.methods.base import Batch, Method, Tree
from holdfast.methods.card import Card
from holdfast.methods.context import Client
from holdfast.methods.functional import cross_entropy
from holdfast.models.network import Output


@dataclass(frozen=True)
class Balanced(Method):
    """Logit-adjusted local loss: a part for other methods, as in `balanced:tau=0.5+fedavgm+ema`.

    Local: CE(z + τ log π_k, y), π_k^c = max(n_k^c / n_k, ``floor``), n_k^c the client's number of samples of class c.
    Server: as FedAvg; predictions use z.
    Menon et al., ICLR 2021 (logit adjustment, Eq. 10); τ = 1 is the balanced softmax of Ren et al., NeurIPS 2020.

    π_k compensates for the client's label frequencies, so that z does not learn them. A class that a client lacks gets
    τ log ``floor``: with the default, the client's steps hardly lower its logits. With equally frequent classes the
    loss is cross-entropy. A client with one class learns almost nothing, as its loss is close to 0.
    """

    name: ClassVar[str] = "balanced"
    card: ClassVar[Card] = Card(
        when="clients hold several classes in unequal numbers and the global model is tested on all classes equally",
    )
    needs_classes: ClassVar[bool] = True

    tau: NonNegative = 1.0  # τ: strength of the adjustment; 0 is cross-entropy
    floor: PositiveFraction = 1e-8  # smallest frequency of a class, for those that a client lacks

    def client_init(self, payload: Tree, state: Tree, client: Client) -> Tree:
        """τ log π_k: ``[C]``."""
        frequencies = client.label_counts / client.samples
        return {"shift": self.tau * frequencies.clamp(min=self.floor).log()}

    def task_loss(self, out: Output, batch: Batch, carry: Tree) -> Tensor:
        """CE(z + τ log π_k, y)."""
        return batch.mean(cross_entropy(out.logits + carry["shift"], batch.y))
