"""Local training without communication."""

from dataclasses import dataclass
from typing import ClassVar

from holdfast.methods.base import Method, Server, Tensors, Tree
from holdfast.methods.card import Card
from holdfast.methods.context import Client, RunContext


@dataclass(frozen=True)
class LocalTraining(Method):
    """Every client trains its own model on its own data, without communication.

    It continues with its model from its last round; the first one is the run's initial model. The clients' models are
    tested as local models. There is no global model: in its place, the n_k-weighted mean of the clients' models is
    tested.
    """

    name: ClassVar[str] = "local"
    card: ClassVar[Card] = Card(when="as a baseline: the accuracy of each client without the others")

    def init_client_state(self, client: Client) -> Tree:
        """The run's initial model."""
        return {"params": client.context.network.params}

    def initial_params(self, params: Tensors, payload: Tree, state: Tree, client: Client) -> Tensors:
        own: Tensors = state["params"]
        return own

    def client_final(self, params: Tensors, carry: Tree, client: Client) -> tuple[Tree, Tree]:
        return {}, {"params": params}

    def personal_params(self, server: Server, state: Tree, client: int) -> Tensors:
        own: Tensors = state["params"]
        return own

    def is_shared(self, name: str, context: RunContext) -> bool:
        return False
