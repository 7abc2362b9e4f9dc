"""One kernel that loads a step's samples: gathers, crops, flips, normalises and cuts out."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.data.preprocess import Preprocess
from holdfast.kernels.amax import record_amax_bound


@triton.jit
def _reflect(index, size):
    """As in `Preprocess`: |i| before the first pixel, last - |last - i| after the last."""
    return size - 1 - tl.abs(size - 1 - tl.abs(index))


@triton.jit
def _load_batch(
    x, y, cursor, indices, mask, draws, scale, shift, out, labels, rows, epoch, key, out_mask, width, lanes,
    MASKED: tl.constexpr,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, BY_CHANNEL: tl.constexpr, AUGMENT: tl.constexpr,
    CROP: tl.constexpr, REFLECT: tl.constexpr, HALF_CUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[n, c, h, w] = scale[c] x[id(n), c, h', w'] + shift[c], where crop and flip map (h', w') to (h, w)."""
    BLOCKS: tl.constexpr = (C * H * W + BLOCK - 1) // BLOCK  # of an image
    block = tl.program_id(0) % BLOCKS
    n = (tl.program_id(0) // BLOCKS).to(tl.int64)
    batch = tl.load(cursor) * lanes + n // width  # the number of this step's batch of the sample's lane
    indices += batch * (2 * width + 2)
    offsets = block * BLOCK + tl.arange(0, BLOCK)
    w = offsets % W
    h = offsets // W % H
    c = offsets // (W * H)
    row = h
    column = w
    if AUGMENT:
        draws += (batch * width + n % width) * 5
        row = h + tl.load(draws).to(tl.int32) - CROP
        flipped = tl.load(draws + 2).to(tl.int32)
        column = w + flipped * (W - 1 - 2 * w) + tl.load(draws + 1).to(tl.int32) - CROP
        if REFLECT:
            row = _reflect(row, H)
            column = _reflect(column, W)
    inside = (c < C) & (row >= 0) & (row < H) & (column >= 0) & (column < W)
    sample = tl.load(indices + n % width)
    source = x + sample * (C * H * W)
    value = tl.load(source + (c * H + row) * W + column, mask=inside, other=0).to(tl.float32)
    channel = c * BY_CHANNEL
    value = value * tl.load(scale + channel, mask=c < C) + tl.load(shift + channel, mask=c < C)
    if HALF_CUT > 0:
        below = h - tl.load(draws + 3).to(tl.int32)
        right = w - tl.load(draws + 4).to(tl.int32)
        cut = (below >= -HALF_CUT) & (below < HALF_CUT) & (right >= -HALF_CUT) & (right < HALF_CUT)
        value = tl.where(cut, 0.0, value)
    tl.store(out + n * (C * H * W) + offsets, value, mask=c < C)
    if block == 0:
        tl.store(labels + n, tl.load(y + sample))
        tl.store(rows + n, tl.load(indices + width + n % width))
        if MASKED:
            tl.store(out_mask + n, tl.load(mask + batch * width + n % width))
        if n % width == 0:
            tl.store(epoch + n // width, tl.load(indices + 2 * width))
            tl.store(key + n // width, tl.load(indices + 2 * width + 1))


def load_batch(
    x: Tensor, y: Tensor, cursor: Tensor, indices: Tensor, mask: Tensor | None, draws: Tensor | None,
    lanes: int, preprocess: Preprocess,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The preprocessed samples ``[n, B, C, H, W]``, their labels, table rows and mask ``[n, B]``, and the epochs and
    dropout keys ``[n]`` of step ``cursor`` [1], for the first n = ``lanes`` lanes.

    ``indices``, ``mask`` and ``draws`` are the arrays of a `RoundSchedule`; the mask is ``[n, 0]`` if there is none.
    """
    _, channels, height, width = x.shape
    batch = indices.shape[2] // 2 - 1
    scale, shift = preprocess.constants(x, torch.float32)
    out = torch.empty((lanes, batch, channels, height, width), device=x.device)
    labels, rows = y.new_empty((lanes, batch)), indices.new_empty((lanes, batch))
    epoch, key = indices.new_empty(lanes), indices.new_empty(lanes)
    out_mask = out.new_empty((lanes, 0 if mask is None else batch))
    block = 1024
    _load_batch[(triton.cdiv(channels * height * width, block) * lanes * batch,)](
        x, y, cursor, indices, indices if mask is None else mask, indices if draws is None else draws,
        scale, shift, out, labels, rows, epoch, key, out_mask, batch, indices.shape[1],
        MASKED=mask is not None, C=channels, H=height, W=width, BY_CHANNEL=int(scale.numel() > 1),
        AUGMENT=draws is not None, CROP=preprocess.crop, REFLECT=preprocess.crop_mode == "reflect",
        HALF_CUT=0 if draws is None else preprocess.cutout // 2, BLOCK=block,
    )  # fmt: skip
    if x.dtype == torch.uint8:
        record_amax_bound(out, preprocess.largest())
    return out, labels, rows, out_mask, epoch, key
