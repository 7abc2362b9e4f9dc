"""FedMuon: local steps along orthogonalised, shared momentum, combined with the global direction."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from holdfast.core.spec import Fraction, Momentum, NonNegative
from holdfast.methods.base import Batch, Local, Method, Server, Tensors, Trainer, Tree
from holdfast.methods.card import Card
from holdfast.methods.context import Client, RunContext

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # coefficients of X, X Xᵀ X and (X Xᵀ)² X
ITERATIONS = 5
ADAM_BETAS, ADAM_EPS = (0.9, 0.95), 1e-10


@dataclass(frozen=True)
class FedMuon(Method):
    """Muon on the clients, with shared momentum and alignment to the global direction.

    Each step, with g the gradient and η the round's learning rate, for every weight of two and more dimensions, as a
    matrix of [outputs, the rest]:
      M ← β M + (1-β) g;  w ← (1 - (1-α) η δ) w - (1-α) η o O((1-β) g + β M) + α η Δ
    with O(X) ≈ U Vᵀ of the singular value decomposition X = U S Vᵀ, by five Newton-Schulz iterations, and
    o = √max(1, outputs/inputs) for linear layers, 1 for convolutions. Biases and scales take a step of AdamW
    (0.9, 0.95) in place of o O, with moments that start at 0 in each round. The run's momentum, weight decay and
    max_grad_norm do not apply.
    M starts at the mean M̄ of the participants of the round before; Δ = mean_k (w_k - w^{t-1}) / (K_k η) of that round,
    for K_k steps; both are 0 in round 1.  Server: the unweighted mean.
    Liu et al., 2025 (arXiv 2510.27403), and the authors' code, from which are o, β = 0.98, the weight decay δ = 0.01,
    the mixture of g and M, AdamW, and α = 0.5. Their learning rate is 0.03 for ResNet-18, with half of it on matrices,
    and 3e-4 for transformers, with ten times as much on matrices; here matrices have ``scale`` η.
    """

    name: ClassVar[str] = "fedmuon"
    card: ClassVar[Card] = Card(
        when="the number of rounds is small, as for transformers and larger networks; the learning rate differs "
        "from SGD's",
        client="ten to fifteen products of matrices of each weight's size in each step",
        server="keeps a momentum and a direction of the model's size",
        uploads="its momentum, a mean of its last gradients, and its number of local steps",
    )

    alpha: Fraction = 0.5  # α: share of the global direction in a step
    beta: Momentum = 0.98  # β: momentum
    scale: NonNegative = 1.0  # the learning rate of matrices over that of other parameters
    decay: NonNegative = 0.01  # δ: weight decay, decoupled as in AdamW

    def init_server_state(self, context: RunContext) -> Tree:
        """M̄ = Δ = 0."""
        params = context.network.params
        return {
            "momentum": {k: torch.zeros_like(p) for k, p in params.items() if p.dim() > 1},
            "direction": {k: torch.zeros_like(p) for k, p in params.items()},
        }

    def broadcast(self, server: Server) -> Tree:
        return server.state

    def client_init(self, payload: Tree, state: Tree, client: Client) -> Tree:
        """M and Δ, and AdamW's moments of the other parameters."""
        zeros = {k: torch.zeros_like(p) for k, p in client.global_params.items() if p.dim() < 2}
        return payload | {"first": zeros, "second": dict(zeros), "count": client.context.scalar(0)}

    def step(
        self, trainer: Trainer, params: Tensors, batch: Batch, carry: Tree, local: Local
    ) -> tuple[Tensors, Tree]:
        """The new weights, momentum and moments."""
        grads, _ = trainer.gradient(
            lambda w: self.task_loss(trainer.forward(w, batch.x), batch, carry), params
        )
        rate, count = (1 - self.alpha) * trainer.lr, carry["count"] + 1
        momentum, first, second = dict(carry["momentum"]), dict(carry["first"]), dict(carry["second"])
        new = {}
        for k, w in params.items():
            if k in momentum:
                momentum[k] = torch.lerp(grads[k], momentum[k], self.beta)
                mixed = torch.lerp(grads[k], momentum[k], self.beta)
                own, update = rate * self.scale, _shape_factor(w) * orthogonal(mixed)
            else:
                b1, b2 = ADAM_BETAS
                first[k], second[k] = (
                    torch.lerp(grads[k], first[k], b1),
                    torch.lerp(grads[k].square(), second[k], b2),
                )
                own = rate
                update = first[k] / (1 - b1**count) / ((second[k] / (1 - b2**count)).sqrt() + ADAM_EPS)
            global_step = self.alpha * trainer.lr * carry["direction"][k]
            new[k] = w - own * (self.decay * w + update) + global_step
        return new, carry | {"momentum": momentum, "first": first, "second": second, "count": count}

    def client_final(self, params: Tensors, carry: Tree, client: Client) -> tuple[Tree, Tree]:
        """M and (w_k - w^{t-1}) / (K_k η), for their means."""
        path = client.steps * client.lr
        moved = {k: (p - client.global_params[k]) / path for k, p in params.items()}
        return {"momentum": carry["momentum"], "direction": moved, "clients": client.context.scalar(1)}, {}

    def client_weight(self, client: Client) -> float:
        return 1.0

    def aggregate(
        self, server: Server, mean: Tensors, sums: Tree, context: RunContext
    ) -> tuple[Tensors, Tree]:
        """w^t = mean, and the next round's M̄ and Δ."""
        clients = sums["clients"]
        return mean, {
            name: {k: v / clients for k, v in sums[name].items()} for name in ("momentum", "direction")
        }


def _shape_factor(weight: Tensor) -> float:
    """√max(1, outputs/inputs) of a linear layer's weight, 1 of a convolution's."""
    return max(1.0, weight.shape[0] / weight.shape[1]) ** 0.5 if weight.dim() == 2 else 1.0


def orthogonal(weight: Tensor) -> Tensor:
    """Approximately U Vᵀ of a weight as a matrix [outputs, the rest], in its shape; its singular values are near 1."""
    x = weight.flatten(1)
    transposed = x.shape[0] > x.shape[1]
    x = x.T if transposed else x
    x = x / (x.square().sum().sqrt() + 1e-7)
    a, b, c = NEWTON_SCHULZ
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return (x.T if transposed else x).reshape(weight.shape)
