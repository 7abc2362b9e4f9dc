"""The leaderboard: accuracy, forgetting and cost of each method over seeds; for the page and as text."""

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from holdfast.core.errors import unknown
from holdfast.core.measures import Measure, score_measure
from holdfast.metrics import backward_transfer_forgetting, paired_test, rounds_to_target
from holdfast.metrics.arrays import FloatArray
from holdfast.metrics.progress import TARGET_SHARE, default_target
from holdfast.metrics.summary import UNKNOWN, format_mean, mean_and_deviation
from holdfast.report.loading import Given, RunGroup, StoredRun, common_measures, group_runs, load_runs


@dataclass(frozen=True)
class LeaderboardColumn:
    """A column of the leaderboard: one number per run, shown as mean and deviation over seeds."""

    name: str
    help: str
    value: Callable[[StoredRun], float]
    scale: float = 1.0  # factor from the value to the number shown
    digits: int = 2  # decimals shown
    better: str = ""  # "high" or "low" where one is better than the other


@dataclass(frozen=True)
class BaselineTest:
    """A group's final accuracy against the baseline's over the seeds they share."""

    difference: float | None = None  # mean; None without a shared seed and for the baseline itself
    p_value: float | None = None  # of a paired t-test; None also for a single shared seed


@dataclass(frozen=True)
class Leaderboard:
    """Groups by columns: ``values`` [groups, columns] are arrays of one number per seed, NaN unknown."""

    groups: Sequence[RunGroup]
    columns: Sequence[LeaderboardColumn]
    values: Sequence[Sequence[FloatArray]]
    tests: Sequence[BaselineTest]  # one per group
    note: str
    measure: Measure  # the primary metric of the groups

    def text(self, row: int, column: int) -> str:
        """A cell as text: the mean, and the sample standard deviation where seeds differ."""
        values = self.values[row][column] * self.columns[column].scale
        known = values[np.isfinite(values)]
        mean, deviation = mean_and_deviation(known)
        digits = self.columns[column].digits
        if not known.size:
            return UNKNOWN
        if np.ptp(known) == 0:
            deviation = None
        else:
            digits = max(1, digits)
        seeds = "" if known.size == values.size else f" ({known.size} of {values.size} seeds)"
        return format_mean(mean, deviation, digits) + seeds

    def mean(self, row: int, column: int) -> float | None:
        """A cell as a number to sort by, None unless it is known for every seed."""
        values = self.values[row][column]
        return float(values.mean()) if values.size and np.isfinite(values).all() else None

    def best(self, column: int) -> list[int]:
        """The rows with the best mean as displayed; none where all are equal or no direction is better."""
        shown = self.columns[column]
        means = {
            row: round(value * shown.scale, max(1, shown.digits))
            for row in range(len(self.groups))
            if (value := self.mean(row, column)) is not None
        }
        if not shown.better or len(set(means.values())) < 2:
            return []
        best = (max if shown.better == "high" else min)(means.values())
        return [row for row, value in means.items() if value == best]

    def test_columns(self) -> list[tuple[str, list[tuple[str, float | None]]]]:
        """The columns of the tests, without those that are empty: the name, and (text, value) of each row."""
        digits = "+.2f" if self.measure.is_share else "+.4f"
        columns = [
            (self.difference, self.measure.scale, digits, [test.difference for test in self.tests]),
            ("p", 1, ".2g", [test.p_value for test in self.tests]),
        ]
        return [
            (name, [(UNKNOWN if v is None else f"{v * scale:{form}}", v) for v in values])
            for name, scale, form, values in columns
            if any(v is not None for v in values)
        ]

    @property
    def difference(self) -> str:
        """The head of the column of differences."""
        return "difference (%)" if self.measure.is_share else "difference"

    def to_json(self) -> dict[str, Any]:
        tests = self.test_columns()
        columns = [
            {"name": column.name, "help": column.help, "better": column.better} for column in self.columns
        ]
        columns += [{"name": name, "help": "against the baseline", "better": ""} for name, _ in tests]
        rows = []
        for row, group in enumerate(self.groups):
            cells = [(self.text(row, column), self.mean(row, column)) for column in range(len(self.columns))]
            cells += [cells_of_column[row] for _, cells_of_column in tests]
            rows.append(
                {
                    "label": group.label,
                    "colour": group.colour,
                    "seeds": len(group.runs),
                    "cells": [{"text": text, "value": value} for text, value in cells],
                }
            )
        return {
            "columns": columns,
            "rows": rows,
            "best": [*(self.best(column) for column in range(len(self.columns))), *([] for _ in tests)],
            "note": self.note,
        }


