"""The results page: every table with published numbers and ours, findings, notes, settings and curves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, product
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from holdfast.core import files
from holdfast.core.errors import HoldfastError
from holdfast.metrics.summary import UNKNOWN
from holdfast.papers.cells import Cell
from holdfast.papers.findings import TableComparison, compare
from holdfast.papers.formatting import format_averaged, format_ours, format_published
from holdfast.papers.measures import Entry, accuracies, measure
from holdfast.papers.published import Setting, Table, load_tables
from holdfast.papers.results import Results

if TYPE_CHECKING:
    from holdfast.report.panels import Line

MAX_PANELS = 6  # columns of one table that are drawn
MARKS = ("†", "‡", "§", "¶")

HEAD = """# Results

The tables of six papers, reproduced. Each cell shows the published number first, then ours: 52.61 · **53.40**, or
*not run*; for several seeds the mean, with their deviation and their number: **53.40 ± 1.20** (3). A dash is a number
that the paper does not print, or that a run did not record. † and ‡ mark published numbers that are not targets, for
the reason given below their table.

A finding *holds* if the method that leads in the paper leads here by at least 70 % of the published lead and its
accuracy is at most 2 points below the published one; a speed-up holds if it is at least half of the published one.

Every number in a table comes from `results/`, which holds each run's settings, versions, device and curves. Notes also
mention runs that were not kept, and say so.
`holdfast reproduce TABLE` runs what is missing; `holdfast reproduce --page docs/results.md` writes this page.
`--workers 12` runs twelve cells at a time; on one GPU this is fastest with CUDA's multi-process service
(`nvidia-cuda-mps-control -d`), without which the processes take turns.
"""


def write_page(results: str | Path, page: Path) -> Path:
    """Write the page, and its figures into ``images/results`` in the same folder; returns the figures' folder."""
    if page.is_dir():
        raise HoldfastError(f"{page} is a folder; name a file for the page, such as docs/results.md")
    stored = Results(results)
    tables = list(load_tables().values())
    cells = {table.id: stored.of_table(table) for table in tables}
    comparisons = {table.id: compare(table, cells[table.id], stored) for table in tables}
    images = page.parent / "images" / "results"
    drawn: set[frozenset[str]] = set()  # sets of runs; tables of the same runs would have the same figures
    parts = [HEAD, _summary(tables, comparisons, cells, stored)]
    for heading, group in groupby(tables, key=_heading):
        parts.append(heading)
        for table in group:
            runs = frozenset(cell.hash for cell in cells[table.id] if stored.get(cell) is not None)
            figures = [] if runs in drawn else _draw(table, cells[table.id], stored, images)
            drawn.add(runs)
            parts.append(_section(comparisons[table.id], figures, page.parent))
    with files.writing(page):
        page.parent.mkdir(parents=True, exist_ok=True)
    files.replace(page, ("\n\n".join(part.strip() for part in parts) + "\n").encode())
    return images


def _summary(
    tables: Sequence[Table],
    comparisons: Mapping[str, TableComparison],
    cells: Mapping[str, Sequence[Cell]],
    stored: Results,
) -> str:
    lines = ["| table | title | cells run | findings that hold |", "|---|---|---|---|"]
    for table in tables:
        pairs = {(cell.column, cell.row) for cell in cells[table.id]}
        done = {(cell.column, cell.row) for cell in cells[table.id] if stored.get(cell) is not None}
        findings = comparisons[table.id].findings
        hold = f"{sum(f.holds for f in findings)} of {len(findings)}" if findings else UNKNOWN
        link = f"[{table.id}](#{_anchor(table)})"
        lines.append(f"| {link} | {table.title} | {len(done)} of {len(pairs)} | {hold} |")
    return "\n".join(lines)


def _heading(table: Table) -> str:
    if table.is_search:
        return "## Searches for settings that the papers do not state"
    paper = table.paper
    title = paper.title if paper.title.startswith(paper.name) else f"{paper.name}: {paper.title}"
    return f"## {title}\n\n{paper.reference}.\n\n{paper.summary}"


