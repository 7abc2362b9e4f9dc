"""The metrics of each task, computed from the reduced outputs of a model on all test samples."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from holdfast.core.errors import HoldfastError, HoldfastWarning, unknown
from holdfast.core.measures import LESS_IS_BETTER
from holdfast.metrics.arrays import FloatArray, divide, mean_measured
from holdfast.metrics.predictions import (
    auroc,
    average_precision,
    balanced_accuracy,
    calibration_error,
    concordance,
    f1_by_class,
    r_squared,
)
from holdfast.tasks.base import Task
from holdfast.tasks.numbers import Counts

OwnMetric = Callable[[np.ndarray, np.ndarray], float]
"""A metric of the user's own: from the outputs for all test samples and their targets to a number."""

NEEDS = {
    "auroc": "samples of two classes",
    "auprc": "samples of the positive class",
    "f1": "samples of the positive class",
    "r2": "targets that are not all equal",
    "concordance": "two samples of which the first is known to have had its event earlier",
}
"""The requirements of a metric on the targets, without which it is undefined."""


@dataclass(frozen=True, eq=False)
class Predictions:
    """Predictions for some samples, and their targets."""

    task: Task
    kept: np.ndarray  # [N, ...] what `Task.reduce` keeps of the outputs
    y: np.ndarray  # [N, ...]

    def rows(self, chosen: np.ndarray) -> Predictions:
        return Predictions(self.task, self.kept[chosen], self.y[chosen])

    @cached_property
    def probabilities(self) -> np.ndarray:
        """Of each class or label: ``[N, C]``; for a binary task ``[N, 2]``."""
        z = self.kept.astype(np.float64)
        if self.task.name == "multiclass":
            e = np.exp(z - z.max(-1, keepdims=True))
            return np.asarray(e / e.sum(-1, keepdims=True))
        p = np.exp(-np.logaddexp(0, -z))
        return np.stack([1 - p, p], -1) if self.task.name == "binary" else p

    @cached_property
    def predicted(self) -> np.ndarray:
        """The predicted class ``[N]``, labels ``[N, L]`` or numbers ``[N]`` or ``[N, D]``."""
        if self.task.name == "multiclass":
            return np.asarray(self.kept.argmax(-1))
        if self.task.name in ("binary", "multilabel"):
            return (self.kept > 0).astype(np.int64)
        if isinstance(self.task, Counts):
            z = self.kept.astype(np.float64)
            return np.exp(z) if self.task.loss == "poisson" else np.exp(-np.logaddexp(0, -z)).sum(-1)
        return self.kept

    @cached_property
    def members(self) -> np.ndarray:
        """Which samples have which class or label: bool ``[N, C]``."""
        if self.task.name == "multilabel":
            return np.asarray(self.y > 0)
        return np.asarray(self.y[:, None] == np.arange(self.probabilities.shape[1]))


# Metrics that have a value for each class or label ------------------------------------------------------------


def _one_against_the_rest(
    measure: Callable[[np.ndarray, np.ndarray], float],
) -> Callable[[Predictions], FloatArray]:
    def each(p: Predictions) -> FloatArray:
        pairs = zip(p.probabilities.T, p.members.T, strict=True)
        return np.array([measure(scores, member) for scores, member in pairs])

    return each


def _f1(p: Predictions) -> FloatArray:
    if p.task.name != "multilabel":
        return f1_by_class(p.predicted, p.y, p.probabilities.shape[1])
    pairs = zip(p.predicted.T, p.members.T.astype(np.int64), strict=True)
    return np.array([f1_by_class(guess, true, 2)[1] for guess, true in pairs])


def _overlap(p: Predictions, union: bool) -> FloatArray:
    """Dice or intersection over union of each class, over the pixels of all samples."""
    both, labelled, true = p.kept[:, 3:].sum(0).reshape(-1, 3).T
    score = divide(both, labelled + true - both) if union else divide(2 * both, labelled + true)
    return np.where(true > 0, score, np.nan)


EACH: dict[str, Callable[[Predictions], FloatArray]] = {
    "auroc": _one_against_the_rest(auroc),
    "auprc": _one_against_the_rest(average_precision),
    "f1": _f1,
    "dice": lambda p: _overlap(p, union=False),
    "iou": lambda p: _overlap(p, union=True),
}
"""Metrics with a value for each class or label; the metric is their mean, in a binary task the second class's."""

