"""Group normalisation with an epilogue (a ReLU or a residual connection) and its gradients, on channels-last images.

Each direction is one kernel.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import Function

from holdfast.kernels.amax import record_amax
from holdfast.kernels.autograd import NonDifferentiable, add_lane_dim, apply, expand_to_lanes
from holdfast.kernels.epilogue import channels_last, epilogue, epilogue_backward
from holdfast.kernels.padded_images import tile_amax

_TILE_SIZE = 4096  # values that a program holds at a time


@triton.jit
def _groupnorm_forward(
    x, weight, bias, residual, y, block_amax, mean, rstd, images_per_lane, pixels, eps,
    C: tl.constexpr, GROUP_C: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """y = (x - mean) rstd weight + bias over the GROUP_C channels of one group of one image, and the epilogue."""
    image = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    c = tl.arange(0, BLOCK_C)
    valid_c = c < GROUP_C
    x += image * pixels * C + group * GROUP_C
    residual += image * pixels * C + group * GROUP_C
    y += image * pixels * C + group * GROUP_C
    shift = tl.load(x)  # subtracted first, so that a large mean does not reduce the precision of the sums
    sum_x = tl.zeros((BLOCK_C,), tl.float32)
    sum_squares = tl.zeros((BLOCK_C,), tl.float32)
    for row in range(0, pixels, ROWS):
        p = row + tl.arange(0, ROWS)
        valid = (p < pixels)[:, None] & valid_c[None, :]
        value = tl.where(valid, tl.load(x + p[:, None] * C + c[None, :], mask=valid, other=0.0) - shift, 0.0)
        sum_x += tl.sum(value, 0)
        sum_squares += tl.sum(value * value, 0)
    count = pixels * GROUP_C * 1.0
    shifted_mean = tl.sum(sum_x, 0) / count
    variance = tl.maximum(tl.sum(sum_squares, 0) / count - shifted_mean * shifted_mean, 0.0)
    group_rstd = 1.0 / tl.sqrt(variance + eps)
    group_mean = shift + shifted_mean
    tl.store(mean + image * tl.num_programs(1) + group, group_mean)
    tl.store(rstd + image * tl.num_programs(1) + group, group_rstd)
    channel = image // images_per_lane * C + group * GROUP_C + c
    w = tl.load(weight + channel, mask=valid_c, other=0.0)
    b = tl.load(bias + channel, mask=valid_c, other=0.0)
    amax = 0
    for row in range(0, pixels, ROWS):
        p = row + tl.arange(0, ROWS)
        valid = (p < pixels)[:, None] & valid_c[None, :]
        offsets = p[:, None] * C + c[None, :]
        value = tl.load(x + offsets, mask=valid, other=0.0)
        value = (value - group_mean) * group_rstd * w[None, :] + b[None, :]
        value = epilogue(value, residual, offsets, valid, HAS_RESIDUAL, RELU)
        tl.store(y + offsets, value, mask=valid)
        amax = tl.maximum(amax, tile_amax(value, valid))
    tl.store(block_amax + image * tl.num_programs(1) + group, amax)


@triton.jit
def _groupnorm_backward(
    x, dy, y, weight, bias, mean, rstd, dx, block_amax, dw, db, dz, images_per_lane, pixels,
    C: tl.constexpr, GROUP_C: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """dx of one group of one image, and that image's part of the gradients of weight and bias: dw, db [image, C].

    With n = (x - mean) rstd and g = weight dz: dx = rstd (g - mean(g) - n mean(g n)).
    """
    image = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    c = tl.arange(0, BLOCK_C)
    valid_c = c < GROUP_C
    start = image * pixels * C + group * GROUP_C
    x += start
    dy += start
    y += start
    dx += start
    dz += start
    group_mean = tl.load(mean + image * tl.num_programs(1) + group)
    group_rstd = tl.load(rstd + image * tl.num_programs(1) + group)
    channel = image // images_per_lane * C + group * GROUP_C + c
    w = tl.load(weight + channel, mask=valid_c, other=0.0)
    b = tl.load(bias + channel, mask=valid_c, other=0.0)
    sum_dz = tl.zeros((BLOCK_C,), tl.float32)
    sum_dz_n = tl.zeros((BLOCK_C,), tl.float32)
    for row in range(0, pixels, ROWS):
        p = row + tl.arange(0, ROWS)
        valid = (p < pixels)[:, None] & valid_c[None, :]
        offsets = p[:, None] * C + c[None, :]
        n = (tl.load(x + offsets, mask=valid, other=0.0) - group_mean) * group_rstd
        g = tl.load(dy + offsets, mask=valid, other=0.0)
        g = epilogue_backward(g, n, w, b, y, offsets, valid, HAS_RESIDUAL, RELU)
        sum_dz += tl.sum(g, 0)
        sum_dz_n += tl.sum(g * n, 0)
    tl.store(db + image * C + group * GROUP_C + c, sum_dz, mask=valid_c)
    tl.store(dw + image * C + group * GROUP_C + c, sum_dz_n, mask=valid_c)
    count = pixels * GROUP_C * 1.0
    mean_g = tl.sum(sum_dz * w, 0) / count
    mean_gn = tl.sum(sum_dz_n * w, 0) / count
    amax = 0
    for row in range(0, pixels, ROWS):
        p = row + tl.arange(0, ROWS)
        valid = (p < pixels)[:, None] & valid_c[None, :]
        offsets = p[:, None] * C + c[None, :]
        n = (tl.load(x + offsets, mask=valid, other=0.0) - group_mean) * group_rstd
        g = tl.load(dy + offsets, mask=valid, other=0.0)
        g = epilogue_backward(g, n, w, b, y, offsets, valid, HAS_RESIDUAL, RELU)
        if HAS_RESIDUAL:
            tl.store(dz + offsets, g, mask=valid)
        value = group_rstd * (g * w[None, :] - mean_g - n * mean_gn)
        tl.store(dx + offsets, value, mask=valid)
        amax = tl.maximum(amax, tile_amax(value, valid))
    tl.store(block_amax + image * tl.num_programs(1) + group, amax)


def _launch_options(x: Tensor, groups: int) -> tuple[tuple[int, int], dict[str, int]]:
    """The grid and the constants for images ``[L, B, H, W, C]``."""
    lanes, batch, _, _, channels = x.shape
    group_channels = channels // groups
    block = triton.next_power_of_2(group_channels)
    return (lanes * batch, groups), {
        "C": channels, "GROUP_C": group_channels, "BLOCK_C": block, "ROWS": max(1, _TILE_SIZE // block),
    }  # fmt: skip


def _forward(
    x: Tensor, w: Tensor, b: Tensor, residual: Tensor | None, groups: int, eps: float, relu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, and each group's mean and reciprocal standard deviation ``[L, B, groups]``; w and b are ``[L, C]``."""
    x, w, b = channels_last(x), w.contiguous(), b.contiguous()
    y, mean = torch.empty_like(x), x.new_empty((*x.shape[:2], groups))
    rstd, block_amax = torch.empty_like(mean), torch.empty_like(mean, dtype=torch.int32)
    grid, constants = _launch_options(x, groups)
    _groupnorm_forward[grid](
        x, w, b, x if residual is None else channels_last(residual), y, block_amax, mean, rstd,
        x.shape[1], x.shape[2] * x.shape[3], eps,
        HAS_RESIDUAL=residual is not None, RELU=relu, **constants,
    )  # fmt: skip
    y = y.permute(0, 1, 4, 2, 3)
    record_amax(y, block_amax.flatten(1))
    return y, mean, rstd


