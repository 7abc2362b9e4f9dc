"""Files of data sets: search, checksums, download and unpacking."""

from __future__ import annotations

import hashlib
import logging
import os
import tarfile
import tempfile
import zipfile
import zlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.request import Request, urlopen

from holdfast.core.errors import HoldfastError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class File:
    """A published file: its name, its address if it can be downloaded, and its md5 if that is published."""

    name: str
    url: str | None = None
    md5: str | None = None


def search_roots(root: Path | None = None) -> list[Path]:
    """The folders searched for data sets: ``root`` or else ``HOLDFAST_DATA``, then the cache."""
    first = root or os.environ.get("HOLDFAST_DATA")
    return [*([Path(first).expanduser()] if first else []), cache_folder()]


def cache_folder() -> Path:
    """The folder of downloads: ``$XDG_CACHE_HOME/holdfast``, by default ``~/.cache/holdfast``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "holdfast"


def check_md5(path: Path, file: File) -> None:
    """Raise an error if the file's md5 is not the published one."""
    if file.md5 is None:
        return
    with path.open("rb") as stream:
        found = hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    if found != file.md5:
        source = f"; get it again from {file.url}" if file.url else ""
        raise HoldfastError(f"{path} is damaged: its md5 is {found}, published is {file.md5}{source}")


def download(file: File, folder: Path) -> Path:
    """Download a file into ``folder``, atomically and with its checksum verified."""
    if file.url is None:
        raise HoldfastError(f"{file.name} has no address to download it from")
    log.info("downloading %s", file.url)
    folder.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=f".{file.name}.")
    try:
        # Some servers refuse Python's default user agent.
        request = Request(file.url, headers={"User-Agent": "holdfast"})  # noqa: S310
        with open(handle, "wb") as out, urlopen(request, timeout=60) as response:  # noqa: S310
            while block := response.read(1 << 20):
                out.write(block)
        check_md5(Path(temporary), file)
        os.replace(temporary, folder / file.name)
    finally:
        Path(temporary).unlink(missing_ok=True)
        with suppress(OSError):
            folder.rmdir()  # only if it is empty
    return folder / file.name


def unpack(archive: Path, folder: Path) -> None:
    """Unpack a ``.tar.gz`` or ``.zip`` into ``folder``; members outside of the folder raise an error.

    Existing files are not replaced.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".unpack.") as temporary:
        try:
            if archive.suffix == ".zip":
                with zipfile.ZipFile(archive) as zipped:
                    zipped.extractall(temporary)  # noqa: S202 (zipfile itself drops roots and "..")
            else:
                with tarfile.open(archive) as tarred:
                    tarred.extractall(temporary, filter="data")
        except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError) as error:
            raise HoldfastError(f"{archive} cannot be unpacked: {error}") from error
        for entry in Path(temporary).iterdir():
            if not (folder / entry.name).exists():
                os.replace(entry, folder / entry.name)
