"""Convolutions of many clients at once, as Triton kernels: the lane is one more batch dimension.

Each kernel is an implicit matrix product over images that lie channels last, ``[lanes, B, H, W, C]``, and weights
``[lanes, O, R, S, C]``. cuDNN's grouped convolutions, which ``vmap`` would use, are several times slower here.
The reduction runs over chunks of the S*C neighbouring values of a kernel row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _correlate(
    x, w, bias, y,
    rows, H, W, OH, OW, stride, pad,
    x_lane, x_b, x_h, x_w, x_c,
    C: tl.constexpr, O: tl.constexpr, R: tl.constexpr, S: tl.constexpr, BACK: tl.constexpr,
    ALIGNED: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """y[m, o] = Σ_{r,s,c} x[at(m, r, s), c] w[o, r, s, c] (+ bias[o]): one lane and one tile of y a program.

    m runs over (image, output row, output column). Forwards at = m * stride + (r, s) - pad; backwards (BACK, for
    the gradient of the input) at = (m + pad - (r, s)) / stride, where that is whole.
    """
    lane = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(2) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    ow = m % OW
    oh = (m // OW) % OH
    image = (m // (OW * OH)).to(tl.int64)
    x += lane * x_lane
    w += lane * (O * R * S * C)
    CHUNKS: tl.constexpr = (S * C + BK - 1) // BK
    acc = tl.zeros((BM, BN), tl.float32)
    for step in range(R * CHUNKS):
        r = step // CHUNKS
        first = (step % CHUNKS) * BK
        if BACK:
            ih = oh + pad - r
            in_row = (ih >= 0) & (ih % stride == 0)
            ih = ih // stride
        else:
            ih = oh * stride + r - pad
            in_row = ih >= 0
        in_row = in_row & (ih < H) & (m < rows)
        line = image * x_b + ih * x_h
        of_weight = n[:, None] * (R * S * C) + (r * S * C + first + k)[None, :]
        if ALIGNED:
            s = first // C
            if BACK:
                iw = ow + pad - s
                inside = in_row & (iw >= 0) & (iw % stride == 0)
                iw = iw // stride
            else:
                iw = ow * stride + s - pad
                inside = in_row & (iw >= 0)
            inside = inside & (iw < W)
            at = (line + iw * x_w)[:, None] + (first % C + k)[None, :]
            a = tl.load(x + at, mask=inside[:, None], other=0.0)
            b = tl.load(w + of_weight, mask=(n < O)[:, None], other=0.0)
        else:
            sc = first + k
            if BACK:
                iw = ow[:, None] + pad - (sc // C)[None, :]
                inside = in_row[:, None] & (iw >= 0) & (iw % stride == 0)
                iw = iw // stride
            else:
                iw = ow[:, None] * stride + (sc // C)[None, :] - pad
                inside = in_row[:, None] & (iw >= 0)
            inside = inside & (iw < W) & (sc < S * C)[None, :]
            at = line[:, None] + iw * x_w + (sc % C)[None, :] * x_c
            a = tl.load(x + at, mask=inside, other=0.0)
            b = tl.load(w + of_weight, mask=(n < O)[:, None] & (sc < S * C)[None, :], other=0.0)
        acc = tl.dot(a, tl.trans(b), acc, input_precision=PRECISION)
    if BIAS:
        acc += tl.load(bias + lane * O + n, mask=n < O, other=0.0)[None, :]
    out = y + (lane * rows + m)[:, None] * O + n[None, :]
    tl.store(out, acc, mask=(m < rows)[:, None] & (n < O)[None, :])


@triton.jit
def _weight_gradient(
    x, dy, dw, db,
    rows, lanes, H, W, OH, OW, stride, pad,
    x_lane, x_b, x_h, x_w, x_c,
    C: tl.constexpr, O: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
    ALIGNED: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BO: tl.constexpr, BK: tl.constexpr, CHUNKS: tl.constexpr, GROUPS: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """dw[o, r, s, c] = Σ_m dy[m, o] x[at(m, r, s), c] and db[o] = Σ_m dy[m, o] over one split of m.

    A program does one lane, one kernel row r and up to five chunks of (s, c), so that dy is read once for all of
    them; the splits' sums are added up afterwards, in a fixed order.
    """
    part = tl.program_id(0)
    lane = tl.program_id(1).to(tl.int64)
    OBLOCKS: tl.constexpr = (O + BO - 1) // BO
    job = tl.program_id(2)
    r = job // (GROUPS * OBLOCKS)
    group = (job // OBLOCKS) % GROUPS
    o = (job % OBLOCKS) * BO + tl.arange(0, BO)
    k = tl.arange(0, BK)
    x += lane * x_lane
    acc0 = tl.zeros((BO, BK), tl.float32)
    acc1 = tl.zeros((BO, BK), tl.float32)
    acc2 = tl.zeros((BO, BK), tl.float32)
    acc3 = tl.zeros((BO, BK), tl.float32)
    acc4 = tl.zeros((BO, BK), tl.float32)
    bias = tl.zeros((BO,), tl.float32)
    for block in range(BLOCKS):
        m = (part * BLOCKS + block) * BM + tl.arange(0, BM)
        here = m < rows
        ow = m % OW
        oh = (m // OW) % OH
        image = (m // (OW * OH)).to(tl.int64)
        of_gradient = (lane * rows + m)[:, None] * O + o[None, :]
        g = tl.trans(tl.load(dy + of_gradient, mask=here[:, None] & (o < O)[None, :], other=0.0))
        bias += tl.sum(g, 1)
        ih = oh * stride + r - pad
        in_row = here & (ih >= 0) & (ih < H)
        line = image * x_b + ih * x_h
        for chunk in tl.static_range(CHUNKS):
            first = (group * CHUNKS + chunk) * BK
            if ALIGNED:
                iw = ow * stride + first // C - pad
                inside = in_row & (iw >= 0) & (iw < W) & (first < S * C)
                at = (line + iw * x_w)[:, None] + (first % C + k)[None, :]
                a = tl.load(x + at, mask=inside[:, None], other=0.0)
            else:
                sc = first + k
                iw = ow[:, None] * stride + (sc // C)[None, :] - pad
                inside = in_row[:, None] & (iw >= 0) & (iw < W) & (sc < S * C)[None, :]
                a = tl.load(x + line[:, None] + iw * x_w + (sc % C)[None, :] * x_c, mask=inside, other=0.0)
            if chunk == 0:
                acc0 = tl.dot(g, a, acc0, input_precision=PRECISION)
            elif chunk == 1:
                acc1 = tl.dot(g, a, acc1, input_precision=PRECISION)
            elif chunk == 2:
                acc2 = tl.dot(g, a, acc2, input_precision=PRECISION)
            elif chunk == 3:
                acc3 = tl.dot(g, a, acc3, input_precision=PRECISION)
            else:
                acc4 = tl.dot(g, a, acc4, input_precision=PRECISION)
    base = (part * lanes + lane) * O
    for chunk in tl.static_range(CHUNKS):
        sc = (group * CHUNKS + chunk) * BK + k
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
        out = dw + (base + o)[:, None] * (R * S * C) + (r * S * C + sc)[None, :]
        tl.store(out, acc, mask=(o < O)[:, None] & (sc < S * C)[None, :])
    if (r == 0) & (group == 0):
        tl.store(db + base + o, bias, mask=o < O)


def _precision() -> str:
    return "tf32" if torch.backends.cudnn.allow_tf32 else "ieee"


def _chunk(channels: int, span: int) -> int:
    """How many of a kernel row's ``span`` values one product takes."""
    if channels % 32 == 0:
        return 32
    return 16 if span <= 16 or channels % 32 == 16 else 32


