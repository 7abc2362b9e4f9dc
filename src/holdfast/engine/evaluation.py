"""Evaluation of models on test samples: overall, by class, by site and by domain."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from holdfast.data.dataset import Dataset
from holdfast.data.preprocess import Preprocess
from holdfast.engine.clients import PREPROCESSED_BYTES
from holdfast.kernels.amax import record_amax_bound, recording_amax
from holdfast.methods.base import Method, Server, Tensors
from holdfast.methods.context import RunContext
from holdfast.metrics.by_task import Metric, Scorer
from holdfast.models.network import Output

GROUPS = ("site", "domain")
"""Groups of a data set by which models are tested."""


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Metrics of a model on test samples.

    Accuracies are fractions, NaN for classes, sites and domains without samples. For tasks without an accuracy they
    are the task's ``score``, negated if less is better.
    """

    accuracy: float
    loss: float
    class_accuracy: np.ndarray  # [C]
    group_accuracy: dict[str, dict[str, float]]  # by group, such as site, and name
    correct: Tensor  # [N] score of each sample: 1 if it is classified correctly
    weights: Tensor | None = None  # [N] its weight; None for 1 each
    more: dict[str, Any] = field(default_factory=dict)  # entries of a record: the run's other metrics

    @property
    def domain_accuracy(self) -> dict[str, float]:
        return self.group_accuracy.get("domain", {})


