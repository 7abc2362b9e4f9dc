"""The result of a comparison: a leaderboard, its runs, figures and report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from holdfast import metrics
from holdfast.core.errors import HoldfastError
from holdfast.core.measures import Measure, score_measure
from holdfast.metrics.arrays import FloatArray
from holdfast.metrics.progress import TARGET_SHARE, default_target
from holdfast.metrics.summary import UNKNOWN, format_mean, mean_and_deviation
from holdfast.report import notebook
from holdfast.report.loading import RunGroup, StoredRun, load_run
from holdfast.report.page import report_html, write_page
from holdfast.report.printing import plot
from holdfast.runs import RunDirectory
from holdfast.training.run import default_page

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class MethodSummary:
    """The results of one method; lists hold one value for each seed, accuracies are fractions."""

    method: str
    seeds: list[int]
    score: list[float]  # the primary metric of the final model, such as its accuracy
    forgetting: list[
        float
    ]  # mean over classes of (best accuracy ever - final accuracy), or of the error gained
    rounds_to_target: list[int | None]
    seconds: list[float]
    megabytes: list[float]  # in both directions
    difference: float | None  # mean score above the first method's, on the same seeds
    p_value: float | None  # of a paired t-test against the first method

    @property
    def accuracy(self) -> list[float]:
        """The score, for runs that are judged by accuracy."""
        return self.score


@dataclass(frozen=True, repr=False)
class Comparison:
    """The result of a comparison; ``rows`` are in the order of the methods. A notebook shows it as a table."""

    rows: list[MethodSummary]
    target: float  # target score of the column "rounds to target"
    notes: list[str]
    paths: list[Path]  # the runs' directories
    measure: Measure  # the score: the primary metric of the runs
    score_measure: Measure  # the measure by class, from which forgetting is computed
    runs: Mapping[str, Sequence[StoredRun]] = field(default_factory=dict)  # by method, one for each seed

    @classmethod
    def of_runs(
        cls,
        runs: Mapping[str, Sequence[StoredRun]],
        target: float | None,
        notes: Sequence[str] = (),
        paths: Sequence[Path] = (),
    ) -> Comparison:
        """The comparison of these runs by method, of which the first is the baseline.

        ``target`` is by default 95 % of the best method's best primary metric.
        """
        notes, first = list(notes), next(iter(runs))
        measure, by_class = runs[first][0].measures[0], score_measure(runs[first][0].experiment)
        if target is None:
            best = [[_scores(run, measure).max() for run in of_one] for of_one in runs.values()]
            target = measure.sign * default_target(best)
            value = f"{target:.1%} {measure.label}" if measure.is_share else f"{measure.label} {target:.4g}"
            of = f"{TARGET_SHARE:.0%} of the best method's highest"
            if measure.less_is_better:
                of = f"the best method's lowest divided by {TARGET_SHARE}"
            notes.append(f"target: {value}, {of}")
        rows: list[MethodSummary] = []
        for label, of_one in runs.items():
            rows.append(_row(label, of_one, target, rows[0] if rows else None, measure, by_class))
        named = {
            label: [
                replace(run, name=f"{label}/seed-{run.seed}", is_baseline=label == first) for run in of_one
            ]
            for label, of_one in runs.items()
        }
        return cls(rows, target, notes, list(paths), measure, by_class, named)

    @classmethod
    def open(cls, path: str | Path, target: float | None = None) -> Comparison:
        """The finished comparison in a directory that `compare` wrote, with its methods by their folders' names."""
        runs: dict[str, list[StoredRun]] = {}
        for place in sorted(Path(path).glob("*/seed-*/experiment.yaml")):
            if not RunDirectory.open(place.parent).finished:
                raise HoldfastError(
                    f"{place.parent} is not finished; run the same comparison again to finish it"
                )
            runs.setdefault(place.parent.parent.name, []).append(load_run(place.parent))
        if not runs:
            raise HoldfastError(
                f"{path} holds no comparison: there are no runs in METHOD/seed-N, as compare(..., out=...) writes them"
            )
        ordered = {
            label: sorted(runs[label], key=lambda run: int(run.seed))
            for label in sorted(runs, key=lambda label: not runs[label][0].is_baseline)
        }
        first, *others = ([run.seed for run in of_one] for of_one in ordered.values())
        if any(seeds != first for seeds in others):
            raise HoldfastError(f"{path} is incomplete: its methods have different seeds; compare them again")
        paths = [Path(path) / label / f"seed-{seed}" for label in ordered for seed in first]
        return cls.of_runs(ordered, target, paths=paths)

    def __repr__(self) -> str:
        return "\n".join([notebook.aligned(*self.cells()), *self.notes])

    def _repr_html_(self) -> str:
        units = f"mean ± deviation; {self.units}seconds and MB sent in a run"
        return notebook.grid(*self.cells(), [units, *self.notes])

    @property
    def units(self) -> str:
        """The units of the columns, for a title."""
        shares = [
            name
            for name, of in ((self.measure.label, self.measure), ("forgetting", self.score_measure))
            if of.is_share
        ]
        return f"{' and '.join(shares)} in %, " if shares else ""

    def cells(self) -> tuple[Sequence[str], list[list[str]]]:
        """The leaderboard as text: its header and its rows."""
        measure, score = self.measure, self.score_measure
        digits = _digits(measure)
        header = ("method", measure.label, "forgetting", "rounds", "s", "MB", "vs first", "p")
        return header, [
            [
                row.method,
                _mean([measure.scale * value for value in row.score], digits),
                _mean([score.scale * value for value in row.forgetting], _digits(score)),
                _rounds(row.rounds_to_target),
                f"{fmean(row.seconds):.1f}",
                f"{fmean(row.megabytes):.1f}",
                "" if row.difference is None else f"{measure.scale * row.difference:+.{digits}f}",
                "" if row.p_value is None else f"{row.p_value:.3f}",
            ]
            for row in self.rows
        ]

    def to_json(self) -> dict[str, Any]:
        """The summaries, the target, the notes and the directories as plain values."""
        return {
            "rows": [self._plain(row) for row in self.rows],
            "target": self.target,
            "notes": self.notes,
            "paths": [str(path) for path in self.paths],
        }

    def _plain(self, row: MethodSummary) -> dict[str, Any]:
        """A summary as plain values, with the score under the name of its metric."""
        return {self.measure.name if key == "score" else key: value for key, value in asdict(row).items()}

    def to_frame(self) -> pandas.DataFrame:
        """A pandas table with a row for each method and seed."""
        try:
            import pandas
        except ModuleNotFoundError:
            raise HoldfastError("to_frame needs pandas: pip install pandas") from None
        columns = (self.measure.name, "forgetting", "rounds_to_target", "seconds", "megabytes")
        return pandas.DataFrame(
            [
                {"method": row.method, "seed": seed, **{name: plain[name][place] for name in columns}}
                for row in self.rows
                for plain in [self._plain(row)]
                for place, seed in enumerate(row.seeds)
            ]
        )

    def plot(self, name: str | None = None) -> Figure:
        """A matplotlib figure of the methods, with bands over seeds; ``name`` as for `Run.plot`."""
        return plot(self.measure.name if name is None else name, self._groups())

    def report(self, path: str | Path | None = None) -> Path:
        """Write the comparison's page, one HTML file, and return its path.

        By default it is ``report.html`` in the comparison's directory, or in a temporary one for one without.
        """
        directory = self.paths[0].parent.parent if self.paths else None
        page = report_html(self.stored_runs(), self._groups())
        return write_page(page, default_page(directory) if path is None else path)

    def stored_runs(self) -> list[StoredRun]:
        """The runs in the form that figures and tables use."""
        return [run for of_one in self.runs.values() for run in of_one]

    def _groups(self) -> list[RunGroup]:
        return [RunGroup(label, runs, colour) for colour, (label, runs) in enumerate(self.runs.items())]


