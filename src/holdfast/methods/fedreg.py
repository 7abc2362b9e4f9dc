"""FedReg: removal of the part of each step that causes forgetting, measured on generated samples."""

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from holdfast.core.errors import HoldfastError
from holdfast.core.spec import Fraction, NonNegative, PositiveCount
from holdfast.methods.base import Batch, Local, Method, Tensors, Trainer, Tree
from holdfast.methods.card import Card
from holdfast.methods.context import Client, RunContext

CHUNK = 1024  # samples generated at once


@dataclass(frozen=True)
class FedReg(Method):
    """Regularisation with pseudo samples, which represent the knowledge of the global model w_0 = w^{t-1}.

    Before training, from each sample: a pseudo sample x' by ``steps`` steps x ← x + η_s sign ∇_x CE(w_0), with the
    soft label softmax(w_0(x')); a perturbed sample x" likewise with η_s/100 and its own label; pixels are clipped to
    their range.
    Each step, in plain SGD (the run's momentum, weight decay and max_grad_norm do not apply):
      g₁ = ∇CE at γw + (1-γ)w_0 on the batch;  w ← w - η g₁;
      g₂, g₃ = ∇CE at (w + w_0)/2 on the pseudo samples and on the perturbed ones;
      Δ = w - w_0;  a = max(0, ⟨Δ, g₂⟩/‖g₂‖²);  b = max(0, ⟨Δ - a g₂, g₃⟩/‖g₃‖²);  w ← w - a g₂ - b g₃.
    Server: the unweighted mean.
    Xu et al., ICLR 2022. γ: 0.4 on MNIST, 0.5 on CIFAR-10, 0.25 on CIFAR-100; η_s: 0.2 on MNIST, 0.1 on
    CIFAR. Samples are generated from inputs without augmentation.
    """

    name: ClassVar[str] = "fedreg"
    card: ClassVar[Card] = Card(
        when="forgetting should be reduced with nothing more sent or kept, and clients have time",
        client="20 forward and backward passes over its samples each round to generate samples; three gradients in "
        "each step",
    )
    needs_classes: ClassVar[bool] = True

    gamma: Fraction = 0.5  # γ: the point at which g₁ is computed, from w_0 (0) to w (1)
    eta_s: NonNegative = 0.1  # η_s: step size for pseudo samples, in units of the model's input
    steps: PositiveCount = 10  # gradient ascent steps for each generated sample

    def prepare(self, context: RunContext) -> Self:
        if not context.lowest.is_floating_point():
            raise HoldfastError(
                "fedreg moves samples along a gradient, so it needs floats or images, not integers"
            )
        return self

    def tables(self, payload: Tree, state: Tree, client: Client) -> Tensors:
        """The pseudo and perturbed samples, and the pseudo samples' soft labels."""
        pseudo = self._ascend(client, self.eta_s)
        soft = client.forward(client.global_params, pseudo).logits.softmax(-1)
        return {"pseudo": pseudo, "soft": soft, "perturbed": self._ascend(client, self.eta_s / 100)}

    def _ascend(self, client: Client, rate: float) -> Tensor:
        """The client's samples after gradient ascent on the global model's loss."""
        context, parts = client.context, []
        for x, y in zip(torch.split(client.x, CHUNK), torch.split(client.y, CHUNK), strict=True):
            moved = x
            for _ in range(self.steps):
                moved = moved.detach().requires_grad_()
                with torch.enable_grad():
                    logits = context.network.apply(client.global_params, client.buffers, moved).logits
                    loss = F.cross_entropy(logits, y, reduction="sum")
                moved = moved + rate * torch.autograd.grad(loss, moved)[0].sign()
                moved = torch.maximum(torch.minimum(moved, context.highest), context.lowest)
            parts.append(moved.detach())
        return torch.cat(parts)

    def step(self, trainer: Trainer, params: Tensors, batch: Batch, carry: Tree, local: Local) -> Tensors:
        """w - η g₁ - a g₂ - b g₃."""
        w0 = local.global_params

        def loss(w: Tensors, x: Tensor, target: Tensor) -> Tensor:
            return batch.mean(F.cross_entropy(trainer.forward(w, x).logits, target, reduction="none"))

        g1, _ = trainer.gradient(lambda w: loss(w, batch.x, batch.y), _interpolate(w0, params, self.gamma))
        learnt = {k: p - trainer.lr * g1[k] for k, p in params.items()}
        middle = _interpolate(w0, learnt, 0.5)
        g2, _ = trainer.gradient(lambda w: loss(w, batch.table["pseudo"], batch.table["soft"]), middle)
        g3, _ = trainer.gradient(lambda w: loss(w, batch.table["perturbed"], batch.y), middle)
        moved = {k: p - w0[k] for k, p in learnt.items()}
        a = _projection(moved, g2)
        b = _projection({k: m - a * g2[k] for k, m in moved.items()}, g3)
        return {k: p - a * g2[k] - b * g3[k] for k, p in learnt.items()}

    def client_weight(self, client: Client) -> float:
        return 1.0


def _interpolate(start: Tensors, end: Tensors, share: float) -> Tensors:
    """share · end + (1 - share) · start."""
    return {k: share * e + (1 - share) * start[k] for k, e in end.items()}


def _projection(vector: Tensors, direction: Tensors) -> Tensor:
    """max(0, ⟨v, d⟩ / ‖d‖²) over all parameters."""
    inner = torch.stack([(vector[k] * d).sum() for k, d in direction.items()]).sum()
    square = torch.stack([d.square().sum() for d in direction.values()]).sum()
    return (inner / (square + 1e-30)).clamp(min=0)
