"""Storage of client states between rounds, on the site's disk."""

from __future__ import annotations

import os
from pathlib import Path

from holdfast.core import files
from holdfast.core.errors import HoldfastError
from holdfast.core.trees import Tree, leaves, unflatten
from holdfast.flower.app import Config
from holdfast.runs.tensors import from_bytes, to_bytes


class SiteClientStates:
    """One file per client and round, ``STATE-DIR/RUN/CLIENT/ROUND.safetensors``.

    The server sends the round whose state a client continues from. States of rounds that were not completed, or whose
    results the server rejected, are thus ignored.
    """

    def __init__(self, node: Config, run: str) -> None:
        home = Path(os.environ.get("FLWR_HOME", "~/.flwr")).expanduser()
        self.root = Path(str(node.get("state-dir") or home / "holdfast")) / run

    def get(self, client: int, round: int) -> Tree | None:
        """The client's state after that round; None without a file."""
        path = self._file(client, round)
        if not path.exists():
            return None
        with files.reading(path):
            data = path.read_bytes()
        try:
            return unflatten(from_bytes(data))
        except ValueError as error:
            raise HoldfastError(
                f"{path} is damaged ({error}); remove it to start the client without stored state"
            ) from None

    def put(self, client: int, round: int, memory: Tree, previous: int) -> None:
        """Store the client's state after ``round``, which started from the state of round ``previous``."""
        flat = dict(leaves(memory))
        if not flat:
            return
        path = self._file(client, round)
        with files.writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        files.replace(path, to_bytes(flat))
        # Keep one older file, for a server that resumes from the checkpoint before.
        older = sorted(n for n in self._rounds(client) if n < previous)
        for n in older[:-1]:
            self._file(client, n).unlink(missing_ok=True)

    def _rounds(self, client: int) -> list[int]:
        names = (path.stem for path in (self.root / str(client)).glob("*.safetensors"))
        return [int(name) for name in names if name.isdecimal()]

    def _file(self, client: int, round: int) -> Path:
        return self.root / str(client) / f"{round}.safetensors"
