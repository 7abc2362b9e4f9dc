"""Group normalisation and what follows it in a network, in one pass over images that lie channels last, and their
gradients."""

from __future__ import annotations

from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import Function

from holdfast.kernels.amax import note_peaks
from holdfast.kernels.autograd import Gradient, apply, as_lane, in_lanes
from holdfast.kernels.epilogue import channels_last, followed, followed_back
from holdfast.kernels.padded_images import peak

_BLOCK = 4096  # values held at a time


@triton.jit
def _normalise(
    x, weight, bias, added, y, peaks, mean, scale, per_lane, pixels, eps,
    C: tl.constexpr, WIDE: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr,
    ADDS: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """y = (x - mean) scale weight + bias over the WIDE channels of one group of one image, and what follows."""
    image = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    c = tl.arange(0, BLOCK_C)
    own = c < WIDE
    x += image * pixels * C + group * WIDE
    added += image * pixels * C + group * WIDE
    y += image * pixels * C + group * WIDE
    near = tl.load(x)  # sums of what is left of it lose no digits, wherever the values lie
    first = tl.zeros((BLOCK_C,), tl.float32)
    second = tl.zeros((BLOCK_C,), tl.float32)
    for row in range(0, pixels, ROWS):
        p = row + tl.arange(0, ROWS)
        real = (p < pixels)[:, None] & own[None, :]
        value = tl.where(real, tl.load(x + p[:, None] * C + c[None, :], mask=real, other=0.0) - near, 0.0)
        first += tl.sum(value, 0)
        second += tl.sum(value * value, 0)
    count = pixels * WIDE * 1.0
    apart = tl.sum(first, 0) / count
    spread = 1.0 / tl.sqrt(tl.maximum(tl.sum(second, 0) / count - apart * apart, 0.0) + eps)
    middle = near + apart
    tl.store(mean + image * tl.num_programs(1) + group, middle)
    tl.store(scale + image * tl.num_programs(1) + group, spread)
    channel = image // per_lane * C + group * WIDE + c
    w = tl.load(weight + channel, mask=own, other=0.0)
    b = tl.load(bias + channel, mask=own, other=0.0)
    most = 0
    for row in range(0, pixels, ROWS):
        p = row + tl.arange(0, ROWS)
        real = (p < pixels)[:, None] & own[None, :]
        at = p[:, None] * C + c[None, :]
        value = tl.load(x + at, mask=real, other=0.0)
        value = (value - middle) * spread * w[None, :] + b[None, :]
        value = followed(value, added, at, real, ADDS, RELU)
        tl.store(y + at, value, mask=real)
        most = tl.maximum(most, peak(value, real))
    tl.store(peaks + image * tl.num_programs(1) + group, most)


@triton.jit
def _normalise_back(
    x, dy, y, weight, bias, mean, scale, dx, peaks, dw, db, dz, per_lane, pixels,
    C: tl.constexpr, WIDE: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr,
    ADDS: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """dx of one group of one image, and that image's share of the gradients in weight and bias: dw, db [image, C].

    With n = (x - mean) scale and g = weight dz: dx = scale (g - mean(g) - n mean(g n)).
    """
    image = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    c = tl.arange(0, BLOCK_C)
    own = c < WIDE
    start = image * pixels * C + group * WIDE
    x += start
    dy += start
    y += start
    dx += start
    dz += start
    middle = tl.load(mean + image * tl.num_programs(1) + group)
    spread = tl.load(scale + image * tl.num_programs(1) + group)
    channel = image // per_lane * C + group * WIDE + c
    w = tl.load(weight + channel, mask=own, other=0.0)
    b = tl.load(bias + channel, mask=own, other=0.0)
    plain = tl.zeros((BLOCK_C,), tl.float32)
    along = tl.zeros((BLOCK_C,), tl.float32)
    for row in range(0, pixels, ROWS):
        p = row + tl.arange(0, ROWS)
        real = (p < pixels)[:, None] & own[None, :]
        at = p[:, None] * C + c[None, :]
        n = (tl.load(x + at, mask=real, other=0.0) - middle) * spread
        g = tl.load(dy + at, mask=real, other=0.0)
        g = followed_back(g, n, w, b, y, at, real, ADDS, RELU)
        plain += tl.sum(g, 0)
        along += tl.sum(g * n, 0)
    tl.store(db + image * C + group * WIDE + c, plain, mask=own)
    tl.store(dw + image * C + group * WIDE + c, along, mask=own)
    count = pixels * WIDE * 1.0
    even = tl.sum(plain * w, 0) / count
    tilt = tl.sum(along * w, 0) / count
    most = 0
    for row in range(0, pixels, ROWS):
        p = row + tl.arange(0, ROWS)
        real = (p < pixels)[:, None] & own[None, :]
        at = p[:, None] * C + c[None, :]
        n = (tl.load(x + at, mask=real, other=0.0) - middle) * spread
        g = tl.load(dy + at, mask=real, other=0.0)
        g = followed_back(g, n, w, b, y, at, real, ADDS, RELU)
        if ADDS:
            tl.store(dz + at, g, mask=real)
        value = spread * (g * w[None, :] - even - n * tilt)
        tl.store(dx + at, value, mask=real)
        most = tl.maximum(most, peak(value, real))
    tl.store(peaks + image * tl.num_programs(1) + group, most)


def _shapes(x: Tensor, groups: int) -> tuple[tuple[int, int], dict[str, int]]:
    """The grid and the constants for images ``[L, B, H, W, C]``."""
    lanes, batch, _, _, channels = x.shape
    wide = channels // groups
    block = triton.next_power_of_2(wide)
    return (lanes * batch, groups), {
        "C": channels, "WIDE": wide, "BLOCK_C": block, "ROWS": max(1, _BLOCK // block),
    }  # fmt: skip


def _forward(
    x: Tensor, w: Tensor, b: Tensor, added: Tensor | None, groups: int, eps: float, relu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, and each image's means and scales ``[L, B, groups]``; w and b are ``[L, C]``."""
    x, w, b = channels_last(x), w.contiguous(), b.contiguous()
    y, mean = torch.empty_like(x), x.new_empty((*x.shape[:2], groups))
    scale, peaks = torch.empty_like(mean), torch.empty_like(mean, dtype=torch.int32)
    grid, constants = _shapes(x, groups)
    _normalise[grid](
        x, w, b, x if added is None else channels_last(added), y, peaks, mean, scale,
        x.shape[1], x.shape[2] * x.shape[3], eps,
        ADDS=added is not None, RELU=relu, **constants,
    )  # fmt: skip
    y = y.permute(0, 1, 4, 2, 3)
    note_peaks(y, peaks.flatten(1))
    return y, mean, scale


def _backward(
    relu: bool, dy: Tensor, x: Tensor, w: Tensor, b: Tensor, mean: Tensor, scale: Tensor, y: Tensor | None
) -> tuple[Tensor, ...]:
    """The gradients in x, w and b and, where something was added to give ``y``, in that: all with lanes first."""
    x, w, b, dy = channels_last(x), w.contiguous(), b.contiguous(), channels_last(dy)
    lanes, batch, height, width, channels = x.shape
    dx, dw = torch.empty_like(x), x.new_empty((lanes, batch, channels))
    db, peaks = torch.empty_like(dw), torch.empty_like(mean, dtype=torch.int32)
    adds = y is not None
    y, dz = (x, dy) if y is None else (channels_last(y), torch.empty_like(dy))
    grid, constants = _shapes(x, mean.shape[-1])
    _normalise_back[grid](
        x, dy, y, w, b, mean, scale, dx, peaks, dw, db, dz, batch, height * width,
        ADDS=adds, RELU=relu, **constants,
    )  # fmt: skip
    dx, dz = (t.permute(0, 1, 4, 2, 3) for t in (dx, dz))
    note_peaks(dx, peaks.flatten(1))
    found = dx, dw.sum(1), db.sum(1)
    return (*found, dz) if adds else found


class _GroupNorm(Function):
    """Normalised images, and what follows; also what the gradients need of it."""

    @staticmethod
    def forward(
        x: Tensor, w: Tensor, b: Tensor, added: Tensor | None, groups: int, eps: float, relu: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        x, w, b, added = as_lane((x, w, b, added))
        y, mean, scale = _forward(x, w, b, added, groups, eps, relu)
        return y[0], mean[0], scale[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, w, b, added, _, _, ctx.relu = inputs
        y, *kept = output
        ctx.mark_non_differentiable(*kept)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, w, b, *kept, None if added is None else y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        found = apply(_GroupNormBack, ctx.relu, grads[0], *ctx.saved_tensors)
        return *found, *[None] * (7 - len(found))

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], x: Tensor, w: Tensor, b: Tensor, added: Tensor | None, groups: int,
        eps: float, relu: bool,
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:  # fmt: skip
        x, w, b, added = in_lanes(info, in_dims[:4], (x, w, b, added))
        return _forward(x, w, b, added, groups, eps, relu), (0, 0, 0)


class _GroupNormBack(Gradient):
    """The gradients of `_GroupNorm` in x, w, b and what was added."""

    @staticmethod
    def forward(relu: bool, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        return tuple(g[0] for g in _backward(relu, *as_lane(tensors)))

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], relu: bool, *tensors: Tensor | None
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        found = _backward(relu, *in_lanes(info, in_dims[1:], tensors))
        return found, (0,) * len(found)


def group_norm(
    x: Tensor, w: Tensor, b: Tensor, groups: int, eps: float, relu: bool, added: Tensor | None = None
) -> Tensor:
    """Images ``[B, C, H, W]``, normalised by group, at least 0 if ``relu``; can be differentiated once.

    Where other images are to be ``added``, the sum is at least 0.
    """
    return cast(Tensor, apply(_GroupNorm, x, w, b, added, groups, eps, relu or added is not None)[0])
