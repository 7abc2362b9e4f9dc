"""Convolutions of all lanes, and their gradients, as implicit matrix products.

Images are first copied to zero-padded, channels-last memory (see `padded_images`). The window of an output is the set
of values on which it depends: one run of consecutive values for each row of the kernel. A convolution is then a product
of windows and filters without a border case: y[m, n] = Σ_k x[start(m) + k] w[n, k]. Windows of neighbouring outputs
overlap. To read less memory, these outputs may share one wider window; the filters are then repeated for each output,
shifted and filled up with zeros. Filters in this layout are called packed.

If TF32 is allowed, operands are stored in fp16, which has the same ten bits of mantissa and half the memory traffic.
The images of each lane are scaled by a power of two to the range of fp16; sums are computed in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.kernels.amax import record_amax
from holdfast.kernels.conv_geometry import Geometry
from holdfast.kernels.fp16_weights import find_fp16_copy
from holdfast.kernels.padded_images import Padded, fp16_scale, pad, tile_amax, uses_fp16
from holdfast.kernels.padding_taps import prepare_gradient

_PROCESSORS = 132  # of an H200
_WEIGHT_GRAD_PROGRAMS = 2 * _PROCESSORS
_MIN_BLOCKS = 2  # of rows, for a program of the weight gradient
WEIGHT_SCALE = 256.0  # weights are small: this keeps 2.4e-7 to 255 within fp16's full precision


@triton.jit
def _pack_filters(
    w, out, stride_lane, stride_o, stride_c, stride_r, stride_s,
    C: tl.constexpr, CP: tl.constexpr, O: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
    SHARE: tl.constexpr, STRIDE: tl.constexpr, RUN: tl.constexpr, FLIP: tl.constexpr,
    FP16: tl.constexpr, WEIGHT_SCALE: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """out[lane, (j, o), r, (px, c)] = w[lane, o, c, r, px - j STRIDE]: the filters, shifted for SHARE outputs.

    A program packs some outputs and channels of one (r, px, j), whatever the strides of w. FLIP rotates the kernel by
    180 degrees, for the gradient of the input.
    """
    lane = tl.program_id(2).to(tl.int64)
    index = tl.program_id(1)
    j = index % SHARE
    r = index // SHARE % R
    px = index // (SHARE * R)
    TILES: tl.constexpr = (CP + BLOCK_C - 1) // BLOCK_C
    o = tl.program_id(0) // TILES * BLOCK_O + tl.arange(0, BLOCK_O)
    c = tl.program_id(0) % TILES * BLOCK_C + tl.arange(0, BLOCK_C)
    s = px - j * STRIDE
    valid_w = (o < O)[:, None] & (c < C)[None, :] & (s >= 0) & (s < S)
    valid_out = (o < O)[:, None] & ((c < CP) & (px * CP + c < RUN))[None, :]
    out += lane * (SHARE * O * R * RUN) + ((j * O + o) * R + r)[:, None] * RUN + (px * CP + c)[None, :]
    if FLIP:
        r = R - 1 - r
        s = S - 1 - s
    value = tl.load(
        w + lane * stride_lane + r * stride_r + s * stride_s + o[:, None] * stride_o + c[None, :] * stride_c,
        mask=valid_w,
        other=0.0,
    )
    if FP16:
        value = (value * WEIGHT_SCALE).to(tl.float16)
    tl.store(out, value, mask=valid_out)


@triton.jit
def _conv(
    x, w, bias, y, block_amax, amax, rows, x_lane, w_lane, bias_lane, amax_lane,
    PH: tl.constexpr, PW: tl.constexpr, CP: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    O: tl.constexpr, R: tl.constexpr, SHARE: tl.constexpr, STRIDE: tl.constexpr, RUN: tl.constexpr,
    CHUNKS: tl.constexpr, TRANSPOSED: tl.constexpr, BIAS: tl.constexpr, STORE_AMAX: tl.constexpr,
    FP16: tl.constexpr, WEIGHT_SCALE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """y[m, n] = Σ_k x[start(m) + k] w[n, k] (+ bias); a program computes one tile of y of one lane.

    m runs over (image, output row, group of SHARE outputs), n over (output of the group, channel).
    With TRANSPOSED the kernel computes the gradient of the input of a convolution: w is packed for that convolution,
    [CP, R, S, O], and is transposed and flipped while it is read.
    """
    N: tl.constexpr = SHARE * O
    GROUPS: tl.constexpr = OW // SHARE
    lane = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(2) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    # Beyond the last row and column the last one is computed again, but not stored, so loads need no mask.
    row = tl.minimum(m, rows - 1)
    image = (row // (GROUPS * OH)).to(tl.int64)
    start = (row // GROUPS % OH * STRIDE * PW + row % GROUPS * (SHARE * STRIDE)) * CP
    windows = x + lane * x_lane + (image * (PH * PW * CP) + start)[:, None] + k[None, :]
    column = n
    if N % BN != 0:  # only then, because it prevents Triton from recognising contiguous columns
        column = tl.minimum(n, N - 1)
    TAPS: tl.constexpr = R * CHUNKS * BK // CP
    if TRANSPOSED:
        weights = w + lane * w_lane + k[:, None] * (TAPS * N) + column[None, :]
    else:
        weights = w + lane * w_lane + column[:, None] * (R * CHUNKS * BK) + k[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    for step in range(R * CHUNKS):
        window = windows + (step // CHUNKS * (PW * CP) + step % CHUNKS * BK)
        if RUN % BK == 0:
            a = tl.load(window)
        else:  # after the last window the next lane begins, whose infinities and NaN must not be read
            a = tl.load(window, mask=(step % CHUNKS * BK + k < RUN)[None, :], other=0.0)
        if TRANSPOSED:
            b = tl.load(weights + (step * BK % CP * TAPS + TAPS - 1 - step * BK // CP) * N)
        else:
            b = tl.trans(tl.load(weights + step * BK))
        acc = tl.dot(a, b, acc, input_precision="ieee")
    if FP16:
        acc *= 1.0 / fp16_scale(tl.load(amax + lane * amax_lane)) * (1.0 / WEIGHT_SCALE)
    if BIAS:
        acc += tl.load(bias + lane * bias_lane + n % O, mask=n < N, other=0.0)[None, :]
    valid = (m < rows)[:, None] & (n < N)[None, :]
    if STORE_AMAX:
        block = (lane * tl.num_programs(0) + tl.program_id(0)) * tl.num_programs(2) + tl.program_id(2)
        tl.store(block_amax + block, tile_amax(acc, valid))
    out = y + (lane * rows + m)[:, None] * N + n[None, :]
    tl.store(out, acc, mask=valid)


@triton.jit(do_not_specialize=["blocks", "lanes"])
def _conv_weight_grad(
    x, dy, dw, db, x_amax, dy_amax, rows, blocks, lanes, x_lane, dy_lane, x_amax_lane, dy_amax_lane,
    PH: tl.constexpr, PW: tl.constexpr, CP: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr, DY_ZEROS: tl.constexpr, DY_DILATION: tl.constexpr,
    OH: tl.constexpr, OW: tl.constexpr, OP: tl.constexpr, R: tl.constexpr, SHARE: tl.constexpr,
    STRIDE: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_PER_PROGRAM: tl.constexpr,
    FIRST: tl.constexpr, ROW: tl.constexpr, FILTER: tl.constexpr, UNSCALE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """dw[n, k] = Σ_m dy[m, n] x[start(m) + k] and db[n] = Σ_m dy[m, n], over one split of m.

    A program computes CHUNKS_PER_PROGRAM (at most five) chunks of k, so that dy is read once for all of them. An
    output n has FILTER values in dw, of which the first FIRST are skipped, and rows that are ROW apart. With UNSCALE
    the fp16 scales are reverted here, because `_reduce_weight_grad`, which otherwise does this, is not launched.
    """
    N: tl.constexpr = SHARE * OP
    GROUPS: tl.constexpr = OW // SHARE
    N_TILES: tl.constexpr = (N + BN - 1) // BN
    split = tl.program_id(0)
    lane = tl.program_id(1).to(tl.int64)
    chunk_group = tl.program_id(2) // N_TILES
    n = tl.program_id(2) % N_TILES * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    x += lane * x_lane
    dy += lane * dy_lane
    acc0 = tl.zeros((BN, BK), tl.float32)
    acc1 = tl.zeros((BN, BK), tl.float32)
    acc2 = tl.zeros((BN, BK), tl.float32)
    acc3 = tl.zeros((BN, BK), tl.float32)
    acc4 = tl.zeros((BN, BK), tl.float32)
    bias = tl.zeros((BN,), tl.float32)
    for block in range(blocks):
        m = (split * blocks + block) * BM + tl.arange(0, BM)
        row = tl.minimum(m, rows - 1)
        image = (row // (GROUPS * OH)).to(tl.int64)
        oh = row // GROUPS % OH
        ow = row % GROUPS * SHARE
        dy_start = ((image * DH + oh * DY_DILATION + DY_ZEROS) * DW + ow * DY_DILATION + DY_ZEROS) * OP
        valid = (m < rows)[:, None] & (n < N)[None, :]
        gradient = dy + dy_start[:, None] + n[None, :]
        g = tl.load(gradient, mask=valid, other=0.0)
        if (
            chunk_group == 0
        ):  # loaded again: a g that is also summed would be overwritten while it is multiplied
            bias += tl.sum(tl.load(gradient, mask=valid, other=0.0).to(tl.float32), 0)
        start = ((image * PH + oh * STRIDE) * PW + ow * STRIDE) * CP
        for i in tl.static_range(CHUNKS_PER_PROGRAM):
            # Beyond the last chunk the last one is computed again, but not stored.
            chunk = tl.minimum(chunk_group * CHUNKS_PER_PROGRAM + i, R * CHUNKS - 1)
            a = tl.load(x + start[:, None] + (chunk // CHUNKS * (PW * CP) + chunk % CHUNKS * BK) + k[None, :])
            if i == 0:
                acc0 = tl.dot(tl.trans(g), a, acc0, input_precision="ieee")
            elif i == 1:
                acc1 = tl.dot(tl.trans(g), a, acc1, input_precision="ieee")
            elif i == 2:
                acc2 = tl.dot(tl.trans(g), a, acc2, input_precision="ieee")
            elif i == 3:
                acc3 = tl.dot(tl.trans(g), a, acc3, input_precision="ieee")
            else:
                acc4 = tl.dot(tl.trans(g), a, acc4, input_precision="ieee")
    dw_unscale = 1.0
    if UNSCALE:
        db_unscale = 1.0 / fp16_scale(tl.load(dy_amax + lane * dy_amax_lane))
        dw_unscale = db_unscale / fp16_scale(tl.load(x_amax + lane * x_amax_lane))
        bias *= db_unscale
    base = ((split * lanes + lane) * N + n)[:, None] * FILTER + FIRST
    for i in tl.static_range(CHUNKS_PER_PROGRAM):
        if i == 0:
            acc = acc0
        elif i == 1:
            acc = acc1
        elif i == 2:
            acc = acc2
        elif i == 3:
            acc = acc3
        else:
            acc = acc4
        chunk = chunk_group * CHUNKS_PER_PROGRAM + i
        offsets = base + chunk // CHUNKS * ROW + chunk % CHUNKS * BK + k[None, :]
        tl.store(dw + offsets, acc * dw_unscale, mask=(n < N)[:, None] & (chunk < R * CHUNKS))
    if chunk_group == 0:
        tl.store(db + (split * lanes + lane) * N + n, bias, mask=n < N)


@triton.jit(do_not_specialize=["splits", "lanes"])
def _reduce_weight_grad(
    dw_splits, db_splits, dw, db, x_amax, dy_amax, splits, lanes, x_amax_lane, dy_amax_lane,
    C: tl.constexpr, CP: tl.constexpr, O: tl.constexpr, OP: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
    SHARE: tl.constexpr, STRIDE: tl.constexpr, RUN: tl.constexpr, FP16: tl.constexpr,
    KERNEL: tl.constexpr, TAP: tl.constexpr, TERMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum the splits, in a fixed order, and the outputs that share a window: db, and [lanes, O, R, S, C] at (TAP, TAP)
    of dw [lanes, O, KERNEL, KERNEL, C].

    The last programs of a lane compute db. TERMS terms of a sum are loaded at a time, since loading takes longest.
    """
    VALUES: tl.constexpr = O * R * S * CP
    lane = tl.program_id(1).to(tl.int64)
    dy_unscale = 1.0
    if FP16:
        dy_unscale = 1.0 / fp16_scale(tl.load(dy_amax + lane * dy_amax_lane))
    program = tl.program_id(0)
    if program * BLOCK >= VALUES:
        output = (program - (VALUES + BLOCK - 1) // BLOCK) * BLOCK + tl.arange(0, BLOCK)
        bias = tl.zeros((BLOCK,), tl.float32)
        for first in range(0, splits * SHARE, TERMS):
            term = first + tl.arange(0, TERMS)
            offsets = (term // SHARE * lanes + lane) * (SHARE * OP) + term % SHARE * OP
            valid = (term < splits * SHARE)[:, None] & (output < O)[None, :]
            bias += tl.sum(tl.load(db_splits + offsets[:, None] + output[None, :], mask=valid, other=0.0), 0)
        tl.store(db + lane * O + output, bias * dy_unscale, mask=output < O)
    else:
        index = program * BLOCK + tl.arange(
            0, BLOCK
        )  # in the order of dw_splits, which is many times as large as dw
        c = index % CP
        s = index // CP % S
        r = index // (CP * S) % R
        o = index // (CP * S * R)
        valid_w = (c < C) & (o < O)
        total = tl.zeros((BLOCK,), tl.float32)
        for first in range(0, splits * SHARE, TERMS):
            term = first + tl.arange(0, TERMS)
            j = term % SHARE
            n = ((term // SHARE * lanes + lane) * SHARE + j) * OP
            offsets = (n * R * RUN + j * STRIDE * CP)[:, None] + ((o * R + r) * RUN + s * CP + c)[None, :]
            valid = (term < splits * SHARE)[:, None] & valid_w[None, :]
            total += tl.sum(tl.load(dw_splits + offsets, mask=valid, other=0.0), 0)
        if FP16:
            total *= dy_unscale / fp16_scale(tl.load(x_amax + lane * x_amax_lane))
        offsets = (((lane * O + o) * KERNEL + r + TAP) * KERNEL + s + TAP) * C + c
        tl.store(dw + offsets, total, mask=valid_w)


@dataclass(frozen=True)
class Window:
    """The values that ``share`` neighbouring outputs depend on: a ``run`` of consecutive values per kernel row."""

    share: int
    run: int

    @staticmethod
    def of(outputs: int, channels: int, out_width: int, kernel: int, stride: int) -> Window:
        """The widest window for which sharing saves more reads than its width adds."""
        share = 1
        while (
            uses_fp16()
            and 2 * share * outputs <= 128
            and out_width % (2 * share) == 0
            and 5 * (kernel + (2 * share - 1) * stride) <= 8 * kernel
        ):
            share *= 2
        return Window(share, (kernel + (share - 1) * stride) * channels)

    @property
    def chunk(self) -> int:
        """The number of values of a run in one product."""
        return 64 if self.run % 64 == 0 else 32 if self.run > 16 else 16

    @property
    def chunks(self) -> int:
        """The number of products of a run."""
        return -(-self.run // self.chunk)


def _block_size(n: int, largest: int) -> int:
    return int(min(largest, max(16, triton.next_power_of_2(n))))


def _conv_tiles(n: int, rows: int, lanes: int) -> tuple[int, int, int, int]:
    """Rows and columns of a tile, warps and stages: the fastest ones on an H200; a lane has ``rows`` rows."""
    columns = _block_size(n, 128)
    if not uses_fp16():
        return 64, columns, 4, 2
    if lanes * rows >= 128 * _PROCESSORS:
        return 128, columns, 8 if columns == 128 else 4, 3
    tiles = lanes * triton.cdiv(rows, 64)  # small tiles, so that most processors have one
    while columns > 32 and 3 * tiles * triton.cdiv(n, columns) < 2 * _PROCESSORS:
        columns //= 2
    return 64, columns, 4, 3 if columns == 128 else 4


def _weight_grad_tiles(n: int, rows: int) -> tuple[int, int, int, int]:
    """The same for the gradient of the weights: rows at a time, outputs, warps and stages."""
    if uses_fp16():
        return _block_size(rows, 128), _block_size(n, 64), 4, 2
    return 32, _block_size(n, 64), 4, 1


def _launch_conv(
    x: Padded, w: Tensor, bias: Tensor | None, out: tuple[int, int], stride: int, packed: Tensor | None,
    transposed: bool = False, stores_amax: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The convolution of each lane of ``x`` with filters ``w`` [L or 1, O, C, R, S], and the packed filters.

    The result is ``[L, B, O, *out]``. The filters may be given ``packed`` already. With ``transposed`` the
    result is the gradient of the input of a convolution with filters w. ``stores_amax``: the result's amax is recorded.
    """
    if transposed:
        w = w.transpose(1, 2)
    _, batch, height, width, channels = x.values.shape
    lanes = max(w.shape[0], x.values.shape[0])
    outputs, kernel = w.shape[1], (w.shape[3], w.shape[4])
    window = Window.of(outputs, channels, out[1], kernel[1], stride)
    share, chunk, chunks = window.share, window.chunk, window.chunks
    # The kernel can read the forward filters transposed if packing added no zeros and a chunk is within one pixel.
    unpadded = packed is not None and packed.numel() == w.numel()
    reads_transposed = transposed and unpadded and share == 1 and w.shape[2] % chunk == 0
    if packed is None or (transposed and not reads_transposed):
        packed = pack_filters(w, channels, share, stride, chunks * chunk, x.values.dtype, transposed)
    rows = batch * out[0] * out[1] // share
    y = torch.empty((lanes, batch, *out, outputs), dtype=torch.float32, device=w.device)
    block_m, block_n, warps, stages = _conv_tiles(share * outputs, rows, lanes)
    grid = (triton.cdiv(rows, block_m), lanes, triton.cdiv(share * outputs, block_n))
    block_amax = torch.empty((lanes, grid[0] * grid[2]), dtype=torch.int32, device=w.device)
    _conv[grid](
        x.values, packed, packed if bias is None else bias, y, block_amax, x.amax,
        rows, x.lane_stride, packed.stride(0) if len(packed) > 1 else 0,
        outputs if bias is not None and len(bias) > 1 else 0, x.amax_stride,
        PH=height, PW=width, CP=channels, OH=out[0], OW=out[1], O=outputs, R=kernel[0], SHARE=share, STRIDE=stride,
        RUN=window.run, CHUNKS=chunks, TRANSPOSED=reads_transposed, BIAS=bias is not None, STORE_AMAX=stores_amax,
        FP16=uses_fp16(), WEIGHT_SCALE=WEIGHT_SCALE, BM=block_m, BN=block_n, BK=chunk,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    y = y.permute(0, 1, 4, 2, 3)
    if stores_amax:
        record_amax(y, block_amax)
    return y, packed


def pack_filters(
    w: Tensor, channels: int, share: int, stride: int, run: int, dtype: torch.dtype, flip: bool = False
) -> Tensor:
    """The filters ``[L or 1, O, C, R, S]`` as `_conv` reads them, ``[L or 1, share O, R, run]``."""
    lanes, outputs, filter_channels, height, width = w.shape
    packed = torch.empty((lanes, share * outputs, height, run), dtype=dtype, device=w.device)
    block_o, block_c = _block_size(outputs, 32), min(64, triton.next_power_of_2(channels))
    tiles = triton.cdiv(outputs, block_o) * triton.cdiv(channels, block_c)
    _pack_filters[(tiles, triton.cdiv(run, channels) * height * share, lanes)](
        w, packed, *w.stride(),
        C=filter_channels, CP=channels, O=outputs, R=height, S=width, SHARE=share, STRIDE=stride,
        RUN=run, FLIP=flip, FP16=uses_fp16(), WEIGHT_SCALE=WEIGHT_SCALE, BLOCK_O=block_o, BLOCK_C=block_c,
    )  # fmt: skip
    return packed


def empty_filters(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Uninitialised filters ``[L, O, C, R, S]``, channels last in memory, the fastest layout for the kernels."""
    lanes, outputs, channels, height, width = shape
    return torch.empty((lanes, outputs, height, width, channels), device=device).permute(0, 1, 4, 2, 3)


def copy_to_fp16_(copy: Tensor, w: Tensor, taps: range) -> None:
    """Write filters ``w`` [L, O, C, R, S] at ``taps`` to an fp16 copy [L, O, taps, taps C], as the kernels read it."""
    within = slice(taps.start, taps.stop)
    used = w[..., within, within].permute(0, 1, 3, 4, 2)
    copy.view(used.shape).copy_(used * WEIGHT_SCALE)


def forward(x: Tensor, w: Tensor, bias: Tensor | None, geometry: Geometry) -> tuple[Tensor, Padded, Tensor]:
    """Each lane's convolution of ``x`` [L or 1, B, C, H, W] with ``w`` [L or 1, O, C, R, R]: ``[L, B, O, *out]``.

    Also returns the padded images and the packed filters, which `backward` takes.
    """
    padded = pad(x, geometry.layout)
    fp16_copy = find_fp16_copy(w, geometry.taps) if _packing_is_a_cast(w, padded, geometry) else None
    y, packed = _launch_conv(padded, geometry.used_taps(w), bias, geometry.out, geometry.stride, fp16_copy)
    return y, padded, packed


def _packing_is_a_cast(w: Tensor, x: Padded, geometry: Geometry) -> bool:
    """Whether packing filters ``w`` only casts them to fp16 and keeps their order in memory."""
    outputs, channels = w.shape[1:3]
    window = Window.of(outputs, channels, geometry.out[1], len(geometry.taps), geometry.stride)
    same_order = w.permute(0, 1, 3, 4, 2).is_contiguous() and x.values.shape[4] == channels
    return uses_fp16() and same_order and window.share == 1 and window.run % window.chunk == 0


def backward(
    dy: Padded,
    x: Padded,
    w: Tensor,
    packed: Tensor,
    geometry: Geometry,
    needs_dx: bool,
    stores_amax: bool = False,
) -> tuple[Tensor, ...]:
    """The gradients of `forward` with respect to x (if ``needs_dx``), w and bias.

    dy is in `Geometry.gradient_layout`. ``stores_amax``: the amax of dx is recorded.
    """
    dw, db = _weight_grad(x, dy, (w.shape[1], w.shape[2]), geometry, needs_dx)
    if not needs_dx:
        return dw, db
    dx, _ = _launch_conv(dy, geometry.used_taps(w), None, geometry.size, 1, packed, True, stores_amax)
    return dx, dw, db


def _weight_grad(
    x: Padded, dy: Padded, shape: tuple[int, int], geometry: Geometry, needs_dx: bool
) -> tuple[Tensor, Tensor]:
    """The gradients of w and bias; ``shape`` is (outputs, channels) of the filters."""
    out, stride, layout = geometry.out, geometry.stride, geometry.gradient_layout(needs_dx)
    outputs, channels = shape
    height = width = len(geometry.taps)
    lanes, batch = dy.values.shape[:2]
    device = dy.values.device
    padded_outputs, padded_inputs = dy.values.shape[4], x.values.shape[4]
    share = 1
    while (  # outputs share a window as long as it fits in one chunk
        uses_fp16()
        and stride == 1
        and 2 * share * padded_outputs <= 128
        and out[1] % (2 * share) == 0
        and (width + 2 * share - 1) * padded_inputs <= 32
    ):
        share *= 2
    run = (width + share - 1) * padded_inputs
    chunk = 32 if run > 16 else 16
    chunks = triton.cdiv(run, chunk)
    chunk_groups = triton.cdiv(height * chunks, 5)
    chunks_per_program = triton.cdiv(height * chunks, chunk_groups)
    n, rows = share * padded_outputs, batch * out[0] * out[1] // share
    block_m, block_n, warps, stages = _weight_grad_tiles(n, rows)
    programs = chunk_groups * triton.cdiv(n, block_n)  # of a lane and split
    most_splits = triton.cdiv(rows, _MIN_BLOCKS * block_m)
    splits = max(1, min(most_splits, triton.cdiv(_WEIGHT_GRAD_PROGRAMS, programs * lanes)))
    blocks = triton.cdiv(rows, splits * block_m)  # of block_m rows in a split
    splits = triton.cdiv(rows, blocks * block_m)
    dw = empty_filters((lanes, *shape, geometry.kernel, geometry.kernel), device)
    db = torch.empty((lanes, outputs), device=device)
    if width < geometry.kernel:  # the padding taps have no gradient
        prepare_gradient(dw, geometry.taps)
    # With one split, no shared windows and no padded channels, the kernel's sums are the gradients themselves.
    direct = splits == share == 1 and n == outputs and chunks * chunk == width * channels
    dw_splits, db_splits, row = dw, db, geometry.kernel * channels
    if not direct:
        dw_splits = torch.empty((splits, lanes, n, height, chunks * chunk), device=device)
        db_splits, row = torch.empty((splits, lanes, n), device=device), chunks * chunk
    _conv_weight_grad[(splits, lanes, programs)](
        x.values, dy.values, dw_splits, db_splits, x.amax, dy.amax, rows, blocks, lanes, x.lane_stride, dy.lane_stride,
        x.amax_stride, dy.amax_stride,
        PH=x.values.shape[2], PW=x.values.shape[3], CP=padded_inputs,
        DH=dy.values.shape[2], DW=dy.values.shape[3], DY_ZEROS=layout.zeros_before, DY_DILATION=layout.dilation,
        OH=out[0], OW=out[1], OP=padded_outputs, R=height, SHARE=share, STRIDE=stride,
        CHUNKS=chunks, CHUNKS_PER_PROGRAM=chunks_per_program,
        FIRST=geometry.taps.start * (row + channels) if direct else 0, ROW=row,
        FILTER=row * (geometry.kernel if direct else height), UNSCALE=direct and uses_fp16(),
        BM=block_m, BN=block_n, BK=chunk, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if direct:
        return dw, db
    terms = min(128, triton.next_power_of_2(splits * share))
    block = max(32, 1024 // terms)
    values = outputs * height * width * padded_inputs
    _reduce_weight_grad[(triton.cdiv(values, block) + triton.cdiv(outputs, block), lanes)](
        dw_splits, db_splits, dw, db, x.amax, dy.amax, splits, lanes, x.amax_stride, dy.amax_stride,
        C=channels, CP=padded_inputs, O=outputs, OP=padded_outputs, R=height, S=width,
        SHARE=share, STRIDE=stride, RUN=chunks * chunk, FP16=uses_fp16(),
        KERNEL=geometry.kernel, TAP=geometry.taps.start, TERMS=terms, BLOCK=block,
    )  # fmt: skip
    return dw, db
