"""FedProto: exchange class prototypes, not weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from holdfast.methods.base import Batch, Local, Method, Server, Tensors, Tree, Upload
from holdfast.methods.context import Client, Task
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

    lam: float = 1.0  # λ: strength of the pull to the prototypes

    def check(self) -> None:
        """λ is a strength."""
        self.require(lam=(self.lam >= 0, "at least 0"))

    def init(self, task: Task) -> Tree:
        """No prototype yet."""
        return _nothing(task)

    def down(self, server: Server) -> Tree:
        """Clients receive the prototypes."""
        return server.state

    def init_client(self, client: Client) -> Tree:
        """Every client's model starts as the run's initial one; it knows no class yet."""
        return {"params": client.task.network.params} | _nothing(client.task)

    def start(self, params: Tensors, payload: Tree, state: Tree, client: Client) -> Tensors:
        """The client's own model."""
        own: Tensors = state["params"]
        return own

    def begin(self, payload: Tree, state: Tree, client: Client) -> Tree:
        """The global prototypes, and room for the client's own."""
        client.notes[self.name] = {"prototypes": state["prototypes"], "known": state["known"]}
        return {
            "prototypes": payload["prototypes"],
            "known": payload["known"],
            "sums": torch.zeros_like(payload["prototypes"]),
            "counts": torch.zeros_like(payload["known"]),
            "last": client.task.scalar(client.epochs - 1),
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

    def finish(self, params: Tensors, carry: Tree, client: Client) -> tuple[Tree, Tree]:
        """Send the class means over the samples that were visited; remember them and the model."""
        counts = carry["counts"]
        visited = counts > 0
        prototypes = carry["sums"] / counts.clamp(min=1).unsqueeze(-1)
        remembered = _replaced(client.notes[self.name], prototypes, visited)
        sent = {"prototypes": prototypes, "holders": visited.to(counts.dtype)}
        return sent, {"params": params, **remembered}

    def travels(self, name: str, task: Task) -> bool:
        """No weight does."""
        return False

    def client_weight(self, client: Client) -> float:
        """Clients count alike in the model that is tested."""
        return 1.0

    def update(self, server: Server, sums: Tree, uploads: Sequence[Upload], task: Task) -> Tree:
        """The mean over those that hold a class."""
        holders = sums["holders"]
        return _replaced(server.state, sums["prototypes"] / holders.clamp(min=1).unsqueeze(-1), holders > 0)

    def predict(self, out: Output, server: Server) -> Tensor:
        """The nearest global prototype; before there is any, the classifier."""
        return self.by_prototype(out, server) if server.state["known"].any() else out.logits

    def personal(self, out: Output, state: Tree) -> Tensor:
        """The nearest of the client's own prototypes."""
        return nearness(out.features, state["prototypes"], state["known"])

    def by_prototype(self, out: Output, server: Server) -> Tensor:
        """The nearness of p_c."""
        return nearness(out.features, server.state["prototypes"], server.state["known"])


def _nothing(task: Task) -> Tensors:
    """No prototype of any class: zeros ``[C, d]``, and which are known, ``[C]`` of 0 and 1."""
    shape = (task.num_classes, task.network.head.features)
    zeros = torch.zeros(shape, dtype=task.dtype, device=task.device)
    return {"prototypes": zeros, "known": torch.zeros_like(task.class_counts)}


def _replaced(old: Tensors, prototypes: Tensor, new: Tensor) -> Tensors:
    """New prototypes of some classes (bool ``[C]``), the old ones of the others."""
    return {
        "prototypes": torch.where(new.unsqueeze(-1), prototypes, old["prototypes"]),
        "known": torch.where(new, torch.ones_like(old["known"]), old["known"]),
    }