class TestSet:
    """Test samples on the device, evaluated in large batches."""

    __test__ = False  # not a pytest class

    def __init__(
        self,
        dataset: Dataset,
        context: RunContext,
        limit: int | None = None,
        seed: int = 0,
        metrics: Sequence[Metric] = (),
    ) -> None:
        """``limit`` selects a class-balanced subset of this size, which depends on the seed only.

        ``metrics`` are measured in addition to the task's score; they require the outputs on the host.
        """
        labels = dataset.strata_test
        chosen = np.arange(len(labels)) if limit is None else _balanced_subset(labels, limit, seed)
        device = context.device
        self.indices = torch.from_numpy(chosen).to(device)
        self.context, self.preprocess = context, dataset.preprocess
        self.task = context.task
        _, _, self.x, self.y = dataset.on(device)
        self.strata = torch.from_numpy(labels).to(device)
        if limit is not None:
            self.x, self.y, self.strata = (
                t.index_select(0, self.indices) for t in (self.x, self.y, self.strata)
            )
        if self.y.is_floating_point():
            self.y = self.y.to(context.dtype)
        # An upper bound of the preprocessed values' magnitude, where the stored type implies one.
        self.largest = self.preprocess.largest() if self.x.dtype == torch.uint8 else None
        if self.x.numel() * context.dtype.itemsize <= PREPROCESSED_BYTES:
            self.x, self.preprocess = self.preprocess(self.x, dtype=context.dtype), Preprocess()
        self.class_counts = np.bincount(labels[chosen], minlength=context.num_classes)
        self.groups = {name: dataset.groups[name] for name in GROUPS if name in dataset.groups}
        self.group_ids = {name: group.test[chosen] for name, group in self.groups.items()}
        self.divisions = [(self.strata, len(self.class_counts))] + [
            (torch.from_numpy(self.group_ids[name]).to(device), len(group.names))
            for name, group in self.groups.items()
        ]
        self.sizes = np.concatenate([
            self.class_counts,
            *(np.bincount(self.group_ids[name], minlength=len(g.names)) for name, g in self.groups.items()),
        ])  # fmt: skip

        self.output_shape = dataset.output_shapes[0]
        self.scorer = self._scorer(metrics)

    def __len__(self) -> int:
        return len(self.y)

    def _scorer(self, metrics: Sequence[Metric]) -> Scorer | None:
        """The computation of the metrics that are not means over samples."""
        # By site, the concordance counts pairs within a site only.
        within = self.task.compares_samples and bool(self.groups)
        wanted = [metric for metric in metrics if metric.name != self.task.score or within]
        if not wanted:
            return None
        groups = {name: (group.names, self.group_ids[name]) for name, group in self.groups.items()}
        y = self.y.double() if self.y.is_floating_point() else self.y
        strata = self.strata.cpu().numpy()
        return Scorer(self.task, wanted, y.cpu().numpy(), strata, len(self.class_counts), groups)

    def undefined_metrics(self, required: bool) -> list[str]:
        """The metrics that are undefined on the test samples, with a warning; an error if they are ``required``."""
        if self.scorer is None:
            return []
        outputs = torch.zeros((1, *self.output_shape), dtype=self.context.dtype, device=self.y.device)
        kept = self.task.reduce(outputs, self.y[:1])
        return self.scorer.check(tuple(kept.shape[1:]), required)

    def evaluate(self, params: Tensors, buffers: Tensors, scores: Callable[[Output], Tensor]) -> Evaluation:
        """Test one model; ``scores`` maps its outputs to class scores ``[B, C]``."""
        return self.start(params, buffers, scores).wait()

    def start(
        self, params: Tensors, buffers: Tensors, scores: Callable[[Output], Tensor]
    ) -> PendingEvaluation:
        """Start the test of one model. A GPU runs it asynchronously."""
        timer = DeviceTimer(self.context.device)
        return self._start_metrics(self.kept(params, buffers, scores), timer)

    def kept(
        self,
        params: Tensors,
        buffers: Tensors,
        scores: Callable[[Output], Tensor],
        rows: slice = slice(None),
    ) -> Tensor:
        """The values computed from a model's outputs for the samples in ``rows``: ``[N, ...]``."""
        with torch.no_grad():
            parts = [
                self.task.reduce(scores(out), y)
                for out, y in zip(self._outputs(params, buffers, rows), self._targets(rows=rows), strict=True)
            ]
        return torch.cat(parts)

    def kept_of_each(
        self,
        models: Sequence[tuple[Tensors, Tensors]],
        scores: Sequence[Callable[[Output], Tensor]],
        rows: Sequence[slice],
    ) -> list[Tensor]:
        """The values computed from each model's outputs for its own samples; the models run in parallel."""
        if len(models) == 1 or self.context.network.mixes_samples:
            return [
                self.kept(*model, score, own) for model, score, own in zip(models, scores, rows, strict=True)
            ]
        sizes = [own.stop - own.start for own in rows]
        network = self.context.network
        params, buffers = _stacked(models)
        first = torch.tensor([own.start for own in rows])
        parts: list[list[Tensor]] = [[] for _ in models]
        with torch.no_grad():
            for places in torch.split(torch.arange(max(sizes)), self._batch_size(len(models))):
                # Models with fewer samples repeat their last one.
                chosen = (first[:, None] + torch.minimum(places, torch.tensor(sizes)[:, None] - 1)).to(
                    self.x.device
                )
                x = self.preprocess(self.x[chosen.flatten()], dtype=self.context.dtype)
                x = x.view(*chosen.shape, *x.shape[1:])
                with self._recording_amax(x):
                    features, logits = vmap(network.evaluated)(params, buffers, x)
                for lane, (part, score, size) in enumerate(zip(parts, scores, sizes, strict=True)):
                    real = slice(0, max(0, size - int(places[0])))
                    if len(y := self.y[chosen[lane, real]]):
                        part.append(
                            self.task.reduce(score(Output(features[lane, real], logits[lane, real])), y)
                        )
        return [torch.cat(part) for part in parts]

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
            count = 1 if self._same_body(models) else len(models)
            for outs, y in zip(self._outputs_of_many(models), self._targets(count), strict=True):
                for part, out, score in zip(parts, outs, scores, strict=True):
                    part.append(self.task.reduce(score(out), y))
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
        params, buffers = _stacked(models)
        many = vmap(network.evaluated, in_dims=(0, 0, None))
        for x in self._inputs(len(models)):
            with self._recording_amax(x.unsqueeze(0)):
                outs = many(params, buffers, x)
            yield [Output(*tensors) for tensors in zip(*outs, strict=True)]

    def _same_body(self, models: Sequence[tuple[Tensors, Tensors]]) -> bool:
        network, (params, buffers) = self.context.network, models[0]
        head = network.head.names if network.has_head else ()
        return (
            network.vector_features
            and not network.head_is_shared
            and all(
                all(p[k] is v for k, v in params.items() if k not in head)
                and all(b[k] is v for k, v in buffers.items())
                for p, b in models[1:]
            )
        )

    def _outputs(self, params: Tensors, buffers: Tensors, rows: slice = slice(None)) -> Iterator[Output]:
        """A model's outputs, batch by batch."""
        network = self.context.network
        for x in self._inputs(rows=rows):
            if network.uses_kernels:
                with self._recording_amax(x.unsqueeze(0)):
                    features, logits = network.evaluated(params, buffers, x)
                yield Output(features, logits)
            else:
                yield network.apply(params, buffers, network.to_fast_layout(x))

    def _inputs(self, models: int = 1, rows: slice = slice(None)) -> Iterator[Tensor]:
        batches = torch.split(self.x[rows], self._batch_size(models))
        return (self.preprocess(x, dtype=self.context.dtype) for x in batches)

    def _targets(self, models: int = 1, rows: slice = slice(None)) -> Sequence[Tensor]:
        return torch.split(self.y[rows], self._batch_size(models))

    def _batch_size(self, models: int) -> int:
        return max(128, self.context.evaluation_batch // models)

    @contextmanager
    def _recording_amax(self, x: Tensor) -> Iterator[None]:
        """Record magnitudes for the kernels called in this context: of ``x`` [L, ...] and of what kernels write."""
        with recording_amax():
            if self.largest is not None:
                record_amax_bound(x, self.largest)
            yield

    def _start_metrics(self, kept: Tensor, timer: DeviceTimer) -> PendingEvaluation:
        correct, weights = self.task.scores(kept, self.y), self.task.weights(kept, self.y)
        numbers = [self.task.test_loss(kept, self.y).double().view(1)]
        for values in (correct,) if weights is None else (correct, weights):
            numbers += [_sum_per_group(values, group, groups) for group, groups in self.divisions]
        together = copied_to_host(torch.cat(numbers))
        timer.stop()
        return PendingEvaluation(self, together, correct, weights, timer, kept if self.scorer else None)

    def evaluation(
        self, numbers: np.ndarray, correct: Tensor, weights: Tensor | None, kept: Tensor | None
    ) -> Evaluation:
        """The metrics from ``numbers``: the loss, then the sums of scores and weights by class and by group."""
        more = {}
        if self.scorer is not None and kept is not None:
            more = self.scorer.record(kept.double().cpu().numpy())
        right, total = numbers[1 : 1 + len(self.sizes)], self.sizes
        if weights is not None:
            total = numbers[1 + len(self.sizes) :]
        classes = len(self.class_counts)
        means = _accuracy(right, total)
        by_group, at = {}, classes
        for name, group in self.groups.items():
            by_group[name] = dict(zip(group.names, means[at : at + len(group.names)].tolist(), strict=True))
            at += len(group.names)
        return Evaluation(
            float(_accuracy(right[:classes].sum(), total[:classes].sum())),
            float(numbers[0]),
            means[:classes],
            by_group,
            correct,
            weights,
            more,
        )

    def class_accuracy_within(self, whole: Evaluation) -> np.ndarray:
        """Class accuracy ``[C]`` on this subset, from an evaluation on the whole test set."""
        classes = len(self.class_counts)
        right = _sum_per_group(whole.correct[self.indices], self.strata, classes)
        if whole.weights is None:
            return _accuracy(right.cpu().numpy(), self.class_counts)
        total = _sum_per_group(whole.weights[self.indices], self.strata, classes)
        return _accuracy(right.cpu().numpy(), total.cpu().numpy())

    def measured(self, score: Any) -> Any:
        """A score with the sign under which its metric is recorded: errors are positive."""
        return -score if self.task.less_is_better else score

    def record(self, model: Evaluation) -> dict[str, Any]:
        """The entries of a round's record: the loss, and the score, such as ``accuracy``, by class and group too."""
        name = self.task.score
        record = {
            name: self.measured(model.accuracy),
            "loss": model.loss,
            f"class_{name}": self.measured(model.class_accuracy).tolist(),
        }
        for group, scores in model.group_accuracy.items():
            record[f"{group}_{name}"] = {one: self.measured(score) for one, score in scores.items()}
        return record | model.more


def evaluated_model(method: Method, server: Server) -> tuple[Tensors, Tensors]:
    """The parameters and the buffers of the model that is tested as the global model and returned at the end."""
    model = {**server.buffers, **(server.params if server.final else method.eval_params(server))}
    return {k: model[k] for k in server.params}, {k: model[k] for k in server.buffers}


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
    weights: Tensor | None
    timer: DeviceTimer
    kept: Tensor | None
    seconds: float = 0.0

    __test__ = False  # not a pytest class

    def wait(self) -> Evaluation:
        """Wait for the test; returns its metrics."""
        self.seconds = self.timer.wait()
        return self.test.evaluation(self.numbers.numpy(), self.correct, self.weights, self.kept)


def copied_to_host(values: Tensor) -> Tensor:
    """The values on the CPU; a copy from a GPU is asynchronous."""
    if not values.is_cuda:
        return values
    return torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)


def _stacked(models: Sequence[tuple[Tensors, Tensors]]) -> tuple[Tensors, Tensors]:
    """The parameters and the buffers of several models, ``[L, ...]`` each."""
    params = {k: torch.stack([m[0][k] for m in models]) for k in models[0][0]}
    return params, {k: torch.stack([m[1][k] for m in models]) for k in models[0][1]}


def _sum_per_group(values: Tensor, group: Tensor, groups: int) -> Tensor:
    """The sum of the samples' values in each group: float64 ``[G]``."""
    sums = torch.zeros(groups, dtype=torch.float64, device=values.device)
    return sums.index_add_(0, group, values.double())


def _accuracy(right: np.ndarray, total: np.ndarray) -> np.ndarray:
    """The mean score in each group, NaN for groups without samples."""
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
