"""Methods ranked by their measured accuracy, for every setting in which several were compared."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from holdfast.data.diagnosis import distance

FILE = Path(__file__).with_name("rankings.json")
SAME_REGIME = 0.05  # largest distance of two settings in one regime: about what another seed changes


@dataclass(frozen=True)
class MethodScore:
    """A method's mean over seeds, in percent, with its deviation unless there is one seed only."""

    method: str
    mean: float
    deviation: float | None
    seeds: int


@dataclass(frozen=True)
class Ranking:
    """A setting in which methods were compared.

    Attributes:
        table: the file of results and the part of it.
        score: the name of the measure in ``scores``.
        measures: `diagnose` of its federation.
        streaming: whether its data arrives in stages.
        scores: of every method, the best first.
    """

    table: str
    score: str
    measures: Mapping[str, float]
    streaming: bool
    scores: tuple[MethodScore, ...]


@cache
def load_rankings() -> tuple[Ranking, ...]:
    """Every ranking, as ``benchmarks/rankings.py`` collected them from the stored results."""
    rows: list[dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
    return tuple(
        Ranking(**row | {"scores": tuple(MethodScore(**score) for score in row["scores"])}) for row in rows
    )


def similar_rankings(
    measures: Mapping[str, float], *, streaming: bool = False
) -> list[tuple[float, Ranking]]:
    """The rankings in the same regime as a federation with these `diagnose` measures, each with its distance.

    If there is none in the same regime, those at the smallest distance.
    """
    ranked = [
        (distance(ranking.measures, measures), ranking)
        for ranking in load_rankings()
        if ranking.streaming == streaming
    ]
    ranked.sort(key=lambda pair: pair[0])
    same = [pair for pair in ranked if pair[0] <= SAME_REGIME]
    return same or [pair for pair in ranked if pair[0] == ranked[0][0]]


def nearest_methods(
    measures: Mapping[str, float], *, streaming: bool = False
) -> list[tuple[float, Ranking, str]]:
    """Every ranked method with the nearest ranking in which it is, the nearest first, in each the best first.

    A method that was run with several options has those with which it is first.
    """
    found: dict[str, tuple[float, Ranking, str]] = {}
    for away, ranking in sorted(
        (
            (distance(ranking.measures, measures), ranking)
            for ranking in load_rankings()
            if ranking.streaming == streaming
        ),
        key=lambda pair: pair[0],
    ):
        for score in ranking.scores:
            found.setdefault(score.method.partition(":")[0], (away, ranking, score.method))
    return list(found.values())
