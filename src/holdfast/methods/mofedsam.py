"""MoFedSAM: sharpness-aware minimisation with the server's momentum in every local step."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from holdfast.core.spec import NonNegative, PositiveFraction
from holdfast.methods.base import Local, Method, Server, Tensors, Tree
from holdfast.methods.card import Card
from holdfast.methods.context import Client, RunContext
from holdfast.methods.functional import ascend


@dataclass(frozen=True)
class MoFedSAM(Method):
    """FedSAM with momentum.

    Each step's gradient is α ∇L(w + ε) + (1-α) Δ, with ε = ρ g / ‖g‖, g = ∇L(w), and Δ the mean gradient of the last
    round, Δ = (w^{t-2} - mean^{t-1}) / (K η), for K steps of rate η; 0 in round 1.  Server: as FedAvg.
    Qu et al., ICML 2022, Algorithm 2 (their β is α here). α = ρ = 0.1 as in the code by the authors of FedSMOO. Where
    clients take different numbers of steps, K η is the mean over the participants. The gradient is used without local
    momentum in the paper: train with ``momentum=0``.
    """

    name: ClassVar[str] = "mofedsam"
    card: ClassVar[Card] = Card(
        when="few of many clients take part in a round, and clients have time for twice the work",
        client="two gradients in each step",
        server="keeps a gradient of the model's size",
        uploads="its number of local steps",
    )

    assumes_sgd: ClassVar[str] = "Δ is a mean of gradients, taken from the distance that SGD's steps cover"

    rho: NonNegative = 0.1  # ρ: length of the perturbation
    alpha: PositiveFraction = 0.1  # α: weight of the client's own gradient

    def init_server_state(self, context: RunContext) -> Tree:
        return {"direction": {k: torch.zeros_like(p) for k, p in context.network.params.items()}}

    def broadcast(self, server: Server) -> Tree:
        return server.state

    def client_init(self, payload: Tree, state: Tree, client: Client) -> Tree:
        """Δ."""
        return {"direction": payload["direction"]}

    def perturb(self, grads: Tensors, carry: Tree, local: Local) -> tuple[Tensors, Tree]:
        """w + ρ g / ‖g‖."""
        return ascend(local.params, grads, self.rho), carry

    def edit_gradient(self, grads: Tensors, carry: Tree, local: Local) -> Tensors:
        """α ∇L(w + ε) + (1-α) Δ."""
        direction = carry["direction"]
        return {k: self.alpha * g + (1 - self.alpha) * direction[k] for k, g in grads.items()}

    def client_final(self, params: Tensors, carry: Tree, client: Client) -> tuple[Tree, Tree]:
        """K η, for its mean."""
        return {
            "path": client.context.scalar(client.steps * client.lr),
            "clients": client.context.scalar(1),
        }, {}

    def aggregate(
        self, server: Server, mean: Tensors, sums: Tree, context: RunContext
    ) -> tuple[Tensors, Tree]:
        """w^t = mean, and Δ for the next round."""
        path = sums["path"] / sums["clients"]
        return mean, {"direction": {k: (w - mean[k]) / path for k, w in server.params.items()}}