def leaderboard(groups: Sequence[RunGroup]) -> Leaderboard:
    """The leaderboard of these groups, the best final metric first, without columns that nobody recorded."""
    measure, *others = common_measures(groups)
    target = default_target([[measure.sign * _best(run, measure) for run in group.runs] for group in groups])
    target *= measure.sign
    columns = _columns(target, measure, others)
    table = {
        group: [np.array([column.value(run) for run in group.runs]) for column in columns] for group in groups
    }
    kept = [
        place for place in range(len(columns)) if any(np.isfinite(row[place]).any() for row in table.values())
    ]
    order = sorted(groups, key=lambda group: _mean_final(group, measure), reverse=True)
    baseline = baseline_of(groups)
    shown = f"{target:.1%}" if measure.is_share else f"{measure.label} {target:.4g}"
    best = f"{TARGET_SHARE:.0%} of the best method's highest {measure.label}"
    if measure.less_is_better:
        best = f"the best method's lowest {measure.label} divided by {TARGET_SHARE}"
    note = f"Means ± sample deviations over seeds. Rounds to target count to {shown}, which is {best}."
    if len(groups) > 1:
        note += (
            f" Difference: final {measure.label} minus that of {baseline.label}, over shared seeds. "
            f"p: paired t-test against {baseline.label} over shared seeds."
        )
    return Leaderboard(
        order,
        [columns[place] for place in kept],
        [[table[group][place] for place in kept] for group in order],
        [BaselineTest() if group is baseline else _test(group, baseline, measure) for group in order],
        note,
        measure,
    )


def baseline_of(groups: Sequence[RunGroup]) -> RunGroup:
    """The group that the others are tested against.

    The first method of the comparison that the runs come from; else FedAvg; else the first group.
    """
    recorded = [group for group in groups if any(run.is_baseline for run in group.runs)]
    fedavg = [group for group in groups if group.runs[0].method == "fedavg"]
    return (*recorded, *fedavg, *groups)[0]


def _test(group: RunGroup, baseline: RunGroup, measure: Measure) -> BaselineTest:
    final, reference = (
        {run.seed: last for run in each.runs if np.isfinite(last := run.last(measure.name))}
        for each in (group, baseline)
    )
    shared = [seed for seed in final if seed in reference]
    if not shared:
        return BaselineTest()
    return BaselineTest(*paired_test([final[seed] for seed in shared], [reference[seed] for seed in shared]))


def table(runs: Given | Sequence[Given], format: str = "markdown") -> str:
    """The leaderboard of runs or run directories as ``markdown``, ``latex`` (booktabs) or ``csv`` text."""
    if format not in FORMATS:
        raise unknown("table format", format, FORMATS)
    return FORMATS[format](leaderboard(group_runs(load_runs(runs))))


