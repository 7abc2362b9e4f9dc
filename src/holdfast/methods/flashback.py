"""Flashback: distillation on clients and server, with teachers weighted by the labels they were trained on."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from holdfast.core.spec import Count, PositiveFraction
from holdfast.methods.base import Batch, Local, Method, Server, Tensors, Tree, Upload
from holdfast.methods.card import GLOBAL_TEACHER, Card
from holdfast.methods.context import Client, RunContext
from holdfast.methods.functional import kl_divergence
from holdfast.models.network import Output


@dataclass(frozen=True)
class Flashback(Method):
    """Dynamic distillation by label counts.

    D(p, q; a) = Σ_c a^c p^c log(p^c / q^c), the mean over the batch; p is a teacher's softmax, q the student's.
    Local: CE + D(w^{t-1}, w; a), a = π / (ν + π); π counts the labels the global model was trained on, ν the
    client's.
    Server: the student starts at the mean of the clients' models and takes E_s epochs of SGD over a labelled
    public set on CE + Σ_i D(w_i, w; a_i). Teachers are the clients' models (counts μ_i) and, from round 2,
    w^{t-1} (counts π); a_i = μ_i / (π + Σ_j μ_j), the sum over all teachers. 0/0 is 0.
    Afterwards, with r_k the number of client k's participations, π increases by γ μ_k if γ r_k ≤ 1.
    Aljahdali et al., 2024, Eq. 3 and Algorithm 1. γ and E_s are not given; the defaults are this library's choice.
    The server's SGD has the clients' batch size, learning rate (with its decay), momentum and weight decay.

    ``half``: ``both``, or only the ``client`` or ``server`` half; only the server half needs the public set.
    """

    name: ClassVar[str] = "flashback"
    card: ClassVar[Card] = Card(
        when="the server has a small labelled public set, and label counts may be disclosed",
        client=GLOBAL_TEACHER,
        server="forward passes of all participants' models over the public set, then SGD on it",
        uploads="its label counts",
    )
    needs_classes: ClassVar[bool] = True
    keeps_uploads: ClassVar[bool] = True  # the server counts how often each client took part

    gamma: PositiveFraction = 0.1  # γ: share of μ_k that π gains from one participation
    server_epochs: Count = 1  # E_s: epochs of the server on the public set
    half: Literal["both", "client", "server"] = "both"

    @property
    def needs_public(self) -> bool:  # type: ignore[override]
        """Whether the server half trains on public data."""
        return self.half != "client" and self.server_epochs > 0

    @property
    def teachers(self) -> tuple[str, ...]:  # type: ignore[override]
        """The global model, in the client half."""
        return () if self.half == "server" else ("global",)

    def init_server_state(self, context: RunContext) -> Tree:
        """π = 0 and r = 0; the server half also keeps w^{t-1} until the round's end."""
        state: Tree = {
            "pi": torch.zeros(context.num_classes, dtype=context.dtype, device=context.device),
            "rounds": torch.zeros(context.num_clients, dtype=torch.int64, device=context.device),
        }
        if self.needs_public:
            state["previous"] = {
                "params": dict(context.network.params),
                "buffers": dict(context.network.buffers),
            }
        return state

    def broadcast(self, server: Server) -> Tree:
        return {} if self.half == "server" else {"pi": server.state["pi"]}

    def client_init(self, payload: Tree, state: Tree, client: Client) -> Tree:
        """The weights a, constant during the round and 0 in round 1."""
        if self.half == "server":
            return {}
        return {"a": _ratio(payload["pi"], client.label_counts + payload["pi"])}

    def loss(self, out: Output, batch: Batch, carry: Tree, local: Local) -> Tensor | None:
        """D(w^{t-1}, w; a)."""
        if self.half == "server":
            return None
        p = F.log_softmax(batch.teacher["global"].logits, dim=-1)
        q = F.log_softmax(out.logits, dim=-1)
        return batch.mean(kl_divergence(p, q, carry["a"]))

    def client_final(self, params: Tensors, carry: Tree, client: Client) -> tuple[Tree, Tree]:
        return {"labels": client.label_counts}, {}

    def refine(self, server: Server, uploads: Sequence[Upload], context: RunContext) -> Server:
        """Distil the clients' models and w^{t-1} into the mean, then update π."""
        state = dict(server.state)
        params, buffers = server.params, server.buffers
        if self.needs_public:
            params, buffers = self._distil(server, _targets(server, uploads, context), context)
            state["previous"] = {"params": params, "buffers": buffers}
        clients = torch.tensor([u.client for u in uploads], device=context.device)
        state["rounds"] = state["rounds"].index_add(0, clients, torch.ones_like(clients))
        counted = self.gamma * state["rounds"][clients].double() <= 1 + 1e-9
        labels = torch.stack([u.sums["labels"] for u in uploads])
        state["pi"] = state["pi"] + self.gamma * (counted.to(context.dtype) @ labels)
        return Server(params, buffers, state, server.round)

    def _distil(self, server: Server, targets: Tensor, context: RunContext) -> tuple[Tensors, Tensors]:
        """The student after E_s epochs over the public set."""
        params = {k: p.clone().requires_grad_() for k, p in server.params.items()}
        buffers = {k: b.clone() for k, b in server.buffers.items()}
        lr = context.lr_at(server.round)
        sgd = torch.optim.SGD(params.values(), lr, context.momentum, weight_decay=context.weight_decay)
        for epoch in range(self.server_epochs):
            for rows, dropout in _public_batches(context, server.round, epoch):
                context.network.seed_dropout(dropout)
                logits = context.network.apply(params, buffers, context.public_x[rows], train=True).logits
                # Σ_i D(p_i, q; a_i) is -Σ_c targets^c log q^c plus a constant.
                distillation = -(targets[rows] * F.log_softmax(logits, dim=-1)).sum(-1).mean()
                sgd.zero_grad()
                torch.autograd.backward(F.cross_entropy(logits, context.public_y[rows]) + distillation)
                sgd.step()
        return {k: p.detach() for k, p in params.items()}, buffers


def _targets(server: Server, uploads: Sequence[Upload], context: RunContext) -> Tensor:
    """Σ_i a_i^c p_i^c for each public sample: ``[P, C]``."""
    pi = server.state["pi"]
    teachers = [(u.params, u.buffers, u.sums["labels"]) for u in uploads]
    if server.round > 1:
        previous = server.state["previous"]
        teachers.append((previous["params"], previous.get("buffers", {}), pi))
    seen = pi + torch.stack([labels for *_, labels in teachers]).sum(0)
    targets = torch.zeros(
        len(context.public_y), context.num_classes, dtype=context.dtype, device=context.device
    )
    for params, buffers, labels in teachers:
        targets += _ratio(labels, seen) * context.forward(params, buffers, context.public_x).logits.softmax(
            -1
        )
    return targets


def _ratio(part: Tensor, whole: Tensor) -> Tensor:
    """part / whole, with 0/0 = 0."""
    return torch.where(whole > 0, part / whole, torch.zeros_like(whole))


def _public_batches(context: RunContext, round: int, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """One epoch of the public set: each batch's rows and the seed of its dropout masks."""
    rng = context.generator("public batches", round, epoch)
    order = torch.from_numpy(rng.permutation(len(context.public_y))).to(context.device)
    batches = list(torch.split(order, context.batch_size))
    if context.network.has_batch_norm and len(batches) > 1 and len(batches[-1]) == 1:
        batches[-2:] = [torch.cat(batches[-2:])]  # a single sample has no variance
    for rows in batches:
        yield rows, torch.tensor(int(rng.integers(2**32)), device=context.device)
