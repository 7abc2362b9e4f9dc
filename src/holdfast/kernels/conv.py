"""Convolutions of many clients at once, as Triton kernels: the lane is one more batch dimension.

Images are first copied to zero-padded memory, channels last (frame.py). What an output needs then lies in runs of
consecutive values, one for each row of the kernel, and a convolution is a product of windows and weights without
any border: y[m, n] = Σ_k x[start(m) + k] w[n, k]. Neighbouring outputs, whose windows overlap, may share one wider
window, so that less is read: their weights are then those of one output, shifted, with zeros beside them.

Where TF32 is allowed, operands are stored in half precision: the same ten bits of mantissa at half the traffic.
Each lane's images are scaled by a power of two to the range of a half; sums are in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.kernels.amax import note_peaks
from holdfast.kernels.conv_geometry import Geometry
from holdfast.kernels.fp16_weights import halves_of
from holdfast.kernels.padded_images import Padded, halves, pad, peak, scale_to_half
from holdfast.kernels.padding_taps import begin_gradient

_PROCESSORS = 132  # of an H200
_PROGRAMS = 2 * _PROCESSORS  # of a weight gradient
_BLOCKS = 2  # of rows that one of them does at least
WEIGHT_SCALE = 256.0  # weights are small: this keeps 2.4e-7 to 255 within a half's full precision


@triton.jit
def _spread(
    w, out, w_lane, w_o, w_c, w_r, w_s,
    C: tl.constexpr, CP: tl.constexpr, O: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
    SHARE: tl.constexpr, STRIDE: tl.constexpr, RUN: tl.constexpr, FLIP: tl.constexpr,
    HALF: tl.constexpr, WEIGHT_SCALE: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """out[lane, (j, o), r, (px, c)] = w[lane, o, c, r, px - j STRIDE]: the weights of SHARE shifted outputs.

    A program does some outputs and channels of one (r, px, j), in whichever order they lie. FLIP turns the kernel
    about, for the gradient of the input.
    """
    lane = tl.program_id(2).to(tl.int64)
    place = tl.program_id(1)
    j = place % SHARE
    r = place // SHARE % R
    px = place // (SHARE * R)
    TILES: tl.constexpr = (CP + BLOCK_C - 1) // BLOCK_C
    o = tl.program_id(0) // TILES * BLOCK_O + tl.arange(0, BLOCK_O)
    c = tl.program_id(0) % TILES * BLOCK_C + tl.arange(0, BLOCK_C)
    s = px - j * STRIDE
    inside = (o < O)[:, None] & (c < C)[None, :] & (s >= 0) & (s < S)
    kept = (o < O)[:, None] & ((c < CP) & (px * CP + c < RUN))[None, :]
    out += lane * (SHARE * O * R * RUN) + ((j * O + o) * R + r)[:, None] * RUN + (px * CP + c)[None, :]
    if FLIP:
        r = R - 1 - r
        s = S - 1 - s
    value = tl.load(
        w + lane * w_lane + r * w_r + s * w_s + o[:, None] * w_o + c[None, :] * w_c, mask=inside, other=0.0
    )
    if HALF:
        value = (value * WEIGHT_SCALE).to(tl.float16)
    tl.store(out, value, mask=kept)


@triton.jit
def _windows(
    x, w, bias, y, peaks, largest, rows, x_lane, w_lane, bias_lane, each,
    PH: tl.constexpr, PW: tl.constexpr, CP: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    O: tl.constexpr, R: tl.constexpr, SHARE: tl.constexpr, STRIDE: tl.constexpr, RUN: tl.constexpr,
    CHUNKS: tl.constexpr, TURNED: tl.constexpr, BIAS: tl.constexpr, NOTED: tl.constexpr,
    HALF: tl.constexpr, WEIGHT_SCALE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """y[m, n] = Σ_k x[start(m) + k] w[n, k] (+ bias): one lane and one tile of y a program.

    m runs over (image, output row, group of SHARE outputs), n over (output of the group, channel).
    With TURNED w lies as for the convolution whose input's gradient this is, [CP, R, S, O], and is turned about here.
    """
    N: tl.constexpr = SHARE * O
    ACROSS: tl.constexpr = OW // SHARE
    lane = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(2) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    # Beyond the last row and column the last is computed again, and not stored: loads need no mask.
    row = tl.minimum(m, rows - 1)
    image = (row // (ACROSS * OH)).to(tl.int64)
    start = (row // ACROSS % OH * STRIDE * PW + row % ACROSS * (SHARE * STRIDE)) * CP
    windows = x + lane * x_lane + (image * (PH * PW * CP) + start)[:, None] + k[None, :]
    n_real = n
    if N % BN != 0:  # only then, since it hides from Triton that neighbours lie side by side
        n_real = tl.minimum(n, N - 1)
    TAPS: tl.constexpr = R * CHUNKS * BK // CP
    if TURNED:
        weights = w + lane * w_lane + k[:, None] * (TAPS * N) + n_real[None, :]
    else:
        weights = w + lane * w_lane + n_real[:, None] * (R * CHUNKS * BK) + k[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    for step in range(R * CHUNKS):
        window = windows + (step // CHUNKS * (PW * CP) + step % CHUNKS * BK)
        if RUN % BK == 0:
            a = tl.load(window)
        else:  # behind the last window lies the next lane, of which not even an infinity may be seen
            a = tl.load(window, mask=(step % CHUNKS * BK + k < RUN)[None, :], other=0.0)
        if TURNED:
            b = tl.load(weights + (step * BK % CP * TAPS + TAPS - 1 - step * BK // CP) * N)
        else:
            b = tl.trans(tl.load(weights + step * BK))
        acc = tl.dot(a, b, acc, input_precision="ieee")
    if HALF:
        acc *= 1.0 / scale_to_half(tl.load(largest + lane * each)) * (1.0 / WEIGHT_SCALE)
    if BIAS:
        acc += tl.load(bias + lane * bias_lane + n % O, mask=n < N, other=0.0)[None, :]
    real = (m < rows)[:, None] & (n < N)[None, :]
    if NOTED:
        part = (lane * tl.num_programs(0) + tl.program_id(0)) * tl.num_programs(2) + tl.program_id(2)
        tl.store(peaks + part, peak(acc, real))
    out = y + (lane * rows + m)[:, None] * N + n[None, :]
    tl.store(out, acc, mask=real)


@triton.jit(do_not_specialize=["blocks", "lanes"])
def _window_sums(
    x, dy, dw, db, x_largest, dy_largest, rows, blocks, lanes, x_lane, dy_lane, x_each, dy_each,
    PH: tl.constexpr, PW: tl.constexpr, CP: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr, DPAD: tl.constexpr, DAPART: tl.constexpr,
    OH: tl.constexpr, OW: tl.constexpr, OP: tl.constexpr, R: tl.constexpr, SHARE: tl.constexpr,
    STRIDE: tl.constexpr, CHUNKS: tl.constexpr, TOGETHER: tl.constexpr,
    FIRST: tl.constexpr, ROW: tl.constexpr, FILTER: tl.constexpr, UNSCALE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """dw[n, k] = Σ_m dy[m, n] x[start(m) + k] and db[n] = Σ_m dy[m, n], over one split of m.

    A program does TOGETHER (at most five) chunks of k, so that dy is read once for all of them. The FILTER values of
    an output n begin with FIRST that are skipped, and its rows are ROW apart. With UNSCALE the scales of halves are
    taken back here, since nothing is folded.
    """
    N: tl.constexpr = SHARE * OP
    ACROSS: tl.constexpr = OW // SHARE
    NTILES: tl.constexpr = (N + BN - 1) // BN
    part = tl.program_id(0)
    lane = tl.program_id(1).to(tl.int64)
    group = tl.program_id(2) // NTILES
    n = tl.program_id(2) % NTILES * BN + tl.arange(0, BN)
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
        m = (part * blocks + block) * BM + tl.arange(0, BM)
        row = tl.minimum(m, rows - 1)
        image = (row // (ACROSS * OH)).to(tl.int64)
        oh = row // ACROSS % OH
        ow = row % ACROSS * SHARE
        of_dy = ((image * DH + oh * DAPART + DPAD) * DW + ow * DAPART + DPAD) * OP
        real = (m < rows)[:, None] & (n < N)[None, :]
        gradient = dy + of_dy[:, None] + n[None, :]
        g = tl.load(gradient, mask=real, other=0.0)
        if group == 0:  # read anew: a g that is summed too would be overwritten while it is multiplied
            bias += tl.sum(tl.load(gradient, mask=real, other=0.0).to(tl.float32), 0)
        start = ((image * PH + oh * STRIDE) * PW + ow * STRIDE) * CP
        for chunk in tl.static_range(TOGETHER):
            # The last group may reach beyond the last chunk: it does that one again, and does not store it.
            at = tl.minimum(group * TOGETHER + chunk, R * CHUNKS - 1)
            a = tl.load(x + start[:, None] + (at // CHUNKS * (PW * CP) + at % CHUNKS * BK) + k[None, :])
            if chunk == 0:
                acc0 = tl.dot(tl.trans(g), a, acc0, input_precision="ieee")
            elif chunk == 1:
                acc1 = tl.dot(tl.trans(g), a, acc1, input_precision="ieee")
            elif chunk == 2:
                acc2 = tl.dot(tl.trans(g), a, acc2, input_precision="ieee")
            elif chunk == 3:
                acc3 = tl.dot(tl.trans(g), a, acc3, input_precision="ieee")
            else:
                acc4 = tl.dot(tl.trans(g), a, acc4, input_precision="ieee")
    unscale_dw = 1.0
    if UNSCALE:
        unscale_db = 1.0 / scale_to_half(tl.load(dy_largest + lane * dy_each))
        unscale_dw = unscale_db / scale_to_half(tl.load(x_largest + lane * x_each))
        bias *= unscale_db
    base = ((part * lanes + lane) * N + n)[:, None] * FILTER + FIRST
    for chunk in tl.static_range(TOGETHER):
        if chunk == 0:
            acc = acc0
        elif chunk == 1:
            acc = acc1
        elif chunk == 2:
            acc = acc2
        elif chunk == 3:
            acc = acc3
        else:
            acc = acc4
        at = group * TOGETHER + chunk
        place = base + at // CHUNKS * ROW + at % CHUNKS * BK + k[None, :]
        tl.store(dw + place, acc * unscale_dw, mask=(n < N)[:, None] & (at < R * CHUNKS))
    if group == 0:
        tl.store(db + (part * lanes + lane) * N + n, bias, mask=n < N)


@triton.jit(do_not_specialize=["splits", "lanes"])
def _fold(
    parts, bias_parts, dw, db, x_largest, dy_largest, splits, lanes, x_each, dy_each,
    C: tl.constexpr, CP: tl.constexpr, O: tl.constexpr, OP: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
    SHARE: tl.constexpr, STRIDE: tl.constexpr, RUN: tl.constexpr, HALF: tl.constexpr,
    KERNEL: tl.constexpr, TAP: tl.constexpr, DEEP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add up the splits, in a fixed order, and the outputs that shared a window: db, and [lanes, O, R, S, C] at
    (TAP, TAP) of dw [lanes, O, KERNEL, KERNEL, C].

    The last programs of a lane have the bias. DEEP addends are read at a time, since reading takes longest.
    """
    VALUES: tl.constexpr = O * R * S * CP
    lane = tl.program_id(1).to(tl.int64)
    dy_scale = 1.0
    if HALF:
        dy_scale = 1.0 / scale_to_half(tl.load(dy_largest + lane * dy_each))
    program = tl.program_id(0)
    if program * BLOCK >= VALUES:
        output = (program - (VALUES + BLOCK - 1) // BLOCK) * BLOCK + tl.arange(0, BLOCK)
        bias = tl.zeros((BLOCK,), tl.float32)
        for first in range(0, splits * SHARE, DEEP):
            addend = first + tl.arange(0, DEEP)
            place = (addend // SHARE * lanes + lane) * (SHARE * OP) + addend % SHARE * OP
            real = (addend < splits * SHARE)[:, None] & (output < O)[None, :]
            bias += tl.sum(tl.load(bias_parts + place[:, None] + output[None, :], mask=real, other=0.0), 0)
        tl.store(db + lane * O + output, bias * dy_scale, mask=output < O)
    else:
        at = program * BLOCK + tl.arange(0, BLOCK)  # in the order of parts, which are many times dw
        c = at % CP
        s = at // CP % S
        r = at // (CP * S) % R
        o = at // (CP * S * R)
        inside = (c < C) & (o < O)
        total = tl.zeros((BLOCK,), tl.float32)
        for first in range(0, splits * SHARE, DEEP):
            addend = first + tl.arange(0, DEEP)
            j = addend % SHARE
            n = ((addend // SHARE * lanes + lane) * SHARE + j) * OP
            place = (n * R * RUN + j * STRIDE * CP)[:, None] + ((o * R + r) * RUN + s * CP + c)[None, :]
            real = (addend < splits * SHARE)[:, None] & inside[None, :]
            total += tl.sum(tl.load(parts + place, mask=real, other=0.0), 0)
        if HALF:
            total *= dy_scale / scale_to_half(tl.load(x_largest + lane * x_each))
        place = (((lane * O + o) * KERNEL + r + TAP) * KERNEL + s + TAP) * C + c
        tl.store(dw + place, total, mask=inside)


@dataclass(frozen=True)
class Windows:
    """How images are read: neighbouring outputs ``share`` a window, so many each; its rows are a ``run`` of values."""

    share: int
    run: int

    @staticmethod
    def of(outputs: int, channels: int, across: int, kernel: int, stride: int) -> Windows:
        """Outputs share a window as long as it is read less often than it grows; ``across`` are those of a row."""
        share = 1
        while (
            halves()
            and 2 * share * outputs <= 128
            and across % (2 * share) == 0
            and 5 * (kernel + (2 * share - 1) * stride) <= 8 * kernel
        ):
            share *= 2
        return Windows(share, (kernel + (share - 1) * stride) * channels)

    @property
    def chunk(self) -> int:
        """How many of a run's values one product takes."""
        return 64 if self.run % 64 == 0 else 32 if self.run > 16 else 16

    @property
    def chunks(self) -> int:
        """How many products a run takes."""
        return -(-self.run // self.chunk)


def _tile(n: int, most: int) -> int:
    return int(min(most, max(16, triton.next_power_of_2(n))))


def _product_tiles(n: int, rows: int, lanes: int) -> tuple[int, int, int, int]:
    """Rows and columns of a tile, warps and stages, as measured fastest on an H200; ``rows`` are a lane's."""
    columns = _tile(n, 128)
    if not halves():
        return 64, columns, 4, 2
    if lanes * rows >= 128 * _PROCESSORS:
        return 128, columns, 8 if columns == 128 else 4, 3
    tiles = lanes * triton.cdiv(rows, 64)  # small ones, so that most processors have one
    while columns > 32 and 3 * tiles * triton.cdiv(n, columns) < 2 * _PROCESSORS:
        columns //= 2
    return 64, columns, 4, 3 if columns == 128 else 4


def _sum_tiles(n: int, rows: int) -> tuple[int, int, int, int]:
    """The same for the gradient of the weights: rows at a time, outputs, warps and stages."""
    return (_tile(rows, 128), _tile(n, 64), 4, 2) if halves() else (32, _tile(n, 64), 4, 1)


def _product(
    x: Padded, w: Tensor, bias: Tensor | None, out: tuple[int, int], stride: int, spread: Tensor | None,
    back: bool = False, noted: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Each lane's windows of ``x`` times its weights ``w`` [L or 1, O, C, R, S]: ``[L, B, O, *out]``.

    Also returns the weights ``spread`` as they were read, which may be given. With ``back`` w and its spread are those
    of a forward convolution, and turned about. The result's peaks are ``noted`` if asked for.
    """
    if back:
        w = w.transpose(1, 2)
    _, batch, height, width, channels = x.values.shape
    lanes = max(w.shape[0], x.values.shape[0])
    outputs, kernel = w.shape[1], (w.shape[3], w.shape[4])
    read = Windows.of(outputs, channels, out[1], kernel[1], stride)
    share, chunk, chunks = read.share, read.chunk, read.chunks
    # They can be read turned if they lack nothing, and a product takes values of one pixel alone.
    alike = spread is not None and spread.numel() == w.numel()
    turned = back and alike and share == 1 and w.shape[2] % chunk == 0
    if spread is None or (back and not turned):
        spread = spread_out(w, channels, share, stride, chunks * chunk, x.values.dtype, back)
    rows = batch * out[0] * out[1] // share
    y = torch.empty((lanes, batch, *out, outputs), dtype=torch.float32, device=w.device)
    block_m, block_n, warps, stages = _product_tiles(share * outputs, rows, lanes)
    grid = (triton.cdiv(rows, block_m), lanes, triton.cdiv(share * outputs, block_n))
    peaks = torch.empty((lanes, grid[0] * grid[2]), dtype=torch.int32, device=w.device)
    _windows[grid](
        x.values, spread, spread if bias is None else bias, y, peaks, x.largest,
        rows, x.lane, spread.stride(0) if len(spread) > 1 else 0, outputs if bias is not None and len(bias) > 1 else 0,
        x.each,
        PH=height, PW=width, CP=channels, OH=out[0], OW=out[1], O=outputs, R=kernel[0], SHARE=share, STRIDE=stride,
        RUN=read.run, CHUNKS=chunks, TURNED=turned, BIAS=bias is not None, NOTED=noted, HALF=halves(),
        WEIGHT_SCALE=WEIGHT_SCALE, BM=block_m, BN=block_n, BK=chunk, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    y = y.permute(0, 1, 4, 2, 3)
    if noted:
        note_peaks(y, peaks)
    return y, spread


def spread_out(
    w: Tensor, channels: int, share: int, stride: int, run: int, dtype: torch.dtype, back: bool = False
) -> Tensor:
    """The weights ``[L or 1, O, C, R, S]`` as `_windows` reads them, ``[L or 1, share O, R, run]``."""
    lanes, outputs, real, height, width = w.shape
    spread = torch.empty((lanes, share * outputs, height, run), dtype=dtype, device=w.device)
    block_o, block_c = _tile(outputs, 32), min(64, triton.next_power_of_2(channels))
    tiles = triton.cdiv(outputs, block_o) * triton.cdiv(channels, block_c)
    _spread[(tiles, triton.cdiv(run, channels) * height * share, lanes)](
        w, spread, *w.stride(),
        C=real, CP=channels, O=outputs, R=height, S=width, SHARE=share, STRIDE=stride,
        RUN=run, FLIP=back, HALF=halves(), WEIGHT_SCALE=WEIGHT_SCALE, BLOCK_O=block_o, BLOCK_C=block_c,
    )  # fmt: skip
    return spread


def filters(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Room for filters ``[L, O, C, R, S]``, channels last, as the kernels best read and write them."""
    lanes, outputs, channels, height, width = shape
    return torch.empty((lanes, outputs, height, width, channels), device=device).permute(0, 1, 4, 2, 3)


def halve_(halves: Tensor, w: Tensor, taps: range) -> None:
    """Make of ``halves`` [L, O, taps, taps C] those of filters ``w`` [L, O, C, R, S], as the kernels read them."""
    within = slice(taps.start, taps.stop)
    used = w[..., within, within].permute(0, 1, 3, 4, 2)
    halves.view(used.shape).copy_(used * WEIGHT_SCALE)


def forward(x: Tensor, w: Tensor, bias: Tensor | None, geometry: Geometry) -> tuple[Tensor, Padded, Tensor]:
    """Each lane's convolution of ``x`` [L or 1, B, C, H, W] with ``w`` [L or 1, O, C, R, R]: ``[L, B, O, *out]``.

    Also returns the padded images and the spread weights, which `gradients` needs.
    """
    padded = pad(x, geometry.frame)
    kept = halves_of(w, geometry.taps) if _read_as_they_lie(w, padded, geometry) else None
    y, spread = _product(padded, geometry.used(w), bias, geometry.out, geometry.stride, kept)
    return y, padded, spread


def _read_as_they_lie(w: Tensor, x: Padded, geometry: Geometry) -> bool:
    """Whether spreading filters ``w`` would but make halves of them, in the order in which they lie."""
    outputs, channels = w.shape[1:3]
    read = Windows.of(outputs, channels, geometry.out[1], len(geometry.taps), geometry.stride)
    lies_so = w.permute(0, 1, 3, 4, 2).is_contiguous() and x.values.shape[4] == channels
    return halves() and lies_so and read.share == 1 and read.run % read.chunk == 0


def gradients(
    dy: Padded, x: Padded, w: Tensor, spread: Tensor, geometry: Geometry, of_input: bool, noted: bool = False
) -> tuple[Tensor, ...]:
    """The gradients of `forward` in x (if wanted, its peaks ``noted`` or not), w and bias; dy lies in its
    `Geometry.frame_of_gradient`."""
    dw, db = _weight_gradient(x, dy, (w.shape[1], w.shape[2]), geometry, of_input)
    if not of_input:
        return dw, db
    dx, _ = _product(dy, geometry.used(w), None, geometry.size, 1, spread, True, noted)
    return dx, dw, db


def _weight_gradient(
    x: Padded, dy: Padded, shape: tuple[int, int], geometry: Geometry, of_input: bool
) -> tuple[Tensor, Tensor]:
    """The gradients in w and bias; ``shape`` are a filter's outputs and channels."""
    out, stride, frame = geometry.out, geometry.stride, geometry.frame_of_gradient(of_input)
    outputs, channels = shape
    height = width = len(geometry.taps)
    lanes, batch = dy.values.shape[:2]
    device = dy.values.device
    padded_outputs, padded_inputs = dy.values.shape[4], x.values.shape[4]
    share = 1
    while (  # outputs share a window as long as it fits in one chunk
        halves()
        and stride == 1
        and 2 * share * padded_outputs <= 128
        and out[1] % (2 * share) == 0
        and (width + 2 * share - 1) * padded_inputs <= 32
    ):
        share *= 2
    run = (width + share - 1) * padded_inputs
    chunk = 32 if run > 16 else 16
    chunks = triton.cdiv(run, chunk)
    groups = triton.cdiv(height * chunks, 5)
    together = triton.cdiv(height * chunks, groups)
    n, rows = share * padded_outputs, batch * out[0] * out[1] // share
    block_m, block_n, warps, stages = _sum_tiles(n, rows)
    jobs = groups * triton.cdiv(n, block_n)
    splits = max(1, min(triton.cdiv(rows, _BLOCKS * block_m), triton.cdiv(_PROGRAMS, jobs * lanes)))
    blocks = triton.cdiv(rows, splits * block_m)  # of block_m rows in a split
    splits = triton.cdiv(rows, blocks * block_m)
    dw = filters((lanes, *shape, geometry.kernel, geometry.kernel), device)
    db = torch.empty((lanes, outputs), device=device)
    if width < geometry.kernel:  # the rest of the kernel has no gradient
        begin_gradient(dw, geometry.taps)
    # With one split, no window shared and no channel added, the sums are the gradients already.
    whole = splits == share == 1 and n == outputs and chunks * chunk == width * channels
    parts, bias_parts, row = dw, db, geometry.kernel * channels
    if not whole:
        parts = torch.empty((splits, lanes, n, height, chunks * chunk), device=device)
        bias_parts, row = torch.empty((splits, lanes, n), device=device), chunks * chunk
    _window_sums[(splits, lanes, jobs)](
        x.values, dy.values, parts, bias_parts, x.largest, dy.largest, rows, blocks, lanes, x.lane, dy.lane,
        x.each, dy.each,
        PH=x.values.shape[2], PW=x.values.shape[3], CP=padded_inputs,
        DH=dy.values.shape[2], DW=dy.values.shape[3], DPAD=frame.before, DAPART=frame.apart,
        OH=out[0], OW=out[1], OP=padded_outputs, R=height, SHARE=share, STRIDE=stride,
        CHUNKS=chunks, TOGETHER=together, FIRST=geometry.taps.start * (row + channels) if whole else 0, ROW=row,
        FILTER=row * (geometry.kernel if whole else height), UNSCALE=whole and halves(),
        BM=block_m, BN=block_n, BK=chunk, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if whole:
        return dw, db
    deep = min(128, triton.next_power_of_2(splits * share))
    block = max(32, 1024 // deep)
    values = outputs * height * width * padded_inputs
    _fold[(triton.cdiv(values, block) + triton.cdiv(outputs, block), lanes)](
        parts, bias_parts, dw, db, x.largest, dy.largest, splits, lanes, x.each, dy.each,
        C=channels, CP=padded_inputs, O=outputs, OP=padded_outputs, R=height, S=width,
        SHARE=share, STRIDE=stride, RUN=chunks * chunk, HALF=halves(),
        KERNEL=geometry.kernel, TAP=geometry.taps.start, DEEP=deep, BLOCK=block,
    )  # fmt: skip
    return dw, db
