"""Validation of values that were read from a file against a schema.

A schema is a type: ``bool``, ``int``, ``float`` (any finite number), ``str``, ``None``, ``Any``, ``list[...]``,
``dict[str, ...]``, unions of these, and ``TypedDict``. Keys that a ``TypedDict`` does not name are allowed, since newer
versions may write more. ``Annotated[list[list[...]], RECTANGULAR]`` requires inner lists of one length.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from types import NoneType, UnionType
from typing import Annotated, Any, Required, Union, get_args, get_origin, get_type_hints, is_typeddict

from holdfast.core.errors import HoldfastError
from holdfast.core.spec import either

RECTANGULAR = "rectangular"
INT64 = 2**63

Check = Callable[[Any], None]


class Mismatch(ValueError):
    """A value does not fit its schema. ``place`` leads to it: ``locals.accuracy[3]``; empty for the value itself."""

    def __init__(self, value: Any, expected: str) -> None:
        shown = repr(value)
        super().__init__(expected)
        self.place, self.expected = "", expected
        self.shown = shown if len(shown) <= 40 else f"{shown[:37]}..."

    def inside(self, place: str) -> Mismatch:
        separator = "." if self.place and not self.place.startswith("[") else ""
        self.place = f"{place}{separator}{self.place}"
        return self

    def __str__(self) -> str:
        return f"{self.place or 'it'} is {self.shown}; it must be {self.expected}"


def validate_schema(value: Any, schema: Any) -> None:
    """Raise `Mismatch` for the first part of ``value`` that does not fit ``schema``."""
    _check(schema)(value)


def validate_content(value: Any, schema: Any, path: object) -> None:
    """Raise a `HoldfastError` that names the file ``path`` if its content does not fit ``schema``."""
    try:
        validate_schema(value, schema)
    except Mismatch as error:
        raise HoldfastError(f"{path} is damaged: {error}; restore it from a copy") from None


@lru_cache(maxsize=256)
def _check(schema: Any) -> Check:
    origin = get_origin(schema)
    if schema is Any:
        return lambda value: None
    if origin is Annotated:
        inner, mark = get_args(schema)
        return _rectangular(_check(inner)) if mark is RECTANGULAR else _check(inner)
    if origin is Required:
        return _check(get_args(schema)[0])
    if origin in (Union, UnionType):
        return _union(get_args(schema))
    if is_typeddict(schema):
        return _typed_dict(schema)
    if origin is list:
        return _list(get_args(schema)[0])
    if origin is dict:
        return _dict(get_args(schema)[1])
    return _scalar(schema)


def _accepts(kind: Any, value: Any) -> bool:
    if kind is float:
        return type(value) in (int, float) and abs(value) < 1e308 and not math.isnan(value)
    if kind is int:
        return type(value) is int and -INT64 <= value < INT64
    return isinstance(value, kind)


WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", NoneType: "null"}


def _scalar(kind: Any) -> Check:
    kind = NoneType if kind is None else kind
    words = WORDS[kind]

    def check(value: Any) -> None:
        if not _accepts(kind, value):
            raise Mismatch(value, words)

    return check


def _union(kinds: tuple[Any, ...]) -> Check:
    scalars = [kind for kind in kinds if kind in WORDS]
    structured = [_check(kind) for kind in kinds if kind not in WORDS]
    words = either([WORDS[kind] for kind in scalars if kind is not NoneType] or ["null"])

    def check(value: Any) -> None:
        if any(_accepts(kind, value) for kind in scalars):
            return
        mismatch = Mismatch(value, words)
        for inner in structured:
            try:
                return inner(value)
            except Mismatch as error:
                mismatch = error
        raise mismatch

    return check


def _list(item: Any) -> Check:
    check_item = _check(item)

    def check(value: Any) -> None:
        if not isinstance(value, list):
            raise Mismatch(value, "a list")
        for number, entry in enumerate(value):
            try:
                check_item(entry)
            except Mismatch as error:
                raise error.inside(f"[{number}]") from None

    return check


def _rectangular(inner: Check) -> Check:
    def check(value: Any) -> None:
        inner(value)
        if isinstance(value, list) and not _is_rectangular(value):
            raise Mismatch(value, "lists of one length")

    return check


def _is_rectangular(value: list[Any]) -> bool:
    rows = [row for row in value if isinstance(row, list)]
    if not rows:
        return True
    flat = [item for row in rows for item in row]
    return len(rows) == len(value) and len({len(row) for row in rows}) == 1 and _is_rectangular(flat)


def _dict(item: Any) -> Check:
    check_item = _check(item)

    def check(value: Any) -> None:
        if not isinstance(value, dict):
            raise Mismatch(value, "a mapping")
        for key, entry in value.items():
            if not isinstance(key, str):
                raise Mismatch(key, "a key that is a text")
            try:
                check_item(entry)
            except Mismatch as error:
                raise error.inside(key) from None

    return check


def _typed_dict(schema: Any) -> Check:
    hints = get_type_hints(schema, include_extras=True)
    checks = {key: _check(hint) for key, hint in hints.items()}
    # Python does not see Required in annotations that are kept as text.
    required = schema.__required_keys__ | {key for key, hint in hints.items() if get_origin(hint) is Required}

    def check(value: Any) -> None:
        if not isinstance(value, dict):
            raise Mismatch(value, "a mapping")
        for key in required:
            if key not in value:
                raise Mismatch(None, f"given: '{key}' is missing")
        for key, entry in value.items():
            if key in checks:
                try:
                    checks[key](entry)
                except Mismatch as error:
                    raise error.inside(key) from None

    return check
