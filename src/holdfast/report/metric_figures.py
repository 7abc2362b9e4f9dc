"""Figures of any metric that runs record: a curve over rounds, or one row for each class or group."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from holdfast.core.errors import unknown
from holdfast.core.measures import SHARES
from holdfast.report.curves import final_values, label_with_seed, recorded_lines
from holdfast.report.loading import RunGroup, StoredRun, matrix
from holdfast.report.panels import Figure, Heatmap, HeatmapStep, Line, Lines, Panel, thin

MAX_COLUMNS = 400  # of a heat map
MAX_LINES = 14  # of a panel
BY_ROW = ("class_", "site_", "domain_", "label_")
"""Prefixes of metrics that are recorded by class or by group."""
SHARES_LOST = frozenset({"forgetting", "local_forgetting", "attack_success"})
"""Differences and shares of accuracies."""
OF_ACCURACY = frozenset({"local_in", "local_out", "in_local", "out_local"})
"""Scores of tasks with an accuracy, which are shares for these alone."""
NO_METRICS = frozenset({"round", "stage", "participants", "samples", "attackers", "rejected"})


def build_metric_figure(name: str, groups: Sequence[RunGroup]) -> Figure:
    """A metric of the records over rounds; ``a.b`` is b inside of a, and of a list its mean is drawn."""
    known = dict.fromkeys(key for group in groups for run in group.runs for key in metric_names(run))
    if name not in known:
        raise unknown("metric of this run" if len(groups) == 1 else "metric of these runs", name, known)
    title = _title(name)
    percent = _is_share(name, groups)
    if name.startswith(BY_ROW):
        panels = [_by_row(name, group, percent) for group in groups if name in metric_names(group.runs[0])]
        return Figure(name, title, "Each row or line is a class, site or domain.", "", panels, "")
    lines = recorded_lines(groups, name)
    summary = f"At the last round: {final_values(lines, percent)}."
    return Figure(name, title, "", "", [Lines(title, "round", _title(name), lines, percent)], summary)


def metric_names(run: StoredRun) -> list[str]:
    """The keys of the run's records that have numbers, those inside of another one as ``a.b``."""
    return list(dict.fromkeys(key for record in run.records for key in _keys(record, "")))


def _keys(record: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for key, value in record.items():
        if key in NO_METRICS or isinstance(value, bool):
            continue
        if isinstance(value, Mapping) and not key.startswith(BY_ROW):
            if not prefix:  # deeper entries, such as values by client, are not metrics
                yield from _keys(value, f"{key}.")
        elif isinstance(value, int | float) or (not prefix and _has_numbers(value)):
            yield prefix + key


def _has_numbers(value: Any) -> bool:
    values = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return any(isinstance(item, int | float) for item in values)


def _by_row(name: str, group: RunGroup, percent: bool) -> Panel:
    """A heat map of shares, lines of other metrics."""
    run = group.runs[0]
    found = [record for record in run.records if record.get(name) is not None]
    found = [found[place] for place in thin(len(found), MAX_COLUMNS)]
    last = found[-1][name]
    rows = [str(key) for key in last] if isinstance(last, Mapping) else run.classes[: len(last)]
    values = matrix([list(_values(record[name])) for record in found]).T
    title = label_with_seed(group)
    if percent:
        rounds = [str(record["round"]) for record in found]
        return Heatmap(title, "round", name.partition("_")[0], rounds, [HeatmapStep("", rows, values)])
    x = matrix([[record["round"] for record in found]])[0]
    shown = thin(len(rows), MAX_LINES)
    lines = [Line(rows[place], x, values[place], colour) for colour, place in enumerate(shown)]
    return Lines(title, "round", _title(name), lines, percent=False)


def _values(recorded: Any) -> Sequence[float | None]:
    return list(recorded.values()) if isinstance(recorded, Mapping) else recorded


def _is_share(name: str, groups: Sequence[RunGroup]) -> bool:
    last = name.rpartition(".")[2]
    for prefix in BY_ROW:
        last = last.removeprefix(prefix)
    accurate = all(len(run.rounds) for group in groups for run in group.runs)
    return last in SHARES or last in SHARES_LOST or (last in OF_ACCURACY and accurate)


def _title(name: str) -> str:
    return name.replace("_", " ").replace(".", ", ")
