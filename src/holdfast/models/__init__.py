"""Models: the networks of papers, general ones, and any torch module as a function of its weights."""

from holdfast.models.network import Network, Output
from holdfast.models.registry import (
    MODELS,
    ModelSpec,
    char_lstm,
    char_transformer,
    cnn,
    linear,
    mlp,
    mobilenetv2,
    parse_model,
    resnet18,
    resnet50,
    vit,
)

__all__ = [
    "MODELS",
    "ModelSpec",
    "Network",
    "Output",
    "char_lstm",
    "char_transformer",
    "cnn",
    "linear",
    "mlp",
    "mobilenetv2",
    "parse_model",
    "resnet18",
    "resnet50",
    "vit",
]
