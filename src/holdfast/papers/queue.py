"""A queue on disk: cells are claimed by a file each, so that several processes share the work.

A claim is a file made exclusively, with the process and the host that hold it, and touched as long as they
live. A claim whose process is gone, or that nobody has touched for a while, is taken over.
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

from holdfast.core import files, locks
from holdfast.papers.cells import Cell

HEARTBEAT = 5.0  # seconds between touches
STALE = 60.0  # seconds without a touch after which a claim's holder is taken for dead


@dataclass(frozen=True)
class Claim:
    """Who works on a cell."""

    hash: str
    label: str
    host: str
    pid: int
    age: float  # seconds since its holder was last alive

    @property
    def alive(self) -> bool:
        """Whether its holder still works on it."""
        if self.age > STALE:
            return False
        return self.host != socket.gethostname() or _running(self.pid)


class Queue:
    """The claims in a working directory."""

    def __init__(self, work: str | Path) -> None:
        self.folder = Path(work) / "claims"
        with files.writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def claim(self, cell: Cell) -> Iterator[bool]:
        """Hold a cell while inside; yields False where another process holds it."""
        path = self.folder / f"{cell.hash}.json"
        if not self._take(path, cell):
            yield False
            return
        done = threading.Event()
        heart = threading.Thread(target=_beat, args=(path, done), daemon=True)
        heart.start()
        try:
            yield True
        finally:
            done.set()
            heart.join()
            with suppress(FileNotFoundError):
                path.unlink()

    def claims(self) -> list[Claim]:
        """Every claim there is, those of the dead included."""
        found = (_read(path) for path in sorted(self.folder.glob("*.json")))
        return [claim for claim in found if claim is not None]

    def _take(self, path: Path, cell: Cell) -> bool:
        # Looking at a claim, removing it and making one's own must not be mixed up between two processes.
        with locks.hold(self.folder / ".lock"):
            there = _read(path)
            if there is not None and not there.alive:
                path.unlink()
            try:
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            except FileExistsError:
                return False
            with os.fdopen(descriptor, "w") as file:
                json.dump({"label": cell.label, "host": socket.gethostname(), "pid": os.getpid()}, file)
            return True


def _beat(path: Path, done: threading.Event) -> None:
    while not done.wait(HEARTBEAT):
        with suppress(FileNotFoundError):
            os.utime(path)


def _read(path: Path) -> Claim | None:
    try:
        age = time.time() - path.stat().st_mtime
        content = json.loads(path.read_text())
        return Claim(path.stem, str(content["label"]), str(content["host"]), int(content["pid"]), age)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):  # its holder died while writing it
        return Claim(path.stem, "", "", 0, max(age, 2 * STALE))


def _running(pid: int) -> bool:
    """Whether a process of this host still runs; True also where that cannot be found out."""
    if os.name == "nt":  # os.kill would end it; here a claim is taken over when it is stale
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:  # one that has ended, but whose parent has not asked how, is still listed
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (OSError, IndexError):
        return True
