"""Runs that may still be training: read once, then only what was added."""

import os
from collections import OrderedDict
from pathlib import Path
from threading import Lock
from typing import Any

from holdfast.core.errors import HoldfastError
from holdfast.report.loading import StoredRun, read_json
from holdfast.runs import RunDirectory
from holdfast.runs.directory import EXPERIMENT, METRICS
from holdfast.runs.metrics_file import parse

MOST_KEPT = 128  # runs whose records stay in memory: more than one page can show
TAIL = 400  # bytes that must still end where reading stopped: a run that was resumed may have grown past it again

Version = tuple[int, ...]  # of what was read of a run: another one means that something changed


class LiveRun:
    """A run directory followed while another process writes it."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self._path = path
        self._made: Version = ()
        self._experiment: dict[str, Any] = {}
        self._records: list[dict[str, Any]] = []
        self._inode, self._offset, self._tail = 0, 0, b""

    @property
    def version(self) -> Version:
        """Which files were read, and how far."""
        return (*self._made, self._inode, self._offset)

    def refresh(self) -> None:
        """Read what was added since the last time; a run made anew or rewound is read from its start."""
        written = (self._path / EXPERIMENT).stat()
        made = (written.st_ino, written.st_mtime_ns)
        if made != self._made:
            self._experiment = RunDirectory.open(self._path).experiment
            self._made = made
            self._start(0)
        try:
            with open(self._path / METRICS, "rb") as file:
                inode = os.fstat(file.fileno()).st_ino
                file.seek(self._offset - len(self._tail))
                if inode != self._inode or file.read(len(self._tail)) != self._tail:
                    self._start(inode)
                file.seek(self._offset)
                added = file.read()
        except FileNotFoundError:
            return
        whole = added[: added.rfind(b"\n") + 1]
        records = [parse(line) for line in whole.splitlines()]
        if None in records:
            place = len(self._records) + records.index(None)
            raise HoldfastError(f"{self._path / METRICS} is damaged after round {place}")
        self._records += [record for record in records if record is not None]
        self._offset += len(whole)
        self._tail = (self._tail + whole)[-TAIL:]

    def _start(self, inode: int) -> None:
        self._inode, self._offset, self._tail, self._records = inode, 0, b"", []

    def run(self) -> StoredRun:
        """What is known now."""
        return StoredRun(
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

    def look(self, name: str) -> tuple[Version, StoredRun]:
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
