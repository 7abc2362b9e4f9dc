"""Fully connected layers: models of them, and the head of every other model."""

from collections.abc import Sequence
from itertools import pairwise
from math import prod

from torch import nn

from holdfast.core.spec import PositiveCount

Layers = dict[str, nn.Module]


def head(width: int, num_classes: int, hidden: Sequence[int] = (), projection: int | None = None) -> Layers:
    """The layers from ``width`` features to logits: hidden layers with ReLU, then the classifier, an ``nn.Linear``.

    ``projection`` adds a linear layer of that width, without ReLU, before the classifier; its outputs are then the
    model's features.
    """
    layers: Layers = {}
    for number, (inputs, outputs) in enumerate(pairwise((width, *hidden)), start=1):
        layers[f"fc{number}"] = nn.Linear(inputs, outputs)
        layers[f"fc{number}_relu"] = nn.ReLU()
    features = hidden[-1] if hidden else width
    if projection is not None:
        layers["projection"] = nn.Linear(features, projection)
        features = projection
    layers["classifier"] = nn.Linear(features, num_classes)
    return layers


def sequence(layers: Layers) -> nn.Sequential:
    """An ``nn.Sequential`` of named layers."""
    model = nn.Sequential()
    for name, layer in layers.items():
        model.add_module(name, layer)
    return model


def linear(shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Softmax regression on samples of any shape."""
    return sequence({"flatten": nn.Flatten(), **head(prod(shape), num_classes)})


def mlp(
    shape: tuple[int, ...], num_classes: int, *, hidden: tuple[PositiveCount, ...] = (200, 200)
) -> nn.Module:
    """Fully connected ReLU layers of widths ``hidden`` on samples of any shape."""
    return sequence({"flatten": nn.Flatten(), **head(prod(shape), num_classes, hidden)})
