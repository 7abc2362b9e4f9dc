"""The candidates of a recommendation: the recipe, FedAvg, and the best methods on the most similar data."""

from __future__ import annotations

from dataclasses import dataclass, replace

from holdfast.core.errors import HoldfastError
from holdfast.data.diagnosis import diagnose
from holdfast.data.federation import Federation
from holdfast.papers.rankings import Ranking, nearest_methods
from holdfast.training.experiment import Experiment
from holdfast.tuning.search import validation_share

RECIPE = "steady"
"""The default method for an unknown federation."""

BASELINE = "fedavg"
NEAREST = 3  # methods from the rankings


@dataclass(frozen=True)
class Candidate:
    """A candidate and the reason for it."""

    method: str
    reason: str


def candidates(experiment: Experiment, federation: Federation) -> tuple[list[Candidate], list[str]]:
    """The methods to compare on a federation, and a sentence for each one that cannot be trained on it."""
    measures = diagnose(federation.label_counts())
    wanted = [Candidate(RECIPE, "the recipe"), Candidate(BASELINE, "the baseline")]
    others = [
        Candidate(method, f"{_place(method, ranking)}, at distance {away:.2f}")
        for away, ranking, method in nearest_methods(measures, streaming=federation.stages > 1)
        if method not in (RECIPE, BASELINE)
    ]
    chosen, left_out = list[Candidate](), list[str]()
    share = None if len(federation.validation) else validation_share(experiment)
    nearest = 0
    for candidate in (*wanted, *others):
        if nearest == NEAREST:
            break
        try:
            replace(experiment, method=candidate.method, validation=share).refuse_early(federation)
        except HoldfastError as error:
            left_out.append(f"{candidate.method} is left out: {error}")
        else:
            chosen.append(candidate)
            nearest += candidate not in wanted
    return chosen, left_out


def _place(method: str, ranking: Ranking) -> str:
    methods = [score.method for score in ranking.scores]
    return f"number {methods.index(method) + 1} of {len(methods)} in {ranking.table}"
