"""LSTM and GRU over a sequence, for many lanes: one kernel per time step and direction.

The kernels start from the products of the inputs and the input weights. All sequences are ``[T, B, ...]``: time first,
units last. The initial state is zero.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import Function

from holdfast.kernels.autograd import NonDifferentiable, add_lane_dim, apply, expand_to_lanes

_UNITS = 16  # of a program


@triton.jit
def _tanh(x):
    e = tl.exp(-2.0 * tl.abs(x))
    return tl.where(x < 0, -1.0, 1.0) * (1.0 - e) / (1.0 + e)


@triton.jit
def _recurrent_product(
    a, w, row, k_offsets, u, batch, ROW: tl.constexpr, H: tl.constexpr, BB: tl.constexpr, BH: tl.constexpr,
    BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Σ_k a[row, k] w[u, k] over the H inputs of a gate; ``k_offsets`` are those of the first inputs."""
    acc = tl.zeros((BB, BH), tl.float32)
    for first in range(0, H, BK):
        k = first + k_offsets
        valid_k = (k < H)[None, :]
        value = tl.load(a + row[:, None] * ROW + k[None, :], mask=(row < batch)[:, None] & valid_k, other=0.0)
        weight = tl.load(w + u[:, None] * H + k[None, :], mask=(u < H)[:, None] & valid_k, other=0.0)
        acc = tl.dot(value, tl.trans(weight), acc, input_precision=PRECISION)
    return acc


