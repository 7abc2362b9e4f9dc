"""Partitions by name, for the command line and for experiment files."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from holdfast.core.errors import HoldfastError, unknown
from holdfast.data.partitions.base import Partition, need
from holdfast.data.partitions.dirichlet import (
    Dirichlet,
    DirichletInner,
    DirichletTwoStage,
    DirichletUncapped,
    QuantitySkew,
)
from holdfast.data.partitions.groups import ByDomain, ByWriter, WriterTransfer
from holdfast.data.partitions.shards import IID, ClassesPerClient, ClassShards, Shards

PARTITIONS: dict[str, type[Partition]] = {
    partition.name: partition
    for partition in (
        IID,
        Shards,
        ClassShards,
        Dirichlet,
        DirichletUncapped,
        DirichletInner,
        DirichletTwoStage,
        ClassesPerClient,
        QuantitySkew,
        ByDomain,
        ByWriter,
        WriterTransfer,
    )
}
"""Every partition by the name it has on the command line and in experiment files."""


def partition_from(description: Mapping[str, Any]) -> Partition:
    """The partition that `Partition.describe` described: ``{"name": "dirichlet", "alpha": 0.1}``."""
    values = dict(description)
    name = values.pop("name", None)
    need(isinstance(name, str), f"a partition needs a name, one of {', '.join(PARTITIONS)}")
    kind = _kind(str(name))
    hints = typing.get_type_hints(kind)
    for key, value in values.items():
        if key not in {f.name for f in fields(kind)}:
            raise unknown(f"parameter of partition '{name}'", key, [f.name for f in fields(kind)])
        values[key] = _converted(value, hints[key], f"{key} of partition '{name}'")
    missing = [f.name for f in fields(kind) if f.default is MISSING and f.name not in values]
    need(not missing, f"partition '{name}' needs {' and '.join(missing)}, such as '{name}:0.1'")
    return kind(**values)


def parse_partition(text: str) -> Partition:
    """A partition from a line such as ``iid``, ``shards:2``, ``dirichlet:0.1,min_size=1``, ``by-domain:iid``.

    After the name and a colon come parameters by position or as ``name=value``, separated by commas. A
    parameter that is a partition takes all that follows.
    """
    name, colon, rest = text.strip().partition(":")
    parameters = [f.name for f in fields(_kind(name))]
    values: dict[str, Any] = {"name": name}
    if typing.get_type_hints(PARTITIONS[name]).get(parameters[0] if parameters else "") is Partition:
        return partition_from(values | ({parameters[0]: rest} if rest else {}))
    for position, part in enumerate(rest.split(",") if colon else []):
        key, equals, value = part.partition("=")
        if not equals:
            need(
                position < len(parameters),
                f"'{text}' has more than the {len(parameters)} parameters of {name}",
            )
            key, value = parameters[position], part
        values[key.strip()] = value.strip()
    return partition_from(values)


def _kind(name: str) -> type[Partition]:
    if name not in PARTITIONS:
        raise unknown("partition", name, PARTITIONS)
    return PARTITIONS[name]


def _converted(value: object, hint: Any, what: str) -> object:
    """``value``, perhaps written as text, as the type a parameter has."""
    if isinstance(hint, types.UnionType):
        if value is None or value == "none":
            return None
        hint = next(kind for kind in typing.get_args(hint) if kind is not type(None))
    if hint is Partition:
        if isinstance(value, Mapping):
            return partition_from(value)
        return value if isinstance(value, Partition) else parse_partition(str(value))
    if hint is bool:
        written = {"true": True, "false": False}.get(str(value).lower())
        need(written is not None, f"{what} must be true or false, not '{value}'")
        return written
    try:
        number = float(str(value)) if hint in (int, float) else 0.0
    except ValueError:
        raise HoldfastError(f"{what} must be a number, not '{value}'") from None
    need(hint is not int or number.is_integer(), f"{what} must be a whole number, not '{value}'")
    return hint(number) if hint in (int, float) else str(value)
