"""The leaderboard: what each method reaches, forgets and costs, over seeds; on the page and as text."""

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.core.errors import unknown
from holdfast.metrics import backward_transfer_forgetting, paired_test, rounds_to_target
from holdfast.report.loading import RunGroup, StoredRun, group_runs, load_runs
from holdfast.report.panels import Numbers

TARGET_SHARE = 0.95  # of the highest accuracy of all methods: Flashback's target for counting rounds


@dataclass(frozen=True)
class LeaderboardColumn:
    """A column of the leaderboard: one number per run, shown as mean and deviation over seeds."""

    name: str
    help: str
    value: Callable[[StoredRun], float]
    scale: float = 1.0  # what a value is multiplied with to be shown
    digits: int = 2  # shown after the point
    better: str = ""  # "high" or "low" where one is better than the other


@dataclass(frozen=True)
class Leaderboard:
    """Groups by columns: ``values`` [groups, columns] lists of one number per seed, NaN unknown."""

    groups: Sequence[RunGroup]
    columns: Sequence[LeaderboardColumn]
    values: Sequence[Sequence[Numbers]]
    p_values: Sequence[float | None]
    note: str

    def text(self, row: int, column: int, plus_minus: str = "±") -> str:
        """A cell in words: the mean, and the sample deviation where seeds differ."""
        values = self.values[row][column]
        known = values[np.isfinite(values)] * self.columns[column].scale
        if not known.size:
            return "–"
        of = "" if known.size == values.size else f" ({known.size} of {values.size} seeds)"
        digits = self.columns[column].digits
        if np.ptp(known) == 0:
            return f"{known[0]:.{digits}f}{of}"
        return f"{known.mean():.{max(1, digits)}f} {plus_minus} {known.std(ddof=1):.{max(1, digits)}f}{of}"

    def mean(self, row: int, column: int) -> float | None:
        """A cell as a number to sort by: known only where it is known of every seed."""
        values = self.values[row][column]
        return float(values.mean()) if values.size and np.isfinite(values).all() else None

    def best(self, column: int) -> list[int]:
        """The rows that are best in a column, where it knows better from worse and they differ as they are shown."""
        told = self.columns[column]
        means = {
            row: round(value * told.scale, max(1, told.digits))
            for row in range(len(self.groups))
            if (value := self.mean(row, column)) is not None
        }
        if not told.better or len(set(means.values())) < 2:
            return []
        best = (max if told.better == "high" else min)(means.values())
        return [row for row, value in means.items() if value == best]

    def to_json(self) -> dict[str, Any]:
        """The leaderboard as the page reads it."""
        columns = [
            {"name": column.name, "help": column.help, "better": column.better} for column in self.columns
        ]
        rows = [
            {
                "label": group.label,
                "colour": group.colour,
                "seeds": len(group.runs),
                "p": None if self.p_values[row] is None else float(f"{self.p_values[row]:.2g}"),
                "cells": [
                    {"text": self.text(row, column), "value": self.mean(row, column)}
                    for column in range(len(self.columns))
                ],
            }
            for row, group in enumerate(self.groups)
        ]
        return {
            "columns": columns,
            "rows": rows,
            "best": [self.best(c) for c in range(len(columns))],
            "note": self.note,
        }


def leaderboard(groups: Sequence[RunGroup]) -> Leaderboard:
    """The leaderboard of these groups, best final accuracy first; columns nobody recorded are left out."""
    highest = [np.mean([_highest(run) for run in group.runs]) for group in groups]
    target = TARGET_SHARE * float(np.nanmax(highest)) if np.isfinite(highest).any() else np.nan
    columns = _columns(target)
    table = {
        group: [np.array([column.value(run) for run in group.runs]) for column in columns] for group in groups
    }
    kept = [
        place for place in range(len(columns)) if any(np.isfinite(row[place]).any() for row in table.values())
    ]
    order = sorted(groups, key=lambda group: -_mean_or(table[group][1], -np.inf))
    note = (
        f"Means ± sample deviations over seeds. Rounds to target count to {target:.1%}, which is "
        f"{TARGET_SHARE:.0%} of the best method's highest accuracy. p compares final accuracy with the best "
        "method's on the same seeds (paired t-test)."
    )
    return Leaderboard(
        order,
        [columns[place] for place in kept],
        [[table[group][place] for place in kept] for group in order],
        _p_values(order),
        note,
    )


