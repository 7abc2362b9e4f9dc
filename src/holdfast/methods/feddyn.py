"""FedDyn: dynamic regularisation, which makes local optima consistent with the global one."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from holdfast.core.spec import Positive
from holdfast.methods.base import Local, Method, Server, Tensors, Tree
from holdfast.methods.card import Card
from holdfast.methods.context import Client, RunContext


@dataclass(frozen=True)
class FedDyn(Method):
    """Dynamic regularisation.

    Local: CE - ⟨g_k, w⟩ + (α/2)‖w - w^{t-1}‖²;  afterwards g_k ← g_k - α (w_k - w^{t-1}).
    Server: h ← h - (α/N) Σ_k (w_k - w^{t-1}) with N the number of all clients;  w^t = mean_k w_k - h/α, where the
    mean is unweighted.
    Acar et al., ICLR 2021; α = 0.01 in the paper, 0.1 in FedNTD's and FedFA's.

    ``variant``:
      ``official``  as in the authors' code: α_k = α Σn / (N n_k) on the clients, and the tested model is the
                    mean of the w_k, not w^t. (It also clips gradients: train with ``max_grad_norm=10``.)
      ``ntd``       FedNTD's baseline: clients weighted by n_k.
      ``fa``        FedFA's baseline: CE + α_k ⟨w, w_k^{prev} - w^{t-1}⟩ with w_k^{prev} the client's last
                    trained model, no quadratic term, and the server as in FedAvg.
    """

    name: ClassVar[str] = "feddyn"
    card: ClassVar[Card] = Card(
        when="clients can keep state, and accuracy after few rounds is more important than stability over many",
        server="keeps a linear term of the model's size",
    )

    alpha: Positive = 0.01  # α: strength of the regularisation
    variant: Literal["original", "official", "ntd", "fa"] = "original"

    def overrides(self, hook: str) -> bool:
        """Only the official variant tests another model than w^t."""
        return super().overrides(hook) and (hook != "eval_params" or self.variant == "official")

    def init_server_state(self, context: RunContext) -> Tree:
        """h = 0; the official variant also keeps the tested mean."""
        if self.variant == "fa":
            return {}
        state: Tree = {"h": {k: torch.zeros_like(p) for k, p in context.network.params.items()}}
        return state | ({"mean": context.network.params} if self.variant == "official" else {})

    def init_client_state(self, client: Client) -> Tree:
        """g_k = 0; in the fa variant w_k^{prev} = w^{t-1}, so the linear term starts at 0."""
        if self.variant == "fa":
            return {"previous": client.global_params}
        return {"g": {k: torch.zeros_like(p) for k, p in client.global_params.items()}}

    def client_alpha(self, client: Client) -> float:
        """α, or α_k, which is larger for small clients."""
        if self.variant in ("original", "ntd"):
            return self.alpha
        context = client.context
        return self.alpha * float(context.class_counts.sum()) / (context.num_clients * client.samples)

    def client_init(self, payload: Tree, state: Tree, client: Client) -> Tree:
        """The gradient of the linear term, constant during the round, and α_k."""
        alpha = self.client_alpha(client)
        if self.variant == "fa":
            return {
                "linear": {k: alpha * (p - client.global_params[k]) for k, p in state["previous"].items()}
            }
        return {"linear": {k: -g for k, g in state["g"].items()}, "alpha": client.context.scalar(alpha)}

    def edit_gradient(self, grads: Tensors, carry: Tree, local: Local) -> Tensors:
        """-g_k + α (w - w^{t-1})."""
        linear = carry["linear"]
        if self.variant == "fa":
            return {k: g + linear[k] for k, g in grads.items()}
        alpha = carry["alpha"]
        return {
            k: g + linear[k] + alpha * (local.params[k] - local.global_params[k]) for k, g in grads.items()
        }

    def client_final(self, params: Tensors, carry: Tree, client: Client) -> tuple[Tree, Tree]:
        """Updates g_k; the ntd variant, whose mean is weighted, also sends w_k - w^{t-1} for the plain sum in h."""
        if self.variant == "fa":
            return {}, {"previous": params}
        moved = {k: params[k] - w for k, w in client.global_params.items()}
        alpha = self.client_alpha(client)
        sums: Tree = {"moved": moved} if self.variant == "ntd" else {"clients": client.context.scalar(1)}
        return sums, {"g": {k: -linear - alpha * moved[k] for k, linear in carry["linear"].items()}}

    def client_weight(self, client: Client) -> float:
        """1, or n_k in the baselines of other papers."""
        return 1.0 if self.variant in ("original", "official") else float(client.samples)

    def aggregate(
        self, server: Server, mean: Tensors, sums: Tree, context: RunContext
    ) -> tuple[Tensors, Tree]:
        """w^t = mean - h/α."""
        if self.variant == "fa":
            return mean, server.state
        if self.variant == "ntd":
            moved = sums["moved"]
        else:
            moved = {k: sums["clients"] * (m - server.params[k]) for k, m in mean.items()}
        share = self.alpha / context.num_clients
        h = {k: v - share * moved[k] for k, v in server.state["h"].items()}
        state: Tree = {"h": h} | ({"mean": mean} if self.variant == "official" else {})
        return {k: m - h[k] / self.alpha for k, m in mean.items()}, state

    def eval_params(self, server: Server) -> Tensors:
        """w^t, or the mean of the clients' models in the official variant."""
        tested: Tensors = server.state["mean"] if self.variant == "official" else server.params
        return tested
