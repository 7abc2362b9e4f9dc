"""FedAdam: Adam on the server."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from holdfast.core.spec import Momentum, Positive
from holdfast.methods.base import Method, Server, Tensors, Tree
from holdfast.methods.card import Card
from holdfast.methods.context import RunContext


@dataclass(frozen=True)
class FedAdam(Method):
    """Adaptive federated optimisation with Adam.

    Server: Δ = mean - w^{t-1};  m ← β₁ m + (1-β₁) Δ;  v ← β₂ v + (1-β₂) Δ²;  w^t = w^{t-1} + η m / (√v + τ), from
    m = 0 and v = τ², without bias correction.
    Reddi et al., ICLR 2021, Algorithm 2. β₁, β₂ and τ are the paper's; it tunes η for every data set.
    """

    name: ClassVar[str] = "fedadam"
    card: ClassVar[Card] = Card(
        when="parameters need steps of different sizes, such as embeddings of rare words; η must be tuned",
        server="keeps two moments of the model's size",
    )

    lr: Positive = 0.01  # η: the server's learning rate
    beta1: Momentum = 0.9  # β₁: decay of the first moment
    beta2: Momentum = 0.99  # β₂: decay of the second moment
    tau: Positive = 1e-3  # τ: adaptivity; added to the root of the second moment

    def init_server_state(self, context: RunContext) -> Tree:
        """m = 0, v = τ²."""
        params = context.network.params
        return {
            "first": {k: torch.zeros_like(p) for k, p in params.items()},
            "second": {k: torch.full_like(p, self.tau**2) for k, p in params.items()},
        }

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        """v from the one before and Δ²."""
        return self.beta2 * v + (1 - self.beta2) * square

    def aggregate(
        self, server: Server, mean: Tensors, sums: Tree, context: RunContext
    ) -> tuple[Tensors, Tree]:
        delta = {k: mean[k] - w for k, w in server.params.items()}
        first = {k: self.beta1 * m + (1 - self.beta1) * delta[k] for k, m in server.state["first"].items()}
        second = {k: self.second_moment(v, delta[k].square()) for k, v in server.state["second"].items()}
        params = {k: w + self.lr * first[k] / (second[k].sqrt() + self.tau) for k, w in server.params.items()}
        return params, {"first": first, "second": second}