def _strides(x: Tensor, channels: int, chunk: int) -> tuple[Tensor, bool]:
    """``[lanes, B, C, H, W]`` such that the kernels can read it, and whether chunks lie within one pixel."""
    aligned = channels % chunk == 0
    if aligned and x.stride(2) != 1:
        x = x.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
    return x, aligned


def _tile(n: int, most: int) -> int:
    return int(min(most, max(16, triton.next_power_of_2(n))))


def _run_correlate(
    x: Tensor, w: Tensor, bias: Tensor | None, size: tuple[int, int], out: tuple[int, int], stride: int, pad: int,
    back: bool,
) -> Tensor:  # fmt: skip
    """``w`` is ``[L, O, R, S, C]`` contiguous, ``x`` has images of ``size``; returns ``[L, B, O, *out]``."""
    _, batch, channels, _, _ = x.shape
    lanes, outputs, kernel_h, kernel_w, _ = w.shape
    chunk = _chunk(channels, kernel_w * channels)
    x, aligned = _strides(x, channels, chunk)
    rows = batch * out[0] * out[1]
    y = torch.empty((lanes, batch, *out, outputs), dtype=x.dtype, device=x.device)
    # Tiles, warps and stages as measured fastest on an H200.
    block_n = _tile(outputs, 128)
    block_m = 64 if aligned and block_n >= 64 else 128
    grid = (triton.cdiv(rows, block_m), lanes, triton.cdiv(outputs, block_n))
    _correlate[grid](
        x, w, w if bias is None else bias, y,
        rows, *size, *out, stride, pad,
        x.stride(0) if x.shape[0] > 1 else 0, x.stride(1), x.stride(3), x.stride(4), x.stride(2),
        C=channels, O=outputs, R=kernel_h, S=kernel_w, BACK=back,
        ALIGNED=aligned, BIAS=bias is not None, PRECISION=_precision(),
        BM=block_m, BN=block_n, BK=chunk, num_warps=4, num_stages=4 if aligned else 1,
    )  # fmt: skip
    return y.permute(0, 1, 4, 2, 3)


