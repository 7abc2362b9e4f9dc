"""Ours beside theirs: every cell's numbers, and whether what the paper found is found again."""

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

MARGIN = 0.7  # of the published lead: so much of it must be there
POINTS = 2.0  # by which an accuracy in percent may stay below the published one
SPEEDUP = 0.5  # of the published one: so much of a speed-up must be there


@dataclass(frozen=True)
class Value:
    """One measure of one cell: the published number, ours over ``seeds`` that came to one, and ours minus theirs."""

    published: Number | None
    ours: float | None
    deviation: float | None
    seeds: int

    @property
    def difference(self) -> float | None:
        """Ours - theirs; None where one is unknown or not finite."""
        if self.published is None or self.ours is None:
            return None
        difference = self.ours - self.published.value
        return difference if math.isfinite(difference) else None


@dataclass(frozen=True)
class ResultRow:
    """One method in one column; ``values`` in the order of the table's measures."""

    column: str
    row: str
    label: str
    seeds: int  # how many were run
    values: Sequence[Value]
    failed: str | None = None
    no_target: str | None = None


@dataclass(frozen=True)
class Finding:
    """Whether one method is ahead of another as in the paper.

    ``published`` and ``ours`` are leads: differences in the measure, or quotients of rounds. ``level`` is ours
    minus theirs for the method ahead, of an accuracy; None for other measures.
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
        """At least 70 % of the published lead, or half of the published speed-up."""
        return self.ours >= (SPEEDUP if self.kind == "speed-up" else MARGIN) * self.published

    @property
    def level_holds(self) -> bool:
        """At most 2 points below the published accuracy."""
        return self.level is None or self.level >= -POINTS

    @property
    def holds(self) -> bool:
        """Both."""
        return self.lead_holds and self.level_holds

    def __str__(self) -> str:
        """One sentence."""
        if self.kind == "speed-up":
            lead = f"{self.ours:.1f} times as fast" if self.ours else "never there"
            published = f"{self.published:.1f}"
        else:
            lead, published = _apart(self.ours, "ahead", "behind"), f"{self.published:+.2f}"
        level = "" if self.level is None else f", {_apart(self.level, 'above', 'below')} the published level"
        verdict = "holds" if self.holds else "falls short"
        pair = f"{self.ahead} over {self.behind} in {self.measure}"
        return f"{self.column}: {pair}: {lead} (published {published}){level}: {verdict}"


def _apart(difference: float, over: str, under: str) -> str:
    return f"{abs(difference):.2f} {over if difference >= 0 else under}"


@dataclass(frozen=True)
class TableComparison:
    """A table with ours beside theirs."""

    table: Table
    lines: Sequence[ResultRow]
    findings: Sequence[Finding]
    targets: dict[str, float]  # by column: the accuracy that rounds are counted to


def compare(table: Table, cells: Sequence[Cell], results: Results) -> TableComparison:
    """Every cell of a table that is to be shown, published and ours."""
    measures = [measure(name) for name in table.measures]
    lines, targets = [], {}
    every = results.of_table(table) if table.target is not None else ()  # whichever are shown
    for key in table.columns:
        entries = _entries(cells, key, results)
        target = _target(table, key, _entries(every, key, results)) if entries else None
        if target is not None:
            targets[key] = target
        lines += [
            _line(table, key, row, entries[row], measures, target) for row in table.rows if row in entries
        ]
    return TableComparison(table, lines, _findings(table, lines, measures), targets)


def _entries(cells: Sequence[Cell], column: str, results: Results) -> dict[str, list[Entry]]:
    """The runs of a column, by row; none where a row has not been run."""
    entries: dict[str, list[Entry]] = {}
    for cell in cells:
        if cell.column == column:
            found = results.get(cell)
            entries.setdefault(cell.row, []).extend([found] if found is not None else [])
    return entries


def _target(table: Table, column: str, entries: dict[str, list[Entry]]) -> float | None:
    """The accuracy, a fraction, that the rounds of a column are counted to."""
    sound = {row: [e for e in runs if "failed" not in e] for row, runs in entries.items()}
    if table.target is None or not any(sound.values()):
        return None
    if table.target.of == "published":
        return table.target.share * table.target.levels[column] / 100
    if table.target.of == "baseline":
        runs = sound.get(table.paper.baseline, [])
        return _share(table.target, [final_accuracy(entry) for entry in runs])
    best = [float(np.mean([accuracies(entry).max() for entry in runs])) for runs in sound.values() if runs]
    return _share(table.target, [max(best)])


def _share(target: Target, values: Sequence[float]) -> float | None:
    return target.share * sum(values) / len(values) if values else None


def _line(
    table: Table,
    column: str,
    row: str,
    entries: Sequence[Entry],
    measures: Sequence[Measure],
    target: float | None,
) -> ResultRow:
    published = table.published.get((row, column), [None] * len(measures))
    sound = [entry for entry in entries if "failed" not in entry]
    values = []
    for theirs, one in zip(published, measures, strict=True):
        found = [one.of(entry, target) for entry in sound]
        values.append(Value(theirs, *mean_and_deviation(found), sum(value is not None for value in found)))
    return ResultRow(
        column=column,
        row=row,
        label=table.rows[row].label,
        seeds=len(entries),
        values=values,
        failed=next((str(entry["failed"]) for entry in entries if "failed" in entry), None),
        no_target=table.why_no_target(column, row),
    )


def _findings(table: Table, lines: Sequence[ResultRow], measures: Sequence[Measure]) -> list[Finding]:
    at = {(line.column, line.row): line for line in lines}
    findings = []
    for column in table.columns:
        for ahead, behind in table.findings:
            first, second = at.get((column, ahead)), at.get((column, behind))
            if first is None or second is None or first.no_target or second.no_target:
                continue
            for name, one, a, b in zip(table.measures, measures, first.values, second.values, strict=True):
                found = _finding(one, a, b, table)
                if found is not None:
                    kind, published, ours, level = found
                    findings.append(
                        Finding(column, first.label, second.label, name, kind, published, ours, level)
                    )
    return findings


def _finding(
    one: Measure, a: Value, b: Value, table: Table
) -> tuple[Literal["lead", "speed-up"], float, float, float | None] | None:
    """The lead of ``a`` over ``b``: published, ours; nothing where the paper has no lead or we no numbers."""
    if one.bar is None or a.published is None or b.published is None or a.ours is None or b.ours is None:
        return None
    if one.bar == "speed-up":
        return "speed-up", a.published.value, a.ours, None
    if one.bar == "rounds":
        limit = float({**table.paper.settings, **table.settings}["rounds"].value)
        # Who never gets there needed at least all rounds that were run.
        theirs = min(b.published.value, limit) / min(a.published.value, limit)
        ours = min(b.ours, limit) / min(a.ours, limit)
        return ("speed-up", theirs, ours, None) if theirs > 1 else None
    sign = -1 if one.bar == "lower" else 1
    lead = sign * (a.published.value - b.published.value)
    if lead <= 0:
        return None
    level = a.difference if one.bar == "points" else None
    return "lead", lead, sign * (a.ours - b.ours), level
