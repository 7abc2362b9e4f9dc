"""The measures by which runs are judged, for readers of their records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LESS_IS_BETTER = frozenset({"mae", "rmse", "ece", "perplexity", "loss"})
"""Metrics of which less is better."""

SCORES = {"regression": "mae", "counts": "mae", "survival": "concordance"}
"""The metric by class of tasks that have another one than accuracy."""


@dataclass(frozen=True)
class Measure:
    """The name of a metric in records, and its direction."""

    name: str
    less_is_better: bool = False

    @property
    def sign(self) -> int:
        """What to multiply values by, so that more is better."""
        return -1 if self.less_is_better else 1

    @property
    def is_share(self) -> bool:
        """Whether it is shown in per cent."""
        return self.name in SHARES


SHARES = frozenset({"accuracy", "balanced_accuracy"})


def primary_measure(experiment: Mapping[str, Any]) -> Measure:
    """The metric by which a run is judged: the first of its metrics; accuracy for runs that do not record them."""
    first = (experiment.get("metrics") or ["accuracy"])[0]
    if isinstance(first, Mapping):
        return Measure(str(first["name"]), bool(first.get("less_is_better")))
    return Measure(str(first), first in LESS_IS_BETTER)


def score_measure(experiment: Mapping[str, Any]) -> Measure:
    """The metric that a run records by class and for local models."""
    task = experiment.get("task") or {}
    name = SCORES.get(task.get("name", ""), "accuracy")
    return Measure(name, name in LESS_IS_BETTER)
