"""``tune``: search for settings of a method on a federation, by validation samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from torch import nn

from holdfast.core import files, yaml12
from holdfast.core.errors import HoldfastError
from holdfast.core.measures import Measure
from holdfast.data.dataset import Dataset
from holdfast.data.federation import Federation
from holdfast.data.sources import DATASETS
from holdfast.methods.base import Method
from holdfast.models.own import OwnModel
from holdfast.models.registry import ModelSpec
from holdfast.report.progress_display import log_line
from holdfast.runs.metrics_file import plain
from holdfast.sweeps.workers import Log
from holdfast.training.comparison import experiment_of
from holdfast.training.experiment import Experiment
from holdfast.tuning import halving
from holdfast.tuning.folder import claim
from holdfast.tuning.jobs import TrainingJob, TrainingWork, run_all, silent
from holdfast.tuning.results import Entry, StoredRuns, last_value, mean_of_last, measure_of
from holdfast.tuning.search import Search, Trial, validation_share
from holdfast.tuning.space import Interval, OneOf, parse_space

if TYPE_CHECKING:
    import pandas

BEST = "best.yaml"

Given = Sequence[str] | Mapping[str, str | Sequence[Any] | Interval | OneOf]
"""A space as the command line has it, ``["lr=0.01..1:log"]``, or as a mapping, ``{"lr": "0.01..1:log"}``."""


@dataclass(frozen=True)
class TrialResult:
    """The result of one trial.

    Attributes:
        trial: its number; 0 has the experiment's own settings.
        settings: those that it changes.
        rounds: the number of rounds it was trained for.
        value: the mean of the metric over the last of these rounds, on validation samples; NaN if training diverged.
        seconds: the time of these rounds.
        failed: the reason if it has no value.
        path: its run's directory; None if it was not kept.
    """

    trial: int
    settings: dict[str, Any]
    rounds: int
    value: float
    seconds: float
    failed: str | None
    path: Path | None


@dataclass(frozen=True)
class FinalRun:
    """A run with the best settings on all training samples; ``value`` is the metric on the test set at its end."""

    seed: int
    value: float
    path: Path | None


@dataclass(frozen=True)
class Tuning:
    """The result of a search.

    Attributes:
        table: all trials, the best first. Trials that were trained for more rounds come before those that were left.
        measure: the metric by which they are judged, and its direction.
        experiment: the experiment with the best settings.
        final: its final runs with new seeds, if requested.
    """

    table: list[TrialResult]
    measure: Measure
    experiment: Experiment
    final: list[FinalRun]

    @property
    def best(self) -> TrialResult:
        """The best trial."""
        return self.table[0]

    def to_frame(self) -> pandas.DataFrame:
        """The table as a pandas frame, with a column for each setting of the space."""
        try:
            import pandas
        except ModuleNotFoundError:
            raise HoldfastError("to_frame needs pandas: pip install pandas") from None

        rows = [
            {"trial": row.trial, **row.settings, "rounds": row.rounds, self.measure.name: row.value}
            | {"seconds": row.seconds, "path": None if row.path is None else str(row.path)}
            for row in self.table
        ]
        return pandas.DataFrame(rows)


@dataclass(frozen=True)
class TuningPlan:
    """A search, and after it the final runs with the best settings."""

    search: Search
    final_seeds: int
    untested: bool = False  # whether the data has neither a test set nor validation samples

    def jobs(self, results: StoredRuns) -> list[TrainingJob]:
        """The jobs without a result that can be run now."""
        remaining = self.search.jobs(results)
        if remaining or not self.final_seeds or not _is_complete(self.search, results):
            return remaining
        return [job for job in self.final_jobs(results) if results.get(job.hash) is None]

    def final_jobs(self, results: StoredRuns) -> list[TrainingJob]:
        """The runs with the best settings."""
        return final_jobs(self.search, results, self.final_seeds, self.untested)

    def discarded(self, results: StoredRuns) -> list[str]:
        """The folders of discarded trials."""
        return self.search.discarded(results)


def final_jobs(search: Search, results: StoredRuns, seeds: int, untested: bool = False) -> list[TrainingJob]:
    """The runs with the best settings of a complete search, with new seeds, on the same federation.

    ``untested``: whether the data has neither a test set nor validation samples, so that the runs are judged on
    validation samples, too.
    """
    given, best = search.experiment, search.best(results)
    experiment = as_given(best.experiment, given, untested=False)
    if isinstance(given.data, str) and given.federation is None and given.partition_seed is None:
        experiment = replace(
            experiment, partition_seed=given.seed
        )  # the run's directory alone leads to its data
    return [
        TrainingJob(
            name="final",
            label=f"best settings, seed {seed}",
            folder=f"final-{best.number:03d}-seed-{seed}",
            experiment=replace(experiment, seed=seed),
            rounds=given.rounds,
            validation=validation_share(given) if untested else 0.0,
            data_seed=given.seed,
        )
        for seed in range(given.seed + 1, given.seed + 1 + seeds)
    ]


def _is_complete(search: Search, results: StoredRuns) -> bool:
    return not halving.remaining(search.scores(results))


def as_given(experiment: Experiment, given: Experiment, untested: bool) -> Experiment:
    """A trial's experiment with the tests that its search omits.

    Validation samples are held out only if it uses early stopping or if there is no test set.
    """
    validation = given.validation if given.patience is not None else None
    return replace(
        experiment,
        evaluate_locals=given.evaluate_locals,
        probe_every=given.probe_every,
        validation=validation_share(given) if untested else validation,
        patience=given.patience,
    )


def tune(
    method: Method | str | Experiment,
    model: ModelSpec | OwnModel | nn.Module | Callable[..., nn.Module] | str | None = None,
    federation: Federation | Dataset | Callable[..., Federation | Dataset] | str | None = None,
    *,
    space: Given,
    budget: int = 30,
    final_seeds: int = 0,
    workers: int = 1,
    out: str | Path | None = None,
    progress: bool = True,
    log: Log | None = None,
    **settings: Any,
) -> Tuning:
    """Search for the best settings of a method on a federation.

    Either ``tune(method, model, federation, space=..., rounds=100, ...)`` with the settings of `holdfast.train`, or
    ``tune(experiment, space=...)`` with an `Experiment`.

    Settings are drawn from the space, evenly spread; the first trial has the experiment's own. All are trained for a
    ninth of the rounds, the best third of them for a third, and the best third of these for all. They are compared on
    a held-out share of each client's training samples, ``validation`` (0.1 by default), or on the clients' own
    validation samples; the test set is not used. The result depends on the seed, not on the number of workers.

    Args:
        method: as for `holdfast.train`, or an `Experiment`.
        model: as for `holdfast.train`.
        federation: a `Federation`, or what `holdfast.compare` takes in its place.
        space: the settings to vary and their values: ``["lr=0.003..0.1:log", "method.beta=[0.5,1,2]"]``, or a mapping
            ``{"lr": "0.003..0.1:log", "method.beta": [0.5, 1, 2]}``. Two whole numbers, ``1..10``, are a range of whole
            numbers; ``:log`` spreads the values evenly in their logarithm.
        budget: the number of settings to try.
        final_seeds: the number of final runs with the best settings, on all training samples and with new seeds; they
            are tested on the test set.
        workers: the number of processes that share the device. A script with several workers needs the guard
            ``if __name__ == "__main__":``.
        out: the directory of the search. A repeated call reads finished trials and continues the others.
        progress: print a line for each finished trial on stderr.
        log: receives these lines instead.

    An interrupt (Ctrl-C) raises KeyboardInterrupt; the same call continues the search.
    """
    if isinstance(method, Experiment):
        if model is not None or federation is not None or settings:
            given = (
                "model"
                if model is not None
                else "federation"
                if federation is not None
                else next(iter(settings))
            )
            raise HoldfastError(f"{given} is given together with an Experiment, which contains it already")
        experiment = method
    else:
        if model is None or federation is None:
            missing = "model" if model is None else "federation"
            raise HoldfastError(f"{missing} is missing: a search needs a method, a model and a federation")
        experiment = replace(experiment_of(model, federation, settings), method=method)
    if final_seeds < 0:
        raise HoldfastError(f"final_seeds is {final_seeds}; it is a number of runs, 0 or more")
    search = Search(experiment, parse_space(_written(space)), budget)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory())) if out is None else Path(out)
        plan = TuningPlan(search, final_seeds, _is_untested(experiment))
        work = TrainingWork(plan, folder, folder, experiment.device, workers)
        trials = [search.job(trial, 0) for trial in search.trials]
        work.refuse_early(trials)
        spaces = {key: values.describe() for key, values in search.space.items()}
        claim(folder, "search", experiment, {"space": spaces}, work.federation(trials[0]))
        run_all(work, log or (log_line if progress else silent))
        return _summary(plan, work, kept=out is not None)


def _is_untested(experiment: Experiment) -> bool:
    """Whether the data has neither a test set nor validation samples of its own."""
    if experiment.data in list(DATASETS):
        return False
    federation = experiment.build_federation()
    return not len(federation.dataset.y_test) and not len(federation.validation)


def _written(space: Given) -> list[str]:
    """A space in the form of the command line."""
    if isinstance(space, str):
        raise HoldfastError(f"space is '{space}'; it must be a list, such as ['{space}']")
    if not isinstance(space, Mapping):
        return list(space)
    texts = []
    for key, values in space.items():
        if isinstance(values, (Interval, OneOf)):
            texts.append(f"{key}={values.describe()}")
        elif isinstance(values, str):
            texts.append(f"{key}={values}")
        else:
            texts.append(f"{key}={OneOf(tuple(values)).describe()}")
    return texts


def _summary(plan: TuningPlan, work: TrainingWork, kept: bool) -> Tuning:
    results, search = StoredRuns(work.results), plan.search
    entries = search.entries(results)
    best = search.best(results)
    table = [
        _row(search, search.trials[trial], rung, entry, work if kept else None)
        for trial, rung in halving.ranking(search.scores(results))
        if (entry := entries[rung][trial]) is not None
    ]
    final = []
    if plan.final_seeds:
        for job in plan.final_jobs(results):
            entry = results.get(job.hash)
            assert entry is not None  # all jobs were run
            final.append(
                FinalRun(job.experiment.seed, last_value(entry), work.run_directory(job) if kept else None)
            )
    first = entries[0][0]
    assert first is not None
    own = as_given(best.experiment, search.experiment, plan.untested)
    if kept:
        files.replace(work.work / BEST, yaml12.dump(plain(own.describe())).encode())
    return Tuning(table, measure_of(first), own, final)


def _row(search: Search, trial: Trial, rung: int, entry: Entry, work: TrainingWork | None) -> TrialResult:
    return TrialResult(
        trial=trial.number,
        settings=dict(trial.changes),
        rounds=entry["rounds"],
        value=mean_of_last(entry),
        seconds=entry["seconds"],
        failed=entry.get("failed"),
        path=None if work is None else work.run_directory(search.job(trial, rung)),
    )
