"""Plain convolutional networks: stages of convolution, ReLU and pooling, then fully connected layers."""

from dataclasses import dataclass
from itertools import pairwise

from torch import nn

from holdfast.core.errors import HoldfastError
from holdfast.models.dense import Layers, head, sequence

_SMALL_IMAGE = 16  # pixels; images with a shorter side get the small network
_MAX_MAP = 8  # pixels; stages are added until the last feature map is at most this long


@dataclass(frozen=True)
class ConvNet:
    """A convolutional network for images of one size.

    channels: output channels of each convolution; all have the same square ``kernel`` (pixels) and ``padding``.
    pools: the number of convolutions, from the first, that are followed by 2x2 max pooling.
    hidden: widths of the fully connected ReLU layers after them.
    projection: width of a linear layer without ReLU before the classifier; None for no such layer.
    """

    channels: tuple[int, ...]
    hidden: tuple[int, ...]
    kernel: int = 5
    padding: int = 0
    pools: int = 2
    projection: int | None = None

    def build(self, shape: tuple[int, ...], num_classes: int) -> nn.Module:
        """The network for images ``shape = (channels, height, width)``."""
        inputs, height, width = shape
        layers: Layers = {}
        for number, (channels_in, channels_out) in enumerate(pairwise((inputs, *self.channels)), start=1):
            layers[f"conv{number}"] = nn.Conv2d(channels_in, channels_out, self.kernel, padding=self.padding)
            layers[f"conv{number}_relu"] = nn.ReLU()
            height, width = (runner + 2 * self.padding - self.kernel + 1 for runner in (height, width))
            if number <= self.pools:
                layers[f"pool{number}"] = nn.MaxPool2d(2)
                height, width = height // 2, width // 2
        layers["flatten"] = nn.Flatten()
        layers |= head(self.channels[-1] * height * width, num_classes, self.hidden, self.projection)
        return sequence(layers)


def cnn(shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """A convolutional network for images of any size from 4x4 pixels; larger images get more stages."""
    if len(shape) != 3 or min(shape[1:]) < 4:
        raise HoldfastError(
            "model 'cnn' takes images (channels x height x width) of at least 4x4 pixels, but a sample has "
            f"shape {'x'.join(map(str, shape))}; 'mlp' takes any shape"
        )
    shortest, longest = min(shape[1:]), max(shape[1:])
    if shortest < _SMALL_IMAGE:
        return ConvNet(channels=(16, 32), hidden=(64,), kernel=3, padding=1).build(shape, num_classes)
    pools = 2
    while longest >> pools > _MAX_MAP and shortest >> pools > 1:
        pools += 1
    channels = (32,) + (64,) * (pools - 1)
    return ConvNet(channels, hidden=(512,), padding=2, pools=pools).build(shape, num_classes)
