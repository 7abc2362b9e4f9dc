"""What a figure is made of, said once and drawn twice: by the page (canvas) and for print (matplotlib).

A figure holds panels; a panel holds numbers, names and axis labels, and nothing about pixels. Colours are
indices into a palette (`holdfast.report.palette`), so that a method keeps its colour in every figure.
"""

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]

GRID_STEPS = 200  # a grid's cell is one byte on the page: half a percent is finer than a colour can show
GRID_MISSING = 255


@dataclass(frozen=True)
class Line:
    """One curve: ``x`` and ``y`` are [n], ``low`` and ``high`` a band around ``y``; NaN leaves a gap."""

    name: str
    x: Numbers
    y: Numbers
    colour: int
    low: Numbers | None = None
    high: Numbers | None = None
    dashed: bool = False

    def to_json(self) -> dict[str, Any]:
        """The curve as the page reads it."""
        # As exact as the curve: the page tells the spread as their difference.
        band = {} if self.low is None else {"low": numbers(self.low, 6), "high": numbers(self.high, 6)}
        return {
            "name": self.name,
            "x": numbers(self.x, 6),
            "y": numbers(self.y, 6),
            "colour": self.colour,
            "dashed": self.dashed,
            **band,
        }


@dataclass(frozen=True)
class Lines:
    """Curves over a common axis; ``percent`` and ``x_percent`` say that y and x are shares."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    percent: bool = True
    x_percent: bool = False
    stepped: bool = False

    def to_json(self) -> dict[str, Any]:
        """The panel as the page reads it."""
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
class Cloud:
    """Points of one name: ``x``, ``y`` are [n]; ``weight`` in [0, 1] is how opaque each point is drawn."""

    name: str
    x: Numbers
    y: Numbers
    colour: int
    weight: Numbers | None = None

    def to_json(self) -> dict[str, Any]:
        """The points as the page reads them."""
        weight = {} if self.weight is None else {"weight": numbers(self.weight, 2)}
        return {
            "name": self.name,
            "x": numbers(self.x),
            "y": numbers(self.y),
            "colour": self.colour,
            **weight,
        }


@dataclass(frozen=True)
class Scatter:
    """Clouds of points; ``bare`` leaves out the axes' numbers where they mean nothing (t-SNE)."""

    title: str
    x_label: str
    y_label: str
    clouds: Sequence[Cloud]
    bare: bool = False

    def to_json(self) -> dict[str, Any]:
        """The panel as the page reads it."""
        return {
            "kind": "scatter",
            "title": self.title,
            "x_label": self.x_label,
            "y_label": self.y_label,
            "bare": self.bare,
            "series": [cloud.to_json() for cloud in self.clouds],
        }


@dataclass(frozen=True)
class Bar:
    """One bar per category: ``values`` [n], with whiskers from ``low`` to ``high``."""

    name: str
    values: Numbers
    colour: int
    low: Numbers | None = None
    high: Numbers | None = None

    def to_json(self) -> dict[str, Any]:
        """The bars as the page reads them."""
        whiskers = {} if self.low is None else {"low": numbers(self.low), "high": numbers(self.high)}
        return {"name": self.name, "values": numbers(self.values), "colour": self.colour, **whiskers}


@dataclass(frozen=True)
class Bars:
    """Groups of bars, one group per category."""

    title: str
    y_label: str
    categories: Sequence[str]
    bars: Sequence[Bar]
    percent: bool = True

    def to_json(self) -> dict[str, Any]:
        """The panel as the page reads it."""
        return {
            "kind": "bars",
            "title": self.title,
            "y_label": self.y_label,
            "categories": list(self.categories),
            "percent": self.percent,
            "series": [bar.to_json() for bar in self.bars],
        }


@dataclass(frozen=True)
class Frame:
    """A picture of a grid: ``values`` [rows, columns] in [0, 1], NaN unknown; ``marked`` cells get a dot."""

    name: str
    rows: Sequence[str]
    values: Numbers
    marked: NDArray[np.bool_] | None = None

    def to_json(self) -> dict[str, Any]:
        """The frame as the page reads it: cells as bytes, since a long run has hundreds of thousands."""
        marked = {} if self.marked is None else {"marked": _base64(self.marked.astype(np.uint8))}
        return {
            "name": self.name,
            "rows": list(self.rows),
            "cells": _base64(grid_bytes(self.values)),
            **marked,
        }


@dataclass(frozen=True)
class Grid:
    """A heat map of shares, or, with several frames, one heat map for each step of a slider.

    ``framed`` rows (Flashback's first and last: the global model before and after) stand apart.
    """

    title: str
    x_label: str
    y_label: str
    columns: Sequence[str]
    frames: Sequence[Frame]
    framed: bool = False

    def to_json(self) -> dict[str, Any]:
        """The panel as the page reads it."""
        return {
            "kind": "grid",
            "title": self.title,
            "x_label": self.x_label,
            "y_label": self.y_label,
            "columns": list(self.columns),
            "framed": self.framed,
            "frames": [frame.to_json() for frame in self.frames],
        }


@dataclass(frozen=True)
class Bubbles:
    """Who holds what: ``counts`` [stages, clients, classes], a circle's area being the number of samples."""

    title: str
    clients: Sequence[str]
    classes: Sequence[str]
    counts: NDArray[np.int64]
    domains: Sequence[str] = field(default_factory=tuple)  # one name per client, or none
    largest: int = 0  # samples of the largest circle on paper; 0 for the largest here

    def to_json(self) -> dict[str, Any]:
        """The panel as the page reads it."""
        return {
            "kind": "bubbles",
            "title": self.title,
            "x_label": "client",
            "y_label": "class",
            "columns": list(self.clients),
            "rows": list(self.classes),
            "domains": list(self.domains),
            "frames": [
                {"name": f"stage {stage}", "counts": counts.tolist()}
                for stage, counts in enumerate(self.counts)
            ],
        }


Panel = Lines | Scatter | Bars | Grid | Bubbles


@dataclass(frozen=True)
class Figure:
    """A named figure: panels, how to read it, which published figure it follows, what it shows in words."""

    name: str
    title: str
    reading: str
    source: str
    panels: Sequence[Panel]
    summary: str

    def to_json(self) -> dict[str, Any]:
        """The figure as the page reads it."""
        return {
            "name": self.name,
            "title": self.title,
            "reading": self.reading,
            "source": self.source,
            "summary": self.summary,
            "panels": [panel.to_json() for panel in self.panels],
        }


def numbers(values: Numbers | None, digits: int = 4) -> list[float | None]:
    """Numbers for JSON with few significant digits: a page is read by eye, and every byte is loaded."""
    if values is None:
        return []
    return [float(f"{value:.{digits}g}") if np.isfinite(value) else None for value in values.tolist()]


def grid_bytes(values: Numbers) -> NDArray[np.uint8]:
    """Shares in [0, 1] as bytes 0..200, unknown ones as 255."""
    known = np.isfinite(values)
    steps = np.rint(np.clip(np.where(known, values, 0.0), 0.0, 1.0) * GRID_STEPS)
    return np.where(known, steps, GRID_MISSING).astype(np.uint8)


def _base64(cells: NDArray[np.uint8]) -> str:
    return b64encode(np.ascontiguousarray(cells).tobytes()).decode("ascii")


def thin(length: int, limit: int) -> NDArray[np.intp]:
    """At most ``limit`` evenly spaced positions out of ``length``, the first and the last among them."""
    if length <= limit:
        return np.arange(length)
    return np.unique(np.rint(np.linspace(0, length - 1, limit)).astype(np.intp))
