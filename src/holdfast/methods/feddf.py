"""FedDF: distillation of the clients' ensemble into the global model, on unlabelled public data."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch.nn import functional as F

from holdfast.core.spec import Count, Positive, PositiveCount
from holdfast.methods.base import Method, Server, Upload
from holdfast.methods.card import Card
from holdfast.methods.context import RunContext
from holdfast.methods.functional import kl_divergence


@dataclass(frozen=True)
class FedDF(Method):
    """Ensemble distillation for model fusion.

    Local: CE.  Server: the student starts at the n_k-weighted mean and minimises KL(p ‖ q) on public samples
    without their labels; p is the softmax of the mean of the participants' logits, q the student's.
    Adam with learning rate 1e-3, annealed to 0 by a cosine, batches of 128, gradient norms clipped at 5.
    Lin et al., NeurIPS 2020. Their code stops early by a labelled validation split; here the server makes
    ``epochs`` passes over the public set in every round.
    """

    name: ClassVar[str] = "feddf"
    card: ClassVar[Card] = Card(
        when="the server has unlabelled public data similar to the clients'",
        server="forward passes of all participants' models over the public set, then training on it with Adam",
    )
    needs_classes: ClassVar[bool] = True
    needs_public: ClassVar[bool] = True
    keeps_uploads: ClassVar[bool] = True

    epochs: Count = 5  # passes over the public set in a round
    lr: Positive = 1e-3  # Adam's learning rate at the first step of a round
    batch_size: PositiveCount = 128  # largest batch; a pass is split into batches of equal size
    clip: Positive = 5.0  # largest gradient norm

    def refine(self, server: Server, uploads: Sequence[Upload], context: RunContext) -> Server:
        """Distil the mean of the clients' logits into the mean of their weights."""
        if self.epochs == 0:
            return server
        network, x = context.network, context.public_x
        logits = [context.forward(upload.params, upload.buffers, x).logits for upload in uploads]
        teacher = F.log_softmax(torch.stack(logits).mean(0), dim=-1)
        params = {k: p.clone().requires_grad_() for k, p in server.params.items()}
        buffers = {k: b.clone() for k, b in server.buffers.items()}
        batches = -(-len(x) // self.batch_size)
        adam = torch.optim.Adam(params.values(), self.lr)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, batches * self.epochs)
        for epoch in range(self.epochs):
            rng = context.generator("public batches", server.round, epoch)
            for rows in np.array_split(rng.permutation(len(x)), batches):
                chosen = torch.from_numpy(rows).to(context.device)
                network.seed_dropout(torch.tensor(int(rng.integers(2**32)), device=context.device))
                student = F.log_softmax(network.apply(params, buffers, x[chosen], train=True).logits, dim=-1)
                loss = kl_divergence(teacher[chosen], student).mean()
                gradients = torch.autograd.grad(loss, list(params.values()), materialize_grads=True)
                for parameter, gradient in zip(params.values(), gradients, strict=True):
                    parameter.grad = gradient
                torch.nn.utils.clip_grad_norm_(params.values(), self.clip)
                adam.step()
                schedule.step()
        return Server({k: p.detach() for k, p in params.items()}, buffers, server.state, server.round)
