"""User-defined models: functions and classes that return a module, and modules."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import isclass, isfunction
from typing import Any

import torch
from torch import nn

from holdfast.core import own
from holdfast.core.errors import HoldfastError
from holdfast.core.random import counter_key
from holdfast.core.spec import named

GIVEN = ("shape", "num_classes", "seed")
"""The arguments that are passed to a function that makes a model, if it names them."""


@contextmanager
def initial_weights(seed: int) -> Iterator[None]:
    """Draw initial weights from a run's seed; the global generators are unchanged."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        # not torch.manual_seed, which would seed the CUDA generators as well
        torch.default_generator.manual_seed(counter_key(seed, "weights"))
        yield


@dataclass(frozen=True)
class OwnModel:
    """A user-defined model.

    ``make`` is a function or a class, or a module. A function is called with ``options`` and those of ``shape``,
    ``num_classes`` and ``seed`` that it names; of a module every run gets a copy. ``code`` is its source, if known.
    """

    make: Callable[..., Any] | nn.Module
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    code: own.Code | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.make, nn.Module):
            own.accepted(self.make, self.name, GIVEN, self.options)
        elif self.options:
            raise HoldfastError(
                f"{self.name} is a module, which has no options; name a function that returns one"
            )

    @property
    def name(self) -> str:
        if self.code is not None:
            return self.code.name
        return str(getattr(self.make, "__qualname__", type(self.make).__name__))

    def build(self, shape: tuple[int, ...], num_classes: int, seed: int) -> nn.Module:
        """The module for samples of ``shape``; random numbers of a function depend only on ``seed``."""
        if isinstance(self.make, nn.Module):
            return copy.deepcopy(self.make)
        values = dict(zip(GIVEN, (tuple(shape), num_classes, seed), strict=True))
        takes = own.accepted(self.make, self.name, GIVEN, self.options)
        with initial_weights(seed):
            made = own.call(self.make, self.name, {key: values[key] for key in takes} | dict(self.options))
        if not isinstance(made, nn.Module):
            raise HoldfastError(f"{self.name} returns {named(made)}; it must return a torch.nn.Module")
        return made

    def describe(self) -> dict[str, Any]:
        """The reference and the options as plain values; ``own`` if there is no reference."""
        where = {"name": self.name, "own": True} if self.code is None else self.code.describe()
        return where | dict(self.options)


def own_model(description: Mapping[str, Any]) -> OwnModel | None:
    """The model that a reference names; None if the name is not a reference."""
    code = own.find(description, "model")
    if code is None:
        return None
    if not (isfunction(code.value) or isinstance(code.value, nn.Module) or _makes_modules(code.value)):
        raise HoldfastError(
            f"{code.name} is {named(code.value)}; it must be a function that returns a torch.nn.Module, a class of "
            "such modules, or a module"
        )
    options = {key: value for key, value in description.items() if key not in ("name", *own.RECORDED)}
    return OwnModel(code.value, options, code)


def _makes_modules(value: object) -> bool:
    return isclass(value) and issubclass(value, nn.Module)
