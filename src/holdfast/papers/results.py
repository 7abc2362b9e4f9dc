"""Stored results: results/PAPER/TABLE.json has one line of JSON for each run of a table."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Required, TypedDict

import numpy as np

from holdfast import metrics
from holdfast.core import files, locks
from holdfast.core.errors import HoldfastError
from holdfast.core.schema import validate_content
from holdfast.core.settings import with_current_names
from holdfast.papers.cells import Cell, hash_of, plan
from holdfast.papers.measures import Entry
from holdfast.papers.published import PaperTable, TableColumn
from holdfast.papers.recorded_curves import record_curves
from holdfast.report.loading import read_federation
from holdfast.runs import RunDirectory
from holdfast.runs.metrics_file import plain
from holdfast.tasks.registry import as_task

DIGITS = 4  # decimals of stored numbers: a hundredth of a percent
QUANTILES = 100  # of the distribution of local forgetting
MAX_SEEDS = 10  # of a cell that are looked up


class Results:
    """The stored runs in a directory, by the hash of their settings.

    A cell finds its run whichever table the run was made for. ``refresh`` reads what other processes have added.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        if self.root.exists() and not self.root.is_dir():
            raise HoldfastError(f"{root} is a file; results are kept in a folder")
        self._files: dict[Path, tuple[int, dict[str, Entry]]] = {}  # modification time and entries by hash
        self.refresh()

    def refresh(self) -> None:
        """Read the files that have changed."""
        for path in sorted(self.root.glob("*/*.json")):
            modified = path.stat().st_mtime_ns
            if path not in self._files or self._files[path][0] != modified:
                self._files[path] = (modified, {entry["hash"]: entry for entry in _load(path)})

    def get(self, cell: Cell) -> Entry | None:
        """The stored run of a cell, if there is one that has the cell's curves; of several that with no others."""
        stored = (entries[cell.hash] for _, entries in self._files.values() if cell.hash in entries)
        usable = [entry for entry in stored if "failed" in entry or _has_curves(entry, cell)]
        return min(usable, key=lambda entry: len(entry.get("curves", ())), default=None)

    def all(self) -> list[Entry]:
        return [entry for _, entries in self._files.values() for entry in entries.values()]

    def check_writable(self) -> None:
        """Raise ``HoldfastError`` if results cannot be stored, because of missing rights or a full disk."""
        with files.writing(self.root):
            self.root.mkdir(parents=True, exist_ok=True)
            for folder in (self.root, *filter(Path.is_dir, self.root.iterdir())):
                with tempfile.TemporaryFile(dir=folder) as file:
                    file.write(b"test")

    def of_table(
        self, table: PaperTable, columns: Collection[str] | None = None, rows: Collection[str] | None = None
    ) -> list[Cell]:
        """The cells of a table for the first seed, and those for further seeds that have been run.

        A column with fixed seeds has no cells for other seeds.
        """
        cells = plan(table, columns, rows, seeds=MAX_SEEDS)
        first = {(cell.column, cell.row): cell for cell in reversed(cells)}
        return [
            cell
            for cell in cells
            if first[cell.column, cell.row] is cell
            or (self.get(cell) is not None and _has_seed(table.columns[cell.column], cell.seed))
        ]

    def add(self, cell: Cell, entry: Entry) -> None:
        """Store the run of a cell in the file of its table. Several processes may do so at the same time."""
        path = self.root / f"{cell.table}.json"
        with files.writing(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
        with locks.hold(self.root / ".lock"):
            others = [old for old in _load(path) if old["hash"] != cell.hash] if path.exists() else []
            entries = sorted([*others, entry], key=lambda e: (e["column"], e["row"], e["seed"]))
            files.replace(path, _dump(cell.table, entries))
        self.refresh()


def completed_entry(cell: Cell, directory: RunDirectory, processes: int = 1) -> dict[str, Any]:
    """The stored entry of a completed run: settings, environment, curves and final state.

    ``processes`` is the number of processes that shared the device.
    """
    records, score = directory.records(), as_task(directory.experiment["task"]).score
    tested = [record for record in records if score in record]
    entry = _common_entry(cell, directory.experiment, records, processes) | {
        "final": _rounded(_final(tested, score)),
        "curves": _rounded(_curves(tested, records, score)),
    }
    entry["curves"] |= _rounded(record_curves(cell.curves, records, read_federation(directory.path)))
    local = cell.settings["method"] == "local"
    if local:  # there is no global model that local ones could forget
        entry["curves"].pop("local_forgetting_quantiles", None)
    sites = [_by_site(record, score, local) for record in tested]
    if sites[-1]:
        entry["final"]["sites"] = _rounded(sites[-1])
        entry["curves"]["site_mean"] = _rounded([float(np.mean(list(one.values()))) for one in sites])
        if "locals" in tested[-1]:
            entry["final"]["own_site"] = round(_own_site(tested[-1], score), DIGITS)
    return entry | ({} if score == "accuracy" else {"score": score})


def failed_entry(cell: Cell, directory: RunDirectory, processes: int, reason: str) -> dict[str, Any]:
    """The stored entry of a run whose training failed, for example by divergence."""
    return _common_entry(cell, directory.experiment, directory.records(), processes) | {"failed": reason}


def _common_entry(
    cell: Cell, experiment: Mapping[str, Any], records: Sequence[Mapping[str, Any]], processes: int
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
        "beside": processes,
    }


def _final(tested: Sequence[Mapping[str, Any]], score: str) -> dict[str, Any]:
    last = tested[-1]
    final: dict[str, Any] = {name: last[name] for name in (score, f"class_{score}")}
    if len(tested) > 1:
        by_class = np.array([record[f"class_{score}"] for record in tested], float)
        final["forgetting"] = metrics.backward_transfer_forgetting(by_class)
    if "domain_accuracy" in last:
        final["domain_accuracy"] = last["domain_accuracy"]
    alignment = last.get("probe", {}).get("alignment", {})
    return final | {f"alignment_{which}": value for which, value in alignment.items()}


def _by_site(record: Mapping[str, Any], score: str, local: bool) -> dict[str, float]:
    """The score at each site: of the global model, or of ``local`` training the mean over the clients' models."""
    if local:
        return {site: float(np.mean(values)) for site, values in record["locals"][f"site_{score}"].items()}
    return dict(record.get(f"site_{score}", {}))


def _own_site(record: Mapping[str, Any], score: str) -> float:
    """The mean score of the local models at their own sites, where every site is a client."""
    sites = list(record["locals"][f"site_{score}"].values())
    return float(np.mean([sites[client][place] for place, client in enumerate(record["participants"])]))


def _curves(
    tested: Sequence[Mapping[str, Any]], records: Sequence[Mapping[str, Any]], score: str
) -> dict[str, Any]:
    curves: dict[str, Any] = {
        score: [record[score] for record in tested],
        "forgetting": [record.get("forgetting") for record in tested],
    }
    if "domain_accuracy" in tested[-1]:
        curves["domain_accuracy"] = [np.mean(list(record["domain_accuracy"].values())) for record in tested]
    local = [value for record in records for value in record.get("local_forgetting", ())]
    if local:
        curves["local_forgetting_quantiles"] = np.quantile(local, np.linspace(0, 1, QUANTILES + 1)).tolist()
    # FedMLP's tables average what is measured at the end of a global epoch, which is its last stage.
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


def _has_curves(entry: Entry, cell: Cell) -> bool:
    return all(name in entry["curves"] for name in cell.curves)


def _has_seed(column: TableColumn, seed: int) -> bool:
    return not column.fixed_seeds or seed in column.seeds.value


class _StoredCell(TypedDict, total=False):
    """A run in a file: a failed one, or one with curves and final values."""

    column: Required[str]
    row: Required[str]
    seed: Required[int]
    hash: Required[str]
    settings: Required[dict[str, Any]]
    device_type: Required[str]
    seconds: Required[float]
    score: str
    failed: str
    final: dict[str, Any]
    curves: dict[str, list[float | list[float | None] | None]]


class _StoredTable(TypedDict):
    """The content of a file."""

    cells: list[_StoredCell]


NUMBERS = ("forgetting", "own_site", "alignment_local", "alignment_global")


def _load(path: Path) -> list[Entry]:
    content = files.read_json(path)
    validate_content(content, _StoredTable, path)
    entries = [_with_current_names(entry) for entry in content["cells"]]
    for entry in entries:
        if "failed" not in entry:
            _check_complete(entry, path)
    return entries


def _check_complete(entry: Entry, path: Path) -> None:
    """Raise if a run has no curve of its score, or final values of another kind."""
    curves, final = entry.get("curves", {}), entry.get("final", {})
    score = next(
        (name for name in ("domain_accuracy", "site_mean") if name in curves), entry.get("score", "accuracy")
    )
    numbers = [final[key] for key in NUMBERS if key in final]
    if not curves.get(score) or not final:
        raise HoldfastError(f"{path} is damaged: the entry of a run is incomplete; restore it from a copy")
    for schema, values in ((list[float], curves[score]), (list[float | None], numbers)):
        validate_content(values, schema, path)
    validate_content(final.get("sites", {}), dict[str, float | None], path)


def _with_current_names(entry: Entry) -> Entry:
    """An entry of any version under the current names of settings, and with the hash that follows from them."""
    settings = with_current_names(entry["settings"])
    return with_current_names(entry) | {"settings": settings, "hash": hash_of(settings, entry["seed"])}


def _dump(table: str, entries: Sequence[Entry]) -> bytes:
    """JSON with one line for each run, so that diffs are readable."""
    lines = ",\n".join(json.dumps(plain(entry), ensure_ascii=False) for entry in entries)
    return f'{{"table": {json.dumps(table)}, "cells": [\n{lines}\n]}}\n'.encode()
