"""The passes of batch normalisation over images that lie channels last, and of its gradient.

Each is two: sums over splits of a lane's rows (a row is one pixel of one image), then what follows from them; or one
(``whole``), where a program can hold all rows of some channels.
"""

import triton
import triton.language as tl

from holdfast.kernels.epilogue import followed, followed_back
from holdfast.kernels.padded_images import peak


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
def moments(
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
def normalise(
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
def normalise_whole(
    x, mask, weight, bias, added, old_mean, old_var, old_count, y, peaks, mean, scale, new_mean, new_var, new_count,
    batch, pixels, eps, momentum,
    C: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr,
    MASKED: tl.constexpr, TRACKS: tl.constexpr, ADDS: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """What `moments` and `normalise` do, by programs that hold all rows of their channels."""
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
def sums_back(
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
def normalise_back(
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
def normalise_whole_back(
    x, dy, y, mask, weight, bias, mean, scale, dx, peaks, dw, db, dz, batch, pixels,
    C: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr,
    MASKED: tl.constexpr, ADDS: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """What `sums_back` and `normalise_back` do, by programs that hold all rows of their channels."""
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
