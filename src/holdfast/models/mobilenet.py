"""MobileNetV2 (Sandler et al., CVPR 2018), with batch or group normalisation."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from holdfast.core.errors import HoldfastError
from holdfast.models.dense import Layers, head, sequence
from holdfast.models.resnet import NORMS, Norm

Resolution = Literal["large", "small"]

# Of each stage: how many times a block widens its channels inside, its output channels, blocks, stride of the first.
STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


class InvertedResidual(nn.Module):
    """A 1x1 convolution to more channels, a depthwise convolution, and a 1x1 convolution to fewer channels."""

    def __init__(self, inputs: int, outputs: int, stride: int, widening: int, norm: Norm) -> None:
        super().__init__()
        width = inputs * widening
        layers: Layers = {}
        if widening > 1:
            layers |= _conv("widen", inputs, width, 1, norm=norm)
        layers |= _conv("depthwise", width, width, 3, stride, groups=width, norm=norm)
        layers |= _conv("narrow", width, outputs, 1, norm=norm)
        del layers["narrow_relu"]
        self.branch = sequence(layers)
        self.adds = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.branch(x)
        return x + y if self.adds else y


def _conv(
    name: str, inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1, *, norm: Norm
) -> Layers:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, groups=groups, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out")
    return {name: conv, f"{name}_norm": NORMS[norm](outputs), f"{name}_relu": nn.ReLU6()}


def mobilenetv2(
    shape: tuple[int, ...], num_classes: int, *, norm: Norm = "batch", resolution: Resolution = "large"
) -> nn.Module:
    """MobileNetV2 without dropout: 1280 features.

    With ``resolution=small`` the first convolution and the first stage keep the image's size, for images of 32 pixels.
    """
    if len(shape) != 3:
        raise HoldfastError(
            "model 'mobilenetv2' takes images (channels x height x width), but a sample has shape "
            f"{'x'.join(map(str, shape))}; 'mlp' takes any shape"
        )
    small = resolution == "small"
    layers = _conv("stem", shape[0], 32, 3, 1 if small else 2, norm=norm)
    inputs = 32
    for number, (widening, outputs, blocks, stride) in enumerate(STAGES, start=1):
        stage = []
        for block in range(blocks):
            step = stride if block == 0 and not (small and number == 2) else 1
            stage.append(InvertedResidual(inputs, outputs, step, widening, norm))
            inputs = outputs
        layers[f"stage{number}"] = nn.Sequential(*stage)
    layers |= _conv("last", inputs, 1280, 1, norm=norm)
    layers |= {"pool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten()}
    return sequence(layers | head(1280, num_classes))
