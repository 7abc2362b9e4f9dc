"""``recommend``: compares a few methods briefly on a federation and selects one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from torch import nn

from holdfast import metrics
from holdfast.core.errors import HoldfastError
from holdfast.core.measures import Measure
from holdfast.core.spec import either
from holdfast.data.dataset import Dataset
from holdfast.data.federation import Federation
from holdfast.models.own import OwnModel
from holdfast.models.registry import ModelSpec
from holdfast.report.progress_display import log_line
from holdfast.sweeps.workers import Log
from holdfast.training.comparison import experiment_of
from holdfast.training.experiment import Experiment
from holdfast.tuning.candidates import BASELINE, Candidate, candidates
from holdfast.tuning.folder import claim
from holdfast.tuning.jobs import TrainingJob, TrainingWork, run_all, silent
from holdfast.tuning.results import StoredRuns, mean_of_last, measure_of
from holdfast.tuning.search import judged, validation_share

ROUNDS, SEEDS = 30, 5
SIGNIFICANCE = 0.05


@dataclass(frozen=True)
class Judgement:
    """The results of a method; lists hold one value per seed.

    Attributes:
        method: as text.
        reason: why it is a candidate.
        values: the mean of the metric over the last rounds, on validation samples; NaN where training diverged.
        difference: the lead of the first method over it, on the same seeds; None for the first.
        p_value: of a paired t-test against the first, corrected for the number of methods; None if there is no test.
        seconds: of each run.
        megabytes: sent in each run, in both directions.
    """

    method: str
    reason: str
    values: list[float]
    difference: float | None
    p_value: float | None
    seconds: list[float]
    megabytes: list[float]


@dataclass(frozen=True)
class Recommendation:
    """The recommended method.

    Attributes:
        method: the one with the best mean.
        sentence: a statement of its confidence.
        table: all methods, the best first.
        measure: the metric by which they are judged.
        alike: the methods that do not differ significantly from the first.
        left_out: a sentence for each method that cannot be trained on the federation.
    """

    method: str
    sentence: str
    table: list[Judgement]
    measure: Measure
    alike: list[str]
    left_out: list[str]


@dataclass(frozen=True)
class Trials:
    """The runs of a recommendation: each method with each seed, on one federation, with validation samples by seed."""

    experiment: Experiment
    methods: Sequence[str]
    seeds: Sequence[int]

    def job(self, method: str, seed: int) -> TrainingJob:
        """The run of a method with a seed."""
        return TrainingJob(
            name="runs",
            label=f"{method}, seed {seed}",
            folder=f"{method.replace(':', '-')}-seed-{seed}",
            experiment=replace(judged(self.experiment), method=method, seed=seed),
            rounds=self.experiment.rounds,
            validation=validation_share(self.experiment),
            data_seed=self.experiment.seed,
            note={"method": method},
        )

    def jobs(self, results: StoredRuns) -> list[TrainingJob]:
        """The runs without a result, seed by seed."""
        made = [self.job(method, seed) for seed in self.seeds for method in self.methods]
        return [job for job in made if results.get(job.hash) is None]

    def discarded(self, results: StoredRuns) -> list[str]:
        """None: all runs are whole."""
        return []


def recommend(
    model: ModelSpec | OwnModel | nn.Module | Callable[..., nn.Module] | str | Experiment,
    federation: Federation | Dataset | Callable[..., Federation | Dataset] | str | None = None,
    *,
    seeds: int = SEEDS,
    workers: int = 1,
    out: str | Path | None = None,
    progress: bool = True,
    log: Log | None = None,
    **settings: Any,
) -> Recommendation:
    """Train a few methods briefly on a federation, and recommend one with its confidence.

    Either ``recommend(model, federation, rounds=30, ...)`` with the settings of `holdfast.train`, or
    ``recommend(experiment)`` with an `Experiment`, whose own method is not used. The candidates are the recipe
    (`holdfast.tuning.candidates`), FedAvg, and the three best methods of measured settings with similar label counts.

    They are compared on a share of each client's training samples, ``validation`` (0.1 by default), which each seed
    draws anew, or on the clients' own validation samples; the test set is not used.

    Args:
        model: as for `holdfast.train`, or an `Experiment`.
        federation: a `Federation`, or what `holdfast.compare` takes in its place.
        seeds: the number of seeds, from the experiment's own on.
        workers, out, progress, log: as for `holdfast.tune`.
    """
    if isinstance(model, Experiment):
        if federation is not None or settings:
            given = "federation" if federation is not None else next(iter(settings))
            raise HoldfastError(f"{given} is given together with an Experiment, which contains it already")
        experiment = model
    else:
        experiment = experiment_of(model, federation, {"rounds": ROUNDS, **settings})
    if seeds < 1:
        raise HoldfastError(f"seeds is {seeds}; a recommendation needs at least 1, and for a test at least 2")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory())) if out is None else Path(out)
        whole = experiment.build_federation()
        chosen, left_out = candidates(experiment, whole)
        if not chosen:
            raise HoldfastError(f"no method can be trained on this federation; {left_out[0]}")
        methods = [candidate.method for candidate in chosen]
        numbers = range(experiment.seed, experiment.seed + seeds)
        trials = Trials(experiment, methods, numbers)
        work = TrainingWork(trials, folder, folder, experiment.device, workers)
        work.refuse_early([trials.job(method, experiment.seed) for method in methods])
        claim(folder, "recommendation", replace(experiment, method=BASELINE), {}, whole)
        run_all(work, log or (log_line if progress else silent))
        return judge(trials, chosen, StoredRuns(folder), left_out)


def judge(
    trials: Trials, chosen: Sequence[Candidate], results: StoredRuns, left_out: Sequence[str] = ()
) -> Recommendation:
    """The recommendation that follows from the results of all runs."""
    entries = {
        method: [results.get(trials.job(method, seed).hash) for seed in trials.seeds]
        for method in trials.methods
    }
    known = {method: [entry for entry in runs if entry is not None] for method, runs in entries.items()}
    measure = measure_of(known[trials.methods[0]][0])
    values = {method: [mean_of_last(entry) for entry in runs] for method, runs in known.items()}
    means = {method: measure.sign * float(np.mean(of_seeds)) for method, of_seeds in values.items()}
    order = sorted(trials.methods, key=lambda method: np.inf if np.isnan(means[method]) else -means[method])
    first = order[0]
    if np.isnan(means[first]):
        raise HoldfastError("training diverged with every method; try a smaller lr")
    share = validation_share(trials.experiment)
    tests = {
        method: metrics.paired_test(
            measure.sign * np.array(values[first]),
            measure.sign * np.array(values[method]),
            share / (1 - share),
        )
        for method in order[1:]
        if not np.isnan(means[method])
    }
    p_values = {method: p for method, (_, p) in tests.items() if p is not None}
    corrected = dict(zip(p_values, metrics.holm(list(p_values.values())).tolist(), strict=True))
    reasons = {candidate.method: candidate.reason for candidate in chosen}
    table = [
        Judgement(
            method=method,
            reason=reasons[method],
            values=values[method],
            difference=tests[method][0] if method in tests else None,
            p_value=corrected.get(method),
            seconds=[entry["seconds"] for entry in known[method]],
            megabytes=[(entry["bytes_up"] + entry["bytes_down"]) / 1e6 for entry in known[method]],
        )
        for method in order
    ]
    alike = [row.method for row in table[1:] if row.difference is not None and not _differs(row)]
    return Recommendation(first, _sentence(first, table, alike), table, measure, alike, list(left_out))


def _differs(row: Judgement) -> bool:
    return row.p_value is not None and row.p_value < SIGNIFICANCE


def _sentence(first: str, table: Sequence[Judgement], alike: Sequence[str]) -> str:
    seeds, others = len(table[0].values), [row.method for row in table[1:]]
    if not others:
        return f"Take {first}, the only one of the methods that can be trained on this federation."
    if seeds == 1:
        return f"Take {first}, which is ahead with one seed; whether by more than chance, only more seeds can show."
    if not alike:
        largest = max((row.p_value for row in table if row.p_value is not None), default=None)
        by = (
            ""
            if largest is None
            else f", by more than chance (p < {max(0.001, float(np.ceil(largest * 1000) / 1000)):g})"
        )
        return f"Take {first}: it is ahead of {' and '.join(others)} over {seeds} seeds{by}."
    listed = either(
        [f"{row.method} (p = {row.p_value:.2g})" for row in table if row.method in alike and row.p_value]
    )
    plain = f" {BASELINE} is the simplest and cheapest of these." if BASELINE in alike else ""
    behind = [row.method for row in table[1:] if _differs(row)]
    more = f"; it is ahead of {' and '.join(behind)} by more than chance" if behind else ""
    return (
        f"Take {first}, which is ahead on average, but over {seeds} seeds is not distinguishable from {listed}{more}."
        f"{plain} More seeds or rounds may decide."
    )
