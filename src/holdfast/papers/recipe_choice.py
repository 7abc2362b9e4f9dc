"""The choice of the recipe: every candidate's scores in the stored searches, and the rule of ``recipe.yaml``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

import numpy as np

from holdfast.papers.measures import Entry, accuracies, mean_of_last_rounds
from holdfast.papers.published import RECIPE, PaperTable, load_tables
from holdfast.papers.results import Results

SEARCHES = (f"{RECIPE}/search-cifar10", f"{RECIPE}/search-fashion-mnist")
IID_SEARCHES = (f"{RECIPE}/search-iid", f"{RECIPE}/search-iid-digits")
BASELINE = "fedavg"

MARGIN = 0.5  # margin in points: to the best, within which fewer parts decide, and to FedAvg without skew
SECOND_PASS_MARGIN = 2.0  # points that a candidate with two passes in each step must be ahead


@dataclass(frozen=True)
class Scored:
    """A candidate's runs on a federation, means over its seeds; accuracy in percent.

    Attributes:
        accuracy: the mean of the last ten rounds.
        forgetting: at the end, as a fraction.
        fluctuation: standard deviation of the change between consecutive rounds, in the second half of the rounds.
    """

    accuracy: float
    forgetting: float
    fluctuation: float


@dataclass(frozen=True)
class CandidateScores:
    """A candidate and its runs by the name of the federation; one that was not run, or that diverged, is missing.

    Attributes:
        method: as text.
        runs: on the federations of the searches.
        planned: the number of these federations.
        iid: the points by which it is ahead of FedAvg on federations without skew.
    """

    method: str
    runs: Mapping[str, Scored]
    planned: int
    iid: Mapping[str, float]

    @property
    def parts(self) -> int:
        """The number of methods that it is composed of."""
        return self.method.count("+") + 1

    @property
    def score(self) -> float | None:
        """The mean accuracy over all federations; None unless it was run on each."""
        if len(self.runs) < self.planned:
            return None
        return fmean(run.accuracy for run in self.runs.values())

    @property
    def costs_nothing(self) -> bool:
        """Whether it is within the margin of FedAvg on all federations without skew on which it was run."""
        return all(lead >= -MARGIN for lead in self.iid.values())

    @cached_property
    def second_pass(self) -> bool:
        """Whether each of its steps needs two passes."""
        from holdfast.methods.registry import parse_method

        method = parse_method(self.method)
        return method.overrides("perturb") and method.ascends


@dataclass(frozen=True)
class RecipeChoice:
    """The result of the rule on the stored searches.

    Attributes:
        federations: their names, in the order of the searches.
        iid_federations: those without skew.
        candidates: the best score first; those without one come last.
        near: the methods within the margin of the best.
        chosen: the recipe; None as long as no candidate was run on all federations.
    """

    federations: tuple[str, ...]
    iid_federations: tuple[str, ...]
    candidates: tuple[CandidateScores, ...]
    near: tuple[str, ...]
    chosen: CandidateScores | None


def choose(stored: Results) -> RecipeChoice:
    """Apply the rule to the stored runs."""
    runs, federations = _runs(SEARCHES, stored)
    without_skew, iid_federations = _runs(IID_SEARCHES, stored)
    baseline = without_skew.get(BASELINE, {})
    methods = dict.fromkeys(row for name in SEARCHES for row in load_tables()[name].rows)
    candidates = [
        CandidateScores(
            method,
            runs.get(method, {}),
            len(federations),
            {
                name: run.accuracy - baseline[name].accuracy
                for name, run in without_skew.get(method, {}).items()
                if name in baseline
            },
        )
        for method in methods
    ]
    candidates.sort(key=lambda one: -1.0 if one.score is None else one.score, reverse=True)
    near = _near(candidates)
    fewest = min((one.parts for one in near), default=0)
    chosen = next((one for one in near if one.parts == fewest and one.costs_nothing), None)
    return RecipeChoice(
        federations, iid_federations, tuple(candidates), tuple(one.method for one in near), chosen
    )


def _runs(searches: Sequence[str], stored: Results) -> tuple[dict[str, dict[str, Scored]], tuple[str, ...]]:
    """The runs of these searches by candidate and federation, and the names of all federations."""
    tables = [load_tables()[name] for name in searches]
    runs: dict[str, dict[str, Scored]] = {}
    for table in tables:
        for (column, method), entries in search_entries(table, stored).items():
            runs.setdefault(method, {})[table.columns[column].label] = scored(entries)
    return runs, tuple(column.label for table in tables for column in table.columns.values())


def _near(candidates: list[CandidateScores]) -> list[CandidateScores]:
    """The candidates within the margin of the best, the best first, after the penalty for a second pass."""
    complete = [one for one in candidates if one.score is not None]
    one_pass = [one for one in complete if not one.second_pass]
    highest = max((one.score or 0.0 for one in one_pass), default=0.0)
    able = [
        one for one in complete if not one.second_pass or (one.score or 0.0) >= highest + SECOND_PASS_MARGIN
    ]
    best = max((one.score or 0.0 for one in able), default=0.0)
    return [one for one in able if (one.score or 0.0) >= best - MARGIN]


def scored(entries: Sequence[Entry]) -> Scored:
    """The scores of stored runs of at least 20 rounds."""
    accuracy = [mean for entry in entries if (mean := mean_of_last_rounds(entry)) is not None]
    return Scored(
        accuracy=100 * fmean(accuracy),
        forgetting=fmean(entry["final"]["forgetting"] for entry in entries),
        fluctuation=fmean(map(fluctuation, entries)),
    )


def fluctuation(entry: Entry) -> float:
    """The standard deviation, in points, of the change in accuracy from one round to the next, in the second half."""
    curve = accuracies(entry)
    return float(100 * np.diff(curve[len(curve) // 2 :]).std())


def search_entries(table: PaperTable, stored: Results) -> dict[tuple[str, str], list[Entry]]:
    """The stored runs of a search by column and candidate."""
    found: dict[tuple[str, str], list[Entry]] = {}
    for cell in stored.of_table(table):
        entry = stored.get(cell)
        if entry is not None and "failed" not in entry:
            found.setdefault((cell.column, cell.row), []).append(entry)
    return found
