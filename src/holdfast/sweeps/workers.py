"""Workers that take jobs from a queue: this process, or several processes that share a device."""

from __future__ import annotations

import multiprocessing
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from multiprocessing.process import BaseProcess
from threading import Thread
from typing import Any, Protocol

from holdfast.core.errors import HoldfastError, warning_printer
from holdfast.sweeps.queue import Queue, QueuedJob

EXIT_JOB_FAILED = 20  # exit code of a worker that could not run a job and has logged why
POLL_SECONDS = 0.2  # between two polls for new jobs while other workers are running
GRACE_SECONDS = 60.0  # after an interrupt, for workers to end their round and to write a checkpoint

LOG_INTERVAL = 60.0  # seconds between two progress lines of a job

Log = Callable[[str], None]
"""Receives one line at a time; with several workers it must be importable, since they are separate processes."""

DIVERGED = re.compile(r"round \d+: no usable update")
"""The error of a run whose training diverged, which is a result. Any other error is a mistake to fix."""


class ProgressLog:
    """An ``on_round`` callback that logs the progress of a run at intervals."""

    def __init__(self, label: str, rounds: int, log: Log) -> None:
        self.label, self.rounds, self.log, self.logged_at = label, rounds, log, time.monotonic()

    def __call__(self, record: Mapping[str, Any]) -> None:
        if time.monotonic() - self.logged_at >= LOG_INTERVAL:
            self.logged_at = time.monotonic()
            self.log(f"{self.label}: round {record['round']} of {self.rounds}")


class Work(Protocol):
    """Jobs and how one is run. Worker processes receive a copy, by pickling."""

    @property
    def device(self) -> str:
        """auto, cpu or cuda."""
        ...

    @property
    def workers(self) -> int:
        """The number of processes, which share the device."""
        ...

    @property
    def waits(self) -> bool:
        """Whether a worker without a job waits for others to finish theirs, which may lead to new jobs."""
        ...

    def queue(self) -> Queue:
        """Where jobs are leased."""
        ...

    def pending(self) -> Sequence[QueuedJob]:
        """The jobs without a result on the disk that can be run now, the most urgent first."""
        ...

    def run(self, job: Any, log: Log) -> bool:
        """Run a job and store its result; False if it could not be run, for a reason that was logged."""
        ...


def run_jobs(work: Work, log: Log) -> bool:
    """Run all jobs with ``work.workers`` processes; returns whether every job could be run.

    A failed job does not stop the others.
    """
    workers = work.workers
    if workers < 1:
        raise HoldfastError(f"a sweep needs at least 1 worker, not {workers}")
    if workers == 1:
        return work_off(work, log)
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    threads = max(1, (os.cpu_count() or 1) // workers)
    started = [
        context.Process(target=_worker, args=(work, log, threads, number == 0)) for number in range(workers)
    ]
    try:
        for process in started:
            process.start()
        for process in started:
            process.join()
    except KeyboardInterrupt:
        end = time.monotonic() + GRACE_SECONDS
        for process in started:  # they have received the interrupt too
            process.join(max(0.0, end - time.monotonic()))
        raise
    finally:
        for process in started:
            if process.pid is not None:
                process.terminate()
    codes = {process.exitcode for process in started}
    if codes - {0, EXIT_JOB_FAILED}:
        raise HoldfastError(
            "a worker process ended unexpectedly; finished runs are stored; run the same command again to "
            "continue"
        )
    return EXIT_JOB_FAILED not in codes


def work_off(work: Work, log: Log) -> bool:
    """Run one job after another until there is none that this process can lease.

    Returns whether every job could be run.
    """
    queue, failed = work.queue(), set[str]()
    with ExitStack() as failed_leases:  # kept to the end, so that no other process tries these jobs
        while jobs := [job for job in work.pending() if job.hash not in failed]:
            for job in jobs:
                with ExitStack() as lease:
                    if not lease.enter_context(queue.lease(job)):
                        continue
                    if all(job.hash != other.hash for other in work.pending()):
                        break  # another process has just finished it
                    if not work.run(job, log):
                        failed.add(job.hash)
                        failed_leases.push(lease.pop_all())
                    break
            else:  # other processes work on all of them
                if not work.waits:
                    break
                time.sleep(POLL_SECONDS)
    return not failed


def _worker(work: Work, log: Log, threads: int, first: bool) -> None:
    """The main function of a worker process; ``threads`` are torch's. The ``first`` one logs for all of them."""
    import torch

    from holdfast.core.device import MPS_COMMAND, choose_device, gpu_is_time_sliced, share_gpu

    parent = multiprocessing.parent_process()
    if parent is not None:
        Thread(target=_exit_with, args=(parent,), daemon=True).start()
    torch.set_num_threads(threads)
    if choose_device(work.device).type == "cuda":
        share_gpu(work.workers)
        if first and gpu_is_time_sliced():
            log(f"the workers take turns on the GPU; to run them concurrently, start {MPS_COMMAND}")
    warnings.showwarning = warning_printer(log)
    with suppress(KeyboardInterrupt):  # the parent process reports it
        if not work_off(work, log):
            sys.exit(EXIT_JOB_FAILED)


def _exit_with(parent: BaseProcess) -> None:
    """Exit when the parent process does, so that a killed sweep leaves no workers behind."""
    parent.join()
    os._exit(1)
