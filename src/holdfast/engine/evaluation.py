"""Evaluation of models on test samples: overall, by class and by domain."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap
from torch.nn import functional as F

from holdfast.data.dataset import Dataset
from holdfast.data.preprocess import Preprocess
from holdfast.engine.clients import PREPROCESSED_BYTES
from holdfast.kernels.amax import record_amax_bound, recording_amax
from holdfast.methods.base import Tensors
from holdfast.methods.context import RunContext
from holdfast.models.network import Output


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Metrics of a model on test samples. Accuracies are fractions, NaN for classes and domains without samples."""

    accuracy: float
    loss: float
    class_accuracy: np.ndarray  # [C]
    domain_accuracy: dict[str, float]
    correct: Tensor  # [N] bool: samples that are classified correctly


class TestSet:
    """Test samples on the device, evaluated in large batches."""

    __test__ = False  # not a pytest class

    def __init__(
        self, dataset: Dataset, context: RunContext, limit: int | None = None, seed: int = 0
    ) -> None:
        """``limit`` selects a class-balanced subset of this size, which depends on the seed only."""
        labels = dataset.y_test.numpy()
        chosen = np.arange(len(labels)) if limit is None else _balanced_subset(labels, limit, seed)
        device = context.device
        self.indices = torch.from_numpy(chosen).to(device)
        self.context, self.preprocess = context, dataset.preprocess
        _, _, self.x, self.y = dataset.on(device)
        if limit is not None:
            self.x, self.y = (t.index_select(0, self.indices) for t in (self.x, self.y))
        # An upper bound of the preprocessed values' magnitude, where the stored type implies one.
        self.largest = self.preprocess.largest() if self.x.dtype == torch.uint8 else None
        if self.x.numel() * context.dtype.itemsize <= PREPROCESSED_BYTES:
            self.x, self.preprocess = self.preprocess(self.x, dtype=context.dtype), Preprocess()
        domain = dataset.groups.get("domain")
        self.domains = () if domain is None else domain.names
        ids = np.zeros(len(chosen), np.int64) if domain is None else domain.test[chosen]
        self.domain = torch.from_numpy(ids).to(device)
        self.class_counts = np.bincount(labels[chosen], minlength=context.num_classes)
        self.domain_counts = np.bincount(ids, minlength=len(self.domains))

    def __len__(self) -> int:
        return len(self.y)

    def evaluate(self, params: Tensors, buffers: Tensors, scores: Callable[[Output], Tensor]) -> Evaluation:
        """Test one model; ``scores`` maps its outputs to class scores ``[B, C]``."""
        return self.start(params, buffers, scores).wait()

    def start(
        self, params: Tensors, buffers: Tensors, scores: Callable[[Output], Tensor]
    ) -> PendingEvaluation:
        """Start the test of one model. A GPU runs it asynchronously."""
        timer = DeviceTimer(self.context.device)
        with torch.no_grad():
            parts = [scores(out) for out in self._outputs(params, buffers)]
        return self._start_metrics(torch.cat(parts), timer)

    def evaluate_many(
        self,
        models: Sequence[tuple[Tensors, Tensors]],
        scores: Sequence[Callable[[Output], Tensor]],
        group_size: int | None = None,
    ) -> list[Evaluation]:
        """Test several models, ``group_size`` in parallel. If only their heads differ, the body is evaluated once."""
        if len(models) == 1:
            return [self.evaluate(*models[0], scores[0])]
        if group_size is not None and len(models) > group_size and not self._same_body(models):
            groups = [slice(at, at + group_size) for at in range(0, len(models), group_size)]
            return [e for group in groups for e in self.evaluate_many(models[group], scores[group])]
        parts: list[list[Tensor]] = [[] for _ in models]
        with torch.no_grad():
            for outs in self._outputs_of_many(models):
                for part, out, score in zip(parts, outs, scores, strict=True):
                    part.append(score(out))
        return [
            self._start_metrics(torch.cat(part), DeviceTimer(self.context.device)).wait() for part in parts
        ]

    def _outputs_of_many(self, models: Sequence[tuple[Tensors, Tensors]]) -> Iterator[list[Output]]:
        """The outputs of all models, batch by batch."""
        network = self.context.network
        if self._same_body(models):
            for out in self._outputs(*models[0]):
                features = out.features
                yield [Output(features, network.head.logits(params, features)) for params, _ in models]
            return
        params = {k: torch.stack([m[0][k] for m in models]) for k in models[0][0]}
        buffers = {k: torch.stack([m[1][k] for m in models]) for k in models[0][1]}

        def forward(p: Tensors, b: Tensors, x: Tensor) -> tuple[Tensor, Tensor]:
            out, _ = network.pure(p, b, x, train=False)
            return out.features, out.logits

        many = vmap(forward, in_dims=(0, 0, None))
        for x in self._inputs(len(models)):
            with self._recording_amax(x):
                outs = many(params, buffers, x)
            yield [Output(*tensors) for tensors in zip(*outs, strict=True)]

    def _same_body(self, models: Sequence[tuple[Tensors, Tensors]]) -> bool:
        network, (params, buffers) = self.context.network, models[0]
        head = network.head.names
        return not network.head_is_shared and all(
            all(p[k] is v for k, v in params.items() if k not in head)
            and all(b[k] is v for k, v in buffers.items())
            for p, b in models[1:]
        )

    def _outputs(self, params: Tensors, buffers: Tensors) -> Iterator[Output]:
        """A model's outputs, batch by batch."""
        network = self.context.network
        for x in self._inputs():
            if network.uses_kernels:
                with self._recording_amax(x):
                    out, _ = network.pure(params, buffers, x, train=False)
                yield out
            else:
                yield network.apply(params, buffers, network.to_fast_layout(x))

    def _inputs(self, models: int = 1) -> Iterator[Tensor]:
        batch = max(128, self.context.evaluation_batch // models)
        return (self.preprocess(x, dtype=self.context.dtype) for x in torch.split(self.x, batch))

    @contextmanager
    def _recording_amax(self, x: Tensor) -> Iterator[None]:
        """Record magnitudes for the kernels called in this context: of ``x`` if known, and of what kernels write."""
        with recording_amax():
            if self.largest is not None:
                record_amax_bound(x.unsqueeze(0), self.largest)
            yield

    def _start_metrics(self, scores: Tensor, timer: DeviceTimer) -> PendingEvaluation:
        correct = scores.argmax(-1) == self.y
        loss = F.cross_entropy(scores, self.y).double().view(1)
        right = [
            _correct_per_group(correct, self.y, len(self.class_counts)),
            _correct_per_group(correct, self.domain, len(self.domain_counts)),
        ]
        numbers = torch.cat([loss, *right])  # copied to the host at once
        if numbers.is_cuda:
            numbers = torch.empty_like(numbers, device="cpu", pin_memory=True).copy_(
                numbers, non_blocking=True
            )
        timer.stop()
        return PendingEvaluation(self, numbers, correct, timer)

    def evaluation(self, numbers: np.ndarray, correct: Tensor) -> Evaluation:
        """The metrics from ``numbers``: the loss, then the correct samples by class and by domain."""
        correct_by_class, correct_by_domain = np.split(numbers[1:], [len(self.class_counts)])
        domains = _accuracy(correct_by_domain, self.domain_counts).tolist()
        return Evaluation(
            float(correct_by_class.sum() / len(self)),
            float(numbers[0]),
            _accuracy(correct_by_class, self.class_counts),
            dict(zip(self.domains, domains, strict=False)),  # empty without domain names
            correct,
        )

    def class_accuracy_within(self, whole: Evaluation) -> np.ndarray:
        """Class accuracy ``[C]`` on this subset, from an evaluation on the whole test set."""
        right = _correct_per_group(whole.correct[self.indices], self.y, len(self.class_counts))
        return _accuracy(right.cpu().numpy(), self.class_counts)


class DeviceTimer:
    """Measures a device's time from now until ``stop``, without synchronising it."""

    def __init__(self, device: torch.device) -> None:
        timed = device.type == "cuda"
        event: Any = torch.cuda.Event
        self._events = [event(enable_timing=True) for _ in range(2)] if timed else []
        self._began = self._ended = time.perf_counter()
        for event in self._events[:1]:
            event.record()

    def stop(self) -> None:
        self._ended = time.perf_counter()
        for event in self._events[1:]:
            event.record()

    def wait(self) -> float:
        """Wait until the device has reached ``stop``; returns the seconds."""
        if not self._events:
            return self._ended - self._began
        self._events[1].synchronize()
        return float(self._events[0].elapsed_time(self._events[1])) / 1e3


@dataclass(eq=False)
class PendingEvaluation:
    """A test that may still be running on the device; ``seconds`` is set by ``wait``."""

    test: TestSet
    numbers: Tensor
    correct: Tensor
    timer: DeviceTimer
    seconds: float = 0.0

    __test__ = False  # not a pytest class

    def wait(self) -> Evaluation:
        """Wait for the test; returns its metrics."""
        self.seconds = self.timer.wait()
        return self.test.evaluation(self.numbers.numpy(), self.correct)


def _correct_per_group(correct: Tensor, group: Tensor, groups: int) -> Tensor:
    """The number of correct samples in each group: ``[G]``."""
    counts = torch.zeros(groups, dtype=torch.float64, device=correct.device)
    return counts.index_add_(0, group, correct.double())


def _accuracy(right: np.ndarray, total: np.ndarray) -> np.ndarray:
    """The fraction of correct samples in each group, NaN for groups without samples."""
    return np.where(total > 0, right / np.maximum(total, 1), np.nan)


def _balanced_subset(labels: np.ndarray, limit: int, seed: int) -> np.ndarray:
    """At most ``limit`` samples, as balanced over the classes as possible."""
    from holdfast.core.random import generator

    order = generator(seed, "local test").permutation(len(labels))
    rank = np.empty(len(labels), np.int64)  # position among the samples of its class
    for label in np.unique(labels):
        members = order[labels[order] == label]
        rank[members] = np.arange(len(members))
    return np.sort(order[np.argsort(rank[order], kind="stable")][:limit])
