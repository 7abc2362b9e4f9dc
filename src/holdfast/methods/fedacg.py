"""FedACG: clients start from the global model plus the server's momentum."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from holdfast.core.spec import Momentum, NonNegative
from holdfast.methods.base import Method, Server, Tensors, Tree
from holdfast.methods.card import Card
from holdfast.methods.context import RunContext


@dataclass(frozen=True)
class FedACG(Method):
    """Accelerated client gradient.

    Clients receive ŵ = w^{t-1} + λ m and minimise CE + β ‖w - ŵ‖².
    Server: w^t = mean;  m ← λ m + (mean - ŵ), which is w^t - w^{t-1}.  Tested: w^t.
    Kim, Kim and Han, CVPR 2024, as in the authors' code, with its λ = 0.85 and β = 0.001.
    """

    name: ClassVar[str] = "fedacg"
    card: ClassVar[Card] = Card(
        when="few of many clients take part in a round, and clients should use the direction of the global model",
        server="keeps a momentum and a second model of the model's size",
    )

    lam: Momentum = 0.85  # λ: momentum
    beta: NonNegative = 1e-3  # β: weight of the proximal term

    def init_server_state(self, context: RunContext) -> Tree:
        """m = 0, and w^0."""
        params = context.network.params
        return {"momentum": {k: torch.zeros_like(p) for k, p in params.items()}, "model": params}

    def proximal_mu(self) -> float:
        """2 β."""
        return 2 * self.beta

    def aggregate(
        self, server: Server, mean: Tensors, sums: Tree, context: RunContext
    ) -> tuple[Tensors, Tree]:
        """ŵ of the next round."""
        momentum = {k: self.lam * m + mean[k] - server.params[k] for k, m in server.state["momentum"].items()}
        ahead = {k: w + self.lam * momentum[k] for k, w in mean.items()}
        return ahead, {"momentum": momentum, "model": mean}

    def eval_params(self, server: Server) -> Tensors:
        """w^t."""
        model: Tensors = server.state["model"]
        return model
