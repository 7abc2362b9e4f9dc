"""Federated evaluation: every client tests models on its own validation samples."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from holdfast.core.errors import HoldfastError, HoldfastWarning
from holdfast.core.measures import LESS_IS_BETTER
from holdfast.data.dataset import Dataset
from holdfast.data.federation import Federation
from holdfast.data.indexing import offsets_of, ranges
from holdfast.engine.evaluation import DeviceTimer, TestSet, copied_to_host, evaluated_model
from holdfast.methods.base import Method, Server, Tensors
from holdfast.methods.context import RunContext
from holdfast.metrics.by_task import NEEDS, Metric, Predictions
from holdfast.metrics.over_sites import sample_mean, site_mean, site_spread, worst_site
from holdfast.models.network import Output
from holdfast.tasks.base import Task

MAX_SITES = 1000  # largest number of clients for which the values of each are recorded

Scores = Callable[[Output], Tensor]


@dataclass(eq=False)
class ClientMetrics:
    """Metrics of K clients on their own validation samples; NaN if undefined."""

    clients: np.ndarray  # [K]
    samples: np.ndarray  # [K]
    values: Mapping[str, np.ndarray]  # [K] each
    seconds: float = 0.0

    def wait(self) -> ClientMetrics:
        return self


class PendingMetrics(Protocol):
    """Tests by clients that may be running; ``seconds`` is set by ``wait``."""

    seconds: float

    def wait(self) -> ClientMetrics:
        """Wait for the tests; returns their metrics."""


class Validation(Protocol):
    """The clients' tests of a model on their own validation samples, on this machine or at their sites."""

    sizes: np.ndarray
    """``[clients]``: the validation samples of each client."""
    errors: frozenset[str]
    """The metrics of which less is better."""

    def start(self, method: Method, server: Server) -> PendingMetrics:
        """Start the test of the global model."""

    def start_each(
        self, clients: Sequence[int], models: Sequence[tuple[Tensors, Tensors]], scores: Sequence[Scores]
    ) -> PendingMetrics | None:
        """Start the tests of the clients' local models; None without samples, or if sites test them."""


def validation_record(pending: Sequence[PendingMetrics], errors: Collection[str]) -> dict[str, Any]:
    """Wait for tests of one round; returns their common entry of its record."""
    done = [one.wait() for one in pending]
    clients, samples = (np.concatenate([getattr(one, key) for one in done]) for key in ("clients", "samples"))
    values = {name: np.concatenate([one.values[name] for one in done]) for name in done[0].values}
    record: dict[str, Any] = {name: sample_mean(each, samples) for name, each in values.items()}
    worst = {name: worst_site(each, name in errors) for name, each in values.items()}
    record |= {
        "site_mean": {name: site_mean(each) for name, each in values.items()},
        "spread": {name: site_spread(each) for name, each in values.items()},
        "worst": {name: float(values[name][at]) for name, at in worst.items() if at is not None},
        "worst_client": {name: int(clients[at]) for name, at in worst.items() if at is not None},
    }
    if len(clients) <= MAX_SITES:
        record |= {
            "clients": clients.tolist(),
            "samples": samples.tolist(),
            "values": {name: each.tolist() for name, each in values.items()},
        }
    return record


# Which metrics are measured -----------------------------------------------------------------------------------


def errors_among(metrics: Iterable[Metric]) -> frozenset[str]:
    """The metrics of which less is better."""
    return LESS_IS_BETTER | {metric.name for metric in metrics if metric.less_is_better}


def metric_names(task: Task, metrics: Iterable[Metric]) -> list[str]:
    """The names of a client's metrics: the loss, the task's score if it is a mean over samples, and the metrics."""
    score = [] if task.compares_samples else [task.score]
    return list(dict.fromkeys(["loss", *score, *(metric.name for metric in metrics)]))


def defined_metrics(dataset: Dataset, y: Tensor, metrics: Sequence[Metric]) -> list[bool]:
    """Which metrics are defined for these targets, tested with artificial outputs; raises a user metric's error."""
    outputs = torch.from_numpy(np.random.default_rng(0).random((len(y), *dataset.output_shapes[0])))
    kept = dataset.task.reduce(outputs.to(y.dtype if y.is_floating_point() else torch.float32), y)
    y = y.double() if y.is_floating_point() else y
    trial = Predictions(dataset.task, kept.double().numpy(), y.numpy())
    return [metric.try_on(trial) for metric in metrics]


def measurable(
    metrics: Sequence[Metric], clients: np.ndarray, defined: np.ndarray, required: bool
) -> list[Metric]:
    """The metrics that are defined for at least one client; warns of the others.

    ``defined`` [K, metrics]: whether a metric is defined on a client's samples. Raises an error if the primary metric
    is defined for no client, or any metric if the user has set them (``required``). Warns of clients without one.
    """
    kept = []
    for number, metric in enumerate(metrics):
        undefined = clients[~defined[:, number]]
        what = f"{metric.name} cannot be measured on the validation samples of"
        if len(undefined) == len(clients):
            sentence = f"{what} any client: it needs {NEEDS[metric.base_name]} at one client"
            if required or number == 0:
                raise HoldfastError(f"{sentence}; hold out more samples, or choose other metrics")
            warnings.warn(f"{sentence}; it is left out", HoldfastWarning, stacklevel=5)
            continue
        kept.append(metric)
        if len(undefined):
            some = "client " + ", ".join(map(str, undefined[:5])) + (", …" if len(undefined) > 5 else "")
            warnings.warn(
                f"{what} {len(undefined)} of {len(clients)} clients ({some}): it needs "
                f"{NEEDS[metric.base_name]}; means are over the others",
                HoldfastWarning,
                stacklevel=5,
            )
    return kept


