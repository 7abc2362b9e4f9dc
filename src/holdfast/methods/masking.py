"""User-defined methods, and whether they may be trained on padded batches."""

from __future__ import annotations

from holdfast.methods.base import Method, own_classes
from holdfast.methods.stack import Stack

READ_THE_BATCH = ("task_loss", "loss", "ascent_loss", "step", "after_step")
"""The hooks that receive a batch, including its padding."""


def is_own(method: Method) -> bool:
    """Whether the method, or a part of a stack, is not part of Holdfast."""
    return any(own_classes(type(part)) for part in _parts(method))


def respects_mask(method: Method) -> bool:
    """Whether all hooks of a method exclude the padding of a batch, as those of built-in methods do.

    A user-defined class must declare ``uses_mask`` if it overrides a hook that receives the batch, or a function that a
    built-in method may call there. It may override other hooks freely.
    """
    return all(_class_respects_mask(own) for part in _parts(method) for own in own_classes(type(part)))


def _parts(method: Method) -> tuple[Method, ...]:
    return method.parts if isinstance(method, Stack) else (method,)


def _class_respects_mask(own: type[Method]) -> bool:
    if vars(own).get("uses_mask", False):
        return True
    inherited = own.__mro__[1:]
    redefined = {
        name
        for name, value in vars(own).items()
        if (callable(value) or isinstance(value, property | staticmethod | classmethod))
        and not name.startswith("__")
        and any(name in vars(base) for base in inherited)
    }
    return redefined.isdisjoint(READ_THE_BATCH) and redefined <= vars(Method).keys()