def _columns(target: float, measure: Measure, others: Sequence[Measure]) -> list[LeaderboardColumn]:
    def percent(
        name: str, help: str, value: Callable[[StoredRun], float], better: str = "high"
    ) -> LeaderboardColumn:
        return LeaderboardColumn(f"{name} (%)", help, value, 100.0, 2, better)

    def tested(words: str, of: Measure, help: str, value: Callable[[StoredRun], float]) -> LeaderboardColumn:
        better, digits = "low" if of.less_is_better else "high", 2 if of.is_share else 4
        return LeaderboardColumn(f"{words}{of.title}", help, value, of.scale, digits, better)

    name = measure.name
    words = measure.label if "." in name else f"test {name}"
    shown = f"{target:.1%} {measure.label}" if measure.is_share else f"{measure.label} {target:.4g}"
    return [
        LeaderboardColumn("rounds", "rounds trained", lambda run: float(run.records[-1]["round"]), digits=0),
        tested("final ", measure, f"{words} after the last tested round", lambda run: run.last(name)),
        tested(
            "best ",
            measure,
            f"{'lowest' if measure.less_is_better else 'highest'} {words} of any round",
            lambda run: _best(run, measure),
        ),
        *(
            tested(
                "", other, f"test {other.name} after the last tested round", partial(_last, key=other.name)
            )
            for other in others
        ),
        percent("forgetting", "mean over classes of best earlier minus final accuracy", _forgetting, "low"),
        LeaderboardColumn(
            "rounds to target",
            f"first round at {shown} or {'less' if measure.less_is_better else 'more'}",
            lambda run: _rounds_to(run, target, measure),
            digits=0,
            better="low",
        ),
        percent(
            "personal accuracy",
            "mean accuracy of the clients' own models on the classes they hold, last round",
            _personal_accuracy,
        ),
        percent("A_loc", "clients' own models on all test classes, last ten epochs", _stream("A_loc")),
        percent("A_glo", "global model on all test classes, last ten epochs", _stream("A_glo")),
        percent("A_loc minority", "A_loc on the minority classes", _stream("A_loc_t")),
        percent("A_glo minority", "A_glo on the minority classes", _stream("A_glo_t")),
        percent(
            "task forgetting",
            "best earlier minus last accuracy on own tasks",
            _stream("average_forgetting"),
            "low",
        ),
        percent(
            "backward transfer",
            "change of accuracy on own tasks since they were learned",
            _stream("backward_transfer"),
        ),
        percent(
            "forward transfer", "gain of accuracy on own tasks before training", _stream("forward_transfer")
        ),
        percent("domain mean", "mean of the domains' accuracies, last round", _domains(np.mean)),
        percent("worst domain", "lowest of the domains' accuracies, last round", _domains(np.min)),
        percent(
            "attack success",
            "share of marked test samples that are taken for the backdoor's target, last round",
            lambda run: run.last("attack_success"),
            "low",
        ),
        LeaderboardColumn(
            "epsilon",
            "privacy spent by all rounds: ε of the clients' differential privacy",
            lambda run: run.last("epsilon"),
            better="low",
        ),
        LeaderboardColumn(
            "sample epsilon",
            "privacy spent by all rounds: the largest ε of a client's samples",
            lambda run: run.last("sample_privacy.epsilon"),
            better="low",
        ),
        LeaderboardColumn(
            "seconds",
            "seconds of all rounds, including testing",
            lambda run: _total(run, "seconds.total"),
            digits=1,
            better="low",
        ),
        LeaderboardColumn(
            "sent (MB)",
            "megabytes sent to and by clients in all rounds",
            lambda run: _total(run, "bytes_up") + _total(run, "bytes_down"),
            1e-6,
            1,
            "low",
        ),
    ]


def _personal_accuracy(run: StoredRun) -> float:
    return run.last("local_in") if score_measure(run.experiment).name == "accuracy" else np.nan


def _last(run: StoredRun, key: str) -> float:
    return run.last(key)


def _mean_final(group: RunGroup, measure: Measure) -> float:
    """The final metric over seeds to sort by: below every other where it is unknown for a seed."""
    final = measure.sign * np.array([run.last(measure.name) for run in group.runs])
    return float(final.mean()) if np.isfinite(final).all() else -np.inf


def _best(run: StoredRun, measure: Measure) -> float:
    values = measure.sign * run.curve(measure.name)[1]
    return measure.sign * float(values.max()) if values.size else np.nan


def _forgetting(run: StoredRun) -> float:
    trained = run.class_accuracy[run.rounds >= 1]
    return backward_transfer_forgetting(trained) if len(trained) > 1 else np.nan


