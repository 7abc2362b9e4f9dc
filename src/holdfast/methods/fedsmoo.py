"""FedSMOO: sharpness-aware minimisation with dynamic regularisation of weights and perturbations."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from holdfast.methods.base import Local, Server, Tensors, Tree
from holdfast.methods.card import Card
from holdfast.methods.context import Client, RunContext
from holdfast.methods.fedspeed import FedSpeed
from holdfast.methods.functional import ascend, norm


@dataclass(frozen=True)
class FedSMOO(FedSpeed):
    """FedSpeed with consistent perturbations: a dual variable μ_k per client and a global perturbation s.

    Each step: ε = ρ d / ‖d‖ with d = ∇CE(w) - μ_k - s;  μ_k ← μ_k + ε - s;  the gradient is
    ∇CE(w + ε) + λ (w - w^{t-1} + h_k). Afterwards h_k ← h_k + w_k - w^{t-1}; μ_k is kept and sent.
    Server: s = ρ m / ‖m‖ with m the mean of the participants' μ_k;  h and w^t as in FedSpeed.
    Sun et al., ICML 2023, as in the authors' code, which excludes the last ε from m; ρ = λ = 0.1. It clips gradients:
    train with ``max_grad_norm=10``.
    """

    name: ClassVar[str] = "fedsmoo"
    card: ClassVar[Card] = Card(
        when="label skew is strong, clients can keep two models, take part again and again, and have time for twice "
        "the work",
        client="two gradients in each step",
        server="keeps a correction and a perturbation of the model's size",
        uploads="the dual variable of its perturbations, a sum of normalised gradients",
    )

    def init_server_state(self, context: RunContext) -> Tree:
        """h = s = 0."""
        zeros = {k: torch.zeros_like(p) for k, p in context.network.params.items()}
        return super().init_server_state(context) | {"s": zeros}

    def broadcast(self, server: Server) -> Tree:
        return {"s": server.state["s"]}

    def init_client_state(self, client: Client) -> Tree:
        """h_k = μ_k = 0."""
        zeros = {k: torch.zeros_like(p) for k, p in client.global_params.items()}
        return super().init_client_state(client) | {"mu": zeros}

    def client_init(self, payload: Tree, state: Tree, client: Client) -> Tree:
        return {"h": state["h"], "mu": state["mu"], "s": payload["s"]}

    def perturb(self, grads: Tensors, carry: Tree, local: Local) -> tuple[Tensors, Tree]:
        """w + ε, and μ_k + ε - s."""
        mu, s = carry["mu"], carry["s"]
        point = ascend(local.params, {k: g - mu[k] - s[k] for k, g in grads.items()}, self.rho)
        return point, carry | {"mu": {k: mu[k] + (p - local.params[k]) - s[k] for k, p in point.items()}}

    def client_final(self, params: Tensors, carry: Tree, client: Client) -> tuple[Tree, Tree]:
        """Send and keep μ_k; keep h_k + w_k - w^{t-1}."""
        sums, state = super().client_final(params, carry, client)
        return sums | {"mu": carry["mu"]}, state | {"mu": carry["mu"]}

    def aggregate(
        self, server: Server, mean: Tensors, sums: Tree, context: RunContext
    ) -> tuple[Tensors, Tree]:
        """w^t = mean + h, and the new s."""
        params, state = super().aggregate(server, mean, sums, context)
        scale = self.rho / (norm(sums["mu"]) + 1e-12)
        return params, state | {"s": {k: scale * mu for k, mu in sums["mu"].items()}}
