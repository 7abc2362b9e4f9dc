"""FedProto: exchange class prototypes, not weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from holdfast.core.spec import NonNegative
from holdfast.methods.base import Batch, Local, Method, Server, Tensors, Tree, Upload
from holdfast.methods.card import CLASS_MEANS, Card
from holdfast.methods.context import Client, RunContext
from holdfast.methods.functional import nearness
from holdfast.models.network import Output


@dataclass(frozen=True)
class FedProto(Method):
    """Each client trains a model of its own towards the federation's class prototypes.

    Local: CE + λ MSE(h, p_y), the mean over dimensions and batch; a sample whose class has no prototype adds
    nothing, so round 1 is CE alone.
    Up: the client's class means of h, collected in the last epoch, as training saw them.
    Server: p_c = unweighted mean over the participants that hold c; a class that none holds keeps its p_c.
    Tan et al., AAAI 2022. λ = 1 on MNIST and FEMNIST, 0.1 on CIFAR-10.
    A client predicts the nearest of its own prototypes, on a stream those of earlier tasks too. There is no global
    model; what is tested as such is the unweighted mean of the clients' models with the nearest global prototype.
    """

    name: ClassVar[str] = "fedproto"
    card: ClassVar[Card] = Card(
        when="weights must not travel, or models are personal; there is hardly a global model",
        uploads=CLASS_MEANS,
    )

    lam: NonNegative = 1.0  # λ: strength of the pull to the prototypes

    def init_server_state(self, context: RunContext) -> Tree:
        """No prototype yet."""
        return _nothing(context)

    def broadcast(self, server: Server) -> Tree:
        """Clients receive the prototypes."""
        return server.state

    def init_client_state(self, client: Client) -> Tree:
        """Every client's model starts as the run's initial one; it knows no class yet."""
        return {"params": client.context.network.params} | _nothing(client.context)

    def initial_params(self, params: Tensors, payload: Tree, state: Tree, client: Client) -> Tensors:
        """The client's own model."""
        own: Tensors = state["params"]
        return own

    def client_init(self, payload: Tree, state: Tree, client: Client) -> Tree:
        """The global prototypes, and room for the client's own."""
        client.notes[self.name] = {"prototypes": state["prototypes"], "known": state["known"]}
        return {
            "prototypes": payload["prototypes"],
            "known": payload["known"],
            "sums": torch.zeros_like(payload["prototypes"]),
            "counts": torch.zeros_like(payload["known"]),
            "last": client.context.scalar(client.local_epochs - 1),
        }

    def loss(self, out: Output, batch: Batch, carry: Tree, local: Local) -> Tensor | None:
        """λ MSE(h, p_y)."""
        if self.lam == 0:
            return None
        distance = (out.features - carry["prototypes"][batch.y]).square().mean(-1)
        return self.lam * batch.mean(distance * carry["known"][batch.y])

    def after_step(self, params: Tensors, out: Output, batch: Batch, carry: Tree) -> tuple[Tensors, Tree]:
        """In the last epoch, collect the features of each class."""
        members = batch.members(len(carry["known"])) * (batch.epoch == carry["last"])
        sums, counts = carry["sums"] + members.T @ out.features, carry["counts"] + members.sum(0)
        return params, carry | {"sums": sums, "counts": counts}

    def client_final(self, params: Tensors, carry: Tree, client: Client) -> tuple[Tree, Tree]:
        """Send the class means over the samples that were visited; remember them and the model."""
        counts = carry["counts"]
        visited = counts > 0
        prototypes = carry["sums"] / counts.clamp(min=1).unsqueeze(-1)
        remembered = _replaced(client.notes[self.name], prototypes, visited)
        sent = {"prototypes": prototypes, "holders": visited.to(counts.dtype)}
        return sent, {"params": params, **remembered}

    def is_shared(self, name: str, context: RunContext) -> bool:
        """No weight does."""
        return False

    def client_weight(self, client: Client) -> float:
        """Clients count alike in the model that is tested."""
        return 1.0

    def update(self, server: Server, sums: Tree, uploads: Sequence[Upload], context: RunContext) -> Tree:
        """The mean over those that hold a class."""
        holders = sums["holders"]
        return _replaced(server.state, sums["prototypes"] / holders.clamp(min=1).unsqueeze(-1), holders > 0)

    def global_logits(self, out: Output, server: Server) -> Tensor:
        """The nearest global prototype; before there is any, the classifier."""
        return self.prototype_logits(out, server) if server.state["known"].any() else out.logits

    def personal_logits(self, out: Output, state: Tree) -> Tensor:
        """The nearest of the client's own prototypes."""
        return nearness(out.features, state["prototypes"], state["known"])

    def prototype_logits(self, out: Output, server: Server) -> Tensor:
        """The nearness of p_c."""
        return nearness(out.features, server.state["prototypes"], server.state["known"])


def _nothing(context: RunContext) -> Tensors:
    """No prototype of any class: zeros ``[C, d]``, and which are known, ``[C]`` of 0 and 1."""
    shape = (context.num_classes, context.network.head.features)
    zeros = torch.zeros(shape, dtype=context.dtype, device=context.device)
    return {"prototypes": zeros, "known": torch.zeros_like(context.class_counts)}


def _replaced(old: Tensors, prototypes: Tensor, new: Tensor) -> Tensors:
    """New prototypes of some classes (bool ``[C]``), the old ones of the others."""
    return {
        "prototypes": torch.where(new.unsqueeze(-1), prototypes, old["prototypes"]),
        "known": torch.where(new, torch.ones_like(old["known"]), old["known"]),
    }
