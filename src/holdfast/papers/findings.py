"""Comparison of published numbers with ours: every cell, and whether the paper's findings hold."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from holdfast.metrics.summary import mean_and_deviation
from holdfast.papers.cells import Cell
from holdfast.papers.measures import (
    Compute,
    Entry,
    TableMeasure,
    accuracies,
    final_accuracy,
    measure,
)
from holdfast.papers.published import Number, PaperTable, Target
from holdfast.papers.results import Results

MIN_LEAD = 0.7  # share of the published lead that ours must reach
MAX_SHORTFALL = 2.0  # percentage points that ours may be below the published accuracy
MIN_SPEEDUP = 0.5  # share of the published speed-up that ours must reach


@dataclass(frozen=True)
class Value:
    """One measure of one cell.

    Attributes:
        published: the paper's number, if it prints one.
        by_seed: ours, of each run that has this measure.
        averaged: the mean over the last ten rounds of each run, for an accuracy of the last round.
    """

    published: Number | None
    by_seed: Mapping[int, float] = field(default_factory=dict)
    averaged: Mapping[int, float] = field(default_factory=dict)

    @property
    def ours(self) -> float | None:
        """The mean over our runs."""
        return mean_and_deviation(self.by_seed.values())[0]

    @property
    def deviation(self) -> float | None:
        """The deviation over at least two seeds."""
        return mean_and_deviation(self.by_seed.values())[1]

    @property
    def seeds(self) -> int:
        """The number of runs in the mean."""
        return len(self.by_seed)

    @property
    def difference(self) -> float | None:
        """Ours minus published, or None if either is missing or infinite."""
        return _minus_published(self.ours, self.published)


def _minus_published(ours: float | None, published: Number | None) -> float | None:
    if published is None or ours is None:
        return None
    difference = ours - published.value
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
        excluded: the reason if the published numbers are not targets.
    """

    column: str
    row: str
    label: str
    seeds: int
    values: Sequence[Value]
    failed: str | None = None
    excluded: str | None = None


@dataclass(frozen=True)
class Score:
    """The lead of one method over another by one score.

    Attributes:
        lead: the mean difference over the seeds that both methods have, or a ratio of rounds.
        level: ours minus published of the leading method, for accuracies; None for other measures.
    """

    lead: float
    level: float | None = None


@dataclass(frozen=True)
class Finding:
    """Whether one method leads another as in the paper.

    The criterion for accuracies is the mean over the last ten rounds, since the accuracy of one round depends on its
    sampled clients; the score of the last round, which the papers print, is shown beside it.

    Attributes:
        column: key of the column.
        ahead, behind: labels of the two methods, in the paper's order.
        measure: name of the measure.
        kind: whether ``published`` and the scores are differences in the measure or ratios of rounds.
        published: the published lead.
        last: by the last round, or the only score.
        averaged: by the mean of the last ten rounds, for accuracies of runs that are long enough.
        seeds: the seeds that both methods have.
    """

    column: str
    ahead: str
    behind: str
    measure: str
    kind: Literal["lead", "speed-up"]
    published: float
    last: Score
    averaged: Score | None = None
    seeds: int = 1

    @property
    def score(self) -> Score:
        """The score by which the finding is judged."""
        return self.averaged or self.last

    @property
    def judged_by(self) -> str:
        """The basis of that score."""
        return measure(self.measure).basis if self.averaged is None else "last ten rounds"

    def lead_holds(self, score: Score) -> bool:
        """Whether the lead is at least 70 % of the published lead, or half of the published speed-up."""
        return score.lead >= (MIN_SPEEDUP if self.kind == "speed-up" else MIN_LEAD) * self.published

    def level_holds(self, score: Score) -> bool:
        """Whether the accuracy is at most 2 points below the published one."""
        return score.level is None or score.level >= -MAX_SHORTFALL

    def holds_by(self, score: Score) -> bool:
        """Whether both the lead and the level hold by a score."""
        return self.lead_holds(score) and self.level_holds(score)

    @property
    def holds(self) -> bool:
        """Whether the finding holds by the score by which it is judged."""
        return self.holds_by(self.score)

    def __str__(self) -> str:
        """One sentence for the command line and the results page."""
        published = f"{self.published:.1f}" if self.kind == "speed-up" else f"{self.published:+.2f}"
        pair = f"{self.ahead} over {self.behind} in {self.measure}"
        verdict = "holds" if self.holds else "falls short"
        text = f"{self.column}: {pair}: {self._describe(self.score, published)}: {verdict}"
        if self.averaged is None:
            return text
        last = "holds" if self.holds_by(self.last) else "falls short"
        return f"{text} (mean of the last ten rounds); last round: {self._describe(self.last)}: {last}"

    def _describe(self, score: Score, published: str | None = None) -> str:
        if self.kind == "speed-up":
            lead = f"{score.lead:.1f} times as fast" if score.lead else "never reached"
        else:
            lead = _difference(score.lead, "ahead", "behind")
        lead += "" if published is None else f" (published {published})"
        if score.level is None:
            return lead
        return f"{lead}, {_difference(score.level, 'above', 'below')} the published level"


