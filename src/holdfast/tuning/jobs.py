"""Short runs as jobs: trained up to a round by several workers, tested on validation samples, stored and resumed."""

from __future__ import annotations

import json
import pickle
import signal
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar, Protocol

from holdfast.core.errors import HoldfastError, HoldfastWarning
from holdfast.core.measures import Measure
from holdfast.core.settings import DEFAULTS, Role, settings_with
from holdfast.data.federation import Federation
from holdfast.runs import RunDirectory
from holdfast.sweeps.queue import Queue
from holdfast.sweeps.workers import DIVERGED, Log, ProgressLog, run_jobs
from holdfast.training.experiment import Experiment
from holdfast.tuning import results as stored
from holdfast.tuning.results import StoredRuns
from holdfast.tuning.validation import judged_on_validation

CACHED_FEDERATIONS = 4
OF_THE_DATA = (*settings_with(Role.SOURCE, Role.FEDERATION), "seed")
NOT_OF_THE_RESULT = settings_with(Role.MACHINE, Role.LIMIT)


@dataclass(frozen=True)
class TrainingJob:
    """A run, or its beginning.

    Attributes:
        name: the file of its result.
        label: its name in messages.
        folder: the name of its run directory, which the jobs of one run share.
        experiment: its settings.
        rounds: the round up to which it is trained.
        validation: the share of each client's samples on which it is tested instead of the test set; 0 for a run on all
            training samples.
        data_seed: the seed of the federation, if that is not the run's.
        note: further entries of its result, such as the settings of a trial.
    """

    name: str
    label: str
    folder: str
    experiment: Experiment
    rounds: int
    validation: float
    data_seed: int | None = None
    note: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def hash(self) -> str:
        """16 hexadecimal digits that identify the run and its last round."""
        described = self.experiment.describe()
        settings = {
            key: value
            for key, value in described.items()
            if key not in NOT_OF_THE_RESULT
            and value != DEFAULTS.get(key)  # later versions have further settings
        }
        text = json.dumps([settings, self.rounds, self.validation, self.data_seed], sort_keys=True)
        return sha256(text.encode()).hexdigest()[:16]


class Plan(Protocol):
    """The runs of a search; later ones may depend on the results of earlier ones."""

    def jobs(self, results: StoredRuns) -> list[TrainingJob]:
        """The jobs without a result that can be run now, the most urgent first."""
        ...

    def discarded(self, results: StoredRuns) -> list[str]:
        """The folders of runs that are not continued, whose checkpoints can be deleted."""
        ...