@triton.jit
def _recurrent_gradient(
    d, w, row, k_offsets, u, batch, acc, ROW: tl.constexpr, H: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """acc + Σ_k d[row, k] w[k, u] over the H outputs of a gate."""
    for first in range(0, H, BK):
        k = first + k_offsets
        valid_k = k < H
        value = tl.load(
            d + row[:, None] * ROW + k[None, :], mask=(row < batch)[:, None] & valid_k[None, :], other=0.0
        )
        weight = tl.load(w + k[:, None] * H + u[None, :], mask=valid_k[:, None] & (u < H)[None, :], other=0.0)
        acc = tl.dot(value, weight, acc, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=["t", "previous"])
def _lstm_forward(
    xg, w, y, c, gates, steps, batch, t, previous,
    FIRST: tl.constexpr, H: tl.constexpr, BB: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Step t of each lane: i, f, g, o from xg[t] + y[previous] wᵀ;  c = f c[previous] + i g;  y = o tanh(c).

    A program computes BH units of BB rows. FIRST: there is no previous step.
    """
    lane = tl.program_id(1).to(tl.int64)
    u = tl.program_id(0) * BH + tl.arange(0, BH)
    row = tl.program_id(2) * BB + tl.arange(0, BB)
    k = tl.arange(0, BK)
    valid = (row < batch)[:, None] & (u < H)[None, :]
    here = (lane * steps + t) * batch
    before = (lane * steps + previous) * batch
    w += lane * 4 * H * H
    offsets = here * 4 * H + row[:, None] * (4 * H) + u[None, :]
    i = tl.load(xg + offsets, mask=valid, other=0.0)
    f = tl.load(xg + offsets + H, mask=valid, other=0.0)
    g = tl.load(xg + offsets + 2 * H, mask=valid, other=0.0)
    o = tl.load(xg + offsets + 3 * H, mask=valid, other=0.0)
    units = row[:, None] * H + u[None, :]
    old = tl.zeros((BB, BH), tl.float32)
    if not FIRST:
        h = y + before * H
        i += _recurrent_product(h, w, row, k, u, batch, H, H, BB, BH, BK, PRECISION)
        f += _recurrent_product(h, w + H * H, row, k, u, batch, H, H, BB, BH, BK, PRECISION)
        g += _recurrent_product(h, w + 2 * H * H, row, k, u, batch, H, H, BB, BH, BK, PRECISION)
        o += _recurrent_product(h, w + 3 * H * H, row, k, u, batch, H, H, BB, BH, BK, PRECISION)
        old = tl.load(c + before * H + units, mask=valid, other=0.0)
    i = tl.sigmoid(i)
    f = tl.sigmoid(f)
    g = _tanh(g)
    o = tl.sigmoid(o)
    new = f * old + i * g
    tl.store(c + here * H + units, new, mask=valid)
    tl.store(y + here * H + units, o * _tanh(new), mask=valid)
    tl.store(gates + offsets, i, mask=valid)
    tl.store(gates + offsets + H, f, mask=valid)
    tl.store(gates + offsets + 2 * H, g, mask=valid)
    tl.store(gates + offsets + 3 * H, o, mask=valid)


@triton.jit(do_not_specialize=["t", "previous", "following"])
def _lstm_backward(
    dy, dc, w, c, gates, d, steps, batch, t, previous, following,
    FIRST: tl.constexpr, LAST: tl.constexpr, H: tl.constexpr, BB: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """d[t], the gradient of the sums of the gates at step t, from d[following]; dc is the gradient of c, passed on."""
    lane = tl.program_id(1).to(tl.int64)
    u = tl.program_id(0) * BH + tl.arange(0, BH)
    row = tl.program_id(2) * BB + tl.arange(0, BB)
    k = tl.arange(0, BK)
    valid = (row < batch)[:, None] & (u < H)[None, :]
    here = (lane * steps + t) * batch
    units = row[:, None] * H + u[None, :]
    dh = tl.load(dy + here * H + units, mask=valid, other=0.0)
    if not LAST:
        after = d + (lane * steps + following) * batch * 4 * H
        w += lane * 4 * H * H
        dh = _recurrent_gradient(after, w, row, k, u, batch, dh, 4 * H, H, BK, PRECISION)
        dh = _recurrent_gradient(after + H, w + H * H, row, k, u, batch, dh, 4 * H, H, BK, PRECISION)
        dh = _recurrent_gradient(after + 2 * H, w + 2 * H * H, row, k, u, batch, dh, 4 * H, H, BK, PRECISION)
        dh = _recurrent_gradient(after + 3 * H, w + 3 * H * H, row, k, u, batch, dh, 4 * H, H, BK, PRECISION)
    offsets = here * 4 * H + row[:, None] * (4 * H) + u[None, :]
    i = tl.load(gates + offsets, mask=valid, other=0.0)
    f = tl.load(gates + offsets + H, mask=valid, other=0.0)
    g = tl.load(gates + offsets + 2 * H, mask=valid, other=0.0)
    o = tl.load(gates + offsets + 3 * H, mask=valid, other=0.0)
    squashed = _tanh(tl.load(c + here * H + units, mask=valid, other=0.0))
    old = tl.zeros((BB, BH), tl.float32)
    if not FIRST:
        old = tl.load(c + (lane * steps + previous) * batch * H + units, mask=valid, other=0.0)
    state = dc + lane * batch * H + units
    grad = tl.load(state, mask=valid, other=0.0) + dh * o * (1.0 - squashed * squashed)
    tl.store(state, grad * f, mask=valid)
    tl.store(d + offsets, grad * g * i * (1.0 - i), mask=valid)
    tl.store(d + offsets + H, grad * old * f * (1.0 - f), mask=valid)
    tl.store(d + offsets + 2 * H, grad * i * (1.0 - g * g), mask=valid)
    tl.store(d + offsets + 3 * H, dh * squashed * o * (1.0 - o), mask=valid)


@triton.jit(do_not_specialize=["t", "previous"])
def _gru_forward(
    xg, w, bias, y, gates, steps, batch, t, previous,
    FIRST: tl.constexpr, H: tl.constexpr, BB: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Step t of each lane, with h = y[previous]: r and z from xg[t] + h wᵀ;  q = h w_nᵀ + bias;
    n = tanh(xg_n[t] + r q);  y = (1 - z) n + z h. ``gates`` keeps r, z, n and q.
    """
    lane = tl.program_id(1).to(tl.int64)
    u = tl.program_id(0) * BH + tl.arange(0, BH)
    row = tl.program_id(2) * BB + tl.arange(0, BB)
    k = tl.arange(0, BK)
    valid = (row < batch)[:, None] & (u < H)[None, :]
    here = (lane * steps + t) * batch
    before = (lane * steps + previous) * batch
    w += lane * 3 * H * H
    offsets = here * 3 * H + row[:, None] * (3 * H) + u[None, :]
    r = tl.load(xg + offsets, mask=valid, other=0.0)
    z = tl.load(xg + offsets + H, mask=valid, other=0.0)
    n = tl.load(xg + offsets + 2 * H, mask=valid, other=0.0)
    q = tl.zeros((BB, BH), tl.float32) + tl.load(bias + lane * H + u, mask=u < H, other=0.0)[None, :]
    units = row[:, None] * H + u[None, :]
    old = tl.zeros((BB, BH), tl.float32)
    if not FIRST:
        h = y + before * H
        r += _recurrent_product(h, w, row, k, u, batch, H, H, BB, BH, BK, PRECISION)
        z += _recurrent_product(h, w + H * H, row, k, u, batch, H, H, BB, BH, BK, PRECISION)
        q += _recurrent_product(h, w + 2 * H * H, row, k, u, batch, H, H, BB, BH, BK, PRECISION)
        old = tl.load(h + units, mask=valid, other=0.0)
    r = tl.sigmoid(r)
    z = tl.sigmoid(z)
    n = _tanh(n + r * q)
    tl.store(y + here * H + units, (1.0 - z) * n + z * old, mask=valid)
    kept = gates + here * 4 * H + row[:, None] * (4 * H) + u[None, :]
    tl.store(kept, r, mask=valid)
    tl.store(kept + H, z, mask=valid)
    tl.store(kept + 2 * H, n, mask=valid)
    tl.store(kept + 3 * H, q, mask=valid)


@triton.jit(do_not_specialize=["t", "previous", "following"])
def _gru_backward(
    dy, dh, w, y, gates, d, dq, steps, batch, t, previous, following,
    FIRST: tl.constexpr, LAST: tl.constexpr, H: tl.constexpr, BB: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """d[t] and dq[t], the gradients of xg and q at step t; dh is the part that z passes on to the previous step."""
    lane = tl.program_id(1).to(tl.int64)
    u = tl.program_id(0) * BH + tl.arange(0, BH)
    row = tl.program_id(2) * BB + tl.arange(0, BB)
    k = tl.arange(0, BK)
    valid = (row < batch)[:, None] & (u < H)[None, :]
    here = (lane * steps + t) * batch
    units = row[:, None] * H + u[None, :]
    carried = dh + lane * batch * H + units
    grad = tl.load(dy + here * H + units, mask=valid, other=0.0) + tl.load(carried, mask=valid, other=0.0)
    if not LAST:
        after = (lane * steps + following) * batch
        w += lane * 3 * H * H
        rz = d + after * 3 * H
        grad = _recurrent_gradient(rz, w, row, k, u, batch, grad, 3 * H, H, BK, PRECISION)
        grad = _recurrent_gradient(rz + H, w + H * H, row, k, u, batch, grad, 3 * H, H, BK, PRECISION)
        grad = _recurrent_gradient(dq + after * H, w + 2 * H * H, row, k, u, batch, grad, H, H, BK, PRECISION)
    kept = gates + here * 4 * H + row[:, None] * (4 * H) + u[None, :]
    r = tl.load(kept, mask=valid, other=0.0)
    z = tl.load(kept + H, mask=valid, other=0.0)
    n = tl.load(kept + 2 * H, mask=valid, other=0.0)
    q = tl.load(kept + 3 * H, mask=valid, other=0.0)
    old = tl.zeros((BB, BH), tl.float32)
    if not FIRST:
        old = tl.load(y + (lane * steps + previous) * batch * H + units, mask=valid, other=0.0)
    dn = grad * (1.0 - z) * (1.0 - n * n)
    tl.store(carried, grad * z, mask=valid)
    offsets = here * 3 * H + row[:, None] * (3 * H) + u[None, :]
    tl.store(d + offsets, dn * q * r * (1.0 - r), mask=valid)
    tl.store(d + offsets + H, grad * (old - n) * z * (1.0 - z), mask=valid)
    tl.store(d + offsets + 2 * H, dn, mask=valid)
    tl.store(dq + here * H + units, dn * r, mask=valid)


def _launch_options(xg: Tensor, units: int) -> tuple[tuple[int, int, int], dict[str, Any]]:
    """The grid and the constants for ``xg`` [L, T, B, ...]."""
    lanes, _, batch, _ = xg.shape
    rows = min(64, max(16, triton.next_power_of_2(batch)))
    precision = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    inputs = min(64, max(16, triton.next_power_of_2(units)))
    grid = (triton.cdiv(units, _UNITS), lanes, triton.cdiv(batch, rows))
    return grid, {"H": units, "BB": rows, "BH": _UNITS, "BK": inputs, "PRECISION": precision}


def _order(steps: int, reverse: bool) -> list[tuple[int, int, int]]:
    """The steps in order, each with the previous and the next step; at the ends, the step itself."""
    order = list(range(steps))[:: -1 if reverse else 1]
    return [(t, order[max(i - 1, 0)], order[min(i + 1, steps - 1)]) for i, t in enumerate(order)]


def _lstm(reverse: bool, xg: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs and cells ``[L, T, B, H]``, and gates ``[L, T, B, 4H]``, from xg [L, T, B, 4H] and w [L, 4H, H]."""
    xg, w = xg.contiguous(), w.contiguous()
    _, steps, batch, _ = xg.shape
    units = w.shape[-1]
    gates, y = torch.empty_like(xg), xg.new_empty((*xg.shape[:-1], units))
    c = torch.empty_like(y)
    grid, constants = _launch_options(xg, units)
    for number, (t, previous, _) in enumerate(_order(steps, reverse)):
        _lstm_forward[grid](
            xg, w, y, c, gates, steps, batch, t, previous, FIRST=number == 0, **constants, num_stages=2
        )
    return y, c, gates


def _lstm_grad(
    reverse: bool, dy: Tensor, dc: Tensor, w: Tensor, y: Tensor, c: Tensor, gates: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of xg and w; ``dc`` [L, B, H] is the gradient of the last cell."""
    dy, dc, w, y, c, gates = (t.contiguous() for t in (dy, dc.clone(), w, y, c, gates))
    _, steps, batch, _ = gates.shape
    d = torch.empty_like(gates)
    grid, constants = _launch_options(gates, w.shape[-1])
    for number, (t, previous, following) in reversed(list(enumerate(_order(steps, reverse)))):
        _lstm_backward[grid](
            dy, dc, w, c, gates, d, steps, batch, t, previous, following,
            FIRST=number == 0, LAST=number == steps - 1, **constants, num_stages=2,
        )  # fmt: skip
    return d, _weight_grad(d, y, reverse)


def _weight_grad(d: Tensor, y: Tensor, reverse: bool) -> Tensor:
    """Σ over steps of d[t]ᵀ y[previous]: ``[L, G, H]``."""
    now, before = (slice(0, -1), slice(1, None)) if reverse else (slice(1, None), slice(0, -1))
    return torch.bmm(d[:, now].flatten(1, 2).mT, y[:, before].flatten(1, 2))


def _gru(reverse: bool, xg: Tensor, w: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs ``[L, T, B, H]`` and gates ``[L, T, B, 4H]``, from xg [L, T, B, 3H], w [L, 3H, H] and bias [L, H]."""
    xg, w, bias = xg.contiguous(), w.contiguous(), bias.contiguous()
    lanes, steps, batch, _ = xg.shape
    units = w.shape[-1]
    y, gates = (xg.new_empty((lanes, steps, batch, n * units)) for n in (1, 4))
    grid, constants = _launch_options(xg, units)
    for number, (t, previous, _) in enumerate(_order(steps, reverse)):
        _gru_forward[grid](
            xg, w, bias, y, gates, steps, batch, t, previous, FIRST=number == 0, **constants, num_stages=2
        )
    return y, gates


def _gru_grad(
    reverse: bool, dy: Tensor, w: Tensor, y: Tensor, gates: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of xg, w and the bias."""
    dy, w, y, gates = (t.contiguous() for t in (dy, w, y, gates))
    lanes, steps, batch, units = y.shape
    d, dq = (y.new_empty((lanes, steps, batch, n * units)) for n in (3, 1))
    dh = y.new_zeros((lanes, batch, units))
    grid, constants = _launch_options(y, units)
    for number, (t, previous, following) in reversed(list(enumerate(_order(steps, reverse)))):
        _gru_backward[grid](
            dy, dh, w, y, gates, d, dq, steps, batch, t, previous, following,
            FIRST=number == 0, LAST=number == steps - 1, **constants, num_stages=2,
        )  # fmt: skip
    dw = [_weight_grad(part, y, reverse) for part in (d[..., : 2 * units], dq)]
    return d, torch.cat(dw, 1), dq.sum((1, 2))


class _LSTM(Function):
    """The outputs of `_lstm` for one lane, and the last cell."""

    @staticmethod
    def forward(xg: Tensor, w: Tensor, reverse: bool) -> tuple[Tensor, ...]:
        y, c, gates = (t[0] for t in _lstm(reverse, xg[None], w[None]))
        return y, c[0 if reverse else -1].clone(), c, gates

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _, w, ctx.reverse = inputs
        y, _, c, gates = output
        ctx.mark_non_differentiable(c, gates)
        ctx.save_for_backward(w, y, c, gates)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *apply(_LSTMBackward, ctx.reverse, grads[0], grads[1], *ctx.saved_tensors), None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], xg: Tensor, w: Tensor, reverse: bool
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        y, c, gates = _lstm(reverse, *expand_to_lanes(info, in_dims[:2], (xg, w)))
        return (y, c[:, 0 if reverse else -1].clone(), c, gates), (0,) * 4


class _LSTMBackward(NonDifferentiable):
    """The gradients of `_LSTM`."""

    @staticmethod
    def forward(reverse: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(g[0] for g in _lstm_grad(reverse, *add_lane_dim(tensors)))

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], reverse: bool, *tensors: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        return _lstm_grad(reverse, *expand_to_lanes(info, in_dims[1:], tensors)), (0, 0)


class _GRU(Function):
    """The outputs of `_gru` for one lane."""

    @staticmethod
    def forward(xg: Tensor, w: Tensor, bias: Tensor, reverse: bool) -> tuple[Tensor, ...]:
        return tuple(t[0] for t in _gru(reverse, xg[None], w[None], bias[None]))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _, w, _, ctx.reverse = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(w, *output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *apply(_GRUBackward, ctx.reverse, grads[0], *ctx.saved_tensors), None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], xg: Tensor, w: Tensor, bias: Tensor, reverse: bool
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        return _gru(reverse, *expand_to_lanes(info, in_dims[:3], (xg, w, bias))), (0, 0)


class _GRUBackward(NonDifferentiable):
    """The gradients of `_GRU`."""

    @staticmethod
    def forward(reverse: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(g[0] for g in _gru_grad(reverse, *add_lane_dim(tensors)))

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], reverse: bool, *tensors: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        return _gru_grad(reverse, *expand_to_lanes(info, in_dims[1:], tensors)), (0, 0, 0)


def lstm(xg: Tensor, w: Tensor, reverse: bool) -> tuple[Tensor, Tensor]:
    """Outputs ``[T, B, H]`` and the last cell ``[B, H]`` of an LSTM; can be differentiated once.

    xg [T, B, 4H] are the products with the inputs, biases included, and w [4H, H] the recurrent weights, for the gates
    i, f, g, o in this order. With ``reverse`` the sequence is read from its end.
    """
    y, c, *_ = apply(_LSTM, xg, w, reverse)
    return cast(Tensor, y), cast(Tensor, c)


def gru(xg: Tensor, w: Tensor, bias: Tensor, reverse: bool) -> Tensor:
    """Outputs ``[T, B, H]`` of a GRU; can be differentiated once.

    xg [T, B, 3H] are the products with the inputs, with all biases but the recurrent one of n, which is ``bias`` [H]; w
    [3H, H] are the recurrent weights, for the gates r, z, n in this order.
    """
    return cast(Tensor, apply(_GRU, xg, w, bias, reverse)[0])
