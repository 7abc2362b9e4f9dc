"""Output of commands: tables, JSON and progress bars."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
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


class ProgressBar:
    """A progress bar on stderr for one run after another."""

    def __init__(self, progress: Progress, rounds: int, runs: int) -> None:
        self.progress, self.rounds, self.runs = progress, rounds, runs
        self.started = 0
        self.task: TaskID | None = None

    def start(self, label: str) -> None:
        """Begin the bar of the next run."""
        self.started += 1
        if self.task is not None:
            self.progress.remove_task(self.task)
        counted = f"{self.started}/{self.runs} " if self.runs > 1 else ""
        self.task = self.progress.add_task(counted + label, total=self.rounds, accuracy="")

    def update(self, record: dict[str, Any]) -> None:
        """Advance to the round of this record."""
        if self.task is not None:
            if "accuracy" in record:
                self.progress.update(self.task, accuracy=f"accuracy {record['accuracy']:.1%}")
            self.progress.update(self.task, completed=record["round"])


@contextmanager
def progress_bar(rounds: int, runs: int = 1) -> Iterator[ProgressBar]:
    """Show one progress bar after another for ``runs`` runs of ``rounds`` rounds each."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TextColumn("{task.fields[accuracy]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield ProgressBar(progress, rounds, runs)
