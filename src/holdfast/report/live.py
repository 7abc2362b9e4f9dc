"""Incremental reading of runs that another process is writing."""

import os
from collections import OrderedDict
from pathlib import Path
from threading import Lock
from typing import Any

from holdfast.core.errors import HoldfastError
from holdfast.report.loading import StoredRun
from holdfast.runs import RunDirectory
from holdfast.runs.checksums import CHECKSUMS, Checksums
from holdfast.runs.directory import EXPERIMENT, METRICS
from holdfast.runs.metrics_file import parse

MAX_CACHED_RUNS = 128  # more than one page can show
# Bytes before the read position that must be unchanged: a resumed run is truncated and may since have grown longer.
TAIL_BYTES = 400

Version = tuple[int, ...]
"""Identifies the part of a run that was read; it changes when the run does."""


class LiveRun:
    """A run directory that is read incrementally while another process writes it."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self._path = path
        self._experiment_version: Version = ()
        self._experiment: dict[str, Any] = {}
        self._records: list[dict[str, Any]] = []
        self._inode, self._offset, self._tail = 0, 0, b""

    @property
    def version(self) -> Version:
        return (*self._experiment_version, self._inode, self._offset)

    def refresh(self) -> None:
        """Read the lines added since the last call; a replaced or truncated file is read from its start."""
        status = (self._path / EXPERIMENT).stat()
        experiment_version = (status.st_ino, status.st_mtime_ns)
        if experiment_version != self._experiment_version:
            self._experiment = RunDirectory.open(self._path).experiment
            self._experiment_version = experiment_version
            self._restart(0)
        try:
            with open(self._path / METRICS, "rb") as file:
                inode = os.fstat(file.fileno()).st_ino
                file.seek(self._offset - len(self._tail))
                if inode != self._inode or file.read(len(self._tail)) != self._tail:
                    self._restart(inode)
                file.seek(self._offset)
                added = file.read()
        except FileNotFoundError:
            return
        complete = added[: added.rfind(b"\n") + 1]
        if not self._offset and not Checksums(self._path).match(METRICS, added):
            if (self._path / METRICS).read_bytes() != added:
                return  # another process is writing it; the next call reads it again
            raise HoldfastError(
                f"{self._path / METRICS} is damaged: its content does not match its SHA-256 in {CHECKSUMS}"
            )
        for number, line in enumerate(complete.splitlines(), start=len(self._records) + 1):
            try:
                self._records.append(parse(line))
            except ValueError as error:
                self._restart(0)
                raise HoldfastError(
                    f"{self._path / METRICS} is damaged: line {number} is not the JSON object of a round "
                    f"({error})"
                ) from None
        self._offset += len(complete)
        self._tail = (self._tail + complete)[-TAIL_BYTES:]

    def _restart(self, inode: int) -> None:
        self._inode, self._offset, self._tail, self._records = inode, 0, b"", []

    def run(self) -> StoredRun:
        """The run as of the last refresh."""
        return StoredRun.of_directory(self._path, self.name, self._experiment, tuple(self._records))


class LiveRuns:
    """The runs below a root directory, cached; safe to use from several threads."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self._cache: OrderedDict[str, LiveRun] = OrderedDict()
        self._lock = Lock()

    def path(self, name: str) -> Path:
        """The directory of a run, by its name in the list; an error for a name that leads out of the root."""
        is_root = name == self.root.name and (self.root / EXPERIMENT).exists()
        try:
            path = self.root if is_root else (self.root / name).resolve()
            found = path.is_relative_to(self.root) and (path / EXPERIMENT).is_file()
        except (OSError, ValueError):  # not a valid file name
            found = False
        if not found:
            raise HoldfastError(f"there is no run '{name[:200]}' here")
        return path

    def read(self, name: str) -> tuple[Version, StoredRun]:
        """A run in its current state, and the version of what was read."""
        with self._lock:
            path = self.path(name)
            live = self._cache.get(name) or LiveRun(name, path)
            live.refresh()
            self._cache[name] = live
            self._cache.move_to_end(name)
            while len(self._cache) > MAX_CACHED_RUNS:
                self._cache.popitem(last=False)
            return live.version, live.run()
