"""Specifications: text such as ``fedntd:beta=0.5`` or ``dirichlet:0.1`` to values and back.

Everything that has a specification as text is a dataclass whose fields are its options. Types and ranges are taken from
the annotations: ``beta: NonNegative = 1.0`` is a number of at least 0, ``Literal["batch", "group"]`` one of two words.
One parser reads the text, one validator checks the values, and every error is one sentence that names the value and the
allowed ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields
from functools import cache
from numbers import Integral, Real
from types import FunctionType, NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from holdfast.core.errors import HoldfastError, unknown

T = TypeVar("T")

Description = Mapping[str, Any]
"""A specification as plain values: its name and its options, ``{"name": "fedntd", "beta": 0.5}``."""


@dataclass(frozen=True)
class Range:
    """The numbers that a value may have; ``unit`` follows the lower bound in the error."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    unit: str = ""

    def __contains__(self, value: float) -> bool:
        return (
            (self.ge is None or value >= self.ge)
            and (self.gt is None or value > self.gt)
            and (self.le is None or value <= self.le)
            and (self.lt is None or value < self.lt)
        )

    def __str__(self) -> str:
        if self.ge is not None and self.lt is not None:
            return f"from {self.ge:g} up to, but not, {self.lt:g}"
        if self.ge is not None and self.le is not None:
            return f"between {self.ge:g} and {self.le:g}"
        lower = f"above {self.gt:g}" if self.gt is not None else f"at least {self.ge:g}"
        upper = "" if self.le is None else f" and at most {self.le:g}"
        upper = upper if self.lt is None else f" and below {self.lt:g}"
        return f"{lower}{upper}{f' {self.unit}' if self.unit else ''}"


NonNegative = Annotated[float, Range(ge=0)]
Positive = Annotated[float, Range(gt=0)]
Fraction = Annotated[float, Range(ge=0, le=1)]
PositiveFraction = Annotated[float, Range(gt=0, le=1)]
Momentum = Annotated[float, Range(ge=0, lt=1)]
Count = Annotated[int, Range(ge=0)]
PositiveCount = Annotated[int, Range(ge=1)]


# Values ---------------------------------------------------------------------------------------------------


def validate(name: str, value: Any, hint: Any) -> Any:
    """``value`` as the type that ``hint`` names; `HoldfastError` if it is another kind of value or out of range.

    Hints are bool, int, float, str, Literal, a tuple of one type, Mapping, and unions of these with None; ``Annotated``
    adds a `Range`. A value with any other hint is returned unchanged.
    """
    kinds, limits = _alternatives(hint)
    if not all(map(_is_known, kinds)):
        return value
    converted = _matching(value, kinds)
    if converted is MISSING:
        raise HoldfastError(f"{name} is {value!r}; it must be {_wanted(kinds)}")
    for limit in limits:
        if isinstance(converted, (int, float)) and converted not in limit:
            raise HoldfastError(f"{name} is {converted!r}; it must be {limit}")
    return converted


def validated_fields(instance: object, owner: str = "") -> dict[str, Any]:
    """The validated values of a dataclass's fields; ``owner`` precedes the field's name in errors."""
    prefix = f"{owner}: " if owner else ""
    return {
        key: validate(f"{prefix}{key}", getattr(instance, key), hint)
        for key, hint in field_hints(type(instance)).items()
    }


def validate_fields(instance: object, owner: str = "") -> None:
    """Validate the fields of a frozen dataclass and store the converted values."""
    for key, value in validated_fields(instance, owner).items():
        object.__setattr__(instance, key, value)


def field_hints(kind: Any) -> Mapping[str, Any]:
    """The annotations of a dataclass's fields, ``Annotated`` included."""
    return _field_hints(kind)


def choices(hint: Any) -> tuple[str, ...]:
    """The words that a Literal allows; empty for any other hint."""
    kinds, _ = _alternatives(hint)
    return tuple(word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind))


def option_type(hint: Any) -> type:
    """The type of a command line's option for a setting: bool, int, float, or str for everything written as text."""
    kinds, _ = _alternatives(hint)
    return next((kind for kind in (bool, float, int) if kind in kinds), str)


def accepted(hint: Any) -> str:
    """The values that a hint allows, in words: ``a whole number, at least 1``."""
    kinds, limits = _alternatives(hint)
    known = [kind for kind in kinds if _is_known(kind) and kind is not NoneType]
    words = [_in_words(kind) for kind in known] + ["a Python object"] * (not all(map(_is_known, kinds)))
    return ", ".join([either(words), *map(str, limits)])


def either(words: Iterable[str]) -> str:
    """The words as a choice: ``batch or group``; ``a, b or c``."""
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last


