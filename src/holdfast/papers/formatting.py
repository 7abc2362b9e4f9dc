"""Formatting of a table's numbers, on the command line and on the results page."""

from __future__ import annotations

import math

from holdfast.metrics.summary import UNKNOWN, format_mean, mean_and_deviation
from holdfast.papers.findings import Finding, ResultRow, Score, Value
from holdfast.papers.measures import TableMeasure
from holdfast.papers.published import PaperTable


def anchor(table: PaperTable) -> str:
    """The name of a table in links and in the names of its files."""
    return table.id.replace("/", "-")


def format_published(value: Value, measure: TableMeasure) -> str:
    """``52.61 ± 1.20``, ``never``, or a dash if the paper has no number."""
    if value.published is None:
        return UNKNOWN
    return _number(value.published.value, value.published.deviation, measure.digits)


def format_ours(value: Value, measure: TableMeasure, row: ResultRow) -> str:
    """The same for our runs, or ``not measured``, ``failed`` if training diverged, a dash if there is no run."""
    if measure.not_measured:
        return "not measured"
    if value.ours is None:
        return "failed" if row.failed else UNKNOWN
    return _number(value.ours, value.deviation, measure.digits)


def format_averaged(value: Value, measure: TableMeasure) -> str:
    """The mean of the last ten rounds, or nothing where it is not computed."""
    mean, deviation = mean_and_deviation(value.averaged.values())
    return "" if mean is None else _number(mean, deviation, measure.digits)


def format_difference(value: Value, measure: TableMeasure) -> str:
    """Ours minus published with its sign, or nothing if either is missing."""
    return "" if value.difference is None else f"{value.difference:+.{measure.digits}f}"


def format_score(finding: Finding, score: Score | None) -> str:
    """``+5.53, level +5.10``: a lead over the other method, and ours minus the published accuracy of the first."""
    if score is None:
        return ""
    if finding.kind == "speed-up":
        return f"{score.lead:.1f} times as fast" if score.lead else "never reached"
    return f"{score.lead:+.2f}" + ("" if score.level is None else f", level {score.level:+.2f}")


def format_published_lead(finding: Finding) -> str:
    """The lead of a finding in the paper."""
    return f"{finding.published:.1f}" if finding.kind == "speed-up" else f"{finding.published:+.2f}"


def _number(value: float, deviation: float | None, digits: int) -> str:
    if math.isinf(value):
        return "never"
    return format_mean(value, deviation, digits)
