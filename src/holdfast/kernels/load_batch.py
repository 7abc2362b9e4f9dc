"""A step's samples from where they are stored to a model's input in one pass: picked, cropped, flipped, normalised,
cut out."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.data.preprocess import Preprocess
from holdfast.kernels.amax import note_bound


@triton.jit
def _mirrored(at, size):
    """As in `Preprocess`: |i| before the first pixel, last - |last - i| behind the last."""
    return size - 1 - tl.abs(size - 1 - tl.abs(at))


@triton.jit
def _read(
    x, y, cursor, places, mask, draws, scale, shift, out, labels, rows, epoch, key, real, width, lanes,
    MASKED: tl.constexpr,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, BY_CHANNEL: tl.constexpr, DRAWN: tl.constexpr,
    CROP: tl.constexpr, REFLECT: tl.constexpr, HALF_CUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[n, c, h, w] = scale[c] x[id(n), c, h', w'] + shift[c], where (h', w') is what the draws made of it."""
    BLOCKS: tl.constexpr = (C * H * W + BLOCK - 1) // BLOCK  # of an image
    block = tl.program_id(0) % BLOCKS
    n = (tl.program_id(0) // BLOCKS).to(tl.int64)
    place = tl.load(cursor) * lanes + n // width  # of the sample's lane in this step
    places += place * (2 * width + 2)
    at = block * BLOCK + tl.arange(0, BLOCK)
    w = at % W
    h = at // W % H
    c = at // (W * H)
    row = h
    column = w
    if DRAWN:
        draws += (place * width + n % width) * 5
        row = h + tl.load(draws).to(tl.int32) - CROP
        flipped = tl.load(draws + 2).to(tl.int32)
        column = w + flipped * (W - 1 - 2 * w) + tl.load(draws + 1).to(tl.int32) - CROP
        if REFLECT:
            row = _mirrored(row, H)
            column = _mirrored(column, W)
    inside = (c < C) & (row >= 0) & (row < H) & (column >= 0) & (column < W)
    sample = tl.load(places + n % width)
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
    if block == 0:
        tl.store(labels + n, tl.load(y + sample))
        tl.store(rows + n, tl.load(places + width + n % width))
        if MASKED:
            tl.store(real + n, tl.load(mask + place * width + n % width))
        if n % width == 0:
            tl.store(epoch + n // width, tl.load(places + 2 * width))
            tl.store(key + n // width, tl.load(places + 2 * width + 1))


def read(
    x: Tensor, y: Tensor, cursor: Tensor, places: Tensor, mask: Tensor | None, draws: Tensor | None,
    lanes: int, preprocess: Preprocess,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Samples ``[n, B, C, H, W]`` as preprocessing makes them and labels, rows of tables and mask ``[n, B]``, epoch
    and dropout key ``[n]``: of the first ``lanes`` lanes in step ``cursor`` ``[1]`` of a `Layout`'s arrays."""
    _, channels, height, width = x.shape
    batch = places.shape[2] // 2 - 1
    scale, shift = preprocess.constants(x, torch.float32)
    out = torch.empty((lanes, batch, channels, height, width), device=x.device)
    labels, rows = y.new_empty((lanes, batch)), places.new_empty((lanes, batch))
    epoch, key = places.new_empty(lanes), places.new_empty(lanes)
    real = out.new_empty((lanes, 0 if mask is None else batch))
    block = 1024
    _read[(triton.cdiv(channels * height * width, block) * lanes * batch,)](
        x, y, cursor, places, places if mask is None else mask, places if draws is None else draws,
        scale, shift, out, labels, rows, epoch, key, real, batch, places.shape[1],
        MASKED=mask is not None, C=channels, H=height, W=width, BY_CHANNEL=int(scale.numel() > 1),
        DRAWN=draws is not None, CROP=preprocess.crop, REFLECT=preprocess.crop_mode == "reflect",
        HALF_CUT=0 if draws is None else preprocess.cutout // 2, BLOCK=block,
    )  # fmt: skip
    if x.dtype == torch.uint8:
        note_bound(out, preprocess.largest())
    return out, labels, rows, real, epoch, key
