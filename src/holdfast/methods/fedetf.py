"""FedETF: a fixed classifier whose class vectors are as far apart as possible, on normalised features."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn import functional as F

from holdfast.methods.base import Batch, Method, Server, Tensors, Tree, Upload
from holdfast.methods.card import Card
from holdfast.methods.context import Client, RunContext
from holdfast.methods.functional import cross_entropy
from holdfast.models.network import Output

MIN_COUNT = 1e-12  # replaces counts of 0, whose logarithm is infinite


@dataclass(frozen=True)
class FedETF(Method):
    """A synthetic and fixed classifier, the simplex equiangular tight frame (ETF).

    The model's last layer is the projection to C dimensions: with its outputs z, f = z / ‖z‖ is classified by
    s u,  u = √(C / (C-1)) (f - mean(f)), the products of f with the C vectors of the ETF, with a learnt scale s.
    Local: CE(s u + log n_k, y), the balanced softmax, with n_k the client's label counts; s takes SGD's steps with the
    round's learning rate and the run's momentum and weight decay, from 1 in round 1.
    Server: the n_k-weighted mean of the model and of s.
    Li et al., ICCV 2023, and the authors' code. Their ETF is rotated at random, which the projection can learn; without
    the rotation the largest output z is the predicted class. Their fine-tuning of personal classifiers is omitted.
    """

    name: ClassVar[str] = "fedetf"
    card: ClassVar[Card] = Card(
        when="the clients' classifiers diverge, and all classes should be treated equally",
        uploads="the learnt scale of its logits",
    )
    needs_classes: ClassVar[bool] = True

    def init_server_state(self, context: RunContext) -> Tree:
        """s = 1."""
        return {"scale": context.scalar(1)}

    def broadcast(self, server: Server) -> Tree:
        return server.state

    def client_init(self, payload: Tree, state: Tree, client: Client) -> Tree:
        """s with its velocity, log n_k, and the settings of its steps."""
        context = client.context
        return {
            "scale": payload["scale"],
            "velocity": context.scalar(0),
            "log_counts": client.label_counts.clamp(min=MIN_COUNT).log(),
            "lr": context.scalar(client.lr),
            "momentum": context.scalar(context.momentum),
            "weight_decay": context.scalar(context.weight_decay),
        }

    def task_loss(self, out: Output, batch: Batch, carry: Tree) -> Tensor:
        """CE(s u + log n_k, y)."""
        return batch.mean(cross_entropy(carry["scale"] * _products(out) + carry["log_counts"], batch.y))

    def after_step(self, params: Tensors, out: Output, batch: Batch, carry: Tree) -> tuple[Tensors, Tree]:
        """SGD's step of s."""
        u, s = _products(out), carry["scale"]
        members = batch.members(u.shape[-1])
        error = (s * u + carry["log_counts"]).softmax(-1) * members.sum(-1, keepdim=True) - members
        gradient = (error * u).sum() / members.sum().clamp(min=1) + carry["weight_decay"] * s
        velocity = carry["momentum"] * carry["velocity"] + gradient
        return params, carry | {"scale": s - carry["lr"] * velocity, "velocity": velocity}

    def client_final(self, params: Tensors, carry: Tree, client: Client) -> tuple[Tree, Tree]:
        """Send n_k s and n_k, and keep s for the client's own predictions."""
        n = client.context.scalar(self.client_weight(client))
        return {"scale": n * carry["scale"], "samples": n}, {"scale": carry["scale"]}

    def update(self, server: Server, sums: Tree, uploads: Sequence[Upload], context: RunContext) -> Tree:
        """The mean of s."""
        return {"scale": sums["scale"] / sums["samples"]}

    def global_logits(self, out: Output, server: Server) -> Tensor:
        """s u."""
        scores: Tensor = server.state["scale"] * _products(out)
        return scores

    def personal_logits(self, out: Output, state: Tree) -> Tensor:
        """s_k u."""
        scores: Tensor = state["scale"] * _products(out)
        return scores


def _products(out: Output) -> Tensor:
    """u: ``[B, C]``."""
    f = F.normalize(out.logits, dim=-1)
    classes = f.shape[-1]
    return math.sqrt(classes / max(classes - 1, 1)) * (f - f.mean(-1, keepdim=True))
