"""How numbers of a table are written, on the command line and on the page alike."""

from __future__ import annotations

import math

from holdfast.metrics.summary import UNKNOWN, format_mean
from holdfast.papers.findings import ResultRow, Value
from holdfast.papers.measures import Measure


def published(value: Value, measure: Measure) -> str:
    """``52.61 ± 1.20``, ``never``, or a dash."""
    if value.published is None:
        return UNKNOWN
    return _number(value.published.value, value.published.deviation, measure.digits)


def ours(value: Value, measure: Measure, line: ResultRow) -> str:
    """The same of our runs; ``failed`` where training broke down, a dash where there is nothing yet."""
    if value.ours is None:
        return "failed" if line.failed else UNKNOWN
    return _number(value.ours, value.deviation, measure.digits)


def difference(value: Value, measure: Measure) -> str:
    """Ours - theirs, with its sign."""
    return "" if value.difference is None else f"{value.difference:+.{measure.digits}f}"


def _number(value: float, deviation: float | None, digits: int) -> str:
    if math.isinf(value):
        return "never"
    return format_mean(value, deviation, digits)
