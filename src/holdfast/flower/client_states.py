"""What a site's clients remember between rounds, on the site's own disk."""

from __future__ import annotations

import os
from pathlib import Path

from holdfast.core import files
from holdfast.core.errors import HoldfastError
from holdfast.core.trees import leaves, unflatten
from holdfast.flower.app import Config
from holdfast.methods.base import Tree
from holdfast.runs.tensors import from_bytes, to_bytes


class SiteClientStates:
    """One file for each client and round, ``STATE-DIR/RUN/CLIENT/ROUND.safetensors``.

    The server says from which round's memory a client goes on: a round that was never completed, or whose
    result the server refused, is forgotten like that.
    """

    def __init__(self, node: Config, run: str) -> None:
        home = Path(os.environ.get("FLWR_HOME", "~/.flwr")).expanduser()
        self.root = Path(str(node.get("state-dir") or home / "holdfast")) / run

    def get(self, client: int, round: int) -> Tree | None:
        """What the client remembered after that round; None where nothing is kept of it."""
        path = self._file(client, round)
        if not path.exists():
            return None
        with files.reading(path):
            data = path.read_bytes()
        try:
            return unflatten(from_bytes(data))
        except ValueError as error:
            raise HoldfastError(
                f"{path} is damaged ({error}); remove it, and the client starts afresh"
            ) from None

    def put(self, client: int, round: int, memory: Tree, before: int) -> None:
        """Keep what the client remembers after ``round``, which it went on to from ``before``."""
        flat = dict(leaves(memory))
        if not flat:
            return
        path = self._file(client, round)
        with files.writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        files.replace(path, to_bytes(flat))
        # A server that goes back a checkpoint may name the one before; older ones are never asked for again.
        older = sorted(n for n in self._rounds(client) if n < before)
        for n in older[:-1]:
            self._file(client, n).unlink(missing_ok=True)

    def _rounds(self, client: int) -> list[int]:
        names = (path.stem for path in (self.root / str(client)).glob("*.safetensors"))
        return [int(name) for name in names if name.isdecimal()]

    def _file(self, client: int, round: int) -> Path:
        return self.root / str(client) / f"{round}.safetensors"
