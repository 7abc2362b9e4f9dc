"""Batch normalisation and what follows it in a network, over images that lie channels last, and their gradients.

Each is two passes: sums over splits of a lane's rows (a row is one pixel of one image), then what follows from them;
or one, where a program can hold all rows of some channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import Function

from holdfast.kernels.follow import channels_last, followed, followed_back
from holdfast.kernels.frame import peak
from holdfast.kernels.function import Gradient, apply, as_lane, in_lanes
from holdfast.kernels.notes import note_peaks

_BLOCK = 4096  # values held at a time
_SPLITS = 32  # of a lane's rows, at most
_WHOLE = 8192  # values held at a time by a program that has all rows, at most
_SECTOR = 8  # neighbouring values are read together, so it has as many channels at least
_LINE = 32  # and at most these, so that there are many such programs


@triton.jit
def _counting(mask, lane, batch, pixels, r, inside, MASKED: tl.constexpr):
    """1 for each of some rows of a lane, 0 for those that are padding or not inside."""
    counting = inside.to(tl.float32)
    if MASKED:
        counting = tl.load(mask + lane * batch + r // pixels, mask=inside, other=0.0)
    return counting


@triton.jit
def _counted(mask, lane, batch, pixels, MASKED: tl.constexpr, BATCH: tl.constexpr):
    """How many rows of a lane are no padding."""
    count = batch * pixels * 1.0
    if MASKED:
        image = tl.arange(0, BATCH)
        count = tl.sum(tl.load(mask + lane * batch + image, mask=image < batch, other=0.0), 0) * pixels
    return tl.maximum(count, 1.0)


@triton.jit
def _folded(parts, which, splits, lane, lanes, c, own, C: tl.constexpr, SPLITS: tl.constexpr):
    """The sum over all splits of one of the two sums of some channels."""
    s = tl.arange(0, SPLITS)
    at = ((s * lanes + lane) * 2 + which)[:, None] * C + c[None, :]
    return tl.sum(tl.load(parts + at, mask=(s < splits)[:, None] & own[None, :], other=0.0), 0)


@triton.jit
def _moments(
    x, mask, parts, batch, pixels, per_split, lanes,
    C: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Σ (x - near) and Σ (x - near)² of each channel over one split, near being the lane's first row."""
    split = tl.program_id(0)
    lane = tl.program_id(2).to(tl.int64)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    own = c < C
    x += lane * batch * pixels * C
    near = tl.load(x + c, mask=own, other=0.0)
    start = split * per_split  # of its rows
    x += start.to(tl.int64) * C
    first = tl.zeros((BLOCK_C,), tl.float32)
    second = tl.zeros((BLOCK_C,), tl.float32)
    for row in range(0, per_split, ROWS):
        r = row + tl.arange(0, ROWS)
        inside = start + r < batch * pixels
        real = inside[:, None] & own[None, :]
        value = tl.where(
            real, tl.load(x + r[:, None] * C + c[None, :], mask=real, other=0.0) - near[None, :], 0.0
        )
        counting = _counting(mask, lane, batch, pixels, start + r, inside, MASKED)
        first += tl.sum(value * counting[:, None], 0)
        second += tl.sum(value * value * counting[:, None], 0)
    at = (split * lanes + lane) * 2 * C + c
    tl.store(parts + at, first, mask=own)
    tl.store(parts + at + C, second, mask=own)


@triton.jit
def _keep(
    middle, var, spread, count, momentum, old_mean, old_var, old_count, mean, scale, new_mean, new_var, new_count,
    lane, c, own, C: tl.constexpr, TRACKS: tl.constexpr,
):  # fmt: skip
    """Store the statistics of some channels and, with TRACKS, the running ones after them."""
    at = lane * C + c
    tl.store(mean + at, middle, mask=own)
    tl.store(scale + at, spread, mask=own)
    if TRACKS:
        before = tl.load(old_mean + at, mask=own, other=0.0)
        tl.store(new_mean + at, (1 - momentum) * before + momentum * middle, mask=own)
        before = tl.load(old_var + at, mask=own, other=0.0)
        unbiased = var * (count / tl.maximum(count - 1.0, 1.0))
        tl.store(new_var + at, (1 - momentum) * before + momentum * unbiased, mask=own)
        if tl.program_id(1) == 0:
            tl.store(new_count + lane, tl.load(old_count + lane) + 1)


