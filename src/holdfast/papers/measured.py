"""What was measured with Holdfast itself, by setting: which methods did best where."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from holdfast.data.diagnosis import distance

FILE = Path(__file__).with_name("measured.json")
ALIKE = 0.05  # distance up to which two settings count as the same regime: what another seed changes


@dataclass(frozen=True)
class Score:
    """A method's mean over seeds, in percent. ``deviation`` is None for one seed."""

    method: str
    mean: float
    deviation: float | None
    seeds: int


@dataclass(frozen=True)
class Measured:
    """A setting in which methods were compared.

    Attributes:
        table: the file of results, and what to look for in it.
        score: what ``scores`` are.
        measures: `diagnose` of its federation.
        streaming: whether its data arrives in stages.
        scores: the best method first.
    """

    table: str
    score: str
    measures: Mapping[str, float]
    streaming: bool
    scores: tuple[Score, ...]


@cache
def measured_settings() -> tuple[Measured, ...]:
    """Every setting, as ``benchmarks/measured.py`` gathered them from the results."""
    rows: list[dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
    return tuple(
        Measured(**row | {"scores": tuple(Score(**score) for score in row["scores"])}) for row in rows
    )


def measured_like(measures: Mapping[str, float], *, streaming: bool = False) -> list[tuple[float, Measured]]:
    """The measured settings like a federation of these `diagnose` measures, each with its distance.

    All that are in the same regime; where there is none, the nearest of those that are left.
    """
    found = [
        (distance(setting.measures, measures), setting)
        for setting in measured_settings()
        if setting.streaming == streaming
    ]
    found.sort(key=lambda pair: pair[0])
    same = [pair for pair in found if pair[0] <= ALIKE]
    nearest = [pair for pair in found if pair[0] == found[0][0]] if found else []
    return same or nearest