def table(runs: Sequence[Path], format: str = "markdown") -> str:
    """The leaderboard of run directories as ``markdown``, ``latex`` (booktabs) or ``csv`` text."""
    if format not in FORMATS:
        raise unknown("table format", format, FORMATS)
    return FORMATS[format](leaderboard(group_runs(load_runs(runs))))


def _columns(target: float) -> list[LeaderboardColumn]:
    def percent(
        name: str, explained: str, value: Callable[[StoredRun], float], better: str = "high"
    ) -> LeaderboardColumn:
        return LeaderboardColumn(f"{name} (%)", explained, value, 100.0, 2, better)

    return [
        LeaderboardColumn("rounds", "rounds trained", lambda run: float(run.records[-1]["round"]), digits=0),
        percent("final accuracy", "test accuracy after the last tested round", _final),
        percent("best accuracy", "highest test accuracy of any round", _highest),
        percent("forgetting", "mean over classes of best earlier minus final accuracy", _forgetting, "low"),
        LeaderboardColumn(
            "rounds to target",
            f"first round at {target:.1%} accuracy or more",
            lambda run: _rounds_to(run, target),
            digits=0,
            better="low",
        ),
        percent(
            "own models",
            "mean accuracy of the clients' own models on their own classes",
            _last("personal_accuracy"),
        ),
        percent("A_loc", "clients' own models on all test classes, last ten epochs", _epochs("A_loc")),
        percent("A_glo", "global model on all test classes, last ten epochs", _epochs("A_glo")),
        percent("A_loc minority", "A_loc on the minority classes", _epochs("A_loc_t")),
        percent("A_glo minority", "A_glo on the minority classes", _epochs("A_glo_t")),
        percent(
            "task forgetting",
            "best earlier minus last accuracy on own tasks",
            _epochs("average_forgetting"),
            "low",
        ),
        percent(
            "backward transfer", "change on own tasks since they were learned", _epochs("backward_transfer")
        ),
        percent("forward transfer", "accuracy on own tasks before they come", _epochs("forward_transfer")),
        percent("domain mean", "mean of the domains' accuracies, last round", _domain(np.mean)),
        percent("worst domain", "lowest of the domains' accuracies, last round", _domain(np.min)),
        LeaderboardColumn(
            "seconds",
            "seconds of all rounds, testing included",
            _sum("seconds.total"),
            digits=1,
            better="low",
        ),
        LeaderboardColumn("sent (MB)", "megabytes up and down in all rounds", _sent, 1e-6, 1, "low"),
    ]


def _final(run: StoredRun) -> float:
    accuracy = run.curve("accuracy")[1]
    return float(accuracy[-1]) if accuracy.size else np.nan


def _highest(run: StoredRun) -> float:
    accuracy = run.curve("accuracy")[1]
    return float(accuracy.max()) if accuracy.size else np.nan


def _forgetting(run: StoredRun) -> float:
    trained = run.class_accuracy[run.rounds >= 1]
    return backward_transfer_forgetting(trained) if len(trained) > 1 else np.nan


def _rounds_to(run: StoredRun, target: float) -> float:
    rounds, accuracy = run.curve("accuracy")
    place = rounds_to_target(accuracy, target) if accuracy.size else None
    return np.nan if place is None else float(rounds[place - 1])


def _last(key: str) -> Callable[[StoredRun], float]:
    def value(run: StoredRun) -> float:
        found = run.curve(key)[1]
        return float(found[-1]) if found.size else np.nan

    return value


