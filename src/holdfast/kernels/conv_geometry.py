"""Where the pixels of a convolution lie."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from holdfast.kernels.padded_images import PaddedLayout


@dataclass(frozen=True)
class Geometry:
    """A convolution, or pooling, with a square kernel on images of that ``size``, height and width."""

    size: tuple[int, int]
    kernel: int
    stride: int
    padding: int

    @property
    def out(self) -> tuple[int, int]:
        """Height and width of the output."""
        height, width = ((n + 2 * self.padding - self.kernel) // self.stride + 1 for n in self.size)
        return height, width

    @property
    def taps(self) -> range:
        """Those rows and columns of the kernel that meet a pixel: around small images its rim meets padding alone."""
        met = [
            tap
            for n, outputs in zip(self.size, self.out, strict=True)
            for tap in range(self.kernel)
            if any(0 <= at * self.stride + tap - self.padding < n for at in range(outputs))
        ]
        return range(min(met), max(met) + 1)

    def used(self, w: Tensor) -> Tensor:
        """The part of ``w`` [..., R, R] that they are."""
        taps = slice(self.taps.start, self.taps.stop)
        return w[..., taps, taps]

    @property
    def before(self) -> int:
        """How many zeros they need above and to the left of an image."""
        return self.padding - self.taps.start

    @property
    def frame(self) -> PaddedLayout:
        """Where an image lies for `forward`."""
        height, width = ((n - 1) * self.stride + len(self.taps) for n in self.out)
        return PaddedLayout(self.before, (height, width))

    def frame_of_gradient(self, of_input: bool) -> PaddedLayout:
        """Where dy lies for `gradients`."""
        if not of_input:
            return PaddedLayout(0, self.out)
        # dx is the convolution of dy, spread out and padded, with the kernel turned about.
        height, width = (n + len(self.taps) - 1 for n in self.size)
        return PaddedLayout(len(self.taps) - 1 - self.before, (height, width), self.stride)
