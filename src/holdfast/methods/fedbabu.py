"""FedBABU: only the body is trained jointly; every client fits the classifier to its own data."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from holdfast.core.spec import Count
from holdfast.methods.base import Method, Tensors, Tree
from holdfast.methods.card import Card
from holdfast.methods.context import Client, RunContext
from holdfast.methods.functional import classifier_inputs, classifier_matrix, fit_classifier, shuffled_batches
from holdfast.models.network import Output


@dataclass(frozen=True)
class FedBABU(Method):
    """Body aggregation and body update.

    Local: CE, with the classifier fixed at its initial value; only the body is trained and sent. After its training a
    client fits a classifier of its own on the features of its samples: ``finetune`` epochs of plain SGD from the
    initial classifier, in batches of the run's size, with the round's learning rate. Only the client predicts with it.
    Server: the n_k-weighted mean of the bodies. The tested global model has the initial classifier.
    Oh, Kim and Yun, ICLR 2022. They fine-tune once, after the last round, all layers or one part; here it is the
    classifier, in every round, so that personal accuracy is recorded. 5 epochs as in the paper.
    """

    name: ClassVar[str] = "fedbabu"
    card: ClassVar[Card] = Card(
        when="every client needs a model for its own classes, and may adapt a common body to them",
        client="one forward pass over its samples, and a few epochs of its classifier",
    )
    needs_classes: ClassVar[bool] = True
    needs_features: ClassVar[bool] = True

    finetune: Count = 5  # epochs of a client's own classifier

    def init_client_state(self, client: Client) -> Tree:
        """The client's own classifier: ``[C, d+1]``, with the bias as last column."""
        return {"head": classifier_matrix(_initial_head(client.context))}

    def initial_params(self, params: Tensors, payload: Tree, state: Tree, client: Client) -> Tensors:
        """The received body with the initial classifier."""
        return params | _initial_head(client.context)

    def learning_rate(self, name: str, epoch: int, lr: float, context: RunContext) -> float:
        """0 for the classifier."""
        return 0.0 if name in context.network.head.names else lr

    def client_final(self, params: Tensors, carry: Tree, client: Client) -> tuple[Tree, Tree]:
        """Keep the fitted classifier."""
        head = classifier_matrix(_initial_head(client.context))
        inputs = classifier_inputs(client.forward(params).features, head)
        batches = shuffled_batches(
            client.generator("classifier batches"), client.samples, client.context.batch_size, self.finetune
        )
        return {}, {"head": fit_classifier(head, inputs, client.y, batches, client.lr)}

    def is_shared(self, name: str, context: RunContext) -> bool:
        """Whether it belongs to the body."""
        return name not in context.network.head.names

    def personal_logits(self, out: Output, state: Tree) -> Tensor:
        """The client's own classifier."""
        head: Tensor = state["head"]
        return torch.mm(classifier_inputs(out.features, head), head.T)


def _initial_head(context: RunContext) -> Tensors:
    return {name: context.network.params[name] for name in context.network.head.names}
