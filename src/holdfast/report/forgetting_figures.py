"""What is forgotten: by local training, by aggregation, and of which classes."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from holdfast import metrics
from holdfast.report.curves import (
    MOST_POINTS,
    NOTHING,
    Curve,
    NotRecorded,
    Shown,
    curves,
    ends,
    local_rounds,
    over_seeds,
    recording,
    with_seed,
)
from holdfast.report.loading import RunGroup, StoredRun, columns, vector
from holdfast.report.panels import Bar, Bars, Frame, Grid, Line, Lines, Numbers, Panel, thin

MOST_CELLS = 1_200_000  # of all slider frames of a figure together: they are most of a page's size
DOMINANT_SHARE = 0.05  # gamma of the class split, the same for all methods compared (FedKA section 3.2)
KNOWN_AT_LEAST = 0.01  # a class the global model did not know has nothing to forget
CLASS_GROUPS = ("missing", "non-dominant", "dominant")


def strip(groups: Sequence[RunGroup]) -> Shown:
    """Global model before, local models, global model after, class by class, for every tested round."""
    found = [(group, _whole_rounds(group.runs[0])) for group in groups]
    found = [(group, rounds) for group, rounds in found if rounds]
    if not found:
        tested = any("locals" in record for group in groups for run in group.runs for record in run.records)
        lone = "it needs a second round: the model sent out in the first knows nothing"
        raise NotRecorded(lone if tested else "local models were not tested (train with --evaluate-locals)")
    cells = sum(after.size + 2 * after.shape[1] for _, rounds in found for _, _, after in rounds)
    panels, told = [], []
    for group, rounds in found:
        share = min(1.0, MOST_CELLS / cells)
        kept = thin(len(rounds), max(2, int(len(rounds) * share)))
        frames = [_strip_frame(group.runs[0], *rounds[place]) for place in kept]
        panels.append(Grid(with_seed(group), "class", "model", group.runs[0].classes, frames, framed=True))
        lost = np.mean([metrics.local_forgetting(before, after).mean() for _, before, after in rounds])
        told.append(f"{group.label} {lost:.1%}")
    return panels, f"Accuracy that local training loses in a round, on average: {', '.join(told)}."


def _whole_rounds(run: StoredRun) -> list[tuple[Mapping[str, Any], Numbers, Numbers]]:
    """The rounds of which the models before, between and after were tested."""
    return [found for found in local_rounds(run) if found[0].get("class_accuracy") is not None]


def _strip_frame(run: StoredRun, record: Mapping[str, Any], before: Numbers, after: Numbers) -> Frame:
    clients = record.get("participants") or range(len(after))
    rows = ["global before", *(f"client {client}" for client in clients), "global after"]
    new = record["locals"].get("global_after") or record["class_accuracy"]
    values = np.vstack([before, after, vector(new)])
    counts = run.counts_of(record)
    marked = None
    if counts is not None and counts.shape == after.shape:
        marked = np.zeros(values.shape, dtype=np.bool_)
        marked[1:-1] = counts > 0
    return Frame(f"round {record['round']}", rows, values, marked)


def _global_forgetting(run: StoredRun) -> Curve:
    trained = run.rounds >= 1  # round 0 is the untrained model, which has nothing to forget
    if trained.sum() < 2:
        return NOTHING
    return run.rounds[trained][1:], metrics.round_forgetting(run.class_accuracy[trained])


def _local_forgetting(run: StoredRun) -> list[tuple[float, Numbers]]:
    """(round, values of the clients); the model sent out in round 1 is untrained: nothing to forget."""
    found = [(x, values) for x, values in run.lists("local_forgetting") if x > 1]
    recorded = [(x, values) for x, values in found if np.isfinite(values).any()]
    if recorded:
        return recorded
    return [(float(record["round"]), metrics.local_forgetting(*pair)) for record, *pair in local_rounds(run)]


def _mean_local_forgetting(run: StoredRun) -> Curve:
    return columns((x, float(np.nanmean(values))) for x, values in _local_forgetting(run))


def _cdfs(pooled: Sequence[tuple[RunGroup, list[Numbers]]]) -> list[Line]:
    """Cumulative distributions, all drawn up to the largest value of any group."""
    found = [(group, np.sort(np.concatenate([np.zeros(0), *parts]))) for group, parts in pooled]
    found = [(group, values[np.isfinite(values)]) for group, values in found]
    largest = max((values[-1] for _, values in found if values.size), default=0.0)
    lines = []
    for group, values in found:
        if values.size:
            share = np.arange(1, len(values) + 1) / len(values)
            kept = thin(len(values), MOST_POINTS)
            x, y = np.r_[0.0, values[kept], largest], np.r_[0.0, share[kept], 1.0]
            lines.append(Line(group.label, x, y, group.colour))
    return lines


def forgetting(groups: Sequence[RunGroup]) -> Shown:
    """Accuracy lost from round to round and in local training, over rounds and as distributions."""
    over_rounds = curves(groups, _global_forgetting)
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
            _cdfs(pooled),
            x_percent=True,
            stepped=True,
        ),
    ]
    local = curves(groups, _mean_local_forgetting)
    if local:
        pooled = [(group, [v for run in group.runs for _, v in _local_forgetting(run)]) for group in groups]
        panels += [
            Lines("Local forgetting over rounds, mean of clients", "round", loss, local),
            Lines(
                "Local forgetting, distribution over local models",
                loss,
                "share of local models",
                _cdfs(pooled),
                x_percent=True,
                stepped=True,
            ),
        ]
    means = sorted((float(np.nanmean(line.y)), line.name) for line in over_rounds)
    told = ", ".join(f"{name} {value:.1%}" for value, name in means)
    return panels, f"Mean global forgetting per round, least first: {told}."


def _degrees(run: StoredRun) -> Iterator[tuple[float, dict[str, Numbers]]]:
    """(round, degrees by class group of all clients' classes that the global model knew)."""
    for record, before, after in local_rounds(run):
        counts = run.counts_of(record)
        if counts is None or counts.shape != after.shape:
            continue
        degrees = np.maximum(metrics.forgetting_degree(before, after), -1.0)
        known = np.isfinite(degrees) & (before >= KNOWN_AT_LEAST)
        masks = metrics.class_split(counts, DOMINANT_SHARE)
        yield (
            float(record["round"]),
            {name: degrees[mask & known] for name, mask in zip(CLASS_GROUPS, masks, strict=True)},
        )


def forgetting_degree(groups: Sequence[RunGroup]) -> Shown:
    """Share of a class's accuracy lost in local training, by what the client holds of it."""
    found = {run: list(_degrees(run)) for group in groups for run in group.runs}
    if not any(found.values()):
        raise NotRecorded("it needs tested local models (--evaluate-locals) and the clients' label counts")
    bars, told = [], []
    for group in groups:
        rounds = [by_class_group for run in group.runs for _, by_class_group in found[run]]
        pooled = [np.concatenate([np.zeros(0), *(one[name] for one in rounds)]) for name in CLASS_GROUPS]
        low, middle, high = np.array([_quartiles(values) for values in pooled]).T
        if np.isfinite(middle).any():
            bars.append(Bar(group.label, middle, group.colour, low, high))
            known = [(n, v) for n, v in zip(CLASS_GROUPS, middle, strict=True) if np.isfinite(v)]
            told.append(f"{group.label} " + ", ".join(f"{value:.2f} ({name})" for name, value in known))
    label = "forgetting degree"
    over_rounds = [
        Lines(f"{name.capitalize()} classes over rounds, median", "round", label, lines, percent=False)
        for name in CLASS_GROUPS
        if (lines := curves(groups, partial(_medians, found, name)))
    ]
    pooled_panel = Bars("All rounds: median and quartiles", label, CLASS_GROUPS, bars, percent=False)
    return [pooled_panel, *over_rounds], f"Median forgetting degree: {'; '.join(told)}."


def _medians(
    found: Mapping[StoredRun, list[tuple[float, dict[str, Numbers]]]], name: str, run: StoredRun
) -> Curve:
    return columns((x, float(np.median(degrees[name]))) for x, degrees in found[run] if degrees[name].size)


def _quartiles(values: Numbers) -> Numbers:
    return np.quantile(values, [0.25, 0.5, 0.75]) if values.size else np.full(3, np.nan)


def consistency(groups: Sequence[RunGroup]) -> Shown:
    """How alike successive global models are: the cosine of their per-class accuracies."""
    lines = curves(groups, _consistency)
    if not lines:
        raise NotRecorded("it needs at least two evaluated rounds")
    means = sorted(((float(np.nanmean(line.y)), line.name) for line in lines), reverse=True)
    told = ", ".join(f"{name} {value:.3f}" for value, name in means)
    panel = Lines(
        "Global model against the round before", "round", "cosine of class accuracy", lines, percent=False
    )
    return [panel], f"Mean over rounds: {told}."


def _consistency(run: StoredRun) -> Curve:
    if len(run.rounds) < 2:
        return NOTHING
    return run.rounds[1:], metrics.prediction_consistency(run.class_accuracy)


def in_out_local(groups: Sequence[RunGroup]) -> Shown:
    """Accuracy on the classes that clients hold, and on those they lack, of global and local models."""
    sides = (
        ("in", "In-local: the classes as clients hold them"),
        ("out", "Out-local: the classes they lack"),
    )
    panels: list[Panel] = []
    local_ends: dict[str, list[Line]] = {}
    for side, title in sides:
        lines = []
        for group in groups:
            whole = over_seeds(group, recording(f"{side}_local"), suffix=", global")
            local = over_seeds(group, recording(f"local_{side}"), dashed=True, suffix=", local")
            lines += [line for line in (whole, local) if line is not None]
            if local is not None:
                local_ends.setdefault(group.label, []).append(local)
        if lines:
            panels.append(Lines(title, "round", "accuracy", lines))
    if not panels:
        raise NotRecorded("in- and out-local accuracy were not recorded (train with --evaluate-locals)")
    bars = _last_ten(groups)
    if bars:
        panels.append(
            Bars(
                "Mean of the last ten tested rounds", "accuracy", ("local, in", "local, out", "global"), bars
            )
        )
    told = "; ".join(
        f"{label} {' in-local and '.join(ends([line]).rsplit(' ', 1)[1] for line in lines)} out-local"
        for label, lines in local_ends.items()
    )
    return panels, f"Local models at the last round: {told}." if told else "Only global models were tested."


def _last_ten(groups: Sequence[RunGroup]) -> list[Bar]:
    bars = []
    for group in groups:
        table = np.array(
            [
                [_tail_mean(run.curve(key)) for key in ("local_in", "local_out", "accuracy")]
                for run in group.runs
            ]
        )
        if np.isfinite(table).all():
            mean = table.mean(axis=0)
            deviation = table.std(axis=0, ddof=1) if len(table) > 1 else np.zeros(3)
            bars.append(Bar(group.label, mean, group.colour, mean - deviation, mean + deviation))
    return bars


def _tail_mean(curve: Curve) -> float:
    return float(curve[1][-10:].mean()) if curve[1].size else np.nan
