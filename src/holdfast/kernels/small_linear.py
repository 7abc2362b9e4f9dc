"""Linear layers with few outputs, such as classifiers: too small for a matrix product to fill a GPU."""

from __future__ import annotations

from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import Function

from holdfast.kernels.autograd import Gradient, apply, with_lanes

MOST_OUTPUTS, MOST_INPUTS = 64, 1024
_ROWS, _DEPTH, _WARPS = 16, 256, 4  # of a program forward, with up to 16 outputs: rows, inputs at a time
_COLUMNS = 64  # of a program backward


@triton.jit
def _outputs(
    x, w, bias, y, rows, columns, x_lane, w_lane, bias_lane,
    O: tl.constexpr, BLOCK_O: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y[lane, row, o] = Σ_k x[lane, row, k] w[lane, o, k] + bias[lane, o]."""
    lane = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    o = tl.arange(0, BLOCK_O)
    acc = tl.zeros((ROWS, BLOCK_O), tl.float32)
    for first in range(0, columns, WIDE):
        k = first + tl.arange(0, WIDE)
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
def _gradients(
    dy, x, w, dx, dw, db, rows, columns, x_lane, w_lane,
    O: tl.constexpr, BLOCK_O: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dx = dy w, dw = dyᵀ x and db = Σ_row dy, of one lane and WIDE columns."""
    lane = tl.program_id(1).to(tl.int64)
    k = tl.program_id(0) * WIDE + tl.arange(0, WIDE)
    o = tl.arange(0, BLOCK_O)
    own = (o < O)[:, None] & (k < columns)[None, :]
    b = tl.load(w + lane * w_lane + o[:, None] * columns + k[None, :], mask=own, other=0.0)
    acc = tl.zeros((BLOCK_O, WIDE), tl.float32)
    bias = tl.zeros((BLOCK_O,), tl.float32)
    for first in range(0, rows, ROWS):
        row = first + tl.arange(0, ROWS)
        g = tl.load(
            dy + (lane * rows + row)[:, None] * O + o[None, :],
            mask=(row < rows)[:, None] & (o < O)[None, :],
            other=0.0,
        )
        at = row[:, None] * columns + k[None, :]
        real = (row < rows)[:, None] & (k < columns)[None, :]
        a = tl.load(x + lane * x_lane + at, mask=real, other=0.0)
        acc = tl.dot(tl.trans(g), a, acc, input_precision=PRECISION)
        tl.store(dx + lane * rows * columns + at, tl.dot(g, b, input_precision=PRECISION), mask=real)
        bias += tl.sum(g, 0)
    tl.store(dw + (lane * O + o)[:, None] * columns + k[None, :], acc, mask=own)
    if tl.program_id(0) == 0:
        tl.store(db + lane * O + o, bias, mask=o < O)


def _precision() -> str:
    """That of torch's own matrix products."""
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


def _apart(tensor: Tensor) -> int:
    """Elements from one lane to the next; 0 if all lanes have the same."""
    return tensor[0].numel() if len(tensor) > 1 else 0


def _forward(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    """``[L, B, O]`` from x ``[L or 1, B, I]``, w ``[L or 1, O, I]`` and bias ``[L or 1, O]``."""
    x, w, bias = x.contiguous(), w.contiguous(), bias.contiguous()
    lanes = max(map(len, (x, w, bias)))
    _, rows, columns = x.shape
    outputs = w.shape[1]
    wide = max(16, triton.next_power_of_2(outputs))
    y = x.new_empty((lanes, rows, outputs))
    _outputs[(triton.cdiv(rows, _ROWS), lanes)](
        x, w, bias, y, rows, columns, _apart(x), _apart(w), _apart(bias),
        O=outputs, BLOCK_O=wide, ROWS=_ROWS,
        WIDE=max(16, min(_DEPTH * 16 // wide, triton.next_power_of_2(columns))), PRECISION=_precision(),
        num_warps=_WARPS, num_stages=2,
    )  # fmt: skip
    return y


def _backward(dy: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients in x, w and bias, of all lanes."""
    dy, x, w = dy.contiguous(), x.contiguous(), w.contiguous()
    lanes, rows, outputs = dy.shape
    columns = x.shape[-1]
    dx, dw, db = (x.new_empty((lanes, *s)) for s in ((rows, columns), (outputs, columns), (outputs,)))
    _gradients[(triton.cdiv(columns, _COLUMNS), lanes)](
        dy, x, w, dx, dw, db, rows, columns, _apart(x), _apart(w),
        O=outputs, BLOCK_O=max(16, triton.next_power_of_2(outputs)),
        ROWS=max(16, min(64, triton.next_power_of_2(rows))), WIDE=_COLUMNS, PRECISION=_precision(),
        num_stages=1,
    )  # fmt: skip
    return dx, dw, db


class _Narrow(Function):
    """x wᵀ + bias."""

    @staticmethod
    def forward(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        return _forward(x[None], w[None], bias[None])[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return cast(tuple[Tensor, ...], apply(_NarrowBack, grads[0], *ctx.saved_tensors))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *tensors: Tensor) -> tuple[Tensor, int]:
        y = _forward(*(with_lanes(*pair) for pair in zip(tensors, in_dims, strict=True)))
        return y.expand(info.batch_size, *y.shape[1:]), 0


class _NarrowBack(Gradient):
    """The gradients of `_Narrow`."""

    @staticmethod
    def forward(dy: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return tuple(g[0] for g in _backward(dy[None], x[None], w[None]))

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], *tensors: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        dy, x, w = (with_lanes(*pair) for pair in zip(tensors, in_dims, strict=True))
        return _backward(dy.expand(info.batch_size, *dy.shape[1:]), x, w), (0, 0, 0)


def serves(w: Tensor) -> bool:
    """Whether weights ``[O, I]`` are those of a layer so small."""
    return w.shape[-2] <= MOST_OUTPUTS and w.shape[-1] <= MOST_INPUTS


def linear(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    """``[B, O]`` from x ``[B, I]`` and w ``[O, I]``; can be differentiated once."""
    return cast(Tensor, apply(_Narrow, x, w, bias))
