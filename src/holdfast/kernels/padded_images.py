"""Images in zero-padded memory, channels last, as the convolutions read them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.kernels.amax import note_peaks, noted_peaks

_MOST_PARTS = (
    256  # of all lanes, of which each has its peak; a lane has this, or a quarter if there are several
)
SLACK = tl.constexpr(64)  # zeros behind the last image, for windows that are rounded up


@triton.jit
def scale_to_half(largest):
    """The power of two that brings ``largest`` to between 2^14 and 2^15."""
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) & 255
    return (tl.minimum(tl.maximum(268 - exponent, 1), 253) << 23).to(tl.float32, bitcast=True)


@triton.jit
def peak(value, real):
    """The largest of the ``real`` ones of some |values| [M, N], as bits: those of positive floats are ordered as the
    floats are."""
    return tl.max(tl.max(tl.where(real, value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0), 1), 0)


# The padding is no constant to the kernel: else sums are packed in pairs of 16 bits, which ptxas 12 gets wrong for
# Hopper where one of a pair is unused (github.com/triton-lang/triton/issues/11581).
@triton.jit(do_not_specialize=["before"])
def _frame(
    x, code, out, peaks, largest, images, per_lane, x_lane, x_b, x_c, x_h, x_w, parts, before,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, CP: tl.constexpr,
    APART: tl.constexpr, POOLED: tl.constexpr, HALF: tl.constexpr,
    PIXELS: tl.constexpr, BLOCK_C: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """out[image, before + APART h, before + APART w, c] = scale(lane) x[image, c, h, w], 0 elsewhere.

    largest[lane] is that of its ``peaks``, which has the scale.
    With POOLED, x is a gradient behind 2x2 pooling: (h, w) has the value of its window if ``code`` says that it won.
    """
    BLOCKS: tl.constexpr = (PH * PW + PIXELS - 1) // PIXELS  # of an image
    block = tl.program_id(0) % BLOCKS
    image = (tl.program_id(0) // BLOCKS).to(tl.int64)
    lane = image // per_lane
    pixel = block * PIXELS + tl.arange(0, PIXELS)
    c = tl.arange(0, BLOCK_C)
    h = pixel // PW - before
    w = pixel % PW - before
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
        part = tl.arange(0, PARTS)
        most = tl.max(tl.load(peaks + lane * parts + part, mask=part < parts, other=0), 0)
        most = most.to(tl.float32, bitcast=True)
        value = (value * scale_to_half(most)).to(tl.float16)
        if (image % per_lane == 0) & (block == 0):
            tl.store(largest + lane, most)
    out += image * (PH * PW * CP)
    tl.store(
        out + pixel[:, None] * CP + c[None, :], value, mask=(pixel < PH * PW)[:, None] & (c < CP)[None, :]
    )
    if (image == images - 1) & (block == 0):
        tail = tl.arange(0, SLACK)
        tl.store(out + PH * PW * CP + tail, tl.zeros((SLACK,), value.dtype))


@triton.jit
def _peaks(x, out, total, per_lane, blocks, BLOCK: tl.constexpr):
    """out[lane, part] = the largest |x| of a part, as bits: those of positive floats are ordered as the floats are."""
    part = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1).to(tl.int64)
    most = tl.zeros((BLOCK,), tl.int32)
    for block in range(blocks):
        at = (part * blocks + block) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(x + lane * per_lane + at, mask=at < total, other=0.0)
        most = tl.maximum(most, value.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    tl.store(out + lane * tl.num_programs(0) + part, tl.max(most, 0))


def peaks(x: Tensor) -> Tensor:
    """The bits of the largest absolute values of each lane's parts, ``[L, P]`` from ``[L, B, C, H, W]``."""
    noted = noted_peaks(x)
    if noted is not None:
        return noted
    if not (x.is_contiguous() or x.permute(0, 1, 3, 4, 2).is_contiguous()):
        return x.abs().amax((1, 2, 3, 4)).view(torch.int32)[:, None]
    each, block = x[0].numel(), 4096
    blocks = triton.cdiv(each, block * (_MOST_PARTS if len(x) == 1 else _MOST_PARTS // 4))
    found = torch.empty((len(x), triton.cdiv(each, blocks * block)), dtype=torch.int32, device=x.device)
    _peaks[found.T.shape](x, found, each, x.stride(0), blocks, BLOCK=block)
    note_peaks(x, found)  # for the other convolution of a residual's branches
    return found


def halves() -> bool:
    """Whether operands of convolutions are stored in half precision."""
    return torch.backends.cudnn.allow_tf32


@dataclass(frozen=True)
class PaddedLayout:
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


def pad(x: Tensor, frame: PaddedLayout) -> Padded:
    """Images ``[L, B, C, H, W]`` in their frame."""
    return _framed(x, None, frame)


def unpool(dy: Tensor, code: Tensor, frame: PaddedLayout) -> Padded:
    """The gradient of ReLU and pooling, ``[L, B, C, H, W]``, in its frame; dy and code are [L, B, C, H/2, W/2]."""
    code = code.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
    return _framed(dy, code, frame)


def _framed(x: Tensor, code: Tensor | None, frame: PaddedLayout) -> Padded:
    lanes, batch, channels, height, width = x.shape
    if code is not None:
        height, width = 2 * height, 2 * width
    high, across = frame.size
    wide = triton.cdiv(channels, 8) * 8  # so that loads are wide and aligned
    if channels <= 4:
        wide, across = 4, triton.cdiv(across, 4) * 4
    shape = (lanes, batch, high, across, wide)
    total = lanes * batch * high * across * wide
    flat = torch.empty(
        total + SLACK.value, dtype=torch.float16 if halves() else torch.float32, device=x.device
    )
    found = peaks(x) if halves() else x.new_empty((lanes, 1), dtype=torch.int32)  # full floats need no scale
    most = x.new_empty(lanes)
    block_c = triton.next_power_of_2(wide)
    pixels = max(1, 2048 // block_c)
    _frame[(triton.cdiv(high * across, pixels) * lanes * batch,)](
        x, x if code is None else code, flat, found, most, lanes * batch, batch, *x.stride(), found.shape[1],
        frame.before, C=channels, H=height, W=width, PH=high, PW=across, CP=wide,
        APART=frame.apart, POOLED=code is not None, HALF=halves(),
        PIXELS=pixels, BLOCK_C=block_c, PARTS=triton.next_power_of_2(found.shape[1]),
    )  # fmt: skip
    return Padded(flat[:total].view(shape), most)
