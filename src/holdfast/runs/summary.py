"""A quick list of the runs in a directory, which reads only the ends of their metrics."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from holdfast.core import locks
from holdfast.core.errors import HoldfastError
from holdfast.core.measures import Measure, primary_measure
from holdfast.runs.directory import EXPERIMENT, LOCK, METRICS, MODEL, read_experiment
from holdfast.runs.metrics_file import newest_first

_DEPTH = 3  # levels below the root; a comparison keeps its runs one or two below its own directory
_LOOK_BACK = 25  # rounds that are searched for the last accuracy


@dataclass(frozen=True)
class RunSummary:
    """A run in a list of runs.

    Attributes:
        name: the path below the listed directory.
        path: the run directory.
        state: running, finished, interrupted or corrupt.
        rounds: completed rounds.
        accuracy: the last value of the run's primary metric, such as its accuracy; None without one.
        measure: that metric.
        method, dataset: their names, None if unknown.
        modified: the time of the last change, in seconds since 1970.
        problem: the error of a corrupt run.
    """

    name: str
    path: Path
    state: Literal["running", "finished", "interrupted", "corrupt"]
    rounds: int
    accuracy: float | None
    measure: Measure
    method: str | None
    dataset: str | None
    modified: float
    problem: str | None = None


def list_runs(root: str | Path) -> list[RunSummary]:
    """The runs in a directory and up to three levels below it, the most recently modified first."""
    root = Path(root)
    if not root.is_dir():
        raise HoldfastError(f"{root} is not a directory; give a directory that contains runs")
    summaries = [_summary(path, _name(path, root)) for path in _run_directories(root, _DEPTH)]
    return sorted(summaries, key=lambda summary: (-summary.modified, summary.name))


def _name(path: Path, root: Path) -> str:
    return str(path.relative_to(root)) if path != root else path.resolve().name


def _run_directories(path: Path, depth: int) -> Iterator[Path]:
    try:
        with os.scandir(path) as scan:
            entries = list(scan)
    except OSError:
        return  # such as a directory of another user
    if any(entry.name in (EXPERIMENT, METRICS) for entry in entries):
        yield path
    elif depth > 0:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
                yield from _run_directories(path / entry.name, depth - 1)


def _summary(path: Path, name: str) -> RunSummary:
    experiment = metrics = None
    rounds, accuracy, method, dataset, problem = 0, None, None, None, None
    measure = primary_measure({})
    try:
        metrics = _stat_or_none(path / METRICS)
        experiment = (path / EXPERIMENT).stat()
        version = experiment.st_mtime_ns, experiment.st_size
        method, dataset, measure = _described(path / EXPERIMENT, *version)
        if metrics:
            rounds, accuracy = _progress(path / METRICS, measure.name)
    except HoldfastError as error:
        problem = str(error)
    except OSError as error:
        problem = f"cannot read {error.filename}: {error.strerror}"
    return RunSummary(
        name=name,
        path=path,
        state="corrupt" if problem else _state(path),
        rounds=rounds,
        accuracy=accuracy,
        measure=measure,
        method=method,
        dataset=dataset,
        modified=max((stat.st_mtime for stat in (experiment, metrics) if stat), default=0.0),
        problem=problem,
    )


def _progress(path: Path, metric: str) -> tuple[int, float | None]:
    """Completed rounds and the last value of a metric; not every round measures one."""
    rounds = 0
    for record in islice(newest_first(path), _LOOK_BACK):
        rounds = max(rounds, record["round"])
        if isinstance(record.get(metric), int | float):
            return rounds, record[metric]
    return rounds, None


def _stat_or_none(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _state(path: Path) -> Literal["running", "finished", "interrupted"]:
    if locks.is_held(path / LOCK):
        return "running"
    return "finished" if (path / MODEL).exists() else "interrupted"


@lru_cache(maxsize=10_000)
def _described(path: Path, modified_ns: int, size: int) -> tuple[str | None, str | None, Measure]:
    """The names of method and data set in an experiment.yaml, and the primary metric; cached for each version."""
    experiment = read_experiment(path)
    method, data = (_part_name(experiment.get(key)) for key in ("method", "data"))
    return method, data, primary_measure(experiment)


def _part_name(part: Any) -> str | None:
    """The name of a part that is written as a string, or as a mapping with its name and settings."""
    name = part.get("name") if isinstance(part, dict) else part
    return None if name is None else str(name)