WEIGHTED = "_weighted"
"""The end of the name of a metric that is a mean over classes weighted by their samples."""


def _over_classes(p: Predictions, name: str) -> float:
    values = EACH[name.removesuffix(WEIGHTED)](p)
    if p.task.name == "binary":
        return float(values[1])
    if not name.endswith(WEIGHTED):
        return float(mean_measured(values))
    weights = np.where(np.isnan(values), 0.0, p.members.sum(0))
    return float(divide((np.where(weights > 0, values, 0.0) * weights).sum(), weights.sum()))


# Metrics of all samples ---------------------------------------------------------------------------------------


def _accuracy(p: Predictions) -> float:
    if p.task.name in ("sequence", "segmentation"):
        return float(p.kept[:, 2].sum() / p.kept[:, 1].sum())
    return float((p.predicted == p.y).mean())


def _ece(p: Predictions) -> float:
    if p.task.name == "multilabel":
        sure, right = np.maximum(p.probabilities, 1 - p.probabilities), p.predicted == p.y
        return calibration_error(sure.ravel(), right.ravel())
    return calibration_error(p.probabilities.max(-1), p.predicted == p.y)


def _perplexity(p: Predictions) -> float:
    if p.task.name == "sequence":
        return float(np.exp(p.kept[:, 0].sum() / p.kept[:, 1].sum()))
    z = p.kept.astype(np.float64)
    own = np.take_along_axis(z, p.y[:, None], -1)[:, 0]
    return float(np.exp((np.logaddexp.reduce(z, -1) - own).mean()))


MEASURES: dict[str, Callable[[Predictions], float]] = {
    "accuracy": _accuracy,
    "balanced_accuracy": lambda p: balanced_accuracy(p.predicted, p.y),
    "ece": _ece,
    "perplexity": _perplexity,
    "mae": lambda p: float(np.abs(p.predicted - p.y).mean()),
    "rmse": lambda p: float(np.sqrt(((p.predicted - p.y) ** 2).mean())),
    "r2": lambda p: r_squared(p.predicted, p.y),
    "concordance": lambda p: concordance(p.kept, p.y[:, 0], p.y[:, 1]),
}


# A run's metrics ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Metric:
    """A metric of a run."""

    name: str
    less_is_better: bool = False
    own: OwnMetric | None = None

    def measure(self, predictions: Predictions) -> float:
        """The metric over some samples; NaN where it is not defined."""
        if self.own is not None:
            return float(self.own(predictions.kept, predictions.y))
        if self.base_name in EACH:
            return _over_classes(predictions, self.name)
        return MEASURES[self.name](predictions)

    @property
    def base_name(self) -> str:
        """The name without the suffix of the mean over classes."""
        return self.name.removesuffix(WEIGHTED)

    def try_on(self, trial: Predictions) -> bool:
        """Whether the metric is defined on samples with artificial outputs; raises an error of a user's metric."""
        if self.own is None:
            return self.base_name not in NEEDS or not np.isnan(self.measure(trial))
        try:
            self.measure(trial)
        except Exception as error:
            raise HoldfastError(
                f"the metric {self.name} fails on outputs of shape {trial.kept.shape} and targets of shape "
                f"{trial.y.shape}: {type(error).__name__}: {error}"
            ) from None
        return True

    def describe(self) -> str | dict[str, Any]:
        """The name, or a mapping for a function of the user's own."""
        if self.own is None:
            return self.name
        return {"name": self.name, "own": True, "less_is_better": self.less_is_better}


def metrics_of(task: Task, chosen: Sequence[str | OwnMetric] | str | None) -> list[Metric]:
    """The metrics of a run, the primary one first; by default those of the task."""
    if isinstance(chosen, str):
        chosen = [part.strip() for part in chosen.split(",") if part.strip()]
    if chosen is not None and not isinstance(chosen, Sequence):
        raise HoldfastError(
            f"metrics is {chosen!r}; it must be a list of names, such as ['auroc', 'accuracy']"
        )
    metrics = [_metric(task, one) for one in (task.default_metrics if chosen is None else chosen)]
    names = [metric.name for metric in metrics]
    if not names:
        raise HoldfastError(
            f"metrics is empty; the first metric of task '{task.name}' is {task.default_metrics[0]}"
        )
    if len(set(names)) < len(names):
        raise HoldfastError(f"metrics names {next(n for n in names if names.count(n) > 1)} twice")
    return metrics


