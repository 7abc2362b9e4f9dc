"""Partitions by proportions from a Dirichlet distribution, in the variants that share the name."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from holdfast.core.spec import Count, Positive
from holdfast.data.dealing import Floats, Ints, even_sizes, in_order_of, offsets_of, ranges, shuffled_by_class
from holdfast.data.partitions.base import Assignment, Partition, SamplePool, deal, need_enough
from holdfast.data.partitions.draws import SHARES_AT_ONCE, dirichlet_counts, log_gammas, proportions


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
    alpha: Positive
    min_size: Count = 10

    def assign(self, pool: SamplePool, clients: int, rng: np.random.Generator) -> Assignment:
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
    alpha: Positive
    min_size: Count = 10

    def assign(self, pool: SamplePool, clients: int, rng: np.random.Generator) -> Assignment:
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
    alpha: Positive

    def assign(self, pool: SamplePool, clients: int, rng: np.random.Generator) -> Assignment:
        """Deal the pool to ``clients`` clients."""
        samples = len(pool.labels)
        need_enough(samples, clients)
        left = np.bincount(pool.labels)
        logs = log_gammas(self.alpha, (clients, len(left)), rng)
        logs[:, left == 0] = -np.inf
        sizes = even_sizes(samples, clients)
        turns = rng.permutation(np.repeat(np.arange(clients), sizes))
        wishes = np.empty(samples, np.int64)
        done = 0
        while done < samples:
            now = turns[done : done + max(1, SHARES_AT_ONCE // len(left))]
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
    alpha: Positive

    def assign(self, pool: SamplePool, clients: int, rng: np.random.Generator) -> Assignment:
        """Deal the pool to ``clients`` clients."""
        samples = len(pool.labels)
        need_enough(samples, clients)
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
    alpha: Positive
    min_size: Count = 10

    def assign(self, pool: SamplePool, clients: int, rng: np.random.Generator) -> Assignment:
        """Deal the pool to ``clients`` clients."""
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
    return deal(shuffled_by_class(pool.labels, rng), counts)


def _choices(logs: Floats, rng: np.random.Generator) -> Ints:
    """One random column per row, by the proportions with these logarithms."""
    cumulative = np.cumsum(proportions(logs), axis=1)
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
