"""checksums.json: the SHA-256 of every file of a run; readers compare it.

A file is replaced in two steps, its checksum first. Between the steps the file still has its old content. An entry
therefore holds the new and the old checksum, and either is accepted.
"""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

from holdfast.core import files
from holdfast.core.schema import validate_content

CHECKSUMS = "checksums.json"
KEPT = 3  # checksums of one file: the process may have been killed twice between the two steps


class Checksums:
    """The checksums of the files in one directory. Files without an entry are not checked."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / CHECKSUMS

    def expect(self, name: str, data: bytes) -> None:
        """Record the checksum of the new content of file ``name``, before it is written."""
        entries = self._read()
        former, new = entries.get(name, []), sha256(data).hexdigest()
        if former[:1] != [new]:
            self._write(entries | {name: [new, *former][:KEPT]})

    def forget(self, name: str) -> None:
        """Remove the entry of a file before it is appended to or truncated."""
        entries = self._read()
        if entries.pop(name, None) is not None:
            self._write(entries)

    def match(self, name: str, data: bytes) -> bool:
        """Whether the file ``name`` may have this content."""
        expected = self._read().get(name)
        return expected is None or sha256(data).hexdigest() in expected

    def _read(self) -> dict[str, list[str]]:
        if not self._path.exists():
            return {}
        entries: dict[str, list[str]] = files.read_json(self._path)
        validate_content(entries, dict[str, list[str]], self._path)
        return entries

    def _write(self, entries: dict[str, list[str]]) -> None:
        files.replace(self._path, json.dumps(entries, indent=1).encode() + b"\n")
