"""Images in zero-padded memory, channels last, as the convolutions read them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

SLACK = tl.constexpr(64)  # zeros behind the last image, for windows that are rounded up


@triton.jit
def scale_to_half(largest):
    """The power of two that brings ``largest`` to between 2^14 and 2^15."""
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) & 255
    return (tl.minimum(tl.maximum(268 - exponent, 1), 253) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _frame(
    x, code, out, largest, images, per_lane, x_lane, x_b, x_c, x_h, x_w, each,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, CP: tl.constexpr,
    PAD: tl.constexpr, APART: tl.constexpr, POOLED: tl.constexpr, HALF: tl.constexpr,
    PIXELS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """out[image, PAD + APART h, PAD + APART w, c] = scale(lane) x[image, c, h, w], 0 elsewhere.

    With POOLED, x is a gradient behind 2x2 pooling: (h, w) has the value of its window if ``code`` says that it won.
    """
    image = tl.program_id(1).to(tl.int64)
    lane = image // per_lane
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    c = tl.arange(0, BLOCK_C)
    h = pixel // PW - PAD
    w = pixel % PW - PAD
    inside = (pixel < PH * PW) & (h >= 0) & (w >= 0) & (h % APART == 0) & (w % APART == 0)
    h = h // APART
    w = w // APART
    inside = inside & (h < H) & (w < W)
    real = inside[:, None] & (c < C)[None, :]
    x += lane * x_lane + image % per_lane * x_b
    if POOLED:
        at = (h // 2 * (W // 2) + w // 2)[:, None] * C + c[None, :]
        won = tl.load(code + image * (H // 2 * (W // 2) * C) + at, mask=real, other=4)
        real = real & (won == (h % 2 * 2 + w % 2)[:, None])
        h = h // 2
        w = w // 2
    value = tl.load(x + (h * x_h + w * x_w)[:, None] + (c * x_c)[None, :], mask=real, other=0.0)
    if HALF:
        value = (value * scale_to_half(tl.load(largest + lane * each))).to(tl.float16)
    out += image * (PH * PW * CP)
    tl.store(
        out + pixel[:, None] * CP + c[None, :], value, mask=(pixel < PH * PW)[:, None] & (c < CP)[None, :]
    )
    if (image == images - 1) & (tl.program_id(0) == 0):
        tail = tl.arange(0, SLACK)
        tl.store(out + PH * PW * CP + tail, tl.zeros((SLACK,), value.dtype))


@triton.jit
def _largest(x, out, total, per_lane, BLOCK: tl.constexpr):
    """out[lane] = the largest |x| of the lane, as bits: those of positive floats are ordered as the floats are."""
    lane = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + lane * per_lane + at, mask=at < total, other=0.0)
    bits = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    tl.atomic_max(out + lane, tl.max(bits, 0), sem="relaxed")


def largest(x: Tensor) -> Tensor:
    """Each lane's largest absolute value, ``[L]`` from ``[L, B, C, H, W]``."""
    if not (x.is_contiguous() or x.permute(0, 1, 3, 4, 2).is_contiguous()):
        return x.abs().amax((1, 2, 3, 4))
    most = torch.zeros(len(x), device=x.device)
    each, block = x[0].numel(), 4096
    _largest[(triton.cdiv(each, block), len(x))](x, most.view(torch.int32), each, x.stride(0), BLOCK=block)
    return most


def halves() -> bool:
    """Whether operands of convolutions are stored in half precision."""
    return torch.backends.cudnn.allow_tf32


@dataclass(frozen=True)
class Frame:
    """Where an image lies in padded memory of that ``size``: ``before`` zeros above and to the left of it,
    and, with ``apart`` above 1, apart - 1 zeros between neighbours."""

    before: int
    size: tuple[int, int]
    apart: int = 1


@dataclass(frozen=True)
class Padded:
    """Framed images: ``values`` [L, B, PH, PW, CP], and each lane's ``largest`` absolute value [L]."""

    values: Tensor
    largest: Tensor

    @property
    def lane(self) -> int:
        """Elements from one lane to the next; 0 if all lanes have the same images."""
        return self.values.stride(0) if self.values.shape[0] > 1 else 0

    @property
    def each(self) -> int:
        """1, or 0 if all lanes have the same images."""
        return int(self.values.shape[0] > 1)


def pad(x: Tensor, frame: Frame) -> Padded:
    """Images ``[L, B, C, H, W]`` in their frame."""
    return _framed(x, None, frame)


def unpool(dy: Tensor, code: Tensor, frame: Frame) -> Padded:
    """The gradient of ReLU and pooling, ``[L, B, C, H, W]``, in its frame; dy and code are [L, B, C, H/2, W/2]."""
    code = code.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
    return _framed(dy, code, frame)


def _framed(x: Tensor, code: Tensor | None, frame: Frame) -> Padded:
    lanes, batch, channels, height, width = x.shape
    if code is not None:
        height, width = 2 * height, 2 * width
    wide = 4 if channels <= 4 else triton.cdiv(channels, 8) * 8  # so that loads are wide
    shape = (lanes, batch, *frame.size, wide)
    total = lanes * batch * frame.size[0] * frame.size[1] * wide
    flat = torch.empty(
        total + SLACK.value, dtype=torch.float16 if halves() else torch.float32, device=x.device
    )
    most = largest(x) if halves() else x.new_ones(lanes)
    block_c = triton.next_power_of_2(wide)
    pixels = max(1, 2048 // block_c)
    _frame[(triton.cdiv(frame.size[0] * frame.size[1], pixels), lanes * batch)](
        x, x if code is None else code, flat, most, lanes * batch, batch, *x.stride(), int(lanes > 1),
        C=channels, H=height, W=width, PH=frame.size[0], PW=frame.size[1], CP=wide,
        PAD=frame.before, APART=frame.apart, POOLED=code is not None, HALF=halves(),
        PIXELS=pixels, BLOCK_C=block_c,
    )  # fmt: skip
    return Padded(flat[:total].view(shape), most)
