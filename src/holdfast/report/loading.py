"""Run directories as arrays, for figures and tables; every key of a record is optional."""

import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from os import PathLike
from os.path import commonpath
from pathlib import Path, PurePath
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from holdfast.core import files
from holdfast.core.errors import HoldfastError, HoldfastWarning
from holdfast.core.measures import Measure, measures
from holdfast.core.schema import validate_content
from holdfast.core.settings import MACHINE_SETTINGS, RECORDED
from holdfast.core.spec import named
from holdfast.metrics.arrays import FloatArray
from holdfast.runs import RunDirectory, list_runs
from holdfast.runs.comparison import is_baseline
from holdfast.runs.consistency import check_federation, check_probe, check_records
from holdfast.runs.directory import EXPERIMENT, FEDERATION, METRICS, PROBE, read_verified
from holdfast.runs.schemas import StoredFederation, StoredProbe

UNGROUPED_SETTINGS = frozenset({"name", "seed", "partition_seed", *RECORDED, *MACHINE_SETTINGS})
"""Entries of an experiment in which two runs of one group may differ."""

# Settings that make accuracies incomparable where they differ.
COMPARABILITY_SETTINGS = ("data", "partition", "stream", "long_tail", "skew")
MAX_LABEL_SETTINGS = 4


class InMemory(Protocol):
    """A result of training that contains runs."""

    def stored_runs(self) -> "Sequence[StoredRun]":
        """The runs, as read from their directories."""


Given = Path | str | InMemory
"""A run directory, a directory of such, or a result of training."""

Curve = tuple[FloatArray, FloatArray]
"""Rounds and values, each [n]."""


