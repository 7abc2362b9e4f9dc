"""audit.jsonl: the events of a run, one JSON object per line, each with the hash of the previous line.

    {"event": "round", "time": "...", ..., "previous": "HASH OF THE LAST LINE", "hash": "HASH OF THIS LINE"}

``hash`` is the SHA-256 of the line without that entry; ``previous`` of the first line is 64 zeros. Lines are only
appended. A resumed run adds a line with the round from which it continues, which invalidates previous lines of later
rounds. An entry is written before the file that it describes, so that the log of a killed run is never behind.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from hashlib import sha256
from io import FileIO
from pathlib import Path
from typing import Any

from holdfast.core import files
from holdfast.core.errors import HoldfastError
from holdfast.core.schema import Mismatch, validate_schema
from holdfast.runs.metrics_file import plain
from holdfast.runs.schemas import AUDIT_EVENTS, AuditEntry

AUDIT = "audit.jsonl"
FIRST = "0" * 64

Entry = dict[str, Any]


def sealed(content: Mapping[str, Any]) -> bytes:
    """The line of an entry, with its hash."""
    body = json.dumps(plain(content), allow_nan=False).encode()
    return body[:-1] + b', "hash": "' + sha256(body).hexdigest().encode() + b'"}'


def parse(line: bytes) -> Entry:
    """The entry in a line; ``ValueError`` with the reason if it is damaged or has been changed."""
    try:
        entry: Entry = json.loads(line)
        validate_schema(entry, AuditEntry)
        if entry["event"] not in AUDIT_EVENTS:
            raise ValueError(f"its event, {entry['event']!r:.40}, is unknown")
        validate_schema(entry, AUDIT_EVENTS[entry["event"]])
    except Mismatch:
        raise
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError):
        raise ValueError("it is not JSON") from None
    content = {key: value for key, value in entry.items() if key != "hash"}
    if sealed(content) != line:
        raise ValueError("its content does not match its hash")
    return entry


def of_record(record: Mapping[str, Any]) -> Entry:
    """The fields that a round's entry copies from its record in metrics.jsonl, without details of incidents."""
    incidents = [{key: one.get(key) for key in ("client", "kind")} for one in record.get("incidents") or []]
    facts: Entry = {"round": record["round"], "incidents": incidents}
    facts |= {key: record[key] for key in ("rejected", "epsilon") if key in record}
    if "sample_privacy" in record:
        facts["sample_epsilon"] = record["sample_privacy"]["epsilon"]
    return facts


def lines(data: bytes) -> list[bytes]:
    """The complete lines in the content of a log; a process that was killed may leave an incomplete one."""
    return data.split(b"\n")[:-1]


def entries(path: Path, data: bytes) -> Iterator[Entry]:
    """Every entry in the content ``data`` of the log ``path``; a damaged line raises a `HoldfastError`."""
    for number, line in enumerate(lines(data), start=1):
        try:
            yield parse(line)
        except ValueError as error:
            raise HoldfastError(f"{path} is damaged: line {number}: {error}") from None


class AuditLog:
    """The log of a run, for the process that holds the run."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / AUDIT
        self._file: FileIO | None = None
        self._last = FIRST

    @property
    def exists(self) -> bool:
        """Whether the run has a log."""
        return self.path.exists()

    def append(self, event: str, facts: Mapping[str, Any]) -> None:
        """Append an entry; other processes see it at once."""
        with files.writing(self.path):
            if self._file is None:
                self._open()
            assert self._file is not None
            time = datetime.now(UTC).isoformat(timespec="seconds")
            line = sealed({"event": event, "time": time, **facts, "previous": self._last})
            end = self._file.seek(0, os.SEEK_END)
            try:
                files.write_all(self._file, line + b"\n")
            except OSError:
                self._file.truncate(end)  # remove an incomplete line if the disk is full
                raise
            self._last = json.loads(line)["hash"]

    def flush(self) -> None:
        """Wait until all entries are on the disk."""
        if self._file is not None:
            with files.writing(self.path):
                os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; the next entry opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> None:
        """Open the log behind its last complete line."""
        file = open(self.path, "a+b", buffering=0)  # noqa: SIM115 (closed by ``close``)
        try:
            file.seek(0)
            data = file.readall()
            complete = lines(data)
            file.truncate(sum(len(line) + 1 for line in complete))
            self._last = parse(complete[-1])["hash"] if complete else FIRST
        except ValueError as error:
            file.close()
            raise HoldfastError(
                f"{self.path} is damaged: its last line: {error}; restore it from a copy, or move it away to begin "
                "a new log"
            ) from None
        self._file = file
