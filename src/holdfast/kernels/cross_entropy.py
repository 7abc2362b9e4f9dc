"""The mean cross-entropy of each lane's batch and its gradient, in one kernel."""

from __future__ import annotations

from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import Function

from holdfast.kernels.autograd import apply, expand_to_lanes

_TILE_SIZE = 4096  # logits that a program holds at a time


@triton.jit
def _cross_entropy(
    logits, labels, mask, loss, dlogits, rows, classes,
    MASKED: tl.constexpr, ROWS: tl.constexpr, CLASSES: tl.constexpr,
):  # fmt: skip
    """loss[lane] = Σ_r mask[r] (log Σ_c exp z[r, c] - z[r, y]) / Σ_r mask[r]; dlogits is its gradient in z."""
    lane = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, CLASSES)
    count = rows * 1.0
    if MASKED:
        count = 0.0
        for first in range(0, rows, ROWS):
            r = first + tl.arange(0, ROWS)
            count += tl.sum(tl.load(mask + lane * rows + r, mask=r < rows, other=0.0), 0)
    inverse_count = 1.0 / tl.maximum(count, 1.0)
    total = 0.0
    for first in range(0, rows, ROWS):
        r = first + tl.arange(0, ROWS)
        valid_r = r < rows
        offsets = (lane * rows + r)[:, None] * classes + c[None, :]
        valid = valid_r[:, None] & (c < classes)[None, :]
        z = tl.load(logits + offsets, mask=valid, other=float("-inf"))
        is_label = c[None, :] == tl.load(labels + lane * rows + r, mask=valid_r, other=0)[:, None]
        weight = valid_r.to(tl.float32)
        if MASKED:
            weight = tl.load(mask + lane * rows + r, mask=valid_r, other=0.0)
        z_max = tl.where(valid_r, tl.max(z, 1), 0.0)
        e = tl.exp(z - z_max[:, None])
        sums = tl.where(valid_r, tl.sum(e, 1), 1.0)
        total += tl.sum((tl.log(sums) + z_max - tl.sum(tl.where(is_label & valid, z, 0.0), 1)) * weight, 0)
        value = (e / sums[:, None] - is_label.to(tl.float32)) * (weight * inverse_count)[:, None]
        tl.store(dlogits + offsets, value, mask=valid)
    tl.store(loss + lane, total * inverse_count)


def _forward(logits: Tensor, labels: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Losses ``[L]`` and their gradients ``[L, B, C]`` from logits ``[L, B, C]``, labels and mask ``[L, B]``."""
    lanes, rows, classes = logits.shape
    logits, labels = logits.contiguous(), labels.contiguous()
    loss, dlogits = logits.new_empty(lanes), torch.empty_like(logits)
    block_classes = triton.next_power_of_2(classes)
    block_rows = min(triton.next_power_of_2(rows), max(1, _TILE_SIZE // block_classes))
    _cross_entropy[(lanes,)](
        logits, labels, labels if mask is None else mask.contiguous(), loss, dlogits, rows, classes,
        MASKED=mask is not None, ROWS=block_rows, CLASSES=block_classes,
    )  # fmt: skip
    return loss, dlogits


class _MeanCrossEntropy(Function):
    """The loss and its gradient, which the backward pass returns."""

    @staticmethod
    def forward(
        logits: Tensor, labels: Tensor, mask: Tensor | None, unit_grad: bool
    ) -> tuple[Tensor, Tensor]:
        loss, dlogits = _forward(logits[None], labels[None], None if mask is None else mask[None])
        return loss[0], dlogits[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.unit_grad = inputs[3]
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dlogits,) = ctx.saved_tensors
        return dlogits if ctx.unit_grad else dlogits * grads[0], None, None, None

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        logits: Tensor,
        labels: Tensor,
        mask: Tensor | None,
        unit_grad: bool,
    ) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        return _forward(*expand_to_lanes(info, in_dims[:3], (logits, labels, mask))), (0, 0)


def mean_cross_entropy(
    logits: Tensor, labels: Tensor, mask: Tensor | None, unit_grad: bool = False
) -> Tensor:
    """The mean over the samples of a batch whose ``mask`` is 1, as a scalar that can be differentiated once.

    With ``unit_grad`` the incoming gradient must be 1, as for a term of the differentiated sum; the backward pass then
    skips the multiplication by it.
    """
    return cast(Tensor, apply(_MeanCrossEntropy, logits, labels, mask, unit_grad)[0])
