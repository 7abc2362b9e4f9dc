"""SCAFFOLD: control variates that correct the drift of each client's gradients."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from holdfast.methods.base import Local, Method, Server, Tensors, Tree, Upload
from holdfast.methods.card import Card
from holdfast.methods.context import Client, RunContext
from holdfast.methods.functional import divide, momentum_steps, subtract


@dataclass(frozen=True)
class Scaffold(Method):
    """Control variates: c for the federation, c_k for each client.

    Local: each step's gradient is g - c_k + c.
    After K steps: c_k⁺ = c_k - c + (w^{t-1} - w_k) / (K η)   (option II).
    Server: w^t = mean;  c += Σ_k (c_k⁺ - c_k) / N.
    Karimireddy et al., ICML 2020.

    ``variant="ntd"`` divides by the momentum-corrected number of steps K_eff instead of K, as FedNTD's code does
    for its Table 1: K_eff = [K - ρ(1 - ρ^K)/(1 - ρ)] / (1 - ρ), ρ the momentum. ``variant="weighted"`` weights the
    clients in c as in the mean, c += Σ_k (n_k/n) (c_k⁺ - c_k), as FLamby's code does.
    """

    name: ClassVar[str] = "scaffold"
    card: ClassVar[Card] = Card(
        when="clients participate often and can keep state, and label skew makes their gradients differ",
        server="keeps a control variate of the model's size",
        uploads="the change of its control variate, which approximates its mean gradient",
    )
    assumes_sgd: ClassVar[str] = (
        "a control variate is the change of the weights divided by the number of steps and the learning rate"
    )

    variant: Literal["original", "ntd", "weighted"] = "original"

    def init_server_state(self, context: RunContext) -> Tree:
        return {"c": {k: torch.zeros_like(p) for k, p in context.network.params.items()}}

    def broadcast(self, server: Server) -> Tree:
        return {"c": server.state["c"]}

    def init_client_state(self, client: Client) -> Tree:
        return {"c_k": {k: torch.zeros_like(p) for k, p in client.global_params.items()}}

    def client_init(self, payload: Tree, state: Tree, client: Client) -> Tree:
        """The correction of every gradient of this round, c - c_k, and c_k itself."""
        c_k = state["c_k"]
        return {"correction": subtract(payload["c"], c_k), "c_k": c_k}

    def edit_gradient(self, grads: Tensors, carry: Tree, local: Local) -> Tensors:
        """g - c_k + c."""
        return {k: g + carry["correction"][k] for k, g in grads.items()}

    def client_final(self, params: Tensors, carry: Tree, client: Client) -> tuple[Tree, Tree]:
        """Send c_k⁺ - c_k and keep c_k⁺."""
        steps = float(client.steps)
        if self.variant == "ntd":
            steps = momentum_steps(steps, client.context.momentum)
        # c_k⁺ = (w^{t-1} - w_k) / (K η) - (c - c_k)
        new = subtract(divide(subtract(client.global_params, params), steps * client.lr), carry["correction"])
        change = subtract(new, carry["c_k"])
        if self.variant == "weighted":
            change = {k: client.samples * value for k, value in change.items()}
        return {"change": change}, {"c_k": new}

    def update(self, server: Server, sums: Tree, uploads: Sequence[Upload], context: RunContext) -> Tree:
        """c + Σ_k (c_k⁺ - c_k) / N."""
        change, whole = sums["change"], float(context.num_clients)
        if self.variant == "weighted":
            whole = float(context.class_counts.sum())
        return {"c": {k: c + change[k] / whole for k, c in server.state["c"].items()}}