def _anchor(table: Table) -> str:
    return table.id.replace("/", "-")


def _section(comparison: TableComparison, figures: Sequence[Path], base: Path) -> str:
    table = comparison.table
    parts = [f'<a id="{_anchor(table)}"></a>\n\n### {table.id}: {table.title}']
    if table.is_search and not any(row.seeds for row in comparison.rows):
        return f"{parts[0]}\n\nNot run."
    if len(table.columns) == 1:
        parts.append(_grid(comparison, range(len(table.measures))))
    else:
        parts += [_grid(comparison, [position]) for position in range(len(table.measures))]
    parts += [f"{mark} {reason}" for reason, mark in _marks(comparison).items()]
    parts += _not_measured(table)
    if comparison.targets:
        targets = ", ".join(
            f"{table.columns[key].label} {value:.1%}" for key, value in comparison.targets.items()
        )
        published = table.target is not None and table.target.of == "published"
        parts.append(f"Target accuracies, {'published' if published else 'ours'}: {targets}.")
    if comparison.findings:
        parts.append("\n".join(f"- {finding}" for finding in comparison.findings))
    parts += [f"![{table.id}: {path.stem}]({path.relative_to(base).as_posix()})" for path in figures]
    if table.notes:
        parts.append("\n".join(f"- {note}" for note in table.notes))
    if not table.is_search:
        parts.append(_settings(table))
    return "\n\n".join(parts)


def _marks(comparison: TableComparison) -> dict[str, str]:
    """The reasons why numbers are not targets, each with the sign that marks them."""
    reasons = dict.fromkeys(row.excluded for row in comparison.rows if row.excluded)
    return dict(zip(reasons, MARKS, strict=False))


def _not_measured(table: Table) -> list[str]:
    reasons: dict[str, list[str]] = {}
    for one in map(measure, table.measures):
        if one.not_measured:
            reasons.setdefault(one.not_measured, []).append(one.label)
    return [f"Not measured ({'; '.join(labels)}): {reason}." for reason, labels in reasons.items()]


def _grid(comparison: TableComparison, positions: Sequence[int]) -> str:
    """A line for each method, and a column for each federation or, of a table with one, for each measure."""
    table = comparison.table
    by_key = {(row.column, row.row): row for row in comparison.rows}
    marks = _marks(comparison)
    measures = [measure(table.measures[position]) for position in positions]
    title, labels = measures[0].label, [column.label for column in table.columns.values()]
    if len(measures) > 1:
        title, labels = labels[0], [one.label for one in measures]
    lines = [f"| {title} | {' | '.join(labels)} |", "|---" * (len(labels) + 1) + "|"]
    for method in table.rows.values():
        cells = []
        for column, (position, one) in product(table.columns, zip(positions, measures, strict=True)):
            row = by_key.get((column, method.key))
            if row is None:
                cells.append(UNKNOWN)
                continue
            value = row.values[position]
            ours = format_ours(value, one, row)
            if not one.not_measured:
                ours = f"**{ours}**" if row.seeds else "not run"
            averaged = format_averaged(value, one)
            ours += f" · {averaged}" if averaged else ""
            ours += f" ({value.seeds})" if value.deviation is not None else ""
            published = format_published(value, one) + (marks[row.excluded] if row.excluded else "")
            cells.append(ours if table.is_search else f"{published} · {ours}")
        name = f"`{method.label}`" if table.is_search else method.label
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _settings(table: Table) -> str:
    """A folded list of the settings that the paper does not print."""
    settings = list(table.settings.items())
    settings += [(row.label, row.method) for row in table.rows.values() if row.method is not None]
    for column in table.columns.values():
        settings += [
            (f"{column.label}, {name}", setting)
            for name, setting in {**column.settings, **column.methods}.items()
        ]
    lines = [f"- {name}: {_value(setting)}" for name, setting in settings if setting.source != "paper"]
    lines += [f"- {row.label}: needs {row.needs}" for row in table.rows.values() if row.needs]
    lines += [f"- {column.label}: needs {column.needs}" for column in table.columns.values() if column.needs]
    summary = f"{len(lines)} settings that the paper does not print"
    body = "\n".join(lines)
    return f'<details markdown="1">\n<summary>{summary}</summary>\n\n{body}\n\n</details>'


