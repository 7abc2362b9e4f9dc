"""FedAdagrad: Adagrad on the server."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from holdfast.core.spec import Positive
from holdfast.methods.base import Method, Server, Tensors, Tree
from holdfast.methods.card import Card
from holdfast.methods.context import RunContext


@dataclass(frozen=True)
class FedAdagrad(Method):
    """Adaptive federated optimisation with Adagrad.

    Server: Δ = mean - w^{t-1};  v ← v + Δ²;  w^t = w^{t-1} + η Δ / (√v + τ), from v = τ².
    Reddi et al., ICLR 2021, Algorithm 2 with β₁ = 0. τ is the paper's; it tunes η for every data set.
    """

    name: ClassVar[str] = "fedadagrad"
    card: ClassVar[Card] = Card(
        when="as fedadam, where steps should become smaller over the rounds; η must be tuned",
        server="keeps a moment of the model's size",
    )

    lr: Positive = 0.01  # η: the server's learning rate
    tau: Positive = 1e-3  # τ: adaptivity; added to the root of the second moment

    def init_server_state(self, context: RunContext) -> Tree:
        """v = τ²."""
        return {"second": {k: torch.full_like(p, self.tau**2) for k, p in context.network.params.items()}}

    def aggregate(
        self, server: Server, mean: Tensors, sums: Tree, context: RunContext
    ) -> tuple[Tensors, Tree]:
        delta = {k: mean[k] - w for k, w in server.params.items()}
        second = {k: v + delta[k].square() for k, v in server.state["second"].items()}
        params = {k: w + self.lr * delta[k] / (second[k].sqrt() + self.tau) for k, w in server.params.items()}
        return params, {"second": second}