@dataclass(frozen=True, eq=False)
class StoredRun:
    """One run as read from its directory; T evaluated rounds, C classes, K participants of a round."""

    name: str
    experiment: Mapping[str, Any]
    records: Sequence[Mapping[str, Any]]
    federation: Mapping[str, Any]
    probe: Mapping[str, Any]
    is_baseline: bool  # whether it is a run of the comparison's baseline

    @classmethod
    def of_directory(
        cls, path: Path, name: str, experiment: Mapping[str, Any], records: Sequence[Mapping[str, Any]]
    ) -> "StoredRun":
        """A run with the other content of its directory besides the experiment and the records."""
        federation, probe = read_federation(path), read_probe(path)
        names = experiment.get("classes") or federation.get("classes")
        classes = check_records(path / METRICS, records, len(names) if names else None)
        check_federation(path / FEDERATION, federation, classes)
        check_probe(path / PROBE, probe, classes)
        return cls(
            name=name,
            experiment=experiment,
            records=records,
            federation=federation,
            probe=probe,
            is_baseline=is_baseline(path),
        )

    @property
    def seed(self) -> Any:
        """The run's seed, or None where the experiment has none."""
        return self.experiment.get("seed")

    @property
    def method(self) -> str:
        """The method's name; the parts of a stack are joined with a plus."""
        return _name_of(self.experiment.get("method"))

    @property
    def dataset(self) -> str:
        """The data set's name; for a file or a folder, the last part of its path."""
        return PurePath(_name_of(self.experiment.get("data"))).name

    @cached_property
    def measures(self) -> list[Measure]:
        """The run's metrics, the primary one first.

        A run without a test set has them on the clients' validation samples.
        """
        tested = measures(self.experiment)
        validated = [measure.on_validation for measure in tested]
        without_tests = not any(self.curve(measure.name)[0].size for measure in tested)
        on_validation = without_tests and self.curve(validated[0].name)[0].size
        return validated if on_validation else tested

    @cached_property
    def evaluated(self) -> Sequence[Mapping[str, Any]]:
        """The records of the rounds after which the global model was tested."""
        return [record for record in self.records if record.get("class_accuracy") is not None]

    @cached_property
    def rounds(self) -> FloatArray:
        """The evaluated rounds' numbers [T]."""
        return np.array([record["round"] for record in self.evaluated], dtype=np.float64)

    @cached_property
    def class_accuracy(self) -> FloatArray:
        """The global model's accuracy per class [T, C], NaN for a class without test samples."""
        return matrix([record["class_accuracy"] for record in self.evaluated])

    @cached_property
    def classes(self) -> list[str]:
        """The classes' names, or their numbers where no names are stored [C]."""
        names = self.experiment.get("classes") or self.federation.get("classes")
        if names:
            return [str(name) for name in names]
        return [str(number) for number in range(self.class_accuracy.shape[1])]

    @cached_property
    def label_counts(self) -> NDArray[np.int64] | None:
        """Samples per stage, client and class [stages, clients, C], or None where no federation is stored."""
        counts = self.federation.get("label_counts")
        if not counts:
            return None
        array = np.asarray(counts, dtype=np.int64)
        return array[None] if array.ndim == 2 else array

    def counts_of(self, record: Mapping[str, Any]) -> NDArray[np.int64] | None:
        """Samples per participant and class in a record's round [K, C], or None where they are unknown."""
        if self.label_counts is None or "participants" not in record:
            return None
        stage = min(int(record.get("stage") or 0), len(self.label_counts) - 1)
        clients = np.asarray(record["participants"], dtype=np.intp)
        if clients.size and clients.max() >= self.label_counts.shape[1]:
            return None
        counts: NDArray[np.int64] = self.label_counts[stage, clients]
        return counts

    def curve(self, key: str) -> Curve:
        """Rounds and values of a recorded number, of a list its mean; ``probe.x`` is x inside of probe."""
        if key not in self._curves:
            pairs = ((record["round"], _number(_nested(record, key))) for record in self.records)
            self._curves[key] = columns((x, y) for x, y in pairs if y is not None)
        return self._curves[key]

    @cached_property
    def _curves(self) -> dict[str, Curve]:
        """Curves by key: the table and several figures use the same ones."""
        return {}

    def last(self, key: str) -> float:
        """The last value of a curve, NaN where nothing was recorded."""
        return self.mean_of_last(key, 1)

    def mean_of_last(self, key: str, count: int = 10) -> float:
        """The mean of the last values of a curve, NaN where nothing was recorded."""
        values = self.curve(key)[1]
        return float(values[-count:].mean()) if values.size else np.nan

    def lists(self, key: str) -> list[tuple[float, FloatArray]]:
        """(round, values [K]) for every round that recorded a list under ``key``."""
        found = ((record["round"], _nested(record, key)) for record in self.records)
        return [(float(x), vector(values)) for x, values in found if isinstance(values, list) and values]

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The settings that distinguish experiments, flattened: ``{"method.beta": 1.0, …}``."""
        kept = {key: value for key, value in self.experiment.items() if key not in UNGROUPED_SETTINGS}
        flat = {key: value for key, value in _flattened(kept, "") if value is not None}
        return {key: value for key, value in flat.items() if not key.endswith((".seed", ".hash"))}


def common_measures(groups: Sequence["RunGroup"]) -> list[Measure]:
    """The metrics of all runs, the primary one first.

    If the primary metrics of the runs differ, it is accuracy, or the first run's metric if no run has an accuracy.
    """
    runs = [run for group in groups for run in group.runs]
    known = list(dict.fromkeys(measure for run in runs for measure in run.measures))
    accuracy = Measure("accuracy")
    several = len({run.measures[0] for run in runs}) > 1
    first = accuracy if several and accuracy in known else runs[0].measures[0]
    return list(dict.fromkeys([first, *known]))


@dataclass(frozen=True, eq=False)
class RunGroup:
    """Runs that differ only in their seed: one curve with a band, one row of a table."""

    label: str
    runs: Sequence[StoredRun]
    colour: int


def load_run(path: Path) -> StoredRun:
    """Read a run directory; a run without a finished round is an error."""
    directory = RunDirectory.open(path)
    run = StoredRun.of_directory(path, path.resolve().name, directory.experiment, directory.records())
    if not run.records:
        raise HoldfastError(f"{path} has no finished round yet; wait for its first round, or leave it out")
    return run


def load_runs(given: Given | Sequence[Given]) -> list[StoredRun]:
    """The runs of results of training, of run directories and below other directories; an empty list is an error."""
    several = given if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    if not several:
        raise HoldfastError("no run given; name at least one run directory, for example runs/fedavg")
    found: dict[Path | int, StoredRun] = {}  # by its directory, or a number
    for one in several:
        if isinstance(one, str | PathLike):
            found |= {place.resolve(): run for place, run in _runs_at(Path(one))}
        elif hasattr(one, "stored_runs"):
            found |= dict(enumerate(one.stored_runs(), len(found)))
        else:
            raise HoldfastError(
                f"{named(one)} is not a run; pass the result of train or compare, or the path of a run "
                "directory"
            )
    if places := [place.parent for place in found if isinstance(place, Path)]:
        common = commonpath(places)
    # The runs of a comparison are all called seed-0, seed-1, …: the parent directories distinguish them.
    return [
        replace(run, name=place.relative_to(common).as_posix()) if isinstance(place, Path) else run
        for place, run in found.items()
    ]


def _runs_at(path: Path) -> list[tuple[Path, StoredRun]]:
    """The run in a directory, or those below it that have a round; damaged ones among several are left out."""
    if any((path / name).exists() for name in (EXPERIMENT, METRICS)):
        return [(path, load_run(path))]
    loaded, damaged = [], []
    for summary in sorted(list_runs(path), key=lambda summary: summary.path):
        if summary.rounds or summary.state == "corrupt":
            try:
                loaded.append((summary.path, load_run(summary.path)))
            except HoldfastError as error:
                damaged.append(f"{summary.path} is left out: {error}")
    if not loaded:
        raise HoldfastError(damaged[0] if damaged else f"{path} holds no run with a finished round")
    for sentence in damaged:
        warnings.warn(sentence, HoldfastWarning, stacklevel=3)
    return loaded


def read_federation(run: Path) -> dict[str, Any]:
    """The content of a run's federation.json; empty without one."""
    return _read_optional(run / FEDERATION, StoredFederation)


