"""Ditto: every client trains a personal model with a proximal term towards the global one."""

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from holdfast.core.errors import HoldfastError
from holdfast.core.spec import NonNegative, PositiveCount
from holdfast.methods.base import Local, Method, Server, Tensors, Tree
from holdfast.methods.card import Card
from holdfast.methods.context import Client, RunContext


@dataclass(frozen=True)
class Ditto(Method):
    """A global model and personal models v_k with a proximal term between them.

    Of a round's E local epochs, the first E - E_v train the global model, as FedAvg does, and the last E_v the client's
    own v_k, which starts at the run's initial model:  CE(v_k) + (λ/2) ‖v_k - w^{t-1}‖². v_k is not sent; it is the
    client's model in tests. The optimiser is reset for v_k.  Server: as FedAvg.
    Li et al., ICML 2021, Algorithm 1; the paper tunes λ; λ = 1 and E_v = 1 are FL-bench's. BatchNorm's statistics are
    those after the training of v_k.
    """

    name: ClassVar[str] = "ditto"
    card: ClassVar[Card] = Card(
        when="every client needs a personal model as well as a global one, and can keep it",
    )

    lam: NonNegative = 1.0  # λ: strength of the proximal term
    personal_epochs: PositiveCount = 1  # E_v: epochs that train the personal model

    def prepare(self, context: RunContext) -> Self:
        """Raises unless each model has at least one epoch."""
        if context.whole_epochs(self.name) <= self.personal_epochs:
            raise HoldfastError(
                f"ditto trains the global model before the last {self.personal_epochs} of the local epochs; "
                f"local_epochs is {context.local_epochs} and must be at least {self.personal_epochs + 1}"
            )
        return self

    def init_client_state(self, client: Client) -> Tree:
        return {"personal": client.context.network.params}

    def client_init(self, payload: Tree, state: Tree, client: Client) -> Tree:
        """The inactive model, the epochs until it becomes active, and whether v_k is active."""
        context = client.context
        epochs = client.local_epochs - self.personal_epochs
        return {"other": state["personal"], "epochs": context.scalar(epochs), "personal": context.scalar(0)}

    def edit_gradient(self, grads: Tensors, carry: Tree, local: Local) -> Tensors:
        """g + λ (v - w^{t-1}) while v_k is trained."""
        strength: Tensor = self.lam * carry["personal"]
        return {k: g + strength * (local.params[k] - local.global_params[k]) for k, g in grads.items()}

    def after_epoch(self, params: Tensors, carry: Tree) -> tuple[Tensors, Tree]:
        """Exchange the two models after the last epoch of the global one."""
        epochs, other = carry["epochs"] - 1, carry["other"]
        exchange = epochs == 0
        return {k: torch.where(exchange, other[k], p) for k, p in params.items()}, {
            "other": {k: torch.where(exchange, p, other[k]) for k, p in params.items()},
            "epochs": epochs,
            "personal": torch.where(exchange, torch.ones_like(epochs), carry["personal"]),
        }

    def resets_optimizer(self, epoch: int, context: RunContext) -> bool:
        """Where the models are exchanged."""
        return epoch + 1 == context.whole_epochs(self.name) - self.personal_epochs

    def upload_params(self, params: Tensors, carry: Tree, client: Client) -> Tensors:
        """The client's trained global model."""
        other: Tensors = carry["other"]
        return other

    def client_final(self, params: Tensors, carry: Tree, client: Client) -> tuple[Tree, Tree]:
        return {}, {"personal": params}

    def personal_params(self, server: Server, state: Tree, client: int) -> Tensors:
        """v_k."""
        own: Tensors = state["personal"]
        return own
