"""CCVR: classifier calibration on virtual features, once after training."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from holdfast.core.spec import Count, Positive, PositiveCount
from holdfast.methods.base import Method, Server, Tensors, Tree
from holdfast.methods.card import Card
from holdfast.methods.context import Client, RunContext
from holdfast.methods.functional import classifier_inputs, classifier_matrix, fit_classifier, shuffled_batches

RIDGE = 1e-6  # added to a covariance before sampling, since it is singular for few samples


@dataclass(frozen=True)
class CCVR(Method):
    """Classifier calibration with virtual representations; on its own it is FedAvg with a calibrated classifier.

    After the last round every client sends, for each class, the number, sum and second moment of its features
    h under the final model. They determine its N_k, μ_k and Σ_k (unbiased), and those of the union of clients.
    Server, for each class: μ = Σ_k N_k μ_k / N,
    Σ = Σ_k (N_k-1)/(N-1) Σ_k + Σ_k N_k/(N-1) μ_k μ_kᵀ - N/(N-1) μ μᵀ;  M draws of N(μ, Σ + 1e-6 I); the
    current classifier is trained further on them, by SGD on CE. A class without samples has no draws.
    Luo et al., NeurIPS 2021. M = 200, 10 epochs of the run's batches and rate 0.01 are this library's choice.
    """

    name: ClassVar[str] = "ccvr"
    card: ClassVar[Card] = Card(
        when="label skew has biased the classifier; added to another method, as in `fedfa+ccvr`, it corrects its final "
        "model",
        client="no extra pass in a round; one forward pass after the last",
        server="after the last round, trains the classifier on features drawn from each class's Gaussian",
        uploads="after the last round, the number, sum and second moment of each class's features",
    )
    needs_classes: ClassVar[bool] = True
    needs_features: ClassVar[bool] = True

    draws: PositiveCount = 200  # M: virtual features of each class
    epochs: Count = 10  # of the classifier's training
    lr: Positive = 0.01  # of the classifier's training

    def final_statistics(self, params: Tensors, client: Client) -> Tree:
        """Number, sum ``[C, d]`` and second moment ``[C, d, d]`` of each class's features."""
        features = client.forward(params).features.double()  # the covariance is a small difference of sums
        members = F.one_hot(client.y, client.context.num_classes).to(features.dtype)
        moments = [(features * member.unsqueeze(-1)).T @ features for member in members.T]
        return {"count": members.sum(0), "sum": members.T @ features, "moment": torch.stack(moments)}

    def finalize(self, server: Server, sums: Tree, context: RunContext) -> Server:
        """Train the classifier on draws from each class's Gaussian."""
        drawn, labels = [], []
        for c in torch.nonzero(sums["count"]).flatten().tolist():
            drawn.append(self._draw(c, sums["count"][c], sums["sum"][c], sums["moment"][c], context))
            labels.append(torch.full((self.draws,), c, device=context.device))
        classifier = {name: server.params[name] for name in context.network.head.names}
        matrix = classifier_matrix(classifier)
        inputs, y = classifier_inputs(torch.cat(drawn), matrix), torch.cat(labels)
        rng = context.generator("virtual feature batches")
        batches = shuffled_batches(rng, len(y), context.batch_size, self.epochs)
        matrix = fit_classifier(matrix, inputs, y, batches, self.lr)
        width = context.network.head.features
        fitted = {k: matrix[:, width] if p.ndim == 1 else matrix[:, :width] for k, p in classifier.items()}
        return Server(server.params | fitted, server.buffers, server.state, server.round)

    def _draw(self, label: int, count: Tensor, total: Tensor, moment: Tensor, context: RunContext) -> Tensor:
        """M virtual features of one class."""
        mean = total / count
        covariance = (moment - count * torch.outer(mean, mean)) / (count - 1).clamp(min=1)
        values, vectors = torch.linalg.eigh(covariance)
        spread = vectors * (values.clamp(min=0) + RIDGE).sqrt() @ vectors.T
        noise = context.generator("virtual features", label).standard_normal((self.draws, len(mean)))
        drawn: Tensor = mean + torch.from_numpy(noise).to(mean) @ spread
        return drawn.to(context.dtype)
