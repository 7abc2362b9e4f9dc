"""FedAvgM: momentum on the server."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from holdfast.core.spec import Momentum
from holdfast.methods.base import Method, Server, Tensors, Tree
from holdfast.methods.card import Card
from holdfast.methods.context import RunContext


@dataclass(frozen=True)
class FedAvgM(Method):
    """Averaging with server momentum.

    Server: Δ = w^{t-1} - mean;  v ← βv + Δ;  w^t = w^{t-1} - v, over the parameters.
    Hsu et al., 2019. β = 0.7 is FedNTD's configuration. ``damped``: v ← βv + (1-β)Δ, as in MOON's code.
    """

    name: ClassVar[str] = "fedavgm"
    card: ClassVar[Card] = Card(
        when="few clients take part in a round and the global model oscillates from round to round",
        server="keeps a velocity of the model's size",
    )

    beta: Momentum = 0.7  # β: momentum
    damped: bool = False  # whether Δ is scaled by 1 - β

    def init_server_state(self, context: RunContext) -> Tree:
        return {"velocity": {k: torch.zeros_like(p) for k, p in context.network.params.items()}}

    def aggregate(
        self, server: Server, mean: Tensors, sums: Tree, context: RunContext
    ) -> tuple[Tensors, Tree]:
        gain = 1 - self.beta if self.damped else 1.0
        velocity = {
            k: self.beta * v + gain * (server.params[k] - mean[k])
            for k, v in server.state["velocity"].items()
        }
        return {k: server.params[k] - v for k, v in velocity.items()}, {"velocity": velocity}
