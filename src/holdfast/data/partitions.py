"""Who holds what: the rules by which training samples are dealt to clients.

A partition returns positions and offsets, never a list per client, so a million clients cost megabytes.
In the pictures a row is a client and a column a class (or a domain, a writer): the more ``#``, the more
samples; ``.`` is none.
"""

from __future__ import annotations

import os
import types
import typing
from abc import ABC, abstractmethod
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
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
from holdfast.random import counter_key

# Redraws stop after this many random shares in all: about half a minute.
_MOST_SHARES = 500_000_000
# Shares drawn at once on one core: enough to drown NumPy's overhead, little memory.
_SHARES_AT_ONCE = 1 << 19


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
    logs: Floats = np.log(rng.standard_gamma(alpha + 1, shape))
    logs -= rng.standard_exponential(shape) / alpha
    return logs


def _proportions(logs: Floats) -> Floats:
    """Numbers that add up to 1 along the last axis and have these logarithms, up to a factor."""
    weights: Floats = np.exp(logs - logs.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return weights


def _cut(shares: Floats, total: int) -> Floats:
    """Where a list of ``total`` samples is cut by these shares: floor(cumulative share * total)."""
    ends: Floats = np.cumsum(shares, axis=-1)
    ends *= total
    np.floor(ends, out=ends)
    # The last share takes what is left, which rounding would lose.
    ends[..., -1] = total
    return ends


class _Tables(NamedTuple):
    """Candidate partitions: clients' sizes ``[n, clients]`` and where classes are cut ``[C, n, clients]``."""

    sizes: Floats
    ends: Ints


def _dirichlet_tables(
    alpha: float, class_sizes: Ints, clients: int, capped: bool, n: int, rng: np.random.Generator
) -> _Tables:
    """``n`` independent candidates, drawn side by side."""
    tables = _Tables(np.zeros((n, clients)), np.zeros((len(class_sizes), n, clients), np.int64))
    fair_share = class_sizes.sum() / clients
    for c in np.flatnonzero(class_sizes):
        logs = _log_gammas(alpha, (n, clients), rng)
        if capped:
            # While samples are left somebody holds less than a fair share, so a row is never all -inf.
            logs[tables.sizes >= fair_share] = -np.inf
        ends = _cut(_proportions(logs), int(class_sizes[c]))
        tables.ends[c] = ends
        tables.sizes[:] += ends
        tables.sizes[:, 1:] -= ends[:, :-1]
    return tables


def _dirichlet_counts(
    alpha: float, class_sizes: Ints, clients: int, min_size: int, capped: bool, rng: np.random.Generator
) -> Ints:
    """Samples per class and client ``[C, clients]`` of the first candidate with ``min_size`` for everybody.

    Candidates are drawn in blocks, side by side and on every core, each block from a counter of its own. That
    has the law of drawing one after another until one is right, and does not depend on the number of cores.
    """
    seed, shares = int(rng.integers(1 << 63)), len(class_sizes) * clients
    most = max(1, _SHARES_AT_ONCE // shares)

    def candidates(block: int) -> _Tables:
        # SFC64 draws millions of variates in half the time that counters themselves would take.
        fast = np.random.Generator(np.random.SFC64(counter_key(seed, "candidates", block)))
        return _dirichlet_tables(alpha, class_sizes, clients, capped, min(1 << block, most), fast)

    cores = min(os.cpu_count() or 1, most, 8)
    drawn, blocks, best = 0, 0, 0
    with ThreadPoolExecutor(cores) as threads:
        while drawn * shares < _MOST_SHARES:
            for tables in threads.map(candidates, range(blocks, blocks + cores)):
                smallest = tables.sizes.min(-1)
                if smallest.max() >= min_size:
                    return np.diff(tables.ends[:, np.argmax(smallest >= min_size)], axis=-1, prepend=0)
                best = max(best, int(smallest.max()))
                drawn += len(smallest)
            blocks += cores
    raise HoldfastError(
        f"none of {drawn} draws gave every client {min_size} samples (the best gave {best}); take "
        f"min_size={best} or less, fewer clients, or a larger alpha"
    )


def _check_dirichlet(alpha: float, min_size: int) -> None:
    _need(alpha > 0 and np.isfinite(alpha), f"alpha must be a number above 0, not {alpha}")
    _need(min_size >= 0, f"min_size must be 0 or more samples, not {min_size}")


def _dirichlet(
    pool: Pool, clients: int, alpha: float, min_size: int, capped: bool, rng: np.random.Generator
) -> Assignment:
    _need_enough(len(pool.labels), clients, min_size)
    sizes = np.bincount(pool.labels)
    counts = _dirichlet_counts(alpha, sizes, clients, min_size, capped, rng)
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


@dataclass(frozen=True)
class DirichletInner(Partition):
    """Sizes are equal; each client draws its samples by class proportions of its own from Dir(alpha).

    Clients draw in random order, without replacement; a class that is used up is no longer drawn, so the last
    samples go to clients that would have wanted others.
    ::

        client 0   ## .. #. ..
        client 1   .. ## #. ..
        client 2   .. #. .. ##

    Used by FedDyn, and by FedLab as ``balance=True``.
    """

    name = "dirichlet-inner"
    alpha: float

    def __post_init__(self) -> None:
        _check_dirichlet(self.alpha, 0)

    def assign(self, pool: Pool, clients: int, rng: np.random.Generator) -> Assignment:
        """Deal the pool to ``clients`` clients."""
        samples = len(pool.labels)
        _need_enough(samples, clients)
        left = np.bincount(pool.labels)
        logs = _log_gammas(self.alpha, (clients, len(left)), rng)
        logs[:, left == 0] = -np.inf
        sizes = even_sizes(samples, clients)
        turns = rng.permutation(np.repeat(np.arange(clients), sizes))
        wishes = np.empty(samples, np.int64)
        done = 0
        while done < samples:
            now = turns[done : done + max(1, _SHARES_AT_ONCE // len(left))]
            drawn = _choices(logs[now], rng)
            fulfilled = _until_used_up(drawn, left)
            wishes[done : done + fulfilled] = drawn[:fulfilled]
            left = left - np.bincount(drawn[:fulfilled], minlength=len(left))
            # From here on nobody draws a class that is used up: the others' proportions fill its place.
            logs[:, left == 0] = -np.inf
            done += fulfilled
        by_class = in_order_of(wishes)
        ids = np.empty(samples, np.int64)
        ids[by_class] = shuffled_by_class(pool.labels, rng)
        return Assignment(ids[np.argsort(turns, kind="stable")], offsets_of(sizes))


def _choices(logs: Floats, rng: np.random.Generator) -> Ints:
    """One random column per row, by the proportions with these logarithms."""
    cumulative = np.cumsum(_proportions(logs), axis=1)
    chosen: Ints = np.argmax(cumulative > rng.random((len(logs), 1)) * cumulative[:, -1:], axis=1)
    return chosen


def _until_used_up(drawn: Ints, left: Ints) -> int:
    """How many draws, in order, can be fulfilled before one asks for a class that is used up."""
    order = in_order_of(drawn)
    counts = np.bincount(drawn, minlength=len(left))
    rank = np.empty(len(drawn), np.int64)
    rank[order] = ranges(np.zeros_like(counts), counts)
    refused = rank >= left[drawn]
    return int(np.argmax(refused)) if refused.any() else len(drawn)


@dataclass(frozen=True)
class DirichletTwoStage(Partition):
    """Groups of ten clients share equal parts of the data by `Dirichlet`; then sizes are made equal.

    Within a group every client must get half the mean size; the groups' lists, client after client, are then
    laid end to end and cut again into equal parts, so a client's part may reach into its neighbour's.
    ::

        client 0   ## #. .. ..
        client 1   .. ## #. ..
        client 2   .. .. #. ##

    Used by FedDF, CReFF and FedPRP.
    """

    name = "dirichlet-two-stage"
    alpha: float

    def __post_init__(self) -> None:
        _check_dirichlet(self.alpha, 0)

    def assign(self, pool: Pool, clients: int, rng: np.random.Generator) -> Assignment:
        """Deal the pool to ``clients`` clients."""
        samples = len(pool.labels)
        _need_enough(samples, clients)
        members = np.minimum(10, clients - np.arange(0, clients, 10))
        ends = offsets_of(members)[1:] * samples // clients
        order, parts, start = rng.permutation(samples), [], 0
        for group_clients, end in zip(members.tolist(), ends.tolist(), strict=True):
            part = order[start:end]
            half = len(part) // (2 * group_clients)
            dealt = _dirichlet(pool.subset(part), group_clients, self.alpha, half, True, rng)
            parts.append(part[dealt.indices])
            start = end
        return Assignment(np.concatenate(parts), offsets_of(even_sizes(samples, clients)))


@dataclass(frozen=True)
class ClassesPerClient(Partition):
    """Every client holds ``classes`` classes exactly; a class is shared equally by those who hold it.

    Client i holds class i mod C and random others. With fewer clients than classes some class may be held by
    nobody; its samples are left out.
    ::

        client 0   ## .. ## ..
        client 1   .. ## .. ##
        client 2   .. ## ## ..

    Used by NIID-Bench, and by FedFA on Mixed Digits.
    """

    name = "classes"
    classes: int = 2

    def __post_init__(self) -> None:
        _need(self.classes >= 1, f"classes per client must be 1 or more, not {self.classes}")

    def assign(self, pool: Pool, clients: int, rng: np.random.Generator) -> Assignment:
        """Deal the pool to ``clients`` clients."""
        _need_enough(len(pool.labels), clients, self.classes)
        counts = np.bincount(pool.labels)
        counts = counts[counts > 0]
        _need(
            self.classes <= len(counts),
            f"a client cannot hold {self.classes} classes: the data has {len(counts)}",
        )
        lots = rng.random((clients, len(counts)), np.float32)
        lots[np.arange(clients), np.arange(clients) % len(counts)] = -1
        held = np.argpartition(lots, self.classes - 1, axis=1)[:, : self.classes]
        owners = np.bincount(held.ravel(), minlength=len(counts))
        short = np.flatnonzero(owners > counts)
        if len(short):
            raise HoldfastError(
                f"a class of {counts[short[0]]} samples cannot be shared by {owners[short[0]]} clients; take "
                f"fewer clients or fewer classes per client"
            )
        held_classes = np.flatnonzero(owners)
        sizes = [even_sizes(int(counts[c]), int(owners[c])) for c in held_classes]
        starts = [
            offsets_of(counts)[c] + offsets_of(s)[:-1] for c, s in zip(held_classes, sizes, strict=True)
        ]
        # Shares are numbered class by class; the owners of a class take them in order.
        rows = np.empty(held.size, np.int64)
        rows[in_order_of(held.ravel())] = np.arange(held.size)
        order = shuffled_by_class(pool.labels, rng)
        return _collect(order, np.concatenate(starts), np.concatenate(sizes), rows.reshape(held.shape))


@dataclass(frozen=True)
class QuantitySkew(Partition):
    """Everybody holds the same mixture, but sizes follow proportions from Dir(alpha).

    Drawn again until every client has ``min_size`` samples.
    ::

        client 0   ## ## ## ##
        client 1   #. #. #. #.
        client 2   #. #. #. #.

    Used by NIID-Bench.
    """

    name = "quantity"
    alpha: float
    min_size: int = 10

    def __post_init__(self) -> None:
        _check_dirichlet(self.alpha, self.min_size)

    def assign(self, pool: Pool, clients: int, rng: np.random.Generator) -> Assignment:
        """Deal the pool to ``clients`` clients."""
        samples = len(pool.labels)
        _need_enough(samples, clients, self.min_size)
        sizes = _dirichlet_counts(self.alpha, np.array([samples]), clients, self.min_size, False, rng)[0]
        return Assignment(rng.permutation(samples), offsets_of(sizes))


@dataclass(frozen=True)
class ByDomain(Partition):
    """Every domain has clients of its own, equally many, and is dealt to them by the partition ``inside``.

    The first clients belong to the first domain, and so on. Without a number of clients, one per domain.
    ::

                   mnist  usps  svhn
        client 0    ##     ..    ..
        client 1    ##     ..    ..
        client 2    ..     ##    ..
        client 3    ..     ##    ..

    The data set must have a group ``domain``. Used by FedFA on Mixed Digits.
    """

    name = "by-domain"
    inside: Partition = IID()

    def default_clients(self, pool: Pool) -> int:
        """One per domain."""
        return len(np.unique(pool.group("domain")[1]))

    def assign(self, pool: Pool, clients: int, rng: np.random.Generator) -> Assignment:
        """Deal the pool to ``clients`` clients."""
        domains = pool.group("domain")[1]
        present = np.unique(domains)
        each, left = divmod(clients, len(present))
        _need(
            each >= 1 and not left,
            f"{clients} clients cannot be shared equally by {len(present)} domains; take a multiple of it",
        )
        ids, sizes = [], []
        for domain in present:
            members = np.flatnonzero(domains == domain)
            dealt = self.inside.assign(pool.subset(members), each, rng)
            ids.append(members[dealt.indices])
            sizes.append(np.diff(dealt.offsets))
        return Assignment(np.concatenate(ids), offsets_of(np.concatenate(sizes)))


@dataclass(frozen=True)
class ByWriter(Partition):
    """A client holds what its writers wrote: the natural split of handwriting.

    All writers are dealt to the clients, equally many to each (one more at most); or, with ``per_client``,
    each client gets that many random writers and the other writers are left out. Writers with fewer than
    ``min_samples`` samples do not take part. Without a number of clients, one client per writer.
    ::

                   Ann  Bob  Cem  Dee
        client 0   ##   ..   ##   ..
        client 1   ..   ##   ..   ##

    The data set must have a group ``writer``. LEAF's FEMNIST has one writer per client.
    """

    name = "by-writer"
    per_client: int | None = None
    min_samples: int = 1

    def __post_init__(self) -> None:
        _need(
            self.per_client is None or self.per_client >= 1,
            f"writers per client must be 1 or more, not {self.per_client}",
        )

    def default_clients(self, pool: Pool) -> int:
        """As many as there are writers for."""
        writers = np.bincount(pool.group("writer")[1])
        return int((writers >= max(1, self.min_samples)).sum()) // (self.per_client or 1)

    def assign(self, pool: Pool, clients: int, rng: np.random.Generator) -> Assignment:
        """Deal the pool to ``clients`` clients."""
        writer = pool.group("writer")[1]
        sizes = np.bincount(writer)
        active = rng.permutation(np.flatnonzero(sizes >= max(1, self.min_samples)))
        needed = clients * (self.per_client or 1)
        _need(
            1 <= needed <= len(active),
            f"{clients} clients need {needed} writers with {max(1, self.min_samples)} or more samples, but "
            f"there are {len(active)}",
        )
        if self.per_client is not None:
            active = active[:needed]
        writers_each = even_sizes(len(active), clients)
        indices = np.argsort(writer, kind="stable")[ranges(offsets_of(sizes)[active], sizes[active])]
        ends = offsets_of(sizes[active])[offsets_of(writers_each)]
        return Assignment(indices, ends)


@dataclass(frozen=True)
class WriterTransfer(Partition):
    """Clients copy the class mixtures of real writers, not their handwriting.

    For every client a random writer is picked; each class is shared in proportion to how often the picked
    writers wrote it (equally, where none did).
    ::

        Ann wrote  8 2 0 4    client 0   ## #. .. ##   samples of any writer
        Bob wrote  2 6 4 4    client 1   .. ## ## ##

    The data set must have a group ``writer``. Used by FedFA's EMNIST notebook.
    """

    name = "writer-transfer"

    def assign(self, pool: Pool, clients: int, rng: np.random.Generator) -> Assignment:
        """Deal the pool to ``clients`` clients."""
        _need_enough(len(pool.labels), clients)
        names, writer = pool.group("writer")
        class_sizes = np.bincount(pool.labels)
        classes = len(class_sizes)
        wrote = np.bincount(writer * classes + pool.labels, minlength=len(names) * classes)
        active = np.flatnonzero(np.bincount(writer))
        _need(
            1 <= clients <= len(active),
            f"{clients} clients need as many writers, but there are {len(active)}",
        )
        mixture = wrote.reshape(-1, classes)[rng.permutation(active)[:clients]].T.astype(np.float64)
        mixture[mixture.sum(1) == 0] = 1
        shares = mixture / mixture.sum(1, keepdims=True)
        ends = np.stack([_cut(p, int(total)) for p, total in zip(shares, class_sizes, strict=True)])
        counts: Ints = np.diff(ends, axis=1, prepend=0).astype(np.int64)
        return _deal(shuffled_by_class(pool.labels, rng), counts)


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
    _need(hint is not int or number.is_integer(), f"{what} must be a whole number, not '{value}'")
    return hint(number) if hint in (int, float) else str(value)
