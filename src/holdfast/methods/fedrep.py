"""FedRep: a shared body and a personal head for each client."""

from dataclasses import dataclass
from typing import ClassVar, Self

from holdfast.core.errors import HoldfastError
from holdfast.core.spec import PositiveCount
from holdfast.methods.base import Method, Server, Tensors, Tree
from holdfast.methods.card import Card
from holdfast.methods.context import Client, RunContext


@dataclass(frozen=True)
class FedRep(Method):
    """Shared representation, personal classifiers.

    Of a round's E local epochs, the first E - E_φ train the client's own head on the received body, and the
    last E_φ train the body φ with the head frozen. Only φ is sent; its n_k-weighted mean is the next
    round's body. A client's first head is the run's initial one.
    Collins et al., ICML 2021: 10 + 1 epochs on CIFAR-10 with 2 classes for each client. The tested global
    model has the mean of the participants' heads.
    """

    name: ClassVar[str] = "fedrep"
    card: ClassVar[Card] = Card(
        when="every client has few classes and needs a model only for these",
    )
    needs_features: ClassVar[bool] = True

    body_epochs: PositiveCount = 1  # E_φ: epochs that train the body

    def prepare(self, context: RunContext) -> Self:
        """Raises unless each phase has at least one epoch."""
        if context.whole_epochs(self.name) <= self.body_epochs:
            raise HoldfastError(
                f"fedrep trains the head before the last {self.body_epochs} of the local epochs; local_epochs is "
                f"{context.local_epochs} and must be at least {self.body_epochs + 1}"
            )
        return self

    def init_client_state(self, client: Client) -> Tree:
        network = client.context.network
        return {"head": {name: network.params[name] for name in network.head.names}}

    def initial_params(self, params: Tensors, payload: Tree, state: Tree, client: Client) -> Tensors:
        """The received body with the client's own head."""
        head: Tensors = state["head"]
        return params | head

    def learning_rate(self, name: str, epoch: int, lr: float, context: RunContext) -> float:
        """0 for the body in the first E - E_φ epochs and for the head in the others."""
        trains_head = epoch < context.local_epochs - self.body_epochs
        return lr if (name in context.network.head.names) == trains_head else 0.0

    def client_final(self, params: Tensors, carry: Tree, client: Client) -> tuple[Tree, Tree]:
        return {}, {"head": {name: params[name] for name in client.context.network.head.names}}

    def personal_params(self, server: Server, state: Tree, client: int) -> Tensors:
        """The body with the client's own head."""
        head: Tensors = state["head"]
        return server.params | head

    def is_shared(self, name: str, context: RunContext) -> bool:
        """Whether it belongs to the body."""
        return name not in context.network.head.names
