"""Figures for print: the panels of the page, drawn by matplotlib in the layout of the papers."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from holdfast.core import files
from holdfast.core.errors import HoldfastError
from holdfast.metrics.arrays import FloatArray
from holdfast.report.curves import NotRecorded
from holdfast.report.figures import FIGURES, build_figure
from holdfast.report.loading import Given, RunGroup, group_runs, load_runs
from holdfast.report.metric_figures import build_metric_figure
from holdfast.report.palette import DASHES, MARKERS, RAMP_LIGHT, SERIES_LIGHT
from holdfast.report.panels import Bars, Bubbles, Figure, Heatmap, Lines, Panel, Scatter

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing

FORMATS = (".pdf", ".png", ".svg")
MAX_ROW_LABELS = 40  # a taller panel would not fit a page
MARK_COLOUR = "#d55e00"  # of the dots on the classes that a client holds
PANEL_INCHES = (3.4, 2.5)  # a column of a two-column paper is about 3.4 inches wide
LEGEND_LETTERS = 15  # per inch
LEGEND_MARK = 4  # letters: the width of a legend's marks
LEGEND_LINES = 7  # per inch
STYLE: dict[Any, Any] = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6eaef",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 7,
    "lines.linewidth": 1.3,
    "pdf.fonttype": 42,  # text as text: journals reject type 3 fonts
    "svg.fonttype": "none",
    "svg.hashsalt": "holdfast",  # for reproducible files
}


def figure(name: str, runs: Given | Sequence[Given], out: Path | str) -> Path:
    """Draw a figure of runs or run directories, by its name in ``FIGURES``, to a PDF, PNG or SVG file."""
    out = _checked(out)
    draw(_built(name, group_runs(load_runs(runs)), build_figure), out)
    return out


def plot(name: str, groups: Sequence[RunGroup]) -> "Drawing":
    """A figure by its name in ``FIGURES``, or a metric of the records over rounds, as a matplotlib figure."""
    build = build_figure if name in FIGURES else build_metric_figure
    return drawing_of(_built(name, groups, build))


def _built(
    name: str, groups: Sequence[RunGroup], build: Callable[[str, Sequence[RunGroup]], Figure]
) -> Figure:
    try:
        return build(name, groups)
    except NotRecorded as reason:
        raise HoldfastError(f"the figure '{name}' cannot be drawn from these runs: {reason}") from reason


def draw(built: Figure, out: Path) -> None:
    """Write a figure as the PDF, PNG or SVG file ``out``."""
    import matplotlib

    out = _checked(out)
    with matplotlib.rc_context(STYLE):
        write_drawing(drawing_of(built), out)


def drawing_of(built: Figure) -> "Drawing":
    """Draw a figure's panels side by side, up to three in a row; of the steps of a slider, the last one."""
    import matplotlib

    from holdfast.report.drawing import Drawing

    panels = [part for panel in built.panels for part in _by_stage(panel)]
    across = _across(panels)
    down = -(-len(panels) // across)
    heights = [
        max(_inches_high(panel) for panel in panels[row * across : (row + 1) * across]) for row in range(down)
    ]
    width = PANEL_INCHES[0] * across * (2 if any(map(_is_wide, panels)) else 1)
    with matplotlib.rc_context(STYLE):
        drawing = Drawing(figsize=(width, sum(heights)), layout="constrained")
        axes = drawing.subplots(down, across, squeeze=False, height_ratios=heights).flatten().tolist()
        for place, panel in zip(axes, panels, strict=False):
            place.set_title(panel.title)
            _PAINTERS[type(panel)](place, panel)
        for place in axes[len(panels) :]:
            place.set_axis_off()
        _legend(drawing, axes, panels)
    return drawing


def write_drawing(drawing: "Drawing", out: Path) -> None:
    """Write a matplotlib figure, drawn in `STYLE`, as the PDF, PNG or SVG file ``out``."""
    # The file has no date: the same runs give the same bytes.
    dates = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}}.get(out.suffix.lower())
    drawn = BytesIO()
    drawing.savefig(drawn, format=out.suffix[1:].lower(), dpi=300, metadata=dates)
    with files.writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    files.replace(out, drawn.getvalue())


def _checked(out: Path | str) -> Path:
    out = Path(out)
    if out.suffix.lower() not in FORMATS:
        raise HoldfastError(f"a figure is written as {', '.join(FORMATS)}, not '{out.suffix}' ({out})")
    return out


def _by_stage(panel: Panel) -> list[Panel]:
    """The stages of a bubble plot as panels of their own, since print has no slider."""
    if not isinstance(panel, Bubbles) or len(panel.counts) == 1:
        return [panel]
    largest = int(panel.counts.max(initial=1))
    return [
        replace(panel, title=f"Stage {stage}", counts=counts[None], largest=largest)
        for stage, counts in enumerate(panel.counts)
    ]