def read_probe(run: Path) -> dict[str, Any]:
    """The content of a run's probe.json; empty without one."""
    return _read_optional(run / PROBE, StoredProbe)


def _read_optional(path: Path, schema: Any) -> dict[str, Any]:
    """An optional JSON file of a run; empty where it does not exist."""
    if not path.exists():
        return {}

    def parse(data: bytes) -> dict[str, Any]:
        content: dict[str, Any] = files.parse_json(data, path)
        validate_content(content, schema, path)
        return content

    return read_verified(path, parse)


def group_runs(runs: Sequence[StoredRun]) -> list[RunGroup]:
    """Group the runs of one experiment, in the order given, labelled by method and other differences."""
    members: dict[str, list[StoredRun]] = {}
    for run in runs:
        members.setdefault(json.dumps(run.settings, sort_keys=True, default=str), []).append(run)
    groups = list(members.values())
    labels = _labels([group[0] for group in groups])
    return [
        RunGroup(label, group, colour)
        for colour, (label, group) in enumerate(zip(labels, groups, strict=True))
    ]


def _labels(runs: Sequence[StoredRun]) -> list[str]:
    """The methods' names, with the settings in which runs of one method differ and those of different data."""
    data_settings = [key for key in _differing(runs) if key.startswith(COMPARABILITY_SETTINGS)]
    labels = []
    for run in runs:
        keys = {*data_settings, *_differing([other for other in runs if other.method == run.method])}
        shown = sorted(keys)[:MAX_LABEL_SETTINGS]
        settings = ", ".join(f"{_short(key)}={run.settings.get(key)}" for key in shown)
        labels.append(f"{run.method} ({settings})" if settings else run.method)
    return labels


def _differing(runs: Sequence[StoredRun]) -> list[str]:
    keys = sorted({key for run in runs for key in run.settings})
    return [key for key in keys if len({repr(run.settings.get(key)) for run in runs}) > 1]


def _short(key: str) -> str:
    """The last part of a flattened key; of ``data.name``, the part before."""
    head, _, last = key.rpartition(".")
    return head.rpartition(".")[2] if last == "name" and head else last


def _name_of(part: Any) -> str:
    """The name of a stored method or data set: a text, a mapping with a name or with parts, a list of parts."""
    if isinstance(part, Mapping):
        parts = part.get("parts")
        return _name_of(part["name"]) if "name" in part else _name_of(parts) if parts else "unnamed"
    if isinstance(part, list):
        return "+".join(_name_of(one) for one in part)
    return "unnamed" if part is None else str(part)


def _flattened(value: Any, prefix: str) -> Iterable[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flattened(inner, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value


def _nested(record: Mapping[str, Any], key: str) -> Any:
    value: Any = record
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _number(value: Any) -> float | None:
    if isinstance(value, list):
        return mean_of_numbers(value)
    return None if value is None else float(value)


def mean_of_numbers(values: Sequence[Any]) -> float | None:
    """The mean of the numbers in a recorded list, without its nulls; None where there is no number."""
    known = [value for value in values if isinstance(value, int | float)]
    return sum(known) / len(known) if known else None


def vector(values: Sequence[float | None]) -> FloatArray:
    """A recorded list as an array, null as NaN."""
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def matrix(rows: Sequence[Sequence[float | None]]) -> FloatArray:
    """Recorded lists of one length as an array [rows, columns], null as NaN."""
    return np.array([vector(row) for row in rows]) if rows else np.zeros((0, 0))


def columns(pairs: Iterable[tuple[float, float]]) -> Curve:
    """Pairs as two arrays."""
    table = np.array(list(pairs), dtype=np.float64).reshape(-1, 2)
    return table[:, 0], table[:, 1]
