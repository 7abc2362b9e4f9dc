"""Display of progress: a bar in a terminal, an updated line in a notebook, a line per minute in a log."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from holdfast.core.measures import Measure

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

LOG_SECONDS = 60.0  # between lines in a log
ACCURACY = Measure("accuracy")
REDRAW_SECONDS = 0.2  # between redraws of a bar


class ProgressDisplay:
    """The state of the run that is shown. This class shows nothing; its subclasses implement ``show``."""

    seconds = float("inf")  # between two calls of ``show``

    def __init__(self, runs: int = 1) -> None:
        self.runs, self.started = runs, 0
        self.label, self.rounds, self.round, self.score = "", 0, 0, ""
        self.measure = ACCURACY
        self._began = self._shown = time.monotonic()
        self._first = 0  # the round before the first one of this process

    def start(self, label: str, rounds: int, measure: Measure = ACCURACY) -> None:
        """Begin the display of the next run, with the metric by which it is judged."""
        self.measure = measure
        self.started += 1
        self.label = f"{self.started}/{self.runs} {label}" if self.runs > 1 else label
        self.rounds, self.round, self.score = rounds, 0, ""
        self._began, self._first = time.monotonic(), -1

    def update(self, record: Mapping[str, Any]) -> None:
        """Advance to the round of this record."""
        self.round = int(record["round"])
        if self._first < 0:
            self._first = self.round - 1  # above 0 in a run that is resumed
        value = record.get(self.measure.name)
        if isinstance(value, float):
            text = f"{value:.1%}" if self.measure.is_share else self.measure.text(value)
            self.score = f"{self.measure.name} {text}"
        if time.monotonic() - self._shown >= self.seconds:
            self._shown = time.monotonic()
            self.show()

    def line(self) -> str:
        """The state as text: ``fedntd on digits: round 37/200, accuracy 71.2%, 5 min left``."""
        parts = [f"{self.label}: round {self.round}/{self.rounds}", self.score, self._left()]
        return ", ".join(part for part in parts if part)

    def _left(self) -> str:
        done, left = self.round - self._first, self.rounds - self.round
        if left <= 0 or done <= 0:
            return ""
        seconds = (time.monotonic() - self._began) / done * left
        for unit, length in (("h", 3600), ("min", 60)):
            if seconds >= 2 * length:
                return f"{seconds / length:.0f} {unit} left"
        return f"{seconds:.0f} s left"

    def show(self) -> None:
        """Show the state."""

    def close(self) -> None:
        """End the display."""


class LogLines(ProgressDisplay):
    """Lines on stderr."""

    seconds = LOG_SECONDS

    def show(self) -> None:
        log_line(self.line())


def log_line(line: str) -> None:
    """Print a line on stderr at once."""
    with suppress(OSError, ValueError):  # a closed stderr must not stop the run
        print(line, file=sys.stderr, flush=True)


class NotebookLine(ProgressDisplay):
    """A line below the notebook's cell."""

    seconds = REDRAW_SECONDS

    def __init__(self, runs: int = 1) -> None:
        from IPython.display import display

        super().__init__(runs)
        self._handle = display({"text/plain": ""}, raw=True, display_id=True)

    def show(self) -> None:
        self._handle.update({"text/plain": self.line()}, raw=True)

    def close(self) -> None:
        self.show()


class TerminalBar(ProgressDisplay):
    """A bar on stderr, which disappears at the end. It is redrawn only after rounds, so that a debugger can be used."""

    seconds = REDRAW_SECONDS

    def __init__(self, runs: int = 1) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        super().__init__(runs)
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.fields[score]}"),
            TimeRemainingColumn(),
        )
        self._bar: Progress = Progress(
            *columns, console=Console(stderr=True), transient=True, auto_refresh=False
        )
        self._task: TaskID | None = None
        self._bar.start()

    def start(self, label: str, rounds: int, measure: Measure = ACCURACY) -> None:
        super().start(label, rounds, measure)
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._task = self._bar.add_task(self.label, total=rounds, score="")
        self._bar.refresh()

    def show(self) -> None:
        if self._task is not None:
            self._bar.update(self._task, completed=self.round, score=self.score)
            self._bar.refresh()

    def close(self) -> None:
        self._bar.stop()


@contextmanager
def progress_display(shown: bool = True, runs: int = 1) -> Iterator[ProgressDisplay]:
    """The display for ``runs`` runs, one after another; it shows nothing if ``shown`` is false."""
    display = _display_for_stderr()(runs) if shown else ProgressDisplay(runs)
    try:
        yield display
    finally:
        display.close()


def _display_for_stderr() -> Callable[[int], ProgressDisplay]:
    if in_notebook():
        return NotebookLine
    return TerminalBar if is_terminal() else LogLines


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return hasattr(shell, "kernel")


def is_terminal() -> bool:
    """Whether stderr is a terminal that can redraw a line."""
    with suppress(AttributeError, ValueError):  # there is no stderr, or it is closed
        return sys.stderr.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
    return False
