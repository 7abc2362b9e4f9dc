"""The plan of a search: its trials, their rounds and their scores."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from typing import Any

from holdfast.core.errors import HoldfastError, unknown
from holdfast.core.settings import DEFAULTS, Role, settings_with
from holdfast.methods.base import Method
from holdfast.training.experiment import Experiment
from holdfast.training.experiment_entries import place
from holdfast.tuning import halving
from holdfast.tuning.jobs import TrainingJob
from holdfast.tuning.results import Entry, StoredRuns, score
from holdfast.tuning.space import Interval, OneOf, Space, draw_settings

FIXED = (
    *settings_with(Role.SOURCE, Role.FEDERATION, Role.MACHINE, Role.LIMIT),
    "rounds", "seed", "metrics", "evaluate_every", "evaluate_locals", "local_test_samples", "probe_every",
    "validation", "patience",
)  # fmt: skip
"""Settings that no search varies: they affect the validation of trials, or nothing."""


DEFAULT_VALIDATION = 0.1


@dataclass(frozen=True)
class Trial:
    """One of the settings of a search; ``changes`` are those of the experiment that it changes."""

    number: int
    changes: Mapping[str, Any]
    experiment: Experiment


@dataclass(frozen=True)
class Search:
    """A search by successive halving.

    The first trial has the experiment's own settings, the others are drawn from the space.

    Attributes:
        experiment: the settings of all trials, apart from those in the space.
        space: the settings that trials change, as in ``--set``.
        budget: the number of trials.
        name: the file of its results.
        label: a prefix of its trials' names, if results or runs of several searches share a folder.
        rungs: the rounds after which trials are compared; by default a ninth, a third and all.
    """

    experiment: Experiment
    space: Space
    budget: int
    name: str = "trials"
    label: str = ""
    rungs: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.budget < 1:
            raise HoldfastError(f"budget is {self.budget}; it is the number of settings to try, at least 1")
        _check_space(self.experiment, self.space)
        first = self.stops[0]
        if self.experiment.evaluate_every > first:
            raise HoldfastError(
                f"evaluate_every is {self.experiment.evaluate_every}, and settings are compared after {first} rounds; "
                f"it must be at most {first}"
            )

    @property
    def stops(self) -> tuple[int, ...]:
        """The rounds after which trials are compared."""
        return self.rungs or halving.rungs(self.experiment.rounds, self.budget)

    @cached_property
    def trials(self) -> list[Trial]:
        """All trials; the first ones do not depend on their number."""
        own = judged(self.experiment)
        trials = [Trial(0, {}, own)]
        if self.budget == 1:
            return trials
        for number, changes in enumerate(draw_settings(self.space, self.budget - 1, own.seed), 1):
            trials.append(Trial(number, changes, _with(own, changes)))
        return trials

    def job(self, trial: Trial, rung: int) -> TrainingJob:
        """A trial, trained up to the rounds of a rung."""
        settings = ", ".join(f"{key}={value}" for key, value in trial.changes.items()) or "as given"
        return TrainingJob(
            name=self.name,
            label=f"{self.label} trial {trial.number} ({settings})".lstrip(),
            folder="-".join([*re.findall(r"[\w.+=]+", self.label), f"trial-{trial.number:03d}"]),
            experiment=trial.experiment,
            rounds=self.stops[rung],
            validation=validation_share(self.experiment),
            note={"search": self.label, "trial": trial.number, "changes": dict(trial.changes)},
        )

    def entries(self, results: StoredRuns) -> list[list[Entry | None]]:
        """``[rungs][trials]``: the stored results."""
        return [[results.get(hash) for hash in of_rung] for of_rung in self._hashes]

    @cached_property
    def _hashes(self) -> list[list[str]]:
        return [[self.job(trial, rung).hash for trial in self.trials] for rung in range(len(self.stops))]

    def scores(self, results: StoredRuns) -> list[list[float | None]]:
        """``[rungs][trials]``: the scores that are known."""
        return [
            [None if entry is None else score(entry) for entry in of_rung]
            for of_rung in self.entries(results)
        ]

    def jobs(self, results: StoredRuns) -> list[TrainingJob]:
        """The trials that can be run now, each up to its next rung."""
        return [self.job(self.trials[t], rung) for rung, t in halving.remaining(self.scores(results))]

    def discarded(self, results: StoredRuns) -> list[str]:
        """The folders of discarded trials."""
        return [self.job(self.trials[t], 0).folder for t in halving.discarded(self.scores(results))]

    def best(self, results: StoredRuns) -> Trial:
        """The trial with the best score at the last rung of a complete search."""
        scores = self.scores(results)
        trial, rung = halving.ranking(scores)[0]
        if scores[rung][trial] == -math.inf:
            reason = self.entries(results)[rung][trial]
            raise HoldfastError(
                f"training diverged with all {len(self.trials)} settings, the first with: "
                f"{'' if reason is None else reason.get('failed')}; search smaller learning rates"
            )
        return self.trials[trial]


def judged(experiment: Experiment) -> Experiment:
    """The experiment for validation: without the tests and early stopping that searches do not use."""
    return replace(experiment, evaluate_locals=False, probe_every=0, validation=None, patience=None)


def validation_share(experiment: Experiment) -> float:
    """The share of each client's samples that is used for validation."""
    return DEFAULT_VALIDATION if experiment.validation is None else experiment.validation


def _check_space(experiment: Experiment, space: Space) -> None:
    """Raise an error if a setting of the space cannot vary, or one of its values is invalid."""
    known = experiment.describe()
    for key, values in space.items():
        setting = key.partition(".")[0]
        if setting in FIXED:
            raise HoldfastError(
                f"{setting} cannot be part of the space: all settings are compared on the same data, rounds and "
                "seed; give it as an option"
            )
        if setting not in known:
            raise unknown("setting", setting, (name for name in DEFAULTS if name not in FIXED))
        for value in _extremes(values):
            try:
                _with(experiment, {key: value})
            except HoldfastError as error:
                raise HoldfastError(f"{key}={values.describe()} is not possible: {error}") from None


def _extremes(values: Interval | OneOf) -> Sequence[Any]:
    return values.values if isinstance(values, OneOf) else (values.low, values.high)


def _with(experiment: Experiment, changes: Mapping[str, Any]) -> Experiment:
    described = experiment.describe()
    values: dict[str, Any] = {}
    for key, value in changes.items():
        setting, _, option = key.partition(".")
        if isinstance(experiment.method, Method) and setting == "method" and option:
            values["method"] = _with_option(values.get("method", experiment.method), option, value)
        else:
            place(described, key, value)
            values[setting] = described[setting]
    return replace(experiment, **values)


def _with_option(method: Method, option: str, value: Any) -> Method:
    """A method from Python, which no text leads to, with another value of an option."""
    known = [field.name for field in fields(method)] if is_dataclass(method) else []
    if option not in known:
        raise unknown(f"option of {method.name}", option, known)
    return replace(method, **{option: value})