def _is_wide(panel: Panel) -> bool:
    return isinstance(panel, Bubbles) or (isinstance(panel, Bars) and len(panel.categories) > 12)


def _across(panels: Sequence[Panel]) -> int:
    if any(map(_is_wide, panels)):
        return 2 if len(panels) > 2 else 1
    return 3 if len(panels) % 3 == 0 else min(2, len(panels))


def _inches_high(panel: Panel) -> float:
    if isinstance(panel, Heatmap):
        return 0.9 + 0.16 * min(MAX_ROW_LABELS, len(panel.steps[-1].rows))
    if isinstance(panel, Bubbles):
        return 0.9 + 0.2 * min(MAX_ROW_LABELS, len(panel.classes))
    return PANEL_INCHES[1]


def _colour(number: int) -> str:
    return SERIES_LIGHT[number % len(SERIES_LIGHT)]


def _variant(number: int) -> int:
    return number // len(SERIES_LIGHT) % len(DASHES)


def _lines(axes: "Axes", panel: Lines) -> None:
    from matplotlib.ticker import MaxNLocator

    style = "steps-post" if panel.stepped else "default"
    for line in panel.lines:
        dash = (5, 3) if line.dashed else DASHES[_variant(line.colour)]
        dots = "o" if len(line.x) <= 12 else None
        axes.plot(
            line.x,
            line.y,
            color=_colour(line.colour),
            label=line.name,
            drawstyle=style,
            marker=dots,
            markersize=3,
            linestyle=(0, dash) if dash else "-",
        )
        if line.low is not None and line.high is not None:
            axes.fill_between(
                line.x, line.low, line.high, color=_colour(line.colour), alpha=0.18, linewidth=0
            )
    axes.set(xlabel=panel.x_label, ylabel=panel.y_label)
    axes.margins(x=0)
    if all(np.all(line.x == np.round(line.x)) for line in panel.lines):  # round numbers
        axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    if panel.percent:
        _percent(axes.yaxis)
    if panel.x_percent:
        _percent(axes.xaxis)


def _scatter(axes: "Axes", panel: Scatter) -> None:
    for points in panel.point_sets:
        axes.scatter(
            points.x,
            points.y,
            s=6,
            color=_colour(points.colour),
            marker=MARKERS[_variant(points.colour)],
            alpha=0.85 if points.opacity is None else cast(float, points.opacity),  # one for each point
            linewidths=0,
            label=points.name,
            rasterized=True,
        )
    axes.set(xlabel=panel.x_label, ylabel=panel.y_label)
    if panel.hide_axes:
        axes.set(xticks=[], yticks=[])


