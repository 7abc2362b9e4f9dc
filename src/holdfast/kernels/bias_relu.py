"""The bias, and optionally the ReLU, after a matrix product, and their gradients."""

from __future__ import annotations

from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import Function

from holdfast.kernels.autograd import NonDifferentiable, apply, expand_to_lanes


@triton.jit
def _bias_relu_forward(z, bias, y, total, lane_size, columns, RELU: tl.constexpr, BLOCK: tl.constexpr):
    """y[lane, row, column] = z[lane, row, column] + bias[lane, column], at least 0 with RELU."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid = offsets < total
    value = tl.load(z + offsets, mask=valid)
    value += tl.load(bias + offsets // lane_size * columns + offsets % columns, mask=valid)
    if RELU:
        value = tl.where(value < 0, 0.0, value)  # keeps NaN
    tl.store(y + offsets, value, mask=valid)


@triton.jit
def _bias_relu_backward(
    dy, y, dz, db, rows, columns, RELU: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """dz = dy, with RELU only where y is above 0; db[lane, column] = Σ_row dz[lane, row, column]."""
    lane = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float32)
    for first in range(0, rows, ROWS):
        row = first + tl.arange(0, ROWS)
        offsets = (lane * rows + row)[:, None] * columns + column[None, :]
        valid = (row < rows)[:, None] & (column < columns)[None, :]
        value = tl.load(dy + offsets, mask=valid, other=0.0)
        if RELU:
            value = tl.where(tl.load(y + offsets, mask=valid, other=0.0) > 0, value, 0.0)
            tl.store(dz + offsets, value, mask=valid)
        total += tl.sum(value, 0)
    tl.store(db + lane * columns + column, total, mask=column < columns)


def _forward(z: Tensor, bias: Tensor, relu: bool) -> Tensor:
    """``[L, B, O]`` from z ``[L, B, O]`` and bias ``[L, O]``."""
    z, bias = z.contiguous(), bias.contiguous()
    y, block = torch.empty_like(z), 512
    _bias_relu_forward[(triton.cdiv(z.numel(), block),)](
        z, bias, y, z.numel(), z[0].numel(), z.shape[-1], RELU=relu, BLOCK=block
    )
    return y


def _backward(dy: Tensor, y: Tensor | None) -> tuple[Tensor, ...]:
    """The gradients of z and bias if ``y`` is the output of a ReLU; without a ReLU (None), only of the bias."""
    dy = dy.contiguous()
    lanes, rows, columns = dy.shape
    dz, db = dy if y is None else torch.empty_like(dy), dy.new_empty((lanes, columns))
    block = min(32, triton.next_power_of_2(columns))
    _bias_relu_backward[(triton.cdiv(columns, block), lanes)](
        dy, dy if y is None else y.contiguous(), dz, db, rows, columns,
        RELU=y is not None, ROWS=min(64, triton.next_power_of_2(rows)), COLUMNS=block,
    )  # fmt: skip
    return (db,) if y is None else (dz, db)


class _BiasRelu(Function):
    """z + bias, rectified if ``relu``, for one lane."""

    @staticmethod
    def forward(z: Tensor, bias: Tensor, relu: bool) -> Tensor:
        return _forward(z[None], bias[None], relu)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(output if inputs[2] else None)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (y,) = ctx.saved_tensors
        input_grads = apply(_BiasReluBackward, grads[0], y)
        return *((grads[0], *input_grads) if y is None else input_grads), None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], z: Tensor, bias: Tensor, relu: bool
    ) -> tuple[Tensor, int]:
        z, bias = expand_to_lanes(info, in_dims[:2], (z, bias))
        return _forward(z, bias, relu), 0


class _BiasReluBackward(NonDifferentiable):
    """The gradients of `_BiasRelu`."""

    @staticmethod
    def forward(dy: Tensor, y: Tensor | None) -> tuple[Tensor, ...]:
        return tuple(g[0] for g in _backward(dy[None], None if y is None else y[None]))

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], dy: Tensor, y: Tensor | None
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        grads = _backward(*expand_to_lanes(info, in_dims, (dy, y)))
        return grads, (0,) * len(grads)


def add_bias(z: Tensor, bias: Tensor, relu: bool) -> Tensor:
    """z ``[B, O]`` plus bias ``[O]``, rectified if ``relu``; can be differentiated once."""
    return cast(Tensor, apply(_BiasRelu, z, bias, relu))
