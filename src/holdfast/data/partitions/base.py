"""Base class of partitions: a rule that assigns a pool of samples to clients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, NamedTuple

import numpy as np

from holdfast.core.errors import HoldfastError
from holdfast.core.spec import validate_fields
from holdfast.data.dataset import Group
from holdfast.data.indexing import Ints, offsets_of, ranges

_DATASETS_WITH_GROUP = {
    "writer": "femnist, or mnist with QMNIST's labels,",
    "domain": "mixed-digits",
    "site": "heart-disease",
}


class Assignment(NamedTuple):
    """Positions in a pool, ordered by client; client k holds ``indices[offsets[k]:offsets[k + 1]]``."""

    indices: Ints
    offsets: Ints


@dataclass(frozen=True, eq=False)
class SamplePool:
    """The samples to assign: labels int64 ``[M]`` and, by name, the samples' other properties.

    ``groups`` holds the names of a `Group` and, for each sample of the pool, an int64 index into them.
    """

    labels: Ints
    groups: Mapping[str, tuple[tuple[str, ...], Ints]] = field(default_factory=dict)

    @classmethod
    def of(cls, labels: Ints, groups: Mapping[str, Group], ids: Ints) -> SamplePool:
        """The pool of the training samples ``ids``."""
        return cls(labels[ids], {name: (group.names, group.train[ids]) for name, group in groups.items()})

    def subset(self, positions: Ints) -> SamplePool:
        """The pool of the samples at ``positions``."""
        groups = {name: (names, values[positions]) for name, (names, values) in self.groups.items()}
        return SamplePool(self.labels[positions], groups)

    def group(self, name: str) -> tuple[tuple[str, ...], Ints]:
        """The names and values of a property; an error lists the available properties if the data set lacks it."""
        if name not in self.groups:
            known = f" (it has groups: {', '.join(self.groups)})" if self.groups else ""
            others = _DATASETS_WITH_GROUP.get(name, "no data set known by name")
            raise HoldfastError(
                f"this data set has no group '{name}'{known}; {others} has one, and your own data may have one"
            )
        return self.groups[name]


@dataclass(frozen=True)
class Partition(ABC):
    """A rule that assigns samples to clients: a frozen dataclass whose fields are its parameters."""

    name: ClassVar[str]

    def __post_init__(self) -> None:
        validate_fields(self, self.name)

    @abstractmethod
    def assign(self, pool: SamplePool, clients: int, rng: np.random.Generator) -> Assignment:
        """Assign the pool's samples to ``clients`` clients; ``rng`` is the only source of randomness."""

    def default_clients(self, pool: SamplePool) -> int:
        """The number of clients if none is given; raises an error if the partition needs one."""
        raise HoldfastError(f"partition '{self.name}' needs the number of clients, such as clients=100")

    def describe(self) -> dict[str, Any]:
        """Name and parameters as plain values; inverse of `partition_from`."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {"name": self.name} | {
            key: value.describe() if isinstance(value, Partition) else value for key, value in values.items()
        }


def need(condition: bool, sentence: str) -> None:
    """Raise an error with the sentence unless the condition holds."""
    if not condition:
        raise HoldfastError(sentence)


def need_enough(samples: int, clients: int, each: int = 1) -> None:
    """Raise an error if there are too few samples for ``clients`` clients with at least ``each``."""
    need(clients >= 1, f"a federation needs at least 1 client, not {clients}")
    need(
        samples >= clients * each,
        f"{clients} clients with at least {each} {'sample' if each == 1 else 'samples'} each need "
        f"{clients * each} samples, but there are {samples}",
    )


def assign_runs(order: Ints, starts: Ints, sizes: Ints, rows: Ints) -> Assignment:
    """Assign to client k the runs ``rows[k]``, where run r is ``order[starts[r]:starts[r] + sizes[r]]``."""
    runs = rows.ravel()
    indices = order[ranges(starts[runs], sizes[runs])]
    return Assignment(indices, offsets_of(sizes[runs].reshape(rows.shape).sum(1)))


def assign_by_counts(order: Ints, counts: Ints) -> Assignment:
    """Split ``order``, which is ordered by class, so that client k gets ``counts[c, k]`` samples of class c."""
    offsets = offsets_of(counts.sum(0))
    indices = np.empty(offsets[-1], np.int64)
    next_free, start = offsets[:-1].copy(), 0
    for class_counts in counts:
        size = int(class_counts.sum())
        indices[ranges(next_free, class_counts)] = order[start : start + size]
        next_free += class_counts
        start += size
    return Assignment(indices, offsets)
