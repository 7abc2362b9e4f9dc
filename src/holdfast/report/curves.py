"""Helpers that the figures share: curves over seeds, their final values as text, limits on a page's size."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from holdfast.metrics.arrays import FloatArray, deviation_measured, mean_measured
from holdfast.report.loading import Curve, RunGroup, StoredRun, matrix, vector
from holdfast.report.panels import Line, Panel, thin

MAX_POINTS = 600  # of one curve: more than a plot has pixels

FigureContent = tuple[Sequence[Panel], str]
"""A figure's panels and its summary sentence."""

EMPTY_CURVE: Curve = (np.zeros(0), np.zeros(0))


class NotRecorded(Exception):
    """A figure cannot be drawn from these runs; the message names the missing records."""


def mean_line(name: str, x: FloatArray, values: FloatArray, colour: int, dashed: bool = False) -> Line:
    """The mean of ``values`` [curves, n], with a band of one sample standard deviation for several curves."""
    mean = mean_measured(values.T)
    if len(values) == 1:
        return Line(name, x, mean, colour, dashed=dashed)
    deviation = np.nan_to_num(deviation_measured(values.T))  # where a single curve is known, the band closes
    return Line(name, x, mean, colour, mean - deviation, mean + deviation, dashed)


def line_over_seeds(
    group: RunGroup, curve: Callable[[StoredRun], Curve], dashed: bool = False, suffix: str = ""
) -> Line | None:
    """The mean of a group's curves with its band, or None if no run has the curve."""
    curves = [found for found in map(curve, group.runs) if found[0].size]
    if not curves:
        return None
    x = np.unique(np.concatenate([own_x for own_x, _ in curves]))
    table = np.full((len(curves), len(x)), np.nan)
    for row, (own_x, own_y) in zip(table, curves, strict=True):
        row[np.searchsorted(x, own_x)] = own_y
    kept = thin(len(x), MAX_POINTS)
    return mean_line(group.label + suffix, x[kept], table[:, kept], group.colour, dashed)


def lines_over_seeds(groups: Sequence[RunGroup], curve: Callable[[StoredRun], Curve]) -> list[Line]:
    """One line for each group that has the curve."""
    return [line for group in groups if (line := line_over_seeds(group, curve)) is not None]


def recorded_lines(groups: Sequence[RunGroup], key: str) -> list[Line]:
    """One line for each group that recorded ``key``, which is read as by `StoredRun.curve`."""
    return lines_over_seeds(groups, recorded_curve(key))


def recorded_curve(key: str) -> Callable[[StoredRun], Curve]:
    """A function that returns a run's curve of ``key``."""
    return lambda run: run.curve(key)


def final_values(lines: Sequence[Line], percent: bool = True) -> str:
    """The lines' last values as text, the highest first: ``fedntd 61.2%, fedavg 54.0%``."""
    finite = [(line.name, line.y[np.isfinite(line.y)]) for line in lines]
    last = sorted(((ys[-1], name) for name, ys in finite if ys.size), reverse=True)
    return ", ".join(f"{name} {value:.1%}" if percent else f"{name} {value:.3g}" for value, name in last)


def rounds_with_local_tests(run: StoredRun) -> Iterator[tuple[Mapping[str, Any], FloatArray, FloatArray]]:
    """(record, class accuracy of the global model before the round [C], of the local models after it [K, C]).

    Only rounds in which both were tested, and not the first, which starts from the untrained model. Local models may
    be tested on a part of the test set. For runs that did not record the global model's accuracy on that part, its
    accuracy on the whole test set is taken, if the previous round was tested.
    """
    previous: Mapping[str, Any] = {}
    for record in run.records:
        local_tests = record.get("locals") or {}
        before, after = local_tests.get("global_before"), local_tests.get("class_accuracy")
        if before is None and previous.get("round") == record["round"] - 1:
            before = previous.get("class_accuracy")
        if record["round"] > 1 and before and after:
            yield record, vector(before), matrix(after)
        previous = record


def label_with_seed(group: RunGroup) -> str:
    """The label for a panel that shows the first run of a group only."""
    return group.label if len(group.runs) == 1 else f"{group.label}, seed {group.runs[0].seed}"
