"""The figure of a paper on the overview page: published numbers and ours for each federation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.metrics.summary import mean_and_deviation
from holdfast.papers.findings import TableComparison, Value
from holdfast.papers.measures import TableMeasure, measure
from holdfast.papers.published import Overview, Paper

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTHS = (4.8, 8.0)  # inches, of a drawing with one panel and with several
LINE_HEIGHT = 0.27  # inches, of a federation
OFFSET = 0.16  # of the lines of published numbers and of ours from the middle of a federation
TOO_MANY_TIMES = 8  # a measure whose largest value is so many times its smallest has a logarithmic axis


@dataclass(frozen=True)
class FederationResult:
    """Published numbers and ours in one federation, each of the baseline and of the paper's method."""

    label: str
    published: tuple[float, float]
    ours: tuple[float, float]


def compared(
    paper: Paper, overview: Overview, name: str, tables: Sequence[TableComparison]
) -> list[FederationResult]:
    """The federations of the overview's tables in which the two methods have this measure, published and ours."""
    found: dict[str, FederationResult] = {}
    for comparison in tables:
        table = comparison.table
        if table.key not in overview.tables or table.paper is not paper:
            continue
        by_key = {(row.column, row.row): row for row in comparison.rows}
        for key, column in table.columns.items():
            pair = [by_key.get((key, row)) for row in (paper.baseline, paper.proposed)]
            if any(row is None or row.excluded for row in pair):
                continue
            values = [row.values[table.measures.index(name)] for row in pair if row is not None]
            published = tuple(value.published.value for value in values if value.published is not None)
            ours = tuple(number for value in values if (number := _ours(value)) is not None)
            if len(published) == len(ours) == 2 and all(map(math.isfinite, (*published, *ours))):
                found.setdefault(column.label, FederationResult(column.label, published, ours))
    return list(found.values())


def _ours(value: Value) -> float | None:
    """The mean of the last ten rounds where it is computed, else the measure itself."""
    averaged, _ = mean_and_deviation(value.averaged.values())
    return value.ours if averaged is None else averaged


def draw_overview(paper: Paper, tables: Sequence[TableComparison], out: Path) -> Path | None:
    """Draw the paper's overview as one panel for each measure; None if it has no run to show."""
    if paper.overview is None:
        return None
    panels = {name: compared(paper, paper.overview, name, tables) for name in paper.overview.measures}
    panels = {name: federations for name, federations in panels.items() if federations}
    if not panels:
        return None
    import matplotlib
    from matplotlib.figure import Figure

    from holdfast.report.printing import STYLE, write_drawing

    names = _labels(paper, tables)
    with matplotlib.rc_context(STYLE):
        height = 1.1 + LINE_HEIGHT * max(map(len, panels.values()))
        drawing = Figure(figsize=(WIDTHS[len(panels) > 1], height), layout="constrained")
        alike = len({tuple(one.label for one in federations) for federations in panels.values()}) == 1
        places = drawing.subplots(1, len(panels), squeeze=False, sharey=alike)[0]
        for axes, (name, federations) in zip(places, panels.items(), strict=True):
            _draw_panel(axes, measure(name), federations, names)
        handles, labels = drawing.axes[0].get_legend_handles_labels()
        drawing.legend(handles, labels, loc="outside lower center", ncols=min(4, 2 * len(panels)))
        write_drawing(drawing, out)
    return out


def _labels(paper: Paper, tables: Sequence[TableComparison]) -> tuple[str, str]:
    """The names of the baseline and of the paper's method."""
    rows = next(t.table.rows for t in tables if t.table.paper is paper and paper.proposed in t.table.rows)
    return rows[paper.baseline].label, rows[paper.proposed].label


def _draw_panel(
    axes: Axes, shown: TableMeasure, federations: Sequence[FederationResult], names: tuple[str, str]
) -> None:
    from matplotlib.ticker import LogLocator

    from holdfast.report.palette import SERIES_LIGHT

    places = range(len(federations))
    for which, offset, filled in (("published", -OFFSET, False), ("ours", OFFSET, True)):
        pairs = [getattr(federation, which) for federation in federations]
        heights = [place + offset for place in places]
        axes.hlines(
            heights, *zip(*pairs, strict=True), color="#9aa5b1", linewidth=1.6 if filled else 0.8, zorder=1
        )
        for position, name in enumerate(names):
            colour = SERIES_LIGHT[position]
            axes.scatter(
                [pair[position] for pair in pairs],
                heights,
                s=22,
                facecolors=colour if filled else "white",
                edgecolors=colour,
                linewidths=1.1,
                label=f"{name}, {which}",
                zorder=2,
            )
    values = [value for federation in federations for value in (*federation.published, *federation.ours)]
    if min(values) > 0 and max(values) > TOO_MANY_TIMES * min(values):
        axes.set_xscale("log", subs=[])
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:g}")
    axes.set_yticks(places, [federation.label for federation in federations])
    axes.set_ylim(len(federations) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(shown.label)
