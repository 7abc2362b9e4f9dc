"""Federated evaluation at the sites: the server sends a model and receives each client's metrics."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np

from holdfast.core.trees import Tensors
from holdfast.engine.clients import Broadcast, Incident, Job
from holdfast.engine.evaluation import evaluated_model
from holdfast.engine.validation import ClientMetrics, PendingMetrics, Scores, errors_among
from holdfast.flower.engine import FlowerEngine
from holdfast.methods.base import Method, Server
from holdfast.metrics.by_task import Metric

_log = logging.getLogger("flwr")  # the logger whose records Flower displays


class SiteValidation:
    """Tests by clients whose validation samples are at their sites."""

    def __init__(
        self, engine: Callable[[], FlowerEngine], sizes: np.ndarray, metrics: Sequence[Metric]
    ) -> None:
        """``engine`` returns the run's engine, once it exists; ``sizes`` [clients] are the validation samples."""
        self.engine, self.sizes, self.errors = engine, sizes, errors_among(metrics)

    def start(self, method: Method, server: Server) -> ClientMetrics:
        """Start the test of the global model by all clients; clients without a reply are left out."""
        engine = self.engine()
        params, buffers = evaluated_model(method, server)
        state = {"state": server.state} if method.overrides("global_logits") else {}
        jobs = [Job(int(k), np.empty(0, np.int64)) for k in np.flatnonzero(self.sizes)]
        answers = list(engine.evaluate(Broadcast(server.round, params, buffers, state), jobs))
        for answer in answers:
            if isinstance(answer, Incident):
                _log.warning(
                    "Holdfast: client %s does not test round %s: %s %s",
                    answer.client, server.round, answer.kind, answer.detail,
                )  # fmt: skip
        measured = dict(answer for answer in answers if not isinstance(answer, Incident))
        clients = np.array(sorted(measured), np.int64)
        names = engine.recorded
        values = {name: np.array([measured[k][name] for k in clients], float) for name in names}
        return ClientMetrics(clients, self.sizes[clients], values)

    def start_each(
        self, clients: Sequence[int], models: Sequence[tuple[Tensors, Tensors]], scores: Sequence[Scores]
    ) -> PendingMetrics | None:
        """Returns None: clients test their local models at their sites and send the metrics with their updates."""
        return None
