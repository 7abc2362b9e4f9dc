"""Figures of a table's stored runs: accuracy over rounds, and the distributions of forgetting."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from holdfast.papers.cells import Cell
from holdfast.papers.formatting import anchor
from holdfast.papers.measures import Entry, accuracies
from holdfast.papers.published import PaperTable
from holdfast.papers.results import Results

if TYPE_CHECKING:
    from holdfast.report.panels import Line

MAX_PANELS = 6  # columns of one table that are drawn


def draw_curves(table: PaperTable, cells: Sequence[Cell], stored: Results, folder: Path) -> list[Path]:
    """Draw a table's accuracy over rounds by column and, if any run recorded it, the distributions of forgetting."""
    runs: dict[str, dict[str, list[Entry]]] = {}  # by column and row
    for cell in cells:
        entry = stored.get(cell)
        if entry is not None and "failed" not in entry:
            runs.setdefault(cell.column, {}).setdefault(cell.row, []).append(entry)
    if not runs:
        return []
    from holdfast.report.panels import Figure, Lines
    from holdfast.report.printing import draw  # matplotlib is not loaded before it is needed

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
        path = folder / f"{anchor(table)}-{figure.name}.svg"
        draw(figure, path)
        paths.append(path)
    return paths


def _score(runs: Mapping[str, Sequence[Entry]]) -> str:
    """The name of what the runs' curves show."""
    entries = [entry for of_row in runs.values() for entry in of_row]
    name = str(entries[0].get("score", "accuracy"))
    return f"{name}, mean of sites" if "site_mean" in entries[0]["curves"] else name


def _accuracy_lines(table: PaperTable, runs: Mapping[str, Sequence[Entry]]) -> list[Line]:
    from holdfast.report.curves import mean_line

    lines: list[Line] = []
    for colour, row in _coloured(table, runs):
        curves = np.stack([accuracies(entry) for entry in runs[row]])
        rounds = np.arange(1, curves.shape[1] + 1, dtype=float)
        lines.append(mean_line(table.rows[row].label, rounds, curves, colour))
    return lines


def _distribution_lines(table: PaperTable, runs: Mapping[str, Sequence[Entry]], name: str) -> list[Line]:
    """Cumulative distributions: the share of rounds (or of local models) that forget at most a given amount."""
    from holdfast.report.panels import Line

    lines: list[Line] = []
    for colour, row in _coloured(table, runs):
        values = [v for entry in runs[row] for v in entry["curves"].get(name, ()) if v is not None]
        if values:
            lines.append(Line(table.rows[row].label, np.sort(values), np.linspace(0, 1, len(values)), colour))
    return lines


def _coloured(table: PaperTable, runs: Iterable[str]) -> list[tuple[int, str]]:
    """The rows with runs, the paper's method and its baseline first, each with its colour in the table's figures."""
    with_runs, main = set(runs), (table.paper.baseline, table.paper.proposed)
    rows = sorted(table.rows, key=lambda row: row not in main)
    return [(colour, row) for colour, row in enumerate(rows) if row in with_runs]
