"""What follows a normalisation in a network: a ReLU, or the end of a residual block, which adds something and
rectifies the sum."""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def followed(value, added, at, real, ADDS: tl.constexpr, RELU: tl.constexpr):
    """What is made of normalised values at some places."""
    if ADDS:
        value += tl.load(added + at, mask=real, other=0.0)
    if RELU:
        value = tl.where(value < 0, 0.0, value)  # what is no number stays so
    return value


@triton.jit
def followed_back(dy, n, w, b, y, at, real, ADDS: tl.constexpr, RELU: tl.constexpr):
    """dz, the gradient in normalised values n w + b at some places; with ADDS also that in what was added."""
    dz = dy
    if ADDS:
        dz = tl.where(tl.load(y + at, mask=real, other=0.0) > 0, dy, 0.0)
    elif RELU:
        dz = tl.where(n * w[None, :] + b[None, :] > 0, dy, 0.0)
    return dz


def channels_last(x: Tensor) -> Tensor:
    """``[L, B, H, W, C]`` from ``[L, B, C, H, W]``, without a copy where it lies so already."""
    return x.permute(0, 1, 3, 4, 2).contiguous()
