"""LSTM and GRU layers for ``vmap`` on a GPU and under autocast, where PyTorch's own cannot run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from holdfast.kernels import is_plain


class _Recurrent:
    """The common part of both layers: the layers and directions of a stack."""

    own_kernels = False
    gates: int

    def _run(self: Any, x: Tensor, hx: tuple[Tensor, ...]) -> tuple[Tensor, list[list[Tensor]]]:
        """Outputs of the last layer, and the last states of each layer and direction, from the initial ones."""
        x = x.transpose(0, 1) if self.batch_first else x
        last: list[list[Tensor]] = []
        for layer in range(self.num_layers):
            outputs = []
            for direction in range(2 if self.bidirectional else 1):
                name = f"l{layer}" + ("_reverse" if direction else "")
                first = [state[len(last)] for state in hx]
                y, *state = self._direction(x, name, first, bool(direction))
                outputs.append(y)
                last.append(state)
            x = outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
        return x.transpose(0, 1) if self.batch_first else x, last

    def _biases(self: Any, name: str) -> tuple[Tensor, Tensor]:
        """The biases of the products with inputs and states; zeros where there are none."""
        if self.bias:
            return getattr(self, f"bias_ih_{name}"), getattr(self, f"bias_hh_{name}")
        zeros = getattr(self, f"weight_ih_{name}")[:, 0] * 0
        return zeros, zeros


class LaneLSTM(_Recurrent, nn.LSTM):
    """nn.LSTM without projections and dropout."""

    def forward(self, x: Any, hx: Any = None) -> Any:
        """As nn.LSTM."""
        if not isinstance(x, Tensor) or x.dim() != 3:
            return super().forward(x, hx)
        y, last = self._run(x, () if hx is None else hx)
        return y, tuple(torch.stack(state) for state in zip(*last, strict=True))

    def _direction(self, x: Tensor, name: str, first: list[Tensor], reverse: bool) -> tuple[Tensor, ...]:
        w_ih, w_hh = getattr(self, f"weight_ih_{name}"), getattr(self, f"weight_hh_{name}")
        b_ih, b_hh = self._biases(name)
        xg = nn.functional.linear(x, w_ih, b_ih + b_hh)
        if self.own_kernels and not first:
            from holdfast.kernels.recurrent import lstm

            y, c = lstm(xg, w_hh, reverse)
            return y, y[0 if reverse else -1], c
        h, c = first or [torch.zeros_like(xg[0, :, : w_hh.shape[1]], dtype=w_hh.dtype)] * 2
        outputs = []
        for gates in reversed(xg.unbind()) if reverse else xg.unbind():
            i, f, g, o = (gates + h @ w_hh.mT).chunk(4, -1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            outputs.append(h)
        return torch.stack(outputs[::-1] if reverse else outputs), h, c


class LaneGRU(_Recurrent, nn.GRU):
    """nn.GRU without dropout."""

    def forward(self, x: Any, hx: Any = None) -> Any:
        """As nn.GRU."""
        if not isinstance(x, Tensor) or x.dim() != 3:
            return super().forward(x, hx)
        y, last = self._run(x, () if hx is None else (hx,))
        return y, torch.stack([state for (state,) in last])

    def _direction(self, x: Tensor, name: str, first: list[Tensor], reverse: bool) -> tuple[Tensor, ...]:
        w_ih, w_hh = getattr(self, f"weight_ih_{name}"), getattr(self, f"weight_hh_{name}")
        b_ih, b_hh = self._biases(name)
        units = w_hh.shape[1]
        inner = b_hh[2 * units :]  # added before the reset gate multiplies
        bias = torch.cat([b_ih[: 2 * units] + b_hh[: 2 * units], b_ih[2 * units :]])
        xg = nn.functional.linear(x, w_ih, bias)
        if self.own_kernels and not first:
            from holdfast.kernels.recurrent import gru

            y = gru(xg, w_hh, inner, reverse)
            return y, y[0 if reverse else -1]
        h = first[0] if first else torch.zeros_like(xg[0, :, :units], dtype=w_hh.dtype)
        outputs = []
        for gates in reversed(xg.unbind()) if reverse else xg.unbind():
            (xr, xz, xn), (hr, hz, hn) = gates.chunk(3, -1), (h @ w_hh.mT).chunk(3, -1)
            z = (xz + hz).sigmoid()
            n = (xn + (xr + hr).sigmoid() * (hn + inner)).tanh()
            h = (1 - z) * n + z * h
            outputs.append(h)
        return torch.stack(outputs[::-1] if reverse else outputs), h


def replace_recurrent(net: nn.Module, own_kernels: bool) -> None:
    """Replace the LSTM and GRU layers of a network by layers that run under ``vmap``, with the kernels if given."""
    for module in net.modules():
        for kind, lanes in ((nn.LSTM, LaneLSTM), (nn.GRU, LaneGRU)):
            if is_plain(module, kind) and not module.dropout and not getattr(module, "proj_size", 0):
                module.__class__ = lanes
                module.own_kernels = own_kernels
