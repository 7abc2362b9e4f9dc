"""Evaluation on a stream: clients' private models on the tasks seen so far and on all classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from holdfast import metrics
from holdfast.core.trees import to_device
from holdfast.data.skew import minority_classes
from holdfast.engine.clients import Broadcast, ClientRunner, Job
from holdfast.methods.base import Tensors, Tree
from holdfast.metrics.summary import mean_and_deviation
from holdfast.models.network import Output

if TYPE_CHECKING:
    from holdfast.engine.rounds import RoundLoop

Scores = Callable[[Output], Tensor]
PrivateModel = tuple[Tensors, Tensors, Scores]


class StreamEvaluation:
    """Evaluates private models: the global body with the client's head, or the method's initial parameters."""

    def __init__(self, loop: RoundLoop, runner: ClientRunner) -> None:
        self.loop, self.runner = loop, runner
        self.minority = minority_classes(loop.federation.class_counts)
        stages = loop.federation.stages
        self.tasks = replace(loop.federation, cumulative=False)  # each stage's own samples
        # For each client that took part in this epoch: accuracy after each stage (rows) on each stage's task (columns).
        self.matrix: dict[int, np.ndarray] = {}
        self.initial = np.full(loop.context.num_classes, np.nan)  # [C] accuracy of the untrained model
        self.empty = np.full((stages, stages), np.nan)

    def before_training(self) -> None:
        """Test the untrained model, the baseline of forward transfer."""
        self.initial = self.loop.evaluate_global(self.loop.local_test).class_accuracy

    def after_round(self, number: int, participants: Sequence[int]) -> dict[str, Any]:
        """A_sel after every stage; A_loc, A_glo and continual-learning metrics after the last.

        Names that end in ``_t`` are of the minority classes alone.
        ``task_accuracy`` [K, T] is each participant's row of its accuracy matrix: its private model after this
        stage on each of its tasks (NaN where it has none).
        """
        loop = self.loop
        stage = loop.stage(number)
        if stage == 0 and number > 1 and loop.stage(number - 1) > 0:
            self.matrix = {}  # a new epoch begins
        record: dict[str, Any] = {}
        if participants:
            counts = self._task_counts(participants)
            known = self._class_accuracy(participants, number)  # [K, C]
            tasks = _task_accuracy(known[:, None], counts)
            record["task_accuracy"] = tasks.tolist()
            record["A_sel"] = metrics.seen_task_accuracy(tasks, counts.sum(-1), stage + 1)
            if self.minority.any():
                rare = counts * self.minority
                of_rare = _task_accuracy(known[:, None], rare)
                record["A_sel_t"] = metrics.seen_task_accuracy(of_rare, rare.sum(-1), stage + 1)
            for client, row in zip(participants, tasks, strict=True):
                self.matrix.setdefault(int(client), self.empty.copy())[stage] = row
        if stage == loop.federation.stages - 1 or number == loop.settings.rounds:
            record |= self._all_class_accuracy(number) | self._transfer()
            if participants and loop.method.overrides("prototype_logits"):
                tasks = _task_accuracy(
                    self._prototype_accuracy(participants, number, counts)[:, None], counts
                )
                record["A_pro"] = metrics.seen_task_accuracy(tasks, counts.sum(-1), stage + 1)
        return record

    def _prototype_accuracy(self, participants: Sequence[int], number: int, counts: np.ndarray) -> np.ndarray:
        """Class accuracy ``[K, C]`` of private models that predict the nearest prototype of their clients' classes."""
        method, server = self.loop.method, self.loop.server
        owned = torch.from_numpy(counts.sum(1) > 0).to(self.loop.context.device)

        def scores_among(own: Tensor) -> Scores:
            return lambda out: method.prototype_logits(out, server).masked_fill(~own, -torch.inf)

        return self._class_accuracy(
            participants, number, dict(zip(participants, map(scores_among, owned), strict=True))
        )

    def _all_class_accuracy(self, number: int) -> dict[str, float]:
        """Accuracy of all private models and of the global model on all classes."""
        federation = self.loop.federation
        clients = np.flatnonzero(np.diff(federation.offsets).reshape(-1, federation.stages).sum(1))
        private = self._class_accuracy(clients.tolist(), number)
        general = self.loop.evaluate_global().class_accuracy
        record = {
            "A_loc": metrics.local_stream_accuracy(private[None]),
            "A_glo": metrics.global_stream_accuracy(general[None]),
        }
        if self.minority.any():
            record["A_loc_t"] = metrics.local_stream_accuracy(private[None], self.minority)
            record["A_glo_t"] = metrics.global_stream_accuracy(general[None], self.minority)
        return record

    def _transfer(self) -> dict[str, Any]:
        """Forgetting and transfer over the stages at which a client has data: by client, and their means."""
        if not self.matrix:
            return {}
        known = sorted(self.matrix)
        counts = self._task_counts(known)
        initial = _task_accuracy(self.initial, counts)
        transfer = []
        for row, client in enumerate(known):
            own = np.flatnonzero(counts[row].sum(-1))
            if len(own) < 2:
                continue  # forgetting and transfer need two tasks
            accuracy = self.matrix[client][np.ix_(own, own)]
            transfer.append({
                "client": client,
                "average_forgetting": float(metrics.average_forgetting(accuracy)),
                "backward_transfer": float(metrics.backward_transfer(accuracy)),
                "forward_transfer": float(metrics.forward_transfer(accuracy, initial[row, own])),
            })  # fmt: skip
        means: dict[str, float] = {}
        for name in ("average_forgetting", "backward_transfer", "forward_transfer"):
            mean, _ = mean_and_deviation(values[name] for values in transfer)
            means |= {} if mean is None else {name: mean}
        return means | {"transfer": transfer} if transfer else {}

    def _task_counts(self, clients: Sequence[int]) -> np.ndarray:
        """Training samples of each class in each client's own tasks: ``[K, T, C]``."""
        stages = range(self.tasks.stages)
        return np.stack([self.tasks.label_counts(list(clients), stage) for stage in stages], axis=1)

    def _class_accuracy(
        self, clients: Sequence[int], number: int, scores: Mapping[int, Scores] | None = None
    ) -> np.ndarray:
        """Class accuracy ``[K, C]`` of these clients' private models, with their own scores or the given ``scores``."""
        group, test = self.loop.engine.group, self.loop.local_test
        # Models with the same body are tested together, however many there are.
        chunk = group if self.loop.method.overrides("initial_params") else len(clients)
        trained = [k for k in clients if self.loop.client_states.get(k)]
        # The private model of a client that never took part is the global model.
        accuracy = {}
        if len(trained) < len(clients):
            accuracy = dict.fromkeys(clients, self.loop.evaluate_global(test).class_accuracy)
        for at in range(0, len(trained), chunk):
            some = trained[at : at + chunk]
            models = [self._private_model(client, number) for client in some]
            chosen = [
                own if scores is None else scores[k] for k, (_, _, own) in zip(some, models, strict=True)
            ]
            tested = test.evaluate_many([(p, b) for p, b, _ in models], chosen, group)
            accuracy |= {k: e.class_accuracy for k, e in zip(some, tested, strict=True)}
        return np.stack([accuracy[k] for k in clients])

    def _private_model(self, k: int, number: int) -> PrivateModel:
        """The private model of a client that has taken part."""
        loop, method, server = self.loop, self.loop.method, self.loop.server
        client_state = to_device(loop.client_states.get(k) or {}, loop.context.device)
        params = server.params | client_state.get("head", {})
        state: Tree = client_state.get("method", {})
        if state and method.overrides("initial_params"):
            stage = self._latest_stage(k, loop.stage(number))
            payload = {**method.broadcast(server), **method.broadcast_to(server, k)}
            sent = Broadcast(number, server.params, server.buffers, payload)
            job = Job(k, loop.federation.client(k, stage), stage, client_state=client_state)
            client = self.runner.client(self.runner.plan(job, number), sent)
            params = method.initial_params(server.params, payload, state, client)
        params = params | {n: v for n, v in client_state.get("norm", {}).items() if n in params}
        buffers = server.buffers | {
            n: v for n, v in client_state.get("norm", {}).items() if n in server.buffers
        }
        if not state:
            return params, buffers, lambda out: method.global_logits(out, server)
        return params, buffers, lambda out: method.personal_logits(out, state)

    def _latest_stage(self, k: int, stage: int) -> int:
        """The client's last stage with data in this epoch; if it has not taken part, its first stage with data."""
        stages = self.loop.federation.stages
        latest_first = [(stage - back) % stages for back in range(stages)]
        order = latest_first if k in self.matrix else range(stages)
        return next(s for s in order if len(self.loop.federation.client(k, s)))

    def state(self) -> dict[str, np.ndarray]:
        """The state to save in checkpoints."""
        state = {"initial": self.initial}
        if self.matrix:
            state |= {"clients": np.array(list(self.matrix)), "matrix": np.stack(list(self.matrix.values()))}
        return state

    def restore(self, state: dict[str, np.ndarray]) -> None:
        """Restore what ``state`` returned."""
        self.initial = state["initial"]
        if "matrix" in state:
            self.matrix = {int(k): m.copy() for k, m in zip(state["clients"], state["matrix"], strict=True)}


def _task_accuracy(class_accuracy: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Accuracy ``[K, T]`` on tasks with these class counts ``[K, T, C]``; NaN for empty tasks."""
    within, _ = metrics.in_out_local_accuracy(np.broadcast_to(class_accuracy, counts.shape), counts)
    return within
