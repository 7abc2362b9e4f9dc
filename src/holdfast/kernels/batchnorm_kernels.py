"""The Triton kernels of batch normalisation and its gradient, over channels-last images.

A row is one pixel of one image. Each direction has two kernels: the first computes sums over splits of a lane's rows,
the second the result. A single kernel (``single_pass``) is used if a program can hold all rows of some channels.
"""

import triton
import triton.language as tl

from holdfast.kernels.epilogue import epilogue, epilogue_backward
from holdfast.kernels.padded_images import tile_amax


@triton.jit
def _row_weights(mask, lane, batch, pixels, rows, valid, MASKED: tl.constexpr):
    """1 for each of some rows of a lane, 0 for those that are padding or not valid."""
    weights = valid.to(tl.float32)
    if MASKED:
        weights = tl.load(mask + lane * batch + rows // pixels, mask=valid, other=0.0)
    return weights


@triton.jit
def _count_rows(mask, lane, batch, pixels, MASKED: tl.constexpr, BATCH: tl.constexpr):
    """The number of a lane's rows that are not padding, at least 1."""
    count = batch * pixels * 1.0
    if MASKED:
        image = tl.arange(0, BATCH)
        count = tl.sum(tl.load(mask + lane * batch + image, mask=image < batch, other=0.0), 0) * pixels
    return tl.maximum(count, 1.0)


@triton.jit
def _add_splits(partial_sums, which, splits, lane, lanes, c, valid_c, C: tl.constexpr, SPLITS: tl.constexpr):
    """The first (``which`` = 0) or second (1) sum of the channels ``c``, over all splits."""
    s = tl.arange(0, SPLITS)
    offsets = ((s * lanes + lane) * 2 + which)[:, None] * C + c[None, :]
    return tl.sum(
        tl.load(partial_sums + offsets, mask=(s < splits)[:, None] & valid_c[None, :], other=0.0), 0
    )


@triton.jit
def batchnorm_moments(
    x, mask, partial_sums, batch, pixels, rows_per_split, lanes,
    C: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Σ (x - shift) and Σ (x - shift)² of each channel over one split, where shift is the lane's first row."""
    split = tl.program_id(0)
    lane = tl.program_id(2).to(tl.int64)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    valid_c = c < C
    x += lane * batch * pixels * C
    shift = tl.load(x + c, mask=valid_c, other=0.0)
    start = split * rows_per_split
    x += start.to(tl.int64) * C
    sum_x = tl.zeros((BLOCK_C,), tl.float32)
    sum_squares = tl.zeros((BLOCK_C,), tl.float32)
    for row in range(0, rows_per_split, ROWS):
        r = row + tl.arange(0, ROWS)
        valid_r = start + r < batch * pixels
        valid = valid_r[:, None] & valid_c[None, :]
        value = tl.where(
            valid, tl.load(x + r[:, None] * C + c[None, :], mask=valid, other=0.0) - shift[None, :], 0.0
        )
        weights = _row_weights(mask, lane, batch, pixels, start + r, valid_r, MASKED)
        sum_x += tl.sum(value * weights[:, None], 0)
        sum_squares += tl.sum(value * value * weights[:, None], 0)
    offsets = (split * lanes + lane) * 2 * C + c
    tl.store(partial_sums + offsets, sum_x, mask=valid_c)
    tl.store(partial_sums + offsets + C, sum_squares, mask=valid_c)


@triton.jit
def _store_statistics(
    mean_c, var_c, rstd_c, count, momentum, old_mean, old_var, old_count, mean, rstd, new_mean, new_var, new_count,
    lane, c, valid_c, C: tl.constexpr, TRACKS: tl.constexpr,
):  # fmt: skip
    """Store the batch statistics of the channels ``c`` and, with TRACKS, the updated running statistics."""
    offsets = lane * C + c
    tl.store(mean + offsets, mean_c, mask=valid_c)
    tl.store(rstd + offsets, rstd_c, mask=valid_c)
    if TRACKS:
        old = tl.load(old_mean + offsets, mask=valid_c, other=0.0)
        tl.store(new_mean + offsets, (1 - momentum) * old + momentum * mean_c, mask=valid_c)
        old = tl.load(old_var + offsets, mask=valid_c, other=0.0)
        unbiased = var_c * (count / tl.maximum(count - 1.0, 1.0))
        tl.store(new_var + offsets, (1 - momentum) * old + momentum * unbiased, mask=valid_c)
        if tl.program_id(1) == 0:
            tl.store(new_count + lane, tl.load(old_count + lane) + 1)


@triton.jit
def _store_amax(block_amax, lane, amax):
    """Store the amax of the values that this program wrote, next to those of the lane's other programs."""
    blocks = tl.num_programs(0) * tl.num_programs(1)
    tl.store(block_amax + lane * blocks + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), amax)


@triton.jit
def batchnorm_forward(
    x, mask, weight, bias, residual, old_mean, old_var, old_count, partial_sums, y, block_amax, mean, rstd, new_mean,
    new_var, new_count, batch, pixels, rows_per_split, splits, lanes, eps, momentum,
    C: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr, BATCH: tl.constexpr, SPLITS: tl.constexpr,
    MASKED: tl.constexpr, TRACKS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """y = (x - mean) rstd weight + bias, and the epilogue; the first split also stores the statistics."""
    split = tl.program_id(0)
    lane = tl.program_id(2).to(tl.int64)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    valid_c = c < C
    x += lane * batch * pixels * C
    y += lane * batch * pixels * C
    count = _count_rows(mask, lane, batch, pixels, MASKED, BATCH)
    shifted_mean = _add_splits(partial_sums, 0, splits, lane, lanes, c, valid_c, C, SPLITS) / count
    mean_square = _add_splits(partial_sums, 1, splits, lane, lanes, c, valid_c, C, SPLITS) / count
    var_c = tl.maximum(mean_square - shifted_mean * shifted_mean, 0.0)
    mean_c = tl.load(x + c, mask=valid_c, other=0.0) + shifted_mean
    rstd_c = 1.0 / tl.sqrt(var_c + eps)
    if split == 0:
        _store_statistics(
            mean_c, var_c, rstd_c, count, momentum, old_mean, old_var, old_count, mean, rstd, new_mean, new_var,
            new_count, lane, c, valid_c, C, TRACKS,
        )  # fmt: skip
    w = tl.load(weight + lane * C + c, mask=valid_c, other=0.0)
    b = tl.load(bias + lane * C + c, mask=valid_c, other=0.0)
    start = split * rows_per_split
    x += start.to(tl.int64) * C
    y += start.to(tl.int64) * C
    residual += (lane * batch * pixels + start) * C
    amax = 0
    for row in range(0, rows_per_split, ROWS):
        r = row + tl.arange(0, ROWS)
        valid = (start + r < batch * pixels)[:, None] & valid_c[None, :]
        offsets = r[:, None] * C + c[None, :]
        value = tl.load(x + offsets, mask=valid, other=0.0)
        value = (value - mean_c[None, :]) * rstd_c[None, :] * w[None, :] + b[None, :]
        value = epilogue(value, residual, offsets, valid, HAS_RESIDUAL, RELU)
        tl.store(y + offsets, value, mask=valid)
        amax = tl.maximum(amax, tile_amax(value, valid))
    _store_amax(block_amax, lane, amax)


@triton.jit
def batchnorm_forward_single_pass(
    x, mask, weight, bias, residual, old_mean, old_var, old_count, y, block_amax, mean, rstd, new_mean, new_var,
    new_count, batch, pixels, eps, momentum,
    C: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr,
    MASKED: tl.constexpr, TRACKS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """`batchnorm_moments` and `batchnorm_forward` in one, by programs that hold all rows of their channels."""
    lane = tl.program_id(2).to(tl.int64)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    valid_c = c < C
    r = tl.arange(0, ROWS)
    valid_r = r < batch * pixels
    valid = valid_r[:, None] & valid_c[None, :]
    offsets = lane * batch * pixels * C + r[:, None] * C + c[None, :]
    shift = tl.load(
        x + lane * batch * pixels * C + c, mask=valid_c, other=0.0
    )  # a constant channel has variance 0
    value = tl.load(x + offsets, mask=valid, other=0.0) - shift[None, :]
    weights = _row_weights(mask, lane, batch, pixels, r, valid_r, MASKED)
    count = tl.maximum(tl.sum(weights, 0), 1.0)
    shifted_mean = tl.sum(value * weights[:, None], 0) / count
    value -= shifted_mean[None, :]
    var_c = tl.sum(value * value * weights[:, None], 0) / count
    mean_c = shift + shifted_mean
    rstd_c = 1.0 / tl.sqrt(var_c + eps)
    _store_statistics(
        mean_c, var_c, rstd_c, count, momentum, old_mean, old_var, old_count, mean, rstd, new_mean, new_var,
        new_count, lane, c, valid_c, C, TRACKS,
    )  # fmt: skip
    w = tl.load(weight + lane * C + c, mask=valid_c, other=0.0)
    b = tl.load(bias + lane * C + c, mask=valid_c, other=0.0)
    value = value * rstd_c[None, :] * w[None, :] + b[None, :]
    value = epilogue(value, residual, offsets, valid, HAS_RESIDUAL, RELU)
    tl.store(y + offsets, value, mask=valid)
    _store_amax(block_amax, lane, tile_amax(value, valid))


@triton.jit
def batchnorm_backward_sums(
    x, dy, y, weight, bias, mean, rstd, partial_sums, dz, batch, pixels, rows_per_split, lanes,
    C: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """Σ dz and Σ dz n of each channel over one split, with n = (x - mean) rstd."""
    split = tl.program_id(0)
    lane = tl.program_id(2).to(tl.int64)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    valid_c = c < C
    start = split * rows_per_split
    x += (lane * batch * pixels + start) * C
    dy += (lane * batch * pixels + start) * C
    y += (lane * batch * pixels + start) * C
    dz += (lane * batch * pixels + start) * C
    mean_c = tl.load(mean + lane * C + c, mask=valid_c, other=0.0)
    rstd_c = tl.load(rstd + lane * C + c, mask=valid_c, other=0.0)
    w = tl.load(weight + lane * C + c, mask=valid_c, other=0.0)
    b = tl.load(bias + lane * C + c, mask=valid_c, other=0.0)
    sum_g = tl.zeros((BLOCK_C,), tl.float32)
    sum_gn = tl.zeros((BLOCK_C,), tl.float32)
    for row in range(0, rows_per_split, ROWS):
        r = row + tl.arange(0, ROWS)
        valid = (start + r < batch * pixels)[:, None] & valid_c[None, :]
        offsets = r[:, None] * C + c[None, :]
        n = (tl.load(x + offsets, mask=valid, other=0.0) - mean_c[None, :]) * rstd_c[None, :]
        g = tl.load(dy + offsets, mask=valid, other=0.0)
        g = epilogue_backward(g, n, w, b, y, offsets, valid, HAS_RESIDUAL, RELU)
        if HAS_RESIDUAL:
            tl.store(dz + offsets, g, mask=valid)
        sum_g += tl.sum(g, 0)
        sum_gn += tl.sum(g * n, 0)
    offsets = (split * lanes + lane) * 2 * C + c
    tl.store(partial_sums + offsets, sum_g, mask=valid_c)
    tl.store(partial_sums + offsets + C, sum_gn, mask=valid_c)


@triton.jit
def batchnorm_backward(
    x, dy, mask, weight, bias, mean, rstd, partial_sums, dx, block_amax, dw, db, batch, pixels, rows_per_split, splits,
    lanes,
    C: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr, BATCH: tl.constexpr, SPLITS: tl.constexpr,
    MASKED: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """dx = rstd weight (dz - (Σ dz + n Σ dz n) / count), the sums' term only for rows that are not padding.

    The first split also stores the gradients of weight, Σ dz n, and bias, Σ dz.
    """
    split = tl.program_id(0)
    lane = tl.program_id(2).to(tl.int64)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    valid_c = c < C
    start = split * rows_per_split
    x += (lane * batch * pixels + start) * C
    dy += (lane * batch * pixels + start) * C
    dx += (lane * batch * pixels + start) * C
    count = _count_rows(mask, lane, batch, pixels, MASKED, BATCH)
    sum_g = _add_splits(partial_sums, 0, splits, lane, lanes, c, valid_c, C, SPLITS)
    sum_gn = _add_splits(partial_sums, 1, splits, lane, lanes, c, valid_c, C, SPLITS)
    if split == 0:
        tl.store(db + lane * C + c, sum_g, mask=valid_c)
        tl.store(dw + lane * C + c, sum_gn, mask=valid_c)
    mean_c = tl.load(mean + lane * C + c, mask=valid_c, other=0.0)
    rstd_c = tl.load(rstd + lane * C + c, mask=valid_c, other=0.0)
    w = tl.load(weight + lane * C + c, mask=valid_c, other=0.0)
    b = tl.load(bias + lane * C + c, mask=valid_c, other=0.0)
    amax = 0
    for row in range(0, rows_per_split, ROWS):
        r = row + tl.arange(0, ROWS)
        valid_r = start + r < batch * pixels
        valid = valid_r[:, None] & valid_c[None, :]
        value = tl.load(x + r[:, None] * C + c[None, :], mask=valid, other=0.0)
        n = (value - mean_c[None, :]) * rstd_c[None, :]
        g = tl.load(dy + r[:, None] * C + c[None, :], mask=valid, other=0.0)
        if RELU:
            g = tl.where(n * w[None, :] + b[None, :] > 0, g, 0.0)
        share = _row_weights(mask, lane, batch, pixels, start + r, valid_r, MASKED) / count
        value = (rstd_c * w)[None, :] * (g - share[:, None] * (sum_g[None, :] + n * sum_gn[None, :]))
        tl.store(dx + r[:, None] * C + c[None, :], value, mask=valid)
        amax = tl.maximum(amax, tile_amax(value, valid))
    _store_amax(block_amax, lane, amax)


@triton.jit
def batchnorm_backward_single_pass(
    x, dy, y, mask, weight, bias, mean, rstd, dx, block_amax, dw, db, dz, batch, pixels,
    C: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr,
    MASKED: tl.constexpr, HAS_RESIDUAL: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """`batchnorm_backward_sums` and `batchnorm_backward` in one, by programs that hold all rows of their channels."""
    lane = tl.program_id(2).to(tl.int64)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    valid_c = c < C
    r = tl.arange(0, ROWS)
    valid_r = r < batch * pixels
    valid = valid_r[:, None] & valid_c[None, :]
    offsets = lane * batch * pixels * C + r[:, None] * C + c[None, :]
    mean_c = tl.load(mean + lane * C + c, mask=valid_c, other=0.0)
    rstd_c = tl.load(rstd + lane * C + c, mask=valid_c, other=0.0)
    w = tl.load(weight + lane * C + c, mask=valid_c, other=0.0)
    b = tl.load(bias + lane * C + c, mask=valid_c, other=0.0)
    n = (tl.load(x + offsets, mask=valid, other=0.0) - mean_c[None, :]) * rstd_c[None, :]
    g = tl.load(dy + offsets, mask=valid, other=0.0)
    g = epilogue_backward(g, n, w, b, y, offsets, valid, HAS_RESIDUAL, RELU)
    if HAS_RESIDUAL:
        tl.store(dz + offsets, g, mask=valid)
    sum_g = tl.sum(g, 0)
    sum_gn = tl.sum(g * n, 0)
    tl.store(db + lane * C + c, sum_g, mask=valid_c)
    tl.store(dw + lane * C + c, sum_gn, mask=valid_c)
    weights = _row_weights(mask, lane, batch, pixels, r, valid_r, MASKED)
    share = weights / tl.maximum(tl.sum(weights, 0), 1.0)
    value = (rstd_c * w)[None, :] * (g - share[:, None] * (sum_g[None, :] + n * sum_gn[None, :]))
    tl.store(dx + offsets, value, mask=valid)
    _store_amax(block_amax, lane, tile_amax(value, valid))
