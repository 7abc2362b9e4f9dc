"""Methods by name, for the command line and for experiment files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.core.spec import build, parse_text
from holdfast.methods import builtin
from holdfast.methods.base import Method
from holdfast.methods.stack import Stack

METHODS: dict[str, type[Method]] = {
    kind.name: kind for kind in vars(builtin).values() if isinstance(kind, type) and issubclass(kind, Method)
}
"""The built-in methods by name."""


def parse_method(text: str) -> Method:
    """``fedntd``, ``fedntd:beta=0.5,tau=2``, ``fedka:shared=[4,17]`` or a stack, ``fedntd+fedprox:mu=0.1``."""
    parts = [method_from(parse_text(part, "method")) for part in text.split("+")]
    return parts[0] if len(parts) == 1 else Stack(*parts)


def method_from(description: Mapping[str, Any]) -> Method:
    """The method that ``Method.describe`` described, or one written in an experiment file."""
    name = str(description.get("name", ""))
    if "+" in name:
        return Stack(*(method_from({"name": part, **description.get(part, {})}) for part in name.split("+")))
    return build(METHODS, description, "method")


def is_known(method: Method) -> bool:
    """Whether a file can name this method: it, or each part of a stack, is built in."""
    parts = method.parts if isinstance(method, Stack) else (method,)
    return all(type(part) in METHODS.values() for part in parts)
