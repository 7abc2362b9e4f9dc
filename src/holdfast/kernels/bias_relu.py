"""Bias and ReLU behind a matrix product in one pass, and their gradients in another."""

from __future__ import annotations

from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import Function

from holdfast.kernels.autograd import Gradient, apply, in_lanes


@triton.jit
def _add(z, bias, y, total, each, columns, RELU: tl.constexpr, BLOCK: tl.constexpr):
    """y[lane, row, column] = z[lane, row, column] + bias[lane, column], at least 0 with RELU."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = at < total
    value = tl.load(z + at, mask=real) + tl.load(bias + at // each * columns + at % columns, mask=real)
    if RELU:
        value = tl.where(value < 0, 0.0, value)  # what is no number stays so
    tl.store(y + at, value, mask=real)


@triton.jit
def _sum(dy, y, dz, db, rows, columns, RELU: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """dz = dy, with RELU where y is above 0; db[lane, column] = Σ_row dz[lane, row, column]."""
    lane = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float32)
    for first in range(0, rows, ROWS):
        row = first + tl.arange(0, ROWS)
        at = (lane * rows + row)[:, None] * columns + column[None, :]
        real = (row < rows)[:, None] & (column < columns)[None, :]
        value = tl.load(dy + at, mask=real, other=0.0)
        if RELU:
            value = tl.where(tl.load(y + at, mask=real, other=0.0) > 0, value, 0.0)
            tl.store(dz + at, value, mask=real)
        total += tl.sum(value, 0)
    tl.store(db + lane * columns + column, total, mask=column < columns)


def _forward(z: Tensor, bias: Tensor, relu: bool) -> Tensor:
    """``[L, B, O]`` from such a z and a bias ``[L, O]``."""
    z, bias = z.contiguous(), bias.contiguous()
    y, block = torch.empty_like(z), 512
    _add[(triton.cdiv(z.numel(), block),)](
        z, bias, y, z.numel(), z[0].numel(), z.shape[-1], RELU=relu, BLOCK=block
    )
    return y


def _backward(dy: Tensor, y: Tensor | None) -> tuple[Tensor, ...]:
    """The gradient in the bias; with ``y``, which is behind a ReLU, first that in z."""
    dy = dy.contiguous()
    lanes, rows, columns = dy.shape
    dz, db = dy if y is None else torch.empty_like(dy), dy.new_empty((lanes, columns))
    wide = min(32, triton.next_power_of_2(columns))
    _sum[(triton.cdiv(columns, wide), lanes)](
        dy, dy if y is None else y.contiguous(), dz, db, rows, columns,
        RELU=y is not None, ROWS=min(64, triton.next_power_of_2(rows)), COLUMNS=wide,
    )  # fmt: skip
    return (db,) if y is None else (dz, db)


class _AddBias(Function):
    """z + bias, with a ReLU behind it if asked for."""

    @staticmethod
    def forward(z: Tensor, bias: Tensor, relu: bool) -> Tensor:
        return _forward(z[None], bias[None], relu)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(output if inputs[2] else None)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (y,) = ctx.saved_tensors
        found = apply(_AddBiasBack, grads[0], y)
        return *((grads[0], *found) if y is None else found), None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], z: Tensor, bias: Tensor, relu: bool
    ) -> tuple[Tensor, int]:
        z, bias = in_lanes(info, in_dims[:2], (z, bias))
        return _forward(z, bias, relu), 0


class _AddBiasBack(Gradient):
    """The gradients of `_AddBias`."""

    @staticmethod
    def forward(dy: Tensor, y: Tensor | None) -> tuple[Tensor, ...]:
        return tuple(g[0] for g in _backward(dy[None], None if y is None else y[None]))

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], dy: Tensor, y: Tensor | None
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        found = _backward(*in_lanes(info, in_dims, (dy, y)))
        return found, (0,) * len(found)


def add_bias(z: Tensor, bias: Tensor, relu: bool) -> Tensor:
    """z ``[B, O]`` plus bias ``[O]``, at least 0 if ``relu``; can be differentiated once."""
    return cast(Tensor, apply(_AddBias, z, bias, relu))
