"""Your own method: a loss for the clients, an optimiser for the server, and both together, compared with FedAvg."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

import holdfast as hf
from holdfast.methods.functional import cross_entropy


@dataclass(frozen=True)
class Calibrated(hf.Method):
    """CE(z + τ log π_k, y): a client's own class frequencies π_k need not be learnt. Zhang et al., ICML 2022."""

    name: ClassVar[str] = "calibrated"
    tau: float = 1.0  # τ, strength of the calibration

    def client_init(self, payload: hf.Tree, state: hf.Tree, client: hf.Client) -> hf.Tree:
        frequency = client.label_counts / client.samples
        return {"shift": self.tau * frequency.clamp(min=1e-4).log()}

    def task_loss(self, out: hf.Output, batch: hf.Batch, carry: hf.Tree) -> Tensor:
        return batch.mean(cross_entropy(out.logits + carry["shift"], batch.y))


@dataclass(frozen=True)
class FedAdam(hf.Method):
    """w += η m / (√v + ε); m and v are running means of the clients' mean step Δ and of Δ². Reddi et al., 2021."""

    name: ClassVar[str] = "fedadam"
    eta: float = 0.03  # η, the server's learning rate

    def init_server_state(self, context: hf.RunContext) -> hf.Tree:
        zeros = {name: torch.zeros_like(p) for name, p in context.network.params.items()}
        return {"m": zeros, "v": zeros}

    def aggregate(
        self, server: hf.Server, mean: hf.Tensors, sums: hf.Tree, context: hf.RunContext
    ) -> tuple[hf.Tensors, hf.Tree]:
        w, m, v = server.params, dict[str, Tensor](), dict[str, Tensor]()
        for name in w:
            step = mean[name] - w[name]
            m[name] = 0.9 * server.state["m"][name] + 0.1 * step
            v[name] = 0.99 * server.state["v"][name] + 0.01 * step**2
        new = {name: w[name] + self.eta * m[name] / (v[name].sqrt() + 1e-3) for name in w}
        return new, {"m": m, "v": v}


def federation(seed: int) -> hf.Federation:
    """A split of its own for each seed."""
    return hf.federate(hf.load("digits"), hf.Dirichlet(alpha=0.3), clients=10, seed=seed)


if __name__ == "__main__":
    comparison = hf.compare(
        [hf.FedAvg(), Calibrated(), FedAdam(), Calibrated() + FedAdam()],
        hf.models.mlp(64),
        federation,
        seeds=3,
        rounds=25,
        clients_per_round=5,
        local_epochs=2,
        lr=0.1,
    )
    print(comparison)
    # The same on the command line:
    # holdfast compare fedavg own_method.py:Calibrated own_method.py:Calibrated+own_method.py:FedAdam
    #     --data own_method.py:federation --model mlp:64 --rounds 25 --clients-per-round 5 --local-epochs 2
