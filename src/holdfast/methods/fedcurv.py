"""FedCurv: hold on to the weights that matter to the other clients."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional as F

from holdfast.methods.base import Local, Method, Server, Tensors, Tree, Upload
from holdfast.methods.context import Client, Task

PER_SAMPLE_VALUES = 50_000_000  # gradient entries held at once while the Fisher information is computed


@dataclass(frozen=True)
class FedCurv(Method):
    """Elastic weight consolidation across clients.

    u_k = diagonal of the Fisher information of client k's data at its trained weights w_k, v_k = u_k ∘ w_k;
    the server keeps the latest of every client seen.
    Local: CE + λ [ ⟨Σ_{j≠k} u_j, w²⟩ - 2 ⟨Σ_{j≠k} v_j, w⟩ ]; nothing in round 1.  Server: as FedAvg.
    Shoham et al., 2019. u is the mean over samples of the squared gradient of CE, in evaluation mode. Each
    client remembers its own u_k and v_k and sends what changed, so the server holds only the sums U and V.
    λ = 1 is FedNTD's configuration, 1e-5 to 1e-3 FedReg's.

    ``variant="ntd"`` estimates u as FedNTD's code does: the mean over mini-batches of the squared gradient of
    a batch, up to the batch in which 500 samples are exceeded.
    """

    name: ClassVar[str] = "fedcurv"

    lam: float = 1.0  # λ: strength of consolidation
    variant: Literal["original", "ntd"] = "original"

    def check(self) -> None:
        """λ is a strength."""
        self.require(
            lam=(self.lam >= 0, "at least 0"),
            variant=(self.variant in ("original", "ntd"), "'original' or 'ntd'"),
        )

    def init(self, task: Task) -> Tree:
        """U = V = 0."""
        return self._zeros(task.network.params)

    def init_client(self, client: Client) -> Tree:
        """u_k = v_k = 0."""
        return self._zeros(client.sent)

    def _zeros(self, params: Tensors) -> Tree:
        return {part: {k: torch.zeros_like(p) for k, p in params.items()} for part in ("u", "v")}

    def down(self, server: Server) -> Tree:
        """Clients receive U and V."""
        return server.state

    def begin(self, payload: Tree, state: Tree, client: Client) -> Tree:
        """What the other clients hold on to: U - u_k and V - v_k."""
        client.notes[self.name] = state
        return {part: {k: all_ - state[part][k] for k, all_ in payload[part].items()} for part in ("u", "v")}

    def edit_gradient(self, grads: Tensors, carry: Tree, local: Local) -> Tensors:
        """2 λ (u ∘ w - v)."""
        if self.lam == 0:
            return grads
        u, v, strength = carry["u"], carry["v"], 2 * self.lam
        return {k: g + strength * (u[k] * local.params[k] - v[k]) for k, g in grads.items()}

    def finish(self, params: Tensors, carry: Tree, client: Client) -> tuple[Tree, Tree]:
        """Remember u_k and v_k, and send how they changed."""
        before = client.notes[self.name]
        u = self._fisher(params, client)
        now = {"u": u, "v": {k: value * params[k] for k, value in u.items()}}
        changed = {part: {k: value - before[part][k] for k, value in now[part].items()} for part in now}
        return changed, now

    def _fisher(self, params: Tensors, client: Client) -> Tensors:
        """The mean squared gradient, over samples or over mini-batches."""
        network, buffers = client.task.network, client.buffers

        def loss(w: Tensors, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(network.apply(w, buffers, x).logits, y)

        if self.variant == "ntd":
            size = client.task.batch_size
            batches = list(zip(torch.split(client.x, size), torch.split(client.y, size), strict=True))
            batches = batches[: 500 // size + 1]
            squared = [_squared(grad(loss)(params, x, y)) for x, y in batches]
            return {k: torch.stack([s[k] for s in squared]).mean(0) for k in params}
        one = lambda w, x, y: grad(loss)(w, x[None], y[None])  # noqa: E731
        weights = sum(p.numel() for p in params.values())
        size = max(1, PER_SAMPLE_VALUES // weights)
        total = {k: torch.zeros_like(p) for k, p in params.items()}
        for x, y in zip(torch.split(client.x, size), torch.split(client.y, size), strict=True):
            for k, s in _squared(vmap(one, in_dims=(None, 0, 0))(params, x, y)).items():
                total[k] += s.sum(0)
        return {k: t / client.samples for k, t in total.items()}

    def update(self, server: Server, sums: Tree, uploads: Sequence[Upload], task: Task) -> Tree:
        """U and V take over the changes."""
        return {part: {k: v + sums[part][k] for k, v in server.state[part].items()} for part in ("u", "v")}


def _squared(tensors: Tensors) -> Tensors:
    return {k: v.square() for k, v in tensors.items()}
