"""What the figures share: curves over seeds, their ends in words, and how much a page can hold."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from holdfast.report.loading import RunGroup, StoredRun, matrix, vector
from holdfast.report.panels import Line, Numbers, Panel, thin

MOST_POINTS = 600  # of one curve: more than a screen has pixels to show

Curve = tuple[Numbers, Numbers]
Shown = tuple[Sequence[Panel], str]
NOTHING: Curve = (np.zeros(0), np.zeros(0))


class NotRecorded(Exception):
    """A figure cannot be drawn from these runs; the message says what is missing."""


def over_seeds(
    group: RunGroup, curve: Callable[[StoredRun], Curve], dashed: bool = False, suffix: str = ""
) -> Line | None:
    """The mean of the seeds' curves, with a band of one sample deviation where there are several seeds."""
    curves = [found for found in map(curve, group.runs) if found[0].size]
    if not curves:
        return None
    x = np.unique(np.concatenate([found[0] for found in curves]))
    table = np.full((len(curves), len(x)), np.nan)
    for row, (own_x, own_y) in zip(table, curves, strict=True):
        row[np.searchsorted(x, own_x)] = own_y
    kept = thin(len(x), MOST_POINTS)
    x, table = x[kept], table[:, kept]
    seen = np.isfinite(table).sum(axis=0)
    mean = np.divide(np.nansum(table, axis=0), seen, out=np.full(len(x), np.nan), where=seen > 0)
    name = group.label + suffix
    if len(curves) == 1:
        return Line(name, x, mean, group.colour, dashed=dashed)
    squares = np.nansum((table - mean) ** 2, axis=0)
    deviation = np.sqrt(np.divide(squares, seen - 1, out=np.zeros(len(x)), where=seen > 1))
    return Line(name, x, mean, group.colour, mean - deviation, mean + deviation, dashed)


def curves(groups: Sequence[RunGroup], curve: Callable[[StoredRun], Curve]) -> list[Line]:
    """One line for each group that has the curve."""
    return [line for group in groups if (line := over_seeds(group, curve)) is not None]


def recorded(groups: Sequence[RunGroup], key: str) -> list[Line]:
    """One line for each group that recorded the number."""
    return curves(groups, recording(key))


def recording(key: str) -> Callable[[StoredRun], Curve]:
    """What gives a run's recorded numbers of that name, as `Run.curve` does."""
    return lambda run: run.curve(key)


def ends(lines: Sequence[Line], percent: bool = True) -> str:
    """The curves' ends in words, best first."""
    ends = [(line.name, line.y[np.isfinite(line.y)]) for line in lines]
    told = sorted(((ys[-1], name) for name, ys in ends if ys.size), reverse=True)
    return ", ".join(f"{name} {value:.1%}" if percent else f"{name} {value:.3g}" for value, name in told)


def local_rounds(run: StoredRun) -> Iterator[tuple[Mapping[str, Any], Numbers, Numbers]]:
    """(record, global before [C], locals after [K, C]) of rounds that tested both; the first one's is untrained.

    Local models may be tested on a part of the test set. Runs that did not record the global model's accuracy on
    that part have the one on all of it, where the round before was tested.
    """
    previous: Mapping[str, Any] = {}
    for record in run.records:
        locals_ = record.get("locals") or {}
        before, after = locals_.get("global_before"), locals_.get("class_accuracy")
        if before is None and previous.get("round") == record["round"] - 1:
            before = previous.get("class_accuracy")
        if record["round"] > 1 and before and after:
            yield record, vector(before), matrix(after)
        previous = record


def with_seed(group: RunGroup) -> str:
    """A panel that can show one run only names which of the group's seeds it is."""
    return group.label if len(group.runs) == 1 else f"{group.label}, seed {group.runs[0].seed}"
