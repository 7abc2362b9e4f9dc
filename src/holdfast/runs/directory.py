"""The directory of one run: its settings, metrics, checkpoint and final model."""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from hashlib import sha256
from io import FileIO
from pathlib import Path
from shlex import quote
from typing import Any, Self, TypeVar

from torch import Tensor

from holdfast.core import files, locks, yaml12
from holdfast.core.errors import HoldfastError
from holdfast.core.schema import validate_content
from holdfast.core.settings import with_current_names
from holdfast.runs import metrics_file
from holdfast.runs.audit_log import AUDIT, AuditLog, of_record
from holdfast.runs.checkpoint import Checkpoint, CheckpointFolder
from holdfast.runs.checksums import CHECKSUMS, Checksums
from holdfast.runs.consistency import check_records
from holdfast.runs.metrics_file import Record
from holdfast.runs.schemas import StoredExperiment
from holdfast.runs.tensors import State, from_bytes, to_bytes

T = TypeVar("T")

EXPERIMENT = "experiment.yaml"
METRICS = "metrics.jsonl"
CHECKPOINT = "checkpoint"
MODEL = "model.safetensors"
BEST_MODEL = "model-best.safetensors"
FEDERATION = "federation.json"
PROBE = "probe.json"
LOCK = ".lock"


def read_experiment(path: Path) -> dict[str, Any]:
    """The settings in an experiment.yaml of any version, under their current names."""

    def parse(data: bytes) -> dict[str, Any]:
        try:
            experiment = yaml12.load(data)
        except ValueError as error:
            raise HoldfastError(f"{path} is damaged: it is not YAML") from error
        except HoldfastError as error:
            raise HoldfastError(f"{path} is damaged: {error}") from None
        if not isinstance(experiment, dict):
            raise HoldfastError(f"{path} is damaged: it does not describe an experiment")
        experiment = with_current_names(experiment)
        validate_content(experiment, StoredExperiment, path)
        return experiment

    return read_verified(path, parse)


def read_verified(path: Path, parse: Callable[[bytes], T]) -> T:
    """The parsed content of a run's file.

    Content that cannot be parsed raises the error of ``parse``; other content with a wrong checksum raises a
    `HoldfastError`.
    """
    checksums, data = Checksums(path.parent), b""
    while True:
        before = data
        with files.reading(path):
            data = path.read_bytes()
        parsed = parse(data)
        if checksums.match(path.name, data):
            return parsed
        if data == before:  # otherwise another process has changed it since
            raise HoldfastError(
                f"{path} is damaged: its content does not match its SHA-256 in {CHECKSUMS}; restore it from a copy"
            )


