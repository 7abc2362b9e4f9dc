"""Testing models: overall, by class and by domain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap
from torch.nn import functional as F

from holdfast.data.dataset import Dataset
from holdfast.methods.base import Tensors
from holdfast.methods.context import Task
from holdfast.models.network import Output


@dataclass(frozen=True, eq=False)
class Evaluation:
    """How good a model is on test samples; shares are fractions, NaN where there is no sample."""

    accuracy: float
    loss: float
    class_accuracy: np.ndarray  # [C]
    domain_accuracy: dict[str, float]
    correct: Tensor  # [N] bool, which samples it got right


class TestSet:
    """Test samples on the device, tested in large batches."""

    __test__ = False  # not a pytest class

    def __init__(self, dataset: Dataset, task: Task, limit: int | None = None, seed: int = 0) -> None:
        """``limit`` keeps a class-balanced subset, the same for every model and run with this seed."""
        labels = dataset.y_test.numpy()
        chosen = np.arange(len(labels)) if limit is None else _balanced(labels, limit, seed)
        device = task.device
        at = torch.from_numpy(chosen)
        self.places = at.to(device)
        self.task, self.preprocess = task, dataset.preprocess
        self.x, self.y = dataset.x_test[at].to(device), dataset.y_test[at].to(device)
        domain = dataset.groups.get("domain")
        self.domains = () if domain is None else domain.names
        ids = np.zeros(len(chosen), np.int64) if domain is None else domain.test[chosen]
        self.domain = torch.from_numpy(ids).to(device)

    def __len__(self) -> int:
        return len(self.y)

    def evaluate(self, params: Tensors, buffers: Tensors, scores: Callable[[Output], Tensor]) -> Evaluation:
        """Test one model; ``scores`` turns its outputs into ``[B, C]``."""
        forward = self.task.network.apply
        parts = []
        with torch.no_grad():
            for x in self._inputs():
                parts.append(scores(forward(params, buffers, self.task.network.arranged(x))))
        return self._judge(torch.cat(parts))

    def evaluate_many(
        self, models: Sequence[tuple[Tensors, Tensors]], scores: Sequence[Callable[[Output], Tensor]]
    ) -> list[Evaluation]:
        """Test several models side by side."""
        if len(models) == 1:
            return [self.evaluate(*models[0], scores[0])]
        params = {k: torch.stack([m[0][k] for m in models]) for k in models[0][0]}
        buffers = {k: torch.stack([m[1][k] for m in models]) for k in models[0][1]}

        def forward(p: Tensors, b: Tensors, x: Tensor) -> tuple[Tensor, Tensor]:
            out, _ = self.task.network.pure(p, b, x, train=False)
            return out.features, out.logits

        many = vmap(forward, in_dims=(0, 0, None))
        parts: list[list[Tensor]] = [[] for _ in models]
        with torch.no_grad():
            for x in self._inputs():
                features, logits = many(params, buffers, x)
                for i, score in enumerate(scores):
                    parts[i].append(score(Output(features[i], logits[i])))
        return [self._judge(torch.cat(part)) for part in parts]

    def _inputs(self) -> list[Tensor]:
        return [
            self.preprocess(x, dtype=self.task.dtype) for x in torch.split(self.x, self.task.evaluation_batch)
        ]

    def _judge(self, scores: Tensor) -> Evaluation:
        correct = scores.argmax(-1) == self.y
        classes = _shares(correct, self.y, self.task.num_classes)
        domains = _shares(correct, self.domain, len(self.domains)) if self.domains else np.empty(0)
        return Evaluation(
            float(correct.double().mean()),
            float(F.cross_entropy(scores, self.y)),
            classes,
            dict(zip(self.domains, domains.tolist(), strict=True)),
            correct,
        )

    def class_accuracy_within(self, whole: Evaluation) -> np.ndarray:
        """``[C]`` on these samples, of a model already tested on the whole test set that they are part of."""
        return _shares(whole.correct[self.places], self.y, self.task.num_classes)


def _shares(correct: Tensor, group: Tensor, groups: int) -> np.ndarray:
    """The share of correct samples in each group."""
    right = torch.bincount(group[correct], minlength=groups).cpu().numpy()
    total = torch.bincount(group, minlength=groups).cpu().numpy()
    with np.errstate(invalid="ignore"):
        return np.where(total > 0, right / np.maximum(total, 1), np.nan)


def _balanced(labels: np.ndarray, limit: int, seed: int) -> np.ndarray:
    """At most ``limit`` samples, as many of each class as can be."""
    from holdfast.random import generator

    order = generator(seed, "local test").permutation(len(labels))
    rank = np.empty(len(labels), np.int64)  # how many of its class come before it
    for label in np.unique(labels):
        members = order[labels[order] == label]
        rank[members] = np.arange(len(members))
    return np.sort(order[np.argsort(rank[order], kind="stable")][:limit])
