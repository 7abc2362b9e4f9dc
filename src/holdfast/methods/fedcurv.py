"""FedCurv: a quadratic penalty on changes of the weights that are important to the other clients."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.func import grad, vmap

from holdfast.core.spec import NonNegative
from holdfast.methods.base import Local, Method, Server, Tensors, Tree, Upload
from holdfast.methods.card import Card
from holdfast.methods.context import Client, RunContext

PER_SAMPLE_VALUES = 50_000_000  # limit of gradient entries in memory for the Fisher information


@dataclass(frozen=True)
class FedCurv(Method):
    """Elastic weight consolidation across clients.

    u_k = diagonal of the Fisher information of client k's data at its trained weights w_k, v_k = u_k ∘ w_k;
    the server keeps the latest of every client seen.
    Local: CE + λ [ ⟨Σ_{j≠k} u_j, w²⟩ - 2 ⟨Σ_{j≠k} v_j, w⟩ ]; nothing in round 1.  Server: as FedAvg.
    Shoham et al., 2019. u is the mean over samples of the squared gradient of CE, in evaluation mode. Each
    client keeps its own u_k and v_k and sends their changes, so the server keeps only the sums U and V.
    λ = 1 in FedNTD's configuration, 1e-5 to 1e-3 in FedReg's.

    ``variant="ntd"`` estimates u as FedNTD's code does: the mean over shuffled mini-batches of the squared gradient
    of a batch, up to the batch in which 500 samples are exceeded.
    """

    name: ClassVar[str] = "fedcurv"
    card: ClassVar[Card] = Card(
        when="weights that are important to other clients should be protected, and bandwidth is plentiful",
        client="a separate forward and backward pass for each of its samples each round",
        server="keeps two sums of the model's size",
        uploads="the change of its diagonal Fisher information, one number for each weight",
    )

    lam: NonNegative = 1.0  # λ: weight of the penalty
    variant: Literal["original", "ntd"] = "original"

    def init_server_state(self, context: RunContext) -> Tree:
        return self._zeros(context.network.params)

    def init_client_state(self, client: Client) -> Tree:
        return self._zeros(client.global_params)

    def _zeros(self, params: Tensors) -> Tree:
        return {part: {k: torch.zeros_like(p) for k, p in params.items()} for part in ("u", "v")}

    def broadcast(self, server: Server) -> Tree:
        return server.state

    def client_init(self, payload: Tree, state: Tree, client: Client) -> Tree:
        """The sums over the other clients: U - u_k and V - v_k."""
        client.notes[self.name] = state
        return {part: {k: all_ - state[part][k] for k, all_ in payload[part].items()} for part in ("u", "v")}

    def edit_gradient(self, grads: Tensors, carry: Tree, local: Local) -> Tensors:
        """2 λ (u ∘ w - v)."""
        if self.lam == 0:
            return grads
        u, v, strength = carry["u"], carry["v"], 2 * self.lam
        return {k: g + strength * (u[k] * local.params[k] - v[k]) for k, g in grads.items()}

    def client_final(self, params: Tensors, carry: Tree, client: Client) -> tuple[Tree, Tree]:
        before = client.notes[self.name]
        u = self._fisher(params, client)
        now = {"u": u, "v": {k: value * params[k] for k, value in u.items()}}
        changed = {part: {k: value - before[part][k] for k, value in now[part].items()} for part in now}
        return changed, now

    def _fisher(self, params: Tensors, client: Client) -> Tensors:
        """The mean squared gradient, over samples or over mini-batches."""
        network, buffers = client.context.network, client.buffers

        def loss(w: Tensors, x: Tensor, y: Tensor) -> Tensor:
            return client.context.task.batch_loss(network.pure(w, buffers, x, train=False)[0].logits, y)

        batch_gradients = vmap(grad(loss), in_dims=(None, 0, 0))
        size, most, x, y = 1, client.samples, client.x, client.y
        if self.variant == "ntd":
            size = client.context.batch_size
            most = min(most, (500 // size + 1) * size)
            # A client's samples are ordered by class: batches in that order would have one class each.
            order = torch.from_numpy(client.generator("fisher batches").permutation(client.samples)[:most])
            x, y = (values[order.to(values.device)] for values in (x, y))
        weights = sum(p.numel() for p in params.values())
        batches_at_once = max(1, PER_SAMPLE_VALUES // weights)
        whole = most // size * size  # a shorter last batch is computed separately
        starts = [*range(0, whole, size * batches_at_once), *([whole] if whole < most else [])]
        total = {k: torch.zeros_like(p) for k, p in params.items()}
        for start, end in pairwise([*starts, most]):
            length = min(size, end - start)
            found = batch_gradients(
                params,
                x[start:end].view(-1, length, *x.shape[1:]),
                y[start:end].view(-1, length, *y.shape[1:]),
            )
            for k, g in found.items():
                total[k] += g.square().sum(0)
        return {k: t / -(-most // size) for k, t in total.items()}

    def update(self, server: Server, sums: Tree, uploads: Sequence[Upload], context: RunContext) -> Tree:
        return {part: {k: v + sums[part][k] for k, v in server.state[part].items()} for part in ("u", "v")}
