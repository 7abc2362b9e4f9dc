"""FedLESAM: sharpness-aware minimisation with one gradient per step, along the last change of the global model."""

from dataclasses import dataclass
from typing import ClassVar

from holdfast.core.spec import NonNegative
from holdfast.methods.base import Local, Method, Tensors, Tree
from holdfast.methods.card import Card
from holdfast.methods.context import Client
from holdfast.methods.functional import ascend, subtract


@dataclass(frozen=True)
class FedLESAM(Method):
    """Locally estimated global perturbation.

    ε = ρ (w_old - w^{t-1}) / ‖w_old - w^{t-1}‖, constant during the round, with w_old the global model that the client
    received when it last took part; 0 at its first participation. Each step's gradient is ∇L(w + ε).
    Server: as FedAvg.
    Fan et al., ICML 2024. In the authors' code w_old is the model of the round before for all clients, and the norm a
    sum of the tensors' norms; here both are the paper's. ρ = 0.1 is the code's default; they tune it.
    """

    name: ClassVar[str] = "fedlesam"
    card: ClassVar[Card] = Card(
        when="sharpness-aware minimisation is wanted without a second gradient, and clients can keep a model",
    )
    ascends: ClassVar[bool] = False

    rho: NonNegative = 0.1  # ρ: length of the perturbation

    def init_client_state(self, client: Client) -> Tree:
        """w_old = w^{t-1}, so that ε = 0."""
        return {"received": client.global_params}

    def client_init(self, payload: Tree, state: Tree, client: Client) -> Tree:
        """w_old - w^{t-1}."""
        return {"direction": subtract(state["received"], client.global_params)}

    def perturb(self, grads: Tensors, carry: Tree, local: Local) -> tuple[Tensors, Tree]:
        """w + ε."""
        return ascend(local.params, carry["direction"], self.rho), carry

    def client_final(self, params: Tensors, carry: Tree, client: Client) -> tuple[Tree, Tree]:
        return {}, {"received": client.global_params}
