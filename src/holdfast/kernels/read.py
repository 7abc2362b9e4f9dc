"""Samples from where they are stored to a model's input in one pass: picked, cropped, flipped, normalised, cut out."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.data.preprocess import Preprocess


@triton.jit
def _mirrored(at, size):
    """As in `Preprocess`: |i| before the first pixel, last - |last - i| behind the last."""
    return size - 1 - tl.abs(size - 1 - tl.abs(at))


@triton.jit
def _read(
    x, y, ids, draws, scale, shift, out, labels, width, apart,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, BY_CHANNEL: tl.constexpr, DRAWN: tl.constexpr,
    CROP: tl.constexpr, REFLECT: tl.constexpr, HALF_CUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[n, c, h, w] = scale[c] x[id(n), c, h', w'] + shift[c], where (h', w') is what the draws made of it."""
    n = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    w = at % W
    h = at // W % H
    c = at // (W * H)
    row = h
    column = w
    if DRAWN:
        draws += n * 5
        row = h + tl.load(draws).to(tl.int32) - CROP
        flipped = tl.load(draws + 2).to(tl.int32)
        column = w + flipped * (W - 1 - 2 * w) + tl.load(draws + 1).to(tl.int32) - CROP
        if REFLECT:
            row = _mirrored(row, H)
            column = _mirrored(column, W)
    inside = (c < C) & (row >= 0) & (row < H) & (column >= 0) & (column < W)
    sample = tl.load(ids + n // width * apart + n % width)
    source = x + sample * (C * H * W)
    value = tl.load(source + (c * H + row) * W + column, mask=inside, other=0).to(tl.float32)
    channel = c * BY_CHANNEL
    value = value * tl.load(scale + channel, mask=c < C) + tl.load(shift + channel, mask=c < C)
    if HALF_CUT > 0:
        below = h - tl.load(draws + 3).to(tl.int32)
        right = w - tl.load(draws + 4).to(tl.int32)
        cut = (below >= -HALF_CUT) & (below < HALF_CUT) & (right >= -HALF_CUT) & (right < HALF_CUT)
        value = tl.where(cut, 0.0, value)
    tl.store(out + n * (C * H * W) + at, value, mask=c < C)
    if tl.program_id(0) == 0:
        tl.store(labels + n, tl.load(y + sample))


def read(
    x: Tensor, y: Tensor, ids: Tensor, draws: Tensor | None, preprocess: Preprocess
) -> tuple[Tensor, Tensor]:
    """``preprocess(x[ids], draws)`` in float32 and ``y[ids]``, for images ``[N, C, H, W]`` and ids ``[L, B]``."""
    _, channels, height, width = x.shape
    scale, shift = preprocess.constants(x, torch.float32)
    out, labels = torch.empty((*ids.shape, channels, height, width), device=x.device), y.new_empty(ids.shape)
    drawn, block = draws is not None, 1024
    _read[(triton.cdiv(channels * height * width, block), ids.numel())](
        x, y, ids, ids if draws is None else draws, scale, shift, out, labels, ids.shape[1], ids.stride(0),
        C=channels, H=height, W=width, BY_CHANNEL=int(scale.numel() > 1), DRAWN=drawn,
        CROP=preprocess.crop, REFLECT=preprocess.crop_mode == "reflect",
        HALF_CUT=preprocess.cutout // 2 if drawn else 0, BLOCK=block,
    )  # fmt: skip
    return out, labels
