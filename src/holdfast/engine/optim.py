"""Stochastic gradient descent, in place, on lists of tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def sgd_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    buffers: Sequence[Tensor],
    *,
    lr: float | Tensor,
    momentum: float,
    weight_decay: float,
    kernels: bool = False,
    taps: Sequence[range | None] | None = None,
    pull: float = 0.0,
    sent: Sequence[Tensor] = (),
    halves: Sequence[Tensor | None] | None = None,
) -> None:
    """v <- momentum v + (g + pull (w - sent) + weight_decay w);  w <- w - lr v.

    ``buffers`` (v) may be empty without momentum, and ``sent`` without a pull.

    One fused pass over memory; the kernel is the one behind ``torch.optim.SGD(fused=True)``. On a GPU it takes a
    learning rate that lies there only in float32, so float64 goes another way. With ``kernels`` it is a kernel of
    ours: torch's divides large tensors among too few processors.
    Tensors ``[lanes, ...]`` may have rates of their own, ``lr`` [lanes, tensors]; where one is 0, v rests too. With
    ``kernels`` filters may rest but for some ``taps``, rows and columns of theirs, and have ``halves`` that are kept.
    """
    grads = [_lying_as(w, g) for w, g in zip(params, grads, strict=True)]
    if kernels and isinstance(lr, Tensor):
        from holdfast.kernels.sgd import descend_, serves

        if serves(params, [*grads, *buffers], sent):
            nothing = [None] * len(params)
            descend_(
                params, grads, buffers if momentum else [], lr, momentum, weight_decay, taps or nothing,
                halves or nothing, pull, sent,
            )  # fmt: skip
            return
    assert taps is halves is None, "only a kernel of ours lets parts of a tensor rest, or writes halves"
    grads = pulled(params, grads, sent, pull)
    if isinstance(lr, Tensor) and (lr.dim() > 0 or lr.dtype == torch.float64):
        for i, (w, g) in enumerate(zip(params, grads, strict=True)):
            step = g.add(w, alpha=weight_decay)
            if momentum:
                step = momentum * buffers[i] + step
            rate = lr[:, i].view(-1, *[1] * (w.dim() - 1)) if lr.dim() > 0 else lr
            for old, new in [(w, w - rate * step), *([(buffers[i], step)] if momentum else [])]:
                old.copy_(torch.where(rate != 0, new, old) if lr.dim() > 0 else new)
        return
    torch._fused_sgd_(  # goes through memory as it comes, whatever the strides say
        list(params),
        list(grads),
        list(buffers) if momentum else [],
        weight_decay=weight_decay,
        momentum=momentum,
        lr=lr,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=False,
    )


def _lying_as(w: Tensor, g: Tensor) -> Tensor:
    """The gradient in memory in the order of its parameter."""
    return g if g.stride() == w.stride() else torch.empty_like(w).copy_(g)


def pulled(
    params: Sequence[Tensor], grads: Sequence[Tensor], sent: Sequence[Tensor], pull: float
) -> list[Tensor]:
    """Gradients with that of a pull towards what was ``sent``."""
    if pull == 0:
        return list(grads)
    return [g + pull * (w - s) for w, g, s in zip(params, grads, sent, strict=True)]


def clip(grads: Sequence[Tensor], max_norm: float) -> list[Tensor]:
    """A gradient of larger 2-norm brought down to ``max_norm``."""
    norm = torch.stack([g.square().sum() for g in grads]).sum().sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return [g * scale for g in grads]
