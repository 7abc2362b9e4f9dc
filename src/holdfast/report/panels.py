"""The panels of a figure, described once and drawn by two renderers: the page (canvas) and print (matplotlib).

A panel holds numbers, names and axis labels, and nothing about pixels. Colours are indices into a palette
(`holdfast.report.palette`), so that a method has the same colour in every figure.
"""

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.metrics.arrays import BoolArray, FloatArray

CELL_STEPS = 200  # a heat map's cell is one byte on the page: half a percent is finer than its colours show
CELL_MISSING = 255


@dataclass(frozen=True)
class Line:
    """One curve: ``x`` and ``y`` are [n], ``low`` and ``high`` a band around ``y``; NaN leaves a gap."""

    name: str
    x: FloatArray
    y: FloatArray
    colour: int
    low: FloatArray | None = None
    high: FloatArray | None = None
    dashed: bool = False

    def to_json(self) -> dict[str, Any]:
        # The band needs the curve's precision: the page shows the deviation as their difference.
        band = {} if self.low is None else {"low": rounded(self.low, 6), "high": rounded(self.high, 6)}
        return {
            "name": self.name,
            "x": rounded(self.x, 6),
            "y": rounded(self.y, 6),
            "colour": self.colour,
            "dashed": self.dashed,
            **band,
        }


@dataclass(frozen=True)
class Lines:
    """Curves over a common axis; ``percent`` and ``x_percent`` mean that y and x are fractions, shown in %."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    percent: bool = True
    x_percent: bool = False
    stepped: bool = False

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": "lines",
            "title": self.title,
            "x_label": self.x_label,
            "y_label": self.y_label,
            "percent": self.percent,
            "x_percent": self.x_percent,
            "stepped": self.stepped,
            "series": [line.to_json() for line in self.lines],
        }


@dataclass(frozen=True)
class PointSet:
    """Points of one name: ``x`` and ``y`` are [n]; ``opacity`` [n] is in [0, 1]."""

    name: str
    x: FloatArray
    y: FloatArray
    colour: int
    opacity: FloatArray | None = None

    def to_json(self) -> dict[str, Any]:
        opacity = {} if self.opacity is None else {"opacity": rounded(self.opacity, 2)}
        return {
            "name": self.name,
            "x": rounded(self.x),
            "y": rounded(self.y),
            "colour": self.colour,
            **opacity,
        }


@dataclass(frozen=True)
class Scatter:
    """Sets of points; ``hide_axes`` is for coordinates without a meaning of their own (t-SNE)."""

    title: str
    x_label: str
    y_label: str
    point_sets: Sequence[PointSet]
    hide_axes: bool = False

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": "scatter",
            "title": self.title,
            "x_label": self.x_label,
            "y_label": self.y_label,
            "hide_axes": self.hide_axes,
            "series": [points.to_json() for points in self.point_sets],
        }


@dataclass(frozen=True)
class Bar:
    """One bar per category: ``values`` [n], with whiskers from ``low`` to ``high``."""

    name: str
    values: FloatArray
    colour: int
    low: FloatArray | None = None
    high: FloatArray | None = None

    def to_json(self) -> dict[str, Any]:
        whiskers = {} if self.low is None else {"low": rounded(self.low), "high": rounded(self.high)}
        return {"name": self.name, "values": rounded(self.values), "colour": self.colour, **whiskers}


@dataclass(frozen=True)
class Bars:
    """Groups of bars, one group per category."""

    title: str
    y_label: str
    categories: Sequence[str]
    bars: Sequence[Bar]
    percent: bool = True

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": "bars",
            "title": self.title,
            "y_label": self.y_label,
            "categories": list(self.categories),
            "percent": self.percent,
            "series": [bar.to_json() for bar in self.bars],
        }


@dataclass(frozen=True)
class HeatmapStep:
    """A heat map at one step of the slider.

    ``values`` [rows, columns] are in [0, 1], or NaN where unknown; ``marked`` cells have a dot.
    """

    name: str
    rows: Sequence[str]
    values: FloatArray
    marked: BoolArray | None = None

    def to_json(self) -> dict[str, Any]:
        # Cells are sent as bytes, since a long run has hundreds of thousands of them.
        marked = {} if self.marked is None else {"marked": _base64(self.marked.astype(np.uint8))}
        return {
            "name": self.name,
            "rows": list(self.rows),
            "cells": _base64(cell_bytes(self.values)),
            **marked,
        }


@dataclass(frozen=True)
class Heatmap:
    """A heat map of fractions; with several steps, one heat map for each position of a slider.

    With ``global_rows``, the first and the last row are the global model before and after a round, and are
    drawn apart from the clients' rows between them.
    """

    title: str
    x_label: str
    y_label: str
    columns: Sequence[str]
    steps: Sequence[HeatmapStep]
    global_rows: bool = False

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": "heatmap",
            "title": self.title,
            "x_label": self.x_label,
            "y_label": self.y_label,
            "columns": list(self.columns),
            "global_rows": self.global_rows,
            "steps": [step.to_json() for step in self.steps],
        }


@dataclass(frozen=True)
class Bubbles:
    """Circles with areas proportional to ``counts`` [stages, clients, classes], the numbers of samples."""

    title: str
    clients: Sequence[str]
    classes: Sequence[str]
    counts: NDArray[np.int64]
    domains: Sequence[str] = field(default_factory=tuple)  # the name of each client's domain, or empty
    largest: int = 0  # in print, the count of the largest circle; 0: the largest of this panel

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": "bubbles",
            "title": self.title,
            "x_label": "client",
            "y_label": "class",
            "columns": list(self.clients),
            "rows": list(self.classes),
            "domains": list(self.domains),
            "steps": [
                {"name": f"stage {stage}", "counts": counts.tolist()}
                for stage, counts in enumerate(self.counts)
            ],
        }


Panel = Lines | Scatter | Bars | Heatmap | Bubbles


@dataclass(frozen=True)
class Figure:
    """A named figure: its panels, how to read them, the published figure it follows, a summary sentence."""

    name: str
    title: str
    reading: str
    source: str
    panels: Sequence[Panel]
    summary: str

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "title": self.title,
            "reading": self.reading,
            "source": self.source,
            "summary": self.summary,
            "panels": [panel.to_json() for panel in self.panels],
        }


def rounded(values: FloatArray | None, digits: int = 4) -> list[float | None]:
    """Values for JSON, rounded to ``digits`` significant digits to keep the page small; NaN becomes None."""
    if values is None:
        return []
    return [float(f"{value:.{digits}g}") if np.isfinite(value) else None for value in values.tolist()]


def cell_bytes(values: FloatArray) -> NDArray[np.uint8]:
    """Fractions in [0, 1] as bytes from 0 to 200, unknown ones as 255."""
    known = np.isfinite(values)
    steps = np.rint(np.clip(np.where(known, values, 0.0), 0.0, 1.0) * CELL_STEPS)
    return np.where(known, steps, CELL_MISSING).astype(np.uint8)


def _base64(cells: NDArray[np.uint8]) -> str:
    return b64encode(np.ascontiguousarray(cells).tobytes()).decode("ascii")


def thin(length: int, limit: int) -> NDArray[np.intp]:
    """At most ``limit`` evenly spaced indices below ``length``, including the first and the last."""
    if length <= limit:
        return np.arange(length)
    return np.unique(np.rint(np.linspace(0, length - 1, limit)).astype(np.intp))
