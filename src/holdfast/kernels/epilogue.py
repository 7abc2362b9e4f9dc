"""The epilogue of a normalisation kernel: a ReLU, or the end of a residual block (add the shortcut, then ReLU)."""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def epilogue(value, residual, offsets, valid, HAS_RESIDUAL: tl.constexpr, RELU: tl.constexpr):
    """y at ``offsets``: the normalised ``value``, plus the residual with HAS_RESIDUAL, rectified with RELU."""
    if HAS_RESIDUAL:
        value += tl.load(residual + offsets, mask=valid, other=0.0)
    if RELU:
        value = tl.where(value < 0, 0.0, value)  # keeps NaN
    return value


@triton.jit
def epilogue_backward(dy, n, w, b, y, offsets, valid, HAS_RESIDUAL: tl.constexpr, RELU: tl.constexpr):
    """The gradient of the normalised values z = n w + b, and with HAS_RESIDUAL of the residual, which is the same."""
    dz = dy
    if HAS_RESIDUAL:
        dz = tl.where(tl.load(y + offsets, mask=valid, other=0.0) > 0, dy, 0.0)
    elif RELU:
        dz = tl.where(n * w[None, :] + b[None, :] > 0, dy, 0.0)
    return dz


def channels_last(x: Tensor) -> Tensor:
    """``[L, B, H, W, C]`` from ``[L, B, C, H, W]``; no copy if that is its order in memory already."""
    return x.permute(0, 1, 3, 4, 2).contiguous()
