"""FedProto: exchange of class prototypes instead of weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from holdfast.core.spec import NonNegative
from holdfast.methods.base import Batch, Local, Method, Server, Tensors, Tree, Upload
from holdfast.methods.card import CLASS_MEANS, Card
from holdfast.methods.context import Client, RunContext
from holdfast.methods.functional import prototype_scores
from holdfast.models.network import Output


@dataclass(frozen=True)
class FedProto(Method):
    """Each client trains its own model, with features regularised towards the federation's class prototypes.

    Local: CE + λ MSE(h, p_y), the mean over dimensions and batch; the term is 0 for a sample whose
    class has no prototype, so round 1 is CE alone.
    Upload: the client's class means of h, collected during training in the last epoch.
    Server: p_c = unweighted mean over the participants with class c; if there are none, p_c is unchanged.
    Tan et al., AAAI 2022. λ = 1 on MNIST and FEMNIST, 0.1 on CIFAR-10.
    A client predicts the class of the nearest of its own prototypes, on a stream including those of earlier tasks.
    There is no global model; in its place, the unweighted mean of the clients' models is tested, with the nearest
    global prototype.
    """

    name: ClassVar[str] = "fedproto"
    card: ClassVar[Card] = Card(
        when="weights must not be exchanged, or models are personal; the global model is weak",
        uploads=CLASS_MEANS,
    )
    needs_classes: ClassVar[bool] = True
    needs_features: ClassVar[bool] = True

    lam: NonNegative = 1.0  # λ: weight of the prototype term

    def init_server_state(self, context: RunContext) -> Tree:
        return _nothing(context)

    def broadcast(self, server: Server) -> Tree:
        return server.state

    def init_client_state(self, client: Client) -> Tree:
        """The run's initial model, and no prototypes."""
        return {"params": client.context.network.params} | _nothing(client.context)

    def initial_params(self, params: Tensors, payload: Tree, state: Tree, client: Client) -> Tensors:
        own: Tensors = state["params"]
        return own

    def client_init(self, payload: Tree, state: Tree, client: Client) -> Tree:
        """The global prototypes, and sums and counts for the client's own."""
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
        members = batch.members(len(carry["known"]), out.features.dtype) * (batch.epoch == carry["last"])
        sums, counts = carry["sums"] + members.T @ out.features, carry["counts"] + members.sum(0)
        return params, carry | {"sums": sums, "counts": counts}

    def client_final(self, params: Tensors, carry: Tree, client: Client) -> tuple[Tree, Tree]:
        """Send the class means over the samples of the last epoch; keep them and the model."""
        counts = carry["counts"]
        visited = counts > 0
        prototypes = carry["sums"] / counts.clamp(min=1).unsqueeze(-1)
        remembered = _replace(client.notes[self.name], prototypes, visited)
        sent = {"prototypes": prototypes, "holders": visited.to(counts.dtype)}
        return sent, {"params": params, **remembered}

    def personal_params(self, server: Server, state: Tree, client: int) -> Tensors:
        own: Tensors = state["params"]
        return own

    def is_shared(self, name: str, context: RunContext) -> bool:
        return False

    def client_weight(self, client: Client) -> float:
        """1: the tested mean of the clients' models is unweighted."""
        return 1.0

    def update(self, server: Server, sums: Tree, uploads: Sequence[Upload], context: RunContext) -> Tree:
        """p_c as the mean over the participants with class c."""
        holders = sums["holders"]
        return _replace(server.state, sums["prototypes"] / holders.clamp(min=1).unsqueeze(-1), holders > 0)

    def global_logits(self, out: Output, server: Server) -> Tensor:
        """Scores by distance to the global prototypes; the classifier's before there are any."""
        return self.prototype_logits(out, server) if server.state["known"].any() else out.logits

    def personal_logits(self, out: Output, state: Tree) -> Tensor:
        """Scores by distance to the client's own prototypes."""
        return prototype_scores(out.features, state["prototypes"], state["known"])

    def prototype_logits(self, out: Output, server: Server) -> Tensor:
        """Scores by distance to p."""
        return prototype_scores(out.features, server.state["prototypes"], server.state["known"])


def _nothing(context: RunContext) -> Tensors:
    """No prototypes: zeros ``[C, d]``, and which are known, ``[C]`` of 0 and 1."""
    shape = (context.num_classes, context.network.head.features)
    zeros = torch.zeros(shape, dtype=context.dtype, device=context.device)
    return {"prototypes": zeros, "known": torch.zeros_like(context.class_counts)}


def _replace(old: Tensors, prototypes: Tensor, new: Tensor) -> Tensors:
    """New prototypes of some classes (bool ``[C]``), the old ones of the others."""
    return {
        "prototypes": torch.where(new.unsqueeze(-1), prototypes, old["prototypes"]),
        "known": torch.where(new, torch.ones_like(old["known"]), old["known"]),
    }