class RunDirectory:
    """A run directory, from ``create`` or ``open``.

    It can always be read, also while another process writes. Writing (``append``, ``rewind``, ``save_checkpoint``,
    ``save_model``) requires the lock: ``with run.lock():``.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._metrics = path / METRICS
        self._checkpoint = CheckpointFolder(path / CHECKPOINT)
        self._checksums = Checksums(path)
        self._audit = AuditLog(path)
        self._locked = False
        self._appending: FileIO | None = None

    @classmethod
    def create(cls, path: str | Path, experiment: Mapping[str, Any]) -> Self:
        """Create the directory, with its parents, for a new run with the settings ``experiment``.

        Raises ``HoldfastError`` if it already holds a run.
        """
        run = cls(Path(path))
        with files.writing(run.path):
            run.path.mkdir(parents=True, exist_ok=True)
        with run.lock():
            if any((run.path / name).exists() for name in (EXPERIMENT, METRICS, AUDIT, CHECKPOINT, MODEL)):
                raise HoldfastError(
                    f"{run.path} already holds a run; continue it with `holdfast resume {quote(str(run.path))}`"
                    " or choose another --out"
                )
            run.write(EXPERIMENT, yaml12.dump(dict(experiment)).encode())
        return run

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """The run in an existing directory. Writes and locks nothing."""
        run = cls(Path(path))
        if run.path.is_file():
            raise HoldfastError(
                f"{run.path} holds no run: it is a file; name a directory, such as {run.path.parent}"
            )
        if not (run.path / EXPERIMENT).is_file():
            raise HoldfastError(f"{run.path} holds no run: it contains no {EXPERIMENT}")
        return run

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold this run for writing; ``HoldfastError`` with the process id if another process holds it."""
        with locks.hold_or_refuse(self.path / LOCK):
            self._clear_scratch()  # of a process that was killed
            self._locked = True
            try:
                yield
            finally:
                self._locked = False
                self._stop_appending()
                self._audit.close()
                self._clear_scratch()

    @cached_property
    def experiment(self) -> dict[str, Any]:
        """The settings of the run, as given to ``create``."""
        return read_experiment(self.path / EXPERIMENT)

    @property
    def finished(self) -> bool:
        """Whether the run has ended, and its final model exists."""
        return (self.path / MODEL).exists()

    @property
    def scratch(self) -> Path:
        """A directory for temporary files of the running process, such as spilled states; ``lock`` removes it."""
        return self.path / "scratch"

    def append(self, record: Mapping[str, Any], audit: Mapping[str, Any] | None = None) -> None:
        """Append a record, which needs a ``round``, to metrics.jsonl; other processes see it at once.

        Arrays and tensors become lists, NaN and infinities null. ``audit`` are the facts of the round that only
        audit.jsonl has.
        """
        self._need_lock()
        line = metrics_file.to_line(record)
        if audit is not None:
            self.audit("round", **of_record(record), **audit, record=sha256(line[:-1]).hexdigest())
        with files.writing(self._metrics):
            if self._appending is None:
                self._checksums.forget(METRICS)
                self._appending = open(self._metrics, "ab", buffering=0)  # noqa: SIM115 (closed by lock)
            end = self._appending.seek(0, os.SEEK_END)
            try:
                files.write_all(self._appending, line)
            except OSError:
                self._appending.truncate(end)  # remove an incomplete line if the disk is full
                raise

    def audit(self, event: str, **facts: Any) -> None:
        """Append an entry to audit.jsonl."""
        self._need_lock()
        if event != "ended":
            self._checksums.forget(AUDIT)
        self._audit.append(event, facts)

    def audit_start(self, event: str, round: int, **facts: Any) -> None:
        """Append the start entry of a process that continues the run after ``round``, with the hashes of its files."""
        data = self._metrics.read_bytes() if self._metrics.exists() else b""
        ends = {record["round"]: end for end, record in metrics_file.lines(self._metrics, data)}
        records = sha256(data[: ends.get(round, 0)]).hexdigest()
        self.audit(event, round=round, records=records, files=self._hashes(EXPERIMENT, FEDERATION), **facts)

    def _hashes(self, *names: str) -> dict[str, str]:
        """The SHA-256 of each existing file."""
        paths = [self.path / name for name in names]
        with files.reading(self.path):
            return {path.name: sha256(path.read_bytes()).hexdigest() for path in paths if path.exists()}

    def records(self) -> list[Record]:
        """Every record so far, oldest first, without an incomplete last line."""
        if not self._metrics.exists():
            return []
        records = [record for _, record in self._lines()]
        check_records(self._metrics, records)
        return records

    def _lines(self) -> list[tuple[int, Record]]:
        """Every record, each with the offset of the end of its line."""
        return read_verified(self._metrics, lambda data: list(metrics_file.lines(self._metrics, data)))

    def rewind(self, round: int) -> None:
        """Drop the records of rounds after ``round`` and an incomplete last line, to continue from there."""
        self._need_lock()
        self._stop_appending()
        if not self._metrics.exists():
            return
        end = 0
        for line_end, record in self._lines():
            if record["round"] > round:
                break
            end = line_end
        self._checksums.forget(METRICS)
        with files.writing(self._metrics):
            os.truncate(self._metrics, end)

    def save_checkpoint(
        self,
        round: int,
        tensors: Mapping[str, Tensor],
        meta: Mapping[str, Any],
        clients: Mapping[int, Mapping[str, Tensor]],
    ) -> Mapping[int, State]:
        """Save the state after ``round`` atomically: if anything fails, the last checkpoint stays in place.

        ``clients`` are the client states that changed since the last checkpoint; the others are kept.
        Returns all client states of the checkpoint, for ``ClientStates.committed``.
        """
        self._need_lock()
        if self._appending is not None:
            with files.writing(self._metrics):
                os.fsync(self._appending.fileno())  # the record of a checkpointed round must not be lost
        self._audit.flush()
        return self._checkpoint.save(round, tensors, meta, clients)

    def load_checkpoint(self) -> Checkpoint | None:
        """The last complete state, or None if the run has none yet.

        If the newest checkpoint is damaged, the one before it, with a ``warning``. If both are damaged, raises
        ``HoldfastError``.
        """
        return self._checkpoint.load()

    def discard_checkpoint(self) -> None:
        """Remove the checkpoint of an unfinished run; when continued, it restarts at round 1."""
        if not self.finished:
            shutil.rmtree(self.path / CHECKPOINT, ignore_errors=True)

    def save_model(self, tensors: Mapping[str, Tensor]) -> None:
        """Write the final model, which marks the run as finished."""
        self._need_lock()
        if self._metrics.exists():
            with files.reading(self._metrics):
                self._checksums.expect(METRICS, self._metrics.read_bytes())
        model = to_bytes(tensors)
        if self._audit.exists:
            found = self._hashes(EXPERIMENT, FEDERATION, METRICS, PROBE, BEST_MODEL)
            last = next(metrics_file.newest_first(self._metrics))["round"]
            self.audit("ended", round=last, files=found | {MODEL: sha256(model).hexdigest()})
            self._audit.flush()
            self._checksums.expect(AUDIT, self._audit.path.read_bytes())
        self.write(MODEL, model)

    def save_best_model(self, tensors: Mapping[str, Tensor]) -> None:
        """Write the model of the round that is the best on the clients' validation samples."""
        self.write(BEST_MODEL, to_bytes(tensors))

    def reopen(self, experiment: Mapping[str, Any]) -> None:
        """Convert a finished run to an unfinished one with other settings; the checkpoint contains the final model."""
        self._need_lock()
        with files.writing(self.path):
            for name in (MODEL, BEST_MODEL):
                (self.path / name).unlink(missing_ok=True)
            files.sync_directory(self.path)
        self.write(EXPERIMENT, yaml12.dump(dict(experiment)).encode())
        self.__dict__.pop("experiment", None)  # it is read again

    def load_model(self) -> State:
        """The final model's tensors on the CPU; ``HoldfastError`` if the run is not finished."""
        if not self.finished:
            raise HoldfastError(
                f"{self.path} has no final model yet; finish it with `holdfast resume {quote(str(self.path))}`"
            )
        return _read_model(self.path / MODEL)

    def load_best_model(self) -> State | None:
        """The tensors of the best round's model; None for runs without validation and unfinished runs."""
        path = self.path / BEST_MODEL
        return _read_model(path) if self.finished and path.exists() else None

    def write(self, name: str, data: bytes) -> None:
        """Replace a file of the run atomically and record its checksum."""
        self._need_lock()
        self._checksums.expect(name, data)
        files.replace(self.path / name, data)
        with files.writing(self.path):
            files.sync_directory(self.path)

    def _need_lock(self) -> None:
        if not self._locked:
            raise RuntimeError("a run is written inside `with run.lock():`")

    def _stop_appending(self) -> None:
        if self._appending is not None:
            self._appending.close()
            self._appending = None

    def _clear_scratch(self) -> None:
        shutil.rmtree(self.scratch, ignore_errors=True)


def _read_model(path: Path) -> State:
    def parse(data: bytes) -> State:
        try:
            return from_bytes(data)
        except ValueError as error:
            raise HoldfastError(f"{path} is damaged: {error}") from error

    return read_verified(path, parse)
