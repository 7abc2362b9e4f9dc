"""Storage of client states between rounds: on the GPU up to a limit, then in RAM, then on the disk."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from holdfast.core.device import free_gpu_bytes
from holdfast.core.trees import copy_to_device, leaves, size_in_bytes, unflatten
from holdfast.methods.base import Tree
from holdfast.runs import Checkpoint, ClientStates, RunDirectory
from holdfast.runs.tensors import State

RAM_BYTES = 2 << 30  # limit above which states are written to the disk
GPU_FRACTION = 0.25  # of the free GPU memory when the first state is stored


class StateCache:
    """An LRU cache of client states on the GPU, over `ClientStates` in RAM and on the disk.

    Copying the state of a small model from the GPU takes longer than training it. States on a GPU therefore stay
    there, and are copied to the host only for a checkpoint or when they are evicted.
    """

    def __init__(self, directory: RunDirectory | None, checkpoint: Checkpoint | None) -> None:
        saved = None if checkpoint is None else checkpoint.clients
        self._states = ClientStates(RAM_BYTES, None if directory is None else directory.scratch, saved)
        self._on_gpu: OrderedDict[int, Tree] = OrderedDict()  # least recently used first
        self._gpu_bytes = 0
        self._gpu_limit: int | None = None
        self._gpu_only: set[int] = set()  # not yet copied to `_states`

    def get(self, client: int) -> Tree | None:
        """The client's state; None before it first took part."""
        if client in self._on_gpu:
            self._on_gpu.move_to_end(client)
            return self._on_gpu[client]
        state = self._states.get(client)
        return None if state is None else unflatten(dict(state))

    def put(self, client: int, client_state: Tree) -> None:
        """Store a copy; an empty state is ignored."""
        first_leaf = next(leaves(client_state), None)
        if first_leaf is None:
            return
        if first_leaf[1].device.type != "cuda":
            self._states.put(client, dict(leaves(copy_to_device(client_state, "cpu"))))
            return
        if self._gpu_limit is None:
            self._gpu_limit = int(GPU_FRACTION * free_gpu_bytes(first_leaf[1].device))
        if client in self._on_gpu:
            self._gpu_bytes -= size_in_bytes(self._on_gpu.pop(client))
        self._on_gpu[client] = copy_to_device(client_state, first_leaf[1].device)
        self._gpu_bytes += size_in_bytes(client_state)
        self._gpu_only.add(client)
        while self._gpu_bytes > self._gpu_limit:
            oldest, tree = self._on_gpu.popitem(last=False)
            self._gpu_bytes -= size_in_bytes(tree)
            if oldest in self._gpu_only:
                self._copy_to_host(oldest, tree)

    def _copy_to_host(self, client: int, client_state: Tree) -> None:
        self._states.put(client, dict(leaves(copy_to_device(client_state, "cpu"))))
        self._gpu_only.discard(client)

    @property
    def has_changed(self) -> bool:
        """Whether there are states that the last checkpoint does not hold."""
        return bool(self._gpu_only or self._states.changed())

    def changed(self) -> Mapping[int, State]:
        """The states that the next checkpoint must save."""
        for client in sorted(self._gpu_only):
            self._copy_to_host(client, self._on_gpu[client])
        return self._states.changed()

    def committed(self, saved: Mapping[int, State]) -> None:
        """Called when a checkpoint holds the states that ``changed`` returned."""
        self._states.committed(saved)
