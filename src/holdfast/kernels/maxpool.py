"""Max-pooling with windows that may overlap, and its gradient, on channels-last images."""

from __future__ import annotations

from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.autograd.function import Function

from holdfast.kernels.autograd import NonDifferentiable, apply, expand_to_lanes, lanes_first
from holdfast.kernels.conv_geometry import Geometry
from holdfast.kernels.epilogue import channels_last

_BLOCK = 1024
_MAX_KERNEL = 16  # height and width of a window, since the argmax has eight bits


# ``padding`` is not specialised to its value, for the reason given in padded_images.py.
@triton.jit(do_not_specialize=["padding"])
def _maxpool_forward(
    x, y, argmax, padding,
    H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, C: tl.constexpr,
    KERNEL: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y = the largest value of a window, as in PyTorch; argmax = its position in the window."""
    BLOCKS: tl.constexpr = (OH * OW * C + BLOCK - 1) // BLOCK  # of a pooled image
    image = (tl.program_id(0) // BLOCKS).to(tl.int64)
    offsets = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    valid = offsets < OH * OW * C
    top = offsets // (OW * C) * STRIDE
    left = offsets // C % OW * STRIDE
    x += image * (H * W * C)
    best = tl.full((BLOCK,), -float("inf"), tl.float32)
    # At first the window's first position inside the image.
    best_position = tl.maximum(padding - top, 0) * KERNEL + tl.maximum(padding - left, 0)
    for position in tl.static_range(KERNEL * KERNEL):
        h = top + (position // KERNEL - padding)
        w = left + (position % KERNEL - padding)
        inside = valid & (h >= 0) & (h < H) & (w >= 0) & (w < W)
        value = tl.load(x + (h * W + w) * C + offsets % C, mask=inside, other=-float("inf"))
        larger = (value > best) | (value != value)
        best_position = tl.where(larger, position, best_position)
        best = tl.where(larger, value, best)
    tl.store(y + image * (OH * OW * C) + offsets, best, mask=valid)
    tl.store(argmax + image * (OH * OW * C) + offsets, best_position.to(tl.uint8), mask=valid)


@triton.jit(do_not_specialize=["padding"])
def _maxpool_backward(
    dy, argmax, dx, padding,
    H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, C: tl.constexpr,
    KERNEL: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dx = Σ dy over those windows around a pixel whose largest value is the pixel's."""
    BLOCKS: tl.constexpr = (H * W * C + BLOCK - 1) // BLOCK  # of an image
    SPAN: tl.constexpr = (KERNEL + STRIDE - 1) // STRIDE  # windows that contain a pixel, per dimension
    image = (tl.program_id(0) // BLOCKS).to(tl.int64)
    offsets = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    valid = offsets < H * W * C
    h = offsets // (W * C) + padding
    w = offsets // C % W + padding
    dy += image * (OH * OW * C)
    argmax += image * (OH * OW * C)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(SPAN):
        for j in tl.static_range(SPAN):
            oh = h // STRIDE - i
            ow = w // STRIDE - j
            row = h - oh * STRIDE  # of the window
            column = w - ow * STRIDE
            inside = (
                valid & (oh >= 0) & (oh < OH) & (ow >= 0) & (ow < OW) & (row < KERNEL) & (column < KERNEL)
            )
            source = (oh * OW + ow) * C + offsets % C
            is_max = tl.load(argmax + source, mask=inside, other=255) == row * KERNEL + column
            total += tl.where(is_max, tl.load(dy + source, mask=inside, other=0.0), 0.0)
    tl.store(dx + image * (H * W * C) + offsets, total, mask=valid)


def _launch(
    kernel: Any, window: Geometry, images: int, channels: int, result: tuple[int, int], *tensors: Tensor
) -> None:
    """Launch a kernel that computes images of the size ``result``."""
    image_size = result[0] * result[1] * channels
    block = min(_BLOCK, triton.next_power_of_2(image_size))
    kernel[(triton.cdiv(image_size, block) * images,)](
        *tensors, window.padding, H=window.size[0], W=window.size[1], OH=window.out[0], OW=window.out[1], C=channels,
        KERNEL=window.kernel, STRIDE=window.stride, BLOCK=block,
    )  # fmt: skip


def _forward(x: Tensor, window: Geometry) -> tuple[Tensor, Tensor]:
    """The pooled images ``[L, B, C, OH, OW]`` and the argmax of their windows ``[L, B, OH, OW, C]``."""
    x = channels_last(x)
    lanes, batch, *_, channels = x.shape
    y = x.new_empty((lanes, batch, *window.out, channels))
    argmax = torch.empty(y.shape, dtype=torch.uint8, device=x.device)
    _launch(_maxpool_forward, window, lanes * batch, channels, window.out, x, y, argmax)
    return y.permute(0, 1, 4, 2, 3), argmax


def _backward(window: Geometry, dy: Tensor, argmax: Tensor) -> Tensor:
    """The gradient of the images ``[L, B, C, H, W]``."""
    dy = channels_last(dy)
    lanes, batch, *_, channels = dy.shape
    dx = dy.new_empty((lanes, batch, *window.size, channels))
    _launch(_maxpool_backward, window, lanes * batch, channels, window.size, dy, argmax.contiguous(), dx)
    return dx.permute(0, 1, 4, 2, 3)


class _MaxPool(Function):
    """The pooled images and the argmax of their windows, for one lane."""

    @staticmethod
    def forward(x: Tensor, window: Geometry) -> tuple[Tensor, Tensor]:
        y, argmax = _forward(x[None], window)
        return y[0], argmax[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        _, ctx.window = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return cast(Tensor, apply(_MaxPoolBackward, ctx.window, grads[0], *ctx.saved_tensors)), None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], x: Tensor, window: Geometry
    ) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        return _forward(lanes_first(x, in_dims[0]), window), (0, 0)


class _MaxPoolBackward(NonDifferentiable):
    """The gradient of `_MaxPool` with respect to x."""

    @staticmethod
    def forward(window: Geometry, dy: Tensor, argmax: Tensor) -> Tensor:
        return _backward(window, dy[None], argmax[None])[0]

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], window: Geometry, *tensors: Tensor
    ) -> tuple[Tensor, int]:
        return _backward(window, *expand_to_lanes(info, in_dims[1:], tensors)), 0


