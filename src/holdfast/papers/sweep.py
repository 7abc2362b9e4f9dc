"""Runs the cells without a result, in one or several processes, until all are done or the deadline passes."""

from __future__ import annotations

import re
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from holdfast.core.errors import HoldfastError
from holdfast.papers.cells import Cell
from holdfast.papers.cost import Estimates
from holdfast.papers.measures import final_accuracy
from holdfast.papers.results import Results, completed_entry, failed_entry
from holdfast.runs import RunDirectory
from holdfast.sweeps.queue import Queue
from holdfast.sweeps.workers import DIVERGED, Log, ProgressLog, run_jobs


@dataclass(frozen=True)
class Sweep:
    """The configuration of a sweep.

    Attributes:
        results: the directory of stored results.
        work: the directory of leases and run directories.
        device: auto, cpu or cuda.
        deadline: a ``time.time()``; no cell is started that would probably end after it. None for no limit.
    """

    results: Path
    work: Path
    device: str = "auto"
    deadline: float | None = None

    def run(self, cells: Sequence[Cell], workers: int, log: Log) -> bool:
        """Run the cells that have no result yet, with ``workers`` processes in parallel.

        Returns whether every cell could be run; a failed cell does not stop the others.
        """
        self._check(cells)
        work = _Cells(self, cells, workers)
        complete = run_jobs(work, log)
        if work.too_long():
            log("time limit reached; run the same command again to continue with the remaining cells")
        return complete

    def _check(self, cells: Sequence[Cell]) -> None:
        """Raise errors that affect every cell, before any training."""
        from holdfast.core.device import choose_device

        results = Results(self.results)
        if any(results.get(cell) is None for cell in cells):
            choose_device(self.device)
            results.check_writable()
            Queue(self.work)

    def run_directory(self, cell: Cell, device: str) -> Path:
        """A cell's run directory. It depends on the device, because runs do not move between types of device."""
        method = re.split(r"[:+]", str(cell.settings["method"]))[0]
        return self.work / "runs" / f"{method}-seed{cell.seed}-{cell.hash}-{device}"


@dataclass(frozen=True)
class _Cells:
    """The cells of a sweep, as jobs of its workers."""

    sweep: Sweep
    cells: Sequence[Cell]
    workers: int
    waits: ClassVar[bool] = False

    @property
    def device(self) -> str:
        return self.sweep.device

    def queue(self) -> Queue:
        return Queue(self.sweep.work)

    def pending(self) -> list[Cell]:
        """The cells without a result that would probably end before the deadline."""
        self._results.refresh()
        fits = self._fits_deadline()
        return [cell for cell in self.cells if self._results.get(cell) is None and fits(cell)]

    def too_long(self) -> bool:
        """Whether a cell without a result would end after the deadline."""
        self._results.refresh()
        fits = self._fits_deadline()
        return any(self._results.get(cell) is None and not fits(cell) for cell in self.cells)

    @cached_property
    def _results(self) -> Results:
        return Results(self.sweep.results)

    def _fits_deadline(self) -> Callable[[Cell], bool]:
        deadline = self.sweep.deadline
        if deadline is None:
            return lambda cell: True
        from holdfast.core.device import choose_device

        estimates = Estimates(self._results.all(), choose_device(self.device).type)
        return lambda cell: time.time() + self.workers * estimates.seconds(cell) <= deadline

    def run(self, cell: Cell, log: Log) -> bool:
        """Run a cell and store the result. Returns False, and stores nothing, if it could not be run."""
        # Imported here because torch takes seconds to load, which listing tables does not need.
        from holdfast.core.device import choose_device
        from holdfast.training.experiment import Experiment

        device = choose_device(self.device).type
        path = self.sweep.run_directory(cell, device)
        start = time.monotonic()
        try:
            experiment = Experiment.from_mapping({**cell.settings, "seed": cell.seed, "device": device})
            resume = (path / "experiment.yaml").exists()
            progress = ProgressLog(cell.label, cell.settings["rounds"], log)
            run = experiment.run(path, resume=resume, on_round=progress, progress=False)
            if run.interrupted:
                raise KeyboardInterrupt
            entry = completed_entry(cell, RunDirectory.open(path), self.workers)
        except HoldfastError as error:
            if not DIVERGED.match(str(error)):
                log(f"{cell.label}: {error}")
                return False
            entry = failed_entry(cell, RunDirectory.open(path), self.workers, str(error))
        except Exception:  # an error in one method must not end a long sweep
            log(f"{cell.label}: {traceback.format_exc()}")
            return False
        self._results.add(cell, entry)
        outcome = entry.get("failed") or f"{final_accuracy(entry):.2%}"
        log(f"{cell.label}: {outcome}, {time.monotonic() - start:.0f} s")
        return True
