"""A step of gradient descent on all lanes' parameters at once, spread over the whole GPU."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, cycle

import triton
import triton.language as tl
from torch import Tensor

from holdfast.kernels.conv import WEIGHT_SCALE

_BLOCK = 2048
_TOGETHER = 16  # tensors that a launch takes
_TAKES_TUPLES = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 3)


@triton.jit
def _descend(
    ws, gs, vs, ss, hs, lr, lr_lane, momentum, weight_decay, pull,
    SIZES: tl.constexpr, FIRSTS: tl.constexpr, WITHIN: tl.constexpr, RUNS: tl.constexpr, LENGTHS: tl.constexpr,
    APART: tl.constexpr, BEGIN: tl.constexpr, FILTERS: tl.constexpr, RATED: tl.constexpr, HAS_MOMENTUM: tl.constexpr,
    PULLED: tl.constexpr, HALVED: tl.constexpr, WEIGHT_SCALE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """v <- momentum v + (g + pull (w - s) + weight_decay w);  w <- w - lr v.  All lanes have the same s.

    Tensor i of a lane has the programs from FIRSTS[i]. With RATED each tensor of each lane has its own lr, and rests
    where that is 0. A tensor has WITHIN[i] values beside those that always rest; of each of its filters they lie in
    RUNS[i] runs. With HALVED[i] their halves are written to hs[i], one after another.
    """
    program = tl.program_id(0)
    lane = tl.program_id(1).to(tl.int64)
    for i in tl.static_range(len(SIZES)):
        if (program >= FIRSTS[i]) & (program < FIRSTS[i + 1]):
            at = (program - FIRSTS[i]) * BLOCK + tl.arange(0, BLOCK)
            rate = tl.load(lr + lane * lr_lane + (i if RATED else 0))
            size = WITHIN[i]
            if RATED:
                size = tl.where(rate == 0, 0, size)
            real = at < size
            half = hs[i] + lane * WITHIN[i] + at
            if WITHIN[i] < SIZES[i]:
                run = at // LENGTHS[i]
                at = run // RUNS[i] * FILTERS[i] + BEGIN[i] + run % RUNS[i] * APART[i] + at % LENGTHS[i]
            shared = at
            at += lane * SIZES[i]
            weight = tl.load(ws[i] + at, mask=real)
            step = tl.load(gs[i] + at, mask=real)
            if PULLED:
                step += pull * (weight - tl.load(ss[i] + shared, mask=real))
            step += weight_decay * weight
            if HAS_MOMENTUM:
                step += momentum * tl.load(vs[i] + at, mask=real)
                tl.store(vs[i] + at, step, mask=real)
            weight -= rate * step
            tl.store(ws[i] + at, weight, mask=real)
            if HALVED[i]:
                tl.store(half, (weight * WEIGHT_SCALE).to(tl.float16), mask=real)


def serves(ws: Sequence[Tensor], others: Sequence[Tensor], sent: Sequence[Tensor] = ()) -> bool:
    """Whether parameters lie lane after lane without gaps, and each gradient and momentum as its parameter does, and
    what was ``sent`` as a lane of it."""
    return (
        _TAKES_TUPLES
        and all(
            o.stride() == w.stride() and _in_one_piece(w) for w, o in zip(cycle(ws), others, strict=False)
        )
        and all(s.stride() == w.stride()[1:] for w, s in zip(ws, sent, strict=False))
    )


def _in_one_piece(w: Tensor) -> bool:
    reach = 1 + sum((n - 1) * apart for n, apart in zip(w.shape, w.stride(), strict=True))
    return reach == w.numel() and (len(w) == 1 or w.stride(0) == w[0].numel())


def descend_(
    ws: Sequence[Tensor], gs: Sequence[Tensor], vs: Sequence[Tensor], lr: Tensor, momentum: float, weight_decay: float,
    taps: Sequence[range | None], halves: Sequence[Tensor | None], pull: float = 0.0, sent: Sequence[Tensor] = (),
) -> None:  # fmt: skip
    """The step, in place, for tensors ``[L, ...]``; ``vs`` may be empty, and ``sent`` [...] without a ``pull``.

    ``lr`` lies on the device in float32: a scalar, or ``[L, tensors]``, where at rate 0 momentum rests too. Of filters
    that have ``taps``, all but those rows and columns rests. What descends of a tensor that has ``halves`` is written
    there too, as `holdfast.kernels.conv.halve_` does.
    """
    rated = lr.dim() > 0
    for first in range(0, len(ws), _TOGETHER):
        w, g, v, s = (tuple(tensors[first : first + _TOGETHER]) for tensors in (ws, gs, vs, sent))
        sizes = tuple(tensor[0].numel() for tensor in w)
        parts = [_part(*both) for both in zip(w, taps[first : first + _TOGETHER], strict=True)]
        within, runs, lengths, apart, begin, filters = zip(*parts, strict=True)
        half = halves[first : first + _TOGETHER]
        firsts = tuple(accumulate((triton.cdiv(size, _BLOCK) for size in within), initial=0))
        _descend[(firsts[-1], len(w[0]))](
            w, g, v or w, s or w, tuple(w if h is None else h for w, h in zip(w, half, strict=True)),
            lr[:, first:] if rated else lr, lr.stride(0) if rated else 0, momentum, weight_decay, pull,
            SIZES=sizes, FIRSTS=firsts, WITHIN=within, RUNS=runs, LENGTHS=lengths, APART=apart, BEGIN=begin,
            FILTERS=filters, RATED=rated, HAS_MOMENTUM=bool(v), PULLED=pull != 0,
            HALVED=tuple(h is not None for h in half), WEIGHT_SCALE=WEIGHT_SCALE, BLOCK=_BLOCK, num_warps=8,
        )  # fmt: skip


def _part(w: Tensor, taps: range | None) -> tuple[int, int, int, int, int, int]:
    """What descends of a lane of ``w``, channels last if it has ``taps``: how many values; of each filter how many
    runs, how long, how far apart, and where the first begins; and how many values a filter has."""
    if taps is None:
        return w[0].numel(), 1, 1, 1, 0, 1
    _, outputs, channels, height, width = w.shape
    row, run = width * channels, len(taps) * channels
    return outputs * len(taps) * run, len(taps), run, row, taps.start * (row + channels), height * row
