"""The rim of a convolution's kernel, which around small images meets padding alone and so has no gradient.

On images of 32 x 32 it has 62 % of a ResNet-18's weights. Weight decay is all that happens to them in a client's steps,
so where nobody looks at them meanwhile they rest, and decay once for all the steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

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
        taps = {(g.data_ptr(), g.shape, g.stride()): within for g, within in self.gradients}
        found = {name: taps.get((g.data_ptr(), g.shape, g.stride())) for name, g in grads.items()}
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


def scale_rims_(w: Tensor, taps: range, left: Tensor) -> None:
    """Multiply the rims of filters ``w`` [L, O, C, R, S] by what is ``left`` of them, ``[L]`` on the CPU."""
    factor = left.to(w.dtype).view(-1, 1, 1, 1, 1).repeat(1, 1, 1, *w.shape[3:])
    factor[..., taps.start : taps.stop, taps.start : taps.stop] = 1
    on_gpu = w.device.type == "cuda"  # from pinned memory, so that nobody waits for the copy
    w.mul_((factor.pin_memory() if on_gpu else factor).to(w.device, non_blocking=True))


def left_after(steps: int, lr: float, momentum: float, decay: float) -> float:
    """What is left of a weight after v <- momentum v + decay w; w <- w - lr v, done ``steps`` times from v = 0."""
    step = np.array([[1 - lr * decay, -lr * momentum], [decay, momentum]])
    return float(np.linalg.matrix_power(step, steps)[0, 0])
