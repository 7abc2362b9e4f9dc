"""One step of Adam or AdamW for all lanes' parameters, in as few kernel launches as possible."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import triton
import triton.language as tl
from torch import Tensor

from holdfast.kernels.conv import WEIGHT_SCALE

_BLOCK = 1024
_TENSORS_PER_LAUNCH = 16


@triton.jit
def _adam_step(
    ws, gs, ms, vs, ts, hs, lr, lr_lane, eps, weight_decay,
    SIZES: tl.constexpr, FIRST_PROGRAMS: tl.constexpr, BETA1: tl.constexpr, BETA2: tl.constexpr,
    LOG_BETA1: tl.constexpr, LOG_BETA2: tl.constexpr,
    DECOUPLED: tl.constexpr, LR_PER_TENSOR: tl.constexpr, FP16_COPIES: tl.constexpr, WEIGHT_SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """m <- β₁ m + (1 - β₁) g;  v <- β₂ v + (1 - β₂) g²;  w <- w - lr m̂ / (√v̂ + eps), of step ts[i][lane].

    Tensor i of a lane is updated by the programs from FIRST_PROGRAMS[i]. With LR_PER_TENSOR each tensor of each lane
    has its own lr; if it is 0, the tensor is skipped with its m and v. With FP16_COPIES[i] the updated values are also
    written to hs[i].
    """
    program = tl.program_id(0)
    lane = tl.program_id(1).to(tl.int64)
    for i in tl.static_range(len(SIZES)):
        if (program >= FIRST_PROGRAMS[i]) & (program < FIRST_PROGRAMS[i + 1]):
            offsets = (program - FIRST_PROGRAMS[i]) * BLOCK + tl.arange(0, BLOCK)
            rate = tl.load(lr + lane * lr_lane + (i if LR_PER_TENSOR else 0))
            size = SIZES[i]
            if LR_PER_TENSOR:
                size = tl.where(rate == 0, 0, size)
            valid = offsets < size
            offsets += lane * SIZES[i]
            # In float64, since β₂ᵗ is close to 1.
            step = tl.load(ts[i] + lane).to(tl.float64)
            bias1 = (1.0 - tl.exp(step * LOG_BETA1)).to(tl.float32)
            bias2 = (1.0 - tl.exp(step * LOG_BETA2)).to(tl.float32)
            weight = tl.load(ws[i] + offsets, mask=valid)
            gradient = tl.load(gs[i] + offsets, mask=valid)
            mean = tl.load(ms[i] + offsets, mask=valid)
            square = tl.load(vs[i] + offsets, mask=valid, other=0.0)
            if DECOUPLED:
                weight -= rate * weight_decay * weight
            else:
                gradient += weight_decay * weight
            mean += (1.0 - BETA1) * (gradient - mean)
            square = BETA2 * square + (1.0 - BETA2) * gradient * gradient
            weight -= rate / bias1 * mean / (tl.sqrt(square) / tl.sqrt(bias2) + eps)
            tl.store(ws[i] + offsets, weight, mask=valid)
            tl.store(ms[i] + offsets, mean, mask=valid)
            tl.store(vs[i] + offsets, square, mask=valid)
            if FP16_COPIES[i]:
                tl.store(hs[i] + offsets, (weight * WEIGHT_SCALE).to(tl.float16), mask=valid)


def adam_step_(
    ws: Sequence[Tensor], gs: Sequence[Tensor], ms: Sequence[Tensor], vs: Sequence[Tensor], ts: Sequence[Tensor],
    lr: Tensor, betas: tuple[float, ...], eps: float, weight_decay: float, decoupled: bool,
    fp16_copies: Sequence[Tensor | None],
) -> None:  # fmt: skip
    """Update parameters ``ws`` [L, ...], means ``ms`` and mean squares ``vs`` in place, with gradients ``gs``.

    ``ts`` [L] are the step numbers, from 1. `holdfast.kernels.sgd.supported` must be true for the parameters and all
    other tensors; ``lr`` and ``fp16_copies`` are as in `holdfast.kernels.sgd.sgd_step_`.
    """
    per_tensor = lr.dim() > 0
    for first in range(0, len(ws), _TENSORS_PER_LAUNCH):
        last = first + _TENSORS_PER_LAUNCH
        w, g, m, v, t = (tuple(tensors[first:last]) for tensors in (ws, gs, ms, vs, ts))
        sizes, copies = tuple(tensor[0].numel() for tensor in w), fp16_copies[first:last]
        first_programs = tuple(accumulate((triton.cdiv(size, _BLOCK) for size in sizes), initial=0))
        _adam_step[(first_programs[-1], len(w[0]))](
            w, g, m, v, t, tuple(w if h is None else h for w, h in zip(w, copies, strict=True)),
            lr[:, first:] if per_tensor else lr, lr.stride(0) if per_tensor else 0, eps, weight_decay,
            SIZES=sizes, FIRST_PROGRAMS=first_programs, BETA1=betas[0], BETA2=betas[1],
            LOG_BETA1=_log(betas[0]), LOG_BETA2=_log(betas[1]),
            DECOUPLED=decoupled, LR_PER_TENSOR=per_tensor, FP16_COPIES=tuple(h is not None for h in copies),
            WEIGHT_SCALE=WEIGHT_SCALE, BLOCK=_BLOCK,
        )  # fmt: skip


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0 else -1e9  # exp(-1e9 t) is 0
