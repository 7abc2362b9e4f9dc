"""The rim of a convolution's kernel, which around small images meets padding alone and so has no gradient.

On images of 32 x 32 it has 62 % of a ResNet-18's weights. Weight decay, and a pull towards what was sent, are all that
happens to them in a client's steps, so where nobody looks at them meanwhile they rest, and move once for all the steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from holdfast.kernels.amax import place

Rims = dict[str, range]
"""The rows and columns of a filter within its rim, by the parameter's name."""


@dataclass
class Written:
    """The gradients with a rim that convolutions have written, and the rows and columns within it."""

    unread: bool  # nobody reads the rims, which need not be zero then
    gradients: list[tuple[Tensor, range]] = field(default_factory=list)

    def untouched(self, grads: Mapping[str, Tensor]) -> Rims:
        """Those of ``grads`` that are what a convolution wrote, and nothing else: nothing was added to them."""
        # They are held until now, so no other tensor can have got their memory.
        taps = {place(g): within for g, within in self.gradients}
        found = {name: taps.get(place(g)) for name, g in grads.items()}
        return {name: within for name, within in found.items() if within is not None}


_watching: Written | None = None  # of this process, since gradients are computed in threads of torch's


@contextmanager
def written(unread: bool) -> Iterator[Written]:
    """What convolutions write in here."""
    global _watching
    _watching = Written(unread)
    try:
        yield _watching
    finally:
        _watching = None


def begin_gradient(dw: Tensor, taps: range) -> None:
    """To be called for a gradient whose ``taps`` are about to be written: its rim is cleared, if anybody reads it."""
    if _watching is not None:
        _watching.gradients.append((dw, taps))
    if _watching is None or not _watching.unread:
        dw.zero_()


def move_rims_(w: Tensor, taps: range, moved: Sequence[tuple[float, float]], sent: Tensor) -> None:
    """Make of the rims of filters ``w`` [L, O, C, R, S] so much of themselves, and of what was ``sent`` [O, C, R, S]:
    two factors for each lane."""
    each = torch.tensor(moved, dtype=w.dtype).T
    factors = each.view(2, -1, 1, 1, 1, 1).repeat(1, 1, 1, 1, *w.shape[3:])
    for factor, within in zip(factors, (1, 0), strict=True):
        factor[..., taps.start : taps.stop, taps.start : taps.stop] = within
    on_gpu = w.device.type == "cuda"  # from pinned memory, so that nobody waits for the copy
    own, drawn = (factors.pin_memory() if on_gpu else factors).to(w.device, non_blocking=True)
    w.mul_(own)
    if any(share for _, share in moved):
        w.addcmul_(drawn, sent)


def moved_by(steps: int, lr: float, momentum: float, decay: float, pull: float) -> tuple[float, float]:
    """What a weight w is of itself and of s after v <- momentum v + decay w + pull (w - s); w <- w - lr v, done
    ``steps`` times from v = 0."""
    force = np.array([decay + pull, momentum, -pull])  # the new v, of (w, v, s)
    step = np.array([[1, 0, 0] - lr * force, force, [0, 0, 1]])
    own, _, drawn = np.linalg.matrix_power(step, steps)[0]
    return float(own), float(drawn)
