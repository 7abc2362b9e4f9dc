"""The numbers that the papers' tables print, computed from stored runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from holdfast import metrics
from holdfast.core.errors import unknown
from holdfast.metrics.summary import mean_and_deviation

LAST_ROUNDS = 10  # rounds over which an accuracy is averaged, since it fluctuates between rounds
MIN_ROUNDS = 2 * LAST_ROUNDS  # of a run whose last rounds are averaged
LAST_EPOCHS = 10  # FedMLP's accuracies are means over the last ten global epochs

FIRST_ROUND = "first round at the target"
EPOCHS = "last ten global epochs"

Entry = Mapping[str, Any]
"""A run as `holdfast.papers.results` stores it."""

Compute = Callable[[Entry, float | None], float | None]
"""Computes a number from a stored run and the column's target accuracy, a fraction or None.

Returns None if the run did not record what the number needs.
"""


@dataclass(frozen=True)
class TableMeasure:
    """A number that a table prints.

    Attributes:
        label: its name in the table's header.
        digits: decimals to print.
        criterion: how methods are compared by it (see `holdfast.papers.findings`), or None.
        compute: computes it from a stored run.
        averaged: computes the mean over the last ten rounds, for an accuracy of the last round alone.
        basis: the records that ``compute`` uses.
        not_measured: for a measure that only the paper has, the reason why runs do not record it.
    """

    label: str
    digits: int
    criterion: Literal["points", "lower", "higher", "rounds", "speed-up"] | None
    compute: Compute
    averaged: Compute = lambda entry, target: None
    basis: str = "last round"
    not_measured: str | None = None


def measure(name: str) -> TableMeasure:
    """The measure with this name in a table's YAML.

    ``accuracy@30`` is the accuracy at round 30, ``rounds@0.9`` the rounds to 0.9 of the target accuracy, ``site@va``
    the score at the site va.
    """
    kind, _, number = name.partition("@")
    if number and kind == "site":
        return TableMeasure(number, 1, None, lambda entry, _: _percent(entry["final"]["sites"].get(number)))
    if number and kind == "accuracy":
        at = int(number)
        return TableMeasure(
            f"accuracy % at round {at}",
            1,
            "points",
            lambda entry, _: _percent(_at(entry, at)),
            basis=f"round {at}",
        )
    if number and kind == "rounds":
        share = float(number)
        return TableMeasure(
            f"rounds to {number} A",
            0,
            "rounds",
            lambda entry, target: None if target is None else _rounds(entry, share * target),
            basis=FIRST_ROUND,
        )
    if name not in MEASURES:
        raise unknown("measure", name, MEASURES)
    return MEASURES[name]


def accuracies(entry: Entry) -> np.ndarray:
    """Accuracy after each round, a fraction; the mean over domains or sites where the data has some.

    For tasks without an accuracy it is the task's score.
    """
    curves, score = entry["curves"], entry.get("score", "accuracy")
    return np.array(curves.get("domain_accuracy", curves.get("site_mean", curves[score])), float)


def final_accuracy(entry: Entry) -> float:
    """Accuracy after the last round, a fraction."""
    return float(accuracies(entry)[-1])


def mean_of_last_rounds(entry: Entry) -> float | None:
    """Mean accuracy over the last ten rounds, a fraction; None for runs too short for it."""
    curve = accuracies(entry)
    return float(curve[-LAST_ROUNDS:].mean()) if len(curve) >= MIN_ROUNDS else None


def _percent(value: float | None) -> float | None:
    return None if value is None else 100 * value


def _at(entry: Entry, round: int) -> float | None:
    curve = accuracies(entry)
    return float(curve[round - 1]) if round <= len(curve) else None


def _rounds(entry: Entry, target: float | None) -> float | None:
    """The first round whose accuracy reaches the target, or infinity."""
    if target is None:
        return None
    reached = metrics.rounds_to_target(accuracies(entry), target)
    return math.inf if reached is None else float(reached)


def _speedup(entry: Entry, target: float | None) -> float | None:
    rounds = _rounds(entry, target)
    return None if rounds is None else len(accuracies(entry)) / rounds


def _at_target(entry: Entry, target: float | None) -> float | None:
    rounds = _rounds(entry, target)
    return None if rounds is None or math.isinf(rounds) else _percent(_at(entry, int(rounds)))


def _stream(name: str) -> Compute:
    def compute(entry: Entry, target: float | None) -> float | None:
        mean, _ = mean_and_deviation(entry["curves"].get(name, ())[-LAST_EPOCHS:])
        return _percent(mean)

    return compute


def _final(name: str) -> Compute:
    def compute(entry: Entry, target: float | None) -> float | None:
        value = entry["final"].get(name)
        return None if value is None else float(value)

    return compute


def _published_only(label: str, digits: int, reason: str) -> TableMeasure:
    return TableMeasure(label, digits, None, lambda entry, target: None, not_measured=reason)


SECOND_LAYER = "the released network does not have the second layer of 128 units that these numbers are about"

MEASURES: dict[str, TableMeasure] = {
    "accuracy": TableMeasure(
        "accuracy %",
        2,
        "points",
        lambda entry, _: _percent(final_accuracy(entry)),
        averaged=lambda entry, _: _percent(mean_of_last_rounds(entry)),
    ),
    "site-mean": TableMeasure(
        "mean of sites %", 2, "points", lambda entry, _: _percent(final_accuracy(entry))
    ),
    "own-site": TableMeasure(
        "own site %", 2, None, lambda entry, _: _percent(entry["final"].get("own_site"))
    ),
    "forgetting": TableMeasure("forgetting", 2, "lower", _final("forgetting")),
    "rounds": TableMeasure("rounds to target", 0, "rounds", _rounds, basis=FIRST_ROUND),
    "rounds-to-baseline": TableMeasure("rounds to FedAvg's last accuracy", 0, None, _rounds),
    "speedup": TableMeasure("speed-up", 1, "speed-up", _speedup, basis=FIRST_ROUND),
    "accuracy-at-target": TableMeasure("accuracy % at that round", 2, None, _at_target),
    "A_sel": TableMeasure("A_sel %", 2, "points", _stream("A_sel"), basis=EPOCHS),
    "A_loc": TableMeasure("A_loc %", 2, "points", _stream("A_loc"), basis=EPOCHS),
    "A_glo": TableMeasure("A_glo %", 2, "points", _stream("A_glo"), basis=EPOCHS),
    "A_pro": TableMeasure("A_pro %", 2, "points", _stream("A_pro"), basis=EPOCHS),
    "A_loc_t": TableMeasure("A_loc-t %", 2, "points", _stream("A_loc_t"), basis=EPOCHS),
    "A_glo_t": TableMeasure("A_glo-t %", 2, "points", _stream("A_glo_t"), basis=EPOCHS),
    "alignment-local": TableMeasure("fc 512, local", 3, "higher", _final("alignment_local")),
    "alignment-global": TableMeasure("fc 512, global", 3, "higher", _final("alignment_global")),
    "alignment-local-2": _published_only("fc 128, local", 3, SECOND_LAYER),
    "alignment-global-2": _published_only("fc 128, global", 3, SECOND_LAYER),
}
"""The measures of the tables; percentages where the papers print them, forgetting as a fraction."""
