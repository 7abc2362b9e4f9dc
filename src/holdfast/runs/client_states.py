"""Client states between rounds in bounded memory: recent ones in RAM, the others on the disk."""

import shutil
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import mkdtemp

from torch import Tensor

from holdfast.core import files
from holdfast.runs.checkpoint import LazyStates
from holdfast.runs.tensors import State, byte_count, from_bytes, to_bytes


def _owned(tensor: Tensor) -> Tensor:
    """The tensor on the CPU with storage of its own; a view would keep its base alive and change with it."""
    tensor = tensor.detach()
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor if tensor.device.type == "cpu" and whole else tensor.cpu().clone()


class ClientStates:
    """Client states by client id; the most recently used ones, up to ``budget_bytes``, stay in RAM.

    A state is looked up in RAM, then among the spilled files in ``spill_dir`` (a temporary directory by default),
    then in ``saved``, the clients of the last checkpoint. A state that equals its checkpointed one is dropped from
    RAM without being spilled. The checkpoint's files are never written to.

    Do not modify the tensors that ``get`` returns; ``put`` new ones instead.
    """

    def __init__(
        self,
        budget_bytes: int,
        spill_dir: Path | None = None,
        saved: Mapping[int, State] | None = None,
    ) -> None:
        self._budget = budget_bytes
        self._spill_dir = spill_dir
        self._saved: Mapping[int, State] = saved if saved is not None else {}
        self._recent: OrderedDict[int, State] = OrderedDict()  # in RAM, least recently used first
        self._bytes = 0
        self._changed: set[int] = set()  # differ from the checkpoint
        self._spilled: set[int] = set()  # changed, with an up-to-date file

    def get(self, client: int) -> State | None:
        """The latest state of this client, or None."""
        if client in self._recent:
            self._recent.move_to_end(client)
            return self._recent[client]
        if client not in self._changed and client not in self._saved:
            return None
        state = self._read(client)
        self._keep(client, state)
        return state

    def put(self, client: int, state: Mapping[str, Tensor]) -> None:
        self._changed.add(client)
        self._drop_file(client)
        self._keep(client, {name: _owned(tensor) for name, tensor in state.items()})

    def changed(self) -> Mapping[int, State]:
        """The states put since the last checkpoint, each read at access: those that the next one must save."""
        return LazyStates(frozenset(self._changed), self._read)

    def committed(self, saved: Mapping[int, State]) -> None:
        """After a checkpoint with every state: drop the spilled copies and read from ``saved`` instead."""
        self._saved = saved
        for client in list(self._spilled):
            self._drop_file(client)
        self._changed.clear()

    def items(self) -> Iterator[tuple[int, State]]:
        """Every client id, in increasing order, with its state, read one at a time."""
        for client in sorted(self._changed.union(self._saved)):
            yield client, self._read(client)

    def __len__(self) -> int:
        return len(self._changed.union(self._saved))

    def _read(self, client: int) -> State:
        if client in self._recent:
            return self._recent[client]
        if client in self._spilled:
            path = self._file(client)
            with files.reading(path):
                return from_bytes(path.read_bytes())
        return self._saved[client]

    def _keep(self, client: int, state: State) -> None:
        if client in self._recent:
            self._bytes -= byte_count(self._recent.pop(client))
        self._recent[client] = state
        self._bytes += byte_count(state)
        while self._bytes > self._budget:
            oldest = next(iter(self._recent))
            if oldest in self._changed and oldest not in self._spilled:
                self._spill(oldest)
            self._bytes -= byte_count(self._recent.pop(oldest))

    def _spill(self, client: int) -> None:
        path = self._file(client)
        data = to_bytes(self._recent[client])
        with files.writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        self._spilled.add(client)

    def _file(self, client: int) -> Path:
        if self._spill_dir is None:
            self._spill_dir = Path(mkdtemp(prefix="holdfast-clients-"))
            weakref.finalize(self, shutil.rmtree, self._spill_dir, ignore_errors=True)
        return self._spill_dir / f"{client}.safetensors"

    def _drop_file(self, client: int) -> None:
        if client in self._spilled:
            self._file(client).unlink(missing_ok=True)
            self._spilled.discard(client)
