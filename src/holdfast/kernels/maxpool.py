"""Max-pooling with windows that may overlap, over images that lie channels last, and its gradient."""

from __future__ import annotations

from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.autograd.function import Function

from holdfast.kernels.autograd import Gradient, apply, in_lanes, with_lanes
from holdfast.kernels.conv_geometry import Geometry

_BLOCK = 1024
_MOST = 16  # a window's height and width at most, since a code has eight bits


# The padding is no constant to these kernels: why, see frame.py.
@triton.jit(do_not_specialize=["padding"])
def _pool(
    x, y, code, padding,
    H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, C: tl.constexpr,
    KERNEL: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y = the largest value of a window, as torch finds it; ``code`` says which of its places it is from."""
    BLOCKS: tl.constexpr = (OH * OW * C + BLOCK - 1) // BLOCK  # of a pooled image
    image = (tl.program_id(0) // BLOCKS).to(tl.int64)
    at = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    real = at < OH * OW * C
    top = at // (OW * C) * STRIDE
    left = at // C % OW * STRIDE
    x += image * (H * W * C)
    best = tl.full((BLOCK,), -float("inf"), tl.float32)
    won = tl.maximum(padding - top, 0) * KERNEL + tl.maximum(
        padding - left, 0
    )  # the first place of the image
    for place in tl.static_range(KERNEL * KERNEL):
        h = top + (place // KERNEL - padding)
        w = left + (place % KERNEL - padding)
        inside = real & (h >= 0) & (h < H) & (w >= 0) & (w < W)
        value = tl.load(x + (h * W + w) * C + at % C, mask=inside, other=-float("inf"))
        larger = (value > best) | (value != value)
        won = tl.where(larger, place, won)
        best = tl.where(larger, value, best)
    tl.store(y + image * (OH * OW * C) + at, best, mask=real)
    tl.store(code + image * (OH * OW * C) + at, won.to(tl.uint8), mask=real)


@triton.jit(do_not_specialize=["padding"])
def _pool_back(
    dy, code, dx, padding,
    H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, C: tl.constexpr,
    KERNEL: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dx = Σ dy over those windows around a pixel whose largest value is its own."""
    BLOCKS: tl.constexpr = (H * W * C + BLOCK - 1) // BLOCK  # of an image
    SPAN: tl.constexpr = (KERNEL + STRIDE - 1) // STRIDE  # windows that one pixel may be in, each way
    image = (tl.program_id(0) // BLOCKS).to(tl.int64)
    at = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    real = at < H * W * C
    h = at // (W * C) + padding
    w = at // C % W + padding
    dy += image * (OH * OW * C)
    code += image * (OH * OW * C)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(SPAN):
        for j in tl.static_range(SPAN):
            oh = h // STRIDE - i
            ow = w // STRIDE - j
            row = h - oh * STRIDE  # of the window
            column = w - ow * STRIDE
            inside = real & (oh >= 0) & (oh < OH) & (ow >= 0) & (ow < OW) & (row < KERNEL) & (column < KERNEL)
            source = (oh * OW + ow) * C + at % C
            won = tl.load(code + source, mask=inside, other=255) == row * KERNEL + column
            total += tl.where(won, tl.load(dy + source, mask=inside, other=0.0), 0.0)
    tl.store(dx + image * (H * W * C) + at, total, mask=real)


def _launch(
    kernel: Any, window: Geometry, images: int, channels: int, result: tuple[int, int], *tensors: Tensor
) -> None:
    """Have a kernel compute images of the size ``result``."""
    each = result[0] * result[1] * channels
    block = min(_BLOCK, triton.next_power_of_2(each))
    kernel[(triton.cdiv(each, block) * images,)](
        *tensors, window.padding, H=window.size[0], W=window.size[1], OH=window.out[0], OW=window.out[1], C=channels,
        KERNEL=window.kernel, STRIDE=window.stride, BLOCK=block,
    )  # fmt: skip


def _forward(x: Tensor, window: Geometry) -> tuple[Tensor, Tensor]:
    """The pooled images ``[L, B, C, OH, OW]`` and their codes ``[L, B, OH, OW, C]``."""
    x = x.permute(0, 1, 3, 4, 2).contiguous()
    lanes, batch, *_, channels = x.shape
    y = x.new_empty((lanes, batch, *window.out, channels))
    code = torch.empty(y.shape, dtype=torch.uint8, device=x.device)
    _launch(_pool, window, lanes * batch, channels, window.out, x, y, code)
    return y.permute(0, 1, 4, 2, 3), code


def _backward(window: Geometry, dy: Tensor, code: Tensor) -> Tensor:
    """The gradient in the images ``[L, B, C, H, W]``."""
    dy = dy.permute(0, 1, 3, 4, 2).contiguous()
    lanes, batch, *_, channels = dy.shape
    dx = dy.new_empty((lanes, batch, *window.size, channels))
    _launch(_pool_back, window, lanes * batch, channels, window.size, dy, code.contiguous(), dx)
    return dx.permute(0, 1, 4, 2, 3)


class _MaxPool(Function):
    """The pooled images, and which pixel of its window each value is from."""

    @staticmethod
    def forward(x: Tensor, window: Geometry) -> tuple[Tensor, Tensor]:
        y, code = _forward(x[None], window)
        return y[0], code[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        _, ctx.window = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return cast(Tensor, apply(_MaxPoolBack, ctx.window, grads[0], *ctx.saved_tensors)), None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], x: Tensor, window: Geometry
    ) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        return _forward(with_lanes(x, in_dims[0]), window), (0, 0)


class _MaxPoolBack(Gradient):
    """The gradient of `_MaxPool` in x."""

    @staticmethod
    def forward(window: Geometry, dy: Tensor, code: Tensor) -> Tensor:
        return _backward(window, dy[None], code[None])[0]

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], window: Geometry, *tensors: Tensor
    ) -> tuple[Tensor, int]:
        return _backward(window, *in_lanes(info, in_dims[1:], tensors)), 0


class LaneMaxPool2d(nn.Module):
    """A MaxPool2d that is fast for many lanes at once."""

    def __init__(self, pool: nn.MaxPool2d) -> None:
        super().__init__()
        self.kernel, self.stride, self.padding = (
            _both_ways(n)[0] for n in (pool.kernel_size, pool.stride, pool.padding)
        )

    @staticmethod
    def serves(pool: nn.MaxPool2d) -> bool:
        """Whether the kernels cover this layer: the same both ways, no dilation, nothing but the values asked for."""
        sizes = [_both_ways(n) for n in (pool.kernel_size, pool.stride, pool.padding, pool.dilation)]
        return (
            all(height == width for height, width in sizes)
            and sizes[0][0] <= _MOST
            and sizes[3] == (1, 1)
            and not (pool.ceil_mode or pool.return_indices)
        )

    @property
    def halves(self) -> bool:
        """Whether it is plain 2x2 pooling."""
        return (self.kernel, self.stride, self.padding) == (2, 2, 0)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, C, OH, OW]`` from ``[B, C, H, W]``."""
        window = Geometry((x.shape[-2], x.shape[-1]), self.kernel, self.stride, self.padding)
        return cast(Tensor, apply(_MaxPool, x, window)[0])


def _both_ways(n: int | tuple[int, ...]) -> tuple[int, ...]:
    return (n, n) if isinstance(n, int) else n
