"""Who holds what: the rules by which training samples are dealt to clients.

A partition returns positions and offsets, never a list per client, so a million clients cost megabytes.
In the pictures a row is a client and a column a class (or a domain, a writer): the more ``#``, the more
samples; ``.`` is none.
"""

from __future__ import annotations

import types
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from math import gcd
from typing import Any, ClassVar, NamedTuple

import numpy as np

from holdfast.data.dataset import Group
from holdfast.data.dealing import (
    Floats,
    Ints,
    even_sizes,
    in_order_of,
    offsets_of,
    ranges,
    shuffled_by_class,
)
from holdfast.errors import HoldfastError, unknown

# Redraws stop after this many random shares in all: about half a minute.
_MOST_SHARES = 500_000_000
# Shares drawn at once: enough to drown NumPy's overhead, few enough for the processor's cache.
_SHARES_AT_ONCE = 1 << 17


class Assignment(NamedTuple):
    """Positions in a pool, client by client; client k holds ``indices[offsets[k]:offsets[k + 1]]``."""

    indices: Ints
    offsets: Ints


@dataclass(frozen=True, eq=False)
class Pool:
    """The samples to deal out: labels int64 ``[M]`` and, by name, the other properties samples have.

    ``groups`` has the names of a `Group` and one int64 entry per sample of the pool, indexing them.
    """

    labels: Ints
    groups: Mapping[str, tuple[tuple[str, ...], Ints]] = field(default_factory=dict)

    @classmethod
    def of(cls, labels: Ints, groups: Mapping[str, Group], ids: Ints) -> Pool:
        """The pool of the training samples ``ids``."""
        return cls(labels[ids], {name: (group.names, group.train[ids]) for name, group in groups.items()})

    def subset(self, positions: Ints) -> Pool:
        """The pool of the samples at ``positions``."""
        groups = {name: (names, values[positions]) for name, (names, values) in self.groups.items()}
        return Pool(self.labels[positions], groups)

    def group(self, name: str) -> tuple[tuple[str, ...], Ints]:
        """The names and values of a property, or an error that says which properties there are."""
        if name not in self.groups:
            known = ", ".join(self.groups) or "none"
            raise HoldfastError(f"this data set does not say the {name} of a sample (it has groups: {known})")
        return self.groups[name]


