"""ReLU and 2x2 max-pooling in one pass, behind convolutions whose images lie channels last."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.kernels.amax import note_peaks
from holdfast.kernels.epilogue import channels_last

_BLOCK = 1024


@triton.jit
def _relu_pool(
    x, y, code, peaks, each,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, FLAT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y = max(0, the four values of a window); ``code`` says which of them won, 4 if none was above 0.

    A lane has ``each`` values of y. With FLAT an image's channels come first in y.
    """
    lane = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = at < each
    x += lane * 4 * each
    corner = at // (W // 2 * C) * (2 * W * C) + at // C % (W // 2) * (2 * C) + at % C
    best = tl.zeros((BLOCK,), tl.float32)
    won = tl.full((BLOCK,), 4, tl.int32)
    for place in tl.static_range(4):
        value = tl.load(x + corner + place // 2 * (W * C) + place % 2 * C, mask=real, other=0.0)
        won = tl.where((value > best) | (value != value), place, won)
        best = tl.maximum(value, best, propagate_nan=tl.PropagateNan.ALL)  # as torch does
    tl.store(code + lane * each + at, won.to(tl.uint8), mask=real)
    most = tl.max(best.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
    tl.store(peaks + lane * tl.num_programs(0) + tl.program_id(0), most)
    if FLAT:
        PIXELS: tl.constexpr = H // 2 * (W // 2)
        at = at // (PIXELS * C) * (PIXELS * C) + at % C * PIXELS + at // C % PIXELS
    tl.store(y + lane * each + at, best, mask=real)


def forward(x: Tensor, flat: bool = False) -> tuple[Tensor, Tensor]:
    """Pooled values and the code of each, ``[L, B, C, H/2, W/2]``, from ``[L, B, C, H, W]`` with even H and W.

    All lie channels last, but for pooled values that are to be made ``flat``.
    """
    lanes, batch, channels, height, width = x.shape
    x = channels_last(x)
    after = (lanes, batch, height // 2, width // 2, channels)
    y, code = torch.empty(after, device=x.device), torch.empty(after, dtype=torch.uint8, device=x.device)
    parts = triton.cdiv(y[0].numel(), _BLOCK)
    peaks = torch.empty((lanes, parts), dtype=torch.int32, device=x.device)
    _relu_pool[(parts, lanes)](
        x, y, code, peaks, y[0].numel(), H=height, W=width, C=channels, FLAT=flat, BLOCK=_BLOCK
    )
    if flat:
        y = y.view(lanes, batch, channels, height // 2, width // 2)
    else:
        y = y.permute(0, 1, 4, 2, 3)
        note_peaks(y, peaks)
    return y, code.permute(0, 1, 4, 2, 3)
