"""FedRS: a softmax with scaled logits for the classes that a client lacks."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from holdfast.core.spec import Fraction
from holdfast.methods.base import Batch, Method, Tree
from holdfast.methods.card import Card
from holdfast.methods.context import Client
from holdfast.methods.functional import cross_entropy
from holdfast.models.network import Output


@dataclass(frozen=True)
class FedRS(Method):
    """Restricted softmax.

    Local: CE(s_k ∘ z, y), with s_k^c = 1 for classes that the client holds and α for the others, so that their rows of
    the classifier move α times as far.  Server: as FedAvg; predictions use z.
    Li and Zhan, KDD 2021; α = 0.5 as in FedDecorr's code, which compares with it.
    """

    name: ClassVar[str] = "fedrs"
    card: ClassVar[Card] = Card(
        when="clients lack classes, whose logits would otherwise decrease in local training",
    )
    needs_classes: ClassVar[bool] = True

    alpha: Fraction = 0.5  # α: factor of the logits of absent classes; 1 is cross-entropy

    def client_init(self, payload: Tree, state: Tree, client: Client) -> Tree:
        """s_k: ``[C]``."""
        owned = client.owned.to(client.context.dtype)
        return {"scale": owned + self.alpha * (1 - owned)}

    def task_loss(self, out: Output, batch: Batch, carry: Tree) -> Tensor:
        """CE(s_k ∘ z, y)."""
        return batch.mean(cross_entropy(out.logits * carry["scale"], batch.y))
