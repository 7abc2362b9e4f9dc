"""Residual networks (He et al., CVPR 2016), with batch or group normalisation."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Literal

from torch import Tensor, nn

from holdfast.core.errors import HoldfastError
from holdfast.kernels import is_plain
from holdfast.models.dense import Layers, head, sequence

NORMS: dict[str, Callable[[int], nn.Module]] = {
    "batch": nn.BatchNorm2d,
    "group": partial(nn.GroupNorm, 2),  # two groups, as in FedFA
}
Norm = Literal["batch", "group"]
Stem = Literal["7x7", "3x3"]


class _Residual(nn.Module):
    """relu(branch(x) + shortcut(x))."""

    def __init__(self, branch: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.branch = branch
        self.shortcut = shortcut
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor
        if getattr(self.branch, "fuses_residual", False) and is_plain(self.relu, nn.ReLU):
            out = self.branch(x, residual=self.shortcut(x))  # one kernel computes all of it
        else:
            out = self.relu(self.branch(x) + self.shortcut(x))
        return out


@dataclass(frozen=True)
class ResNet:
    """A residual network.

    depths: residual blocks in each stage; every stage but the first halves the map and doubles the width.
    kernels: sizes of the convolutions in a block; the first 3x3 convolution has the stride.
    expansion: a block's output channels over the channels inside it.
    norm: ``batch`` or ``group``.
    stem: ``7x7`` (with stride and max pooling, to a quarter of the image's side) or ``3x3`` (which keeps the image's
    size, for small images).
    hidden, projection: layers between the pooled features and the classifier, as in ``dense.head``.
    """

    depths: tuple[int, ...]
    kernels: tuple[int, ...]
    expansion: int
    norm: Norm = "batch"
    stem: Stem = "7x7"
    hidden: tuple[int, ...] = ()
    projection: int | None = None

    def build(self, shape: tuple[int, ...], num_classes: int) -> nn.Module:
        """The network for images ``shape = (channels, height, width)`` of any size."""
        if len(shape) != 3:
            raise HoldfastError(
                "a ResNet takes images (channels x height x width), but a sample has shape "
                f"{'x'.join(map(str, shape))}; 'mlp' takes any shape"
            )
        layers = self._stem(shape[0])
        inputs = 64
        for stage, depth in enumerate(self.depths):
            width = 64 << stage
            blocks = []
            for index in range(depth):
                stride = 2 if stage > 0 and index == 0 else 1
                blocks.append(self._block(inputs, width, stride))
                inputs = width * self.expansion
            layers[f"stage{stage + 1}"] = nn.Sequential(*blocks)
        layers |= {"pool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten()}
        model = sequence(layers | head(inputs, num_classes, self.hidden, self.projection))
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        return model

    def _stem(self, channels: int) -> Layers:
        norm = NORMS[self.norm](64)
        if self.stem == "3x3":
            return {
                "conv": nn.Conv2d(channels, 64, 3, padding=1, bias=False),
                "norm": norm,
                "relu": nn.ReLU(),
            }
        return {
            "conv": nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False),
            "norm": norm,
            "relu": nn.ReLU(),
            "maxpool": nn.MaxPool2d(3, stride=2, padding=1),
        }

    def _block(self, inputs: int, width: int, stride: int) -> _Residual:
        norm = NORMS[self.norm]
        outputs = width * self.expansion
        widths = (inputs, *[width] * (len(self.kernels) - 1), outputs)
        strided = self.kernels.index(3)
        branch: Layers = {}
        for index, ((channels_in, channels_out), kernel) in enumerate(
            zip(pairwise(widths), self.kernels, strict=True)
        ):
            if index > 0:
                branch[f"relu{index}"] = nn.ReLU()
            step = stride if index == strided else 1
            conv = nn.Conv2d(channels_in, channels_out, kernel, step, padding=kernel // 2, bias=False)
            branch |= {f"conv{index + 1}": conv, f"norm{index + 1}": norm(channels_out)}
        shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            shortcut = sequence(
                {"conv": nn.Conv2d(inputs, outputs, 1, stride, bias=False), "norm": norm(outputs)}
            )
        return _Residual(sequence(branch), shortcut)


RESNET18 = ResNet((2, 2, 2, 2), kernels=(3, 3), expansion=1)
RESNET50 = ResNet((3, 4, 6, 3), kernels=(1, 3, 1), expansion=4)


def resnet18(
    shape: tuple[int, ...], num_classes: int, *, norm: Norm = "batch", stem: Stem = "7x7"
) -> nn.Module:
    """ResNet-18: 512 features."""
    return replace(RESNET18, norm=norm, stem=stem).build(shape, num_classes)


def resnet50(
    shape: tuple[int, ...], num_classes: int, *, norm: Norm = "batch", stem: Stem = "7x7"
) -> nn.Module:
    """ResNet-50: 2048 features."""
    return replace(RESNET50, norm=norm, stem=stem).build(shape, num_classes)