class LaneMaxPool2d(nn.Module):
    """nn.MaxPool2d for many lanes at once."""

    def __init__(self, pool: nn.MaxPool2d) -> None:
        super().__init__()
        self.kernel, self.stride, self.padding = (
            _pair(n)[0] for n in (pool.kernel_size, pool.stride, pool.padding)
        )

    @staticmethod
    def supports(pool: nn.MaxPool2d) -> bool:
        """Whether the kernels support this layer: square windows, no dilation, no indices or ceil mode."""
        sizes = [_pair(n) for n in (pool.kernel_size, pool.stride, pool.padding, pool.dilation)]
        return (
            all(height == width for height, width in sizes)
            and sizes[0][0] <= _MAX_KERNEL
            and sizes[3] == (1, 1)
            and not (pool.ceil_mode or pool.return_indices)
        )

    @property
    def is_2x2(self) -> bool:
        """Whether the windows are 2x2 and neither overlap nor are padded."""
        return (self.kernel, self.stride, self.padding) == (2, 2, 0)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, C, OH, OW]`` from ``[B, C, H, W]``."""
        window = Geometry((x.shape[-2], x.shape[-1]), self.kernel, self.stride, self.padding)
        return cast(Tensor, apply(_MaxPool, x, window)[0])


def _pair(n: int | tuple[int, ...]) -> tuple[int, ...]:
    return (n, n) if isinstance(n, int) else n
