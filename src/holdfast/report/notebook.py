"""Display of results in notebooks: small tables in HTML, and curves as inline SVG."""

from collections.abc import Mapping, Sequence
from html import escape

import numpy as np

from holdfast.report.palette import SERIES_LIGHT
from holdfast.report.panels import thin

WIDTH, HEIGHT, MARGIN = 160, 36, 3  # of a curve, in pixels
MAX_POINTS = 160

_CELL = "padding:2px 12px 2px 0;text-align:{};vertical-align:top;white-space:nowrap"


def sparkline(values: Sequence[float], label: str) -> str:
    """A curve without axes, from its lowest to its highest value; empty for fewer than two known values."""
    numbers = np.asarray(values, float)[thin(len(values), MAX_POINTS)]
    known = np.flatnonzero(np.isfinite(numbers))
    if len(known) < 2:
        return ""
    y = numbers[known]
    spread = float(np.ptp(y)) or 1.0
    x = MARGIN + known / (len(numbers) - 1) * (WIDTH - 2 * MARGIN)
    down = HEIGHT - MARGIN - (y - y.min()) / spread * (HEIGHT - 2 * MARGIN)
    points = " ".join(f"{left:.1f},{top:.1f}" for left, top in zip(x, down, strict=True))
    colour = SERIES_LIGHT[0]
    return (
        f'<svg width="{WIDTH}" height="{HEIGHT}" role="img" aria-label="{escape(label)}">'
        f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
        f'<circle cx="{x[-1]:.1f}" cy="{down[-1]:.1f}" r="2.5" fill="{colour}"/></svg>'
    )


def properties(title: str, rows: Mapping[str, str], curve: str = "") -> str:
    """A title, a table of names and values, and a curve as `sparkline` returns it."""
    body = "".join(
        f'<tr><th style="{_CELL.format("left")};font-weight:normal;opacity:.7">{escape(name)}</th>'
        f'<td style="{_CELL.format("left")}">{escape(value)}</td></tr>'
        for name, value in rows.items()
    )
    return (
        f"<div><b>{escape(title)}</b>"
        f'<table style="border-collapse:collapse"><tbody>{body}</tbody></table>{curve}</div>'
    )


def grid(header: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str] = ()) -> str:
    """A table, whose first column is text and whose others are numbers, with notes below."""
    sides = ["left"] + ["right"] * (len(header) - 1)

    def line(tag: str, cells: Sequence[str]) -> str:
        made = (
            f'<{tag} style="{_CELL.format(side)}">{escape(cell)}</{tag}>'
            for side, cell in zip(sides, cells, strict=True)
        )
        return f"<tr>{''.join(made)}</tr>"

    body = "".join(line("td", row) for row in rows)
    below = "".join(f'<div style="opacity:.7">{escape(note)}</div>' for note in notes)
    return (
        f'<div><table style="border-collapse:collapse"><thead>{line("th", header)}</thead>'
        f"<tbody>{body}</tbody></table>{below}</div>"
    )


def aligned(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The same table as text in columns."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = (
        [cells[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(cells[1:], widths[1:], strict=True))]
        for cells in (header, *rows)
    )
    return "\n".join("  ".join(line).rstrip() for line in lines)
