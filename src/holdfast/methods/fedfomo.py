"""FedFomo: personal mixtures of the models of other clients, weighted by their benefit."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from holdfast.core.spec import PositiveCount
from holdfast.methods.base import Method, Server, Tensors, Tree, Upload
from holdfast.methods.card import Card
from holdfast.methods.context import Client, RunContext


@dataclass(frozen=True)
class FedFomo(Method):
    """First-order model optimisation: every client trains its own mixture of the others' models.

    The server keeps each client's last model and an affinity matrix P, initially the identity, and sends client k
    the ``models`` models of largest P[k, j].
    Client, with a fifth of its samples held out: w_old is its model before its last training;
    u_j = (L(w_old) - L(w_j)) / (‖w_j - w_old‖ + 1e-5) with L the held-out CE; its model becomes
    Σ_j max(0, u_j) w_j / Σ_j max(0, u_j), or stays unchanged if no u_j is positive; then CE training.
    Server: P[k, j] += u_j.  Tested as global: the n_k-weighted mean of all clients' last models.
    Zhang et al., ICLR 2021; M = 5 from PFLlib. Before its first round a client has the run's initial model.
    """

    name: ClassVar[str] = "fedfomo"
    card: ClassVar[Card] = Card(
        when="some clients have similar data and may receive each other's models",
        client="six forward passes over the held-out fifth of its samples each round",
        server="keeps every client's last model",
        uploads="the benefit u_j of each received model; other clients receive its model",
    )
    keeps_uploads: ClassVar[bool] = True
    holdout: ClassVar[float] = 0.2

    models: PositiveCount = 5  # M: how many models a client receives

    def broadcast_to(self, server: Server, client: int) -> Tree:
        """The models of largest affinity with this client; ties go to the lower client number."""
        stored = server.state.get("models", {})
        affinity = server.state.get("affinity", {}).get(str(client))
        known = sorted(map(int, stored))
        row = [float(j == client) if affinity is None else float(affinity[j]) for j in known]
        best = sorted(range(len(known)), key=lambda i: -row[i])[: self.models]
        return {"models": {str(known[i]): stored[str(known[i])] for i in best}}

    def init_client_state(self, client: Client) -> Tree:
        initial = client.context.network.params
        return {"own": initial, "old": initial}

    def initial_params(self, params: Tensors, payload: Tree, state: Tree, client: Client) -> Tensors:
        """The mixture of the received models."""
        own: Tensors = state["own"]
        gains: Tensors = {}
        if len(client.heldout_y):
            before = _error(state["old"], client)
            for j, model in payload.get("models", {}).items():
                gains[j] = (before - _error(model, client)) / (_distance(model, state["old"]) + 1e-5)
        helpful = {j: gain for j, gain in gains.items() if gain > 0}
        if helpful:
            total = torch.stack(list(helpful.values())).sum()
            models = payload["models"]
            own = {
                k: torch.stack([gain / total * models[j][k] for j, gain in helpful.items()]).sum(0)
                for k in own
            }
        client.notes[self.name] = {"old": own, "gains": gains}
        return own

    def client_final(self, params: Tensors, carry: Tree, client: Client) -> tuple[Tree, Tree]:
        notes = client.notes[self.name]
        return {"gains": notes["gains"]}, {"own": params, "old": notes["old"]}

    def personal_params(self, server: Server, state: Tree, client: int) -> Tensors:
        own: Tensors = state["own"]
        return own

    def refine(self, server: Server, uploads: Sequence[Upload], context: RunContext) -> Server:
        """Store models and affinities; the global model is the mean of all that are stored."""
        models, samples, affinity = (dict(server.state.get(k, {})) for k in ("models", "samples", "affinity"))
        for upload in uploads:
            k = str(upload.client)
            models[k], samples[k] = upload.params, context.scalar(upload.weight)
            row = affinity.get(k)
            if row is None:
                row = torch.zeros(context.num_clients, dtype=context.dtype, device=context.device)
                row[upload.client] = 1
            affinity[k] = row.clone()
            for j, gain in upload.sums.get("gains", {}).items():
                affinity[k][int(j)] += gain
        total = torch.stack(list(samples.values())).sum()
        mean = {name: torch.zeros_like(p) for name, p in server.params.items()}
        for k, model in models.items():
            for name, p in model.items():
                mean[name].add_(p * (samples[k] / total))
        state = {"models": models, "samples": samples, "affinity": affinity}
        return Server(mean, server.buffers, state, server.round)


def _error(params: Tensors, client: Client) -> Tensor:
    """The task's loss on the held-out samples."""
    return client.context.task.batch_loss(client.forward(params, client.heldout_x).logits, client.heldout_y)


def _distance(a: Tensors, b: Tensors) -> Tensor:
    """‖a - b‖ over all parameters."""
    return torch.stack([(p - b[k]).square().sum() for k, p in a.items()]).sum().sqrt()