@dataclass(frozen=True)
class Partition(ABC):
    """A rule that deals samples to clients: a frozen dataclass whose fields are its parameters."""

    name: ClassVar[str]

    @abstractmethod
    def assign(self, pool: Pool, clients: int, rng: np.random.Generator) -> Assignment:
        """Deal the pool to ``clients`` clients. All randomness comes from ``rng``."""

    def default_clients(self, pool: Pool) -> int:
        """How many clients there are when nobody says."""
        raise HoldfastError(f"partition '{self.name}' needs the number of clients, such as clients=100")

    def describe(self) -> dict[str, Any]:
        """Name and parameters as plain values; `partition_from` makes the partition from them again."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {"name": self.name} | {
            key: value.describe() if isinstance(value, Partition) else value for key, value in values.items()
        }


def _need(condition: bool, sentence: str) -> None:
    if not condition:
        raise HoldfastError(sentence)


def _need_enough(samples: int, clients: int, each: int = 1) -> None:
    """Refuse, before any work, to give ``clients`` clients at least ``each`` samples out of too few."""
    _need(clients >= 1, f"a federation needs at least 1 client, not {clients}")
    _need(
        samples >= clients * each,
        f"{clients} clients with at least {each} {'sample' if each == 1 else 'samples'} each need "
        f"{clients * each} samples, but there are {samples}",
    )


def _collect(order: Ints, starts: Ints, sizes: Ints, rows: Ints) -> Assignment:
    """Client k gets the runs ``rows[k]``; run r is ``order[starts[r]:starts[r] + sizes[r]]``."""
    runs = rows.ravel()
    indices = order[ranges(starts[runs], sizes[runs])]
    return Assignment(indices, offsets_of(sizes[runs].reshape(rows.shape).sum(1)))


def _deal(order: Ints, counts: Ints) -> Assignment:
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


@dataclass(frozen=True)
class IID(Partition):
    """Everybody holds the same mixture: a shuffle, cut into parts whose sizes differ by one at most.

    ::

        client 0   ## ## ## ##
        client 1   ## ## ## ##
        client 2   ## ## ## ##
    """

    name = "iid"

    def assign(self, pool: Pool, clients: int, rng: np.random.Generator) -> Assignment:
        """Deal the pool to ``clients`` clients."""
        samples = len(pool.labels)
        _need_enough(samples, clients)
        return Assignment(rng.permutation(samples), offsets_of(even_sizes(samples, clients)))


@dataclass(frozen=True)
class Shards(Partition):
    """Sort by class, cut into equal shards, deal ``per_client`` random shards to each client.

    A shard may lie across two classes, and a client may draw two shards of one class. Sizes are equal (shards
    differ by one sample where the cut does not come out even).
    ::

        client 0   #. .. #. ..
        client 1   .. ## .. ..
        client 2   #. .. .. #.

    McMahan et al., AISTATS 2017.
    """

    name = "shards"
    per_client: int = 2

    def __post_init__(self) -> None:
        _need(self.per_client >= 1, f"shards per client must be 1 or more, not {self.per_client}")

    def assign(self, pool: Pool, clients: int, rng: np.random.Generator) -> Assignment:
        """Deal the pool to ``clients`` clients."""
        samples, shards = len(pool.labels), clients * self.per_client
        _need_enough(samples, clients, self.per_client)
        sizes = even_sizes(samples, shards)
        rows = rng.permutation(shards).reshape(clients, self.per_client)
        return _collect(in_order_of(pool.labels), offsets_of(sizes)[:-1], sizes, rows)


@dataclass(frozen=True)
class ClassShards(Partition):
    """Every class is cut into equally many shards; each client gets ``s`` of them, so at most s classes.

    Shards never lie across classes: each of the C classes gives ``s * clients / C`` of them, which must be a
    whole number. With ``drop=True`` it is rounded down, and the shards beyond the largest equal number per
    client are left out with their samples.
    ::

        client 0   ## .. ## ..
        client 1   .. ## .. ##
        client 2   ## ## .. ..

    Lee et al. (FedNTD), NeurIPS 2022; Collins et al. (FedRep), ICML 2021.
    """

    name = "class-shards"
    s: int = 2
    drop: bool = False

    def __post_init__(self) -> None:
        _need(self.s >= 1, f"shards per client (s) must be 1 or more, not {self.s}")

    def assign(self, pool: Pool, clients: int, rng: np.random.Generator) -> Assignment:
        """Deal the pool to ``clients`` clients."""
        _need_enough(len(pool.labels), clients, self.s)
        counts = np.bincount(pool.labels)
        counts = counts[counts > 0]
        per_class, left = divmod(self.s * clients, len(counts))
        if left and not self.drop:
            raise HoldfastError(self._not_divisible(clients, len(counts)))
        each = per_class * len(counts) // clients
        _need(
            each >= 1,
            f"{clients} clients with {self.s} shards each are too few for {len(counts)} classes: some class "
            f"would have no shard",
        )
        _need(
            int(counts.min()) >= per_class,
            f"the smallest class has {counts.min()} samples and cannot be cut into {per_class} shards",
        )
        sizes = np.concatenate([even_sizes(int(count), per_class) for count in counts])
        # A shuffle of all shards is a shuffle of the labels with a random shard popped for each.
        rows = rng.permutation(len(sizes))[: each * clients].reshape(clients, each)
        return _collect(in_order_of(pool.labels), offsets_of(sizes)[:-1], sizes, rows)

    def _not_divisible(self, clients: int, classes: int) -> str:
        step = classes // gcd(self.s, classes)
        below = clients // step * step
        near = f"{below} or {below + step}" if below else str(step)
        return (
            f"{self.s} shards for each of {clients} clients cannot be shared equally by {classes} classes; "
            f"take {near} clients, or drop=True to leave the rest out"
        )


def _log_gammas(alpha: float, shape: tuple[int, ...], rng: np.random.Generator) -> Floats:
    """Logarithms of Gamma(alpha) variates, since for a small alpha the variates themselves become 0.

    Gamma(alpha) = Gamma(alpha + 1) * U^(1 / alpha).
    """
    logs: Floats = np.log(rng.standard_gamma(alpha + 1, shape)) - rng.standard_exponential(shape) / alpha
    return logs


def _weights(logs: Floats) -> Floats:
    """Positive weights with the given logarithms up to a factor; the largest of each row is 1."""
    weights: Floats = np.exp(logs - logs.max(-1, keepdims=True))
    return weights


def _cut(weights: Floats, total: int) -> Ints:
    """How many of ``total`` samples each gets when the list is cut at floor(cumulative share * total)."""
    cuts = np.cumsum(weights, axis=-1)
    cuts *= total / cuts[..., -1:]
    ends = cuts.astype(np.int64)
    ends[..., -1] = total
    return np.diff(ends, axis=-1, prepend=0)


def _dirichlet_counts(
    alpha: float, class_sizes: Ints, clients: int, capped: bool, draws: int, rng: np.random.Generator
) -> Ints:
    """``draws`` independent tables of samples per class and client: ``[draws, C, clients]``."""
    counts = np.zeros((draws, len(class_sizes), clients), np.int64)
    held = np.zeros((draws, clients), np.int64)
    fair = class_sizes.sum() / clients
    for c in np.flatnonzero(class_sizes):
        logs = _log_gammas(alpha, (draws, clients), rng)
        if capped:
            # Somebody always holds less than a fair share while samples are left, so a row is never all -inf.
            np.putmask(logs, held >= fair, -np.inf)
        counts[:, c] = _cut(_weights(logs), int(class_sizes[c]))
        held += counts[:, c]
    return counts


def _redraw(draw: Callable[[int], Ints], least: int, shares: int, remedy: str) -> Ints:
    """The first table ``[..., clients]`` whose every client has ``least`` samples.

    ``draw(n)`` makes n independent tables at once, of ``shares`` random shares each: looking at many together
    gives the same law as drawing one after another until one is right, much faster.
    """
    most = max(1, _SHARES_AT_ONCE // shares)
    drawn, at_once, best = 0, 1, 0
    while drawn == 0 or drawn * shares < _MOST_SHARES:
        tables = draw(at_once)
        smallest = tables.reshape(at_once, -1, tables.shape[-1]).sum(1).min(-1)
        if smallest.max() >= least:
            return np.asarray(tables[int(np.argmax(smallest >= least))])
        best = max(best, int(smallest.max()))
        drawn += at_once
        at_once = min(2 * at_once, most)
    raise HoldfastError(
        f"none of {drawn} draws gave every client {least} samples (the best gave {best}); take "
        f"min_size={best} or less, {remedy}"
    )


def _fast(rng: np.random.Generator) -> np.random.Generator:
    """A generator seeded from ``rng`` that draws millions of variates in half the time."""
    return np.random.Generator(np.random.SFC64(rng.integers(1 << 63)))


def _check_dirichlet(alpha: float, min_size: int) -> None:
    _need(alpha > 0 and np.isfinite(alpha), f"alpha must be a number above 0, not {alpha}")
    _need(min_size >= 0, f"min_size must be 0 or more samples, not {min_size}")


def _dirichlet(
    pool: Pool, clients: int, alpha: float, min_size: int, capped: bool, rng: np.random.Generator
) -> Assignment:
    _need_enough(len(pool.labels), clients, min_size)
    sizes = np.bincount(pool.labels)
    fast = _fast(rng)
    counts = _redraw(
        lambda draws: _dirichlet_counts(alpha, sizes, clients, capped, draws, fast),
        min_size,
        len(sizes) * clients,
        "fewer clients or a larger alpha",
    )
    return _deal(shuffled_by_class(pool.labels, rng), counts)


@dataclass(frozen=True)
class Dirichlet(Partition):
    """Each class is shared by proportions from Dir(alpha) among clients that hold less than a fair share.

    For each class in turn: draw p from Dir(alpha) over the clients; set p to 0 for clients holding
    samples/clients or more; cut the shuffled class at floor(cumulative p * size). All is drawn again until
    every client has ``min_size`` samples. ``alpha`` small: few classes per client; large: nearly IID.
    ::

        client 0   ## .. .. #.
        client 1   .. ## #. ..
        client 2   .. .. ## ##

    Used by FedNTD, MOON, NIID-Bench and FedLab.
    """

    name = "dirichlet"
    alpha: float
    min_size: int = 10

    def __post_init__(self) -> None:
        _check_dirichlet(self.alpha, self.min_size)

    def assign(self, pool: Pool, clients: int, rng: np.random.Generator) -> Assignment:
        """Deal the pool to ``clients`` clients."""
        return _dirichlet(pool, clients, self.alpha, self.min_size, True, rng)


@dataclass(frozen=True)
class DirichletUncapped(Partition):
    """Each class is shared by proportions from Dir(alpha), whatever clients hold already: sizes differ much.

    As `Dirichlet`, without its cap.
    ::

        client 0   ## #. ## ##
        client 1   .. #. .. ..
        client 2   .. #. .. #.

    Used by FL-bench.
    """

    name = "dirichlet-uncapped"
    alpha: float
    min_size: int = 10

    def __post_init__(self) -> None:
        _check_dirichlet(self.alpha, self.min_size)

    def assign(self, pool: Pool, clients: int, rng: np.random.Generator) -> Assignment:
        """Deal the pool to ``clients`` clients."""
        return _dirichlet(pool, clients, self.alpha, self.min_size, False, rng)


PARTITIONS: dict[str, type[Partition]] = {
    partition.name: partition
    for partition in (
        IID,
        Shards,
        ClassShards,
        Dirichlet,
        DirichletUncapped,
    )
}
"""Every partition by the name it has on the command line and in experiment files."""


def partition_from(description: Mapping[str, Any]) -> Partition:
    """The partition that `Partition.describe` described: ``{"name": "dirichlet", "alpha": 0.1}``."""
    values = dict(description)
    name = values.pop("name", None)
    _need(isinstance(name, str), f"a partition needs a name, one of {', '.join(PARTITIONS)}")
    kind = _kind(str(name))
    hints = typing.get_type_hints(kind)
    for key, value in values.items():
        if key not in {f.name for f in fields(kind)}:
            raise unknown(f"parameter of partition '{name}'", key, [f.name for f in fields(kind)])
        values[key] = _converted(value, hints[key], f"{key} of partition '{name}'")
    missing = [f.name for f in fields(kind) if f.default is MISSING and f.name not in values]
    _need(not missing, f"partition '{name}' needs {' and '.join(missing)}, such as '{name}:0.1'")
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
            _need(
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
        _need(written is not None, f"{what} must be true or false, not '{value}'")
        return written
    try:
        number = float(str(value)) if hint in (int, float) else 0.0
    except ValueError:
        raise HoldfastError(f"{what} must be a number, not '{value}'") from None
    _need(hint is not int or number == int(number), f"{what} must be a whole number, not '{value}'")
    return hint(number) if hint in (int, float) else str(value)
