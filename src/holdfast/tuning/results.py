"""Stored results of short runs: FOLDER/NAME.json has one line of JSON for each run, whole or up to a round."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Required, TypedDict

import numpy as np

from holdfast import metrics
from holdfast.core import files, locks
from holdfast.core.errors import HoldfastError
from holdfast.core.measures import Measure, primary_measure, score_measure
from holdfast.core.schema import validate_content
from holdfast.runs import RunDirectory
from holdfast.runs.metrics_file import plain

DIGITS = 5  # decimals of stored numbers
LAST_ROUNDS = 10  # rounds over which a score is averaged, since accuracy fluctuates between rounds
LAST_SHARE = 4  # and at most this part of the rounds, a quarter, so that scores of early rungs exclude the first rounds

Entry = Mapping[str, Any]
"""A stored run."""


class StoredRuns:
    """The stored runs in a folder, by their hash; ``refresh`` reads what other processes have added."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if self.folder.exists() and not self.folder.is_dir():
            raise HoldfastError(f"{folder} is a file; results are kept in a folder")
        self._files: dict[Path, tuple[int, dict[str, Entry]]] = {}  # modification time and entries by hash
        self.refresh()

    def refresh(self) -> None:
        """Read the files that have changed."""
        for path in sorted(self.folder.glob("*.json")):
            modified = path.stat().st_mtime_ns
            if path not in self._files or self._files[path][0] != modified:
                self._files[path] = (modified, {entry["hash"]: entry for entry in _load(path)})

    def get(self, hash: str) -> Entry | None:
        """The stored run with this hash, if there is one."""
        return next((entries[hash] for _, entries in self._files.values() if hash in entries), None)

    def of(self, name: str) -> list[Entry]:
        """All runs in one file."""
        _, entries = self._files.get(self.folder / f"{name}.json", (0, {}))
        return list(entries.values())

    def add(self, name: str, entry: Entry) -> None:
        """Store a run in one file. Several processes may do so at the same time."""
        path = self.folder / f"{name}.json"
        with files.writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        with locks.hold(self.folder / ".lock"):
            others = [old for old in _load(path) if old["hash"] != entry["hash"]] if path.exists() else []
            lines = ",\n".join(json.dumps(plain(each), ensure_ascii=False) for each in [*others, entry])
            files.replace(path, f'{{"runs": [\n{lines}\n]}}\n'.encode())
        self.refresh()


class _StoredRun(TypedDict, total=False):
    """A run in a file. ``tested`` are the rounds of ``curve``; a run whose training diverged has neither."""

    hash: Required[str]
    rounds: Required[int]
    measure: Required[str]
    less_is_better: Required[bool]
    seconds: Required[float]
    bytes_up: Required[int]
    bytes_down: Required[int]
    tested: list[int]
    curve: list[float]
    forgetting: float | None
    failed: str


class _StoredRuns(TypedDict):
    """The content of a file."""

    runs: list[_StoredRun]


def _load(path: Path) -> list[Entry]:
    content = files.read_json(path)
    validate_content(content, _StoredRuns, path)
    runs: list[Entry] = content["runs"]
    for run in runs:
        lengths = {len(run.get(key, ())) for key in ("tested", "curve")}
        if "failed" not in run and (len(lengths) > 1 or lengths == {0}):
            raise HoldfastError(
                f"{path} is damaged: a run has no value for each tested round; restore the file from a copy"
            )
    return runs


def completed(directory: RunDirectory, rounds: int) -> dict[str, Any]:
    """The stored entry of a run up to a round: the curve of its primary metric, forgetting, costs and environment."""
    experiment, records = directory.experiment, directory.records()[:rounds]
    measure = primary_measure(experiment)
    by_class = f"class_{score_measure(experiment).name}"
    tested = [record for record in records if record.get(measure.name) is not None]
    classes = np.array([record[by_class] for record in tested if record.get(by_class) is not None], float)
    sign = score_measure(experiment).sign
    forgetting = metrics.backward_transfer_forgetting(sign * classes) if len(classes) > 1 else None
    return _common(experiment, records) | {
        "tested": [record["round"] for record in tested],
        "curve": [round(float(record[measure.name]), DIGITS) for record in tested],
        "forgetting": None if forgetting is None else round(forgetting, DIGITS),
    }


def failed(directory: RunDirectory, reason: str) -> dict[str, Any]:
    """The stored entry of a run whose training diverged."""
    return _common(directory.experiment, directory.records()) | {"failed": reason}


def _common(experiment: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    measure = primary_measure(experiment)
    return {
        "rounds": len(records),
        "measure": measure.name,
        "less_is_better": measure.less_is_better,
        "seconds": round(sum(record["seconds"]["total"] for record in records), 2),
        "bytes_up": sum(record["bytes_up"] for record in records),
        "bytes_down": sum(record["bytes_down"] for record in records),
        "federation": experiment["hash"],
        "engine": experiment["engine"],
        "device_type": experiment["device"],
        "device": experiment["machine"],
        "versions": experiment["versions"],
    }


def measure_of(entry: Entry) -> Measure:
    """The metric of a stored run."""
    return Measure(entry["measure"], entry["less_is_better"])


def last_value(entry: Entry) -> float:
    """The metric after the last round; NaN for a run that failed."""
    return math.nan if "failed" in entry else float(entry["curve"][-1])


def mean_of_last(entry: Entry) -> float:
    """The mean of the metric over the last rounds; NaN for a run that failed.

    These are the last ten, or the last quarter of the rounds if that is fewer; of those that were tested, or else the
    last test before them.
    """
    if "failed" in entry:
        return math.nan
    tested, curve = np.array(entry["tested"]), np.array(entry["curve"])
    rounds = entry["rounds"]
    first = rounds - min(LAST_ROUNDS, math.ceil(rounds / LAST_SHARE))
    within = curve[tested > first]
    return float(within.mean() if len(within) else curve[-1])


def score(entry: Entry) -> float:
    """`mean_of_last`, with the sign for which higher is better; minus infinity for a run that failed."""
    value = measure_of(entry).sign * mean_of_last(entry)
    return value if math.isfinite(value) else -math.inf
