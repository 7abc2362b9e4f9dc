"""Partitions by name, for the command line and for experiment files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from holdfast.core.errors import unknown
from holdfast.core.spec import build, field_hints, parse_text
from holdfast.data.partitions.base import Partition
from holdfast.data.partitions.dirichlet import (
    Dirichlet,
    DirichletInner,
    DirichletTwoStage,
    DirichletUncapped,
    QuantitySkew,
)
from holdfast.data.partitions.groups import ByDomain, BySite, ByWriter, WriterTransfer
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
        BySite,
        ByWriter,
        WriterTransfer,
    )
}
"""Every partition by the name it has on the command line and in experiment files."""


def partition_from(description: Mapping[str, Any]) -> Partition:
    """The partition that `Partition.describe` described: ``{"name": "dirichlet", "alpha": 0.1}``."""
    nested = {
        key: parse_partition(value) if isinstance(value, str) else partition_from(value)
        for key, value in description.items()
        if key in _partition_options(str(description.get("name"))) and not isinstance(value, Partition)
    }
    return build(PARTITIONS, {**description, **nested}, "partition", "dirichlet:0.1")


def parse_partition(text: str) -> Partition:
    """A partition from text such as ``iid``, ``shards:2``, ``dirichlet:0.1,min_size=1``, ``by-domain:iid``.

    Options follow the name and a colon, by position or as ``option=value``. An option that is a partition takes
    all that follows.
    """
    name, _, rest = text.strip().partition(":")
    if name not in PARTITIONS:
        raise unknown("partition", name, PARTITIONS)
    nested = _partition_options(name)
    if nested:
        return partition_from({"name": name, **({nested[0]: rest} if rest else {})})
    return partition_from(parse_text(text, "partition", [f.name for f in fields(PARTITIONS[name])]))


def _partition_options(name: str) -> list[str]:
    """The options of a partition that are partitions themselves."""
    kind = PARTITIONS.get(name)
    return [] if kind is None else [key for key, hint in field_hints(kind).items() if hint is Partition]
