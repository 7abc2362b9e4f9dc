"""FedLC: cross-entropy on logits with larger margins for classes of which a client has few samples."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from holdfast.core.spec import NonNegative
from holdfast.methods.base import Batch, Method, Tree
from holdfast.methods.card import Card
from holdfast.methods.context import Client
from holdfast.methods.functional import cross_entropy
from holdfast.models.network import Output

EXCLUDED = -1e9  # added to the logit of a class that the client lacks


@dataclass(frozen=True)
class FedLC(Method):
    """Logits calibration by the client's label counts.

    Local: CE(z - τ n_k^{-1/4}, y) over the classes that the client holds, with n_k its label counts; the others are
    excluded from the softmax.  Server: as FedAvg; predictions use z.
    Zhang et al., ICML 2022. The paper's denominator excludes the sample's own class, so that the loss has no minimum;
    here it is included, as in the public implementations (the code of FedACG and of FedDecorr). τ = 1 is FedACG's.
    """

    name: ClassVar[str] = "fedlc"
    card: ClassVar[Card] = Card(
        when="clients lack many classes, whose logits would otherwise decrease in local training",
    )
    needs_classes: ClassVar[bool] = True

    tau: NonNegative = 1.0  # τ: size of the margins

    def client_init(self, payload: Tree, state: Tree, client: Client) -> Tree:
        """-τ n_k^{-1/4}: ``[C]``."""
        margin = -self.tau * client.label_counts.clamp(min=1).pow(-0.25)
        return {"margin": torch.where(client.owned, margin, EXCLUDED)}

    def task_loss(self, out: Output, batch: Batch, carry: Tree) -> Tensor:
        """CE(z - τ n_k^{-1/4}, y)."""
        return batch.mean(cross_entropy(out.logits + carry["margin"], batch.y))
