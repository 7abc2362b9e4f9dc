"""Images in zero-padded, channels-last memory, the input of the convolutions, in fp16 if TF32 is allowed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.kernels.amax import record_amax, recorded_amax

_MAX_BLOCKS = 256  # of the only lane in `block_amax`; each of several lanes has at most a quarter as many
SLACK = tl.constexpr(64)  # zeros after the last image, for windows that are rounded up


@triton.jit
def fp16_scale(amax):
    """The power of two that scales ``amax`` to between 2^14 and 2^15."""
    exponent = (amax.to(tl.int32, bitcast=True) >> 23) & 255
    return (tl.minimum(tl.maximum(268 - exponent, 1), 253) << 23).to(tl.float32, bitcast=True)


@triton.jit
def tile_amax(value, valid):
    """The bits of the largest |value| [M, N] among the valid ones; they are ordered as the positive floats are."""
    return tl.max(tl.max(tl.where(valid, value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0), 1), 0)


# ``zeros_before`` is not specialised to its value: otherwise sums are packed in pairs of 16 bits, which ptxas 12
# compiles wrongly for Hopper if one of a pair is unused (github.com/triton-lang/triton/issues/11581).
@triton.jit(do_not_specialize=["zeros_before"])
def _pad_images(
    x, argmax, out, block_amax, amax, images, images_per_lane, x_lane, x_b, x_c, x_h, x_w, blocks, zeros_before,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, CP: tl.constexpr,
    DILATION: tl.constexpr, UNPOOL: tl.constexpr, FP16: tl.constexpr,
    PIXELS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """out[image, zeros_before + DILATION h, zeros_before + DILATION w, c] = scale(lane) x[image, c, h, w], else 0.

    With FP16, amax[lane] is the maximum of the lane's ``block_amax``, and gives the scale.
    With UNPOOL, x is the gradient of 2x2 max-pooling: (h, w) gets its window's value if ``argmax`` is its position.
    """
    IMAGE_BLOCKS: tl.constexpr = (PH * PW + PIXELS - 1) // PIXELS
    block = tl.program_id(0) % IMAGE_BLOCKS
    image = (tl.program_id(0) // IMAGE_BLOCKS).to(tl.int64)
    lane = image // images_per_lane
    pixel = block * PIXELS + tl.arange(0, PIXELS)
    c = tl.arange(0, BLOCK_C)
    h = pixel // PW - zeros_before
    w = pixel % PW - zeros_before
    inside = (pixel < PH * PW) & (h >= 0) & (w >= 0) & (h % DILATION == 0) & (w % DILATION == 0)
    h = h // DILATION
    w = w // DILATION
    inside = inside & (h < H) & (w < W)
    valid = inside[:, None] & (c < C)[None, :]
    x += lane * x_lane + image % images_per_lane * x_b
    if UNPOOL:
        offsets = (h // 2 * (W // 2) + w // 2)[:, None] * C + c[None, :]
        position = tl.load(argmax + image * (H // 2 * (W // 2) * C) + offsets, mask=valid, other=4)
        valid = valid & (position == (h % 2 * 2 + w % 2)[:, None])
        h = h // 2
        w = w // 2
    value = tl.load(x + (h * x_h + w * x_w)[:, None] + (c * x_c)[None, :], mask=valid, other=0.0)
    if FP16:
        index = tl.arange(0, BLOCKS)
        lane_amax = tl.max(tl.load(block_amax + lane * blocks + index, mask=index < blocks, other=0), 0)
        lane_amax = lane_amax.to(tl.float32, bitcast=True)
        value = (value * fp16_scale(lane_amax)).to(tl.float16)
        if (image % images_per_lane == 0) & (block == 0):
            tl.store(amax + lane, lane_amax)
    out += image * (PH * PW * CP)
    tl.store(
        out + pixel[:, None] * CP + c[None, :], value, mask=(pixel < PH * PW)[:, None] & (c < CP)[None, :]
    )
    if (image == images - 1) & (block == 0):
        tail = tl.arange(0, SLACK)
        tl.store(out + PH * PW * CP + tail, tl.zeros((SLACK,), value.dtype))


@triton.jit
def _block_amax(x, out, lane_size, lane_stride, tiles, BLOCK: tl.constexpr):
    """out[lane, block] = the bits of the largest |x| among the ``tiles`` times BLOCK values of a block."""
    block = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1).to(tl.int64)
    amax = tl.zeros((BLOCK,), tl.int32)
    for tile in range(tiles):
        offsets = (block * tiles + tile) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(x + lane * lane_stride + offsets, mask=offsets < lane_size, other=0.0)
        amax = tl.maximum(amax, value.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    tl.store(out + lane * tl.num_programs(0) + block, tl.max(amax, 0))


def block_amax(x: Tensor) -> Tensor:
    """The largest absolute values of each lane's blocks, ``[L, P]`` from ``[L, B, C, H, W]``, as float32 bits."""
    recorded = recorded_amax(x)
    if recorded is not None:
        return recorded
    if not (x.is_contiguous() or x.permute(0, 1, 3, 4, 2).is_contiguous()):
        return x.abs().amax((1, 2, 3, 4)).view(torch.int32)[:, None]
    lane_size, tile = x[0].numel(), 4096
    tiles = triton.cdiv(lane_size, tile * (_MAX_BLOCKS if len(x) == 1 else _MAX_BLOCKS // 4))
    out = torch.empty((len(x), triton.cdiv(lane_size, tiles * tile)), dtype=torch.int32, device=x.device)
    _block_amax[out.T.shape](x, out, lane_size, x.stride(0), tiles, BLOCK=tile)
    record_amax(x, out)  # both branches of a residual block may read the images
    return out


def uses_fp16() -> bool:
    """Whether convolutions store their operands in half precision: where TF32 is allowed."""
    return torch.backends.cudnn.allow_tf32


@dataclass(frozen=True)
class PaddedLayout:
    """The position of an image in padded memory of ``size`` (height, width).

    ``zeros_before`` rows and columns of zeros precede it, and ``dilation`` - 1 lie between neighbouring pixels.
    """

    zeros_before: int
    size: tuple[int, int]
    dilation: int = 1


@dataclass(frozen=True)
class Padded:
    """Padded images ``values`` [L, B, PH, PW, CP], and the ``amax`` [L] that gives each lane's scale in fp16."""

    values: Tensor
    amax: Tensor

    @property
    def lane_stride(self) -> int:
        """Elements from one lane to the next; 0 if all lanes share the images."""
        return self.values.stride(0) if self.values.shape[0] > 1 else 0

    @property
    def amax_stride(self) -> int:
        """1, or 0 if all lanes share the images."""
        return int(self.values.shape[0] > 1)


def pad(x: Tensor, layout: PaddedLayout) -> Padded:
    """Images ``[L, B, C, H, W]`` in a padded layout."""
    return _pad(x, None, layout)


def relu_maxpool_backward(dy: Tensor, argmax: Tensor, layout: PaddedLayout) -> Padded:
    """The gradient of `relu_maxpool.forward` with respect to its input ``[L, B, C, H, W]``, in a padded layout.

    dy and argmax are ``[L, B, C, H/2, W/2]``.
    """
    argmax = argmax.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
    return _pad(dy, argmax, layout)


def _pad(x: Tensor, argmax: Tensor | None, layout: PaddedLayout) -> Padded:
    lanes, batch, channels, height, width = x.shape
    if argmax is not None:
        height, width = 2 * height, 2 * width
    padded_height, padded_width = layout.size
    padded_channels = triton.cdiv(channels, 8) * 8  # so that loads are wide and aligned
    if channels <= 4:
        padded_channels, padded_width = 4, triton.cdiv(padded_width, 4) * 4
    shape = (lanes, batch, padded_height, padded_width, padded_channels)
    total = lanes * batch * padded_height * padded_width * padded_channels
    flat = torch.empty(
        total + SLACK.value, dtype=torch.float16 if uses_fp16() else torch.float32, device=x.device
    )
    blocks = (
        block_amax(x) if uses_fp16() else x.new_empty((lanes, 1), dtype=torch.int32)
    )  # float32 needs no scale
    amax = x.new_empty(lanes)
    block_c = triton.next_power_of_2(padded_channels)
    pixels = max(1, 2048 // block_c)
    _pad_images[(triton.cdiv(padded_height * padded_width, pixels) * lanes * batch,)](
        x, x if argmax is None else argmax, flat, blocks, amax, lanes * batch, batch, *x.stride(), blocks.shape[1],
        layout.zeros_before, C=channels, H=height, W=width, PH=padded_height, PW=padded_width, CP=padded_channels,
        DILATION=layout.dilation, UNPOOL=argmax is not None, FP16=uses_fp16(),
        PIXELS=pixels, BLOCK_C=block_c, BLOCKS=triton.next_power_of_2(blocks.shape[1]),
    )  # fmt: skip
    return Padded(flat[:total].view(shape), amax)