@triton.jit
def _keep_peak(peaks, lane, most):
    """Store a program's peak beside those of the others that have the lane."""
    parts = tl.num_programs(0) * tl.num_programs(1)
    tl.store(peaks + lane * parts + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), most)


@triton.jit
def _normalise(
    x, mask, weight, bias, added, old_mean, old_var, old_count, parts, y, peaks, mean, scale, new_mean, new_var,
    new_count, batch, pixels, per_split, splits, lanes, eps, momentum,
    C: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr, BATCH: tl.constexpr, SPLITS: tl.constexpr,
    MASKED: tl.constexpr, TRACKS: tl.constexpr, ADDS: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """y = (x - mean) scale weight + bias, and what follows; the first split also keeps the statistics."""
    split = tl.program_id(0)
    lane = tl.program_id(2).to(tl.int64)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    own = c < C
    x += lane * batch * pixels * C
    y += lane * batch * pixels * C
    count = _counted(mask, lane, batch, pixels, MASKED, BATCH)
    apart = _folded(parts, 0, splits, lane, lanes, c, own, C, SPLITS) / count
    var = _folded(parts, 1, splits, lane, lanes, c, own, C, SPLITS) / count - apart * apart
    var = tl.maximum(var, 0.0)
    middle = tl.load(x + c, mask=own, other=0.0) + apart
    spread = 1.0 / tl.sqrt(var + eps)
    if split == 0:
        _keep(
            middle, var, spread, count, momentum, old_mean, old_var, old_count, mean, scale, new_mean, new_var,
            new_count, lane, c, own, C, TRACKS,
        )  # fmt: skip
    w = tl.load(weight + lane * C + c, mask=own, other=0.0)
    b = tl.load(bias + lane * C + c, mask=own, other=0.0)
    start = split * per_split
    x += start.to(tl.int64) * C
    y += start.to(tl.int64) * C
    added += (lane * batch * pixels + start) * C
    most = 0
    for row in range(0, per_split, ROWS):
        r = row + tl.arange(0, ROWS)
        real = (start + r < batch * pixels)[:, None] & own[None, :]
        at = r[:, None] * C + c[None, :]
        value = tl.load(x + at, mask=real, other=0.0)
        value = (value - middle[None, :]) * spread[None, :] * w[None, :] + b[None, :]
        value = followed(value, added, at, real, ADDS, RELU)
        tl.store(y + at, value, mask=real)
        most = tl.maximum(most, peak(value, real))
    _keep_peak(peaks, lane, most)


@triton.jit
def _normalise_whole(
    x, mask, weight, bias, added, old_mean, old_var, old_count, y, peaks, mean, scale, new_mean, new_var, new_count,
    batch, pixels, eps, momentum,
    C: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr,
    MASKED: tl.constexpr, TRACKS: tl.constexpr, ADDS: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """What `_moments` and `_normalise` do, by programs that hold all rows of their channels."""
    lane = tl.program_id(2).to(tl.int64)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    own = c < C
    r = tl.arange(0, ROWS)
    inside = r < batch * pixels
    real = inside[:, None] & own[None, :]
    at = lane * batch * pixels * C + r[:, None] * C + c[None, :]
    near = tl.load(x + lane * batch * pixels * C + c, mask=own, other=0.0)  # so what is constant varies by 0
    value = tl.load(x + at, mask=real, other=0.0) - near[None, :]
    counting = _counting(mask, lane, batch, pixels, r, inside, MASKED)
    count = tl.maximum(tl.sum(counting, 0), 1.0)
    apart = tl.sum(value * counting[:, None], 0) / count
    value -= apart[None, :]
    var = tl.sum(value * value * counting[:, None], 0) / count
    middle = near + apart
    spread = 1.0 / tl.sqrt(var + eps)
    _keep(
        middle, var, spread, count, momentum, old_mean, old_var, old_count, mean, scale, new_mean, new_var,
        new_count, lane, c, own, C, TRACKS,
    )  # fmt: skip
    w = tl.load(weight + lane * C + c, mask=own, other=0.0)
    b = tl.load(bias + lane * C + c, mask=own, other=0.0)
    value = followed(value * spread[None, :] * w[None, :] + b[None, :], added, at, real, ADDS, RELU)
    tl.store(y + at, value, mask=real)
    _keep_peak(peaks, lane, peak(value, real))


@triton.jit
def _sums_back(
    x, dy, y, weight, bias, mean, scale, parts, dz, batch, pixels, per_split, lanes,
    C: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr, ADDS: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """Σ dz and Σ dz n of each channel over one split, with n = (x - mean) scale."""
    split = tl.program_id(0)
    lane = tl.program_id(2).to(tl.int64)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    own = c < C
    start = split * per_split
    x += (lane * batch * pixels + start) * C
    dy += (lane * batch * pixels + start) * C
    y += (lane * batch * pixels + start) * C
    dz += (lane * batch * pixels + start) * C
    middle = tl.load(mean + lane * C + c, mask=own, other=0.0)
    spread = tl.load(scale + lane * C + c, mask=own, other=0.0)
    w = tl.load(weight + lane * C + c, mask=own, other=0.0)
    b = tl.load(bias + lane * C + c, mask=own, other=0.0)
    plain = tl.zeros((BLOCK_C,), tl.float32)
    along = tl.zeros((BLOCK_C,), tl.float32)
    for row in range(0, per_split, ROWS):
        r = row + tl.arange(0, ROWS)
        real = (start + r < batch * pixels)[:, None] & own[None, :]
        at = r[:, None] * C + c[None, :]
        n = (tl.load(x + at, mask=real, other=0.0) - middle[None, :]) * spread[None, :]
        g = tl.load(dy + at, mask=real, other=0.0)
        g = followed_back(g, n, w, b, y, at, real, ADDS, RELU)
        if ADDS:
            tl.store(dz + at, g, mask=real)
        plain += tl.sum(g, 0)
        along += tl.sum(g * n, 0)
    at = (split * lanes + lane) * 2 * C + c
    tl.store(parts + at, plain, mask=own)
    tl.store(parts + at + C, along, mask=own)


@triton.jit
def _normalise_back(
    x, dy, mask, weight, bias, mean, scale, parts, dx, peaks, dw, db, batch, pixels, per_split, splits, lanes,
    C: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr, BATCH: tl.constexpr, SPLITS: tl.constexpr,
    MASKED: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """dx = scale weight (dz - (Σ dz + n Σ dz n) / count), the sums' part for rows that are no padding.

    The first split also keeps the gradients in weight, Σ dz n, and bias, Σ dz.
    """
    split = tl.program_id(0)
    lane = tl.program_id(2).to(tl.int64)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    own = c < C
    start = split * per_split
    x += (lane * batch * pixels + start) * C
    dy += (lane * batch * pixels + start) * C
    dx += (lane * batch * pixels + start) * C
    count = _counted(mask, lane, batch, pixels, MASKED, BATCH)
    plain = _folded(parts, 0, splits, lane, lanes, c, own, C, SPLITS)
    along = _folded(parts, 1, splits, lane, lanes, c, own, C, SPLITS)
    if split == 0:
        tl.store(db + lane * C + c, plain, mask=own)
        tl.store(dw + lane * C + c, along, mask=own)
    middle = tl.load(mean + lane * C + c, mask=own, other=0.0)
    spread = tl.load(scale + lane * C + c, mask=own, other=0.0)
    w = tl.load(weight + lane * C + c, mask=own, other=0.0)
    b = tl.load(bias + lane * C + c, mask=own, other=0.0)
    most = 0
    for row in range(0, per_split, ROWS):
        r = row + tl.arange(0, ROWS)
        inside = start + r < batch * pixels
        real = inside[:, None] & own[None, :]
        n = (tl.load(x + r[:, None] * C + c[None, :], mask=real, other=0.0) - middle[None, :]) * spread[
            None, :
        ]
        g = tl.load(dy + r[:, None] * C + c[None, :], mask=real, other=0.0)
        if RELU:
            g = tl.where(n * w[None, :] + b[None, :] > 0, g, 0.0)
        share = _counting(mask, lane, batch, pixels, start + r, inside, MASKED) / count
        value = (spread * w)[None, :] * (g - share[:, None] * (plain[None, :] + n * along[None, :]))
        tl.store(dx + r[:, None] * C + c[None, :], value, mask=real)
        most = tl.maximum(most, peak(value, real))
    _keep_peak(peaks, lane, most)


@triton.jit
def _normalise_whole_back(
    x, dy, y, mask, weight, bias, mean, scale, dx, peaks, dw, db, dz, batch, pixels,
    C: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr,
    MASKED: tl.constexpr, ADDS: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """What `_sums_back` and `_normalise_back` do, by programs that hold all rows of their channels."""
    lane = tl.program_id(2).to(tl.int64)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    own = c < C
    r = tl.arange(0, ROWS)
    inside = r < batch * pixels
    real = inside[:, None] & own[None, :]
    at = lane * batch * pixels * C + r[:, None] * C + c[None, :]
    middle = tl.load(mean + lane * C + c, mask=own, other=0.0)
    spread = tl.load(scale + lane * C + c, mask=own, other=0.0)
    w = tl.load(weight + lane * C + c, mask=own, other=0.0)
    b = tl.load(bias + lane * C + c, mask=own, other=0.0)
    n = (tl.load(x + at, mask=real, other=0.0) - middle[None, :]) * spread[None, :]
    g = tl.load(dy + at, mask=real, other=0.0)
    g = followed_back(g, n, w, b, y, at, real, ADDS, RELU)
    if ADDS:
        tl.store(dz + at, g, mask=real)
    plain = tl.sum(g, 0)
    along = tl.sum(g * n, 0)
    tl.store(db + lane * C + c, plain, mask=own)
    tl.store(dw + lane * C + c, along, mask=own)
    counting = _counting(mask, lane, batch, pixels, r, inside, MASKED)
    share = counting / tl.maximum(tl.sum(counting, 0), 1.0)
    value = (spread * w)[None, :] * (g - share[:, None] * (plain[None, :] + n * along[None, :]))
    tl.store(dx + at, value, mask=real)
    _keep_peak(peaks, lane, peak(value, real))


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
        _normalise_whole[s.grid](
            x, weights, *given, *found, s.batch, s.pixels, eps, momentum,
            MASKED=mask is not None, **flags, **s.tile,
        )  # fmt: skip
    else:
        parts = x.new_empty((s.splits, s.lanes, 2, s.channels))
        _moments[s.grid](
            x, weights, parts, s.batch, s.pixels, s.per_split, s.lanes, MASKED=mask is not None, **s.tile
        )
        _normalise[s.grid](
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
        _normalise_whole_back[s.grid](
            x, dy, y, weights, w, b, mean, scale, dx, peaks, dw, db, dz, s.batch, s.pixels,
            MASKED=mask is not None, ADDS=adds, RELU=relu, **s.tile,
        )  # fmt: skip
    else:
        parts = x.new_empty((s.splits, s.lanes, 2, s.channels))
        _sums_back[s.grid](
            x, dy, y, w, b, mean, scale, parts, dz, s.batch, s.pixels, s.per_split, s.lanes,
            ADDS=adds, RELU=relu, **s.tile,
        )  # fmt: skip
        _normalise_back[s.grid](
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
