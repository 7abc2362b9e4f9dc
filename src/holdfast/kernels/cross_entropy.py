"""The mean cross-entropy of each lane's batch and its gradient, in one pass."""

from __future__ import annotations

from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import Function

from holdfast.kernels.autograd import apply, in_lanes

_BLOCK = 4096  # logits held at a time


@triton.jit
def _entropy(
    logits, labels, mask, loss, slope, rows, classes,
    MASKED: tl.constexpr, ROWS: tl.constexpr, CLASSES: tl.constexpr,
):  # fmt: skip
    """loss[lane] = Σ_r mask[r] (log Σ_c exp z[r, c] - z[r, y]) / Σ_r mask[r]; slope is its gradient in z."""
    lane = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, CLASSES)
    count = rows * 1.0
    if MASKED:
        count = 0.0
        for first in range(0, rows, ROWS):
            r = first + tl.arange(0, ROWS)
            count += tl.sum(tl.load(mask + lane * rows + r, mask=r < rows, other=0.0), 0)
    share = 1.0 / tl.maximum(count, 1.0)
    total = 0.0
    for first in range(0, rows, ROWS):
        r = first + tl.arange(0, ROWS)
        real = r < rows
        at = (lane * rows + r)[:, None] * classes + c[None, :]
        inside = real[:, None] & (c < classes)[None, :]
        z = tl.load(logits + at, mask=inside, other=float("-inf"))
        own = c[None, :] == tl.load(labels + lane * rows + r, mask=real, other=0)[:, None]
        weight = real.to(tl.float32)
        if MASKED:
            weight = tl.load(mask + lane * rows + r, mask=real, other=0.0)
        top = tl.where(real, tl.max(z, 1), 0.0)
        e = tl.exp(z - top[:, None])
        sums = tl.where(real, tl.sum(e, 1), 1.0)
        total += tl.sum((tl.log(sums) + top - tl.sum(tl.where(own & inside, z, 0.0), 1)) * weight, 0)
        value = (e / sums[:, None] - own.to(tl.float32)) * (weight * share)[:, None]
        tl.store(slope + at, value, mask=inside)
    tl.store(loss + lane, total * share)


def _forward(logits: Tensor, labels: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Losses ``[L]`` and their gradients from ``[L, B, C]`` and, with padding, a mask ``[L, B]``."""
    lanes, rows, classes = logits.shape
    logits, labels = logits.contiguous(), labels.contiguous()
    loss, slope = logits.new_empty(lanes), torch.empty_like(logits)
    wide = triton.next_power_of_2(classes)
    high = min(triton.next_power_of_2(rows), max(1, _BLOCK // wide))
    _entropy[(lanes,)](
        logits, labels, labels if mask is None else mask.contiguous(), loss, slope, rows, classes,
        MASKED=mask is not None, ROWS=high, CLASSES=wide,
    )  # fmt: skip
    return loss, slope


class _MeanCrossEntropy(Function):
    """The loss, and its gradient for when it is asked for."""

    @staticmethod
    def forward(logits: Tensor, labels: Tensor, mask: Tensor | None, addend: bool) -> tuple[Tensor, Tensor]:
        loss, slope = _forward(logits[None], labels[None], None if mask is None else mask[None])
        return loss[0], slope[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.addend = inputs[3]
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (slope,) = ctx.saved_tensors
        return slope if ctx.addend else slope * grads[0], None, None, None

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        logits: Tensor,
        labels: Tensor,
        mask: Tensor | None,
        addend: bool,
    ) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        return _forward(*in_lanes(info, in_dims[:3], (logits, labels, mask))), (0, 0)


def mean_cross_entropy(logits: Tensor, labels: Tensor, mask: Tensor | None, addend: bool = False) -> Tensor:
    """The mean over a batch, of the samples that ``mask`` has 1 for, as a scalar that can be differentiated once.

    An ``addend`` of what is differentiated, or all of it, has 1 as its gradient, which need not be multiplied by.
    """
    return cast(Tensor, apply(_MeanCrossEntropy, logits, labels, mask, addend)[0])
