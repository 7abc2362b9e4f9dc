"""What commands print: tables for people, JSON for programs, a bar while training."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table


def console() -> Console:
    """Where results go, brackets as they are; made anew, so that it follows a redirected stdout."""
    return Console(highlight=False, markup=False)


def print_json(value: Any) -> None:
    """One JSON document on stdout; NaN is written as null."""
    from holdfast.runs.metrics_file import plain

    print(json.dumps(plain(value), indent=2, ensure_ascii=False))


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table; columns whose names begin with a space are aligned right."""
    table = Table(title=title or None, title_justify="left", box=None, pad_edge=False, header_style="bold")
    table.show_header = any(column.strip() for column in columns)
    for at, column in enumerate(columns):
        right = column.startswith(" ")
        # A row's name stays in one piece as long as it is short.
        least = min(20, max((len(row[0]) for row in rows), default=0)) if at == 0 else None
        table.add_column(
            column.strip(),
            justify="right" if right else "left",
            no_wrap=right,
            overflow="fold",
            min_width=least,
        )
    for row in rows:
        table.add_row(*row)
    console().print(table)


def mean_and_deviation(values: Sequence[float], scale: float = 1.0, digits: int = 2) -> str:
    """``87.31 ± 0.42``: mean and sample deviation; a dash where any is unknown."""
    known = [value * scale for value in values if math.isfinite(value)]
    if not known or len(known) < len(values):
        return "–"
    mean = sum(known) / len(known)
    if len(known) == 1:
        return f"{mean:.{digits}f}"
    deviation = math.sqrt(sum((value - mean) ** 2 for value in known) / (len(known) - 1))
    return f"{mean:.{digits}f} ± {deviation:.{digits}f}"


class Bar:
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
def bar(rounds: int, runs: int = 1) -> Iterator[Bar]:
    """Show a bar for each of ``runs`` runs of ``rounds`` rounds."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TextColumn("{task.fields[accuracy]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield Bar(progress, rounds, runs)
