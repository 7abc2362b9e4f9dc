"""MOON: a contrastive loss between the features of the local, the global and the client's previous model."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor
from torch.nn import functional as F

from holdfast.core.spec import NonNegative, Positive
from holdfast.methods.base import Batch, Local, Method, Tensors, Tree
from holdfast.methods.card import Card
from holdfast.methods.context import Client
from holdfast.models.network import Output


@dataclass(frozen=True)
class Moon(Method):
    """Model-contrastive learning on the features h, the classifier's input.

    Local: CE + μ mean_B -log[ e^{s_g/τ} / (e^{s_g/τ} + e^{s_p/τ}) ], where s_g and s_p are the cosines of h
    with the features of the global model w^{t-1} and of the client's previous local model. A client that
    has not participated before has the run's initial model as its previous one.  Server: as FedAvg.
    Both are frozen, each with its own BatchNorm statistics, if any.
    Li et al., CVPR 2021; τ = 0.5; μ = 1 is the authors' default, 5 their CIFAR-10 example, 0.1 in FedNTD's
    configuration. Their projection head is part of the model (``moon-cnn``), not of the method.

    ``variant="fa"`` is FedFA's baseline: cosines are averaged over the batch before the softmax, and a client that
    has not participated before has w^{t-1} as its previous model, so the term has no gradient.
    """

    name: ClassVar[str] = "moon"
    card: ClassVar[Card] = Card(
        when="image features diverge between clients, which participate often and can keep a model",
        client="forward passes of two models over its samples each round, each step where inputs are "
        "augmented",
    )
    needs_features: ClassVar[bool] = True
    teachers: ClassVar[tuple[str, ...]] = ("global", "previous")

    mu: NonNegative = 1.0  # μ: weight of the contrastive term
    tau: Positive = 0.5  # τ: temperature
    variant: Literal["original", "fa"] = "original"

    def init_client_state(self, client: Client) -> Tree:
        """The previous model before the first participation."""
        if self.variant == "fa":
            return {"previous": {**client.global_params, **client.buffers}}
        network = client.context.network
        return {"previous": {**network.params, **network.buffers}}

    def teacher(self, name: str, payload: Tree, state: Tree, client: Client) -> Tensors:
        previous: Tensors = state["previous"]
        return previous if name == "previous" else client.global_params

    def loss(self, out: Output, batch: Batch, carry: Tree, local: Local) -> Tensor | None:
        """-log softmax of the two cosines is softplus((s_p - s_g) / τ)."""
        if self.mu == 0:
            return None
        near, far = (
            F.cosine_similarity(out.features, batch.teacher[name].features) for name in ("global", "previous")
        )
        if self.variant == "fa":
            return self.mu * F.softplus(batch.mean(far - near) / self.tau)
        return self.mu * batch.mean(F.softplus((far - near) / self.tau))

    def client_final(self, params: Tensors, carry: Tree, client: Client) -> tuple[Tree, Tree]:
        return {}, {"previous": {**params, **client.buffers}}
