"""Federated evaluation: models tested by every client on its own validation samples."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdfast.core.errors import HoldfastError, HoldfastWarning
from holdfast.core.measures import LESS_IS_BETTER
from holdfast.data.federation import Federation
from holdfast.data.indexing import offsets_of, ranges
from holdfast.engine.evaluation import DeviceTimer, TestSet, copied_to_host
from holdfast.methods.base import Tensors
from holdfast.methods.context import RunContext
from holdfast.metrics.by_task import NEEDS, Metric, Predictions
from holdfast.metrics.over_sites import sample_mean, site_mean, site_spread, worst_site
from holdfast.models.network import Output

MAX_SITES = 1000  # up to this number, the values of each site are recorded

Scores = Callable[[Output], Tensor]


class ValidationSet:
    """The clients' validation samples on the device, ordered by client."""

    def __init__(self, federation: Federation, context: RunContext, metrics: Sequence[Metric]) -> None:
        sizes = federation.validation_sizes()
        self.clients = np.flatnonzero(sizes)
        self.samples = sizes[self.clients]
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
        self.test = TestSet(held, context)
        self.metrics = list(metrics)
        y = self.test.y
        self.y = (y.double() if y.is_floating_point() else y).cpu()

    def check_metrics(self, required: bool) -> None:
        """Leave out metrics that no client's samples define, with a warning; raise if it is the primary one.

        If metrics were asked for (``required``), each of them raises. Warns of clients that do not define one.
        """
        outputs = torch.zeros(
            (1, *self.test.output_shape), dtype=self.context.dtype, device=self.test.y.device
        )
        shape = self.task.reduce(outputs, self.test.y[:1]).shape[1:]
        noise = torch.from_numpy(np.random.default_rng(0).random((len(self.y), *shape)))
        sizes = self.samples.tolist()
        trials = [
            Predictions(self.task, kept.numpy(), y.numpy())
            for kept, y in zip(torch.split(noise, sizes), torch.split(self.y, sizes), strict=True)
        ]
        kept_metrics = []
        for number, metric in enumerate(self.metrics):
            undefined = [k for k, trial in zip(self.clients, trials, strict=True) if not metric.try_on(trial)]
            what = f"{metric.name} cannot be measured on the validation samples of"
            if len(undefined) == len(trials):
                sentence = f"{what} any client: it needs {NEEDS[metric.base_name]} at one client"
                if required or number == 0:
                    raise HoldfastError(f"{sentence}; hold out more samples, or choose other metrics")
                warnings.warn(f"{sentence}; it is left out", HoldfastWarning, stacklevel=5)
                continue
            kept_metrics.append(metric)
            if undefined:
                some = "client " + ", ".join(map(str, undefined[:5]))
                warnings.warn(
                    f"{what} {len(undefined)} of {len(trials)} clients ({some}{', …' if len(undefined) > 5 else ''}): "
                    f"it needs {NEEDS[metric.base_name]}; means are over the others",
                    HoldfastWarning,
                    stacklevel=5,
                )
        self.metrics = kept_metrics

    # Tests ----------------------------------------------------------------------------------------------

    def start(self, params: Tensors, buffers: Tensors, scores: Scores) -> PendingValidation:
        """Start the test of one model by all clients. A GPU runs it asynchronously."""
        timer = DeviceTimer(self.context.device)
        return self._pending(self.test.kept(params, buffers, scores), np.arange(len(self.clients)), timer)

    def start_each(
        self,
        clients: Sequence[int],
        models: Sequence[tuple[Tensors, Tensors]],
        scores: Sequence[Scores],
    ) -> PendingValidation | None:
        """Start the tests of clients' own models, the models side by side; None if none has validation samples."""
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
        """The loss, the score and the run's metrics at each of these clients: ``[K]`` each.

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
        return values

    def record(self, places: np.ndarray, values: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """The entry of a round's record."""
        samples, clients = self.samples[places], self.clients[places]
        record: dict[str, Any] = {name: sample_mean(each, samples) for name, each in values.items()}
        worst = {name: worst_site(each, self._less_is_better(name)) for name, each in values.items()}
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

    def _less_is_better(self, name: str) -> bool:
        return name in LESS_IS_BETTER or any(m.less_is_better for m in self.metrics if m.name == name)

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

    def wait(self) -> dict[str, Any]:
        """Wait for the tests; returns the entry of a round's record."""
        return wait_for_all([self])

    def values(self) -> dict[str, np.ndarray]:
        """Wait for the tests; returns the metrics at each client."""
        self.seconds = self.timer.wait()
        return self.validation.values(self.places, self.losses, self.scores, self.weights, self.kept)


def wait_for_all(pending: Sequence[PendingValidation]) -> dict[str, Any]:
    """Wait for tests of one round; returns their common entry of its record."""
    of_each = [one.values() for one in pending]
    values = {name: np.concatenate([each[name] for each in of_each]) for name in of_each[0]}
    return pending[0].validation.record(np.concatenate([one.places for one in pending]), values)
