"""File locks between processes. The operating system releases a lock when its process ends, even after a crash."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from holdfast.core import files
from holdfast.core.errors import HoldfastError

POLL_SECONDS = 0.01
# Not 0: `is_held` takes the lock for a moment, which must not make another process's attempt fail.
TIMEOUT_SECONDS = 0.2


@contextmanager
def hold(path: Path) -> Iterator[None]:
    """Hold the lock file ``path``, after waiting for any other holder."""
    lock = _new_lock(path)
    with files.writing(path):
        lock.acquire(poll_interval=POLL_SECONDS)
    try:
        yield
    finally:
        lock.release()


@contextmanager
def hold_or_refuse(path: Path) -> Iterator[None]:
    """Hold the lock file ``path``, or raise ``HoldfastError`` with the id of the process that holds it."""
    lock = _new_lock(path)
    pid_file = path.with_name(f"{path.name}.pid")  # a separate file: filelock may truncate the lock file
    with files.writing(path):
        try:
            lock.acquire(TIMEOUT_SECONDS, poll_interval=POLL_SECONDS)
        except Timeout:
            raise HoldfastError(
                f"{path.parent} is in use by process {_read_pid(pid_file)}; "
                "wait for it to end or choose another --out"
            ) from None
    try:
        with files.writing(pid_file):
            pid_file.write_text(f"{os.getpid()}\n", encoding="utf-8")
        yield
    finally:
        lock.release()


def _new_lock(path: Path) -> FileLock:
    return FileLock(path, thread_local=False)  # a run may end in another thread than it began in


def _read_pid(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip() or "unknown"
    except OSError:
        return "unknown"


if sys.platform == "win32":

    def is_held(path: Path) -> bool:
        """Whether a process holds the lock file ``path``. Creates no file."""
        if not path.exists():
            return False
        try:
            with _new_lock(path).acquire(0):
                return False
        except OSError:  # includes filelock's Timeout
            return True

else:
    import fcntl

    def is_held(path: Path) -> bool:
        """Whether a process holds the lock file ``path``. Needs only read permission.

        filelock opens the file for writing. A shared ``flock``, which conflicts with filelock's exclusive one, works
        on a file opened for reading.
        """
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
        except OSError:
            return True
        finally:
            os.close(descriptor)
