"""The papers' figures, drawn from stored runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from holdfast.metrics.forgetting import forgetting_degree
from holdfast.papers.cells import Cell
from holdfast.papers.formatting import anchor
from holdfast.papers.measures import Entry, accuracies, mean_of_last_rounds
from holdfast.papers.published import FigureContent, PaperTable
from holdfast.papers.recorded_curves import LABEL_COUNTS
from holdfast.papers.results import Results

if TYPE_CHECKING:
    from holdfast.report.panels import Line, Panel

Floats = NDArray[np.float64]
Runs = Mapping[str, Sequence[Entry]]  # of one column, by row

LOWEST_DEGREE = -1.0  # a class that the global model hardly knows would have a degree of minus infinity
CURVES = {
    "accuracy": ("round", "accuracy"),
    "A_glo": ("global epoch", "A_glo"),
    "local-in": ("round", "in-local accuracy"),
    "local-out": ("round", "out-local accuracy"),
    "A_sel-by-task": ("task", "A_sel"),
    "A_sel_t-by-task": ("task", "A_sel, minority classes"),
}
"""The axes of the panels that show a stored curve of each method."""


def draw_figure(table: PaperTable, cells: Sequence[Cell], stored: Results, folder: Path) -> Path | None:
    """Draw a figure of a paper as ``folder/PAPER-FIGURE.svg``; None if it has no run."""
    panels = figure_panels(table, cells, stored)
    if not panels:
        return None
    from holdfast.report.panels import Figure
    from holdfast.report.printing import draw  # matplotlib is not loaded before it is needed

    path = folder / f"{anchor(table)}.svg"
    draw(Figure(table.key, table.title, "", table.id, panels, ""), path)
    return path


def figure_panels(table: PaperTable, cells: Sequence[Cell], stored: Results) -> list[Panel]:
    """The panels of a figure of a paper, column by column; none if it has no run."""
    drawing = table.drawing
    assert drawing is not None
    columns: dict[str, dict[str, list[Entry]]] = {}
    for cell in cells:
        entry = stored.get(cell)
        if entry is not None and "failed" not in entry:
            columns.setdefault(cell.column, {}).setdefault(cell.row, []).append(entry)
    panels = [
        PANELS[name](table, drawing, column, runs)
        for column, runs in columns.items()
        for name in drawing.panels
    ]
    return panels + (list(_swept_panels(table, drawing, columns)) if columns else [])


def _curve_panel(name: str) -> Callable[[PaperTable, FigureContent, str, Runs], Panel]:
    """A panel with one line for each method: a stored curve over rounds, epochs or tasks."""

    def panel(table: PaperTable, drawing: FigureContent, column: str, runs: Runs) -> Panel:
        from holdfast.report.panels import Lines

        x_label, y_label = CURVES[name]
        lines = list(_row_lines(table, runs, lambda entry: _stored_curve(entry, name)))
        return Lines(table.columns[column].label, x_label, y_label, lines)

    return panel


def _stored_curve(entry: Entry, name: str) -> Floats:
    return accuracies(entry) if name == "accuracy" else np.array(entry["curves"][name], float)


def _row_lines(table: PaperTable, runs: Runs, curve: Callable[[Entry], Floats]) -> Iterator[Line]:
    """The mean over seeds of each method with runs, always in the same colour."""
    from holdfast.report.curves import mean_line

    for colour, (key, row) in enumerate(table.rows.items()):
        if key in runs:
            values = np.stack([curve(entry) for entry in runs[key]])
            yield mean_line(row.label, np.arange(1, values.shape[1] + 1, dtype=float), values, colour)


# One client, class by class -------------------------------------------------------------------------------


def _forgetting_panel(table: PaperTable, drawing: FigureContent, column: str, runs: Runs) -> Panel:
    """Eq. 1 of FedKA: the share of the accuracy on a class that is lost in local training."""
    return _class_panel(table, drawing, column, runs, "forgetting degree", _degrees)


def _local_accuracy_panel(table: PaperTable, drawing: FigureContent, column: str, runs: Runs) -> Panel:
    return _class_panel(table, drawing, column, runs, "accuracy of the local model", _local_accuracies)


def _class_panel(
    table: PaperTable,
    drawing: FigureContent,
    column: str,
    runs: Runs,
    y_label: str,
    values: Callable[[Entry, FigureContent], Floats],
) -> Panel:
    """A line for each method if the column is about one class, else a line for each class of the first method."""
    from holdfast.report.panels import Lines

    label, chosen = table.columns[column].label, drawing.classes.get(column)
    if chosen is not None:
        lines = list(_row_lines(table, runs, lambda entry: values(entry, drawing)[:, chosen]))
        title = f"{label}: client {drawing.client}, class {chosen}"
    else:
        lines = list(_class_lines(next(iter(runs.values()))[0], drawing, values))
        title = f"{label}: client {drawing.client}"
    return Lines(title, "round", y_label, lines, percent=values is _local_accuracies)


def _class_lines(
    entry: Entry, drawing: FigureContent, values: Callable[[Entry, FigureContent], Floats]
) -> Iterator[Line]:
    """A line for each class with the client's number of samples; dashed for a class that it does not have."""
    from holdfast.report.panels import Line

    held = entry["curves"][LABEL_COUNTS][drawing.client]
    for number, (samples, line) in enumerate(zip(held, values(entry, drawing).T, strict=True)):
        rounds = np.arange(1, len(line) + 1, dtype=float)
        yield Line(f"class {number} ({samples:,})", rounds, line, number, dashed=samples == 0)


