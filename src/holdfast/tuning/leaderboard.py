"""The leaderboard: every method is tuned by the same rule on validation samples, then trained with new seeds."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from holdfast import metrics
from holdfast.core.errors import HoldfastError, unknown
from holdfast.training.experiment import Experiment
from holdfast.tuning import halving
from holdfast.tuning.jobs import TrainingJob
from holdfast.tuning.results import Entry, StoredRuns, last_value, mean_of_last
from holdfast.tuning.search import Search
from holdfast.tuning.space import parse_space
from holdfast.tuning.tune import final_jobs

BASELINE = "fedavg"
MEGABYTE = 1e6


@dataclass(frozen=True)
class Protocol:
    """A federation and the methods that are compared on it.

    Attributes:
        key: its name on the command line.
        title, about: in print.
        methods: as text, each with its own settings.
        spaces: the search space of each method; empty if settings are given.
        budget: the number of settings tried for each method; 0 if settings are given.
        seeds: the number of final runs.
        settings: those of an `Experiment`.
        published: accuracies in percent, by method.
    """

    key: str
    title: str
    about: str
    methods: Mapping[str, Mapping[str, Any]]
    spaces: Mapping[str, Sequence[str]]
    budget: int
    seeds: int
    settings: Mapping[str, Any]
    published: Mapping[str, float]

    def experiment(self, method: str) -> Experiment:
        """A method's settings before tuning."""
        return Experiment.from_mapping({**self.settings, **self.methods[method], "method": method})


@cache
def load_protocols() -> Mapping[str, Protocol]:
    """The protocols of ``leaderboard.yaml``."""
    content = yaml.safe_load(Path(__file__).with_name("leaderboard.yaml").read_text("utf-8"))
    return {key: _protocol(key, given, content) for key, given in content["protocols"].items()}


def left_out() -> Mapping[str, str]:
    """The methods that are not compared, with reasons."""
    content = yaml.safe_load(Path(__file__).with_name("leaderboard.yaml").read_text("utf-8"))
    return dict(content["left_out"])


def _protocol(key: str, given: Mapping[str, Any], content: Mapping[str, Any]) -> Protocol:
    methods = given["methods"]
    if methods == "all":
        from holdfast.methods.registry import METHODS

        methods = [name for name in METHODS if name not in content["left_out"]]
    if not isinstance(methods, dict):
        methods = {content["written"].get(name, name): {} for name in methods}
    budget = given.get("budget", 0)
    own = content["spaces"]
    spaces = {
        method: [*given["space"], *([own[name]] if (name := method.partition(":")[0]) in own else [])]
        for method in (methods if budget else ())
    }
    return Protocol(
        key=key,
        title=given["title"],
        about=given["about"],
        methods=methods,
        spaces=spaces,
        budget=budget,
        seeds=given["seeds"],
        settings=given["settings"],
        published=given.get("published", {}),
    )


def select_protocols(name: str) -> list[Protocol]:
    """The protocol with this name, or all of them."""
    protocols = load_protocols()
    if name == "all":
        return list(protocols.values())
    if name not in protocols:
        raise unknown("protocol", name, [*protocols, "all"])
    return [protocols[name]]


@dataclass(frozen=True)
class Board:
    """The runs of a protocol: a search for each method, and its final runs once that is complete.

    Attributes:
        protocol: the protocol.
        methods: those of its methods that are run.
    """

    protocol: Protocol
    methods: tuple[str, ...]

    def jobs(self, results: StoredRuns) -> list[TrainingJob]:
        """The jobs without a result that can be run now, method by method."""
        return [job for method in self.methods for job in self._jobs_of(method, results)]

    def discarded(self, results: StoredRuns) -> list[str]:
        """The folders of trials that are not continued."""
        return [folder for search in self.searches.values() for folder in search.discarded(results)]

    @cached_property
    def searches(self) -> dict[str, Search]:
        """The search of every method that is tuned."""
        protocol = self.protocol
        return {
            method: Search(
                protocol.experiment(method),
                parse_space(protocol.spaces[method]),
                protocol.budget,
                label=method,
            )
            for method in self.methods
            if protocol.budget
        }

    def final(self, method: str, results: StoredRuns) -> list[TrainingJob]:
        """The final runs of a method; none as long as its search is not complete, or if all settings diverged."""
        protocol = self.protocol
        if not protocol.budget:
            experiment = protocol.experiment(method)
            return [_given_job(protocol, experiment, method, seed) for seed in range(protocol.seeds)]
        search = self.searches[method]
        scores = search.scores(results)
        if halving.remaining(scores):
            return []
        trial, rung = halving.ranking(scores)[0]
        if scores[rung][trial] == -math.inf:
            return []
        note = {"method": method, "changes": dict(search.trials[trial].changes)}
        return [
            replace(
                job,
                label=f"{method}, {job.label}",
                folder=f"{_folder(method)}-{job.folder}",
                note=note,
            )
            for job in final_jobs(search, results, protocol.seeds)
        ]

    def _jobs_of(self, method: str, results: StoredRuns) -> list[TrainingJob]:
        if self.protocol.budget:
            trials = self.searches[method].jobs(results)
            if trials:
                return trials
        return [job for job in self.final(method, results) if results.get(job.hash) is None]