def _epochs(key: str) -> Callable[[StoredRun], float]:
    """The mean of the last ten epochs' values, as FedMLP reports its stream accuracies."""

    def value(run: StoredRun) -> float:
        found = run.curve(f"stream.{key}")[1]
        return float(found[-10:].mean()) if found.size else np.nan

    return value


def _domain(summarise: Callable[[list[float]], Any]) -> Callable[[StoredRun], float]:
    def value(run: StoredRun) -> float:
        found = [record["domain_accuracy"] for record in run.records if record.get("domain_accuracy")]
        return float(summarise(list(found[-1].values()))) if found else np.nan

    return value


def _sum(key: str) -> Callable[[StoredRun], float]:
    def value(run: StoredRun) -> float:
        found = run.curve(key)[1]
        return float(found.sum()) if found.size else np.nan

    return value


def _sent(run: StoredRun) -> float:
    return _sum("bytes_up")(run) + _sum("bytes_down")(run)


def _mean_or(values: Numbers, other: float) -> float:
    return float(values.mean()) if values.size and np.isfinite(values).all() else other


def _p_values(groups: Sequence[RunGroup]) -> list[float | None]:
    """Of each group against the first on the seeds they share."""
    finals = [{run.seed: _final(run) for run in group.runs} for group in groups]
    p_values: list[float | None] = []
    for place, own in enumerate(finals):
        shared = [seed for seed in own if seed in finals[0]]
        alone = place == 0 or len(shared) < 2
        p_values.append(
            None if alone else paired_test([own[s] for s in shared], [finals[0][s] for s in shared])[1]
        )
    return p_values


def _markdown(board: Leaderboard) -> str:
    header, rows = _cells(board, "±")
    bold = [
        [f"**{_escape_markdown(cell)}**" if best else _escape_markdown(cell) for cell, best in row]
        for row in rows
    ]
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *bold]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + f"\n\n{board.note}\n"


def _latex(board: Leaderboard) -> str:
    header, rows = _cells(board, r"$\pm$")
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
    """Plain numbers, mean and deviation apart, for a spreadsheet or a script."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    names = [name for column in board.columns for name in (column.name, f"{column.name} deviation")]
    writer.writerow(["method", "seeds", *names, "p"])
    for row, group in enumerate(board.groups):
        numbers: list[float | None] = []
        for column, unscaled in zip(board.columns, board.values[row], strict=True):
            values = unscaled * column.scale
            known = values.size and np.isfinite(values).all()
            numbers += [float(values.mean()) if known else None]
            numbers += [float(values.std(ddof=1)) if known and len(values) > 1 else None]
        writer.writerow([group.label, len(group.runs), *numbers, board.p_values[row]])
    return out.getvalue()


FORMATS: dict[str, Callable[[Leaderboard], str]] = {"markdown": _markdown, "latex": _latex, "csv": _csv}


def _cells(board: Leaderboard, plus_minus: str) -> tuple[list[str], list[list[tuple[str, bool]]]]:
    """Header and rows of (text, whether it is the best of its column)."""
    several = any(p is not None for p in board.p_values)
    header = ["method", "seeds", *(column.name for column in board.columns), *(["p"] if several else [])]
    best = [board.best(column) for column in range(len(board.columns))]
    rows = []
    for row, group in enumerate(board.groups):
        p = board.p_values[row]
        cells = [(group.label, False), (str(len(group.runs)), False)]
        cells += [(board.text(row, c, plus_minus), row in best[c]) for c in range(len(board.columns))]
        cells += [("–" if p is None else f"{p:.2g}", False)] if several else []
        rows.append(cells)
    return header, rows


def _escape_markdown(text: str) -> str:
    return "".join(f"\\{letter}" if letter in r"\|*_`<[" else letter for letter in text).replace("\n", " ")


LATEX_ESCAPES = {
    "\\": r"\textbackslash{}",
    "–": "--",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{letter: f"\\{letter}" for letter in "&%$#_{}"},
}


def _escape_latex(text: str) -> str:
    parts = text.split(r"$\pm$")
    return r"$\pm$".join("".join(LATEX_ESCAPES.get(letter, letter) for letter in part) for part in parts)