def _backward(
    relu: bool, dy: Tensor, x: Tensor, w: Tensor, b: Tensor, mean: Tensor, rstd: Tensor, y: Tensor | None
) -> tuple[Tensor, ...]:
    """The gradients of x, w and b, and of the residual if there is one, all with lanes first.

    ``y`` is the output of the forward pass if there is a residual, else None.
    """
    x, w, b, dy = channels_last(x), w.contiguous(), b.contiguous(), channels_last(dy)
    lanes, batch, height, width, channels = x.shape
    dx, dw = torch.empty_like(x), x.new_empty((lanes, batch, channels))
    db, block_amax = torch.empty_like(dw), torch.empty_like(mean, dtype=torch.int32)
    has_residual = y is not None
    y, dz = (x, dy) if y is None else (channels_last(y), torch.empty_like(dy))
    grid, constants = _launch_options(x, mean.shape[-1])
    _groupnorm_backward[grid](
        x, dy, y, w, b, mean, rstd, dx, block_amax, dw, db, dz, batch, height * width,
        HAS_RESIDUAL=has_residual, RELU=relu, **constants,
    )  # fmt: skip
    dx, dz = (t.permute(0, 1, 4, 2, 3) for t in (dx, dz))
    record_amax(dx, block_amax.flatten(1))
    grads = dx, dw.sum(1), db.sum(1)
    return (*grads, dz) if has_residual else grads


class _GroupNorm(Function):
    """The outputs of `_forward` for one lane."""

    @staticmethod
    def forward(
        x: Tensor, w: Tensor, b: Tensor, residual: Tensor | None, groups: int, eps: float, relu: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        x, w, b, residual = add_lane_dim((x, w, b, residual))
        y, mean, rstd = _forward(x, w, b, residual, groups, eps, relu)
        return y[0], mean[0], rstd[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, w, b, residual, _, _, ctx.relu = inputs
        y, *statistics = output
        ctx.mark_non_differentiable(*statistics)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, w, b, *statistics, None if residual is None else y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        input_grads = apply(_GroupNormBackward, ctx.relu, grads[0], *ctx.saved_tensors)
        return *input_grads, *[None] * (7 - len(input_grads))

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], x: Tensor, w: Tensor, b: Tensor, residual: Tensor | None,
        groups: int, eps: float, relu: bool,
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:  # fmt: skip
        x, w, b, residual = expand_to_lanes(info, in_dims[:4], (x, w, b, residual))
        return _forward(x, w, b, residual, groups, eps, relu), (0, 0, 0)


class _GroupNormBackward(NonDifferentiable):
    """The gradients of `_GroupNorm` with respect to x, w, b and the residual."""

    @staticmethod
    def forward(relu: bool, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        return tuple(g[0] for g in _backward(relu, *add_lane_dim(tensors)))

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], relu: bool, *tensors: Tensor | None
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        grads = _backward(relu, *expand_to_lanes(info, in_dims[1:], tensors))
        return grads, (0,) * len(grads)


def group_norm(
    x: Tensor, w: Tensor, b: Tensor, groups: int, eps: float, relu: bool, residual: Tensor | None = None
) -> Tensor:
    """Images ``[B, C, H, W]`` normalised by group; can be differentiated once.

    With ``relu`` a ReLU follows. A ``residual`` is added before the ReLU and implies it.
    """
    return cast(Tensor, apply(_GroupNorm, x, w, b, residual, groups, eps, relu or residual is not None)[0])
