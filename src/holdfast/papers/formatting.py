"""How a table's numbers are written, on the command line and on the results page."""

from __future__ import annotations

import math

from holdfast.metrics.summary import UNKNOWN, format_mean, mean_and_deviation
from holdfast.papers.findings import ResultRow, Value
from holdfast.papers.measures import Measure


def format_published(value: Value, measure: Measure) -> str:
    """``52.61 ± 1.20``, ``never``, or a dash if the paper has no number."""
    if value.published is None:
        return UNKNOWN
    return _number(value.published.value, value.published.deviation, measure.digits)


def format_ours(value: Value, measure: Measure, row: ResultRow) -> str:
    """The same for our runs, or ``not measured``, ``failed`` if training diverged, a dash if there is no run."""
    if measure.not_measured:
        return "not measured"
    if value.ours is None:
        return "failed" if row.failed else UNKNOWN
    return _number(value.ours, value.deviation, measure.digits)


def format_averaged(value: Value, measure: Measure) -> str:
    """The mean of the last ten rounds, or nothing where it is not computed."""
    mean, deviation = mean_and_deviation(value.averaged.values())
    return "" if mean is None else _number(mean, deviation, measure.digits)


def format_difference(value: Value, measure: Measure) -> str:
    """Ours minus published with its sign, or nothing if either is missing."""
    return "" if value.difference is None else f"{value.difference:+.{measure.digits}f}"


def _number(value: float, deviation: float | None, digits: int) -> str:
    if math.isinf(value):
        return "never"
    return format_mean(value, deviation, digits)
