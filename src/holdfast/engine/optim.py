"""Stochastic gradient descent, in place, on lists of tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def sgd_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor],
    *,
    lr: float | Tensor,
    momentum: float,
    weight_decay: float,
    proximal_mu: float = 0.0,
    global_params: Sequence[Tensor] = (),
    kernels: bool = False,
    taps: Sequence[range | None] | None = None,
    fp16_copies: Sequence[Tensor | None] | None = None,
) -> None:
    """v <- momentum v + (g + proximal_mu (w - s) + weight_decay w);  w <- w - lr v.

    ``momentum_buffers`` (v) may be empty without momentum, and ``global_params`` (s) without ``proximal_mu``. Tensors
    ``[lanes, ...]`` may have their own learning rates, ``lr`` [lanes, tensors]; a rate of 0 skips a tensor and its v.

    The step is PyTorch's fused kernel, the one behind ``torch.optim.SGD(fused=True)``. On a GPU that
    accepts a learning rate on the device only in float32; float64 uses unfused operations. ``kernels`` selects
    Holdfast's kernel, since PyTorch's distributes large tensors over too few processors. Only Holdfast's can restrict
    the update of filters to some ``taps`` (rows and columns) and write ``fp16_copies``.
    """
    grads = [_with_strides_of(w, g) for w, g in zip(params, grads, strict=True)]
    if kernels and isinstance(lr, Tensor):
        from holdfast.kernels.sgd import sgd_step_, supported

        if supported(params, [*grads, *momentum_buffers], global_params):
            none = [None] * len(params)
            sgd_step_(
                params, grads, momentum_buffers if momentum else [], lr, momentum, weight_decay, taps or none,
                fp16_copies or none, proximal_mu, global_params,
            )  # fmt: skip
            return
    assert taps is fp16_copies is None, "only Holdfast's kernel supports taps and fp16_copies"
    grads = add_proximal_term(params, grads, global_params, proximal_mu)
    if isinstance(lr, Tensor) and (lr.dim() > 0 or lr.dtype == torch.float64):
        for i, (w, g) in enumerate(zip(params, grads, strict=True)):
            step = g.add(w, alpha=weight_decay)
            if momentum:
                step = momentum * momentum_buffers[i] + step
            rate = lr[:, i].view(-1, *[1] * (w.dim() - 1)) if lr.dim() > 0 else lr
            for old, new in [(w, w - rate * step), *([(momentum_buffers[i], step)] if momentum else [])]:
                old.copy_(torch.where(rate != 0, new, old) if lr.dim() > 0 else new)
        return
    torch._fused_sgd_(  # iterates in memory order, ignoring strides
        list(params),
        list(grads),
        list(momentum_buffers) if momentum else [],
        weight_decay=weight_decay,
        momentum=momentum,
        lr=lr,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=False,
    )


def _with_strides_of(w: Tensor, g: Tensor) -> Tensor:
    """The gradient in its parameter's memory layout."""
    return g if g.stride() == w.stride() else torch.empty_like(w).copy_(g)


def add_proximal_term(
    params: Sequence[Tensor], grads: Sequence[Tensor], global_params: Sequence[Tensor], mu: float
) -> list[Tensor]:
    """The gradients plus that of the proximal term (mu/2) ‖w - s‖²; ``global_params`` (s) may be empty if mu is 0."""
    if mu == 0:
        return list(grads)
    return [g + mu * (w - s) for w, g, s in zip(params, grads, global_params, strict=True)]


def clip(grads: Sequence[Tensor], max_norm: float) -> list[Tensor]:
    """The gradients scaled down to a total 2-norm of ``max_norm`` if it is larger."""
    norm = torch.stack([g.square().sum() for g in grads]).sum().sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return [g * scale for g in grads]
