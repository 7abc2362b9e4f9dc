"""Every network by name: general ones, which adapt to the shape of the data, and those of papers."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import nn

from holdfast.core.errors import HoldfastError
from holdfast.models.convnet import ConvNet, cnn
from holdfast.models.dense import linear, mlp
from holdfast.models.mobilenet import mobilenetv2
from holdfast.models.resnet import RESNET18, ResNet, resnet18, resnet50
from holdfast.models.text import char_lstm, char_transformer
from holdfast.models.transformer import vit

RGB32, GREY28, RGB28 = (3, 32, 32), (1, 28, 28), (3, 28, 28)


@dataclass(frozen=True)
class PaperNetwork:
    """A network as published, for images of one shape (channels, height, width) only."""

    name: str
    shape: tuple[int, ...]
    network: ConvNet | ResNet

    def __call__(self, shape: tuple[int, ...], num_classes: int) -> nn.Module:
        if shape != self.shape:
            required, given = ("x".join(map(str, sides)) for sides in (self.shape, shape))
            raise HoldfastError(
                f"model '{self.name}' takes images of {required} (channels x height x width), but a sample has "
                f"shape {given}; 'cnn' adapts to any image, 'mlp' to any shape"
            )
        return self.network.build(shape, num_classes)


PAPER_NETWORKS: dict[str, PaperNetwork] = {
    network.name: network
    for network in (
        # FedNTD, also Flashback
        PaperNetwork("ntd-cifar", RGB32, ConvNet((32, 64), hidden=(512,), padding=2)),
        PaperNetwork("ntd-mnist", GREY28, ConvNet((32, 64), hidden=(512,), padding=2)),
        # FedKA
        PaperNetwork("t-cnn", RGB32, ConvNet((32, 64), hidden=(512,))),
        # FedFA; its digit network also has GroupNorm layers, which it never applies; they are left out here
        PaperNetwork("fa-fmnist", GREY28, ConvNet((32, 32), hidden=(384, 192))),
        PaperNetwork("fa-cifar10", RGB32, ConvNet((64, 64), hidden=(384, 192))),
        PaperNetwork(
            "fa-cifar100",
            RGB32,
            replace(RESNET18, norm="group", stem="3x3", hidden=(512,), projection=256),
        ),
        PaperNetwork("fa-digits", RGB28, ConvNet((64, 64, 128), hidden=(2048, 512), padding=2)),
        PaperNetwork("fa-validation-fmnist", GREY28, ConvNet((32, 32), hidden=(384, 100))),
        PaperNetwork("fa-validation-digits", RGB28, ConvNet((64, 64), hidden=(384, 100))),
        # FedMLP
        PaperNetwork("mlp-resnet18", RGB32, RESNET18),
        PaperNetwork("mlp-cnn5", GREY28, ConvNet((64, 64), hidden=(120, 64))),
        # MOON; the outputs of its projection head, of width 256, are the features
        PaperNetwork("moon-cnn", RGB32, ConvNet((6, 16), hidden=(120, 84, 84), projection=256)),
    )
}
NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "linear": linear,
    "mlp": mlp,
    "cnn": cnn,
    "resnet18": resnet18,
    "resnet50": resnet50,
    "mobilenetv2": mobilenetv2,
    "vit": vit,
    "char-lstm": char_lstm,
    "char-transformer": char_transformer,
    **PAPER_NETWORKS,
}
"""Functions of (shape, num_classes) by model name; their keyword-only arguments are the model's options."""
