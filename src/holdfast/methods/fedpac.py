"""FedPAC: feature alignment for all clients, and for each client a mixture of heads optimised for its data."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from holdfast.core.errors import HoldfastError
from holdfast.core.spec import NonNegative, Positive
from holdfast.methods.base import Batch, Local, Method, Server, Tensors, Tree, Upload
from holdfast.methods.card import Card
from holdfast.methods.context import Client, RunContext
from holdfast.models.network import Output

SMALLEST_SHARE = 1e-3  # heads with a smaller α in a mixture are left out


@dataclass(frozen=True)
class FedPAC(Method):
    """Personalisation by feature alignment and classifier collaboration.

    Local: the first epoch trains only the head (with learning rate ``head_lr``), the others only the body, on
    CE + λ MSE(h, p_y); the MSE is the mean over dimensions and batch, and λ = 0 in round 1. p are the global class
    prototypes; a class without one uses the client's own mean feature before training.
    Before training, a client computes, from the features of the received body, with class shares p_c and class means
    μ_c: v_k = [Σ_c p_c tr E_c[hhᵀ] - Σ_c p_c² ‖μ_c‖²] / n_k, and p_c μ_c.
    Server: the n_k-weighted mean of the bodies; prototypes: class means after training, weighted by class
    counts; for each participant i the head Σ_j α_j head_j with α = argmin αᵀ(diag v + D)α, α ≥ 0, Σα = 1,
    D_jl = ⟨p^i μ^i - p^j μ^j, p^i μ^i - p^l μ^l⟩; α_j below 0.001 are set to 0.
    Xu et al., ICLR 2023; λ = 1, ``head_lr`` = 0.1. A client's first head is the run's initial one; the
    tested global model has the n_k-weighted mean of the heads.
    """

    name: ClassVar[str] = "fedpac"
    card: ClassVar[Card] = Card(
        when="every client needs a personal model, and label counts may be disclosed",
        client="two forward passes over its samples each round",
        server="solves a small quadratic programme for each participant; keeps every client's classifier",
        uploads="each class's feature sum and count, and the features' variance; its classifier is mixed into others'",
    )
    needs_classes: ClassVar[bool] = True
    needs_features: ClassVar[bool] = True
    keeps_uploads: ClassVar[bool] = True

    lam: NonNegative = 1.0  # λ: weight of the alignment term
    head_lr: Positive = 0.1  # the head's learning rate in its epoch

    def prepare(self, context: RunContext) -> Self:
        """Raises unless there is an epoch for the head and at least one for the body."""
        if context.whole_epochs(self.name) < 2:
            raise HoldfastError(
                "fedpac trains the head in the first local epoch and the body in the others; "
                f"local_epochs is {context.local_epochs} and must be at least 2"
            )
        return self

    def init_server_state(self, context: RunContext) -> Tree:
        """No prototype yet, no client's head."""
        zeros = torch.zeros(
            context.num_classes, context.network.head.features, dtype=context.dtype, device=context.device
        )
        return {"prototypes": zeros, "known": torch.zeros_like(context.class_counts)}

    def broadcast(self, server: Server) -> Tree:
        return {"prototypes": server.state["prototypes"], "known": server.state["known"]}

    def broadcast_to(self, server: Server, client: int) -> Tree:
        """The client's own mixture of heads; none before its first participation."""
        head = server.state.get("heads", {}).get(str(client))
        return {} if head is None else {"head": head}

    def initial_params(self, params: Tensors, payload: Tree, state: Tree, client: Client) -> Tensors:
        """The received body with the client's own head."""
        network = client.context.network
        head: Tensors = payload.get("head") or {name: network.params[name] for name in network.head.names}
        return params | head

    def client_init(self, payload: Tree, state: Tree, client: Client) -> Tree:
        """The prototypes to align with; also computes v_k and p_c μ_c."""
        features = client.forward(client.global_params).features
        sums, n = _class_sums(features, client), client.samples
        spread = (features.square().sum() / n - (sums / n).square().sum()) / n
        client.notes[self.name] = {"means": sums / n, "variance": spread}
        own = sums / client.label_counts.clamp(min=1).unsqueeze(-1)
        known = payload["known"] > 0
        return {
            "prototypes": torch.where(known.unsqueeze(-1), payload["prototypes"], own),
            "lam": client.context.scalar(self.lam if client.round > 1 else 0),
        }

    def loss(self, out: Output, batch: Batch, carry: Tree, local: Local) -> Tensor:
        """λ MSE(h, p_y)."""
        distance = (out.features - carry["prototypes"][batch.y]).square().mean(-1)
        term: Tensor = carry["lam"] * batch.mean(distance)
        return term

    def learning_rate(self, name: str, epoch: int, lr: float, context: RunContext) -> float:
        """0 except for the head in the first epoch and the body in the others."""
        of_head = name in context.network.head.names
        if of_head != (epoch == 0):
            return 0.0
        return self.head_lr if of_head else lr

    def client_final(self, params: Tensors, carry: Tree, client: Client) -> tuple[Tree, Tree]:
        """Send the class sums of the trained body's features, label counts, v_k and p_c μ_c."""
        sums = _class_sums(client.forward(params).features, client)
        return {"features": sums, "labels": client.label_counts, **client.notes[self.name]}, {}

    def personal_params(self, server: Server, state: Tree, client: int) -> Tensors:
        """The body with the client's mixture of heads."""
        head: Tensors = self.broadcast_to(server, client).get("head", {})
        return server.params | head

    def update(self, server: Server, sums: Tree, uploads: Sequence[Upload], context: RunContext) -> Tree:
        """New prototypes, and new heads for the participants."""
        state, labels = server.state, sums["labels"]
        seen = labels > 0
        means = sums["features"] / labels.clamp(min=1).unsqueeze(-1)
        heads = dict(state.get("heads", {}))
        for own, upload in enumerate(uploads):
            shares = _shares(uploads, own)
            heads[str(upload.client)] = {
                name: torch.stack([a * u.params[name] for a, u in zip(shares, uploads, strict=True)]).sum(0)
                for name in context.network.head.names
            }
        return {
            "prototypes": torch.where(seen.unsqueeze(-1), means, state["prototypes"]),
            "known": torch.where(seen, torch.ones_like(labels), state["known"]),
            "heads": heads,
        }