def _difference(value: float, positive: str, negative: str) -> str:
    return f"{abs(value):.2f} {positive if value >= 0 else negative}"


@dataclass(frozen=True)
class TableComparison:
    """A table's published numbers compared with ours.

    ``targets`` maps the key of a column to the accuracy, a fraction, to which its rounds are counted.
    """

    table: PaperTable
    rows: Sequence[ResultRow]
    findings: Sequence[Finding]
    targets: dict[str, float]


def compare(table: PaperTable, cells: Sequence[Cell], results: Results) -> TableComparison:
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


def _target_accuracy(table: PaperTable, column: str, entries: dict[str, list[Entry]]) -> float | None:
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
    table: PaperTable,
    column: str,
    row: str,
    entries: Sequence[Entry],
    measures: Sequence[TableMeasure],
    target: float | None,
) -> ResultRow:
    published = table.published.get((row, column), [None] * len(measures))
    completed = _completed(entries)
    values = [
        Value(number, _by_seed(completed, one.compute, target), _by_seed(completed, one.averaged, target))
        for number, one in zip(published, measures, strict=True)
    ]
    return ResultRow(
        column=column,
        row=row,
        label=table.rows[row].label,
        seeds=len(entries),
        values=values,
        failed=next((str(entry["failed"]) for entry in entries if "failed" in entry), None),
        excluded=table.exclusion_reason(column, row),
    )


def _by_seed(entries: Sequence[Entry], compute: Compute, target: float | None) -> dict[int, float]:
    values = {entry["seed"]: compute(entry, target) for entry in entries}
    return {seed: value for seed, value in values.items() if value is not None}


def _findings(
    table: PaperTable, rows: Sequence[ResultRow], measures: Sequence[TableMeasure]
) -> list[Finding]:
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
                    kind, published, last, averaged = lead
                    shared = len(a.by_seed.keys() & b.by_seed.keys())
                    findings.append(
                        Finding(
                            column, first.label, second.label, name, kind, published, last, averaged, shared
                        )
                    )
    return findings


Lead = tuple[Literal["lead", "speed-up"], float, Score, Score | None]
"""Kind, published lead, and our scores: of the last round and of the mean of the last ten."""


def _lead(one: TableMeasure, a: Value, b: Value, table: PaperTable) -> Lead | None:
    """The lead of ``a`` over ``b``.

    None if the measure has no criterion, a number is missing, no seed is shared, or ``a`` does not lead in the paper.
    """
    if one.criterion is None or a.published is None or b.published is None:
        return None
    if a.ours is None or b.ours is None:
        return None
    if one.criterion == "speed-up":
        return "speed-up", a.published.value, Score(a.ours), None
    if one.criterion == "rounds":
        # A method that never reaches the target needs at least as many rounds as were run.
        limit = float(table.settings["rounds"].value)
        published = min(b.published.value, limit) / min(a.published.value, limit)
        ours = min(b.ours, limit) / min(a.ours, limit)
        return ("speed-up", published, Score(ours), None) if published > 1 else None
    sign = -1 if one.criterion == "lower" else 1
    published = sign * (a.published.value - b.published.value)
    if published <= 0:
        return None
    scores = []
    for runs, others in ((a.by_seed, b.by_seed), (a.averaged, b.averaged)):
        lead = _paired_difference(runs, others)
        mean, _ = mean_and_deviation(runs.values())
        level = _minus_published(mean, a.published) if one.criterion == "points" else None
        scores.append(None if lead is None else Score(sign * lead, level))
    last, averaged = scores
    return None if last is None else ("lead", published, last, averaged)


def _paired_difference(a: Mapping[int, float], b: Mapping[int, float]) -> float | None:
    """The mean difference over the seeds in both; None if there is none."""
    shared = a.keys() & b.keys()
    return float(np.mean([a[seed] - b[seed] for seed in sorted(shared)])) if shared else None