def _scores(run: StoredRun, measure: Measure) -> FloatArray:
    """The metric in every tested round, negative where less is better."""
    return measure.sign * run.curve(measure.name)[1]


def _forgetting(run: StoredRun, by_class: Measure) -> float:
    """The forgetting of what is measured by class; NaN with fewer than two tests."""
    key = f"class_{by_class.name}"
    scores = [record[key] for record in run.records if record.get(key) is not None]
    if len(scores) < 2:
        return float("nan")
    return metrics.backward_transfer_forgetting(by_class.sign * np.array(scores, float))


def _row(
    label: str,
    runs: Sequence[StoredRun],
    target: float,
    first: MethodSummary | None,
    measure: Measure,
    by_class: Measure,
) -> MethodSummary:
    score = [run.last(measure.name) for run in runs]
    difference, p_value = (None, None) if first is None else metrics.paired_test(score, first.score)
    return MethodSummary(
        method=label,
        seeds=[run.seed for run in runs],
        score=score,
        forgetting=[_forgetting(run, by_class) for run in runs],
        rounds_to_target=[
            metrics.rounds_to_target(
                _scores(run, measure), measure.sign * target, run.curve(measure.name)[0].astype(int).tolist()
            )
            for run in runs
        ],
        seconds=[sum(r["seconds"]["total"] for r in run.records) for run in runs],
        megabytes=[sum(r["bytes_up"] + r["bytes_down"] for r in run.records) / 1e6 for run in runs],
        difference=difference,
        p_value=p_value,
    )


def _digits(measure: Measure) -> int:
    return 2 if measure.is_share else 4


def _rounds(rounds: Sequence[int | None]) -> str:
    """Rounds to the target: ``14 ± 1``; ``15 (2/3)`` if two of three seeds reach it; a dash if none does."""
    reached = [one for one in rounds if one is not None]
    share = f" ({len(reached)}/{len(rounds)})" if 0 < len(reached) < len(rounds) else ""
    return _mean(reached, digits=0) + share


def _mean(values: Sequence[float], digits: int = 2) -> str:
    """``87.31 ± 0.42``; a dash if any value is unknown."""
    unknown = any(math.isnan(value) for value in values)
    return UNKNOWN if unknown else format_mean(*mean_and_deviation(values), digits)
