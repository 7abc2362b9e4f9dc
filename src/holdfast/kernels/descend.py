"""A step of gradient descent on one large tensor, spread over the whole GPU."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

LARGE = 1 << 14  # elements from which a launch of its own is repaid
_BLOCK = 2048


@triton.jit
def _descend(
    w, g, v, lr, total, momentum, weight_decay, HAS_MOMENTUM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """v <- momentum v + (g + weight_decay w);  w <- w - lr v."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = at < total
    weight = tl.load(w + at, mask=real)
    step = tl.load(g + at, mask=real) + weight_decay * weight
    if HAS_MOMENTUM:
        step += momentum * tl.load(v + at, mask=real)
        tl.store(v + at, step, mask=real)
    tl.store(w + at, weight - tl.load(lr) * step, mask=real)


def serves(w: Tensor, g: Tensor, v: Tensor | None) -> bool:
    """Whether a tensor is large enough, and its gradient and momentum lie as it does, in one piece."""
    alike = all(t.stride() == w.stride() for t in (g, v) if t is not None)
    reach = 1 + sum((n - 1) * apart for n, apart in zip(w.shape, w.stride(), strict=True))
    return w.numel() >= LARGE and alike and reach == w.numel()


def descend_(
    w: Tensor, g: Tensor, v: Tensor | None, lr: Tensor, momentum: float, weight_decay: float
) -> None:
    """The step, in place; ``lr`` is a float32 scalar on the device, without momentum there is no ``v``."""
    _descend[(triton.cdiv(w.numel(), _BLOCK),)](
        w, g, w if v is None else v, lr, w.numel(), momentum, weight_decay,
        HAS_MOMENTUM=v is not None, BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip
