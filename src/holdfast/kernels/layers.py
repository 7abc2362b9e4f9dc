"""Layers over the kernels: differentiable, and with rules of their own for ``vmap``."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn
from torch.autograd.function import Function
from torch.nn import functional as F

from holdfast.kernels import conv, pool

_apply: Any = lambda function, *arguments: function.apply(*arguments)  # noqa: E731  # torch leaves it untyped


class LaneConv2d(nn.Module):
    """A Conv2d that is fast for many lanes at once."""

    def __init__(self, conv2d: nn.Conv2d) -> None:
        super().__init__()
        self.weight, self.bias = conv2d.weight, conv2d.bias
        self.stride, self.padding = int(conv2d.stride[0]), int(conv2d.padding[0])

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
        """``[B, O, OH, OW]`` from ``[B, C, H, W]``."""
        bias = self.weight.new_zeros(self.weight.shape[0]) if self.bias is None else self.bias
        return cast(Tensor, _apply(_Convolve, x, self.weight, bias, self.stride, self.padding))


class LaneReLUPool(nn.Module):
    """ReLU followed by 2x2 max-pooling."""

    def forward(self, x: Tensor) -> Tensor:
        """``[B, C, H // 2, W // 2]`` from ``[B, C, H, W]``."""
        if x.shape[-1] % 2 or x.shape[-2] % 2:
            return F.max_pool2d(F.relu(x), 2)
        return cast(Tensor, _apply(_ReLUPool, x)[0])


def _with_lanes(tensor: Tensor, dim: int | None) -> Tensor:
    """The tensor with its lanes first; one lane, where it is the same for all."""
    return tensor.unsqueeze(0) if dim is None else tensor.movedim(dim, 0)


class _Convolve(Function):
    """y = x * w + bias."""

    @staticmethod
    def forward(x: Tensor, w: Tensor, bias: Tensor, stride: int, pad: int) -> Tensor:
        return conv.forward(x.unsqueeze(0), w.unsqueeze(0), bias.unsqueeze(0), stride, pad)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, w, _, ctx.stride, ctx.pad = inputs
        ctx.save_for_backward(x, w)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = _apply(_InputGradient, grads[0], w, (x.shape[-2], x.shape[-1]), ctx.stride, ctx.pad)
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            kernel = (w.shape[-2], w.shape[-1])
            dw, db = _apply(_WeightGradient, x, grads[0], kernel, ctx.stride, ctx.pad)
        return dx, dw, db, None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], x: Tensor, w: Tensor, bias: Tensor, stride: int, pad: int
    ) -> tuple[Tensor, int]:
        x, w, bias = (_with_lanes(t, dim) for t, dim in zip((x, w, bias), in_dims, strict=False))
        lanes = info.batch_size
        if w.shape[0] == bias.shape[0] == 1:  # one model for all lanes: their images are one batch
            y = conv.forward(x.reshape(1, -1, *x.shape[2:]), w, bias, stride, pad)
            return y.reshape(lanes, -1, *y.shape[2:]), 0
        w = w.expand(lanes, *w.shape[1:])
        return conv.forward(x, w, bias.expand(lanes, -1).contiguous(), stride, pad), 0


class _InputGradient(Function):
    """The gradient of `_Convolve` in x."""

    @staticmethod
    def forward(dy: Tensor, w: Tensor, size: tuple[int, int], stride: int, pad: int) -> Tensor:
        return conv.input_gradient(dy.unsqueeze(0), w.unsqueeze(0), size, stride, pad)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError("second derivatives of lane convolutions are not defined")

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        dy: Tensor,
        w: Tensor,
        size: tuple[int, int],
        stride: int,
        pad: int,
    ) -> tuple[Tensor, int]:
        dy, w = _with_lanes(dy, in_dims[0]), _with_lanes(w, in_dims[1])
        if w.shape[0] == 1:
            dx = conv.input_gradient(dy.reshape(1, -1, *dy.shape[2:]), w, size, stride, pad)
            return dx.reshape(dy.shape[0], -1, *dx.shape[2:]), 0
        return conv.input_gradient(dy, w, size, stride, pad), 0


class _WeightGradient(Function):
    """The gradients of `_Convolve` in w and bias."""

    @staticmethod
    def forward(
        x: Tensor, dy: Tensor, kernel: tuple[int, int], stride: int, pad: int
    ) -> tuple[Tensor, Tensor]:
        dw, db = conv.weight_gradient(x.unsqueeze(0), dy.unsqueeze(0), kernel, stride, pad)
        return dw[0], db[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError("second derivatives of lane convolutions are not defined")

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], x: Tensor, dy: Tensor, kernel: tuple[int, int], stride: int,
        pad: int,
    ) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:  # fmt: skip
        x, dy = _with_lanes(x, in_dims[0]), _with_lanes(dy, in_dims[1])
        dy = dy.expand(info.batch_size, *dy.shape[1:])
        return conv.weight_gradient(x, dy, kernel, stride, pad), (0, 0)


class _ReLUPool(Function):
    """Pooled values, and the code that says where each came from."""

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        return pool.forward(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return cast(Tensor, _apply(_ReLUPoolBack, grads[0], ctx.saved_tensors[0]))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int], x: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        x = x.movedim(in_dims[0], 0)
        y, code = pool.forward(x.reshape(-1, *x.shape[2:]))
        shape = (x.shape[0], -1, *y.shape[1:])
        return (y.reshape(shape), code.reshape(shape)), (0, 0)


class _ReLUPoolBack(Function):
    """The gradient of `_ReLUPool`."""

    @staticmethod
    def forward(dy: Tensor, code: Tensor) -> Tensor:
        return pool.backward(dy, code)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError("second derivatives of lane pooling are not defined")

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], dy: Tensor, code: Tensor) -> tuple[Tensor, int]:
        dy, code = (
            _with_lanes(t, d).expand(info.batch_size, *t.shape[-4:])
            for t, d in zip((dy, code), in_dims, strict=True)
        )
        dx = pool.backward(dy.reshape(-1, *dy.shape[2:]), code.reshape(-1, *code.shape[2:]))
        return dx.reshape(dy.shape[0], -1, *dx.shape[1:]), 0
