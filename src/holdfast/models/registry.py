"""Models by name, specified before the shape of the data is known."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from inspect import Parameter, isfunction, signature
from typing import Any, TypeGuard, get_type_hints

from torch import nn

from holdfast.core import own
from holdfast.core.errors import HoldfastError, unknown
from holdfast.core.spec import named, parse_options, parse_value, validate
from holdfast.models.own import GIVEN, OwnModel, initial_weights, own_model
from holdfast.models.zoo import NETWORKS, PAPER_NETWORKS


@dataclass(frozen=True)
class ModelSpec:
    """A model by name. It becomes an ``nn.Module`` once the shape of the data and its classes are known.

    ``options`` are those of the model, e.g. ``{"norm": "group"}``; other options have their defaults.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if self.name not in NETWORKS:
            raise unknown("model", self.name, NETWORKS)
        hints, options = _options(self.name)
        for option, value in self.options.items():
            if option not in options:
                if not options:
                    raise HoldfastError(f"model '{self.name}' takes no options, but was given '{option}'")
                raise unknown(f"option of model '{self.name}'", option, options)
            options[option] = validate(f"{self.name}: {option}", value, hints[option])
        object.__setattr__(self, "options", options)

    def build(self, shape: tuple[int, ...], num_classes: int, seed: int) -> nn.Module:
        """The module for samples of ``shape`` (without the batch dimension), float32 on the CPU.

        Its initial weights depend only on ``seed``, and the global generators are unchanged.
        """
        options = tuple(self.options.items())
        try:
            return copy.deepcopy(_initial(self.name, options, tuple(shape), num_classes, seed))
        except (RuntimeError, MemoryError, TypeError) as error:
            if isinstance(error, MemoryError) or "alloc" in str(error) or "overflow" in str(error).lower():
                raise HoldfastError(
                    f"model {self.describe()} does not fit into this machine's memory; make it smaller"
                ) from None
            raise

    def describe(self) -> dict[str, Any]:
        """The model as plain data for YAML or JSON: ``{"name": "mlp", "hidden": [64, 64]}``."""
        plain = {
            key: list(value) if isinstance(value, tuple) else value for key, value in self.options.items()
        }
        return {"name": self.name, **plain}

    @classmethod
    def from_description(cls, description: Mapping[str, Any]) -> ModelSpec:
        """The model that ``describe`` described."""
        if "name" not in description:
            raise HoldfastError(f"a model needs a name, one of: {', '.join(sorted(NETWORKS))}")
        options = {key: value for key, value in description.items() if key != "name"}
        return cls(str(description["name"]), options)


@lru_cache(maxsize=1)  # all methods of a comparison begin with the same
def _initial(
    name: str, options: tuple[tuple[str, Any], ...], shape: tuple[int, ...], num_classes: int, seed: int
) -> nn.Module:
    with initial_weights(seed):
        return NETWORKS[name](shape, num_classes, **dict(options))