@dataclass(frozen=True)
class TrainingWork:
    """The jobs of a plan, as the work of sweeps' workers.

    Attributes:
        plan: the jobs.
        results: the folder of stored results.
        work: the folder of run directories and leases.
        device: auto, cpu or cuda.
        workers: processes that share the device.
        deadline: a ``time.time()`` at which runs stop with a checkpoint. None for no limit.
    """

    plan: Plan
    results: Path
    work: Path
    device: str = "auto"
    workers: int = 1
    deadline: float | None = None
    waits: ClassVar[bool] = True

    def __getstate__(self) -> dict[str, Any]:
        """The state sent to worker processes, without the data that each loads itself."""
        return {key: value for key, value in vars(self).items() if not key.startswith("_")}

    def queue(self) -> Queue:
        return Queue(self.work)

    def pending(self) -> list[TrainingJob]:
        """The jobs that can be run now; none after the deadline."""
        if self._late:
            return []
        self._results.refresh()
        return self.plan.jobs(self._results)

    def run(self, job: TrainingJob, log: Log) -> bool:
        """Run a job and store its result; False, with a line in the log, if that is impossible."""
        start = time.monotonic()
        try:
            entry = self.train(job, log)
        except HoldfastError as error:
            log(f"{job.label}: {error}")
            return False
        except Exception:  # an error in one method must not end a long search
            log(f"{job.label}: {traceback.format_exc()}")
            return False
        if entry is not None:
            self.store(job, entry)
            log(f"{job.label}: {outcome(entry)}, {time.monotonic() - start:.0f} s")
        return True

    def train(self, job: TrainingJob, log: Log) -> stored.Entry | None:
        """Train a job and return its result for storage; None if the deadline stopped it."""
        path = self.run_directory(job)
        on_round = _Rounds(job, log, self.deadline)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore", HoldfastWarning
                )  # of runs that have not learned yet, and such
                run = job.experiment.run(
                    path,
                    resume=(path / "experiment.yaml").exists(),
                    federation=self.federation(job),
                    on_round=on_round,
                    progress=False,
                    stop_after=job.rounds if job.rounds < job.experiment.rounds else None,
                )
        except HoldfastError as error:
            if not DIVERGED.match(str(error)):
                raise
            found = stored.failed(RunDirectory.open(path), str(error))
        else:
            if run.interrupted and len(run.records) < job.rounds:
                if self._late:
                    return None
                raise KeyboardInterrupt
            found = stored.completed(RunDirectory.open(path), job.rounds)
        return dict(job.note) | {
            "hash": job.hash,
            "seed": job.experiment.seed,
            "validation": job.validation,
            **found,
            "beside": self.workers,
        }

    def store(self, job: TrainingJob, entry: stored.Entry) -> None:
        """Store a result, and remove the checkpoints that no job needs any more."""
        self._results.add(job.name, entry)
        for folder in self.plan.discarded(self._results):
            RunDirectory(self.work / "runs" / folder).discard_checkpoint()

    def run_directory(self, job: TrainingJob) -> Path:
        """The directory of a job's run."""
        return self.work / "runs" / job.folder

    def federation(self, job: TrainingJob) -> Federation:
        """The federation of a job, loaded once for all jobs that share it."""
        run, seed = job.experiment, job.experiment.seed if job.data_seed is None else job.data_seed
        described = run.describe() | {"seed": seed}
        split = [job.validation, run.seed] if job.validation else []
        key = json.dumps([*(described[name] for name in OF_THE_DATA), *split])
        if key not in self._federations:
            whole = replace(run, seed=seed).build_federation()
            while len(self._federations) >= CACHED_FEDERATIONS:
                del self._federations[next(iter(self._federations))]
            self._federations[key] = (
                judged_on_validation(whole, job.validation, run.seed) if job.validation else whole
            )
        return self._federations[key]

    def refuse_early(self, jobs: Sequence[TrainingJob]) -> None:
        """Raise the errors that a run with any of the jobs' methods and models raises before its first round."""
        from holdfast.core.device import choose_device

        choose_device(self.device)
        seen = set[str]()
        for job in jobs:
            described = job.experiment.describe()
            kind = json.dumps([described["method"]["name"], described["model"]])
            if kind not in seen:
                job.experiment.refuse_early(self.federation(job))
                seen.add(kind)

    @property
    def _late(self) -> bool:
        return self.deadline is not None and time.time() >= self.deadline

    @cached_property
    def _results(self) -> StoredRuns:
        return StoredRuns(self.results)

    @cached_property
    def _federations(self) -> dict[str, Federation]:
        return {}


class _Rounds:
    """An ``on_round`` callback that logs progress, and stops the run after a round once the deadline has passed."""

    def __init__(self, job: TrainingJob, log: Log, deadline: float | None) -> None:
        self.progress, self.last, self.deadline = (
            ProgressLog(job.label, job.rounds, log),
            job.rounds,
            deadline,
        )

    def __call__(self, record: Mapping[str, Any]) -> None:
        self.progress(record)
        if self.deadline is not None and record["round"] < self.last and time.time() >= self.deadline:
            self.deadline = None
            signal.raise_signal(signal.SIGINT)  # as an interrupt: the run ends with a checkpoint


def outcome(entry: stored.Entry) -> str:
    """The result of a run in a few words: ``accuracy 61.25 % after 33 rounds``; a trial's is the mean of its last."""
    if "failed" in entry:
        return f"failed ({entry['failed']})"
    of_run = stored.mean_of_last if entry["validation"] else stored.last_value
    value = format_value(stored.measure_of(entry), of_run(entry))
    return f"{entry['measure']} {value} after {entry['rounds']} rounds"


def format_value(measure: Measure, value: float) -> str:
    """A metric's value as text, in per cent where it is a share."""
    return f"{100 * value:.2f} %" if measure.is_share else f"{value:.4g}"


def run_all(work: TrainingWork, log: Log) -> None:
    """Run all jobs of a work; raises if one of them could not be run."""
    if work.workers > 1:
        try:
            pickle.dumps(work)
        except Exception as error:
            raise HoldfastError(
                f"workers is {work.workers}, but the objects to train cannot be sent to other processes "
                f"({error}); give methods, models and data by reference, such as net.py:make_net, or use 1 worker"
            ) from error
    if not run_jobs(work, log):
        raise HoldfastError(
            "a run failed for the reason in its line above; finished runs are stored; run the same command again "
            "to continue"
        )


def silent(line: str) -> None:
    """A log that discards its lines."""
