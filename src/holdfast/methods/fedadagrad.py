"""FedAdagrad: Adagrad on the server."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from holdfast.core.spec import Momentum, Positive
from holdfast.methods.base import Method, Server, Tensors, Tree
from holdfast.methods.card import Card
from holdfast.methods.context import RunContext


@dataclass(frozen=True)
class FedAdagrad(Method):
    """Adaptive federated optimisation with Adagrad.

    Server: Δ = mean - w^{t-1};  m ← β₁ m + (1-β₁) Δ;  v ← v + Δ²;  w^t = w^{t-1} + η m / (√v + τ), from m = 0 and
    v = τ².
    Reddi et al., ICLR 2021, Algorithm 2. β₁ = 0, with which m = Δ, and τ are theirs; they tune η for every data set.
    """

    name: ClassVar[str] = "fedadagrad"
    card: ClassVar[Card] = Card(
        when="as fedadam, if steps should become smaller over the rounds; η must be tuned",
        server="keeps a moment of the model's size",
    )

    lr: Positive = 0.01  # η: the server's learning rate
    beta1: Momentum = 0.0  # β₁: decay of the first moment, which is not kept with 0
    tau: Positive = 1e-3  # τ: adaptivity; added to the root of the second moment

    def init_server_state(self, context: RunContext) -> Tree:
        """m = 0, v = τ²."""
        params = context.network.params
        first = {"first": {k: torch.zeros_like(p) for k, p in params.items()}} if self.beta1 else {}
        return first | {"second": {k: torch.full_like(p, self.tau**2) for k, p in params.items()}}

    def aggregate(
        self, server: Server, mean: Tensors, sums: Tree, context: RunContext
    ) -> tuple[Tensors, Tree]:
        delta = {k: mean[k] - w for k, w in server.params.items()}
        second = {k: v + delta[k].square() for k, v in server.state["second"].items()}
        step, state = delta, {}
        if self.beta1:
            former = server.state["first"]
            step = {k: self.beta1 * former[k] + (1 - self.beta1) * d for k, d in delta.items()}
            state = {"first": step}
        params = {k: w + self.lr * step[k] / (second[k].sqrt() + self.tau) for k, w in server.params.items()}
        return params, state | {"second": second}
