"""A convolution, ReLU and 2x2 max-pooling in one kernel, for inference.

Only pooled values are written, and nothing is stored for gradients.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.kernels.amax import record_amax
from holdfast.kernels.autograd import NonDifferentiable, apply, lanes_first
from holdfast.kernels.conv import WEIGHT_SCALE, Window, pack_filters
from holdfast.kernels.conv_geometry import Geometry
from holdfast.kernels.padded_images import fp16_scale, pad, tile_amax, uses_fp16

_ROWS, _COLUMNS, _WARPS, _STAGES = 64, 64, 4, 3  # of a tile


@triton.jit
def _maximum(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)  # as PyTorch does


@triton.jit
def _conv_relu_maxpool(
    x, w, bias, y, block_amax, amax, rows, x_lane, w_lane, bias_lane, amax_lane,
    PH: tl.constexpr, PW: tl.constexpr, CP: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    O: tl.constexpr, R: tl.constexpr, SHARE: tl.constexpr, STRIDE: tl.constexpr, RUN: tl.constexpr,
    CHUNKS: tl.constexpr, BIAS: tl.constexpr, CHANNELS_FIRST: tl.constexpr, WEIGHT_SCALE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """y[m, n] = max(0, four neighbouring outputs of `conv._conv`); a program computes one tile of y of one lane.

    m runs over (image, row of y, group of SHARE outputs), n over (pair of the group's outputs, channel). With
    CHANNELS_FIRST y is written as [B, O, OH/2, OW/2].
    """
    N: tl.constexpr = SHARE // 2 * O
    GROUPS: tl.constexpr = OW // SHARE
    Y_ROWS: tl.constexpr = OH // 2
    lane = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(2) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    # Beyond the last row and column the last one is computed again, but not stored, so loads need no mask.
    row = tl.minimum(m, rows - 1)
    image = (row // (GROUPS * Y_ROWS)).to(tl.int64)
    start = (row // GROUPS % Y_ROWS * (2 * STRIDE * PW) + row % GROUPS * (SHARE * STRIDE)) * CP
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
        else:  # after the last window the next lane begins, whose infinities and NaN must not be read
            valid_k = (step % CHUNKS * BK + k < RUN)[None, :]
            upper = tl.load(window, mask=valid_k, other=0.0)
            lower = tl.load(window + STRIDE * PW * CP, mask=valid_k, other=0.0)
        left_filters = tl.trans(tl.load(weights + step * BK))
        right_filters = tl.trans(tl.load(weights + O * (R * CHUNKS * BK) + step * BK))
        upper_left = tl.dot(upper, left_filters, upper_left)
        upper_right = tl.dot(upper, right_filters, upper_right)
        lower_left = tl.dot(lower, left_filters, lower_left)
        lower_right = tl.dot(lower, right_filters, lower_right)
    value = _maximum(_maximum(upper_left, upper_right), _maximum(lower_left, lower_right))
    value *= 1.0 / fp16_scale(tl.load(amax + lane * amax_lane)) * (1.0 / WEIGHT_SCALE)
    if BIAS:
        value += tl.load(bias + lane * bias_lane + n % O, mask=n < N, other=0.0)[None, :]
    value = tl.where(value < 0, 0.0, value)  # keeps NaN
    valid = (m < rows)[:, None] & (n < N)[None, :]
    block = (lane * tl.num_programs(0) + tl.program_id(0)) * tl.num_programs(2) + tl.program_id(2)
    tl.store(block_amax + block, tile_amax(value, valid))
    if CHANNELS_FIRST:
        pixel = (m % (GROUPS * Y_ROWS) * (SHARE // 2))[:, None] + (n // O)[None, :]
        offsets = (m // (GROUPS * Y_ROWS))[:, None].to(tl.int64) * O + (n % O)[None, :]
        offsets = offsets * (GROUPS * Y_ROWS * (SHARE // 2)) + pixel
    else:
        offsets = m[:, None].to(tl.int64) * N + n[None, :]
    tl.store(y + lane * rows * N + offsets, value, mask=valid)


def supported(outputs: int, geometry: Geometry) -> bool:
    """Whether this kernel covers a convolution: fp16, an even output size, and windows that outputs share in pairs."""
    out = geometry.out
    even = out[0] % 2 == out[1] % 2 == 0
    return (
        even and uses_fp16() and Window.of(outputs, 1, out[1], len(geometry.taps), geometry.stride).share > 1
    )


def _forward(x: Tensor, w: Tensor, bias: Tensor | None, geometry: Geometry, channels_first: bool) -> Tensor:
    """``[L, B, O, OH/2, OW/2]`` from x ``[L or 1, B, C, H, W]``, w ``[L or 1, O, C, R, R]``, bias ``[L or 1, O]``."""
    padded, w, out, stride = pad(x, geometry.layout), geometry.used_taps(w), geometry.out, geometry.stride
    _, batch, height, width, channels = padded.values.shape
    lanes, outputs, kernel = max(len(w), len(x)), w.shape[1], len(geometry.taps)
    window = Window.of(outputs, channels, out[1], kernel, stride)
    share, chunk, chunks = window.share, window.chunk, window.chunks
    packed = pack_filters(w, channels, share, stride, chunks * chunk, padded.values.dtype)
    rows, columns = batch * out[0] * out[1] // (2 * share), share // 2 * outputs
    y_height, y_width = out[0] // 2, out[1] // 2
    shape = (outputs, y_height, y_width) if channels_first else (y_height, y_width, outputs)
    y = torch.empty((lanes, batch, *shape), device=w.device)
    block_n = min(_COLUMNS, max(16, triton.next_power_of_2(columns)))
    grid = (triton.cdiv(rows, _ROWS), lanes, triton.cdiv(columns, block_n))
    block_amax = torch.empty((lanes, grid[0] * grid[2]), dtype=torch.int32, device=w.device)
    _conv_relu_maxpool[grid](
        padded.values, packed, packed if bias is None else bias.contiguous(), y, block_amax, padded.amax,
        rows, padded.lane_stride, packed.stride(0) if len(packed) > 1 else 0,
        outputs if bias is not None and len(bias) > 1 else 0, padded.amax_stride,
        PH=height, PW=width, CP=channels, OH=out[0], OW=out[1], O=outputs, R=kernel, SHARE=share, STRIDE=stride,
        RUN=window.run, CHUNKS=chunks, BIAS=bias is not None, CHANNELS_FIRST=channels_first, WEIGHT_SCALE=WEIGHT_SCALE,
        BM=_ROWS, BN=block_n, BK=chunk, num_warps=_WARPS, num_stages=_STAGES,
    )  # fmt: skip
    if channels_first:
        return y
    y = y.permute(0, 1, 4, 2, 3)
    record_amax(y, block_amax.amax(1, keepdim=True))
    return y


class _ConvReluMaxPool(NonDifferentiable):
    """max-pooling of ReLU of x * w + bias, for one lane."""

    @staticmethod
    def forward(
        x: Tensor, w: Tensor, bias: Tensor | None, geometry: Geometry, channels_first: bool
    ) -> Tensor:
        return _forward(x[None], w[None], None if bias is None else bias[None], geometry, channels_first)[0]

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], x: Tensor, w: Tensor, bias: Tensor | None, geometry: Geometry,
        channels_first: bool,
    ) -> tuple[Tensor, int]:  # fmt: skip
        x, w = (lanes_first(t, dim) for t, dim in zip((x, w), in_dims, strict=False))
        y = _forward(x, w, None if bias is None else lanes_first(bias, in_dims[2]), geometry, channels_first)
        return y.expand(info.batch_size, *y.shape[1:]), 0


def conv_relu_maxpool(
    x: Tensor, w: Tensor, bias: Tensor | None, geometry: Geometry, channels_first: bool
) -> Tensor:
    """``[B, O, OH/2, OW/2]`` from x ``[B, C, H, W]``, w ``[O, C, R, R]`` and bias ``[O]``, without a gradient.

    In memory its channels come last, or first with ``channels_first``.
    """
    return cast(Tensor, apply(_ConvReluMaxPool, x, w, bias, geometry, channels_first))
