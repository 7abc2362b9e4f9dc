"""Batch normalisation with an epilogue (a ReLU or a residual connection) and its gradients, on channels-last images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import Function

from holdfast.kernels.amax import record_amax
from holdfast.kernels.autograd import NonDifferentiable, add_lane_dim, apply, expand_to_lanes
from holdfast.kernels.batchnorm_kernels import (
    batchnorm_backward,
    batchnorm_backward_single_pass,
    batchnorm_backward_sums,
    batchnorm_forward,
    batchnorm_forward_single_pass,
    batchnorm_moments,
)
from holdfast.kernels.epilogue import channels_last

_TILE_SIZE = 4096  # values that a program holds at a time
_MAX_SPLITS = 32  # of a lane's rows
_MAX_SINGLE_PASS_SIZE = 8192  # values that a program holds if it has all rows of its channels
_MIN_CHANNELS = 8  # of such a program, so that neighbouring values are read together
_MAX_CHANNELS = 32  # of such a program, so that there are many of them


@dataclass(frozen=True)
class _Tiling:
    """The division of a lane's rows and channels among programs, for images ``[L, B, H, W, C]``."""

    lanes: int
    batch: int
    pixels: int
    channels: int
    splits: int
    rows_per_split: int
    columns: int
    rows: int

    @staticmethod
    def of(x: Tensor) -> _Tiling:
        lanes, batch, height, width, channels = x.shape
        columns, all_rows = min(64, triton.next_power_of_2(channels)), batch * height * width
        rows = triton.next_power_of_2(all_rows)
        if rows * min(columns, _MIN_CHANNELS) <= _MAX_SINGLE_PASS_SIZE:
            columns = min(columns, _MAX_CHANNELS, _MAX_SINGLE_PASS_SIZE // rows)
            return _Tiling(lanes, batch, height * width, channels, 1, rows, columns, rows)
        rows = _TILE_SIZE // columns
        tiles_per_split = triton.cdiv(triton.cdiv(all_rows, rows), _MAX_SPLITS)
        splits = triton.cdiv(all_rows, tiles_per_split * rows)
        return _Tiling(lanes, batch, height * width, channels, splits, tiles_per_split * rows, columns, rows)

    @property
    def grid(self) -> tuple[int, int, int]:
        return self.splits, triton.cdiv(self.channels, self.columns), self.lanes

    @property
    def single_pass(self) -> bool:
        """Whether a program holds all rows of its channels."""
        return self.splits == 1

    def empty_amax(self, x: Tensor) -> Tensor:
        """Memory for the amax of the values that each program writes, ``[L, P]``."""
        return x.new_empty((self.lanes, self.grid[0] * self.grid[1]), dtype=torch.int32)

    @property
    def tile_constants(self) -> dict[str, int]:
        warps = 8 if self.columns * self.rows > _TILE_SIZE else 4
        return {"C": self.channels, "BLOCK_C": self.columns, "ROWS": self.rows, "num_warps": warps}

    @property
    def sum_constants(self) -> dict[str, int]:
        return {"BATCH": triton.next_power_of_2(self.batch), "SPLITS": triton.next_power_of_2(self.splits)}


def _forward(
    x: Tensor, w: Tensor, b: Tensor, residual: Tensor | None, running: tuple[Tensor | None, ...], mask: Tensor | None,
    eps: float, momentum: float, relu: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Output, the batch's mean and reciprocal standard deviation, and the updated running mean, running variance and
    batch count (undefined if ``running`` holds None), all with lanes first. ``mask`` [L, B] is 0 for padding."""
    x, w, b = channels_last(x), w.contiguous(), b.contiguous()
    tiling, y = _Tiling.of(x), torch.empty_like(x)
    mean, rstd, new_mean, new_var = x.new_empty((4, tiling.lanes, tiling.channels)).unbind()
    weights = x if mask is None else mask.contiguous()
    count = torch.empty(tiling.lanes, dtype=torch.int64, device=x.device)
    tracks = all(t is not None for t in running)
    old = [t.contiguous() if t is not None else mean for t in running]
    inputs = (w, b, x if residual is None else channels_last(residual), *old)
    block_amax = tiling.empty_amax(x)
    outputs = (y, block_amax, mean, rstd, new_mean, new_var, count)
    flags = {"TRACKS": tracks, "HAS_RESIDUAL": residual is not None, "RELU": relu}
    if tiling.single_pass:
        batchnorm_forward_single_pass[tiling.grid](
            x, weights, *inputs, *outputs, tiling.batch, tiling.pixels, eps, momentum,
            MASKED=mask is not None, **flags, **tiling.tile_constants,
        )  # fmt: skip
    else:
        partial_sums = x.new_empty((tiling.splits, tiling.lanes, 2, tiling.channels))
        batchnorm_moments[tiling.grid](
            x, weights, partial_sums, tiling.batch, tiling.pixels, tiling.rows_per_split, tiling.lanes,
            MASKED=mask is not None, **tiling.tile_constants,
        )  # fmt: skip
        batchnorm_forward[tiling.grid](
            x, weights, *inputs, partial_sums, *outputs, tiling.batch, tiling.pixels, tiling.rows_per_split,
            tiling.splits, tiling.lanes, eps, momentum,
            MASKED=mask is not None, **flags, **tiling.tile_constants, **tiling.sum_constants,
        )  # fmt: skip
    y = y.permute(0, 1, 4, 2, 3)
    record_amax(y, block_amax)
    return y, mean, rstd, new_mean, new_var, count


def _backward(
    relu: bool, dy: Tensor, x: Tensor, w: Tensor, b: Tensor, mask: Tensor | None, mean: Tensor, rstd: Tensor,
    y: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The gradients of x, w and b, and of the residual if there is one, all with lanes first.

    ``y`` is the output of the forward pass if there is a residual, else None.
    """
    x, w, b, dy = channels_last(x), w.contiguous(), b.contiguous(), channels_last(dy)
    mean, rstd = mean.contiguous(), rstd.contiguous()
    tiling, dx = _Tiling.of(x), torch.empty_like(x)
    block_amax = tiling.empty_amax(x)
    dw, db = x.new_empty((2, tiling.lanes, tiling.channels)).unbind()
    weights = x if mask is None else mask.contiguous()
    has_residual = y is not None
    y, dz = (x, dy) if y is None else (channels_last(y), torch.empty_like(dy))
    if tiling.single_pass:
        batchnorm_backward_single_pass[tiling.grid](
            x, dy, y, weights, w, b, mean, rstd, dx, block_amax, dw, db, dz, tiling.batch, tiling.pixels,
            MASKED=mask is not None, HAS_RESIDUAL=has_residual, RELU=relu, **tiling.tile_constants,
        )  # fmt: skip
    else:
        partial_sums = x.new_empty((tiling.splits, tiling.lanes, 2, tiling.channels))
        batchnorm_backward_sums[tiling.grid](
            x, dy, y, w, b, mean, rstd, partial_sums, dz, tiling.batch, tiling.pixels, tiling.rows_per_split,
            tiling.lanes, HAS_RESIDUAL=has_residual, RELU=relu, **tiling.tile_constants,
        )  # fmt: skip
        batchnorm_backward[tiling.grid](
            x, dz, weights, w, b, mean, rstd, partial_sums, dx, block_amax, dw, db,
            tiling.batch, tiling.pixels, tiling.rows_per_split, tiling.splits, tiling.lanes,
            MASKED=mask is not None, RELU=relu and not has_residual, **tiling.tile_constants, **tiling.sum_constants,
        )  # fmt: skip
    dx, dz = (t.permute(0, 1, 4, 2, 3) for t in (dx, dz))
    record_amax(dx, block_amax)
    return (dx, dw, db, dz) if has_residual else (dx, dw, db)


class _BatchNorm(Function):
    """The outputs of `_forward` for one lane."""

    @staticmethod
    def forward(
        x: Tensor, w: Tensor, b: Tensor, residual: Tensor | None, mean: Tensor | None, var: Tensor | None,
        count: Tensor | None, mask: Tensor | None, eps: float, momentum: float, relu: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        x, w, b, residual, *running, mask = add_lane_dim((x, w, b, residual, mean, var, count, mask))
        return tuple(t[0] for t in _forward(x, w, b, residual, tuple(running), mask, eps, momentum, relu))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, w, b, residual, *_, mask, _, _, ctx.relu = inputs
        y, mean, rstd, *_ = output
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, w, b, mask, mean, rstd, None if residual is None else y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        input_grads = apply(_BatchNormBackward, ctx.relu, grads[0], *ctx.saved_tensors)
        return *input_grads, *[None] * (11 - len(input_grads))

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], *inputs: Any
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        x, w, b, residual, *running, mask = expand_to_lanes(info, in_dims[:8], inputs[:8])
        return _forward(x, w, b, residual, tuple(running), mask, *inputs[8:]), (0,) * 6


class _BatchNormBackward(NonDifferentiable):
    """The gradients of `_BatchNorm` with respect to x, w, b and the residual."""

    @staticmethod
    def forward(relu: bool, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        return tuple(g[0] for g in _backward(relu, *add_lane_dim(tensors)))

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], relu: bool, *tensors: Tensor | None
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        grads = _backward(relu, *expand_to_lanes(info, in_dims[1:], tensors))
        return grads, (0,) * len(grads)


def batch_norm(
    x: Tensor, w: Tensor, b: Tensor, running: tuple[Tensor | None, ...], mask: Tensor | None,
    eps: float, momentum: float, relu: bool, residual: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Images ``[B, C, H, W]`` normalised by the batch's statistics, and the updated ``running`` statistics.

    With ``relu`` a ReLU follows. A ``residual`` is added before the ReLU and implies it. ``running`` are mean and
    variance ``[C]`` and the batch count, or None each. ``mask`` [B] is 0 for padding. Can be differentiated once.
    """
    relu = relu or residual is not None
    y, _, _, *updated = apply(_BatchNorm, x, w, b, residual, *running, mask, eps, momentum, relu)
    return y, *updated