def _degrees(entry: Entry, drawing: FigureContent) -> Floats:
    """Forgetting degrees [rounds, classes], at least `LOWEST_DEGREE`."""
    before, after = (
        np.array(entry["curves"][f"{which}@{drawing.client}"], float) for which in ("before", "after")
    )
    by_round = [forgetting_degree(b, a[None])[0] for b, a in zip(before, after, strict=True)]
    degrees: Floats = np.maximum(np.array(by_round), LOWEST_DEGREE)
    return degrees


def _local_accuracies(entry: Entry, drawing: FigureContent) -> Floats:
    return np.array(entry["curves"][f"after@{drawing.client}"], float)


def _label_counts_panel(table: PaperTable, drawing: FigureContent, column: str, runs: Runs) -> Panel:
    from holdfast.report.panels import Bubbles

    counts = np.array(next(iter(runs.values()))[0]["curves"][LABEL_COUNTS], np.int64)
    clients, classes = ([str(number) for number in range(count)] for count in counts.shape)
    return Bubbles(f"{table.columns[column].label}: samples", clients, classes, counts[None])


PANELS: dict[str, Callable[[PaperTable, FigureContent, str, Runs], Panel]] = {
    **{name: _curve_panel(name) for name in CURVES},
    "forgetting": _forgetting_panel,
    "local-accuracy": _local_accuracy_panel,
    LABEL_COUNTS: _label_counts_panel,
}
"""Functions that make a panel from a column's runs, by the name in a figure's YAML."""


# Over the values of a setting -----------------------------------------------------------------------------


def _swept_panels(table: PaperTable, drawing: FigureContent, columns: Mapping[str, Runs]) -> Iterator[Panel]:
    """For each swept setting a panel with the mean of the last ten rounds over the values that the columns have."""
    from holdfast.report.panels import Line, Lines

    values = {name: _swept_values(table, drawing, name) for name in columns}
    base = _swept_values(table, drawing, next(iter(table.columns)))
    for setting in drawing.swept:
        along = sorted(
            (
                name
                for name in columns
                if all(values[name][one] == base[one] for one in drawing.swept if one != setting)
            ),
            key=lambda name: values[name][setting],
        )
        lines = []
        for colour, (key, row) in enumerate(table.rows.items()):
            points = [(values[name][setting], columns[name][key]) for name in along if key in columns[name]]
            if points:
                means = [np.mean([_last(entry) for entry in entries]) for _, entries in points]
                lines.append(Line(row.label, np.array([x for x, _ in points]), np.array(means), colour))
        yield Lines(setting.replace("_", " "), setting.replace("_", " "), "accuracy", lines)


def _swept_values(table: PaperTable, drawing: FigureContent, column: str) -> dict[str, float]:
    row = next(iter(table.rows.values()))
    settings = table.settings_of(table.columns[column], row)
    return {name: float(settings[name].value) for name in drawing.swept}


def _last(entry: Entry) -> float:
    """The mean accuracy of the last ten rounds; that of the last round for a short run."""
    mean = mean_of_last_rounds(entry)
    return float(accuracies(entry)[-1]) if mean is None else mean
