"""A step of gradient descent on all lanes' parameters at once, spread over the whole GPU."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, cycle

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048
_TOGETHER = 16  # tensors that a launch takes
_TAKES_TUPLES = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 3)


@triton.jit
def _descend(
    ws, gs, vs, lr, lr_lane, momentum, weight_decay,
    SIZES: tl.constexpr, FIRSTS: tl.constexpr, RATED: tl.constexpr, HAS_MOMENTUM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """v <- momentum v + (g + weight_decay w);  w <- w - lr v.  Tensor i of a lane has the programs from FIRSTS[i].

    With RATED each tensor of each lane has its own lr, and rests where that is 0.
    """
    program = tl.program_id(0)
    lane = tl.program_id(1).to(tl.int64)
    for i in tl.static_range(len(SIZES)):
        if (program >= FIRSTS[i]) & (program < FIRSTS[i + 1]):
            at = (program - FIRSTS[i]) * BLOCK + tl.arange(0, BLOCK)
            rate = tl.load(lr + lane * lr_lane + (i if RATED else 0))
            size = SIZES[i]
            if RATED:
                size = tl.where(rate == 0, 0, size)
            real = at < size
            at += lane * SIZES[i]
            weight = tl.load(ws[i] + at, mask=real)
            step = tl.load(gs[i] + at, mask=real) + weight_decay * weight
            if HAS_MOMENTUM:
                step += momentum * tl.load(vs[i] + at, mask=real)
                tl.store(vs[i] + at, step, mask=real)
            tl.store(ws[i] + at, weight - rate * step, mask=real)


def serves(ws: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether parameters lie lane after lane without gaps, and each gradient and momentum as its parameter does."""
    return _TAKES_TUPLES and all(
        other.stride() == w.stride() and _in_one_piece(w) for w, other in zip(cycle(ws), others, strict=False)
    )


def _in_one_piece(w: Tensor) -> bool:
    reach = 1 + sum((n - 1) * apart for n, apart in zip(w.shape, w.stride(), strict=True))
    return reach == w.numel() and (len(w) == 1 or w.stride(0) == w[0].numel())


def descend_(
    ws: Sequence[Tensor], gs: Sequence[Tensor], vs: Sequence[Tensor], lr: Tensor, momentum: float, weight_decay: float
) -> None:  # fmt: skip
    """The step, in place, for tensors ``[L, ...]``; ``vs`` may be empty.

    ``lr`` lies on the device in float32: a scalar, or ``[L, tensors]``, where at rate 0 momentum rests too.
    """
    rated = lr.dim() > 0
    for first in range(0, len(ws), _TOGETHER):
        w, g, v = (tuple(tensors[first : first + _TOGETHER]) for tensors in (ws, gs, vs))
        sizes = tuple(tensor[0].numel() for tensor in w)
        firsts = tuple(accumulate((triton.cdiv(size, _BLOCK) for size in sizes), initial=0))
        _descend[(firsts[-1], len(w[0]))](
            w, g, v or w, lr[:, first:] if rated else lr, lr.stride(0) if rated else 0, momentum, weight_decay,
            SIZES=sizes, FIRSTS=firsts, RATED=rated, HAS_MOMENTUM=bool(v), BLOCK=_BLOCK, num_warps=8,
        )  # fmt: skip
