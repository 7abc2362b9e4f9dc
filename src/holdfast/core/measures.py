"""The measures of runs: names, directions and formats of metrics in records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LESS_IS_BETTER = frozenset({"mae", "rmse", "ece", "perplexity", "loss"})
"""Metrics for which lower values are better."""

SCORES = {"regression": "mae", "counts": "mae", "survival": "concordance"}
"""The metric by class of tasks without an accuracy."""


@dataclass(frozen=True)
class Measure:
    """The name of a metric in records, and its direction."""

    name: str
    less_is_better: bool = False

    @property
    def sign(self) -> int:
        """The factor, 1 or -1, with which higher values are better."""
        return -1 if self.less_is_better else 1

    @property
    def is_share(self) -> bool:
        """Whether it is shown in per cent."""
        return self.name.removeprefix(VALIDATION) in SHARES

    @property
    def scale(self) -> int:
        """The factor from a value to the number shown."""
        return 100 if self.is_share else 1

    @property
    def on_validation(self) -> Measure:
        """The same metric on the clients' validation samples."""
        return Measure(f"{VALIDATION}{self.name}", self.less_is_better)

    @property
    def label(self) -> str:
        """The name in words: ``accuracy``, ``validation accuracy``."""
        return self.name.replace(".", " ")

    @property
    def title(self) -> str:
        """The name as the head of a column."""
        return f"{self.label} (%)" if self.is_share else self.label

    def text(self, value: float) -> str:
        """A value as text, such as ``61.20%`` or ``0.6557``."""
        return f"{value:.2%}" if self.is_share else f"{value:.4g}"


SHARES = frozenset({"accuracy", "balanced_accuracy"})

VALIDATION = "validation."
"""What precedes the name of a metric on the clients' validation samples."""


def measures(experiment: Mapping[str, Any]) -> list[Measure]:
    """The metrics of a run, the primary one first; accuracy for runs that do not record them."""
    return [_measure(one) for one in experiment.get("metrics") or ["accuracy"]]


def primary_measure(experiment: Mapping[str, Any]) -> Measure:
    """The primary metric of a run: the first of its metrics."""
    return measures(experiment)[0]


def _measure(described: str | Mapping[str, Any]) -> Measure:
    if isinstance(described, Mapping):
        return Measure(str(described["name"]), bool(described.get("less_is_better")))
    return Measure(str(described), described in LESS_IS_BETTER)


def score_measure(experiment: Mapping[str, Any]) -> Measure:
    """The metric that a run records by class and for local models."""
    task = experiment.get("task") or {}
    name = SCORES.get(task.get("name", ""), "accuracy")
    return Measure(name, name in LESS_IS_BETTER)
