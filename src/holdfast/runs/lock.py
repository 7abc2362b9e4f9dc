"""One process at a time may write a run: an advisory lock that the kernel drops when its holder dies."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from holdfast.core.errors import HoldfastError
from holdfast.core.files import writing

_PATIENCE = 0.2  # seconds; a reader that looks whether the lock is held takes it for some microseconds


def _acquire(descriptor: int) -> bool:
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(_PATIENCE / 20)


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Hold the lock file ``path``, or raise ``HoldfastError`` naming the process that does."""
    with writing(path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        with writing(path):
            mine = _acquire(descriptor)
        if not mine:
            holder = os.read(descriptor, 32).decode(errors="replace").strip() or "unknown"
            raise HoldfastError(
                f"{path.parent} is in use by process {holder}; wait for it to end or choose another --out"
            )
        with writing(path):
            os.truncate(descriptor, 0)
            os.write(descriptor, f"{os.getpid()}\n".encode())
        yield
    finally:
        with suppress(OSError):  # not left to close(): a forked child that lives on would keep holding it
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def is_held(path: Path) -> bool:
    """Whether a living process holds the lock file ``path``; writes nothing."""
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