# Tests on this machine ----------------------------------------------------------------------------------------


class ValidationSet:
    """The clients' validation samples on the device, ordered by client."""

    def __init__(self, federation: Federation, context: RunContext, metrics: Sequence[Metric]) -> None:
        self.sizes = federation.validation_sizes()
        self.clients = np.flatnonzero(self.sizes)
        self.samples = self.sizes[self.clients]
        self.starts = offsets_of(self.samples)
        self.places = {int(client): place for place, client in enumerate(self.clients)}
        self.context, self.task = context, context.task
        ids, dataset = torch.from_numpy(federation.validation), federation.dataset
        held = replace(
            dataset,
            x_train=dataset.x_train[:0],
            y_train=dataset.y_train[:0],
            x_test=dataset.x_train[ids],
            y_test=dataset.y_train[ids],
            groups=MappingProxyType({}),
        )
        self.dataset, self.test = held, TestSet(held, context)
        self.metrics = list(metrics)
        self.errors = errors_among(metrics)
        y = self.test.y
        self.y = (y.double() if y.is_floating_point() else y).cpu()

    def defined_metrics(self) -> np.ndarray:
        """Which clients' samples define which metric: bool ``[K, metrics]``."""
        targets = torch.split(self.test.y.cpu(), self.samples.tolist())
        return np.array([defined_metrics(self.dataset, y, self.metrics) for y in targets], bool)

    def start(self, method: Method, server: Server) -> PendingValidation:
        """Start the test of the global model by all clients, in one pass. A GPU runs it asynchronously."""
        timer = DeviceTimer(self.context.device)
        kept = self.test.kept(*evaluated_model(method, server), lambda out: method.global_logits(out, server))
        return self._pending(kept, np.arange(len(self.clients)), timer)

    def start_each(
        self,
        clients: Sequence[int],
        models: Sequence[tuple[Tensors, Tensors]],
        scores: Sequence[Scores],
    ) -> PendingValidation | None:
        """Start the tests of the clients' local models, in parallel; None without samples."""
        timer = DeviceTimer(self.context.device)
        chosen = [at for at, client in enumerate(clients) if client in self.places]
        if not chosen:
            return None
        places = np.array([self.places[clients[at]] for at in chosen])
        rows = [slice(int(self.starts[place]), int(self.starts[place + 1])) for place in places]
        kept = self.test.kept_of_each([models[at] for at in chosen], [scores[at] for at in chosen], rows)
        return self._pending(torch.cat(kept), places, timer)

    def _pending(self, kept: Tensor, places: np.ndarray, timer: DeviceTimer) -> PendingValidation:
        task = self.task
        y = self.test.y[torch.from_numpy(self._rows(places)).to(kept.device)]
        losses = task.test_losses(kept, y)
        scores = None if task.compares_samples else task.scores(kept, y)
        weights = None if scores is None else task.weights(kept, y)
        needed = losses is None or any(metric.name != task.score or scores is None for metric in self.metrics)
        pending = PendingValidation(
            self,
            places,
            _column(losses),
            _column(scores),
            _column(weights),
            copied_to_host(kept) if needed else None,
            timer,
        )
        timer.stop()
        return pending

    def values(
        self,
        places: np.ndarray,
        losses: Tensor | None,
        scores: Tensor | None,
        weights: Tensor | None,
        kept: Tensor | None,
    ) -> dict[str, np.ndarray]:
        """The `metric_names` at each of these clients: ``[K]`` each.

        ``losses``, ``scores`` and ``weights`` are columns with one number a sample; None where a sample has none.
        """
        sizes = self.samples[places]
        starts, rows = offsets_of(sizes)[:-1], self._rows(places)
        weight = np.ones(len(rows)) if weights is None else weights.numpy()
        total = np.maximum(np.add.reduceat(weight, starts), 1)
        values: dict[str, np.ndarray] = {}
        if losses is not None:
            values["loss"] = np.add.reduceat(losses.numpy() * weight, starts) / total
        if scores is not None:
            score = np.add.reduceat(scores.numpy(), starts) / total
            values[self.task.score] = -score if self.task.less_is_better else score
        if kept is not None:
            y, each = self.y[torch.from_numpy(rows)], sizes.tolist()
            parts = list(zip(torch.split(kept, each), torch.split(y, each), strict=True))
            if losses is None:
                test_loss = self.task.test_loss
                values["loss"] = np.array([float(test_loss(k, of.to(self.test.y.dtype))) for k, of in parts])
            predictions = [Predictions(self.task, k.double().numpy(), of.numpy()) for k, of in parts]
            for metric in self.metrics:
                if metric.name not in values:
                    values[metric.name] = np.array([metric.measure(one) for one in predictions])
        return {name: values[name] for name in metric_names(self.task, self.metrics)}

    def _rows(self, places: np.ndarray) -> np.ndarray:
        """The rows of these clients' samples, by client."""
        return ranges(self.starts[places], self.samples[places])


def _column(values: Tensor | None) -> Tensor | None:
    """One number a sample, on the host."""
    return None if values is None else copied_to_host(values.double())


@dataclass(eq=False)
class PendingValidation:
    """Tests by clients that may still be running on the device; ``seconds`` is set by ``wait``."""

    validation: ValidationSet
    places: np.ndarray
    losses: Tensor | None
    scores: Tensor | None
    weights: Tensor | None
    kept: Tensor | None
    timer: DeviceTimer
    seconds: float = 0.0

    def wait(self) -> ClientMetrics:
        """Wait for the tests; returns their metrics."""
        self.seconds = self.timer.wait()
        held, places = self.validation, self.places
        values = held.values(places, self.losses, self.scores, self.weights, self.kept)
        return ClientMetrics(held.clients[places], held.samples[places], values)