def board(protocol: Protocol, methods: Collection[str] | None = None) -> Board:
    """The runs of a protocol, or those of some of its methods."""
    for method in methods or ():
        if method not in protocol.methods:
            raise unknown(f"method of {protocol.key}", method, protocol.methods)
    return Board(
        protocol, tuple(method for method in protocol.methods if methods is None or method in methods)
    )


def _given_job(protocol: Protocol, experiment: Experiment, method: str, seed: int) -> TrainingJob:
    return TrainingJob(
        name="final",
        label=f"{method}, seed {seed}",
        folder=f"{_folder(method)}-seed-{seed}",
        experiment=replace(experiment, seed=seed),
        rounds=experiment.rounds,
        validation=0.0,
        data_seed=experiment.seed,
        note={"method": method, "changes": {}},
    )


def _folder(method: str) -> str:
    return method.replace(":", "-").replace(",", "-")


# The table --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Standing:
    """The results of a method in a protocol; a list has one value per final run.

    Attributes:
        method: as text.
        changes: the settings that its search has chosen.
        last: accuracy after the last round, in percent.
        averaged: the mean of the last ten rounds, or of the last quarter of them if that is fewer.
        forgetting: at the end, as a fraction.
        reached: the first round at the accuracy of FedAvg; infinite if it is never reached.
        seconds, megabytes: of each run; megabytes in both directions.
        published: the accuracy in its publication.
        state: the missing runs; empty for a method with all its runs.
    """

    method: str
    changes: Mapping[str, Any]
    last: list[float]
    averaged: list[float]
    forgetting: list[float]
    reached: list[float]
    seconds: list[float]
    megabytes: list[float]
    published: float | None
    state: str


def standings(protocol: Protocol, results: StoredRuns) -> list[Standing]:
    """Every method of a protocol, the best mean of the last rounds first; those without a run come last."""
    tried = {run["search"] for run in results.of("trials")} | {run["method"] for run in results.of("final")}
    whole = board(protocol, tried & protocol.methods.keys())
    entries = {method: _final_entries(whole, method, results) for method in whole.methods}
    baseline = [mean_of_last(entry) for entry in entries.get(BASELINE, ()) if "failed" not in entry]
    target = fmean(baseline) if baseline else None
    rows = [_standing(whole, method, entries.get(method, ()), target, results) for method in protocol.methods]
    return sorted(rows, key=lambda row: -fmean(row.averaged) if row.averaged else math.inf)


def _final_entries(whole: Board, method: str, results: StoredRuns) -> list[Entry]:
    found = (results.get(job.hash) for job in whole.final(method, results))
    return [entry for entry in found if entry is not None]


def _standing(
    whole: Board, method: str, entries: Sequence[Entry], target: float | None, results: StoredRuns
) -> Standing:
    protocol = whole.protocol
    learnt = [entry for entry in entries if "failed" not in entry]
    return Standing(
        method=method,
        changes=entries[0]["changes"] if entries else {},
        last=[100 * last_value(entry) for entry in learnt],
        averaged=[100 * mean_of_last(entry) for entry in learnt],
        forgetting=[entry["forgetting"] for entry in learnt if entry["forgetting"] is not None],
        reached=[] if target is None else [_first_round(entry, target) for entry in learnt],
        seconds=[entry["seconds"] for entry in learnt],
        megabytes=[(entry["bytes_up"] + entry["bytes_down"]) / MEGABYTE for entry in learnt],
        published=protocol.published.get(method),
        state=_state(whole, method, entries, len(learnt), results),
    )


def _first_round(entry: Entry, target: float) -> float:
    reached = metrics.rounds_to_target(entry["curve"], target, entry["tested"])
    return math.inf if reached is None else float(reached)


def _state(whole: Board, method: str, entries: Sequence[Entry], learnt: int, results: StoredRuns) -> str:
    """The missing runs of a method, as text."""
    protocol = whole.protocol
    if not entries:
        if method not in whole.methods or not protocol.budget:
            return "not run"
        scores = whole.searches[method].scores(results)
        known = [score for of_rung in scores for score in of_rung if score is not None]
        if halving.remaining(scores):
            return "being tuned" if known else "not run"
        return "diverged" if max(known) == -math.inf else "not run"
    if not learnt:
        return "diverged"
    states = [] if len(entries) == protocol.seeds else [f"{len(entries)} of {protocol.seeds} seeds"]
    states += [] if learnt == len(entries) else [f"{len(entries) - learnt} diverged"]
    return ", ".join(states)


def refuse_without_data(protocol: Protocol) -> None:
    """Raise if the protocol's data set is not on this machine."""
    from holdfast.papers.cost import available_data

    data = protocol.settings["data"]
    if data not in available_data():
        raise HoldfastError(
            f"{protocol.key} needs the data set {data}, which is not on this machine; `holdfast datasets` lists "
            "the places that are searched"
        )
