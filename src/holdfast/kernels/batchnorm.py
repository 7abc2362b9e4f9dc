"""Batch normalisation and what follows it in a network, over images that lie channels last, and their gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import Function

from holdfast.kernels.amax import note_peaks
from holdfast.kernels.autograd import Gradient, apply, as_lane, in_lanes
from holdfast.kernels.batchnorm_kernels import (
    moments,
    normalise,
    normalise_back,
    normalise_whole,
    normalise_whole_back,
    sums_back,
)
from holdfast.kernels.epilogue import channels_last

_BLOCK = 4096  # values held at a time
_SPLITS = 32  # of a lane's rows, at most
_WHOLE = 8192  # values held at a time by a program that has all rows, at most
_SECTOR = 8  # neighbouring values are read together, so it has as many channels at least
_LINE = 32  # and at most these, so that there are many such programs


@dataclass(frozen=True)
class _Shape:
    """How a lane's rows are divided among programs, for images ``[L, B, H, W, C]``."""

    lanes: int
    batch: int
    pixels: int
    channels: int
    splits: int
    per_split: int
    columns: int
    rows: int

    @staticmethod
    def of(x: Tensor) -> _Shape:
        lanes, batch, height, width, channels = x.shape
        columns, all_rows = min(64, triton.next_power_of_2(channels)), batch * height * width
        rows = triton.next_power_of_2(all_rows)
        if rows * min(columns, _SECTOR) <= _WHOLE:
            columns = min(columns, _LINE, _WHOLE // rows)
            return _Shape(lanes, batch, height * width, channels, 1, rows, columns, rows)
        rows = _BLOCK // columns
        blocks = triton.cdiv(triton.cdiv(all_rows, rows), _SPLITS)  # of rows in a split
        splits = triton.cdiv(all_rows, blocks * rows)
        return _Shape(lanes, batch, height * width, channels, splits, blocks * rows, columns, rows)

    @property
    def grid(self) -> tuple[int, int, int]:
        return self.splits, triton.cdiv(self.channels, self.columns), self.lanes

    @property
    def whole(self) -> bool:
        """Whether a program holds all rows of its channels."""
        return self.splits == 1

    def peaks(self, x: Tensor) -> Tensor:
        """Room for the peaks of what each program writes, by lane."""
        return x.new_empty((self.lanes, self.grid[0] * self.grid[1]), dtype=torch.int32)

    @property
    def tile(self) -> dict[str, int]:
        warps = 8 if self.columns * self.rows > _BLOCK else 4
        return {"C": self.channels, "BLOCK_C": self.columns, "ROWS": self.rows, "num_warps": warps}

    @property
    def sums(self) -> dict[str, int]:
        return {"BATCH": triton.next_power_of_2(self.batch), "SPLITS": triton.next_power_of_2(self.splits)}


def _forward(
    x: Tensor, w: Tensor, b: Tensor, added: Tensor | None, old: tuple[Tensor | None, ...], mask: Tensor | None,
    eps: float, momentum: float, relu: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Output, mean and scale of the batch, and the running mean and variance after it and the count of batches
    (to be ignored, if none were given): all with lanes first. ``mask`` [L, B] has 0 for padding, None without any."""
    x, w, b = channels_last(x), w.contiguous(), b.contiguous()
    s, y = _Shape.of(x), torch.empty_like(x)
    mean, scale, new_mean, new_var = x.new_empty((4, s.lanes, s.channels)).unbind()
    weights = x if mask is None else mask.contiguous()
    count = torch.empty(s.lanes, dtype=torch.int64, device=x.device)
    tracks = all(t is not None for t in old)
    was = [t.contiguous() if t is not None else mean for t in old]
    given = (w, b, x if added is None else channels_last(added), *was)
    peaks = s.peaks(x)
    found = (y, peaks, mean, scale, new_mean, new_var, count)
    flags = {"TRACKS": tracks, "ADDS": added is not None, "RELU": relu}
    if s.whole:
        normalise_whole[s.grid](
            x, weights, *given, *found, s.batch, s.pixels, eps, momentum,
            MASKED=mask is not None, **flags, **s.tile,
        )  # fmt: skip
    else:
        parts = x.new_empty((s.splits, s.lanes, 2, s.channels))
        moments[s.grid](
            x, weights, parts, s.batch, s.pixels, s.per_split, s.lanes, MASKED=mask is not None, **s.tile
        )
        normalise[s.grid](
            x, weights, *given, parts, *found, s.batch, s.pixels, s.per_split, s.splits, s.lanes, eps, momentum,
            MASKED=mask is not None, **flags, **s.tile, **s.sums,
        )  # fmt: skip
    y = y.permute(0, 1, 4, 2, 3)
    note_peaks(y, peaks)
    return y, mean, scale, new_mean, new_var, count


def _backward(
    relu: bool, dy: Tensor, x: Tensor, w: Tensor, b: Tensor, mask: Tensor | None, mean: Tensor, scale: Tensor,
    y: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The gradients in x, w and b and, where something was added to give ``y``, in that: all with lanes first."""
    x, w, b, dy = channels_last(x), w.contiguous(), b.contiguous(), channels_last(dy)
    mean, scale = mean.contiguous(), scale.contiguous()
    s, dx = _Shape.of(x), torch.empty_like(x)
    peaks = s.peaks(x)
    dw, db = x.new_empty((2, s.lanes, s.channels)).unbind()
    weights = x if mask is None else mask.contiguous()
    adds = y is not None
    y, dz = (x, dy) if y is None else (channels_last(y), torch.empty_like(dy))
    if s.whole:
        normalise_whole_back[s.grid](
            x, dy, y, weights, w, b, mean, scale, dx, peaks, dw, db, dz, s.batch, s.pixels,
            MASKED=mask is not None, ADDS=adds, RELU=relu, **s.tile,
        )  # fmt: skip
    else:
        parts = x.new_empty((s.splits, s.lanes, 2, s.channels))
        sums_back[s.grid](
            x, dy, y, w, b, mean, scale, parts, dz, s.batch, s.pixels, s.per_split, s.lanes,
            ADDS=adds, RELU=relu, **s.tile,
        )  # fmt: skip
        normalise_back[s.grid](
            x, dz, weights, w, b, mean, scale, parts, dx, peaks, dw, db,
            s.batch, s.pixels, s.per_split, s.splits, s.lanes,
            MASKED=mask is not None, RELU=relu and not adds, **s.tile, **s.sums,
        )  # fmt: skip
    dx, dz = (t.permute(0, 1, 4, 2, 3) for t in (dx, dz))
    note_peaks(dx, peaks)
    return (dx, dw, db, dz) if adds else (dx, dw, db)


class _BatchNorm(Function):
    """Images normalised by their batch, and what follows; also its statistics."""

    @staticmethod
    def forward(
        x: Tensor, w: Tensor, b: Tensor, added: Tensor | None, mean: Tensor | None, var: Tensor | None,
        count: Tensor | None, mask: Tensor | None, eps: float, momentum: float, relu: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        x, w, b, added, *old, mask = as_lane((x, w, b, added, mean, var, count, mask))
        return tuple(t[0] for t in _forward(x, w, b, added, tuple(old), mask, eps, momentum, relu))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, w, b, added, *_, mask, _, _, ctx.relu = inputs
        y, mean, scale, *_ = output
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, w, b, mask, mean, scale, None if added is None else y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        found = apply(_BatchNormBack, ctx.relu, grads[0], *ctx.saved_tensors)
        return *found, *[None] * (11 - len(found))

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], *inputs: Any
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        x, w, b, added, *old, mask = in_lanes(info, in_dims[:8], inputs[:8])
        return _forward(x, w, b, added, tuple(old), mask, *inputs[8:]), (0,) * 6


class _BatchNormBack(Gradient):
    """The gradients of `_BatchNorm` in x, w, b and what was added."""

    @staticmethod
    def forward(relu: bool, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        return tuple(g[0] for g in _backward(relu, *as_lane(tensors)))

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], relu: bool, *tensors: Tensor | None
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        found = _backward(relu, *in_lanes(info, in_dims[1:], tensors))
        return found, (0,) * len(found)


def batch_norm(
    x: Tensor, w: Tensor, b: Tensor, running: tuple[Tensor | None, ...], mask: Tensor | None,
    eps: float, momentum: float, relu: bool, added: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Images ``[B, C, H, W]`` normalised by their batch, at least 0 if ``relu``; can be differentiated once.

    Where other images are to be ``added``, the sum is at least 0. Also the ``running`` mean and variance ``[C]`` and
    count of batches after this one. ``mask`` [B] has 0 for padding.
    """
    relu = relu or added is not None
    y, _, _, *after = apply(_BatchNorm, x, w, b, added, *running, mask, eps, momentum, relu)
    return y, *after
