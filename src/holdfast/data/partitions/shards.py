"""Partitions by cutting classes into parts: the same mixture for all, shards, so many classes each."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import numpy as np

from holdfast.core.errors import HoldfastError
from holdfast.core.spec import PositiveCount
from holdfast.data.dealing import even_sizes, in_order_of, offsets_of, shuffled_by_class
from holdfast.data.partitions.base import Assignment, Partition, SamplePool, collect, need, need_enough


@dataclass(frozen=True)
class IID(Partition):
    """Everybody holds the same mixture: a shuffle, cut into parts whose sizes differ by one at most.

    ::

        client 0   ## ## ## ##
        client 1   ## ## ## ##
        client 2   ## ## ## ##
    """

    name = "iid"

    def assign(self, pool: SamplePool, clients: int, rng: np.random.Generator) -> Assignment:
        """Deal the pool to ``clients`` clients."""
        samples = len(pool.labels)
        need_enough(samples, clients)
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
    per_client: PositiveCount = 2

    def assign(self, pool: SamplePool, clients: int, rng: np.random.Generator) -> Assignment:
        """Deal the pool to ``clients`` clients."""
        samples, shards = len(pool.labels), clients * self.per_client
        need_enough(samples, clients, self.per_client)
        sizes = even_sizes(samples, shards)
        rows = rng.permutation(shards).reshape(clients, self.per_client)
        return collect(in_order_of(pool.labels), offsets_of(sizes)[:-1], sizes, rows)


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
    s: PositiveCount = 2
    drop: bool = False

    def assign(self, pool: SamplePool, clients: int, rng: np.random.Generator) -> Assignment:
        """Deal the pool to ``clients`` clients."""
        need_enough(len(pool.labels), clients, self.s)
        counts = np.bincount(pool.labels)
        counts = counts[counts > 0]
        per_class, left = divmod(self.s * clients, len(counts))
        if left and not self.drop:
            raise HoldfastError(self._not_divisible(clients, len(counts)))
        each = per_class * len(counts) // clients
        need(
            each >= 1,
            f"{clients} clients with {self.s} shards each are too few for {len(counts)} classes: some class "
            f"would have no shard",
        )
        need(
            int(counts.min()) >= per_class,
            f"the smallest class has {counts.min()} samples and cannot be cut into {per_class} shards",
        )
        sizes = np.concatenate([even_sizes(int(count), per_class) for count in counts])
        # A shuffle of all shards is a shuffle of the labels with a random shard popped for each.
        rows = rng.permutation(len(sizes))[: each * clients].reshape(clients, each)
        return collect(in_order_of(pool.labels), offsets_of(sizes)[:-1], sizes, rows)

    def _not_divisible(self, clients: int, classes: int) -> str:
        step = classes // gcd(self.s, classes)
        below = clients // step * step
        near = f"{below} or {below + step}" if below else str(step)
        return (
            f"{self.s} shards for each of {clients} clients cannot be shared equally by {classes} classes; "
            f"take {near} clients, or drop=True to leave the rest out"
        )


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
    classes: PositiveCount = 2

    def assign(self, pool: SamplePool, clients: int, rng: np.random.Generator) -> Assignment:
        """Deal the pool to ``clients`` clients."""
        need_enough(len(pool.labels), clients, self.classes)
        counts = np.bincount(pool.labels)
        counts = counts[counts > 0]
        need(
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
        return collect(order, np.concatenate(starts), np.concatenate(sizes), rows.reshape(held.shape))
