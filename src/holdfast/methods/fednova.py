"""FedNova: averaging of normalised updates, for clients that take different numbers of steps."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from holdfast.core.spec import NonNegative
from holdfast.methods.base import Local, Method, Server, Tensors, Tree
from holdfast.methods.card import Card
from holdfast.methods.context import Client, RunContext
from holdfast.methods.functional import momentum_steps


@dataclass(frozen=True)
class FedNova(Method):
    """Normalised averaging: client updates are divided by their effective number of steps.

    a_k: the distance of τ_k local steps with a constant gradient, in units of one step (τ_k without momentum);
    d_k = (w^{t-1} - w_k) / a_k;  p_k = n_k / Σ n.
    Server: w^t = w^{t-1} - (Σ p_k a_k) Σ p_k d_k.  BatchNorm's statistics: the weighted mean.
    Wang et al., NeurIPS 2020. ``mu`` adds their proximal term (μ/2)‖w - w^{t-1}‖² to the local objective and
    accounts for it in a_k.

    ``variant="ntd"`` repeats FedNTD's baseline: from a client's second participation on, its last d_k / η is
    subtracted from each of its gradients. (In that code the federation's counterpart stays 0, so it is not the
    intended control variate.)
    """

    name: ClassVar[str] = "fednova"
    card: ClassVar[Card] = Card(
        when="clients take very different numbers of local steps",
        uploads="a_k, and so its number of local steps",
    )
    assumes_sgd: ClassVar[str] = "a_k is the distance that SGD's steps cover with a constant gradient"

    mu: NonNegative = 0.0  # μ: weight of the proximal term
    variant: Literal["original", "ntd"] = "original"

    def init_client_state(self, client: Client) -> Tree:
        """The last d_k / η in the ntd variant."""
        if self.variant == "original":
            return {}
        return {"direction": {k: torch.zeros_like(p) for k, p in client.global_params.items()}}

    def client_init(self, payload: Tree, state: Tree, client: Client) -> Tree:
        return state

    def edit_gradient(self, grads: Tensors, carry: Tree, local: Local) -> Tensors:
        """g + μ (w - w^{t-1}), minus the last d_k / η in the ntd variant."""
        if self.mu:
            grads = {k: g + self.mu * (local.params[k] - local.global_params[k]) for k, g in grads.items()}
        if self.variant == "ntd":
            grads = {k: g - carry["direction"][k] for k, g in grads.items()}
        return grads

    def distance(self, client: Client) -> float:
        """a_k: the distance of the client's steps if each has gradient 1."""
        momentum = client.context.momentum
        if not self.mu:
            return momentum_steps(client.steps, momentum)
        velocity = distance = 0.0
        for _ in range(client.steps):
            velocity = momentum * velocity + 1 - client.lr * self.mu * distance
            distance += velocity
        return distance

    def upload_params(self, params: Tensors, carry: Tree, client: Client) -> Tensors:
        """w^{t-1} - d_k."""
        a = self.distance(client)
        return {k: w - (w - params[k]) / a for k, w in client.global_params.items()}

    def client_final(self, params: Tensors, carry: Tree, client: Client) -> tuple[Tree, Tree]:
        """n_k a_k and n_k; the ntd variant keeps d_k / η."""
        a, n = self.distance(client), client.context.scalar(client.samples)
        sums = {"distance": n * a, "samples": n}
        if self.variant == "original":
            return sums, {}
        scale = a * client.lr
        return sums, {"direction": {k: (w - params[k]) / scale for k, w in client.global_params.items()}}

    def aggregate(
        self, server: Server, mean: Tensors, sums: Tree, context: RunContext
    ) -> tuple[Tensors, Tree]:
        """w^t = w^{t-1} - (Σ p_k a_k) Σ p_k d_k."""
        mean_distance = float(sums["distance"] / sums["samples"])
        return {k: w - mean_distance * (w - mean[k]) for k, w in server.params.items()}, server.state
