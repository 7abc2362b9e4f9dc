"""Runs that may still be training: read once, then only what was added."""

from collections import OrderedDict
from pathlib import Path
from threading import Lock
from typing import Any

from holdfast.errors import HoldfastError
from holdfast.report.loading import Run, read_json
from holdfast.runs import RunDirectory
from holdfast.runs.directory import EXPERIMENT, METRICS
from holdfast.runs.metrics_file import parse

MOST_KEPT = 64  # runs whose records stay in memory


class LiveRun:
    """A run directory followed while another process writes it; ``version`` grows with every change."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.version = 0
        self._path = path
        self._experiment = RunDirectory.open(path).experiment
        self._records: list[dict[str, Any]] = []
        self._inode, self._offset = 0, 0

    def refresh(self) -> None:
        """Read what was added since the last time; a file that was replaced or cut is read anew."""
        try:
            with open(self._path / METRICS, "rb") as file:
                inode = (self._path / METRICS).stat().st_ino
                if inode != self._inode or file.seek(0, 2) < self._offset:
                    self._inode, self._offset, self._records = inode, 0, []
                    self.version += 1
                file.seek(self._offset)
                added = file.read()
        except FileNotFoundError:
            return
        whole = added[: added.rfind(b"\n") + 1]
        if not whole:
            return
        for line in whole.splitlines():
            record = parse(line)
            if record is None:
                raise HoldfastError(f"{self._path / METRICS} is damaged after round {len(self._records)}")
            self._records.append(record)
        self._offset += len(whole)
        self.version += 1

    def run(self) -> Run:
        """What is known now."""
        return Run(
            name=self.name,
            experiment=self._experiment,
            records=tuple(self._records),
            federation=read_json(self._path / "federation.json"),
            probe=read_json(self._path / "probe.json"),
        )


class LiveRuns:
    """The runs below a root that someone is looking at; safe to use from several threads."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self._kept: OrderedDict[str, LiveRun] = OrderedDict()
        self._lock = Lock()

    def path(self, name: str) -> Path:
        """The directory of a run named as in the list; a name that leads out of the root is refused."""
        is_root = name == self.root.name and (self.root / EXPERIMENT).exists()
        try:
            path = self.root if is_root else (self.root / name).resolve()
            found = path.is_relative_to(self.root) and (path / EXPERIMENT).is_file()
        except (OSError, ValueError):  # a name no file can have
            found = False
        if not found:
            raise HoldfastError(f"there is no run '{name[:200]}' here")
        return path

    def look(self, name: str) -> tuple[int, Run]:
        """A run as it stands, and the version of what was read."""
        with self._lock:
            path = self.path(name)
            live = self._kept.get(name) or LiveRun(name, path)
            live.refresh()
            self._kept[name] = live
            self._kept.move_to_end(name)
            while len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
            return live.version, live.run()
