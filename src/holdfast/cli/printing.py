"""Output of commands: tables and JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

MIN_WIDTH = 10  # characters of a text column


def console() -> Console:
    """A console on the current stdout that prints brackets literally; a new one follows a redirected stdout."""
    return Console(highlight=False, markup=False)


def print_json(value: Any) -> None:
    """Print one JSON document on stdout; NaN is written as null."""
    from holdfast.runs.metrics_file import plain

    print(json.dumps(plain(value), indent=2, ensure_ascii=False))


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table. Columns whose name begins with a space hold numbers: right-aligned, never cut or folded."""
    out = console()
    table = Table(title=title or None, title_justify="left", box=None, pad_edge=False, header_style="bold")
    table.show_header = any(column.strip() for column in columns)
    limited = out.is_terminal or "COLUMNS" in os.environ  # a file has lines of any length
    widths = _column_widths(columns, rows, out.width if limited else sys.maxsize)
    for column, width in zip(columns, widths, strict=True):
        table.add_column(
            column.strip(),
            justify="right" if column.startswith(" ") else "left",
            overflow="fold",
            width=width,
        )
    for row in rows:
        table.add_row(*row)
    out.width = sum(width + 2 for width in widths)  # rich would cut wider lines; a terminal wraps them
    out.print(table)


def _column_widths(columns: Sequence[str], rows: Sequence[Sequence[str]], available: int) -> list[int]:
    """The width of each column: that of its longest cell, with the widest text columns narrowed until all fit."""
    widths = [max(map(cell_len, cells)) for cells in zip(map(str.strip, columns), *rows, strict=True)]
    text = [index for index, column in enumerate(columns) if not column.startswith(" ")]
    while sum(widths) + 2 * (len(widths) - 1) > available:
        widest = max(text, key=lambda index: widths[index], default=None)
        if widest is None or widths[widest] <= MIN_WIDTH:
            break
        widths[widest] -= 1
    return widths