def _metric(task: Task, chosen: str | OwnMetric) -> Metric:
    if isinstance(chosen, str):
        if chosen not in task.metrics:
            raise unknown(f"metric of task '{task.name}'", chosen, task.metrics)
        return Metric(chosen, chosen in LESS_IS_BETTER)
    if not callable(chosen):
        raise HoldfastError(f"a metric is {chosen!r}; it must be the name of a metric, or a function")
    name = getattr(chosen, "__name__", type(chosen).__name__)
    if name in task.metrics or not name.isidentifier():
        raise HoldfastError(f"a custom metric is called {name}, like another metric; rename the function")
    if task.name in ("sequence", "segmentation"):
        raise HoldfastError(
            f"task '{task.name}' does not support custom metrics, because the outputs for all positions are not "
            f"kept; choose from {', '.join(task.metrics)}"
        )
    return Metric(name, bool(getattr(chosen, "less_is_better", False)), chosen)


class Scorer:
    """Measures the metrics of a run over its test samples: of all, by class, by site and by domain.

    ``groups`` holds the names of a group's members, and each test sample's index into them.
    """

    def __init__(
        self, task: Task, metrics: Sequence[Metric], y: np.ndarray, strata: np.ndarray, classes: int,
        groups: Mapping[str, tuple[Sequence[str], np.ndarray]],
    ) -> None:  # fmt: skip
        self.task, self.metrics, self.y = task, list(metrics), y
        self.members = [np.flatnonzero(strata == c) for c in range(classes)]
        self.groups = {
            group: {name: np.flatnonzero(codes == code) for code, name in enumerate(names)}
            for group, (names, codes) in groups.items()
        }

    def check(self, outputs: tuple[int, ...], required: bool) -> list[str]:
        """The names of metrics that are undefined on the test samples; raises an error if they are ``required``.

        Warns of them, and of those that the test samples of a site or a domain do not define. ``outputs`` is the
        shape of what is kept of one sample's outputs.
        """
        undefined = []
        noise = np.random.default_rng(0).random((len(self.y), *outputs))
        trial = Predictions(self.task, noise, self.y)
        for metric in self.metrics:
            defined = metric.try_on(trial)
            needs = None if metric.own is not None else NEEDS.get(metric.base_name)
            if needs is None:
                continue
            if not defined:
                sentence = f"{metric.name} cannot be measured on this test set: it needs {needs}"
                if required:
                    raise HoldfastError(f"{sentence}; choose other metrics, or other test samples")
                warnings.warn(f"{sentence}; it is left out", HoldfastWarning, stacklevel=5)
                undefined.append(metric.name)
                continue
            for group, members in self.groups.items():
                without = [
                    name
                    for name, chosen in members.items()
                    if not len(chosen) or np.isnan(metric.measure(trial.rows(chosen)))
                ]
                if without:
                    shown = ", ".join(without[:5]) + (" and others" if len(without) > 5 else "")
                    warnings.warn(
                        f"{metric.name} cannot be measured for {group} {shown}: it needs {needs} in the test set "
                        "there; it is recorded as null",
                        HoldfastWarning,
                        stacklevel=5,
                    )
        self.metrics = [metric for metric in self.metrics if metric.name not in undefined]
        return undefined

    def record(self, kept: np.ndarray) -> dict[str, Any]:
        """The entries of a round's record, from what was kept of the outputs for all test samples."""
        whole = Predictions(self.task, kept, self.y)
        record: dict[str, Any] = {}
        for metric in self.metrics:
            record[metric.name] = metric.measure(whole)
            if metric.name in EACH and self.task.name != "binary":
                key = "class" if self.task.name == "multiclass" else "label"
                record[f"{key}_{metric.name}"] = EACH[metric.name](whole).tolist()
            elif metric.name == "rmse":
                record["class_rmse"] = [_over(metric, whole, chosen) for chosen in self.members]
            for group, members in self.groups.items():
                record[f"{group}_{metric.name}"] = {
                    name: _over(metric, whole, chosen) for name, chosen in members.items()
                }
        return record


def _over(metric: Metric, whole: Predictions, chosen: np.ndarray) -> float:
    return metric.measure(whole.rows(chosen)) if len(chosen) else float("nan")
