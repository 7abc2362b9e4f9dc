"""A convolution with the ReLU and 2x2 max-pooling behind it in one pass, for models that are only asked: what pooling
leaves out is never written, and nothing is kept for gradients."""

from __future__ import annotations

from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.kernels.amax import note_peaks
from holdfast.kernels.autograd import Gradient, apply, with_lanes
from holdfast.kernels.conv import WEIGHT_SCALE, Windows, spread_out
from holdfast.kernels.conv_geometry import Geometry
from holdfast.kernels.padded_images import halves, pad, peak, scale_to_half

_ROWS, _COLUMNS, _WARPS, _STAGES = 64, 64, 4, 3  # of a tile


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)  # as torch does


@triton.jit
def _pooled_windows(
    x, w, bias, y, peaks, largest, rows, x_lane, w_lane, bias_lane, each,
    PH: tl.constexpr, PW: tl.constexpr, CP: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    O: tl.constexpr, R: tl.constexpr, SHARE: tl.constexpr, STRIDE: tl.constexpr, RUN: tl.constexpr,
    CHUNKS: tl.constexpr, BIAS: tl.constexpr, FLAT: tl.constexpr, WEIGHT_SCALE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """y[m, n] = max(0, the four of a window), each as in `conv._windows`: one lane and one tile of y a program.

    m runs over (image, row of y, group of SHARE outputs), n over (pair of a group's outputs, channel). With FLAT an
    image's channels come first in y.
    """
    N: tl.constexpr = SHARE // 2 * O
    ACROSS: tl.constexpr = OW // SHARE
    HIGH: tl.constexpr = OH // 2
    lane = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(2) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    # Beyond the last row and column the last is computed again, and not stored: loads need no mask.
    row = tl.minimum(m, rows - 1)
    image = (row // (ACROSS * HIGH)).to(tl.int64)
    start = (row // ACROSS % HIGH * (2 * STRIDE * PW) + row % ACROSS * (SHARE * STRIDE)) * CP
    windows = x + lane * x_lane + (image * (PH * PW * CP) + start)[:, None] + k[None, :]
    column = tl.minimum(n, N - 1)
    left = column // O * (2 * O) + column % O
    weights = w + lane * w_lane + left[:, None] * (R * CHUNKS * BK) + k[None, :]
    upper_left = tl.zeros((BM, BN), tl.float32)
    upper_right = tl.zeros((BM, BN), tl.float32)
    lower_left = tl.zeros((BM, BN), tl.float32)
    lower_right = tl.zeros((BM, BN), tl.float32)
    for step in range(R * CHUNKS):
        window = windows + (step // CHUNKS * (PW * CP) + step % CHUNKS * BK)
        if RUN % BK == 0:
            upper = tl.load(window)
            lower = tl.load(window + STRIDE * PW * CP)
        else:  # behind the last window lies the next lane, of which not even an infinity may be seen
            within = (step % CHUNKS * BK + k < RUN)[None, :]
            upper = tl.load(window, mask=within, other=0.0)
            lower = tl.load(window + STRIDE * PW * CP, mask=within, other=0.0)
        of_left = tl.trans(tl.load(weights + step * BK))
        of_right = tl.trans(tl.load(weights + O * (R * CHUNKS * BK) + step * BK))
        upper_left = tl.dot(upper, of_left, upper_left)
        upper_right = tl.dot(upper, of_right, upper_right)
        lower_left = tl.dot(lower, of_left, lower_left)
        lower_right = tl.dot(lower, of_right, lower_right)
    value = _larger(_larger(upper_left, upper_right), _larger(lower_left, lower_right))
    value *= 1.0 / scale_to_half(tl.load(largest + lane * each)) * (1.0 / WEIGHT_SCALE)
    if BIAS:
        value += tl.load(bias + lane * bias_lane + n % O, mask=n < N, other=0.0)[None, :]
    value = tl.where(value < 0, 0.0, value)  # what is no number stays so
    real = (m < rows)[:, None] & (n < N)[None, :]
    part = (lane * tl.num_programs(0) + tl.program_id(0)) * tl.num_programs(2) + tl.program_id(2)
    tl.store(peaks + part, peak(value, real))
    if FLAT:
        pixel = (m % (ACROSS * HIGH) * (SHARE // 2))[:, None] + (n // O)[None, :]
        place = (m // (ACROSS * HIGH))[:, None].to(tl.int64) * O + (n % O)[None, :]
        place = place * (ACROSS * HIGH * (SHARE // 2)) + pixel
    else:
        place = m[:, None].to(tl.int64) * N + n[None, :]
    tl.store(y + lane * rows * N + place, value, mask=real)


def serves(outputs: int, geometry: Geometry) -> bool:
    """Whether windows are shared by pairs of outputs, as this kernel wants them, and in half precision."""
    out = geometry.out
    even = out[0] % 2 == out[1] % 2 == 0
    return even and halves() and Windows.of(outputs, 1, out[1], len(geometry.taps), geometry.stride).share > 1


def _forward(x: Tensor, w: Tensor, bias: Tensor | None, geometry: Geometry, flat: bool) -> Tensor:
    """``[L, B, O, OH/2, OW/2]`` from x ``[L or 1, B, C, H, W]``, w ``[L or 1, O, C, R, R]``, bias ``[L or 1, O]``."""
    padded, w, out, stride = pad(x, geometry.frame), geometry.used(w), geometry.out, geometry.stride
    _, batch, height, width, channels = padded.values.shape
    lanes, outputs, kernel = max(len(w), len(x)), w.shape[1], len(geometry.taps)
    s = Windows.of(outputs, channels, out[1], kernel, stride)
    spread = spread_out(w, channels, s.share, stride, s.chunks * s.chunk, padded.values.dtype)
    rows, columns = batch * out[0] * out[1] // (2 * s.share), s.share // 2 * outputs
    high, wide = out[0] // 2, out[1] // 2
    y = torch.empty(
        (lanes, batch, *((outputs, high, wide) if flat else (high, wide, outputs))), device=w.device
    )
    wide = min(_COLUMNS, max(16, triton.next_power_of_2(columns)))
    grid = (triton.cdiv(rows, _ROWS), lanes, triton.cdiv(columns, wide))
    peaks = torch.empty((lanes, grid[0] * grid[2]), dtype=torch.int32, device=w.device)
    _pooled_windows[grid](
        padded.values, spread, spread if bias is None else bias.contiguous(), y, peaks, padded.largest,
        rows, padded.lane, spread.stride(0) if len(spread) > 1 else 0,
        outputs if bias is not None and len(bias) > 1 else 0, padded.each,
        PH=height, PW=width, CP=channels, OH=out[0], OW=out[1], O=outputs, R=kernel, SHARE=s.share, STRIDE=stride,
        RUN=s.run, CHUNKS=s.chunks, BIAS=bias is not None, FLAT=flat, WEIGHT_SCALE=WEIGHT_SCALE,
        BM=_ROWS, BN=wide, BK=s.chunk, num_warps=_WARPS, num_stages=_STAGES,
    )  # fmt: skip
    if flat:
        return y
    y = y.permute(0, 1, 4, 2, 3)
    note_peaks(y, peaks.amax(1, keepdim=True))
    return y


class _ConvolveAndPool(Gradient):
    """max-pooling of ReLU of x * w + bias; it has no gradient."""

    @staticmethod
    def forward(x: Tensor, w: Tensor, bias: Tensor | None, geometry: Geometry, flat: bool) -> Tensor:
        return _forward(x[None], w[None], None if bias is None else bias[None], geometry, flat)[0]

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], x: Tensor, w: Tensor, bias: Tensor | None, geometry: Geometry,
        flat: bool,
    ) -> tuple[Tensor, int]:  # fmt: skip
        x, w = (with_lanes(t, dim) for t, dim in zip((x, w), in_dims, strict=False))
        y = _forward(x, w, None if bias is None else with_lanes(bias, in_dims[2]), geometry, flat)
        return y.expand(info.batch_size, *y.shape[1:]), 0


def convolve_and_pool(x: Tensor, w: Tensor, bias: Tensor | None, geometry: Geometry, flat: bool) -> Tensor:
    """``[B, O, OH/2, OW/2]`` from x ``[B, C, H, W]``, w ``[O, C, R, R]`` and bias ``[O]``; in memory its channels come
    last, or first if it is to be made ``flat``."""
    return cast(Tensor, apply(_ConvolveAndPool, x, w, bias, geometry, flat))
