"""The steps of optimisers, in place, on lists of tensors: of one model, or of many lanes stacked ``[lanes, ...]``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

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
    nesterov: bool = False,
    proximal_mu: float = 0.0,
    global_params: Sequence[Tensor] = (),
    kernels: bool = False,
    taps: Sequence[range | None] | None = None,
    fp16_copies: Sequence[Tensor | None] | None = None,
) -> None:
    """v <- momentum v + d, where d = g + proximal_mu (w - s) + weight_decay w;  w <- w - lr v.

    With ``nesterov``, w <- w - lr (d + momentum v).

    ``momentum_buffers`` (v) may be empty without momentum, and ``global_params`` (s) without ``proximal_mu``. Tensors
    ``[lanes, ...]`` may have their own learning rates, ``lr`` [lanes, tensors]; a rate of 0 skips a tensor and its v.

    The step is PyTorch's fused kernel, the one behind ``torch.optim.SGD(fused=True)``. On a GPU that
    accepts a learning rate on the device only in float32; float64 uses unfused operations. ``kernels`` selects
    Holdfast's kernel, since PyTorch's distributes large tensors over too few processors; it has no ``nesterov``. Only
    Holdfast's can restrict the update of filters to some ``taps`` (rows and columns) and write ``fp16_copies``.
    """
    grads = [_with_strides_of(w, g) for w, g in zip(params, grads, strict=True)]
    if kernels and isinstance(lr, Tensor) and not nesterov:
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
            gradient = g.add(w, alpha=weight_decay)
            velocity = momentum * momentum_buffers[i] + gradient if momentum else gradient
            step = gradient + momentum * velocity if nesterov else velocity
            rate = _rate_of(lr, i, w)
            update = [(w, w - rate * step), *([(momentum_buffers[i], velocity)] if momentum else [])]
            _write_(update, rate)
        return
    torch._fused_sgd_(  # iterates in memory order, ignoring strides
        list(params),
        list(grads),
        list(momentum_buffers) if momentum else [],
        weight_decay=weight_decay,
        momentum=momentum,
        lr=lr,
        dampening=0.0,
        nesterov=nesterov,
        maximize=False,
        is_first_step=False,
    )


def adam_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    means: Sequence[Tensor],
    squares: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    lr: float | Tensor,
    betas: tuple[float, ...],
    eps: float,
    weight_decay: float,
    decoupled: bool,
    kernels: bool = False,
    fp16_copies: Sequence[Tensor | None] | None = None,
) -> None:
    """t <- t + 1;  m <- β₁ m + (1 - β₁) g;  v <- β₂ v + (1 - β₂) g²;  w <- w - lr m̂ / (√v̂ + eps).

    m̂ = m / (1 - β₁ᵗ) and v̂ = v / (1 - β₂ᵗ). ``steps`` (t) has a scalar for each parameter, or ``[lanes]`` for tensors
    ``[lanes, ...]``: a lane may be at another step than its neighbours. Weight decay is added to g, or if ``decoupled``
    w <- (1 - lr weight_decay) w comes first. ``lr`` as in `sgd_`.

    The step is PyTorch's fused kernel for the tensors of all lanes, or unfused operations where `sgd_` uses them.
    ``kernels`` selects Holdfast's kernel for lanes, which alone can write ``fp16_copies``.
    """
    grads = [_with_strides_of(w, g) for w, g in zip(params, grads, strict=True)]
    beta1, beta2 = betas
    if kernels and isinstance(lr, Tensor):
        from holdfast.kernels.adam import adam_step_
        from holdfast.kernels.sgd import supported

        if supported(params, [*grads, *means, *squares]):
            torch._foreach_add_(list(steps), 1.0 if lr.dim() == 0 else list((lr != 0).to(lr.dtype).unbind(1)))
            adam_step_(
                params, grads, means, squares, steps, lr, betas, eps, weight_decay, decoupled,
                fp16_copies or [None] * len(params),
            )  # fmt: skip
            return
    assert fp16_copies is None, "only Holdfast's kernel supports fp16_copies"
    if isinstance(lr, Tensor) and (lr.dim() > 0 or (lr.is_cuda and lr.dtype == torch.float64)):
        for i, (w, g, m, v, t) in enumerate(zip(params, grads, means, squares, steps, strict=True)):
            rate = _rate_of(lr, i, w)
            start = w - rate * weight_decay * w if decoupled else w
            gradient = g if decoupled else g.add(w, alpha=weight_decay)
            mean = torch.lerp(m, gradient, 1 - beta1)
            square = beta2 * v + (1 - beta2) * gradient * gradient
            count = t + 1
            shape = (*count.shape, *[1] * (w.dim() - count.dim()))
            # In float64, since β₂ᵗ is close to 1.
            bias1, bias2 = ((1 - beta ** count.double()).to(w.dtype).view(shape) for beta in betas)
            new = start - rate / bias1 * mean / ((square / bias2).sqrt() + eps)
            _write_([(w, new), (m, mean), (v, square), (t, count)], rate)
        return
    torch._foreach_add_(list(steps), 1.0)
    tensors = [list(each) for each in (params, grads, means, squares, steps)]
    if steps[0].dim() > 0:
        tensors = [[lane for stacked in each for lane in stacked.unbind()] for each in tensors]
    fused = torch._fused_adamw_ if decoupled else torch._fused_adam_
    w_all, g_all, m_all, v_all, t_all = tensors
    fused(
        w_all,
        g_all,
        m_all,
        v_all,
        [],
        t_all,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
    )


def rmsprop_(
    params: list[Tensor],
    grads: list[Tensor],
    squares: list[Tensor],
    momentum_buffers: list[Tensor],
    *,
    lr: float | Tensor,
    alpha: float,
    eps: float,
    momentum: float,
    weight_decay: float,
) -> None:
    """s <- alpha s + (1 - alpha) g²;  b <- momentum b + g / (√s + eps);  w <- w - lr b.

    Weight decay is added to g. ``momentum_buffers`` (b) may be empty without momentum; ``lr`` as in `sgd_`.
    """
    if weight_decay:
        grads = list(torch._foreach_add(grads, params, alpha=weight_decay))
    new_squares = list(torch._foreach_mul(squares, alpha))
    torch._foreach_addcmul_(new_squares, grads, grads, value=1 - alpha)
    steps = _divided_by_root(grads, new_squares, eps)
    state = list(zip(squares, new_squares, strict=True))
    if momentum:
        torch._foreach_add_(steps, momentum_buffers, alpha=momentum)
        state += zip(momentum_buffers, steps, strict=True)
    _descend_(params, steps, lr, state)


def adagrad_(
    params: list[Tensor],
    grads: list[Tensor],
    sums: list[Tensor],
    *,
    lr: float | Tensor,
    eps: float,
    weight_decay: float,
) -> None:
    """s <- s + g²;  w <- w - lr g / (√s + eps). Weight decay is added to g; ``lr`` as in `sgd_`."""
    if weight_decay:
        grads = list(torch._foreach_add(grads, params, alpha=weight_decay))
    new_sums = list(torch._foreach_addcmul(sums, grads, grads))
    _descend_(params, _divided_by_root(grads, new_sums, eps), lr, list(zip(sums, new_sums, strict=True)))


def _divided_by_root(grads: list[Tensor], squares: list[Tensor], eps: float) -> list[Tensor]:
    """g / (√s + eps)."""
    roots = list(torch._foreach_sqrt(squares))
    torch._foreach_add_(roots, eps)
    return list(torch._foreach_div(grads, roots))


def _descend_(
    params: list[Tensor],
    steps: list[Tensor],
    lr: float | Tensor,
    state: list[tuple[Tensor, Tensor]],
) -> None:
    """w <- w - lr step, and the new value of each tensor of the state, a pair; a rate of 0 skips a tensor's."""
    if isinstance(lr, Tensor) and lr.dim() > 0:
        for i, (w, step) in enumerate(zip(params, steps, strict=True)):
            rate = _rate_of(lr, i, w)
            _write_([(w, w - rate * step), *state[i :: len(params)]], rate)
        return
    torch._foreach_sub_(params, torch._foreach_mul(steps, cast("Tensor", lr)))  # or a number
    torch._foreach_copy_([old for old, _ in state], [new for _, new in state])


def _rate_of(lr: float | Tensor, i: int, w: Tensor) -> float | Tensor:
    """The learning rate of parameter ``i``, which multiplies ``w``."""
    if not isinstance(lr, Tensor) or lr.dim() == 0:
        return lr
    return lr[:, i].view(-1, *[1] * (w.dim() - 1))


def _write_(update: Sequence[tuple[Tensor, Tensor]], rate: float | Tensor) -> None:
    """Write new values to the first tensor of each pair; lanes with a rate of 0 keep theirs."""
    for old, new in update:
        per_lane = isinstance(rate, Tensor) and rate.dim() > 0
        old.copy_(torch.where(rate.view(-1, *[1] * (old.dim() - 1)) != 0, new, old) if per_lane else new)  # type: ignore[union-attr]


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
