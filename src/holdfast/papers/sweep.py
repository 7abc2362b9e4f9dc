"""Running the cells that are missing, in one process or several, until all are done or time is up."""

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

from holdfast.core.errors import HoldfastError, shown_by
from holdfast.papers.cells import Cell
from holdfast.papers.cost import Estimates
from holdfast.papers.queue import Queue
from holdfast.papers.results import Results, entry_of, failure_of
from holdfast.runs import RunDirectory

BROKE_DOWN = re.compile(r"round \d+: no usable update")
"""The error of a run whose training diverged: that is a result. Any other is a mistake to put right."""

TELL_EVERY = 60.0  # seconds between two lines about a cell that is being run
UNABLE = 20  # a worker's exit code: a cell could not be run, and why was told

Tell = Callable[[str], None]
"""Is told lines about each cell; with several workers a function that can be imported."""


@dataclass(frozen=True)
class Sweep:
    """Where and how cells are run.

    Attributes:
        results: the directory of stored results.
        work: the directory of claims and of the runs themselves.
        device: auto, cpu or cuda.
        deadline: in ``time.time()``; no cell is begun that would probably end after it. None for no limit.
        beside: processes at work on the same device, this one included; set by ``run``.
    """

    results: Path
    work: Path
    device: str = "auto"
    deadline: float | None = None
    beside: int = 1

    def run(self, cells: Sequence[Cell], workers: int, tell: Tell) -> bool:
        """Run the cells that have no result yet, with ``workers`` processes side by side.

        False where a cell could not be run; the others are.
        """
        if workers < 1:
            raise HoldfastError(f"a sweep needs at least 1 worker, not {workers}")
        self._check(cells)
        if workers == 1:
            return self.work_off(cells, tell)
        context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        threads = max(1, (os.cpu_count() or 1) // workers)
        one = replace(self, beside=workers)
        started = [
            context.Process(target=_worker, args=(one, list(cells), tell, threads, number == 0))
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
        if codes - {0, UNABLE}:
            raise HoldfastError(
                "a worker ended before its time; what was finished is stored, and the same command goes on"
            )
        return UNABLE not in codes

    def _check(self, cells: Sequence[Cell]) -> None:
        """What would stop every cell is said once, and before the first has been trained."""
        from holdfast.core.device import choose_device

        results = Results(self.results)
        if any(results.get(cell) is None for cell in cells):
            choose_device(self.device)
            results.check_room()
            Queue(self.work)

    def work_off(self, cells: Sequence[Cell], tell: Tell, speaks: bool = True) -> bool:
        """Claim, run and store one cell after another until none is left that this process can take.

        ``speaks``: this one of several processes tells what holds for all. False where a cell could not be run.
        """
        results, queue = Results(self.results), Queue(self.work)
        left, broken, too_long = list(cells), set[str](), False
        with ExitStack() as kept:  # claims of cells that could not be run: no other process need try them
            while left:
                taken = False
                for cell in left:
                    results.refresh()
                    if results.get(cell) is not None or cell.hash in broken:
                        continue
                    if not self._fits(cell, results):
                        too_long = True
                        continue
                    with ExitStack() as claim:
                        if not claim.enter_context(queue.claim(cell)):
                            continue
                        results.refresh()  # another process may have finished it a moment ago
                        if results.get(cell) is None:
                            taken = True
                            if not self._run(cell, results, tell):
                                broken.add(cell.hash)
                                kept.push(claim.pop_all())
                # What others hold may come free; what does not fit the time will not fit it later.
                left = (
                    [cell for cell in left if results.get(cell) is None and cell.hash not in broken]
                    if taken
                    else []
                )
        if too_long and speaks:
            tell("time is up: the same command goes on with the cells that are left")
        return not broken

    def _fits(self, cell: Cell, results: Results) -> bool:
        if self.deadline is None:
            return True
        from holdfast.core.device import choose_device

        estimates = Estimates(results.all(), choose_device(self.device).type)
        return time.time() + self.beside * estimates.seconds(cell) <= self.deadline

    def _run(self, cell: Cell, results: Results, tell: Tell) -> bool:
        """Run a cell and store it; False where it could not be run, which leaves nothing stored."""
        # Imported here: they load torch, and a person may only want to see what there is.
        from holdfast.core.device import choose_device
        from holdfast.training.experiment import Experiment

        device = choose_device(self.device).type
        path = self.run_directory(cell, device)
        began = time.monotonic()
        try:
            experiment = Experiment.from_mapping({**cell.settings, "seed": cell.seed, "device": device})
            resume = (path / "experiment.yaml").exists()
            experiment.run(path, resume=resume, on_round=_Progress(cell, tell))
            entry = entry_of(cell, RunDirectory.open(path), self.beside)
        except HoldfastError as error:
            if not BROKE_DOWN.match(str(error)):
                tell(f"{cell.label}: {error}")
                return False
            entry = failure_of(cell, RunDirectory.open(path), self.beside, str(error))
        except Exception:  # one broken cell must not end a night's sweep
            tell(f"{cell.label}: {traceback.format_exc()}")
            return False
        results.add(cell, entry)
        outcome = entry.get("failed") or f"{entry['final']['accuracy']:.2%}"
        tell(f"{cell.label}: {outcome}, {time.monotonic() - began:.0f} s")
        return True

    def run_directory(self, cell: Cell, device: str) -> Path:
        """Where a cell's run lies; a run begun on one kind of device is not continued on another."""
        method = re.split(r"[:+]", str(cell.settings["method"]))[0]
        return self.work / "runs" / f"{method}-seed{cell.seed}-{cell.hash}-{device}"


class _Progress:
    """Tells now and then how far a cell is."""

    def __init__(self, cell: Cell, tell: Tell) -> None:
        self.cell, self.tell, self.told = cell, tell, time.monotonic()

    def __call__(self, record: Mapping[str, Any]) -> None:
        if time.monotonic() - self.told >= TELL_EVERY:
            self.told = time.monotonic()
            self.tell(f"{self.cell.label}: round {record['round']} of {self.cell.settings['rounds']}")


def _worker(sweep: Sweep, cells: list[Cell], tell: Tell, threads: int, speaks: bool) -> None:
    """One of several processes; the arguments are those of `Sweep.work_off`."""
    import torch

    from holdfast.core.device import MPS_COMMAND, choose_device, gpu_is_time_sliced, share_gpu

    parent = multiprocessing.parent_process()
    if parent is not None:
        Thread(target=_end_with, args=(parent,), daemon=True).start()
    torch.set_num_threads(threads)
    if choose_device(sweep.device).type == "cuda":
        share_gpu(sweep.beside)
        if speaks and gpu_is_time_sliced():
            tell(f"the workers take turns on the GPU; side by side they get more done: {MPS_COMMAND}")
    warnings.showwarning = shown_by(tell)
    with suppress(KeyboardInterrupt):  # the process that started this one says so
        if not sweep.work_off(cells, tell, speaks):
            sys.exit(UNABLE)


def _end_with(parent: BaseProcess) -> None:
    """End this process with the one that started it: a sweep that is killed leaves no workers behind."""
    parent.join()
    os._exit(1)
