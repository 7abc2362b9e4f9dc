"""Methods by name, for the command line and for experiment files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from inspect import signature
from itertools import chain
from typing import Any

from holdfast.core import own
from holdfast.core.errors import HoldfastError, unknown
from holdfast.core.spec import build, named, parse_options, parse_text
from holdfast.methods import builtin
from holdfast.methods.base import Method
from holdfast.methods.stack import Stack

METHODS: dict[str, type[Method]] = {
    kind.name: kind for kind in vars(builtin).values() if isinstance(kind, type) and issubclass(kind, Method)
}
"""The built-in methods by name."""


def parse_method(text: str) -> Method:
    """``fedntd``, ``fedntd:beta=0.5,tau=2``, ``fedka:shared=[4,17]`` or a stack, ``fedntd+fedprox:mu=0.1``.

    A user-defined method is written ``mine.py:Mine`` or ``package.module:Mine``, with options after another
    colon: ``mine.py:Mine:beta=0.5``. ``mine.py`` alone refers to the only method in that file.
    """
    parts = [method_from(_parse(part.strip())) for part in text.split("+")]
    return parts[0] if len(parts) == 1 else Stack(*parts)


def _parse(text: str) -> dict[str, Any]:
    reference = None if text.partition(":")[0].strip() in METHODS else own.split(text)
    if reference is None:
        return parse_text(text, "method")
    name, options = reference
    return {"name": name} | parse_options(options, f"method '{text}'")


def method_from(description: Mapping[str, Any]) -> Method:
    """The method from the output of `describe_method` or from an experiment file."""
    name = str(description.get("name", ""))
    if "+" in name:
        return Stack(*map(method_from, _parts(name, description)))
    if name in METHODS or not name:
        return build(METHODS, description, "method")
    code = own.find(description, "method", _is_method_class)
    if code is None:
        raise unknown("method", name, {*METHODS, *own.installed("method")})
    options = {key: value for key, value in description.items() if key not in own.RECORDED}
    return _own_method(code, options)


def _parts(name: str, description: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The descriptions of a stack's parts; an option of the stack itself is that of the first part that has it."""
    parts: list[dict[str, Any]] = []
    names = name.split("+")
    for part in names:
        options = description.get(part, {})
        if not isinstance(options, Mapping):
            raise HoldfastError(f"{part} in {name} is {options!r}; it must be a mapping of its options")
        parts.append({"name": part, **options})
    for key, value in description.items():
        if key in ("name", "own", *names):
            continue
        known = [[field.name for field in fields(method_class(part["name"]))] for part in parts]
        owner = next((part for part, options in zip(parts, known, strict=True) if key in options), None)
        if owner is None:
            raise unknown(f"option of {name}", str(key), chain(*known))
        owner[key] = value
    return parts


def method_class(name: str) -> type[Method]:
    """The class of a method that is built in, of an installed package, or named by a reference (``mine.py:Mine``)."""
    if name in METHODS:
        return METHODS[name]
    code = own.find({"name": name}, "method", _is_method_class)
    if code is None:
        raise unknown("method", name, {*METHODS, *own.installed("method")})
    return type(code.value) if isinstance(code.value, Method) else _class(code)


def _class(code: own.Code) -> type[Method]:
    if not _is_method_class(code.value):
        raise HoldfastError(
            f"{code.name} is {named(code.value)}; it must be a class that inherits from holdfast.Method"
        )
    kind: type[Method] = code.value
    return kind


def _own_method(code: own.Code, description: Mapping[str, Any]) -> Method:
    """The method of a class with the options of ``description``, or the given object."""
    if isinstance(code.value, Method):
        if len(description) > 1:
            raise HoldfastError(
                f"{code.name} is an object, whose options are fixed; name its class to set them"
            )
        return code.value
    kind = _class(code)
    options = {key: value for key, value in description.items() if key != "name"}
    if (options and not fields(kind)) or not _is_made_of_fields(kind):
        raise HoldfastError(
            f"{code.name} has no dataclass fields for its options; decorate the class with "
            "@dataclass(frozen=True) and declare each option as a field, such as 'beta: float = 1.0'"
        )
    own.accepted(kind, code.name, (), options)
    method: Method = own.call(kind, code.name, options)
    return method


def _is_made_of_fields(kind: type[Method]) -> bool:
    """Whether the values of its fields determine an object of this class."""
    return set(signature(kind).parameters) <= {field.name for field in fields(kind)}


def _is_method_class(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Method) and value not in (Method, Stack)


def describe_method(method: Method) -> dict[str, Any]:
    """The method as plain values: its name, or the reference to its class, and its options; a stack has its parts.

    ``own`` marks a user-defined method without a file or an import path.
    """
    if isinstance(method, Stack):
        parts = {part.name: describe_method(part) for part in method.parts}
        mark = {"own": True} if any(part.get("own") for part in parts.values()) else {}
        return {"name": method.name} | parts | mark
    described = method.describe()
    if type(method) in METHODS.values():
        return described
    code = own.code_of(type(method)) if _is_made_of_fields(type(method)) else None
    if code is None:
        return described | {"own": True}
    for key in (*own.RECORDED, "own"):
        if key in described:
            raise HoldfastError(
                f"{method.name}: '{key}' is a reserved name in the records of a run; rename the field"
            )
    return described | code.describe()
