"""One SGD step of all lanes' parameters, in as few kernel launches as possible."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, cycle

import triton
import triton.language as tl
from torch import Tensor

from holdfast.kernels.conv import WEIGHT_SCALE

_BLOCK = 2048
_TENSORS_PER_LAUNCH = 16
_TAKES_TUPLES = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 3)


@triton.jit
def _sgd_step(
    ws, gs, vs, ss, hs, lr, lr_lane, momentum, weight_decay, proximal_mu,
    SIZES: tl.constexpr, FIRST_PROGRAMS: tl.constexpr, USED: tl.constexpr, RUNS: tl.constexpr,
    RUN_LENGTHS: tl.constexpr, RUN_STRIDES: tl.constexpr, RUN_STARTS: tl.constexpr, FILTER_SIZES: tl.constexpr,
    LR_PER_TENSOR: tl.constexpr, HAS_MOMENTUM: tl.constexpr, PROXIMAL: tl.constexpr, FP16_COPIES: tl.constexpr,
    WEIGHT_SCALE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """v <- momentum v + (g + proximal_mu (w - s) + weight_decay w);  w <- w - lr v.  All lanes share s.

    Tensor i of a lane is updated by the programs from FIRST_PROGRAMS[i]. With LR_PER_TENSOR each tensor of each lane
    has its own lr; if it is 0, the tensor is skipped with its momentum. Of the SIZES[i] values of a tensor only USED[i]
    are updated: RUNS[i] runs of each filter, as `_used_runs` describes them. With FP16_COPIES[i] the updated values
    are also written to hs[i], without gaps.
    """
    program = tl.program_id(0)
    lane = tl.program_id(1).to(tl.int64)
    for i in tl.static_range(len(SIZES)):
        if (program >= FIRST_PROGRAMS[i]) & (program < FIRST_PROGRAMS[i + 1]):
            offsets = (program - FIRST_PROGRAMS[i]) * BLOCK + tl.arange(0, BLOCK)
            rate = tl.load(lr + lane * lr_lane + (i if LR_PER_TENSOR else 0))
            size = USED[i]
            if LR_PER_TENSOR:
                size = tl.where(rate == 0, 0, size)
            valid = offsets < size
            fp16_copy = hs[i] + lane * USED[i] + offsets
            if USED[i] < SIZES[i]:
                run = offsets // RUN_LENGTHS[i]
                offsets = (
                    run // RUNS[i] * FILTER_SIZES[i]
                    + RUN_STARTS[i]
                    + run % RUNS[i] * RUN_STRIDES[i]
                    + offsets % RUN_LENGTHS[i]
                )
            lane_offsets = offsets
            offsets += lane * SIZES[i]
            weight = tl.load(ws[i] + offsets, mask=valid)
            step = tl.load(gs[i] + offsets, mask=valid)
            if PROXIMAL:
                step += proximal_mu * (weight - tl.load(ss[i] + lane_offsets, mask=valid))
            step += weight_decay * weight
            if HAS_MOMENTUM:
                step += momentum * tl.load(vs[i] + offsets, mask=valid)
                tl.store(vs[i] + offsets, step, mask=valid)
            weight -= rate * step
            tl.store(ws[i] + offsets, weight, mask=valid)
            if FP16_COPIES[i]:
                tl.store(fp16_copy, (weight * WEIGHT_SCALE).to(tl.float16), mask=valid)


def supported(ws: Sequence[Tensor], others: Sequence[Tensor], global_params: Sequence[Tensor] = ()) -> bool:
    """Whether the kernel can update these parameters ``ws`` [L, ...].

    Each must be dense, with one lane after another. The ``others`` are the gradients and momenta of all parameters in
    turn; they must have the strides of their parameters. ``global_params`` must have the strides of one lane.
    """
    return (
        _TAKES_TUPLES
        and all(
            other.stride() == w.stride() and _is_dense(w) for w, other in zip(cycle(ws), others, strict=False)
        )
        and all(s.stride() == w.stride()[1:] for w, s in zip(ws, global_params, strict=False))
    )


def _is_dense(w: Tensor) -> bool:
    extent = 1 + sum((n - 1) * stride for n, stride in zip(w.shape, w.stride(), strict=True))
    return extent == w.numel() and (len(w) == 1 or w.stride(0) == w[0].numel())


def sgd_step_(
    ws: Sequence[Tensor], gs: Sequence[Tensor], vs: Sequence[Tensor], lr: Tensor, momentum: float, weight_decay: float,
    taps: Sequence[range | None], fp16_copies: Sequence[Tensor | None], proximal_mu: float = 0.0,
    global_params: Sequence[Tensor] = (),
) -> None:  # fmt: skip
    """Update parameters ``ws`` [L, ...] and momenta ``vs`` in place, with gradients ``gs``.

    ``vs`` may be empty without momentum, and ``global_params`` [...] without ``proximal_mu``. ``lr`` is float32 on the
    device: a scalar, or ``[L, tensors]``, where a tensor with rate 0 is skipped with its momentum. Of filters with
    ``taps`` only those rows and columns are updated. The updated values of a tensor with an fp16 copy are also written
    there, as `holdfast.kernels.conv.copy_to_fp16_` does.
    """
    per_tensor = lr.dim() > 0
    for first in range(0, len(ws), _TENSORS_PER_LAUNCH):
        last = first + _TENSORS_PER_LAUNCH
        w, g, v, s = (tuple(tensors[first:last]) for tensors in (ws, gs, vs, global_params))
        sizes = tuple(tensor[0].numel() for tensor in w)
        used_runs = [_used_runs(*pair) for pair in zip(w, taps[first:last], strict=True)]
        used, runs, lengths, strides, starts, filter_sizes = zip(*used_runs, strict=True)
        copies = fp16_copies[first:last]
        first_programs = tuple(accumulate((triton.cdiv(size, _BLOCK) for size in used), initial=0))
        _sgd_step[(first_programs[-1], len(w[0]))](
            w, g, v or w, s or w, tuple(w if h is None else h for w, h in zip(w, copies, strict=True)),
            lr[:, first:] if per_tensor else lr, lr.stride(0) if per_tensor else 0, momentum, weight_decay, proximal_mu,
            SIZES=sizes, FIRST_PROGRAMS=first_programs, USED=used, RUNS=runs, RUN_LENGTHS=lengths,
            RUN_STRIDES=strides, RUN_STARTS=starts, FILTER_SIZES=filter_sizes, LR_PER_TENSOR=per_tensor,
            HAS_MOMENTUM=bool(v), PROXIMAL=proximal_mu != 0, FP16_COPIES=tuple(h is not None for h in copies),
            WEIGHT_SCALE=WEIGHT_SCALE, BLOCK=_BLOCK, num_warps=8,
        )  # fmt: skip


def _used_runs(w: Tensor, taps: range | None) -> tuple[int, int, int, int, int, int]:
    """The values of a lane of ``w`` to be updated, as runs of consecutive values; channels last if there are ``taps``.

    Returns the number of values, then for each filter the number of runs, their length and stride and the start of
    the first, and the size of a filter.
    """
    if taps is None:
        return w[0].numel(), 1, 1, 1, 0, 1
    _, outputs, channels, height, width = w.shape
    row, length = width * channels, len(taps) * channels
    return outputs * len(taps) * length, len(taps), length, row, taps.start * (row + channels), height * row
