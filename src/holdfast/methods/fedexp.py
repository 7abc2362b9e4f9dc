"""FedExP: a server step that is extrapolated according to the disagreement of the clients' updates."""

from dataclasses import dataclass
from typing import ClassVar

from holdfast.core.spec import NonNegative
from holdfast.methods.base import Method, Server, Tensors, Tree
from holdfast.methods.card import Card
from holdfast.methods.context import Client, RunContext
from holdfast.methods.functional import norm, subtract


@dataclass(frozen=True)
class FedExP(Method):
    """Extrapolation of the mean update.

    Server: Δ_k = w^{t-1} - w_k, Δ = Σ_k p_k Δ_k with p_k = n_k / Σ n;
    η = max(1, Σ_k p_k ‖Δ_k‖² / (2 (‖Δ‖² + ε)));  w^t = w^{t-1} - η Δ.  Tested: (w^t + w^{t-1}) / 2, and w^1 after
    round 1.
    Jhunjhunwala et al., ICLR 2023, Eq. 6, with the weights p_k of the authors' code; ε = 0.001 is their value on CIFAR.
    (Their code multiplies ε by the number of participants and lets it decay.)
    """

    name: ClassVar[str] = "fedexp"
    card: ClassVar[Card] = Card(
        when="many clients take part in a round, and the mean of their nearly orthogonal updates makes slow progress",
        server="keeps the last global model",
        uploads="the squared length of its update",
    )

    eps: NonNegative = 1e-3  # ε: limits the extrapolation of small updates
    average: bool = True  # whether the mean of the last two models is tested; otherwise the last one

    def overrides(self, hook: str) -> bool:
        """Without ``average`` the tested model is w^t."""
        return super().overrides(hook) and (hook != "eval_params" or self.average)

    def init_server_state(self, context: RunContext) -> Tree:
        return {"before": context.network.params}

    def client_final(self, params: Tensors, carry: Tree, client: Client) -> tuple[Tree, Tree]:
        """n_k ‖Δ_k‖² and n_k."""
        n = client.context.scalar(self.client_weight(client))
        return {"squares": n * norm(subtract(params, client.global_params)).square(), "samples": n}, {}

    def aggregate(
        self, server: Server, mean: Tensors, sums: Tree, context: RunContext
    ) -> tuple[Tensors, Tree]:
        """w^{t-1} - η Δ."""
        delta = subtract(server.params, mean)
        rate = sums["squares"] / sums["samples"] / (2 * (norm(delta).square() + self.eps))
        rate = rate.clamp(min=1)
        params = {k: w - rate * delta[k] for k, w in server.params.items()}
        return params, {"before": params if server.round == 1 else server.params}

    def eval_params(self, server: Server) -> Tensors:
        """(w^t + w^{t-1}) / 2."""
        if not self.average:
            return server.params
        before = server.state["before"]
        return {k: (w + before[k]) / 2 for k, w in server.params.items()}
