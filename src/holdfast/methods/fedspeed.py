"""FedSpeed: sharpness-aware minimisation with dynamic regularisation."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from holdfast.core.spec import NonNegative, Positive
from holdfast.methods.base import Local, Method, Server, Tensors, Tree
from holdfast.methods.card import Card
from holdfast.methods.context import Client, RunContext
from holdfast.methods.functional import ascend


@dataclass(frozen=True)
class FedSpeed(Method):
    """Perturbed gradients, and a proximal term with a correction h_k, the sum of the client's past changes.

    Each step's gradient is ∇CE(w + ε) + λ (w - w^{t-1} + h_k), with ε = ρ g / ‖g‖ and g = ∇CE(w).
    Afterwards h_k ← h_k + w_k - w^{t-1}.
    Server: h ← h + Σ_k (w_k - w^{t-1}) / N with N the number of all clients;  w^t = mean_k w_k + h, where the mean is
    unweighted.
    Sun et al., ICLR 2023, as in the authors' code: ∇CE(w + ε) alone (α = 1 in the paper's mixture with g), ε
    normalised, ρ = λ = 0.1 (λ is the paper's 1/λ). It clips gradients: train with ``max_grad_norm=10``.
    """

    name: ClassVar[str] = "fedspeed"
    card: ClassVar[Card] = Card(
        when="clients can keep state, take part again and again, and have time for twice the work",
        client="two gradients in each step",
        server="keeps a correction of the model's size",
    )

    rho: NonNegative = 0.1  # ρ: length of the perturbation
    lam: Positive = 0.1  # λ: strength of the proximal term and its correction

    def init_server_state(self, context: RunContext) -> Tree:
        return {"h": {k: torch.zeros_like(p) for k, p in context.network.params.items()}}

    def init_client_state(self, client: Client) -> Tree:
        return {"h": {k: torch.zeros_like(p) for k, p in client.global_params.items()}}

    def client_init(self, payload: Tree, state: Tree, client: Client) -> Tree:
        return {"h": state["h"]}

    def perturb(self, grads: Tensors, carry: Tree, local: Local) -> tuple[Tensors, Tree]:
        """w + ρ g / ‖g‖."""
        return ascend(local.params, grads, self.rho), carry

    def proximal_mu(self) -> float:
        return self.lam

    def edit_gradient(self, grads: Tensors, carry: Tree, local: Local) -> Tensors:
        """∇CE(w + ε) + λ h_k; the engine adds λ (w - w^{t-1})."""
        return {k: g + self.lam * carry["h"][k] for k, g in grads.items()}

    def client_final(self, params: Tensors, carry: Tree, client: Client) -> tuple[Tree, Tree]:
        """Keep h_k + w_k - w^{t-1}."""
        h = {k: carry["h"][k] + params[k] - w for k, w in client.global_params.items()}
        return {"clients": client.context.scalar(1)}, {"h": h}

    def client_weight(self, client: Client) -> float:
        return 1.0

    def aggregate(
        self, server: Server, mean: Tensors, sums: Tree, context: RunContext
    ) -> tuple[Tensors, Tree]:
        """w^t = mean + h."""
        share = sums["clients"] / context.num_clients
        h = {k: v + share * (mean[k] - server.params[k]) for k, v in server.state["h"].items()}
        return {k: m + h[k] for k, m in mean.items()}, {"h": h}