def _bars(axes: "Axes", panel: Bars) -> None:
    each = 0.8 / max(1, len(panel.bars))
    places = np.arange(len(panel.categories))
    for number, bar in enumerate(panel.bars):
        centres = places + (number - (len(panel.bars) - 1) / 2) * each
        axes.bar(centres, bar.values, each * 0.92, color=_colour(bar.colour), label=bar.name)
        if bar.low is not None and bar.high is not None:
            spread = np.clip([bar.values - bar.low, bar.high - bar.values], 0, None)
            axes.errorbar(centres, bar.values, spread, fmt="none", ecolor="black", elinewidth=0.8)
    every = max(1, len(places) // 25)
    axes.set_xticks(places[::every], panel.categories[::every])
    axes.grid(axis="x", visible=False)
    axes.axhline(0, color="#55606c", linewidth=0.8)
    axes.set_ylabel(panel.y_label)
    if panel.percent:
        _percent(axes.yaxis)


def _heatmap(axes: "Axes", panel: Heatmap) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    step = panel.steps[-1]
    colours = LinearSegmentedColormap.from_list("holdfast", RAMP_LIGHT)
    image = axes.imshow(
        _with_gaps(step.values) if panel.global_rows else step.values,
        vmin=0,
        vmax=1,
        cmap=colours,
        aspect="auto",
        interpolation="nearest",
    )
    count = len(step.rows)
    y = np.arange(count) + (np.arange(count) > 0) * panel.global_rows
    y[-1] += panel.global_rows
    if step.marked is not None:
        marked_rows, marked_columns = np.nonzero(step.marked)
        axes.scatter(marked_columns, y[marked_rows], s=2, color=MARK_COLOUR, linewidths=0)
    labelled = _spaced(count, MAX_ROW_LABELS)
    if panel.global_rows:  # the last row always has a label, and the rows next to it none
        labelled = [row for row in labelled if row < count - count // MAX_ROW_LABELS - 1] + [count - 1]
    axes.set_yticks(y[labelled], [step.rows[row] for row in labelled])
    columns = _spaced(len(panel.columns), 14 if panel.global_rows else 9)
    rotated: dict[str, Any] = {"rotation": 45, "ha": "right"} if panel.global_rows else {}
    axes.set_xticks(columns, [panel.columns[column] for column in columns], **rotated)
    axes.set(xlabel=panel.x_label, ylabel=panel.y_label)
    if len(panel.steps) > 1:
        axes.set_title(f"{panel.title}, {step.name}")
    axes.grid(visible=False)
    bar = axes.figure.colorbar(image, ax=axes, fraction=0.04, pad=0.02)
    _percent(bar.ax.yaxis)


def _spaced(count: int, limit: int) -> list[int]:
    """Evenly spaced indices below ``count``, at most ``limit``, so that labels do not overlap."""
    return list(range(0, count, max(1, -(-count // limit))))


def _with_gaps(values: FloatArray) -> FloatArray:
    """The values with an empty row after the first and before the last."""
    empty = np.full((1, values.shape[1]), np.nan)
    return np.vstack([values[:1], empty, values[1:-1], empty, values[-1:]])


def _bubbles(axes: "Axes", panel: Bubbles) -> None:
    counts = panel.counts.sum(axis=0)
    clients, classes = np.nonzero(counts)
    sizes = counts[clients, classes]
    names = list(dict.fromkeys(panel.domains))
    colours = [_colour(names.index(panel.domains[int(client)]) if names else 0) for client in clients]
    largest = panel.largest or int(sizes.max(initial=1))
    axes.scatter(clients, classes, s=150 * sizes / largest, c=colours, alpha=0.8, linewidths=0)
    for number, name in enumerate(names):
        axes.scatter([], [], s=20, color=_colour(number), label=name)
    every = max(1, len(panel.clients) // 25)
    axes.set_xticks(range(0, len(panel.clients), every), panel.clients[::every])
    labelled = _spaced(len(panel.classes), MAX_ROW_LABELS)
    axes.set_yticks(labelled, [panel.classes[row] for row in labelled])
    # The limits include clients and classes without samples, so that the stages of a stream have equal axes.
    axes.set(xlabel="client", xlim=(-0.6, len(panel.clients) - 0.4))
    axes.set(ylabel="class", ylim=(len(panel.classes) - 0.4, -0.6))


_PAINTERS: dict[type, Callable[["Axes", Any], None]] = {
    Lines: _lines,
    Scatter: _scatter,
    Bars: _bars,
    Heatmap: _heatmap,
    Bubbles: _bubbles,
}


def _percent(axis: Any) -> None:
    from matplotlib.ticker import PercentFormatter

    axis.set_major_formatter(PercentFormatter(1.0, symbol=" %"))


def _legend(drawing: "Drawing", axes: Sequence["Axes"], panels: Sequence[Panel]) -> None:
    """One legend below all panels if they show the same names, else one below each panel."""
    named = [place.get_legend_handles_labels() for place in axes[: len(panels)]]
    sets = [tuple(labels) for _, labels in named if labels]
    if not sets:
        return
    if len(set(sets)) == 1:
        if len(sets[0]) > 1:
            handles, labels = next(pair for pair in named if pair[1])
            _fit_legend(drawing, labels)
            across = _columns(labels, 4, drawing.get_figwidth())
            drawing.legend(handles, labels, loc="outside lower center", ncols=across)
        return
    for place, (handles, labels) in zip(axes, named, strict=False):
        if labels:
            below = -0.24 if place.get_xlabel() or len(place.get_xticks()) else -0.02
            place.legend(
                handles,
                labels,
                ncols=_columns(labels, 3, PANEL_INCHES[0]),  # a wider one would squeeze all panels
                loc="upper center",
                bbox_to_anchor=(0.5, below),
                markerscale=1.6,
            )


def _fit_legend(drawing: "Drawing", labels: Sequence[str]) -> None:
    """Widen a drawing to the longest label, and make it higher for many lines of labels."""
    drawing.set_figwidth(max(drawing.get_figwidth(), (LEGEND_MARK + max(map(len, labels))) / LEGEND_LETTERS))
    lines = -(-len(labels) // _columns(labels, 4, drawing.get_figwidth()))
    drawing.set_figheight(drawing.get_figheight() + max(0, lines - 3) / LEGEND_LINES)


def _columns(labels: Sequence[str], limit: int, inches: float) -> int:
    """The number of columns of a legend that is at most ``inches`` wide."""
    widest = LEGEND_MARK + max(map(len, labels))
    return max(1, min(limit, len(labels), int(inches * LEGEND_LETTERS) // widest))
