"""A queue on disk: processes lease jobs from it, so that several of them can share the work.

A lease is a file with the process and the host that hold it. The holder renews it by touching the file. A lease
whose process has ended, or that has not been renewed for a while, is taken over by another process.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypedDict

from holdfast.core import files, locks
from holdfast.core.schema import validate_schema

FOLDER = "leases"  # in the working directory
HEARTBEAT = 5.0  # seconds between two renewals
STALE = 60.0  # seconds without a renewal after which a lease has expired


class QueuedJob(Protocol):
    """A piece of work: ``hash`` identifies it, ``label`` is its name in messages."""

    @property
    def hash(self) -> str: ...

    @property
    def label(self) -> str: ...


@dataclass(frozen=True)
class Lease:
    """A job that a process works on; ``age`` is the number of seconds since the last renewal."""

    hash: str
    label: str
    host: str
    pid: int
    age: float

    @property
    def alive(self) -> bool:
        """Whether its holder still works on the job."""
        if self.age > STALE or self.pid <= 0:
            return False
        return self.host != socket.gethostname() or _is_running(self.pid)


class _StoredLease(TypedDict):
    """The content of a lease's file."""

    label: str
    host: str
    pid: int


class Queue:
    """The leases in a working directory."""

    def __init__(self, work: str | Path) -> None:
        self.folder = Path(work) / FOLDER
        with files.writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def lease(self, job: QueuedJob) -> Iterator[bool]:
        """Hold a job inside the context; yields False if another process holds it."""
        path = self.folder / f"{job.hash}.json"
        if not self._acquire(path, job):
            yield False
            return
        released = threading.Event()
        renewal = threading.Thread(target=_renew, args=(path, released), daemon=True)
        renewal.start()
        try:
            yield True
        finally:
            released.set()
            renewal.join()
            with suppress(FileNotFoundError):
                path.unlink()

    def leases(self) -> list[Lease]:
        """Every lease, expired ones included."""
        leases = (_read(path) for path in sorted(self.folder.glob("*.json")))
        return [lease for lease in leases if lease is not None]

    def _acquire(self, path: Path, job: QueuedJob) -> bool:
        with locks.hold(self.folder / ".lock"):  # between reading a lease, removing it and writing a new one
            lease = _read(path)
            if lease is not None and not lease.alive:
                path.unlink()
            try:
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            except FileExistsError:
                return False
            with os.fdopen(descriptor, "w") as file:
                json.dump({"label": job.label, "host": socket.gethostname(), "pid": os.getpid()}, file)
            return True


def _renew(path: Path, released: threading.Event) -> None:
    while not released.wait(HEARTBEAT):
        with suppress(FileNotFoundError):
            os.utime(path)


def _read(path: Path) -> Lease | None:
    try:
        age = time.time() - path.stat().st_mtime
        content = json.loads(path.read_text(encoding="utf-8"))
        validate_schema(content, _StoredLease)
        return Lease(path.stem, content["label"], content["host"], content["pid"], age)
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError):  # its holder was killed while writing it
        return Lease(path.stem, "", "", 0, max(age, 2 * STALE))


def _is_running(pid: int) -> bool:
    """Whether a process of this host still runs; True also where this cannot be found out."""
    if os.name == "nt":  # os.kill would end the process; a lease of a dead one expires instead
        return True
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):  # not a valid process id
        return False
    except PermissionError:
        return True
    try:  # a zombie has ended, though its parent has not yet waited for it
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except (OSError, IndexError):
        return True
