"""Partitions by proportions from a Dirichlet distribution, in several published variants."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from holdfast.core.spec import Count, Positive
from holdfast.data.indexing import (
    Floats,
    Ints,
    even_sizes,
    offsets_of,
    ranges,
    shuffled_by_class,
    stable_argsort,
)
from holdfast.data.partitions.base import (
    Assignment,
    Partition,
    SamplePool,
    assign_by_counts,
    need_enough,
)
from holdfast.data.partitions.draws import SHARES_AT_ONCE, dirichlet_counts, log_gammas, proportions


@dataclass(frozen=True)
class Dirichlet(Partition):
    """Each class is split by proportions from Dir(alpha) among the clients that hold less than an equal share.

    For each class in turn: draw p from Dir(alpha) over the clients; set p to 0 for clients with samples/clients
    or more; split the shuffled class at floor(cumulative p * size). The draw is repeated until every client has
    ``min_size`` samples. A small ``alpha`` gives few classes per client, a large one is nearly IID.
    ::

        client 0   ## .. .. #.
        client 1   .. ## #. ..
        client 2   .. .. ## ##

    Used by FedNTD, MOON, NIID-Bench and FedLab.
    """

    name = "dirichlet"
    alpha: Positive
    min_size: Count = 10

    def assign(self, pool: SamplePool, clients: int, rng: np.random.Generator) -> Assignment:
        return _dirichlet(pool, clients, self.alpha, self.min_size, True, rng)


@dataclass(frozen=True)
class DirichletUncapped(Partition):
    """Each class is split by proportions from Dir(alpha) among all clients, so that their sizes differ much.

    As `Dirichlet`, without its cap on sizes.
    ::

        client 0   ## #. ## ##
        client 1   .. #. .. ..
        client 2   .. #. .. #.

    Used by FL-bench.
    """

    name = "dirichlet-uncapped"
    alpha: Positive
    min_size: Count = 10

    def assign(self, pool: SamplePool, clients: int, rng: np.random.Generator) -> Assignment:
        return _dirichlet(pool, clients, self.alpha, self.min_size, False, rng)


@dataclass(frozen=True)
class DirichletInner(Partition):
    """Equal sizes; each client draws its samples by its own class proportions from Dir(alpha).

    Clients draw in random order, without replacement; a class that is used up is no longer drawn, so the last
    clients may get classes that their proportions do not contain.
    ::

        client 0   ## .. #. ..
        client 1   .. ## #. ..
        client 2   .. #. .. ##

    Used by FedDyn, and by FedLab as ``balance=True``.
    """

    name = "dirichlet-inner"
    alpha: Positive

    def assign(self, pool: SamplePool, clients: int, rng: np.random.Generator) -> Assignment:
        samples = len(pool.labels)
        need_enough(samples, clients)
        left = np.bincount(pool.labels)
        logs = log_gammas(self.alpha, (clients, len(left)), rng)
        logs[:, left == 0] = -np.inf
        sizes = even_sizes(samples, clients)
        owners = rng.permutation(np.repeat(np.arange(clients), sizes))  # the client of each draw
        classes = np.empty(samples, np.int64)  # the class of each draw
        done = 0
        while done < samples:
            block = owners[done : done + max(1, SHARES_AT_ONCE // len(left))]
            drawn = _choices(logs[block], rng)
            valid = _until_used_up(drawn, left)
            classes[done : done + valid] = drawn[:valid]
            left = left - np.bincount(drawn[:valid], minlength=len(left))
            # A class that is used up is no longer drawn; the proportions of the others grow accordingly.
            logs[:, left == 0] = -np.inf
            done += valid
        ids = np.empty(samples, np.int64)
        ids[stable_argsort(classes)] = shuffled_by_class(pool.labels, rng)
        return Assignment(ids[np.argsort(owners, kind="stable")], offsets_of(sizes))


@dataclass(frozen=True)
class DirichletTwoStage(Partition):
    """Equal parts of the data are split among groups of ten clients by `Dirichlet`; then sizes are made equal.

    Within a group every client gets at least half the mean size. The lists of all clients are then concatenated and
    split again into equal parts, so that a client's part may include samples of its neighbour.
    ::

        client 0   ## #. .. ..
        client 1   .. ## #. ..
        client 2   .. .. #. ##

    Used by FedDF, CReFF and FedPRP.
    """

    name = "dirichlet-two-stage"
    alpha: Positive

    def assign(self, pool: SamplePool, clients: int, rng: np.random.Generator) -> Assignment:
        samples = len(pool.labels)
        need_enough(samples, clients)
        members = np.minimum(10, clients - np.arange(0, clients, 10))
        ends = offsets_of(members)[1:] * samples // clients
        order, parts, start = rng.permutation(samples), [], 0
        for group_clients, end in zip(members.tolist(), ends.tolist(), strict=True):
            part = order[start:end]
            half = len(part) // (2 * group_clients)
            assignment = _dirichlet(pool.subset(part), group_clients, self.alpha, half, True, rng)
            parts.append(part[assignment.indices])
            start = end
        return Assignment(np.concatenate(parts), offsets_of(even_sizes(samples, clients)))


@dataclass(frozen=True)
class QuantitySkew(Partition):
    """Samples are shuffled and split into parts whose sizes follow proportions from Dir(alpha).

    The draw is repeated until every client has ``min_size`` samples.
    ::

        client 0   ## ## ## ##
        client 1   #. #. #. #.
        client 2   #. #. #. #.

    Used by NIID-Bench.
    """

    name = "quantity"
    alpha: Positive
    min_size: Count = 10

    def assign(self, pool: SamplePool, clients: int, rng: np.random.Generator) -> Assignment:
        samples = len(pool.labels)
        need_enough(samples, clients, self.min_size)
        sizes = dirichlet_counts(self.alpha, np.array([samples]), clients, self.min_size, False, rng)[0]
        return Assignment(rng.permutation(samples), offsets_of(sizes))


def _dirichlet(
    pool: SamplePool, clients: int, alpha: float, min_size: int, capped: bool, rng: np.random.Generator
) -> Assignment:
    need_enough(len(pool.labels), clients, min_size)
    sizes = np.bincount(pool.labels)
    counts = dirichlet_counts(alpha, sizes, clients, min_size, capped, rng)
    return assign_by_counts(shuffled_by_class(pool.labels, rng), counts)


def _choices(logs: Floats, rng: np.random.Generator) -> Ints:
    """A random column for each row; ``logs`` are the logarithms of the columns' proportions."""
    cumulative = np.cumsum(proportions(logs), axis=1)
    chosen: Ints = np.argmax(cumulative > rng.random((len(logs), 1)) * cumulative[:, -1:], axis=1)
    return chosen


def _until_used_up(drawn: Ints, left: Ints) -> int:
    """The number of draws, in order, before the first of a class that is used up."""
    order = stable_argsort(drawn)
    counts = np.bincount(drawn, minlength=len(left))
    rank = np.empty(len(drawn), np.int64)
    rank[order] = ranges(np.zeros_like(counts), counts)
    used_up = rank >= left[drawn]
    return int(np.argmax(used_up)) if used_up.any() else len(drawn)
