"""Partitions: rules that assign training samples to clients.

A partition returns arrays of positions and offsets instead of a list per client, so that a million clients take
megabytes. In the diagrams a row is a client and a column a class (or a domain, a writer); more ``#`` are more
samples, ``.`` is none.
"""

from holdfast.data.partitions.base import Assignment, Partition, SamplePool
from holdfast.data.partitions.dirichlet import (
    Dirichlet,
    DirichletInner,
    DirichletTwoStage,
    DirichletUncapped,
    QuantitySkew,
)
from holdfast.data.partitions.groups import ByDomain, BySite, ByWriter, WriterTransfer
from holdfast.data.partitions.naming import PARTITIONS, parse_partition, partition_from
from holdfast.data.partitions.shards import IID, ClassesPerClient, ClassShards, Shards

__all__ = [
    "IID",
    "PARTITIONS",
    "Assignment",
    "ByDomain",
    "BySite",
    "ByWriter",
    "ClassShards",
    "ClassesPerClient",
    "Dirichlet",
    "DirichletInner",
    "DirichletTwoStage",
    "DirichletUncapped",
    "Partition",
    "QuantitySkew",
    "SamplePool",
    "Shards",
    "WriterTransfer",
    "parse_partition",
    "partition_from",
]
