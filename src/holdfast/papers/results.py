"""Runs that were made, stored as results/PAPER/TABLE.json: one line of JSON for each cell."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from holdfast import metrics
from holdfast.core import files, locks
from holdfast.core.errors import HoldfastError
from holdfast.core.settings import with_current_names
from holdfast.papers.cells import Cell, hash_of, plan
from holdfast.papers.measures import Entry
from holdfast.papers.published import Table, TableColumn
from holdfast.runs import RunDirectory
from holdfast.runs.metrics_file import plain

DIGITS = 4  # of what is stored: a hundredth of a percent
QUANTILES = 100  # of the distribution of local forgetting
MOST_SEEDS = 10  # looked for in the results of a cell
TOLD = {"column", "row", "seed", "hash", "settings", "device_type", "seconds"}  # of every run


class Results:
    """The runs in a directory of results, by the hash of their settings.

    A cell finds its run whichever table it was made for. ``refresh`` reads what other processes added.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        if self.root.exists() and not self.root.is_dir():
            raise HoldfastError(f"{root} is a file; results are kept in a folder")
        self._read: dict[Path, tuple[int, dict[str, Entry]]] = {}
        self.refresh()

    def refresh(self) -> None:
        """Read the files that changed."""
        for path in sorted(self.root.glob("*/*.json")):
            changed = path.stat().st_mtime_ns
            if path not in self._read or self._read[path][0] != changed:
                self._read[path] = (changed, {entry["hash"]: entry for entry in _load(path)})

    def get(self, cell: Cell) -> Entry | None:
        """The run of a cell, or None."""
        return next((found[cell.hash] for _, found in self._read.values() if cell.hash in found), None)

    def all(self) -> list[Entry]:
        """Every run."""
        return [entry for _, found in self._read.values() for entry in found.values()]

    def check_room(self) -> None:
        """Refuse a folder in which nothing can be stored, before there is anything to store."""
        with files.writing(self.root):
            self.root.mkdir(parents=True, exist_ok=True)
            for folder in (self.root, *filter(Path.is_dir, self.root.iterdir())):
                with tempfile.TemporaryFile(dir=folder) as file:
                    file.write(b"room")

    def of_table(
        self, table: Table, columns: Collection[str] | None = None, rows: Collection[str] | None = None
    ) -> list[Cell]:
        """The cells of one seed, and those of further seeds that were run.

        Of a column that is about certain seeds, as of a released notebook, those alone.
        """
        cells = plan(table, columns, rows, seeds=MOST_SEEDS)
        first = {(cell.column, cell.row): cell for cell in reversed(cells)}
        return [
            cell
            for cell in cells
            if first[cell.column, cell.row] is cell
            or (self.get(cell) is not None and _belongs(cell, table.columns[cell.column]))
        ]

    def add(self, cell: Cell, entry: Mapping[str, Any]) -> None:
        """Store the run of a cell in the file of its table, which several processes may do at once."""
        path = self.root / f"{cell.table}.json"
        with files.writing(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
        with locks.hold(self.root / ".lock"):
            kept = [old for old in _load(path) if old["hash"] != cell.hash] if path.exists() else []
            entries = sorted([*kept, entry], key=lambda e: (e["column"], e["row"], e["seed"]))
            files.replace(path, _dump(cell.table, entries))
        self.refresh()


def entry_of(cell: Cell, directory: RunDirectory, beside: int = 1) -> dict[str, Any]:
    """What is stored of a finished run: settings, where it ran and ``beside`` how many, its curves, its last state."""
    experiment, records = directory.experiment, directory.records()
    tested = [record for record in records if "accuracy" in record]
    by_class = np.array([record["class_accuracy"] for record in tested], float)
    entry = _head(cell, experiment, records, beside)
    return entry | {
        "final": _rounded(_final(tested, by_class)),
        "curves": _rounded(_curves(tested, records)),
    }


def failure_of(cell: Cell, directory: RunDirectory, beside: int, reason: str) -> dict[str, Any]:
    """What is stored of a run that broke down in training, as by divergence."""
    return _head(cell, directory.experiment, directory.records(), beside) | {"failed": reason}


def _head(
    cell: Cell, experiment: Mapping[str, Any], records: Sequence[Mapping[str, Any]], beside: int
) -> dict[str, Any]:
    return {
        "column": cell.column,
        "row": cell.row,
        "seed": cell.seed,
        "hash": cell.hash,
        "settings": dict(cell.settings),
        "federation": experiment["hash"],
        "versions": experiment["versions"],
        "device": experiment["machine"],
        "device_type": experiment["device"],
        "engine": experiment["engine"],
        "rounds": len(records),
        "seconds": round(sum(record["seconds"]["total"] for record in records), 1),
        "beside": beside,
    }


def _final(tested: Sequence[Mapping[str, Any]], by_class: np.ndarray) -> dict[str, Any]:
    last = tested[-1]
    final: dict[str, Any] = {"accuracy": last["accuracy"], "class_accuracy": last["class_accuracy"]}
    if len(tested) > 1:
        final["forgetting"] = metrics.backward_transfer_forgetting(by_class)
    if "domain_accuracy" in last:
        final["domain_accuracy"] = last["domain_accuracy"]
    alignment = last.get("probe", {}).get("alignment", {})
    return final | {f"alignment_{which}": value for which, value in alignment.items()}


def _curves(tested: Sequence[Mapping[str, Any]], records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    curves: dict[str, Any] = {
        "accuracy": [record["accuracy"] for record in tested],
        "forgetting": [record.get("forgetting") for record in tested],
    }
    if "domain_accuracy" in tested[-1]:
        curves["domain_accuracy"] = [np.mean(list(record["domain_accuracy"].values())) for record in tested]
    local = [value for record in records for value in record.get("local_forgetting", ())]
    if local:
        curves["local_forgetting_quantiles"] = np.quantile(local, np.linspace(0, 1, QUANTILES + 1)).tolist()
    # A global epoch ends with its last stage; what was measured there is what FedMLP's tables average.
    last_stage = max(record["stage"] for record in records)
    ends = [record for record in records if record.get("stream") and record["stage"] == last_stage]
    for name, value in ends[-1]["stream"].items() if ends else ():
        if isinstance(value, float):
            curves[name] = [record["stream"].get(name) for record in ends]
    return curves


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(item) for item in value]
    return round(float(value), DIGITS) if isinstance(value, (float, np.floating)) else value


def _belongs(cell: Cell, column: TableColumn) -> bool:
    return not column.own_seeds or cell.seed in column.seeds.value


def _load(path: Path) -> list[Entry]:
    with files.reading(path):
        data = path.read_bytes()
    try:
        entries = [_with_current_names(entry) for entry in json.loads(data)["cells"]]
        whole = all(entry.keys() >= TOLD and ("failed" in entry or "curves" in entry) for entry in entries)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise HoldfastError(f"{path} is damaged: it does not hold results ({error})") from error
    if not whole:
        raise HoldfastError(f"{path} is damaged: a run in it lacks what every run has")
    return entries


def _with_current_names(entry: Entry) -> Entry:
    """An entry written by any version, as this one writes it.

    The hash covers the names of the settings, so it is computed anew.
    """
    settings = with_current_names(entry["settings"])
    return with_current_names(entry) | {"settings": settings, "hash": hash_of(settings, entry["seed"])}


def _dump(table: str, entries: Sequence[Mapping[str, Any]]) -> bytes:
    """One cell a line, so that a difference between two versions shows which."""
    lines = ",\n".join(json.dumps(plain(entry), ensure_ascii=False) for entry in entries)
    return f'{{"table": {json.dumps(table)}, "cells": [\n{lines}\n]}}\n'.encode()
