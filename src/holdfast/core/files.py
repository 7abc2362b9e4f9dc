"""Atomic file writes, and conversion of file system errors to `HoldfastError`."""

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any

from holdfast.core.errors import HoldfastError

_REASONS = {
    **dict.fromkeys(
        (errno.ENOSPC, errno.EDQUOT, errno.EFBIG),
        "no space is left on the device; free some and try again (complete files are unchanged)",
    ),
    **dict.fromkeys(
        (errno.EROFS, errno.EACCES, errno.EPERM),
        "it is read-only for this user; make it writable or choose another path",
    ),
    **dict.fromkeys(
        (errno.ENOTDIR, errno.EEXIST), "a file exists where a directory is needed; choose another path"
    ),
}


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise an ``OSError`` from writing ``path`` as a `HoldfastError`."""
    try:
        yield
    except OSError as error:
        reason = _REASONS.get(error.errno or 0, error.strerror or str(error))
        raise HoldfastError(f"cannot write {path}: {reason}") from error


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise an ``OSError`` from reading ``path`` as a `HoldfastError`."""
    try:
        yield
    except OSError as error:
        raise HoldfastError(f"cannot read {path}: {error.strerror or error}") from error


def existing(path: str | Path) -> Path | None:
    """The path, with ``~`` replaced by the home directory, if it exists; None also for an invalid path."""
    try:
        found = Path(path).expanduser()
        return found if found.exists() else None
    except (OSError, RuntimeError, ValueError):  # a name that is too long, an unknown user, a zero byte
        return None


def read_json(path: Path) -> Any:
    """The content of a JSON file; a file that cannot be read or is not JSON raises a `HoldfastError`."""
    with reading(path):
        return parse_json(path.read_bytes(), path)


def parse_json(data: bytes, path: Path) -> Any:
    """The value of the JSON ``data``, which is the content of ``path``."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise HoldfastError(f"{path} is damaged: it is not JSON ({reason}); restore it from a copy") from None


def write_all(file: FileIO, data: bytes) -> None:
    """Write all bytes: one call of an unbuffered file's ``write`` may write only some of them."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def replace(path: Path, data: bytes) -> None:
    """Replace the content of ``path`` atomically. The data is on the disk before the file is renamed."""
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
    """Flush a directory's entries to the disk, so that new and renamed files survive a power failure."""
    if os.name == "nt":  # Windows cannot open directories; NTFS journals renames
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
