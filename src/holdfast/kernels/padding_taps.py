"""Filter taps that overlap only padding and so have no gradient: updated once per client instead of in every step.

On small images the outer taps of a convolution's kernel overlap no pixel; on images of 32 x 32 these taps are 62 % of a
ResNet-18's weights. A client's steps change them only by weight decay and the proximal term, and this change has a
closed form for any number of steps. The optimiser therefore skips them if nothing reads them while the client trains.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from holdfast.kernels.amax import memory_key

UsedTaps = dict[str, range]
"""The rows and columns of filters that overlap a pixel, by parameter name; all others overlap only padding."""


@dataclass
class FilterGradients:
    """The gradients that convolutions have written for filters with padding taps, and the used taps of each."""

    skip_zeros: (
        bool  # whether the gradients of padding taps need not be set to zero, because nothing reads them
    )
    records: list[tuple[Tensor, range]] = field(default_factory=list)

    def used_taps(self, grads: Mapping[str, Tensor]) -> UsedTaps:
        """The used taps of those ``grads`` that a convolution wrote and that were not changed afterwards."""
        # The records keep the gradients allocated, so no other tensor can use their memory.
        taps = {memory_key(g): used for g, used in self.records}
        used_taps = {name: taps.get(memory_key(g)) for name, g in grads.items()}
        return {name: used for name, used in used_taps.items() if used is not None}


# Shared by all threads of the process, since autograd computes gradients in other threads.
_recorded: FilterGradients | None = None


@contextmanager
def recording_filter_gradients(skip_zeros: bool) -> Iterator[FilterGradients]:
    """Record the gradients that convolutions write within this context."""
    global _recorded
    _recorded = FilterGradients(skip_zeros)
    try:
        yield _recorded
    finally:
        _recorded = None


def prepare_gradient(dw: Tensor, taps: range) -> None:
    """Record a filter gradient that is about to be written at ``taps`` only, and zero the rest if it may be read."""
    if _recorded is not None:
        _recorded.records.append((dw, taps))
    if _recorded is None or not _recorded.skip_zeros:
        dw.zero_()


def update_padding_taps_(
    w: Tensor, taps: range, factors: Sequence[tuple[float, float]], global_params: Tensor
) -> None:
    """Set the padding taps of filters ``w`` [L, O, C, R, S] to a w + b s, with ``factors`` (a, b) for each lane.

    ``taps`` are the used rows and columns, which stay as they are; s is ``global_params`` [O, C, R, S].
    """
    by_lane = torch.tensor(factors, dtype=w.dtype).T
    masked = by_lane.view(2, -1, 1, 1, 1, 1).repeat(1, 1, 1, 1, *w.shape[3:])
    for factor, identity in zip(masked, (1, 0), strict=True):
        factor[..., taps.start : taps.stop, taps.start : taps.stop] = identity
    on_gpu = w.device.type == "cuda"  # a copy from pinned memory does not block the host
    of_w, of_global = (masked.pin_memory() if on_gpu else masked).to(w.device, non_blocking=True)
    w.mul_(of_w)
    if any(b for _, b in factors):
        w.addcmul_(of_global, global_params)


def padding_tap_factors(
    steps: int, lr: float, momentum: float, weight_decay: float, proximal_mu: float
) -> tuple[float, float]:
    """(a, b) such that ``steps`` steps of SGD without a gradient, from v = 0, turn w into a w + b s.

    A step is v <- momentum v + weight_decay w + proximal_mu (w - s); w <- w - lr v.
    """
    velocity = np.array([weight_decay + proximal_mu, momentum, -proximal_mu])  # the new v, from (w, v, s)
    step = np.array([[1, 0, 0] - lr * velocity, velocity, [0, 0, 1]])
    of_w, _, of_global = np.linalg.matrix_power(step, steps)[0]
    return float(of_w), float(of_global)
