"""Published numbers compared with ours: every cell, and whether the paper's findings hold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from holdfast.metrics.summary import mean_and_deviation
from holdfast.papers.cells import Cell
from holdfast.papers.measures import (
    Entry,
    Measure,
    accuracies,
    final_accuracy,
    measure,
)
from holdfast.papers.published import Number, Table, Target
from holdfast.papers.results import Results

MIN_LEAD = 0.7  # share of the published lead that ours must reach
MAX_SHORTFALL = 2.0  # percentage points that ours may be below the published accuracy
MIN_SPEEDUP = 0.5  # share of the published speed-up that ours must reach


@dataclass(frozen=True)
class Value:
    """One measure of one cell.

    Attributes:
        published: the paper's number, if it prints one.
        ours: the mean over our runs, if any has this measure.
        deviation: over seeds, with at least two of them.
        seeds: the number of runs in the mean.
    """

    published: Number | None
    ours: float | None
    deviation: float | None
    seeds: int

    @property
    def difference(self) -> float | None:
        """Ours minus published, or None if either is missing or infinite."""
        if self.published is None or self.ours is None:
            return None
        difference = self.ours - self.published.value
        return difference if math.isfinite(difference) else None


@dataclass(frozen=True)
class ResultRow:
    """One method in one column of a table.

    Attributes:
        column, row: keys in the table.
        label: the method's name in print.
        seeds: the number of stored runs, failed ones included.
        values: one for each of the table's measures.
        failed: the error of the first failed run.
        excluded: why the published numbers are not targets, if they are not.
    """

    column: str
    row: str
    label: str
    seeds: int
    values: Sequence[Value]
    failed: str | None = None
    excluded: str | None = None


@dataclass(frozen=True)
class Finding:
    """Whether one method leads another as in the paper.

    Attributes:
        column: key of the column.
        ahead, behind: labels of the two methods, in the paper's order.
        measure: name of the measure.
        kind: whether ``published`` and ``ours`` are differences in the measure or ratios of rounds.
        published, ours: the lead.
        level: ours minus published of the leading method, for accuracies; None for other measures.
    """

    column: str
    ahead: str
    behind: str
    measure: str
    kind: Literal["lead", "speed-up"]
    published: float
    ours: float
    level: float | None

    @property
    def lead_holds(self) -> bool:
        """Whether our lead is at least 70 % of the published lead, or half of the published speed-up."""
        return self.ours >= (MIN_SPEEDUP if self.kind == "speed-up" else MIN_LEAD) * self.published

    @property
    def level_holds(self) -> bool:
        """Whether our accuracy is at most 2 points below the published one."""
        return self.level is None or self.level >= -MAX_SHORTFALL

    @property
    def holds(self) -> bool:
        """Whether both the lead and the level hold."""
        return self.lead_holds and self.level_holds

    def __str__(self) -> str:
        """One sentence for the command line and the results page."""
        if self.kind == "speed-up":
            lead = f"{self.ours:.1f} times as fast" if self.ours else "never reached"
            published = f"{self.published:.1f}"
        else:
            lead, published = _difference(self.ours, "ahead", "behind"), f"{self.published:+.2f}"
        level = (
            "" if self.level is None else f", {_difference(self.level, 'above', 'below')} the published level"
        )
        verdict = "holds" if self.holds else "falls short"
        pair = f"{self.ahead} over {self.behind} in {self.measure}"
        return f"{self.column}: {pair}: {lead} (published {published}){level}: {verdict}"


def _difference(value: float, positive: str, negative: str) -> str:
    return f"{abs(value):.2f} {positive if value >= 0 else negative}"


@dataclass(frozen=True)
class TableComparison:
    """A table's published numbers compared with ours.

    ``targets`` maps the key of a column to the accuracy, a fraction, to which its rounds are counted.
    """

    table: Table
    rows: Sequence[ResultRow]
    findings: Sequence[Finding]
    targets: dict[str, float]


def compare(table: Table, cells: Sequence[Cell], results: Results) -> TableComparison:
    """Compare the given cells of a table with their stored runs.

    A column's target accuracy is computed from all stored runs of the column, whichever cells are given.
    """
    measures = [measure(name) for name in table.measures]
    rows, targets = [], {}
    all_cells = results.of_table(table) if table.target is not None else ()
    for column in table.columns:
        entries = _entries(cells, column, results)
        target = _target_accuracy(table, column, _entries(all_cells, column, results)) if entries else None
        if target is not None:
            targets[column] = target
        rows += [
            _result_row(table, column, row, entries[row], measures, target)
            for row in table.rows
            if row in entries
        ]
    return TableComparison(table, rows, _findings(table, rows, measures), targets)


def _entries(cells: Sequence[Cell], column: str, results: Results) -> dict[str, list[Entry]]:
    """The stored runs of a column by row; an empty list for a row without runs."""
    entries: dict[str, list[Entry]] = {}
    for cell in cells:
        if cell.column == column:
            entry = results.get(cell)
            entries.setdefault(cell.row, []).extend([entry] if entry is not None else [])
    return entries


def _completed(entries: Sequence[Entry]) -> list[Entry]:
    return [entry for entry in entries if "failed" not in entry]


def _target_accuracy(table: Table, column: str, entries: dict[str, list[Entry]]) -> float | None:
    """The accuracy, a fraction, to which the rounds of a column are counted; None if it is not known yet."""
    completed = {row: _completed(runs) for row, runs in entries.items()}
    if table.target is None or not any(completed.values()):
        return None
    if table.target.of == "published":
        return table.target.share * table.target.levels[column] / 100
    if table.target.of == "baseline":
        runs = completed.get(table.paper.baseline, [])
        return _share_of_mean(table.target, [final_accuracy(entry) for entry in runs])
    best = [
        float(np.mean([accuracies(entry).max() for entry in runs])) for runs in completed.values() if runs
    ]
    return _share_of_mean(table.target, [max(best)])


def _share_of_mean(target: Target, values: Sequence[float]) -> float | None:
    return target.share * sum(values) / len(values) if values else None


def _result_row(
    table: Table,
    column: str,
    row: str,
    entries: Sequence[Entry],
    measures: Sequence[Measure],
    target: float | None,
) -> ResultRow:
    published = table.published.get((row, column), [None] * len(measures))
    values = []
    for number, one in zip(published, measures, strict=True):
        ours = [one.compute(entry, target) for entry in _completed(entries)]
        values.append(Value(number, *mean_and_deviation(ours), sum(value is not None for value in ours)))
    return ResultRow(
        column=column,
        row=row,
        label=table.rows[row].label,
        seeds=len(entries),
        values=values,
        failed=next((str(entry["failed"]) for entry in entries if "failed" in entry), None),
        excluded=table.exclusion_reason(column, row),
    )


def _findings(table: Table, rows: Sequence[ResultRow], measures: Sequence[Measure]) -> list[Finding]:
    by_key = {(row.column, row.row): row for row in rows}
    findings = []
    for column in table.columns:
        for ahead, behind in table.findings:
            first, second = by_key.get((column, ahead)), by_key.get((column, behind))
            if first is None or second is None or first.excluded or second.excluded:
                continue
            for name, one, a, b in zip(table.measures, measures, first.values, second.values, strict=True):
                lead = _lead(one, a, b, table)
                if lead is not None:
                    kind, published, ours, level = lead
                    findings.append(
                        Finding(column, first.label, second.label, name, kind, published, ours, level)
                    )
    return findings


def _lead(
    one: Measure, a: Value, b: Value, table: Table
) -> tuple[Literal["lead", "speed-up"], float, float, float | None] | None:
    """Kind, published lead, our lead and level of ``a`` over ``b``.

    None if the measure has no criterion, a number is missing, or ``a`` does not lead in the paper.
    """
    if (
        one.criterion is None
        or a.published is None
        or b.published is None
        or a.ours is None
        or b.ours is None
    ):
        return None
    if one.criterion == "speed-up":
        return "speed-up", a.published.value, a.ours, None
    if one.criterion == "rounds":
        # A method that never reaches the target needs at least as many rounds as were run.
        limit = float({**table.paper.settings, **table.settings}["rounds"].value)
        published = min(b.published.value, limit) / min(a.published.value, limit)
        ours = min(b.ours, limit) / min(a.ours, limit)
        return ("speed-up", published, ours, None) if published > 1 else None
    sign = -1 if one.criterion == "lower" else 1
    lead = sign * (a.published.value - b.published.value)
    if lead <= 0:
        return None
    level = a.difference if one.criterion == "points" else None
    return "lead", lead, sign * (a.ours - b.ours), level
