"""Who holds what: the rules by which training samples are dealt to clients.

A partition returns positions and offsets, never a list per client, so a million clients cost megabytes.
In the pictures a row is a client and a column a class (or a domain, a writer): the more ``#``, the more
samples; ``.`` is none.
"""

from holdfast.data.partitions.base import Assignment, Partition, SamplePool
from holdfast.data.partitions.dirichlet import (
    Dirichlet,
    DirichletInner,
    DirichletTwoStage,
    DirichletUncapped,
    QuantitySkew,
)
from holdfast.data.partitions.groups import ByDomain, ByWriter, WriterTransfer
from holdfast.data.partitions.naming import PARTITIONS, parse_partition, partition_from
from holdfast.data.partitions.shards import IID, ClassesPerClient, ClassShards, Shards

__all__ = [
    "IID",
    "PARTITIONS",
    "Assignment",
    "ByDomain",
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
