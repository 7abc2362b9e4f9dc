"""Lane convolutions as layers: differentiable, and with rules of their own for ``vmap``."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import Function, FunctionCtx
from torch.nn import functional as F

from holdfast.kernels import conv


class LaneConv2d(nn.Module):
    """A Conv2d (with ``pool``: followed by ReLU and 2x2 max-pooling) that is fast for many lanes at once."""

    def __init__(self, conv2d: nn.Conv2d, pool: bool) -> None:
        super().__init__()
        self.weight, self.bias = conv2d.weight, conv2d.bias
        self.stride, self.padding = int(conv2d.stride[0]), int(conv2d.padding[0])
        self.pool = pool

    @staticmethod
    def serves(module: nn.Conv2d) -> bool:
        """Whether the kernels cover this layer: zero padding, no groups, no dilation, the same both ways."""
        return (
            module.groups == 1
            and module.padding_mode == "zeros"
            and not isinstance(module.padding, str)
            and module.dilation == (1, 1)
            and module.stride[0] == module.stride[1]
            and module.padding[0] == module.padding[1]
        )

    def forward(self, x: Tensor) -> Tensor:
        """``[B, O, OH, OW]`` from ``[B, C, H, W]``; pooled, half of that."""
        kernel = (int(self.weight.shape[-2]), int(self.weight.shape[-1]))
        size = (int(x.shape[-2]), int(x.shape[-1]))
        even = all(n % 2 == 0 for n in conv.output_size(size, kernel, self.stride, self.padding))
        fused = self.pool and even
        bias = self.weight.new_zeros(self.weight.shape[0]) if self.bias is None else self.bias
        y = cast(Tensor, _Convolve.apply(x, self.weight, bias, self.stride, self.padding, fused)[0])
        return F.max_pool2d(F.relu(y), 2) if self.pool and not fused else y


def _lanes(tensor: Tensor, dim: int | None, lanes: int) -> tuple[Tensor, bool]:
    """The tensor with its lanes first, and whether it has any."""
    return (tensor.unsqueeze(0), False) if dim is None else (tensor.movedim(dim, 0), True)


class _Convolve(Function):
    """Convolution, and with ``pool`` ReLU and 2x2 max-pooling after it."""

    @staticmethod
    def forward(x: Tensor, w: Tensor, bias: Tensor, stride: int, pad: int, pool: bool) -> tuple[Tensor, Tensor]:
        y, code = conv.forward(x.unsqueeze(0), w.unsqueeze(0), bias.unsqueeze(0), stride, pad, pool)
        return y[0], code[0] if pool else y.new_empty(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, w, _, ctx.stride, ctx.pad, ctx.pool = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(x, w, output[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, w, code = ctx.saved_tensors
        wants_x, wants_w = bool(ctx.needs_input_grad[0]), bool(ctx.needs_input_grad[1] or ctx.needs_input_grad[2])
        dx, dw, db = _Gradients.apply(x, w, code, grads[0], ctx.stride, ctx.pad, ctx.pool, wants_x, wants_w)
        return (dx if wants_x else None), *((dw, db) if wants_w else (None, None)), None, None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], x: Tensor, w: Tensor, bias: Tensor, stride: int, pad: int,
        pool: bool,
    ) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:  # fmt: skip
        lanes = info.batch_size
        x, x_laned = _lanes(x, in_dims[0], lanes)
        w, w_laned = _lanes(w, in_dims[1], lanes)
        bias, bias_laned = _lanes(bias, in_dims[2], lanes)
        if w_laned or bias_laned:
            w = w.expand(lanes, *w.shape[1:])
            y, code = conv.forward(x, w, bias.expand(lanes, -1).contiguous(), stride, pad, pool)
        else:  # one model for all lanes: their images are one batch
            y, code = conv.forward(x.reshape(1, -1, *x.shape[2:]), w, bias, stride, pad, pool)
            y, code = (t.reshape(x.shape[0], -1, *t.shape[2:]) for t in (y, code))
        return (y, code if pool else y.new_empty(lanes, 0)), (0, 0)


class _Gradients(Function):
    """The gradients of `_Convolve` in x, w and bias; what is not wanted is empty."""

    @staticmethod
    def forward(
        x: Tensor, w: Tensor, code: Tensor, dy: Tensor, stride: int, pad: int, pool: bool, wants_x: bool,
        wants_w: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        one = [t.unsqueeze(0) for t in (x, w, code, dy)]
        dx, dw, db = _gradients(*one, stride, pad, pool, wants_x, wants_w)
        return dx[0], dw[0], db[0]

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError("second derivatives of lane convolutions are not defined")

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], x: Tensor, w: Tensor, code: Tensor, dy: Tensor, stride: int,
        pad: int, pool: bool, wants_x: bool, wants_w: bool,
    ) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[int, int, int]]:  # fmt: skip
        lanes = info.batch_size
        x, _ = _lanes(x, in_dims[0], lanes)
        w, _ = _lanes(w, in_dims[1], lanes)
        code, _ = _lanes(code, in_dims[2], lanes)
        dy, _ = _lanes(dy, in_dims[3], lanes)
        w, code, dy = (t.expand(lanes, *t.shape[1:]) for t in (w, code, dy))
        return _gradients(x, w, code, dy, stride, pad, pool, wants_x, wants_w), (0, 0, 0)


def _gradients(
    x: Tensor, w: Tensor, code: Tensor, dy: Tensor, stride: int, pad: int, pool: bool, wants_x: bool, wants_w: bool
) -> tuple[Tensor, Tensor, Tensor]:
    places = code if pool else None
    kernel = (int(w.shape[-2]), int(w.shape[-1]))
    size = (int(x.shape[-2]), int(x.shape[-1]))
    nothing = x.new_empty(dy.shape[0], 0)
    dx = conv.input_gradient(dy, w, places, size, stride, pad) if wants_x else nothing
    dw, db = conv.weight_gradient(x, dy, places, kernel, stride, pad) if wants_w else (nothing, nothing)
    return dx, dw, db