def _class_sums(features: Tensor, client: Client) -> Tensor:
    """The sum of each class's features: ``[C, d]``."""
    return F.one_hot(client.y, client.context.num_classes).to(features.dtype).T @ features


def _shares(uploads: Sequence[Upload], own: int) -> list[float]:
    """α for one participant."""
    means = torch.stack([u.sums["means"].flatten() for u in uploads]).double()
    differences = means[own] - means
    variances = torch.stack([u.sums["variance"] for u in uploads]).double()
    shares = simplex_minimum((torch.diag(variances) + differences @ differences.T).cpu().numpy())
    shares[shares < SMALLEST_SHARE] = 0
    return [float(a) for a in shares / shares.sum()]


def simplex_minimum(matrix: np.ndarray) -> np.ndarray:
    """argmin αᵀ Q α over α ≥ 0, Σα = 1, for a positive semi-definite Q ``[n, n]``.

    With Q = AᵀA, α is proportional to the non-negative x that minimises ‖Ax‖² + (Σx - 1)².
    """
    from scipy.optimize import nnls

    values, vectors = np.linalg.eigh(matrix / max(np.trace(matrix) / len(matrix), np.finfo(float).tiny))
    root = (vectors * np.sqrt(values.clip(min=0))).T
    solution, _ = nnls(np.vstack([root, np.ones(len(matrix))]), np.append(np.zeros(len(matrix)), 1.0))
    return np.asarray(solution / solution.sum())
