"""FedRep: one body for all, a head for each."""

from dataclasses import dataclass
from typing import ClassVar, Self

from holdfast.core.errors import HoldfastError
from holdfast.methods.base import Method, Tensors, Tree
from holdfast.methods.context import Client, Task


@dataclass(frozen=True)
class FedRep(Method):
    """Shared representation, personal classifiers.

    Of a round's E local epochs, the first E - E_φ train the client's own head on the received body, and the
    last E_φ train the body φ with the head at rest. Only φ is sent; its n_k-weighted mean is the next
    round's. A client's first head is the run's initial one.
    Collins et al., ICML 2021: 10 + 1 epochs on CIFAR-10 with 2 classes a client. The global model that is
    tested has the mean of the participants' heads.
    """

    name: ClassVar[str] = "fedrep"

    body_epochs: int = 1  # E_φ

    def check(self) -> None:
        """There must be something to share."""
        self.require(body_epochs=(self.body_epochs >= 1, "at least 1"))

    def prepare(self, task: Task) -> Self:
        """Both phases need an epoch."""
        if task.epochs <= self.body_epochs:
            raise HoldfastError(
                f"fedrep trains the head in the epochs before the last {self.body_epochs}, and epochs is "
                f"{task.epochs}; it must be at least {self.body_epochs + 1}"
            )
        return self

    def init_client(self, client: Client) -> Tree:
        """The initial head."""
        network = client.task.network
        return {"head": {name: network.params[name] for name in network.head.names}}

    def start(self, params: Tensors, payload: Tree, state: Tree, client: Client) -> Tensors:
        """The received body under the client's own head."""
        head: Tensors = state["head"]
        return params | head

    def rate(self, name: str, epoch: int, lr: float, task: Task) -> float:
        """The head's epochs come first, then the body's."""
        heads_turn = epoch < task.epochs - self.body_epochs
        return lr if (name in task.network.head.names) == heads_turn else 0.0

    def finish(self, params: Tensors, carry: Tree, client: Client) -> tuple[Tree, Tree]:
        """Remember the head."""
        return {}, {"head": {name: params[name] for name in client.task.network.head.names}}

    def travels(self, name: str, task: Task) -> bool:
        """The body alone."""
        return name not in task.network.head.names