def _value(setting: Setting) -> str:
    note = f"; {setting.note}" if setting.note else ""
    return f"`{setting.value}` ({setting.source}{note})"


# Figures ---------------------------------------------------------------------------------------------------


def _draw(table: Table, cells: Sequence[Cell], stored: Results, folder: Path) -> list[Path]:
    """Draw accuracy over rounds by column and, if any run recorded it, the distributions of forgetting."""
    runs: dict[str, dict[str, list[Entry]]] = {}  # by column and row
    for cell in cells:
        entry = stored.get(cell)
        if entry is not None and "failed" not in entry:
            runs.setdefault(cell.column, {}).setdefault(cell.row, []).append(entry)
    if not runs:
        return []
    from holdfast.report.panels import Figure, Lines
    from holdfast.report.printing import draw

    shown = list(runs.items())[:MAX_PANELS]
    curves = [
        Lines(table.columns[column].label, "round", _score(by_row), _accuracy_lines(table, by_row))
        for column, by_row in shown
    ]
    figures = [Figure("accuracy", table.title, "", table.id, curves, "")]
    if any("local_forgetting_quantiles" in e["curves"] for _, c in shown for r in c.values() for e in r):
        panels = []
        for column, by_row in shown:
            label = table.columns[column].label
            for which, name, share in (
                ("global", "forgetting", "share of rounds"),
                ("local", "local_forgetting_quantiles", "share of local models"),
            ):
                lines = _distribution_lines(table, by_row, name)
                panels.append(Lines(f"{label}, {which}", f"{which} forgetting", share, lines, x_percent=True))
        figures.append(Figure("forgetting", table.title, "", table.id, panels, ""))
    paths = []
    for figure in figures:
        path = folder / f"{_anchor(table)}-{figure.name}.svg"
        draw(figure, path)
        paths.append(path)
    return paths


def _score(runs: Mapping[str, Sequence[Entry]]) -> str:
    """The name of what the runs' curves show."""
    entries = [entry for of_row in runs.values() for entry in of_row]
    name = str(entries[0].get("score", "accuracy"))
    return f"{name}, mean of sites" if "site_mean" in entries[0]["curves"] else name


def _accuracy_lines(table: Table, runs: Mapping[str, Sequence[Entry]]) -> list[Line]:
    from holdfast.report.curves import mean_line

    lines: list[Line] = []
    for colour, row in _coloured(table, runs):
        curves = np.stack([accuracies(entry) for entry in runs[row]])
        rounds = np.arange(1, curves.shape[1] + 1, dtype=float)
        lines.append(mean_line(table.rows[row].label, rounds, curves, colour))
    return lines


def _distribution_lines(table: Table, runs: Mapping[str, Sequence[Entry]], name: str) -> list[Line]:
    """Cumulative distributions: the share of rounds (or of local models) that forget at most a given amount."""
    from holdfast.report.panels import Line

    lines: list[Line] = []
    for colour, row in _coloured(table, runs):
        values = [v for entry in runs[row] for v in entry["curves"].get(name, ()) if v is not None]
        if values:
            lines.append(Line(table.rows[row].label, np.sort(values), np.linspace(0, 1, len(values)), colour))
    return lines


def _coloured(table: Table, runs: Iterable[str]) -> list[tuple[int, str]]:
    """The rows with runs, the paper's method and its baseline first, each with its colour in the table's figures."""
    with_runs, main = set(runs), (table.paper.baseline, table.paper.proposed)
    rows = sorted(table.rows, key=lambda row: row not in main)
    return [(colour, row) for colour, row in enumerate(rows) if row in with_runs]
