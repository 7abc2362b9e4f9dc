"""The optimisers of local training by name, with their options.

Their common options are settings of the run: the learning rate, ``momentum`` and ``weight_decay``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, ClassVar

from holdfast.core.errors import HoldfastError
from holdfast.core.spec import NonNegative, Range, build, named, parse_text, validate_fields

Decay = Annotated[float, Range(ge=0, lt=1)]

Factory = Callable[..., Any]
"""Makes a ``torch.optim.Optimizer`` from parameters and ``lr``: a class of ``torch.optim``, or a function."""


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimiser's options, with PyTorch's defaults."""

    name: ClassVar[str]
    default_lr: ClassVar[float] = 0.001
    uses_momentum: ClassVar[bool] = False
    """Whether the run's ``momentum`` applies to it."""
    slots: ClassVar[tuple[str, ...]] = ()
    """The tensors that it keeps for each parameter from step to step, besides its momentum."""

    def __post_init__(self) -> None:
        validate_fields(self, self.name)

    def describe(self) -> dict[str, Any]:
        """Name and options as plain values."""
        options = {key: list(v) if isinstance(v, tuple) else v for key, v in asdict(self).items()}
        return {"name": self.name} | options


@dataclass(frozen=True)
class SGD(OptimizerSpec):
    """v <- momentum v + g;  w <- w - η v, or with ``nesterov`` w <- w - η (g + momentum v)."""

    name: ClassVar[str] = "sgd"
    default_lr: ClassVar[float] = 0.1
    uses_momentum: ClassVar[bool] = True

    nesterov: bool = False


@dataclass(frozen=True)
class Adam(OptimizerSpec):
    """Kingma and Ba, ICLR 2015; weight decay is added to the gradient."""

    name: ClassVar[str] = "adam"
    slots: ClassVar[tuple[str, ...]] = ("mean", "square")

    betas: tuple[Decay, ...] = (0.9, 0.999)
    eps: NonNegative = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.betas) != 2:
            raise HoldfastError(
                f"{self.name}: betas are {list(self.betas)}; they must be two numbers, such as [0.9,0.999]"
            )


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay, w <- (1 - η weight_decay) w. Loshchilov and Hutter, ICLR 2019."""

    name: ClassVar[str] = "adamw"


@dataclass(frozen=True)
class RMSprop(OptimizerSpec):
    """s <- alpha s + (1 - alpha) g²;  w <- w - η g / (√s + eps)."""

    name: ClassVar[str] = "rmsprop"
    uses_momentum: ClassVar[bool] = True
    slots: ClassVar[tuple[str, ...]] = ("square",)

    alpha: Decay = 0.99
    eps: NonNegative = 1e-8


@dataclass(frozen=True)
class Adagrad(OptimizerSpec):
    """s <- s + g²;  w <- w - η g / (√s + eps). Duchi et al., JMLR 2011."""

    name: ClassVar[str] = "adagrad"
    default_lr: ClassVar[float] = 0.01
    slots: ClassVar[tuple[str, ...]] = ("sum",)

    eps: NonNegative = 1e-10


OPTIMIZERS: dict[str, type[OptimizerSpec]] = {
    kind.name: kind for kind in (SGD, Adam, AdamW, RMSprop, Adagrad)
}


def optimizer_from(written: str | Mapping[str, Any]) -> OptimizerSpec:
    """The optimiser written as ``adam:betas=[0.9,0.99]`` or as a mapping."""
    description = parse_text(written, "optimizer") if isinstance(written, str) else written
    return build(OPTIMIZERS, description, "optimizer")


def described(written: object) -> dict[str, Any] | Factory:
    """The optimiser's name and options as plain values; a factory is returned unchanged."""
    if isinstance(written, (str, Mapping)):
        return optimizer_from(written).describe()
    if callable(written):
        return written
    raise HoldfastError(
        f"optimizer is {named(written)}; it must be text such as 'adam:eps=1e-6', or a class of torch.optim"
    )


def description(optimizer: Mapping[str, Any] | str | Factory) -> dict[str, Any]:
    """The optimiser as plain values, for experiment.yaml; a factory is the user's ``own``."""
    if isinstance(optimizer, (str, Mapping)):
        return optimizer_from(optimizer).describe()
    options = getattr(optimizer, "keywords", {})  # of a functools.partial
    return {"name": factory_name(optimizer), "own": True} | {key: repr(v) for key, v in options.items()}


def factory_name(factory: Factory) -> str:
    """The name of a factory in messages and in experiment.yaml."""
    inner = getattr(factory, "func", factory)  # of a functools.partial
    return str(getattr(inner, "__name__", type(inner).__name__))
