"""Checkpoints that are written atomically: new files first, then a rename that makes them the checkpoint.

    checkpoint/
      checkpoint.json            the manifest: round, meta, and every file with its size and SHA-256
      checkpoint.json.previous   the manifest of the checkpoint before
      state-<round>-<hash>.safetensors
      clients/<client>-<round>-<hash>.safetensors

A file's name contains a hash of its content, so a file of a checkpoint is never overwritten. A client whose state
has not changed since the last checkpoint keeps its file.
"""

import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, TypedDict

from torch import Tensor

from holdfast.core import files
from holdfast.core.errors import HoldfastError
from holdfast.core.schema import validate_content
from holdfast.runs.tensors import State, from_bytes, to_bytes

WRITERS = 8  # threads that write client files; as many states are in memory


class LazyStates(Mapping[int, State]):
    """Client states by client id, each read from the disk at every access."""

    def __init__(self, clients: Collection[int], read: Callable[[int], State]) -> None:
        self._clients = clients
        self._read = read

    def __getitem__(self, client: int) -> State:
        if client not in self._clients:
            raise KeyError(client)
        return self._read(client)

    def __contains__(self, client: object) -> bool:
        return client in self._clients

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._clients))

    def __len__(self) -> int:
        return len(self._clients)


@dataclass(frozen=True)
class Checkpoint:
    """The last complete state of a run.

    Attributes:
        round: the round after which it was saved.
        tensors: as saved.
        meta: as saved, after conversion to JSON (tuples become lists).
        clients: states by client id, read from the disk at each access.
        warning: a description of the loss, if the newest checkpoint is damaged and this is the previous one.
    """

    round: int
    tensors: State
    meta: dict[str, Any]
    clients: Mapping[int, State]
    warning: str | None = None

    def client(self, client: int) -> State | None:
        """The saved state of one client; None if it had none."""
        return self.clients.get(client)


class _File(TypedDict):
    """A file of a checkpoint: its path in the folder, its size in bytes and its hash."""

    file: str
    bytes: int
    sha256: str


class _Manifest(TypedDict):
    """The content of checkpoint.json. ``changed``: the clients whose files this checkpoint wrote."""

    round: int
    meta: dict[str, Any]
    state: _File
    clients: dict[str, _File]
    changed: list[int]


class _ManifestFile(TypedDict):
    """The whole file: a manifest and its hash."""

    sha256: str
    checkpoint: _Manifest