def output_size(size: tuple[int, int], kernel: tuple[int, int], stride: int, pad: int) -> tuple[int, int]:
    """Height and width of a convolution's output."""
    height, width = ((n + 2 * pad - k) // stride + 1 for n, k in zip(size, kernel, strict=True))
    return height, width


def forward(x: Tensor, w: Tensor, bias: Tensor | None, stride: int, pad: int) -> Tensor:
    """Each lane's convolution of ``x`` [L or 1, B, C, H, W] with ``w`` [L, O, C, R, S]: ``[L, B, O, OH, OW]``."""
    size, kernel = (x.shape[3], x.shape[4]), (w.shape[3], w.shape[4])
    weight = w.permute(0, 1, 3, 4, 2).contiguous()
    return _run_correlate(
        x, weight, bias, size, output_size(size, kernel, stride, pad), stride, pad, back=False
    )


def input_gradient(dy: Tensor, w: Tensor, size: tuple[int, int], stride: int, pad: int) -> Tensor:
    """The gradient of `forward` in ``x``: ``[L, B, C, *size]`` from ``dy`` [L, B, O, OH, OW]."""
    weight = w.permute(0, 2, 3, 4, 1).contiguous()
    out = (dy.shape[3], dy.shape[4])
    return _run_correlate(dy, weight, None, out, size, stride, pad, back=True)


def weight_gradient(
    x: Tensor, dy: Tensor, kernel: tuple[int, int], stride: int, pad: int
) -> tuple[Tensor, Tensor]:
    """The gradients of `forward` in ``w`` [L, O, C, R, S] and in the bias [L, O]."""
    lanes, batch, outputs, *out = dy.shape
    channels, height, width = x.shape[2:]
    span = kernel[1] * channels
    chunk = _chunk(channels, span)
    x, aligned = _strides(x, channels, chunk)
    dy = dy.permute(0, 1, 3, 4, 2).contiguous()
    chunks = triton.cdiv(span, chunk)
    groups = triton.cdiv(chunks, 5)
    # Two warps: the operands are transposed in memory, which the warp-group instructions of Hopper do not take.
    block_o, block_m, programs, stages = (_tile(outputs, 64), *((32, 800, 2) if aligned else (128, 1600, 1)))
    rows = batch * out[0] * out[1]
    jobs = kernel[0] * groups * triton.cdiv(outputs, block_o)
    splits = max(1, min(triton.cdiv(rows, 4 * block_m), triton.cdiv(programs, jobs * lanes)))
    blocks = triton.cdiv(rows, splits * block_m)  # of block_m rows in a split
    splits = triton.cdiv(rows, blocks * block_m)
    dw = torch.empty((splits, lanes, outputs, *kernel, channels), dtype=x.dtype, device=x.device)
    db = torch.empty((splits, lanes, outputs), dtype=x.dtype, device=x.device)
    _weight_gradient[(splits, lanes, jobs)](
        x, dy, dw, db,
        rows, lanes, height, width, *out, stride, pad,
        x.stride(0) if x.shape[0] > 1 else 0, x.stride(1), x.stride(3), x.stride(4), x.stride(2),
        C=channels, O=outputs, R=kernel[0], S=kernel[1], ALIGNED=aligned, PRECISION=_precision(),
        BM=block_m, BO=block_o, BK=chunk, CHUNKS=triton.cdiv(chunks, groups), GROUPS=groups, BLOCKS=blocks,
        num_warps=2, num_stages=stages,
    )  # fmt: skip
    if splits > 1:
        dw, db = dw.sum(0), db.sum(0)
    dw = dw.view(lanes, outputs, *kernel, channels).permute(0, 1, 4, 2, 3)
    return dw.contiguous(), db.view(lanes, outputs)
