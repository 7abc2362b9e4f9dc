"""The page of all results: every table, published and ours, what held and what did not, with curves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from holdfast.core import files
from holdfast.core.errors import HoldfastError
from holdfast.metrics.summary import UNKNOWN
from holdfast.papers import wording
from holdfast.papers.cells import Cell
from holdfast.papers.findings import TableComparison, compare
from holdfast.papers.measures import Entry, accuracies, measure
from holdfast.papers.published import Setting, Table, load_tables
from holdfast.papers.results import Results

if TYPE_CHECKING:
    from holdfast.report.panels import Line

MOST_PANELS = 6  # columns drawn of one table
MARKS = ("†", "‡", "§", "¶")

HEAD = """# Results

The tables of five papers, run again. In every cell the published number comes first, then ours: 52.61 · **53.40**, or
*not run*; of several seeds the mean, with their deviation and their number: **53.40 ± 1.20** (3). A dash is a number
that the paper does not have, or that a run did not record. † and ‡ mark published numbers that are not to be met, with
the reason below their table.

A finding *holds* if the method ahead in the paper is ahead here by at least 70 % of the published lead and its
accuracy is at most 2 points below the published one; a speed-up, if it is at least half of the published one.

Every number in a table comes from `results/`, which holds each run's settings, versions, device and curves; notes also
tell of runs that were not kept, and say so.
`holdfast reproduce TABLE` runs what is missing; `holdfast reproduce --page docs/results.md` writes this page.
`--workers 12` runs twelve cells at a time, on one GPU best with CUDA's multi-process service (`nvidia-cuda-mps-control
-d`), without which they take turns.
"""


def write_page(results: str | Path, page: Path) -> Path:
    """Write the page, and its figures into ``images/results`` beside it, which is returned."""
    if page.is_dir():
        raise HoldfastError(f"{page} is a folder; name a file for the page, such as docs/results.md")
    found = Results(results)
    tables = list(load_tables().values())
    cells = {table.id: found.of_table(table) for table in tables}
    compared = {table.id: compare(table, cells[table.id], found) for table in tables}
    images = page.parent / "images" / "results"
    drawn: set[frozenset[str]] = set()  # by the runs they show: tables of the same runs would look the same
    parts = [HEAD, _summary(tables, compared, cells, found)]
    for heading, of_heading in groupby(tables, key=_heading):
        parts.append(heading)
        for table in of_heading:
            runs = frozenset(cell.hash for cell in cells[table.id] if found.get(cell) is not None)
            figures = [] if runs in drawn else _draw(table, cells[table.id], found, images)
            drawn.add(runs)
            parts.append(_section(compared[table.id], figures, page.parent))
    with files.writing(page):
        page.parent.mkdir(parents=True, exist_ok=True)
    files.replace(page, ("\n\n".join(part.strip() for part in parts) + "\n").encode())
    return images


def _summary(
    tables: Sequence[Table],
    compared: Mapping[str, TableComparison],
    cells: Mapping[str, Sequence[Cell]],
    found: Results,
) -> str:
    lines = ["| table | what | cells run | findings that hold |", "|---|---|---|---|"]
    for table in tables:
        pairs = {(cell.column, cell.row) for cell in cells[table.id]}
        done = {(cell.column, cell.row) for cell in cells[table.id] if found.get(cell) is not None}
        findings = compared[table.id].findings
        held = f"{sum(f.holds for f in findings)} of {len(findings)}" if findings else UNKNOWN
        link = f"[{table.id}](#{_anchor(table)})"
        lines.append(f"| {link} | {table.title} | {len(done)} of {len(pairs)} | {held} |")
    return "\n".join(lines)


def _heading(table: Table) -> str:
    if table.is_search:
        return "## Searches for what the papers do not say"
    paper = table.paper
    title = paper.title if paper.title.startswith(paper.name) else f"{paper.name}: {paper.title}"
    return f"## {title}\n\n{paper.reference}.\n\n{paper.in_short}"


def _anchor(table: Table) -> str:
    return table.id.replace("/", "-")


def _section(one: TableComparison, drawn: Sequence[Path], base: Path) -> str:
    table = one.table
    parts = [f'<a id="{_anchor(table)}"></a>\n\n### {table.id}: {table.title}']
    if table.is_search and not any(line.seeds for line in one.lines):
        return f"{parts[0]}\n\nNot run."
    parts += [_grid(one, position) for position in range(len(table.measures))]
    parts += [f"{mark} {reason}" for reason, mark in _marks(one).items()]
    if one.targets:
        targets = ", ".join(f"{table.columns[key].label} {value:.1%}" for key, value in one.targets.items())
        whose = "of the paper" if table.target is not None and table.target.of == "published" else "of ours"
        parts.append(f"Targets {whose}: {targets}.")
    if one.findings:
        parts.append("\n".join(f"- {finding}" for finding in one.findings))
    parts += [f"![{table.id}: {path.stem}]({path.relative_to(base).as_posix()})" for path in drawn]
    if table.notes:
        parts.append("\n".join(f"- {note}" for note in table.notes))
    if not table.is_search:
        parts.append(_settings(table))
    return "\n\n".join(parts)


def _marks(one: TableComparison) -> dict[str, str]:
    """Why a number is not to be met, and the sign for it."""
    reasons = dict.fromkeys(line.no_target for line in one.lines if line.no_target)
    return dict(zip(reasons, MARKS, strict=False))


def _grid(one: TableComparison, position: int) -> str:
    """One measure of a table as the paper prints it: methods down, columns across."""
    table = one.table
    each = measure(table.measures[position])
    at = {(line.column, line.row): line for line in one.lines}
    marks = _marks(one)
    labels = [column.label for column in table.columns.values()]
    lines = [f"| {each.label} | {' | '.join(labels)} |", "|---" * (len(labels) + 1) + "|"]
    for row in table.rows.values():
        texts = []
        for key in table.columns:
            line = at.get((key, row.key))
            if line is None:
                texts.append(UNKNOWN)
                continue
            value = line.values[position]
            mine = f"**{wording.ours(value, each, line)}**" if line.seeds else "not run"
            mine += f" ({value.seeds})" if value.deviation is not None else ""
            theirs = wording.published(value, each) + (marks[line.no_target] if line.no_target else "")
            texts.append(mine if table.is_search else f"{theirs} · {mine}")
        name = f"`{row.label}`" if table.is_search else row.label
        lines.append(f"| {name} | {' | '.join(texts)} |")
    return "\n".join(lines)


def _settings(table: Table) -> str:
    """The settings that the paper does not print, folded away."""
    told = [(name, setting) for name, setting in {**table.paper.settings, **table.settings}.items()]
    told += [(row.label, row.method) for row in table.rows.values() if row.method is not None]
    for column in table.columns.values():
        own = {**column.settings, **column.methods}
        told += [(f"{column.label}, {name}", setting) for name, setting in own.items()]
    lines = [f"- {name}: {_value(setting)}" for name, setting in told if setting.source != "paper"]
    lines += [f"- {row.label}: needs {row.needs}" for row in table.rows.values() if row.needs]
    lines += [f"- {column.label}: needs {column.needs}" for column in table.columns.values() if column.needs]
    summary = f"{len(lines)} settings that the paper does not print"
    body = "\n".join(lines)
    return f'<details markdown="1">\n<summary>{summary}</summary>\n\n{body}\n\n</details>'


def _value(setting: Setting) -> str:
    note = f"; {setting.note}" if setting.note else ""
    return f"`{setting.value}` ({setting.source}{note})"


# Figures ---------------------------------------------------------------------------------------------------


def _draw(table: Table, cells: Sequence[Cell], found: Results, folder: Path) -> list[Path]:
    """Accuracy over rounds by column, and where it was recorded the distributions of forgetting."""
    runs: dict[str, dict[str, list[Entry]]] = {}
    for cell in cells:
        entry = found.get(cell)
        if entry is not None and "failed" not in entry:
            runs.setdefault(cell.column, {}).setdefault(cell.row, []).append(entry)
    if not runs:
        return []
    from holdfast.report.panels import Figure, Lines
    from holdfast.report.printing import draw

    shown = list(runs.items())[:MOST_PANELS]
    curves = [
        Lines(table.columns[key].label, "round", "accuracy", _accuracy_lines(table, of_column))
        for key, of_column in shown
    ]
    figures = [Figure("accuracy", table.title, "", table.id, curves, "")]
    if any("local_forgetting_quantiles" in e["curves"] for _, c in shown for r in c.values() for e in r):
        panels = []
        for key, of_column in shown:
            label = table.columns[key].label
            for which, name, share in (
                ("global", "forgetting", "share of rounds"),
                ("local", "local_forgetting_quantiles", "share of local models"),
            ):
                lines = _distribution_lines(table, of_column, name)
                panels.append(Lines(f"{label}, {which}", f"{which} forgetting", share, lines, x_percent=True))
        figures.append(Figure("forgetting", table.title, "", table.id, panels, ""))
    paths = []
    for figure in figures:
        path = folder / f"{_anchor(table)}-{figure.name}.svg"
        draw(figure, path)
        paths.append(path)
    return paths


def _accuracy_lines(table: Table, runs: Mapping[str, Sequence[Entry]]) -> list[Line]:
    from holdfast.report.curves import mean_line

    lines: list[Line] = []
    for colour, row in _coloured(table, runs):
        curves = np.stack([accuracies(entry) for entry in runs[row]])
        rounds = np.arange(1, curves.shape[1] + 1, dtype=float)
        lines.append(mean_line(table.rows[row].label, rounds, curves, colour))
    return lines


def _distribution_lines(table: Table, runs: Mapping[str, Sequence[Entry]], name: str) -> list[Line]:
    """The share of rounds (or of local models) that forget at most so much."""
    from holdfast.report.panels import Line

    lines: list[Line] = []
    for colour, row in _coloured(table, runs):
        values = [v for entry in runs[row] for v in entry["curves"].get(name, ()) if v is not None]
        if values:
            lines.append(Line(table.rows[row].label, np.sort(values), np.linspace(0, 1, len(values)), colour))
    return lines


def _coloured(table: Table, runs: Iterable[str]) -> list[tuple[int, str]]:
    """Rows that were run, each with its colour in all figures of the table; the paper's pair comes first."""
    known, main = set(runs), (table.paper.baseline, table.paper.own)
    rows = sorted(table.rows, key=lambda row: row not in main)
    return [(colour, row) for colour, row in enumerate(rows) if row in known]
