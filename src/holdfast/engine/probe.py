"""Differences between local models and between their gradients, measured on a fixed batch of test samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdfast import metrics
from holdfast.engine.clients import ClientResult
from holdfast.engine.evaluation import TestSet
from holdfast.methods.base import Server, Tensors
from holdfast.methods.context import RunContext

PER_CLASS = 10  # test samples of each class in the probe batch, as in FedFA
CHUNK = 512


class Probe:
    """The probe of one round: compares the sent model, the local models and the aggregated model."""

    def __init__(self, context: RunContext, batch: TestSet, server: Server) -> None:
        self.context, self.batch, self.sent = context, batch, server
        self.before = self._features(server.params, server.buffers)
        self.features: list[np.ndarray] = []
        self.updates: list[np.ndarray] = []
        self.gradients: list[Tensor] = []
        self.label_counts: list[np.ndarray] = []
        self.clients: list[int] = []

    def add(self, result: ClientResult, x: Tensor, y: Tensor) -> None:
        """Add a trained client; ``x`` and ``y`` are all its training samples."""
        network = self.context.network
        self.clients.append(result.client)
        self.label_counts.append(result.label_counts)
        self.features.append(self._features(result.params, result.buffers))
        if network.has_head:
            change = [result.params[k] - self.sent.params[k] for k in network.head.names]
            updates = torch.cat([c.reshape(network.num_outputs or 1, -1) for c in change], 1)
            self.updates.append(updates.cpu().numpy())
        self.gradients.append(self._gradient(x, y).cpu())

    def record(self, server: Server) -> dict[str, Any]:
        """The metrics of the round; ``server`` holds the model after aggregation."""
        diversity = {"gradient_diversity": metrics.gradient_diversity([g.numpy() for g in self.gradients])}
        if not self.context.network.has_head:
            return diversity
        labels = self.batch.strata.cpu().numpy()
        local = np.stack(self.features)
        aligned = [metrics.neuron_alignment(self.before, f, labels) for f in local]
        after = self._features(server.params, server.buffers)
        return diversity | {
            "alignment": {
                "local": float(np.mean(aligned)),
                "global": metrics.neuron_alignment(self.before, after, labels),
                "dead": metrics.dead_unit_share(after),
            },
            "feature_distance": metrics.feature_distance(local),
            "classifier_similarity": metrics.classifier_update_similarity(np.stack(self.updates)),
        }

    def projection(self) -> dict[str, Any] | None:
        """For the report: a t-SNE projection of features, by class and client, and histograms of pair cosines.

        None for a model without features.
        """
        if not self.context.network.has_head:
            return None
        from sklearn.manifold import TSNE

        labels = self.batch.strata.cpu().numpy()
        owned = np.stack(self.label_counts) > 0
        local = np.stack(self.features)  # [K, N, d]
        positive, negative = metrics.pair_similarity(local, labels, owned)
        client, sample = np.nonzero(owned[:, labels])
        chosen = local[client, sample]
        if len(chosen) > 1500:
            keep = np.linspace(0, len(chosen) - 1, 1500).astype(int)
            client, sample, chosen = client[keep], sample[keep], chosen[keep]
        plane = TSNE(perplexity=min(30, max(1, len(chosen) // 4)), random_state=0).fit_transform(chosen)
        edges = np.linspace(-1, 1, 41)
        return {
            "tsne": plane.round(3).tolist(),
            "labels": labels[sample].tolist(),
            "clients": [self.clients[k] for k in client],
            "pairs": {
                "edges": edges.round(3).tolist(),
                "positive": np.histogram(positive, edges)[0].tolist(),
                "negative": np.histogram(negative, edges)[0].tolist(),
            },
        }

    def _features(self, params: Tensors, buffers: Tensors) -> np.ndarray:
        x = self.batch.preprocess(self.batch.x, dtype=self.context.dtype)
        return self.context.forward(params, buffers, x).features.cpu().numpy()

    def _gradient(self, x: Tensor, y: Tensor) -> Tensor:
        """∇f_k at the sent model over all of a client's samples, flattened; BatchNorm in evaluation mode."""
        params = {k: v.detach().requires_grad_() for k, v in self.sent.params.items()}
        total = torch.zeros((), dtype=self.context.dtype, device=self.context.device)
        for part, labels in zip(torch.split(x, CHUNK), torch.split(y, CHUNK), strict=True):
            out = self.context.network.apply(params, self.sent.buffers, part)
            total = total + self.context.task.batch_loss(out.logits, labels) * len(labels)
        grads = torch.autograd.grad(total / len(y), list(params.values()), materialize_grads=True)
        return torch.cat([g.flatten() for g in grads])