def named(value: object) -> str:
    """A description of a value for error messages: ``a Dataset``, ``the class FedAvg``."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, FunctionType):
        return f"the function {value.__name__}"
    return f"a {type(value).__name__}"


@cache
def _field_hints(kind: Any) -> Mapping[str, Any]:
    names = [field.name for field in fields(kind)]
    try:
        hints = get_type_hints(kind, include_extras=True)
    except NameError:  # a class within a function, whose annotations name what only that function has
        builtin = {"bool": bool, "int": int, "float": float, "str": str}
        hints = {field.name: builtin.get(str(field.type), Any) for field in fields(kind)}
    return {name: hints[name] for name in names}


def _alternatives(hint: Any) -> tuple[tuple[Any, ...], list[Range]]:
    """The types of a union, and the ranges that ``Annotated`` adds."""
    limits: list[Range] = []
    if get_origin(hint) is Annotated:
        hint, *extras = get_args(hint)
        limits = [extra for extra in extras if isinstance(extra, Range)]
    if get_origin(hint) not in (Union, UnionType):
        return (hint,), limits
    kinds: list[Any] = []
    for kind in get_args(hint):
        inner, more = _alternatives(kind)
        kinds += inner
        limits += more
    return tuple(kinds), limits


def _is_known(kind: Any) -> bool:
    return kind in (bool, int, float, str, NoneType) or get_origin(kind) in (Literal, tuple, Mapping)


def _matching(value: Any, kinds: tuple[Any, ...]) -> Any:
    """The value as the first of the types that it fits; MISSING if it fits none."""
    truth = isinstance(value, bool)
    for kind in kinds:
        origin = get_origin(kind)
        if kind is NoneType and value is None:
            return None
        if kind is bool and truth:
            return value
        if kind is int and isinstance(value, Integral) and not truth:
            return int(value)
        if kind is float and isinstance(value, Real) and not truth and _is_finite(value):
            return float(value)
        if kind is str and isinstance(value, str):
            return value
        if origin is Literal and any(type(value) is type(word) and value == word for word in get_args(kind)):
            return value
        if origin is tuple and isinstance(value, (list, tuple)):
            inner, limits = _alternatives(get_args(kind)[0])
            items = [_matching(item, inner) for item in value]
            if MISSING not in items and all(item in limit for item in items for limit in limits):
                return tuple(items)
        if origin is Mapping and isinstance(value, Mapping):
            return value
    return MISSING


def _is_finite(value: Real) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond the largest float
        return False


def _wanted(kinds: Sequence[Any]) -> str:
    """The allowed values, in words."""
    return either([_in_words(kind) for kind in kinds if kind is not NoneType])


def _in_words(kind: Any) -> str:
    plain = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    if kind in plain:
        return plain[kind]
    if get_origin(kind) is Literal:
        return either(map(str, get_args(kind)))
    if get_origin(kind) is tuple:
        (inner, *_), limits = _alternatives(get_args(kind)[0])
        examples = {int: ("whole numbers", "[4,17]"), str: ("names", "[auroc,accuracy]")}
        items, example = examples.get(inner, ("numbers", "[0.5,0.25]"))
        return f"a list of {items}{''.join(f', each {limit}' for limit in limits)}, such as {example}"
    return "a mapping"


# Text -----------------------------------------------------------------------------------------------------


def parse_text(text: str, what: str, positional: Sequence[str] = ()) -> dict[str, Any]:
    """The description written as ``name`` or ``name:option=value,…``; ``what`` names the kind of thing in errors.

    The options in ``positional`` may be given by their value alone, in this order: ``dirichlet:0.1``.
    """
    name, _, options = text.strip().partition(":")
    return {"name": name.strip()} | parse_options(options, f"{what} '{text.strip()}'", positional)


def parse_options(text: str, what: str, positional: Sequence[str] = ()) -> dict[str, Any]:
    """The mapping written as ``option=value,…``, without names for the options in ``positional``."""
    values: dict[str, Any] = {}
    for number, option in enumerate(_split(text)):
        key, equals, value = (piece.strip() for piece in option.partition("="))
        if not equals:
            if number >= len(positional):
                expected = f"takes at most {len(positional)} values without a name" if positional else ""
                raise HoldfastError(f"'{option}' in {what} {expected or 'is not of the form option=value'}")
            key, value = positional[number], option
        if key in values:
            raise HoldfastError(f"{key} is given twice in {what}")
        values[key] = parse_value(value, what)
    return values


def _split(text: str) -> list[str]:
    """The parts between commas, but for commas inside of brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character == "[") - (character == "]")
        if character == "," and depth <= 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


def parse_value(text: str, what: str) -> Any:
    """A value as YAML reads it: number, true or false, list or text."""
    from holdfast.core import yaml12

    if text == "none":
        return None
    try:
        value = yaml12.load(text)
    except ValueError:
        raise HoldfastError(f"'{text}' in {what} is not a number, a list or a word") from None
    if isinstance(value, str):
        with suppress(ValueError):
            return float(value)  # inf and nan, which are refused as numbers
        return value
    return value if isinstance(value, (bool, int, float, list, NoneType)) else text


# Descriptions ---------------------------------------------------------------------------------------------


def build(kinds: Mapping[str, type[T]], description: Description, what: str, example: str = "") -> T:
    """The dataclass among ``kinds`` that ``description`` names, made with its options.

    ``what`` is the kind of thing in errors, ``example`` how one is written.
    """
    if "name" not in description:
        raise HoldfastError(f"a {what} needs a name, one of {', '.join(kinds)}")
    name = str(description["name"])
    if name not in kinds:
        raise unknown(what, name, kinds)
    options = {str(key): value for key, value in description.items() if key != "name"}
    members = fields(kinds[name])  # type: ignore[arg-type]
    known = [field.name for field in members]
    for key in options:
        if key not in known:
            raise (
                unknown(f"option of {name}", key, known) if known else HoldfastError(f"{name} has no options")
            )
    missing = [f.name for f in members if f.default is MISSING and f.name not in options]
    if missing:
        hint = f", such as {example}" if example else ""
        raise HoldfastError(f"{what} {name} needs {' and '.join(missing)}{hint}")
    return kinds[name](**options)
