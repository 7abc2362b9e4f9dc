"""What is counted after every step: each lane's loss, and the step itself."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _count(total, loss, cursor, lanes, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    real = lane < lanes
    tl.store(total + lane, tl.load(total + lane, mask=real) + tl.load(loss + lane, mask=real), mask=real)
    tl.store(cursor, tl.load(cursor) + 1)


def count_(total: Tensor, loss: Tensor, cursor: Tensor) -> None:
    """Add ``loss`` ``[n]`` to the first n of ``total``, and 1 to ``cursor`` ``[1]``."""
    lanes = len(loss)
    _count[(1,)](total, loss.contiguous(), cursor, lanes, BLOCK=triton.next_power_of_2(lanes))
