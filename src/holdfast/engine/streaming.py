"""What is tested on a stream: clients' private models on what they have met, and on everything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from holdfast import metrics
from holdfast.data.skew import minority_classes
from holdfast.engine.local import Broadcast, Job, LocalSide, on_device
from holdfast.methods.base import Tensors, Tree
from holdfast.models.network import Output

if TYPE_CHECKING:
    from holdfast.engine.loop import Loop

PrivateModel = tuple[Tensors, Tensors, Callable[[Output], Tensor]]


class StreamTests:
    """A client's private model is the global body with its own head, or what its method starts it from."""

    def __init__(self, loop: Loop, side: LocalSide) -> None:
        self.loop, self.side = loop, side
        self.minority = minority_classes(loop.federation.class_counts)
        stages = loop.federation.stages
        # Of the clients online in this epoch: accuracy after each stage (rows) on each stage's task (columns).
        self.matrix: dict[int, np.ndarray] = {}
        self.initial = np.full(loop.task.num_classes, np.nan)  # [C] accuracy of the untrained model
        self.empty = np.full((stages, stages), np.nan)

    def before_training(self) -> None:
        """Test the untrained model, with which forward transfer compares."""
        self.initial = self.loop.evaluate_global(self.loop.local_test).class_accuracy

    def after_round(self, number: int, participants: Sequence[int]) -> dict[str, Any]:
        """A_sel after every stage; A_loc, A_glo and continual-learning metrics after an epoch's last.

        ``task_accuracy`` [K, T] is each participant's row of its accuracy matrix: its private model after this
        stage on each of its tasks (NaN where it has none).
        """
        loop, federation = self.loop, self.loop.federation
        stage = loop.stage(number)
        if stage == 0:
            self.matrix = {}
        record: dict[str, Any] = {}
        if participants:
            counts = np.stack(
                [federation.label_counts(participants, s) for s in range(federation.stages)], axis=1
            )
            known = self._class_accuracy(participants, number)  # [K, C]
            with np.errstate(invalid="ignore"):
                tasks, _ = metrics.in_out_local_accuracy(
                    np.broadcast_to(known[:, None], counts.shape), counts
                )  # [K, T]
            tasks = np.asarray(tasks)
            record["task_accuracy"] = tasks.tolist()
            record["A_sel"] = metrics.seen_task_accuracy(tasks, counts.sum(-1), stage + 1)
            for client, row in zip(participants, tasks, strict=True):
                self.matrix.setdefault(int(client), self.empty.copy())[stage] = row
        if stage == federation.stages - 1 or number == loop.settings.rounds:
            record |= self._after_epoch(number)
        return record

    def _after_epoch(self, number: int) -> dict[str, float]:
        everyone = np.flatnonzero(
            np.diff(self.loop.federation.offsets).reshape(-1, self.loop.federation.stages).sum(1)
        )
        private = self._class_accuracy(everyone.tolist(), number)
        general = self.loop.evaluate_global().class_accuracy
        record = {
            "A_loc": metrics.local_stream_accuracy(private[None]),
            "A_glo": metrics.global_stream_accuracy(general[None]),
        }
        if self.minority.any():
            record["A_loc_t"] = metrics.local_stream_accuracy(private[None], self.minority)
            record["A_glo_t"] = metrics.global_stream_accuracy(general[None], self.minority)
        whole = {k: m for k, m in self.matrix.items() if not np.isnan(m).any()}
        if whole:
            matrix = np.stack(list(whole.values()))  # [K, T, T]
            federation = self.loop.federation
            counts = np.stack(
                [federation.label_counts(list(whole), s) for s in range(federation.stages)], axis=1
            )
            initial, _ = metrics.in_out_local_accuracy(np.broadcast_to(self.initial, counts.shape), counts)
            record |= {
                "average_forgetting": float(np.mean(metrics.average_forgetting(matrix))),
                "backward_transfer": float(np.mean(metrics.backward_transfer(matrix))),
                "forward_transfer": float(np.mean(metrics.forward_transfer(matrix, initial))),
            }
        return record

    def _class_accuracy(self, clients: Sequence[int], number: int) -> np.ndarray:
        """``[K, C]`` of these clients' private models."""
        group, test = self.loop.engine.group, self.loop.local_test
        tested = []
        for at in range(0, len(clients), group):
            models = [self._private(client, number) for client in clients[at : at + group]]
            tested += test.evaluate_many([(p, b) for p, b, _ in models], [s for _, _, s in models])
        return np.stack([e.class_accuracy for e in tested])

    def _private(self, k: int, number: int) -> PrivateModel:
        loop, method, server = self.loop, self.loop.method, self.loop.server
        memory = on_device(loop.memories.get(k) or {}, loop.task.device)
        params = server.params | memory.get("head", {})
        buffers = server.buffers | {n: v for n, v in memory.get("norm", {}).items() if n in server.buffers}
        if "method" not in memory:
            return params, buffers, lambda out: method.predict(out, server)
        state: Tree = memory["method"]
        if method.overrides("start"):
            ids = loop.federation.client(k, loop.stage(number))
            payload = {**method.down(server), **method.down_to(server, k)}
            sent = Broadcast(number, server.params, server.buffers, payload)
            client = self.side.client(self.side.plan(Job(k, ids, memory=memory), number), sent)
            params = method.start(server.params, payload, state, client)
        return params, buffers, lambda out: method.personal(out, state)

    def state(self) -> dict[str, np.ndarray]:
        """What a checkpoint must keep."""
        kept = {"initial": self.initial}
        if self.matrix:
            kept |= {"clients": np.array(list(self.matrix)), "matrix": np.stack(list(self.matrix.values()))}
        return kept

    def restore(self, state: dict[str, np.ndarray]) -> None:
        """Take up what ``state`` gave."""
        self.initial = state["initial"]
        if "matrix" in state:
            self.matrix = {int(k): m.copy() for k, m in zip(state["clients"], state["matrix"], strict=True)}
