"""ReLU and 2x2 max-pooling in one pass, between convolutions whose images lie channels last."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _relu_pool(x, y, code, total, W, C, BLOCK: tl.constexpr):
    """y = max(0, the four values of a window); ``code`` says which of them won, 4 if none was above 0."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = at < total
    corner = at // (W // 2 * C) * (2 * W * C) + at // C % (W // 2) * (2 * C) + at % C
    best = tl.zeros((BLOCK,), tl.float32)
    won = tl.full((BLOCK,), 4, tl.int32)
    for place in tl.static_range(4):
        value = tl.load(x + corner + place // 2 * (W * C) + place % 2 * C, mask=real, other=0.0)
        won = tl.where((value > best) | (value != value), place, won)
        best = tl.maximum(value, best, propagate_nan=tl.PropagateNan.ALL)  # as torch does
    tl.store(y + at, best, mask=real)
    tl.store(code + at, won.to(tl.uint8), mask=real)


def forward(x: Tensor) -> tuple[Tensor, Tensor]:
    """Pooled values and the code of each, ``[N, C, H/2, W/2]``, from ``[N, C, H, W]`` with even H and W."""
    n, channels, height, width = x.shape
    x = x.contiguous(memory_format=torch.channels_last)
    y = torch.empty((n, height // 2, width // 2, channels), dtype=x.dtype, device=x.device)
    code = torch.empty(y.shape, dtype=torch.uint8, device=x.device)
    _relu_pool[(triton.cdiv(y.numel(), _BLOCK),)](x, y, code, y.numel(), width, channels, BLOCK=_BLOCK)
    return y.permute(0, 3, 1, 2), code.permute(0, 3, 1, 2)
