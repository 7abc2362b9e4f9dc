"""Figures of forgetting: by local training, by aggregation, and by class."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from holdfast import metrics
from holdfast.metrics.arrays import FloatArray, deviation_measured, mean_measured
from holdfast.report.curves import (
    EMPTY_CURVE,
    MAX_POINTS,
    FigureContent,
    NotRecorded,
    final_values,
    label_with_seed,
    line_over_seeds,
    lines_over_seeds,
    recorded_curve,
    rounds_with_local_tests,
)
from holdfast.report.loading import Curve, RunGroup, StoredRun, columns, vector
from holdfast.report.panels import Bar, Bars, Heatmap, HeatmapStep, Line, Lines, Panel, thin

MAX_CELLS = 1_200_000  # of all slider steps of a figure together, which are most of a page's size
DOMINANT_SHARE = 0.05  # gamma of the class split, the same for all methods compared (FedKA section 3.2)
MIN_ACCURACY = 0.01  # of the global model on a class that can be forgotten
CLASS_GROUPS = ("missing", "non-dominant", "dominant")

TestedRound = tuple[Mapping[str, Any], FloatArray, FloatArray]
"""A record, the class accuracy of the global model before the round [C], and of the local models [K, C]."""


def strip(groups: Sequence[RunGroup]) -> FigureContent:
    """Class accuracy of the global model before, of the local models, and of the global model after each round."""
    found = [(group, _fully_tested_rounds(group.runs[0])) for group in groups]
    found = [(group, rounds) for group, rounds in found if rounds]
    if not found:
        tested = any("locals" in record for group in groups for run in group.runs for record in run.records)
        single = "it needs a second round: the first starts from the untrained model"
        raise NotRecorded(single if tested else "local models were not tested (train with --evaluate-locals)")
    cells = sum(after.size + 2 * after.shape[1] for _, rounds in found for _, _, after in rounds)
    panels, losses = [], []
    for group, rounds in found:
        share = min(1.0, MAX_CELLS / cells)
        kept = thin(len(rounds), max(2, int(len(rounds) * share)))
        run = group.runs[0]
        steps = [_strip_step(run, *rounds[index]) for index in kept]
        panels.append(Heatmap(label_with_seed(group), "class", "model", run.classes, steps, global_rows=True))
        lost = np.mean([metrics.local_forgetting(before, after).mean() for _, before, after in rounds])
        losses.append(f"{group.label} {lost:.1%}")
    return panels, f"Mean accuracy lost in local training per round: {', '.join(losses)}."


def _fully_tested_rounds(run: StoredRun) -> list[TestedRound]:
    """The rounds in which the global model was tested before and after, and the local models between."""
    return [found for found in rounds_with_local_tests(run) if found[0].get("class_accuracy") is not None]


def _strip_step(
    run: StoredRun, record: Mapping[str, Any], before: FloatArray, local: FloatArray
) -> HeatmapStep:
    clients = record.get("participants") or range(len(local))
    rows = ["global before", *(f"client {client}" for client in clients), "global after"]
    after = record["locals"].get("global_after") or record["class_accuracy"]
    values = np.vstack([before, local, vector(after)])
    counts = run.counts_of(record)
    marked = None
    if counts is not None and counts.shape == local.shape:
        marked = np.zeros(values.shape, dtype=np.bool_)
        marked[1:-1] = counts > 0
    return HeatmapStep(f"round {record['round']}", rows, values, marked)


def forgetting(groups: Sequence[RunGroup]) -> FigureContent:
    """Accuracy lost from round to round and in local training, over rounds and as distributions."""
    over_rounds = lines_over_seeds(groups, _global_forgetting)
    if not over_rounds:
        raise NotRecorded("forgetting needs at least two evaluated rounds")
    pooled = [(group, [_global_forgetting(run)[1] for run in group.runs]) for group in groups]
    loss = "class accuracy lost"
    panels: list[Panel] = [
        Lines("Global forgetting over rounds", "round", loss, over_rounds),
        Lines(
            "Global forgetting, distribution over rounds",
            loss,
            "share of rounds",
            _cumulative_distributions(pooled),
            x_percent=True,
            stepped=True,
        ),
    ]
    local = lines_over_seeds(groups, _mean_local_forgetting)
    if local:
        pooled = [(group, [v for run in group.runs for _, v in _local_forgetting(run)]) for group in groups]
        panels += [
            Lines("Local forgetting over rounds, mean of clients", "round", loss, local),
            Lines(
                "Local forgetting, distribution over local models",
                loss,
                "share of local models",
                _cumulative_distributions(pooled),
                x_percent=True,
                stepped=True,
            ),
        ]
    means = sorted((float(np.nanmean(line.y)), line.name) for line in over_rounds)
    listed = ", ".join(f"{name} {value:.1%}" for value, name in means)
    return panels, f"Mean global forgetting per round, lowest first: {listed}."


def _global_forgetting(run: StoredRun) -> Curve:
    trained = run.rounds >= 1  # round 0 is the untrained model, for which forgetting is undefined
    if trained.sum() < 2:
        return EMPTY_CURVE
    return run.rounds[trained][1:], metrics.round_forgetting(run.class_accuracy[trained])


def _local_forgetting(run: StoredRun) -> list[tuple[float, FloatArray]]:
    """(round, values of the clients), without round 1, which starts from the untrained model."""
    found = [(x, values) for x, values in run.lists("local_forgetting") if x > 1]
    recorded = [(x, values) for x, values in found if np.isfinite(values).any()]
    if recorded:
        return recorded
    return [
        (float(record["round"]), metrics.local_forgetting(before, after))
        for record, before, after in rounds_with_local_tests(run)
    ]


def _mean_local_forgetting(run: StoredRun) -> Curve:
    return columns((x, float(np.nanmean(values))) for x, values in _local_forgetting(run))


def _cumulative_distributions(pooled: Sequence[tuple[RunGroup, list[FloatArray]]]) -> list[Line]:
    """One line for each group, all of them up to the largest value of any group."""
    found = [(group, np.sort(np.concatenate([np.zeros(0), *parts]))) for group, parts in pooled]
    found = [(group, values[np.isfinite(values)]) for group, values in found]
    largest = max((values[-1] for _, values in found if values.size), default=0.0)
    lines = []
    for group, values in found:
        if values.size:
            share = np.arange(1, len(values) + 1) / len(values)
            kept = thin(len(values), MAX_POINTS)
            x, y = np.r_[0.0, values[kept], largest], np.r_[0.0, share[kept], 1.0]
            lines.append(Line(group.label, x, y, group.colour))
    return lines


def forgetting_degree(groups: Sequence[RunGroup]) -> FigureContent:
    """Share of a class's accuracy lost in local training, by the share of the class in the client's data."""
    found = {run: list(_degrees(run)) for group in groups for run in group.runs}
    if not any(found.values()):
        raise NotRecorded("it needs tested local models (--evaluate-locals) and the clients' label counts")
    bars, medians = [], []
    for group in groups:
        rounds = [by_class_group for run in group.runs for _, by_class_group in found[run]]
        pooled = [np.concatenate([np.zeros(0), *(one[name] for one in rounds)]) for name in CLASS_GROUPS]
        low, middle, high = np.array([_quartiles(values) for values in pooled]).T
        if np.isfinite(middle).any():
            bars.append(Bar(group.label, middle, group.colour, low, high))
            known = [(n, v) for n, v in zip(CLASS_GROUPS, middle, strict=True) if np.isfinite(v)]
            medians.append(f"{group.label} " + ", ".join(f"{value:.2f} ({name})" for name, value in known))
    label = "forgetting degree"
    over_rounds = [
        Lines(f"{name.capitalize()} classes over rounds, median", "round", label, lines, percent=False)
        for name in CLASS_GROUPS
        if (lines := lines_over_seeds(groups, partial(_medians, found, name)))
    ]
    pooled_panel = Bars("All rounds: median and quartiles", label, CLASS_GROUPS, bars, percent=False)
    return [pooled_panel, *over_rounds], f"Median forgetting degree: {'; '.join(medians)}."


def _degrees(run: StoredRun) -> Iterator[tuple[float, dict[str, FloatArray]]]:
    """(round, degrees by class group over all clients and the classes that the global model had learned)."""
    for record, before, after in rounds_with_local_tests(run):
        counts = run.counts_of(record)
        if counts is None or counts.shape != after.shape:
            continue
        degrees = np.maximum(metrics.forgetting_degree(before, after), -1.0)
        learned = np.isfinite(degrees) & (before >= MIN_ACCURACY)
        masks = metrics.class_split(counts, DOMINANT_SHARE)
        yield (
            float(record["round"]),
            {name: degrees[mask & learned] for name, mask in zip(CLASS_GROUPS, masks, strict=True)},
        )


def _medians(
    found: Mapping[StoredRun, list[tuple[float, dict[str, FloatArray]]]], name: str, run: StoredRun
) -> Curve:
    return columns((x, float(np.median(degrees[name]))) for x, degrees in found[run] if degrees[name].size)


def _quartiles(values: FloatArray) -> FloatArray:
    return np.quantile(values, [0.25, 0.5, 0.75]) if values.size else np.full(3, np.nan)


def consistency(groups: Sequence[RunGroup]) -> FigureContent:
    """Cosine of the class accuracies of consecutive global models."""
    lines = lines_over_seeds(groups, _consistency)
    if not lines:
        raise NotRecorded("it needs at least two evaluated rounds")
    means = sorted(((float(np.nanmean(line.y)), line.name) for line in lines), reverse=True)
    listed = ", ".join(f"{name} {value:.3f}" for value, name in means)
    panel = Lines(
        "Global model against the previous round", "round", "cosine of class accuracy", lines, percent=False
    )
    return [panel], f"Mean over rounds: {listed}."


def _consistency(run: StoredRun) -> Curve:
    if len(run.rounds) < 2:
        return EMPTY_CURVE
    return run.rounds[1:], metrics.prediction_consistency(run.class_accuracy)


def in_out_local(groups: Sequence[RunGroup]) -> FigureContent:
    """Accuracy on the classes that clients hold, and on those they lack, of global and local models."""
    sides = (
        ("in", "In-local: classes as distributed at the clients"),
        ("out", "Out-local: classes that the clients lack"),
    )
    panels: list[Panel] = []
    local_lines: dict[str, list[Line]] = {}
    for side, title in sides:
        lines = []
        for group in groups:
            of_global = line_over_seeds(group, recorded_curve(f"{side}_local"), suffix=", global")
            local = line_over_seeds(group, recorded_curve(f"local_{side}"), dashed=True, suffix=", local")
            lines += [line for line in (of_global, local) if line is not None]
            if local is not None:
                local_lines.setdefault(group.label, []).append(local)
        if lines:
            panels.append(Lines(title, "round", "accuracy", lines))
    if not panels:
        raise NotRecorded("in- and out-local accuracy were not recorded (train with --evaluate-locals)")
    bars = _bars_of_last_rounds(groups)
    if bars:
        categories = ("local, in", "local, out", "global")
        panels.append(Bars("Mean of the last ten tested rounds", "accuracy", categories, bars))
    listed = "; ".join(
        f"{label} {' in-local and '.join(final_values([line]).rsplit(' ', 1)[1] for line in lines)} out-local"
        for label, lines in local_lines.items()
    )
    summary = f"Local models at the last round: {listed}." if listed else "Only global models were tested."
    return panels, summary


def _bars_of_last_rounds(groups: Sequence[RunGroup]) -> list[Bar]:
    bars = []
    for group in groups:
        table = np.array(
            [[run.mean_of_last(key) for run in group.runs] for key in ("local_in", "local_out", "accuracy")]
        )
        if np.isfinite(table).all():
            mean, deviation = mean_measured(table), np.nan_to_num(deviation_measured(table))
            bars.append(Bar(group.label, mean, group.colour, mean - deviation, mean + deviation))
    return bars
