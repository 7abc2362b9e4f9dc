"""Files that are either the old one or the new one, never half of one, whatever interrupts the writing."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

from holdfast.core.errors import HoldfastError

_REASONS = {
    **dict.fromkeys(
        (errno.ENOSPC, errno.EDQUOT, errno.EFBIG),
        "no space is left for it; free some and try again, what was complete before is untouched",
    ),
    **dict.fromkeys(
        (errno.EROFS, errno.EACCES, errno.EPERM),
        "it is read-only for this user; make it writable or choose another place",
    ),
    **dict.fromkeys(
        (errno.ENOTDIR, errno.EEXIST), "a file stands where a directory must be; choose another place"
    ),
}


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what the operating system says against writing ``path`` into one sentence for the user."""
    try:
        yield
    except OSError as error:
        reason = _REASONS.get(error.errno or 0, error.strerror or str(error))
        raise HoldfastError(f"cannot write {path}: {reason}") from error


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn what the operating system says against reading ``path`` into one sentence for the user."""
    try:
        yield
    except OSError as error:
        raise HoldfastError(f"cannot read {path}: {error.strerror or error}") from error


def write_all(file: FileIO, data: bytes) -> None:
    """Write every byte; an unbuffered file may take fewer than it is offered."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def replace(path: Path, data: bytes) -> None:
    """Make ``data`` the content of ``path`` in one atomic step, on the disk before it takes the name."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with writing(path):
            with open(temporary, "wb", buffering=0) as file:
                write_all(file, data)
                os.fsync(file.fileno())
            os.replace(temporary, path)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def sync_directory(path: Path) -> None:
    """Put the names in a directory on the disk, so that they outlive a power cut."""
    if os.name == "nt":  # Windows opens no directories; its file system keeps renames in a journal
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
