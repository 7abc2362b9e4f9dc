"""Where a data set's files are: found, checked, downloaded, unpacked."""

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
    """A published file: its name, its address if it can be downloaded from there, its md5 if well known."""

    name: str
    url: str | None = None
    md5: str | None = None


def search_roots(root: Path | None = None) -> list[Path]:
    """The folders in which data sets are looked for: ``root`` or else ``HOLDFAST_DATA``, then the cache."""
    first = root or os.environ.get("HOLDFAST_DATA")
    return [*([Path(first).expanduser()] if first else []), cache_folder()]


def cache_folder() -> Path:
    """Where downloads are kept: ``$XDG_CACHE_HOME/holdfast``, by default ``~/.cache/holdfast``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "holdfast"


def check_md5(path: Path, file: File) -> None:
    """Refuse a file that is not, byte for byte, the published one."""
    if file.md5 is None:
        return
    with path.open("rb") as stream:
        found = hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    if found != file.md5:
        source = f"; get it again from {file.url}" if file.url else ""
        raise HoldfastError(f"{path} is damaged: its md5 is {found}, published is {file.md5}{source}")


def download(file: File, folder: Path) -> Path:
    """Fetch a file into ``folder``; it appears there whole and checked, or not at all."""
    if file.url is None:
        raise HoldfastError(f"{file.name} has no address to download it from")
    log.info("downloading %s", file.url)
    folder.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=f".{file.name}.")
    try:
        # Some of the servers refuse Python's own name.
        request = Request(file.url, headers={"User-Agent": "holdfast"})  # noqa: S310
        with open(handle, "wb") as out, urlopen(request, timeout=60) as answer:  # noqa: S310
            while block := answer.read(1 << 20):
                out.write(block)
        check_md5(Path(temporary), file)
        os.replace(temporary, folder / file.name)
    finally:
        Path(temporary).unlink(missing_ok=True)
        with suppress(OSError):
            folder.rmdir()  # only where nothing is in it
    return folder / file.name


def unpack(archive: Path, folder: Path) -> None:
    """Unpack a ``.tar.gz`` or ``.zip`` into ``folder``, outside of which nothing in it may reach.

    What is in the folder already stays as it is.
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