class CheckpointFolder:
    """The folder ``checkpoint/`` of a run."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._newest = path / "checkpoint.json"
        self._previous = path / "checkpoint.json.previous"
        self._generations: list[_Manifest] | None = None  # on the disk, newest first; None: not read yet
        self._newest_is_intact = False  # whether generation 0 is the one in checkpoint.json

    def save(
        self,
        round: int,
        tensors: Mapping[str, Tensor],
        meta: Mapping[str, Any],
        changed: Mapping[int, Mapping[str, Tensor]],
    ) -> Mapping[int, State]:
        """Commit a new checkpoint and return the client states it holds, as ``Checkpoint.clients`` would."""
        if self._generations is None:
            self.load()
        generations = self._generations or []
        self._generations = None  # read again from the disk if saving fails
        clients = dict(generations[0]["clients"]) if generations else {}
        pending = self._path / "checkpoint.json.next"
        try:
            with files.writing(self._path):
                (self._path / "clients").mkdir(parents=True, exist_ok=True)
            state = self._write(f"state-{round}", tensors)
            clients |= self._write_clients(round, changed)
            manifest = _Manifest(
                round=round, meta=dict(meta), state=state, clients=clients, changed=sorted(changed)
            )
            files.replace(pending, _manifest_bytes(manifest))
            with files.writing(self._newest):
                files.sync_directory(self._path / "clients")
                files.sync_directory(self._path)
                if self._newest_is_intact:
                    os.replace(self._newest, self._previous)
                os.replace(pending, self._newest)  # the commit: this replaces the checkpoint
                files.sync_directory(self._path)
        except BaseException:
            with suppress(OSError):
                pending.unlink(missing_ok=True)
            # An interrupt may follow the commit, so files of the manifests now on the disk are kept too.
            self._remove_all_but(generations + self._on_disk())
            raise
        self._generations = [manifest, *generations[:1]]
        self._newest_is_intact = True
        self._remove_all_but(self._generations)
        return self._clients(manifest)

    def load(self) -> Checkpoint | None:
        """The newest intact checkpoint, or None if none was ever committed.

        The files that it wrote are verified now. Client files that it shares with earlier checkpoints are verified
        when they are read, because the checkpoint before uses the same files.
        """
        damage: list[str] = []
        for path in (self._newest, self._previous):
            if not path.exists():
                continue
            try:
                manifest = _read_manifest(path)
                checkpoint = self._verified(manifest, damage)
            except HoldfastError as error:
                damage.append(str(error))
                continue
            self._newest_is_intact = path == self._newest
            self._generations = self._on_disk() if self._newest_is_intact else [manifest]
            return checkpoint
        if damage:
            raise HoldfastError(
                f"no intact checkpoint is left: {'; '.join(damage)}; restore the damaged file from a copy, or "
                "move the run directory away and start the run again"
            )
        self._generations = []
        self._newest_is_intact = False
        return None

    def _on_disk(self) -> list[_Manifest]:
        manifests = []
        for path in (self._newest, self._previous):
            with suppress(HoldfastError):
                manifests.append(_read_manifest(path))
        return manifests

    def _verified(self, manifest: _Manifest, damage: list[str]) -> Checkpoint:
        clients = self._clients(manifest)
        for entry in manifest["clients"].values():
            self._check_size(entry)
        for client in manifest["changed"]:
            self._read(manifest["clients"][str(client)])
        warning = f"{damage[0]}; went back to the checkpoint of round {manifest['round']}" if damage else None
        return Checkpoint(
            manifest["round"], self._read_state(manifest["state"]), manifest["meta"], clients, warning
        )

    def _clients(self, manifest: _Manifest) -> Mapping[int, State]:
        entries = {int(client): entry for client, entry in manifest["clients"].items()}
        return LazyStates(entries, lambda client: self._read_state(entries[client]))

    def _write(self, stem: str, tensors: Mapping[str, Tensor]) -> _File:
        data = to_bytes(tensors)
        digest = sha256(data).hexdigest()
        name = f"{stem}-{digest[:12]}.safetensors"
        files.replace(self._path / name, data)
        return _File(file=name, bytes=len(data), sha256=digest)

    def _write_clients(self, round: int, changed: Mapping[int, Mapping[str, Tensor]]) -> dict[str, _File]:
        """Write client files in several threads; hashing and writing release the interpreter lock."""

        def write(client: int) -> _File:
            return self._write(f"clients/{client}-{round}", changed[client])

        pool = ThreadPoolExecutor(WRITERS)
        try:
            return {str(client): file for client, file in zip(changed, pool.map(write, changed), strict=True)}
        finally:
            pool.shutdown(cancel_futures=True)

    def _check_size(self, entry: _File) -> None:
        path = self._path / entry["file"]
        with files.reading(path):
            size = path.stat().st_size
        if size != entry["bytes"]:
            raise HoldfastError(f"{path} is damaged: {size} bytes instead of {entry['bytes']}")

    def _read(self, entry: _File) -> bytes:
        path = self._path / entry["file"]
        with files.reading(path):
            data = path.read_bytes()
        if sha256(data).hexdigest() != entry["sha256"]:
            raise HoldfastError(f"{path} is damaged: its content does not match its SHA-256")
        return data

    def _read_state(self, entry: _File) -> State:
        return from_bytes(self._read(entry))

    def _remove_all_but(self, generations: list[_Manifest]) -> None:
        """Remove files that no manifest lists: those of older checkpoints and of failed attempts."""
        named = {manifest["state"]["file"] for manifest in generations}
        named.update(entry["file"] for manifest in generations for entry in manifest["clients"].values())
        for prefix in ("", "clients/"):
            with suppress(OSError), os.scandir(self._path / prefix) as entries:
                for entry in entries:
                    if entry.name.endswith((".safetensors", ".tmp")) and prefix + entry.name not in named:
                        os.unlink(entry.path)


def _manifest_bytes(manifest: _Manifest) -> bytes:
    text = json.dumps(manifest)
    return f'{{"sha256": "{sha256(text.encode()).hexdigest()}", "checkpoint": {text}}}'.encode()


def _read_manifest(path: Path) -> _Manifest:
    with files.reading(path):
        data = path.read_bytes()
    content = files.parse_json(data, path)
    validate_content(content, _ManifestFile, path)
    manifest: _Manifest = content["checkpoint"]
    if data != _manifest_bytes(manifest):
        raise HoldfastError(f"{path} is damaged: its content does not match its SHA-256")
    for client in manifest["clients"]:
        if not client.isdecimal():
            raise HoldfastError(f"{path} is damaged: '{client}' is not the number of a client")
    for client in map(str, manifest["changed"]):
        if client not in manifest["clients"]:
            raise HoldfastError(
                f"{path} is damaged: it changes client {client}, but has no file of this client"
            )
    return manifest
