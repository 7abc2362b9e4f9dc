"""CReFF: re-training of the classifier on a balanced set of federated features."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from holdfast.core.spec import Count, Positive, PositiveCount
from holdfast.methods.base import Method, Server, Tensors, Tree, Upload
from holdfast.methods.card import Card
from holdfast.methods.context import Client, RunContext
from holdfast.methods.functional import classifier_inputs, classifier_matrix, fit_classifier, shuffled_batches


@dataclass(frozen=True)
class CReFF(Method):
    """Synthetic features, learnt by the server so that the classifier's gradients on them match those on real features.

    The server keeps ``features`` learnable features of each class and a re-trained classifier ψ.
    Client, before its training (plain CE): for each of its classes the gradient of CE with respect to ψ, on the
    features of at most ``images`` samples from the body of w^{t-1}, as the mean over ``repeats`` draws.
    Server: w^t as FedAvg; the real gradients' unweighted mean over the clients that hold a class;
    ``match_steps`` SGD steps (rate ``match_lr``) on the features, minimising Σ_c Σ_rows (1 - cos(synthetic
    gradient, real gradient)) with the C weight rows and the whole bias as rows; then a new ψ is trained on
    the features for ``epochs`` epochs of SGD (rate ``lr``, batches of 32). Tested: the body of w^t with ψ.
    The features of a class that no participant holds are not updated.
    Shang et al., IJCAI 2022, with their code's values. Real samples are not augmented.
    """

    name: ClassVar[str] = "creff"
    card: ClassVar[Card] = Card(
        when="the classes are long-tailed over the whole federation",
        client="a forward pass over its samples each round",
        server="100 gradient steps on the synthetic features, then 300 epochs of training the classifier on them",
        uploads="the classifier's gradient for each of its classes, and so which classes it holds",
    )
    needs_classes: ClassVar[bool] = True
    needs_features: ClassVar[bool] = True

    features: PositiveCount = 100  # federated features of each class
    images: PositiveCount = 32  # largest number of real samples of a class in one draw
    repeats: PositiveCount = 10  # draws of real samples for each class
    match_steps: Count = 100  # gradient steps on the features in a round
    match_lr: Positive = 0.1  # learning rate of these steps
    epochs: Count = 300  # of ψ's training
    lr: Positive = 0.01  # of ψ's training
    batch_size: PositiveCount = 32  # of ψ's training

    def init_server_state(self, context: RunContext) -> Tree:
        """Gaussian features and a random ψ."""
        shape = (context.num_classes, self.features, context.network.head.features)
        drawn = context.generator("federated features").standard_normal(shape)
        return {
            "features": torch.from_numpy(drawn).to(context.device, context.dtype),
            "classifier": _random_classifier(context, 0),
        }

    def broadcast(self, server: Server) -> Tree:
        return {"classifier": server.state["classifier"]}

    def client_init(self, payload: Tree, state: Tree, client: Client) -> Tree:
        """Computes the gradient with respect to ψ for each class: ``[C, C, d+1]``."""
        psi, classes = classifier_matrix(payload["classifier"]), client.context.num_classes
        inputs = classifier_inputs(client.forward(client.global_params).features, psi)
        error = (inputs @ psi.T).softmax(-1) - F.one_hot(client.y, classes)
        weighted = error * self._draws(client).unsqueeze(-1)
        members = F.one_hot(client.y, classes).to(error.dtype)
        gradients = [(weighted * members[:, c : c + 1]).T @ inputs for c in range(classes)]
        client.notes[self.name] = torch.stack(gradients)
        return {}

    def _draws(self, client: Client) -> Tensor:
        """Each sample's weight in its class's gradient ``[n]``: the mean over draws of 1 / size if it is drawn."""
        rng, labels = client.generator("real features"), client.y.cpu().numpy()
        drawn = np.zeros(len(labels))
        for label in np.unique(labels):
            members = np.flatnonzero(labels == label)
            size = min(self.images, len(members))
            for _ in range(self.repeats):
                drawn[rng.choice(members, size, replace=False)] += 1 / (size * self.repeats)
        return torch.from_numpy(drawn).to(client.context.device, client.context.dtype)

    def client_final(self, params: Tensors, carry: Tree, client: Client) -> tuple[Tree, Tree]:
        return {"gradients": client.notes[self.name], "holders": client.owned.to(client.context.dtype)}, {}

    def update(self, server: Server, sums: Tree, uploads: Sequence[Upload], context: RunContext) -> Tree:
        """Match the gradients, then train a new ψ on all features."""
        holders = sums["holders"]
        real = sums["gradients"] / holders.clamp(min=1).view(-1, 1, 1)
        psi = classifier_matrix(server.state["classifier"])
        features = self._match_gradients(server.state["features"], real, (holders > 0).to(real.dtype), psi)
        fresh = _random_classifier(context, server.round)
        inputs = classifier_inputs(features.flatten(0, 1), psi)
        labels = torch.arange(context.num_classes, device=context.device).repeat_interleave(self.features)
        rng = context.generator("federated feature batches", server.round)
        batches = shuffled_batches(rng, len(labels), self.batch_size, self.epochs)
        matrix = fit_classifier(classifier_matrix(fresh), inputs, labels, batches, self.lr)
        return {"features": features, "classifier": _split_classifier(fresh, matrix)}

    def _match_gradients(self, features: Tensor, real: Tensor, held: Tensor, psi: Tensor) -> Tensor:
        """The features ``[C, m, d]`` after SGD on the distance of the synthetic gradients from the ``real`` ones."""
        targets = torch.eye(len(psi), dtype=psi.dtype, device=psi.device).unsqueeze(1)
        width = features.shape[-1]
        for _ in range(self.match_steps):
            features = features.detach().requires_grad_()
            with torch.enable_grad():
                inputs = classifier_inputs(features, psi)
                error = (inputs @ psi.T).softmax(-1) - targets
                synthetic = error.mT @ inputs / self.features
                apart = _cosine_distance(synthetic[..., :width], real[..., :width]).sum(-1)
                apart = apart + _cosine_distance(synthetic[..., width:].mT, real[..., width:].mT).sum(-1)
                loss = (apart * held).sum()
            features = features - self.match_lr * torch.autograd.grad(loss, features)[0]
        return features.detach()

    def eval_params(self, server: Server) -> Tensors:
        """The averaged body with ψ."""
        classifier: Tensors = server.state["classifier"]
        return server.params | classifier


def _cosine_distance(a: Tensor, b: Tensor) -> Tensor:
    """1 - cos(a, b) of each row."""
    lengths = torch.linalg.vector_norm(a, dim=-1) * torch.linalg.vector_norm(b, dim=-1)
    cosines: Tensor = (a * b).sum(-1) / (lengths + 1e-6)
    return 1 - cosines


def _random_classifier(context: RunContext, round: int) -> Tensors:
    """A linear layer with PyTorch's default initialisation, drawn for this round."""
    head, rng = context.network.head, context.generator("classifier", round)
    bound = head.features**-0.5
    shapes = {name: context.network.params[name].shape for name in head.names}
    drawn = {name: rng.uniform(-bound, bound, tuple(shape)) for name, shape in shapes.items()}
    return {
        name: torch.from_numpy(values).to(context.device, context.dtype) for name, values in drawn.items()
    }


def _split_classifier(classifier: Tensors, matrix: Tensor) -> Tensors:
    """The inverse of ``classifier_matrix``: the matrix as parameters named and shaped like ``classifier``'s."""
    return {name: matrix[:, -1] if p.ndim == 1 else matrix[:, : p.shape[1]] for name, p in classifier.items()}
