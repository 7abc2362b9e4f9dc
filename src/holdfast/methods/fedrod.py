"""FedRoD: a balanced head for everyone, a personal one beside it."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from holdfast.methods.base import Batch, Method, Tensors, Tree
from holdfast.methods.card import Card
from holdfast.methods.context import Client
from holdfast.methods.functional import classifier_inputs, classifier_matrix, cross_entropy
from holdfast.models.network import Output

FEWEST = 1e-12  # stands for a count of 0, whose logarithm does not exist


@dataclass(frozen=True)
class FedRoD(Method):
    """Generic and personal at once.

    Local, in each step: body and generic head descend CE(z + log n_k, y), the balanced softmax, with n_k the
    client's label counts; then the personal head descends CE(z + z_p, y), where z and the features under z_p
    are those of before the step and are not moved by it (plain SGD at the round's rate).
    Server: the n_k-weighted mean of body and generic head; a personal head, at first a copy of the initial
    head, stays with its client.
    Chen and Chao, ICLR 2022. A client predicts by z + z_p, the global model by z.
    """

    name: ClassVar[str] = "fedrod"
    card: ClassVar[Card] = Card(
        when="one good global model and a personal one are wanted from the same training",
        client="no extra pass; after each step a step of the personal classifier",
    )

    def init_client_state(self, client: Client) -> Tree:
        """The personal head: ``[C, d+1]``, the bias last."""
        network = client.context.network
        return {"head": classifier_matrix({name: network.params[name] for name in network.head.names})}

    def client_init(self, payload: Tree, state: Tree, client: Client) -> Tree:
        """The personal head is trained in the carry."""
        counts = client.label_counts
        return {
            "head": state["head"],
            "log_counts": counts.clamp(min=FEWEST).log(),
            "lr": client.context.scalar(client.lr),
        }

    def task_loss(self, out: Output, batch: Batch, carry: Tree) -> Tensor:
        """Cross-entropy of the balanced softmax."""
        return batch.mean(cross_entropy(out.logits + carry["log_counts"], batch.y))

    def after_step(self, params: Tensors, out: Output, batch: Batch, carry: Tree) -> tuple[Tensors, Tree]:
        """A step of the personal head."""
        head = carry["head"]
        inputs = classifier_inputs(out.features, head)
        members = batch.members(len(head))
        error = (out.logits + inputs @ head.T).softmax(-1) * members.sum(-1, keepdim=True) - members
        gradient = error.T @ inputs / members.sum().clamp(min=1)
        return params, carry | {"head": head - carry["lr"] * gradient}

    def client_final(self, params: Tensors, carry: Tree, client: Client) -> tuple[Tree, Tree]:
        """Remember the personal head."""
        return {}, {"head": carry["head"]}

    def personal_logits(self, out: Output, state: Tree) -> Tensor:
        """Both heads together."""
        head: Tensor = state["head"]
        return torch.addmm(out.logits, classifier_inputs(out.features, head), head.T)