def _options(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The types and the defaults of a model's options: the keyword-only arguments of its function."""
    network = NETWORKS[name]
    parameters = signature(network).parameters.values()
    defaults = {one.name: one.default for one in parameters if one.kind is Parameter.KEYWORD_ONLY}
    hints = get_type_hints(network, include_extras=True) if defaults else {}
    return hints, defaults


def parse_model(text: str) -> ModelSpec | OwnModel:
    """The model written as ``name`` or ``name:options``: ``cnn``, ``mlp:64,64``, ``resnet18:norm=group``.

    Bare numbers are hidden widths; everything else is ``option=value``. A user-defined model is written
    ``net.py:make_net`` or ``package.module:make_net``, with options after another colon.
    """
    name, _, written = text.partition(":")
    if name.strip() not in NETWORKS:
        reference, options = own.split(text.strip()) or (name.strip(), written)
        return model_from({"name": reference} | parse_options(options, f"model '{text}'"))
    widths, others = [], []
    for part in filter(None, written.split(",")):
        option, equals, value = (piece.strip() for piece in part.partition("="))
        if equals and option != "hidden":
            others.append(part)
        else:
            widths.append(value if equals else option)
    what = f"model '{text}'"
    hidden = {"hidden": [parse_value(width, what) for width in widths]} if widths else {}
    return ModelSpec(name.strip(), hidden | parse_options(",".join(others), what))


def model_from(description: Mapping[str, Any]) -> ModelSpec | OwnModel:
    """The model that ``describe`` described, or one written in an experiment file."""
    if str(description.get("name")) in NETWORKS or "name" not in description:
        return ModelSpec.from_description(description)
    model = own_model(description)
    if model is None:
        raise unknown("model", description["name"], {*NETWORKS, *own.installed("model")})
    return model


def as_model(model: object) -> ModelSpec | OwnModel | nn.Module:
    """A model given in any way: one of `holdfast.models`, text, a module, or a function or class that makes one."""
    if isinstance(model, str):
        return parse_model(model)
    if isinstance(model, (ModelSpec, OwnModel, nn.Module)):
        return model
    if _makes_a_model(model):
        return OwnModel(model, {}, own.code_of(model))
    if isfunction(model) and (missing := _missing(model)):
        raise HoldfastError(
            f"model is {named(model)}, which requires {missing[0]}; a model function is called with those of the "
            f"arguments {', '.join(GIVEN)} that it accepts, and its other arguments must have defaults"
        )
    raise HoldfastError(
        f"model is {named(model)}; it must be one of holdfast.models, such as models.mlp(64), a torch.nn.Module, a "
        f"function of {', '.join(GIVEN)} that makes one, or text such as 'mlp:64'"
    )


def _makes_a_model(value: object) -> TypeGuard[Callable[..., Any]]:
    """Whether a function or a class needs no other arguments than those of a model."""
    if not callable(value) or (isinstance(value, type) and not issubclass(value, nn.Module)):
        return False
    try:
        parameters = signature(value).parameters.values()
    except (TypeError, ValueError):
        return False
    return not _missing(value) and all(p.kind is not Parameter.VAR_POSITIONAL for p in parameters)


def _missing(value: Callable[..., Any]) -> list[str]:
    """The arguments of a function that have no default and are not given to it."""
    parameters = signature(value).parameters.values()
    variable = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    return [
        p.name
        for p in parameters
        if p.name not in GIVEN and p.default is Parameter.empty and p.kind not in variable
    ]


def describe_model(model: ModelSpec | OwnModel | nn.Module) -> dict[str, Any]:
    """A model as plain values; ``own`` if it has no file or import path."""
    if isinstance(model, nn.Module):
        return {"name": type(model).__name__, "own": True}
    return model.describe()


def linear() -> ModelSpec:
    """Softmax regression, for samples of any shape."""
    return ModelSpec("linear")


def mlp(*hidden: int) -> ModelSpec:
    """Fully connected ReLU layers of the given widths (200, 200 when none is given), for any shape."""
    return ModelSpec("mlp", {"hidden": hidden} if hidden else {})


def cnn() -> ModelSpec:
    """The default for images of any size from 4x4 pixels.

    Two 5x5 convolutions (32 and 64 channels) with pooling and a hidden layer of 512: on 32x32 RGB and 28x28
    grey images the network of FedNTD. Larger images get more such stages, images under 16 pixels a small
    network (3x3 convolutions, 16 and 32 channels, hidden layer of 64).
    """
    return ModelSpec("cnn")


def resnet18(norm: str = "batch", stem: str = "7x7") -> ModelSpec:
    """ResNet-18. ``norm``: ``batch`` or ``group``; ``stem``: ``7x7``, or ``3x3`` for small images."""
    return ModelSpec("resnet18", {"norm": norm, "stem": stem})


def resnet50(norm: str = "batch", stem: str = "7x7") -> ModelSpec:
    """ResNet-50. ``norm``: ``batch`` or ``group``; ``stem``: ``7x7``, or ``3x3`` for small images."""
    return ModelSpec("resnet50", {"norm": norm, "stem": stem})


def mobilenetv2(norm: str = "batch", resolution: str = "large") -> ModelSpec:
    """MobileNetV2. ``norm``: ``batch`` or ``group``; ``resolution``: ``large``, or ``small`` for small images."""
    return ModelSpec("mobilenetv2", {"norm": norm, "resolution": resolution})


def vit(patch: int = 4, width: int = 192, depth: int = 6, heads: int = 3) -> ModelSpec:
    """A vision transformer; the sides of images must be multiples of ``patch`` pixels."""
    return ModelSpec("vit", {"patch": patch, "width": width, "depth": depth, "heads": heads})


def char_lstm(embedding: int = 8, width: int = 256, layers: int = 2) -> ModelSpec:
    """LSTM layers that predict the next token at each position: LEAF's network for Shakespeare."""
    return ModelSpec("char-lstm", {"embedding": embedding, "width": width, "layers": layers})


def char_transformer(width: int = 128, heads: int = 4, layers: int = 2) -> ModelSpec:
    """A small transformer that predicts the next token at each position."""
    return ModelSpec("char-transformer", {"width": width, "heads": heads, "layers": layers})


MODELS: dict[str, Callable[..., ModelSpec]] = {
    "linear": linear,
    "mlp": mlp,
    "cnn": cnn,
    "resnet18": resnet18,
    "resnet50": resnet50,
    "mobilenetv2": mobilenetv2,
    "vit": vit,
    "char-lstm": char_lstm,
    "char-transformer": char_transformer,
    **{name: partial(ModelSpec, name) for name in PAPER_NETWORKS},
}
"""Name to what makes a ModelSpec: ``MODELS["ntd-cifar"]()``."""
