"""Verification of a run's audit log: its hash chain, and its agreement with the run's other files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from shlex import quote

from holdfast.core import files
from holdfast.core.errors import HoldfastError
from holdfast.runs import audit_log, metrics_file
from holdfast.runs.audit_log import AUDIT, FIRST, Entry, of_record
from holdfast.runs.checksums import CHECKSUMS, Checksums
from holdfast.runs.directory import EXPERIMENT, METRICS, MODEL, RunDirectory
from holdfast.runs.metrics_file import Record

FIRSTS = ("begun", "saved")
STARTS = (*FIRSTS, "resumed", "extended")


@dataclass(frozen=True)
class AuditReport:
    """The result of `verify_audit`.

    Attributes:
        problem: the first inconsistency, in one sentence; None if there is none.
        entries: the lines of the log.
        rounds: the rounds of the run after the last line.
        head: the hash of the last line, which identifies the whole log.
        incomplete: whether a process that was killed has left a part of a line at the end.
    """

    problem: str | None
    entries: int = 0
    rounds: int = 0
    head: str = FIRST
    incomplete: bool = False


class _Misfit(Exception):
    pass


@dataclass
class _State:
    """The state of a run according to its log."""

    line: int  # of the entry ``start``
    start: Entry
    rounds: dict[int, tuple[int, Entry]] = field(default_factory=dict)  # line and entry of each round
    end: Entry | None = None


def read_audit(path: str | Path) -> list[Entry]:
    """The entries of the log of the run in ``path``; a damaged line raises a `HoldfastError`."""
    log = RunDirectory.open(path).path / AUDIT
    return list(audit_log.entries(log, _content(log)))


def verify_audit(path: str | Path, head: str | None = None) -> AuditReport:
    """Verify the log of the run in ``path`` and compare it with the run's other files.

    ``head`` is the hash of a line, recorded earlier, which the log must contain.
    """
    run = RunDirectory.open(path)
    while True:
        data, metrics = _content(run.path / AUDIT), _bytes(run.path / METRICS)
        if data == _content(run.path / AUDIT):  # otherwise another process has appended to it
            break
    lines = audit_log.lines(data)
    last, rounds, problem = FIRST, 0, None
    try:
        entries = _chain(lines)
        last = entries[-1]["hash"]
        if head is not None and head not in (entry["hash"] for entry in entries):
            raise _Misfit(f"no line of {AUDIT} has the hash {head}: the log has been cut short or replaced")
        state = _replayed(entries)
        rounds = _done(state)
        _compare_records(state, metrics, run.path / METRICS, last=len(entries))
        _compare_files(state, run)
    except (_Misfit, HoldfastError) as error:  # another file of the run may be damaged, too
        problem = str(error)
    return AuditReport(problem, len(lines), rounds, last, incomplete=not data.endswith(b"\n"))


def _content(log: Path) -> bytes:
    if not log.exists():
        raise HoldfastError(f"{log.parent} has no {AUDIT}; versions before 0.2 did not write one")
    return _bytes(log)


def _bytes(path: Path) -> bytes:
    if not path.exists():
        return b""
    with files.reading(path):
        return path.read_bytes()


def _chain(lines: Sequence[bytes]) -> list[Entry]:
    """The entries; the hash chain of the lines must be intact."""
    if not lines:
        raise _Misfit(f"{AUDIT} has no complete line")
    entries: list[Entry] = []
    for number, line in enumerate(lines, start=1):
        try:
            entry = audit_log.parse(line)
        except ValueError as error:
            raise _Misfit(f"{AUDIT}, line {number}: {error}") from None
        expected = entries[-1]["hash"] if entries else FIRST
        if entry["previous"] != expected:
            before = f"line {number - 1}" if entries else "no line"
            raise _Misfit(
                f"{AUDIT}, line {number}: it follows a line that is not here: its 'previous' does not match {before}"
            )
        entries.append(entry)
    return entries


def _replayed(entries: Sequence[Entry]) -> _State:
    """The state after all entries."""
    state = _State(0, entries[0])
    for number, entry in enumerate(entries, start=1):
        event, round = entry["event"], entry["round"]
        place = f"{AUDIT}, line {number}: {event}"
        done = _done(state)
        if (number == 1 and event not in STARTS) or (number > 1 and event in FIRSTS):
            raise _Misfit(f"{place} is in the wrong place: a log begins with the beginning of its run")
        if event in STARTS:
            if round > done:
                raise _Misfit(f"{place} after round {round}, but there are {done} rounds before")
            # An extended run may have changed its last record, which `records` covers.
            kept = {known: claim for known, claim in state.rounds.items() if known < round}
            state = _State(number, entry, kept)
        elif state.end is not None:
            raise _Misfit(f"{place} follows the end of the run")
        elif event == "round":
            if round != done + 1:
                raise _Misfit(f"{place} {round} follows round {done}")
            state.rounds[round] = number, entry
        elif round != done:
            raise _Misfit(f"{place} after round {round}, but there are {done} rounds before")
        elif event == "ended":
            state.end = entry
    return state


def _done(state: _State) -> int:
    begun: int = state.start["round"]
    return max([begun, *state.rounds])


def _compare_records(state: _State, data: bytes, path: Path, last: int) -> None:
    """Compare the rounds with metrics.jsonl, which may be one step behind the ``last`` line of the log."""
    begun, prefix, offset = state.start["round"], 0, 0
    found: dict[int, tuple[bytes, Record]] = {}
    for end, record in metrics_file.lines(path, data):
        found[record["round"]] = data[offset : end - 1], record
        offset = end
        if record["round"] <= begun:
            prefix = end
    if sha256(data[:prefix]).hexdigest() != state.start["records"]:
        raise _Misfit(
            f"{AUDIT}, line {state.line}: {METRICS} has other records of rounds 1 to {begun} than those after which "
            f"the run was {state.start['event']}"
        )
    for round, (number, entry) in sorted(state.rounds.items()):
        place = f"{AUDIT}, line {number}"
        if round not in found:
            if number == last:
                continue
            raise _Misfit(f"{place}: {METRICS} has no record of round {round}")
        line, record = found[round]
        if sha256(line).hexdigest() != entry["record"]:
            raise _Misfit(f"{place}: {METRICS} has another record of round {round}")
        for key, value in of_record(record).items():
            if value != entry.get(key):
                raise _Misfit(f"{place}: its {key} is not that of the record of round {round} in {METRICS}")
    more = [round for round in found if round > _done(state)]
    if more and state.line != last:
        raise _Misfit(f"{METRICS}: {AUDIT} has no line for round {more[0]}")


def _compare_files(state: _State, run: RunDirectory) -> None:
    """Compare the hashes of files with the files, and with checksums.json."""
    if run.experiment.get("hash") != state.start["federation"]:
        raise _Misfit(f"{AUDIT}, line {state.line}: its federation is not that in {EXPERIMENT}")
    if state.end is None and run.finished:
        raise _Misfit(f"{AUDIT} has no end of the run, but {MODEL} exists")
    checksums, ended = Checksums(run.path), {} if state.end is None else state.end["files"]
    for name, hash in (*state.start["files"].items(), *ended.items()):
        if not (run.path / name).exists():
            raise _Misfit(
                f"{name} is missing: it was removed, or the process was killed before it wrote it, and then `holdfast "
                f"resume {quote(str(run.path))}` writes it"
            )
        data = _bytes(run.path / name)
        if sha256(data).hexdigest() != hash:
            raise _Misfit(f"{name} is not the file whose hash is in {AUDIT}")
        if not checksums.match(name, data):
            raise _Misfit(f"{name} does not match its hash in {CHECKSUMS}")
