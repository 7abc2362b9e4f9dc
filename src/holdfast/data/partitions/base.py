"""What every partition is: a rule that deals a pool of samples to clients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, NamedTuple

import numpy as np

from holdfast.core.errors import HoldfastError
from holdfast.core.spec import validate_fields
from holdfast.data.dataset import Group
from holdfast.data.dealing import Ints, offsets_of, ranges

_TOLD_BY = {"writer": "femnist, or mnist beside QMNIST's labels,", "domain": "mixed-digits"}


class Assignment(NamedTuple):
    """Positions in a pool, client by client; client k holds ``indices[offsets[k]:offsets[k + 1]]``."""

    indices: Ints
    offsets: Ints


@dataclass(frozen=True, eq=False)
class SamplePool:
    """The samples to deal out: labels int64 ``[M]`` and, by name, the other properties samples have.

    ``groups`` has the names of a `Group` and one int64 entry per sample of the pool, indexing them.
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
        """The names and values of a property, or an error that says which properties there are."""
        if name not in self.groups:
            known = f" (it has groups: {', '.join(self.groups)})" if self.groups else ""
            told_by = _TOLD_BY.get(name, "no data set known by name")
            raise HoldfastError(
                f"this data set does not say the {name} of a sample{known}; {told_by} does, and your own data may have "
                f"a group '{name}'"
            )
        return self.groups[name]


@dataclass(frozen=True)
class Partition(ABC):
    """A rule that deals samples to clients: a frozen dataclass whose fields are its parameters."""

    name: ClassVar[str]

    def __post_init__(self) -> None:
        validate_fields(self, self.name)

    @abstractmethod
    def assign(self, pool: SamplePool, clients: int, rng: np.random.Generator) -> Assignment:
        """Deal the pool to ``clients`` clients. All randomness comes from ``rng``."""

    def default_clients(self, pool: SamplePool) -> int:
        """How many clients there are when nobody says."""
        raise HoldfastError(f"partition '{self.name}' needs the number of clients, such as clients=100")

    def describe(self) -> dict[str, Any]:
        """Name and parameters as plain values; `partition_from` makes the partition from them again."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {"name": self.name} | {
            key: value.describe() if isinstance(value, Partition) else value for key, value in values.items()
        }


def need(condition: bool, sentence: str) -> None:
    """Say the sentence as an error unless the condition holds."""
    if not condition:
        raise HoldfastError(sentence)


def need_enough(samples: int, clients: int, each: int = 1) -> None:
    """Refuse, before any work, to give ``clients`` clients at least ``each`` samples out of too few."""
    need(clients >= 1, f"a federation needs at least 1 client, not {clients}")
    need(
        samples >= clients * each,
        f"{clients} clients with at least {each} {'sample' if each == 1 else 'samples'} each need "
        f"{clients * each} samples, but there are {samples}",
    )


def collect(order: Ints, starts: Ints, sizes: Ints, rows: Ints) -> Assignment:
    """Client k gets the runs ``rows[k]``; run r is ``order[starts[r]:starts[r] + sizes[r]]``."""
    runs = rows.ravel()
    indices = order[ranges(starts[runs], sizes[runs])]
    return Assignment(indices, offsets_of(sizes[runs].reshape(rows.shape).sum(1)))


def deal(order: Ints, counts: Ints) -> Assignment:
    """Cut ``order`` (class after class) so that client k gets ``counts[c, k]`` samples of class c."""
    offsets = offsets_of(counts.sum(0))
    indices = np.empty(offsets[-1], np.int64)
    free, taken = offsets[:-1].copy(), 0
    for class_counts in counts:
        size = int(class_counts.sum())
        indices[ranges(free, class_counts)] = order[taken : taken + size]
        free += class_counts
        taken += size
    return Assignment(indices, offsets)
