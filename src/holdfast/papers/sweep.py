"""Runs the cells without a result, in one process or several, until all are done or time is up."""

from __future__ import annotations

import multiprocessing
import os
import re
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Thread
from typing import Any

from holdfast.core.errors import HoldfastError, warning_printer
from holdfast.papers.cells import Cell
from holdfast.papers.cost import Estimates
from holdfast.papers.queue import Queue
from holdfast.papers.results import Results, completed_entry, failed_entry
from holdfast.runs import RunDirectory

DIVERGED = re.compile(r"round \d+: no usable update")
"""The error of a run whose training diverged, which is stored as a result. Any other error is a mistake to fix."""

LOG_INTERVAL = 60.0  # seconds between two progress lines of a cell
EXIT_CELL_FAILED = 20  # exit code of a worker that could not run a cell and has logged why

Log = Callable[[str], None]
"""Receives one line at a time; with several workers it must be importable, since they are separate processes."""


@dataclass(frozen=True)
class Sweep:
    """Where and how cells are run.

    Attributes:
        results: the directory of stored results.
        work: the directory of leases and run directories.
        device: auto, cpu or cuda.
        deadline: a ``time.time()``; no cell is started that would probably end after it. None for no limit.
        processes: processes on the same device, this one included; ``run`` sets it.
    """

    results: Path
    work: Path
    device: str = "auto"
    deadline: float | None = None
    processes: int = 1

    def run(self, cells: Sequence[Cell], workers: int, log: Log) -> bool:
        """Run the cells that have no result yet, with ``workers`` processes in parallel.

        Returns whether every cell could be run; one that fails does not keep the others from running.
        """
        if workers < 1:
            raise HoldfastError(f"a sweep needs at least 1 worker, not {workers}")
        self._check(cells)
        if workers == 1:
            return self.run_cells(cells, log)
        context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        threads = max(1, (os.cpu_count() or 1) // workers)
        sweep = replace(self, processes=workers)
        started = [
            context.Process(target=_worker, args=(sweep, list(cells), log, threads, number == 0))
            for number in range(workers)
        ]
        try:
            for process in started:
                process.start()
            for process in started:
                process.join()
        finally:
            for process in started:
                process.terminate()
        codes = {process.exitcode for process in started}
        if codes - {0, EXIT_CELL_FAILED}:
            raise HoldfastError(
                "a worker process ended unexpectedly; finished cells are stored, and the same command continues"
            )
        return EXIT_CELL_FAILED not in codes

    def _check(self, cells: Sequence[Cell]) -> None:
        """Raise once, before any training, what would make every cell fail."""
        from holdfast.core.device import choose_device

        results = Results(self.results)
        if any(results.get(cell) is None for cell in cells):
            choose_device(self.device)
            results.check_writable()
            Queue(self.work)

    def run_cells(self, cells: Sequence[Cell], log: Log, first: bool = True) -> bool:
        """Run one cell after another until none is left that this process can lease.

        ``first``: whether this is the first of the workers, which logs what concerns all of them. Returns whether
        every cell could be run.
        """
        results, queue = Results(self.results), Queue(self.work)
        remaining, failed, too_long = list(cells), set[str](), False
        with ExitStack() as failed_leases:  # kept to the end, so that no other process tries these cells
            while remaining:
                ran_any = False
                for cell in remaining:
                    results.refresh()
                    if results.get(cell) is not None or cell.hash in failed:
                        continue
                    if not self._fits_deadline(cell, results):
                        too_long = True
                        continue
                    with ExitStack() as lease:
                        if not lease.enter_context(queue.lease(cell)):
                            continue
                        results.refresh()  # another process may just have finished it
                        if results.get(cell) is None:
                            ran_any = True
                            if not self._run_cell(cell, results, log):
                                failed.add(cell.hash)
                                failed_leases.push(lease.pop_all())
                # Another pass: meanwhile other processes may have given up their leases.
                remaining = (
                    [cell for cell in remaining if results.get(cell) is None and cell.hash not in failed]
                    if ran_any
                    else []
                )
        if too_long and first:
            log("time is up: the same command continues with the remaining cells")
        return not failed

    def _fits_deadline(self, cell: Cell, results: Results) -> bool:
        if self.deadline is None:
            return True
        from holdfast.core.device import choose_device

        estimates = Estimates(results.all(), choose_device(self.device).type)
        return time.time() + self.processes * estimates.seconds(cell) <= self.deadline

    def _run_cell(self, cell: Cell, results: Results, log: Log) -> bool:
        """Run a cell and store the result. Returns False, and stores nothing, if it could not be run."""
        # Imported here because torch takes seconds to load, which listing tables does not need.
        from holdfast.core.device import choose_device
        from holdfast.training.experiment import Experiment

        device = choose_device(self.device).type
        path = self.run_directory(cell, device)
        start = time.monotonic()
        try:
            experiment = Experiment.from_mapping({**cell.settings, "seed": cell.seed, "device": device})
            resume = (path / "experiment.yaml").exists()
            run = experiment.run(path, resume=resume, on_round=_ProgressLog(cell, log), progress=False)
            if run.interrupted:
                raise KeyboardInterrupt
            entry = completed_entry(cell, RunDirectory.open(path), self.processes)
        except HoldfastError as error:
            if not DIVERGED.match(str(error)):
                log(f"{cell.label}: {error}")
                return False
            entry = failed_entry(cell, RunDirectory.open(path), self.processes, str(error))
        except Exception:  # a bug in one method must not end a sweep of hours
            log(f"{cell.label}: {traceback.format_exc()}")
            return False
        results.add(cell, entry)
        outcome = entry.get("failed") or f"{entry['final']['accuracy']:.2%}"
        log(f"{cell.label}: {outcome}, {time.monotonic() - start:.0f} s")
        return True

    def run_directory(self, cell: Cell, device: str) -> Path:
        """A cell's run directory. It depends on the device, because runs do not move between types of device."""
        method = re.split(r"[:+]", str(cell.settings["method"]))[0]
        return self.work / "runs" / f"{method}-seed{cell.seed}-{cell.hash}-{device}"


class _ProgressLog:
    """An ``on_round`` callback that logs the progress of a cell at intervals."""

    def __init__(self, cell: Cell, log: Log) -> None:
        self.cell, self.log, self.logged_at = cell, log, time.monotonic()

    def __call__(self, record: Mapping[str, Any]) -> None:
        if time.monotonic() - self.logged_at >= LOG_INTERVAL:
            self.logged_at = time.monotonic()
            self.log(f"{self.cell.label}: round {record['round']} of {self.cell.settings['rounds']}")


def _worker(sweep: Sweep, cells: list[Cell], log: Log, threads: int, first: bool) -> None:
    """The main function of a worker process; ``threads`` are torch's, the rest as for `Sweep.run_cells`."""
    import torch

    from holdfast.core.device import MPS_COMMAND, choose_device, gpu_is_time_sliced, share_gpu

    parent = multiprocessing.parent_process()
    if parent is not None:
        Thread(target=_exit_with, args=(parent,), daemon=True).start()
    torch.set_num_threads(threads)
    if choose_device(sweep.device).type == "cuda":
        share_gpu(sweep.processes)
        if first and gpu_is_time_sliced():
            log(f"the workers take turns on the GPU; to run them concurrently, start {MPS_COMMAND}")
    warnings.showwarning = warning_printer(log)
    with suppress(KeyboardInterrupt):  # the parent process reports it
        if not sweep.run_cells(cells, log, first):
            sys.exit(EXIT_CELL_FAILED)


def _exit_with(parent: BaseProcess) -> None:
    """Exit when the parent process does, so that a killed sweep leaves no workers behind."""
    parent.join()
    os._exit(1)
