"""FedRoD: a shared head trained with a balanced loss, and a personal head for each client."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from holdfast.methods.base import Batch, Method, Tensors, Tree
from holdfast.methods.card import Card
from holdfast.methods.context import Client
from holdfast.methods.functional import classifier_inputs, classifier_matrix, cross_entropy
from holdfast.models.network import Output

MIN_COUNT = 1e-12  # replaces counts of 0, whose logarithm is infinite


@dataclass(frozen=True)
class FedRoD(Method):
    """A generic and a personal classifier on one body.

    Local, in each step: body and generic head minimise CE(z + log n_k, y), the balanced softmax, with n_k the
    client's label counts; then the personal head takes a step on CE(z + z_p, y), where z and the input of z_p are
    those computed before the step and are constants (plain SGD with the round's learning rate).
    Server: the n_k-weighted mean of body and generic head; a personal head, initially a copy of the initial
    head, is not sent.
    Chen and Chao, ICLR 2022. A client predicts with z + z_p, the global model with z.
    """

    name: ClassVar[str] = "fedrod"
    card: ClassVar[Card] = Card(
        when="a global model and personal models are needed from the same training",
        client="no extra pass; after each step, a step of the personal classifier",
    )
    needs_classes: ClassVar[bool] = True
    needs_features: ClassVar[bool] = True

    def init_client_state(self, client: Client) -> Tree:
        """The personal head: ``[C, d+1]``, with the bias as last column."""
        network = client.context.network
        return {"head": classifier_matrix({name: network.params[name] for name in network.head.names})}

    def client_init(self, payload: Tree, state: Tree, client: Client) -> Tree:
        """The personal head, log n_k and the learning rate."""
        counts = client.label_counts
        return {
            "head": state["head"],
            "log_counts": counts.clamp(min=MIN_COUNT).log(),
            "lr": client.context.scalar(client.lr),
        }

    def task_loss(self, out: Output, batch: Batch, carry: Tree) -> Tensor:
        """CE(z + log n_k, y)."""
        return batch.mean(cross_entropy(out.logits + carry["log_counts"], batch.y))

    def after_step(self, params: Tensors, out: Output, batch: Batch, carry: Tree) -> tuple[Tensors, Tree]:
        """A step of the personal head on CE(z + z_p, y)."""
        head = carry["head"]
        inputs = classifier_inputs(out.features, head)
        members = batch.members(len(head), head.dtype)
        error = (out.logits + inputs @ head.T).softmax(-1) * members.sum(-1, keepdim=True) - members
        gradient = error.T @ inputs / members.sum().clamp(min=1)
        return params, carry | {"head": head - carry["lr"] * gradient}

    def client_final(self, params: Tensors, carry: Tree, client: Client) -> tuple[Tree, Tree]:
        return {}, {"head": carry["head"]}

    def personal_logits(self, out: Output, state: Tree) -> Tensor:
        """z + z_p."""
        head: Tensor = state["head"]
        return torch.addmm(out.logits, classifier_inputs(out.features, head), head.T)
