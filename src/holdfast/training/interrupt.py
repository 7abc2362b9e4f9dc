"""Ctrl-C during training: the first one stops after the current round, the second one at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from holdfast.report.progress_display import in_notebook, is_terminal
from holdfast.training.run import Run

NOTE = "stopping after this round; interrupt again to stop immediately"


class Interrupt:
    """Whether the user has asked to stop."""

    requested = False

    def handle(self, signum: int, frame: FrameType | None) -> None:
        """The handler of SIGINT."""
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        if in_notebook():
            print(NOTE, file=sys.stderr)
        elif is_terminal():
            os.write(sys.stderr.fileno(), f"\n{NOTE}\n".encode())  # a print may have been interrupted


def interruption(run: Run) -> str:
    """A sentence on an interrupted run: its progress, and how to continue it."""
    begun = f"interrupted after round {len(run.records)} of {run.experiment['rounds']}; the run is incomplete"
    if run.path is None:
        return f"{begun}; continue it with holdfast.resume(run.save('runs/x')), or give out='runs/x' from the start"
    return f"{begun}; continue it with holdfast.resume({str(run.path)!r})"


_current: Interrupt | None = None


@contextmanager
def deferred_interrupt() -> Iterator[Interrupt]:
    """Handle SIGINT by setting ``requested``, in the main thread and unless the program has a handler of its own.

    A nested context yields the outer one's `Interrupt`.
    """
    global _current
    if _current is not None or threading.current_thread() is not threading.main_thread():
        yield _current or Interrupt()
        return
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield Interrupt()
        return
    _current = Interrupt()
    signal.signal(signal.SIGINT, _current.handle)
    try:
        yield _current
    finally:
        _current = None
        signal.signal(signal.SIGINT, signal.default_int_handler)
