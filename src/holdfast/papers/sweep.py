"""Running the cells that are missing, in one process or several, until all are done or time is up."""

from __future__ import annotations

import multiprocessing
import os
import re
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Thread

from holdfast.errors import HoldfastError
from holdfast.papers.cells import Cell
from holdfast.papers.cost import Estimates
from holdfast.papers.queue import Queue
from holdfast.papers.results import Results, entry_of, failure_of
from holdfast.runs import RunDirectory

BROKE_DOWN = re.compile(r"round \d+: no usable update")
"""The error of a run whose training diverged: that is a result. Any other is a mistake to put right."""

Tell = Callable[[str], None]
"""Is told a line about each cell; with several workers a function that can be imported."""


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

    def run(self, cells: Sequence[Cell], workers: int, tell: Tell) -> None:
        """Run the cells that have no result yet, with ``workers`` processes side by side."""
        if workers < 1:
            raise HoldfastError(f"a sweep needs at least 1 worker, not {workers}")
        if workers == 1:
            self.work_off(cells, tell)
            return
        Results(self.results)  # damaged results are told of once, and here
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
        if any(process.exitcode for process in started):
            raise HoldfastError(
                "a worker ended before its time; what was finished is stored, and the same command goes on"
            )

    def work_off(self, cells: Sequence[Cell], tell: Tell) -> None:
        """Claim, run and store one cell after another until none is left that this process can take."""
        results, queue = Results(self.results), Queue(self.work)
        left, broken, too_long = list(cells), set[str](), False
        while left:
            taken = False
            for cell in left:
                results.refresh()
                if results.get(cell) is not None or cell.hash in broken:
                    continue
                if not self._fits(cell, results):
                    too_long = True
                    continue
                with queue.claim(cell) as mine:
                    if not mine:
                        continue
                    results.refresh()  # another process may have finished it a moment ago
                    if results.get(cell) is None:
                        taken = True
                        if not self._run(cell, results, tell):
                            broken.add(cell.hash)
            # What others hold may come free; what does not fit the time will not fit it later.
            left = (
                [cell for cell in left if results.get(cell) is None and cell.hash not in broken]
                if taken
                else []
            )
        if too_long:
            tell("time is up: the same command goes on with the cells that are left")

    def _fits(self, cell: Cell, results: Results) -> bool:
        if self.deadline is None:
            return True
        return time.time() + self.beside * Estimates(results.all()).seconds(cell) <= self.deadline

    def _run(self, cell: Cell, results: Results, tell: Tell) -> bool:
        """Run a cell and store it; False where it could not be run, which leaves nothing stored."""
        # Imported here: they load torch, and a person may only want to see what there is.
        from holdfast.engine.choice import choose_device
        from holdfast.experiment import Experiment

        device = choose_device(self.device).type
        path = self.run_directory(cell, device)
        began = time.monotonic()
        try:
            experiment = Experiment.from_mapping({**cell.settings, "seed": cell.seed, "device": device})
            resume = (path / "experiment.yaml").exists()
            experiment.run(path, resume=resume)
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


def _worker(sweep: Sweep, cells: list[Cell], tell: Tell, threads: int, speaks: bool) -> None:
    """``speaks``: this one of them tells what holds for all."""
    import torch

    from holdfast.engine.choice import choose_device
    from holdfast.gpu import SIDE_BY_SIDE, share_with, takes_turns

    parent = multiprocessing.parent_process()
    if parent is not None:
        Thread(target=_end_with, args=(parent,), daemon=True).start()
    torch.set_num_threads(threads)
    if choose_device(sweep.device).type == "cuda":
        share_with(sweep.beside)
        if speaks and takes_turns():
            tell(f"the workers take turns on the GPU; side by side they get more done: {SIDE_BY_SIDE}")
    with suppress(KeyboardInterrupt):  # the process that started this one says so
        sweep.work_off(cells, tell)


def _end_with(parent: BaseProcess) -> None:
    """End this process with the one that started it: a sweep that is killed leaves no workers behind."""
    parent.join()
    os._exit(1)
