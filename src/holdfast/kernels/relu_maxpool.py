"""ReLU and 2x2 max-pooling in one kernel, after a convolution with channels-last output."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.kernels.amax import record_amax
from holdfast.kernels.epilogue import channels_last

_BLOCK = 1024


@triton.jit
def _relu_maxpool(
    x, y, argmax, block_amax, lane_size,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, CHANNELS_FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y = max(0, the four values of a window); argmax = the position of the largest, or 4 if none is above 0.

    A lane has ``lane_size`` values of y. With CHANNELS_FIRST y is written as [B, C, H/2, W/2].
    """
    lane = tl.program_id(1).to(tl.int64)
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid = offsets < lane_size
    x += lane * 4 * lane_size
    corner = offsets // (W // 2 * C) * (2 * W * C) + offsets // C % (W // 2) * (2 * C) + offsets % C
    best = tl.zeros((BLOCK,), tl.float32)
    best_position = tl.full((BLOCK,), 4, tl.int32)
    for position in tl.static_range(4):
        value = tl.load(x + corner + position // 2 * (W * C) + position % 2 * C, mask=valid, other=0.0)
        best_position = tl.where((value > best) | (value != value), position, best_position)
        best = tl.maximum(value, best, propagate_nan=tl.PropagateNan.ALL)  # as PyTorch does
    tl.store(argmax + lane * lane_size + offsets, best_position.to(tl.uint8), mask=valid)
    amax = tl.max(best.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
    tl.store(block_amax + lane * tl.num_programs(0) + tl.program_id(0), amax)
    if CHANNELS_FIRST:
        PIXELS: tl.constexpr = H // 2 * (W // 2)
        offsets = offsets // (PIXELS * C) * (PIXELS * C) + offsets % C * PIXELS + offsets // C % PIXELS
    tl.store(y + lane * lane_size + offsets, best, mask=valid)


def forward(x: Tensor, channels_first: bool = False) -> tuple[Tensor, Tensor]:
    """Pooled values and the argmax of their windows, ``[L, B, C, H/2, W/2]``, from ``[L, B, C, H, W]``, H and W even.

    All are channels last in memory, except the pooled values with ``channels_first``.
    """
    lanes, batch, channels, height, width = x.shape
    x = channels_last(x)
    shape = (lanes, batch, height // 2, width // 2, channels)
    y, argmax = torch.empty(shape, device=x.device), torch.empty(shape, dtype=torch.uint8, device=x.device)
    blocks = triton.cdiv(y[0].numel(), _BLOCK)
    block_amax = torch.empty((lanes, blocks), dtype=torch.int32, device=x.device)
    _relu_maxpool[(blocks, lanes)](
        x, y, argmax, block_amax, y[0].numel(),
        H=height, W=width, C=channels, CHANNELS_FIRST=channels_first, BLOCK=_BLOCK,
    )  # fmt: skip
    if channels_first:
        y = y.view(lanes, batch, channels, height // 2, width // 2)
    else:
        y = y.permute(0, 1, 4, 2, 3)
        record_amax(y, block_amax)
    return y, argmax.permute(0, 1, 4, 2, 3)
