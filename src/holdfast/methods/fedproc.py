"""FedProc: a contrastive loss with global class prototypes that is gradually replaced by cross-entropy."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from holdfast.core.spec import Fraction, Positive
from holdfast.methods.base import Batch, Local, Method, Server, Tensors, Tree, Upload
from holdfast.methods.card import Card
from holdfast.methods.context import Client, RunContext
from holdfast.methods.fedfa import FedFA
from holdfast.methods.functional import cross_entropy
from holdfast.models.network import Output

MASKED = -1e9  # the similarity with a prototype that does not exist yet


@dataclass(frozen=True)
class FedProc(Method):
    """Prototypical contrast, whose weight decreases over the rounds in favour of cross-entropy.

    Local: α_t CE + (1 - α_t) mean_B -log softmax_c( cos(h, p_c) / τ )[y],  α_t = t/R; CE alone in round 1.
    Server: p_c ← λ p_c + (1-λ) m_c, m_c the mean feature of class c over the participants' samples under
    their trained models; for a class seen first, p_c = m_c; one without a prototype is left out of the softmax.
    Mu et al., 2023; τ, α_t and the moving average as stated in the FedFA paper.

    ``variant="official"``: the authors' code. α_t = min(1, (t-1)/100), similarity h·p_c/‖p_c‖ without τ,
    p_c = m_c, and the prototype of an unseen class is zero.
    ``variant="fa"``: FedFA's baseline. p_c are FedFA's initial anchors and never change, similarity h·p_c, no
    CE-only round.
    """

    name: ClassVar[str] = "fedproc"
    card: ClassVar[Card] = Card(
        when="features should be learnt before the classifier, and label counts may be disclosed",
        client="a forward pass over its samples each round, for the prototypes",
        uploads="the sum of each class's features, and its label counts",
    )
    needs_classes: ClassVar[bool] = True
    needs_features: ClassVar[bool] = True

    tau: Positive = 0.5  # τ: temperature
    lam: Fraction = 0.5  # λ: weight of the old prototype in a round's update
    variant: Literal["original", "official", "fa"] = "original"

    def init_server_state(self, context: RunContext) -> Tree:
        """No prototypes yet, or FedFA's anchors."""
        if self.variant == "fa":
            return {
                "prototypes": FedFA().init_server_state(context)["anchors"],
                "known": torch.ones_like(context.class_counts),
            }
        zeros = torch.zeros(
            context.num_classes, context.network.head.features, dtype=context.dtype, device=context.device
        )
        return {"prototypes": zeros, "known": torch.zeros_like(context.class_counts)}

    def broadcast(self, server: Server) -> Tree:
        return server.state

    def client_init(self, payload: Tree, state: Tree, client: Client) -> Tree:
        """The prototypes, normalised for the similarity, and α_t."""
        prototypes, known = payload["prototypes"], payload["known"]
        if self.variant != "fa":
            prototypes = F.normalize(prototypes, dim=-1)
        if self.variant == "official":
            known = torch.ones_like(known)
        return {"prototypes": prototypes, "known": known, "alpha": client.context.scalar(self._alpha(client))}

    def _alpha(self, client: Client) -> float:
        if client.round == 1 and self.variant != "fa":
            return 1.0
        if self.variant == "official":
            return min(1.0, (client.round - 1) / 100)
        return client.round / client.context.rounds

    def task_loss(self, out: Output, batch: Batch, carry: Tree) -> Tensor:
        """α_t CE."""
        loss: Tensor = carry["alpha"] * super().task_loss(out, batch, carry)
        return loss

    def loss(self, out: Output, batch: Batch, carry: Tree, local: Local) -> Tensor:
        """(1 - α_t) times the contrast, which is 0 for a sample whose class has no prototype."""
        features, known = out.features, carry["known"]
        if self.variant == "original":
            features = F.normalize(features, dim=-1) / self.tau
        similarity = torch.where(known > 0, features @ carry["prototypes"].T, MASKED)
        contrast = cross_entropy(similarity, batch.y) * known[batch.y]
        term: Tensor = (1 - carry["alpha"]) * batch.mean(contrast)
        return term

    def client_final(self, params: Tensors, carry: Tree, client: Client) -> tuple[Tree, Tree]:
        if self.variant == "fa":
            return {}, {}
        features = client.forward(params).features
        members = F.one_hot(client.y, client.context.num_classes).to(features.dtype)
        return {"features": members.T @ features, "labels": client.label_counts}, {}

    def update(self, server: Server, sums: Tree, uploads: Sequence[Upload], context: RunContext) -> Tree:
        """Update the prototypes of the participants' classes."""
        if self.variant == "fa":
            return server.state
        prototypes, known, labels = server.state["prototypes"], server.state["known"], sums["labels"]
        means = sums["features"] / labels.clamp(min=1).unsqueeze(-1)
        kept = self.lam * known.unsqueeze(-1) if self.variant == "original" else 0.0
        moved = kept * prototypes + (1 - kept) * means
        seen = labels > 0
        return {
            "prototypes": torch.where(seen.unsqueeze(-1), moved, prototypes),
            "known": torch.where(seen, torch.ones_like(known), known),
        }
