"""The geometry of a convolution or pooling: sizes, used filter taps and padded layouts."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from holdfast.kernels.padded_images import PaddedLayout


@dataclass(frozen=True)
class Geometry:
    """A convolution or pooling with a square kernel, on images of ``size`` (height, width)."""

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
        """The rows and columns of the kernel that overlap a pixel; on small images the outer ones do not."""
        used = [
            tap
            for n, outputs in zip(self.size, self.out, strict=True)
            for tap in range(self.kernel)
            if any(0 <= i * self.stride + tap - self.padding < n for i in range(outputs))
        ]
        return range(min(used), max(used) + 1)

    def used_taps(self, w: Tensor) -> Tensor:
        """The part of the filters ``w`` [..., R, R] at `taps`."""
        taps = slice(self.taps.start, self.taps.stop)
        return w[..., taps, taps]

    @property
    def zeros_before(self) -> int:
        """The number of zeros that `taps` need above and to the left of an image."""
        return self.padding - self.taps.start

    @property
    def layout(self) -> PaddedLayout:
        """The padded layout of the images that the convolution reads."""
        height, width = ((n - 1) * self.stride + len(self.taps) for n in self.out)
        return PaddedLayout(self.zeros_before, (height, width))

    def gradient_layout(self, needs_dx: bool) -> PaddedLayout:
        """The padded layout of the output's gradient dy, for dw and, if ``needs_dx``, also dx."""
        if not needs_dx:
            return PaddedLayout(0, self.out)
        # dx is the convolution of dy, dilated by the stride and padded, with the flipped kernel.
        height, width = (n + len(self.taps) - 1 for n in self.size)
        return PaddedLayout(len(self.taps) - 1 - self.zeros_before, (height, width), self.stride)
