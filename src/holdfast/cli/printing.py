"""What commands print: tables for people, JSON for programs, a bar while training."""

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

LEAST = 10  # characters of a column of words


def console() -> Console:
    """Where results go, brackets as they are; made anew, so that it follows a redirected stdout."""
    return Console(highlight=False, markup=False)


def print_json(value: Any) -> None:
    """One JSON document on stdout; NaN is written as null."""
    from holdfast.runs.metrics_file import plain

    print(json.dumps(plain(value), indent=2, ensure_ascii=False))


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table; columns whose names begin with a space hold numbers: aligned right, and never cut or folded."""
    out = console()
    table = Table(title=title or None, title_justify="left", box=None, pad_edge=False, header_style="bold")
    table.show_header = any(column.strip() for column in columns)
    narrow = out.is_terminal or "COLUMNS" in os.environ  # a file has room
    widths = _fitted(columns, rows, out.width if narrow else sys.maxsize)
    for column, width in zip(columns, widths, strict=True):
        table.add_column(
            column.strip(),
            justify="right" if column.startswith(" ") else "left",
            overflow="fold",
            width=width,
        )
    for row in rows:
        table.add_row(*row)
    out.width = sum(width + 2 for width in widths)  # rich would cut what is wider; a terminal wraps it
    out.print(table)


def _fitted(columns: Sequence[str], rows: Sequence[Sequence[str]], room: int) -> list[int]:
    """How wide each column is: as its longest cell, but the widest of words are folded until all fit in."""
    widths = [max(map(cell_len, cells)) for cells in zip(map(str.strip, columns), *rows, strict=True)]
    words = [at for at, column in enumerate(columns) if not column.startswith(" ")]
    while sum(widths) + 2 * (len(widths) - 1) > room:
        widest = max(words, key=lambda at: widths[at], default=None)
        if widest is None or widths[widest] <= LEAST:
            break
        widths[widest] -= 1
    return widths


class ProgressBar:
    """The progress of one run after another, on stderr."""

    def __init__(self, progress: Progress, rounds: int, runs: int) -> None:
        self.progress, self.rounds, self.runs = progress, rounds, runs
        self.begun = 0
        self.task: TaskID | None = None

    def start(self, label: str) -> None:
        """A new run begins."""
        self.begun += 1
        if self.task is not None:
            self.progress.remove_task(self.task)
        counted = f"{self.begun}/{self.runs} " if self.runs > 1 else ""
        self.task = self.progress.add_task(counted + label, total=self.rounds, accuracy="")

    def update(self, record: dict[str, Any]) -> None:
        """A round is over."""
        if self.task is not None:
            if "accuracy" in record:
                self.progress.update(self.task, accuracy=f"accuracy {record['accuracy']:.1%}")
            self.progress.update(self.task, completed=record["round"])


@contextmanager
def bar(rounds: int, runs: int = 1) -> Iterator[ProgressBar]:
    """Show a bar for each of ``runs`` runs of ``rounds`` rounds."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TextColumn("{task.fields[accuracy]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield ProgressBar(progress, rounds, runs)
