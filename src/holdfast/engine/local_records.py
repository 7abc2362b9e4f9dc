"""The metrics of local models in a round's record."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from holdfast import metrics
from holdfast.core.trees import copy_to_device
from holdfast.engine.clients import ClientResult
from holdfast.engine.evaluation import Evaluation
from holdfast.engine.validation import ClientMetrics, PendingMetrics
from holdfast.methods.base import Method, Server, Tensors, Tree
from holdfast.models.network import Output

if TYPE_CHECKING:
    from holdfast.engine.rounds import RoundLoop


class LocalRecords:
    """Collects the metrics of a round's local models, which are tested in groups of ``engine.group``."""

    def __init__(self, loop: RoundLoop, validate: bool = False) -> None:
        """``validate``: whether clients test their models on their validation samples."""
        self.loop, self.validates = loop, validate and loop.validation is not None
        self.clients: list[int] = []
        self.samples: list[int] = []
        self.losses: list[float] = []
        self.divergence: list[Tensor] = []
        self.label_counts: list[np.ndarray] = []
        self.pending: list[tuple[int, Tensors, Tensors, Callable[[Any], Tensor]]] = []
        self.tested: list[Evaluation] = []
        self.validation: list[PendingMetrics] = []
        self.seconds = 0.0

    def add(self, result: ClientResult, server: Server) -> None:
        """Add a trained client. Its model is tested when a group is complete."""
        loop = self.loop
        self.clients.append(result.client)
        self.samples.append(result.samples)
        self.losses.append(result.loss)
        self.label_counts.append(result.label_counts)
        if self.validates and result.validation is not None and loop.validation is not None:
            samples = loop.validation.sizes[[result.client]]
            values = {name: np.array([value]) for name, value in result.validation.items()}
            self.validation.append(ClientMetrics(np.array([result.client]), samples, values))
        if not (loop.settings.evaluate_locals or self.validates):
            return
        began = time.perf_counter()
        if loop.settings.evaluate_locals:
            distances = torch._foreach_norm(
                torch._foreach_sub([result.params[k] for k in server.params], list(server.params.values()))
            )
            self.divergence.append(torch.stack(distances).norm())
        params, buffers, state = result.params, result.buffers, result.client_state.get("method", {})
        if loop.engine.group > 1:  # copies, since the engine reuses a result's tensors before the test
            params, buffers, state = (
                copy_to_device(tree, loop.context.device) for tree in (params, buffers, state)
            )
        scores = partial(_personal_logits, loop.method, state)
        self.pending.append((result.client, params, buffers, scores))
        self.seconds += time.perf_counter() - began
        if len(self.pending) >= loop.engine.group:
            self.flush()

    def flush(self) -> None:
        """Test the models that are still pending."""
        if not self.pending:
            return
        began = time.perf_counter()
        clients, models = [k for k, *_ in self.pending], [(p, b) for _, p, b, _ in self.pending]
        scores = [s for *_, s in self.pending]
        if self.loop.settings.evaluate_locals:
            self.tested += self.loop.local_test.evaluate_many(models, scores)
        if self.validates and self.loop.validation is not None:
            validation = self.loop.validation.start_each(clients, models, scores)
            self.validation += [] if validation is None else [validation]
        self.pending = []
        self.seconds += time.perf_counter() - began

    def record(self) -> dict[str, Any]:
        """The local part of a round's record."""
        if not self.clients:
            return {"participants": [], "samples": []}
        weights = np.array(self.samples, float)
        record: dict[str, Any] = {
            "participants": self.clients,
            "samples": self.samples,
            "train_loss": float(np.average(self.losses, weights=weights)),
        }
        if not self.tested:
            return record
        counts = np.stack(self.label_counts)
        local = np.stack([e.class_accuracy for e in self.tested])
        before, score = self.loop.local_test_accuracy, self.loop.context.task.score
        measured = self.loop.local_test.measured  # errors are positive in records
        inside, outside = metrics.in_out_local_accuracy(local, counts)
        by_group = {
            f"{group}_{score}": {
                name: [measured(e.group_accuracy[group][name]) for e in self.tested] for name in names
            }
            for group, names in self.tested[0].group_accuracy.items()
        }
        overall = [measured(e.accuracy) for e in self.tested]
        record |= {
            "locals": {f"class_{score}": measured(local).tolist(), score: overall} | by_group,
            "local_in": measured(np.asarray(inside)).tolist(),
            "local_out": measured(np.asarray(outside)).tolist(),
            "weight_divergence": torch.stack(self.divergence).tolist(),
        }
        if before is not None:
            record["locals"]["global_before"] = measured(before).tolist()
            record["local_forgetting"] = metrics.local_forgetting(before, local).tolist()
            record["distribution_distance"] = metrics.distribution_distance(before, counts).tolist()
            global_in, global_out = metrics.in_out_local_accuracy(
                np.broadcast_to(before, local.shape), counts
            )
            record["in_local"] = measured(float(np.average(global_in, weights=weights)))
            record["out_local"] = measured(float(np.average(global_out, weights=weights)))
        return record


def _personal_logits(method: Method, state: Tree, out: Output) -> Tensor:
    return method.personal_logits(out, state)
