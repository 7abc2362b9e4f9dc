"""Linear layers with few outputs, such as classifiers, whose matrix product is too small to occupy a GPU."""

from __future__ import annotations

from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import Function

from holdfast.kernels.autograd import NonDifferentiable, apply, lanes_first

MAX_OUTPUTS, MAX_INPUTS = 64, 1024
# Of a forward program; inputs at a time, with up to 16 outputs.
_ROWS, _INPUTS, _WARPS = 16, 256, 4
_COLUMNS = 64  # of a backward program


@triton.jit
def _linear_forward(
    x, w, bias, y, rows, columns, x_lane, w_lane, bias_lane,
    O: tl.constexpr, BLOCK_O: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y[lane, row, o] = Σ_k x[lane, row, k] w[lane, o, k] + bias[lane, o]."""
    lane = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    o = tl.arange(0, BLOCK_O)
    acc = tl.zeros((ROWS, BLOCK_O), tl.float32)
    for first in range(0, columns, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        a = tl.load(
            x + lane * x_lane + row[:, None] * columns + k[None, :],
            mask=(row < rows)[:, None] & (k < columns)[None, :],
            other=0.0,
        )
        b = tl.load(
            w + lane * w_lane + o[:, None] * columns + k[None, :],
            mask=(o < O)[:, None] & (k < columns)[None, :],
            other=0.0,
        )
        acc = tl.dot(a, tl.trans(b), acc, input_precision=PRECISION)
    acc += tl.load(bias + lane * bias_lane + o, mask=o < O, other=0.0)[None, :]
    tl.store(
        y + (lane * rows + row)[:, None] * O + o[None, :], acc, mask=(row < rows)[:, None] & (o < O)[None, :]
    )


@triton.jit
def _linear_backward(
    dy, x, w, dx, dw, db, rows, columns, x_lane, w_lane,
    O: tl.constexpr, BLOCK_O: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dx = dy w, dw = dyᵀ x and db = Σ_row dy, of one lane and BLOCK_K columns."""
    lane = tl.program_id(1).to(tl.int64)
    k = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    o = tl.arange(0, BLOCK_O)
    valid_w = (o < O)[:, None] & (k < columns)[None, :]
    b = tl.load(w + lane * w_lane + o[:, None] * columns + k[None, :], mask=valid_w, other=0.0)
    acc = tl.zeros((BLOCK_O, BLOCK_K), tl.float32)
    bias = tl.zeros((BLOCK_O,), tl.float32)
    for first in range(0, rows, ROWS):
        row = first + tl.arange(0, ROWS)
        g = tl.load(
            dy + (lane * rows + row)[:, None] * O + o[None, :],
            mask=(row < rows)[:, None] & (o < O)[None, :],
            other=0.0,
        )
        offsets = row[:, None] * columns + k[None, :]
        valid_x = (row < rows)[:, None] & (k < columns)[None, :]
        a = tl.load(x + lane * x_lane + offsets, mask=valid_x, other=0.0)
        acc = tl.dot(tl.trans(g), a, acc, input_precision=PRECISION)
        tl.store(dx + lane * rows * columns + offsets, tl.dot(g, b, input_precision=PRECISION), mask=valid_x)
        bias += tl.sum(g, 0)
    tl.store(dw + (lane * O + o)[:, None] * columns + k[None, :], acc, mask=valid_w)
    if tl.program_id(0) == 0:
        tl.store(db + lane * O + o, bias, mask=o < O)


def _precision() -> str:
    """The precision of torch's own matrix products."""
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


def _lane_stride(tensor: Tensor) -> int:
    """Elements from one lane to the next; 0 if all lanes share the tensor."""
    return tensor[0].numel() if len(tensor) > 1 else 0


def _forward(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    """``[L, B, O]`` from x ``[L or 1, B, I]``, w ``[L or 1, O, I]`` and bias ``[L or 1, O]``."""
    x, w, bias = x.contiguous(), w.contiguous(), bias.contiguous()
    lanes = max(map(len, (x, w, bias)))
    _, rows, columns = x.shape
    outputs = w.shape[1]
    block_o = max(16, triton.next_power_of_2(outputs))
    y = x.new_empty((lanes, rows, outputs))
    _linear_forward[(triton.cdiv(rows, _ROWS), lanes)](
        x, w, bias, y, rows, columns, _lane_stride(x), _lane_stride(w), _lane_stride(bias),
        O=outputs, BLOCK_O=block_o, ROWS=_ROWS,
        BLOCK_K=max(16, min(_INPUTS * 16 // block_o, triton.next_power_of_2(columns))), PRECISION=_precision(),
        num_warps=_WARPS, num_stages=2,
    )  # fmt: skip
    return y


def _backward(dy: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, w and bias, of all lanes."""
    dy, x, w = dy.contiguous(), x.contiguous(), w.contiguous()
    lanes, rows, outputs = dy.shape
    columns = x.shape[-1]
    dx, dw, db = (x.new_empty((lanes, *s)) for s in ((rows, columns), (outputs, columns), (outputs,)))
    _linear_backward[(triton.cdiv(columns, _COLUMNS), lanes)](
        dy, x, w, dx, dw, db, rows, columns, _lane_stride(x), _lane_stride(w),
        O=outputs, BLOCK_O=max(16, triton.next_power_of_2(outputs)),
        ROWS=max(16, min(64, triton.next_power_of_2(rows))), BLOCK_K=_COLUMNS, PRECISION=_precision(),
        num_stages=1,
    )  # fmt: skip
    return dx, dw, db


class _SmallLinear(Function):
    """x wᵀ + bias, for one lane."""

    @staticmethod
    def forward(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        return _forward(x[None], w[None], bias[None])[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return cast(tuple[Tensor, ...], apply(_SmallLinearBackward, grads[0], *ctx.saved_tensors))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *tensors: Tensor) -> tuple[Tensor, int]:
        y = _forward(*(lanes_first(*pair) for pair in zip(tensors, in_dims, strict=True)))
        return y.expand(info.batch_size, *y.shape[1:]), 0


class _SmallLinearBackward(NonDifferentiable):
    """The gradients of `_SmallLinear`."""

    @staticmethod
    def forward(dy: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return tuple(g[0] for g in _backward(dy[None], x[None], w[None]))

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], *tensors: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        dy, x, w = (lanes_first(*pair) for pair in zip(tensors, in_dims, strict=True))
        return _backward(dy.expand(info.batch_size, *dy.shape[1:]), x, w), (0, 0, 0)


def supported(w: Tensor) -> bool:
    """Whether a layer with weights ``[O, I]`` is small enough for these kernels."""
    return w.shape[-2] <= MAX_OUTPUTS and w.shape[-1] <= MAX_INPUTS


def linear(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    """``[B, O]`` from x ``[B, I]``, w ``[O, I]`` and bias ``[O]``; can be differentiated once."""
    return cast(Tensor, apply(_SmallLinear, x, w, bias))