def _rounds_to(run: StoredRun, target: float, measure: Measure) -> float:
    rounds, values = run.curve(measure.name)
    reached = rounds_to_target(measure.sign * values, measure.sign * target, rounds.astype(int).tolist())
    return np.nan if reached is None else float(reached)


def _stream(key: str) -> Callable[[StoredRun], float]:
    """The mean over the last ten epochs, as FedMLP reports its accuracies on streams."""
    return lambda run: run.mean_of_last(f"stream.{key}")


def _domains(reduce: Callable[[list[float]], Any]) -> Callable[[StoredRun], float]:
    def value(run: StoredRun) -> float:
        found = [record["domain_accuracy"] for record in run.records if record.get("domain_accuracy")]
        return float(reduce(list(found[-1].values()))) if found else np.nan

    return value


def _total(run: StoredRun, key: str) -> float:
    values = run.curve(key)[1]
    return float(values.sum()) if values.size else np.nan


def _markdown(board: Leaderboard) -> str:
    header, rows = _cells(board)
    body = [
        [f"**{_escape_markdown(cell)}**" if best else _escape_markdown(cell) for cell, best in row]
        for row in rows
    ]
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + f"\n\n{board.note}\n"


def _latex(board: Leaderboard) -> str:
    header, rows = _cells(board)
    body = [
        [rf"\textbf{{{_escape_latex(cell)}}}" if best else _escape_latex(cell) for cell, best in row]
        for row in rows
    ]
    lines = [
        rf"\begin{{tabular}}{{l{'r' * (len(header) - 1)}}}",
        r"\toprule",
        " & ".join(map(_escape_latex, header)) + r" \\",
        r"\midrule",
        *(" & ".join(row) + r" \\" for row in body),
        r"\bottomrule",
        r"\end{tabular}",
    ]
    return "\n".join(lines) + f"\n% {board.note}\n"


def _csv(board: Leaderboard) -> str:
    """Plain numbers, with mean and deviation in columns of their own, for a spreadsheet or a script."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    names = [name for column in board.columns for name in (column.name, f"{column.name} deviation")]
    writer.writerow(["method", "seeds", *names, board.difference, "p"])
    for group, row, test in zip(board.groups, board.values, board.tests, strict=True):
        numbers: list[float | None] = []
        for column, values in zip(board.columns, row, strict=True):
            complete = np.isfinite(values).all()
            numbers += mean_and_deviation(values * column.scale) if complete else (None, None)
        difference = None if test.difference is None else board.measure.scale * test.difference
        writer.writerow([group.label, len(group.runs), *numbers, difference, test.p_value])
    return out.getvalue()


FORMATS: dict[str, Callable[[Leaderboard], str]] = {"markdown": _markdown, "latex": _latex, "csv": _csv}


def _cells(board: Leaderboard) -> tuple[list[str], list[list[tuple[str, bool]]]]:
    """Header and rows of (text, whether it is the best of its column)."""
    tests = board.test_columns()
    header = ["method", "seeds", *(column.name for column in board.columns), *(name for name, _ in tests)]
    best = [board.best(column) for column in range(len(board.columns))]
    rows = []
    for row, group in enumerate(board.groups):
        cells = [(group.label, False), (str(len(group.runs)), False)]
        cells += [(board.text(row, c), row in best[c]) for c in range(len(board.columns))]
        cells += [(column[row][0], False) for _, column in tests]
        rows.append(cells)
    return header, rows


def _escape_markdown(text: str) -> str:
    return "".join(f"\\{letter}" if letter in r"\|*_`<[" else letter for letter in text).replace("\n", " ")


LATEX_ESCAPES = {
    "\\": r"\textbackslash{}",
    "–": "--",
    "±": r"$\pm$",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{letter: f"\\{letter}" for letter in "&%$#_{}"},
}


def _escape_latex(text: str) -> str:
    return "".join(LATEX_ESCAPES.get(letter, letter) for letter in text)
