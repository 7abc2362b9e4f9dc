"""Partitions that split classes into equal parts: IID, shards, a number of classes per client."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import numpy as np

from holdfast.core.errors import HoldfastError
from holdfast.core.spec import PositiveCount
from holdfast.data.indexing import even_sizes, offsets_of, shuffled_by_class, stable_argsort
from holdfast.data.partitions.base import Assignment, Partition, SamplePool, assign_runs, need, need_enough


@dataclass(frozen=True)
class IID(Partition):
    """Samples are shuffled and split into parts whose sizes differ by one at most.

    ::

        client 0   ## ## ## ##
        client 1   ## ## ## ##
        client 2   ## ## ## ##
    """

    name = "iid"

    def assign(self, pool: SamplePool, clients: int, rng: np.random.Generator) -> Assignment:
        samples = len(pool.labels)
        need_enough(samples, clients)
        return Assignment(rng.permutation(samples), offsets_of(even_sizes(samples, clients)))


@dataclass(frozen=True)
class Shards(Partition):
    """Samples sorted by class are split into equal shards; each client gets ``per_client`` random shards.

    A shard may span two classes, and a client may get two shards of one class. The sizes of shards differ by one
    sample at most.
    ::

        client 0   #. .. #. ..
        client 1   .. ## .. ..
        client 2   #. .. .. #.

    McMahan et al., AISTATS 2017.
    """

    name = "shards"
    per_client: PositiveCount = 2

    def assign(self, pool: SamplePool, clients: int, rng: np.random.Generator) -> Assignment:
        samples, shards = len(pool.labels), clients * self.per_client
        need_enough(samples, clients, self.per_client)
        sizes = even_sizes(samples, shards)
        rows = rng.permutation(shards).reshape(clients, self.per_client)
        return assign_runs(stable_argsort(pool.labels), offsets_of(sizes)[:-1], sizes, rows)


@dataclass(frozen=True)
class ClassShards(Partition):
    """Every class is split into the same number of shards; each client gets ``s`` of them, so at most s classes.

    Shards never span classes: each of the C classes is split into ``s * clients / C`` shards, which must be a whole
    number. With ``drop=True`` it is rounded down, and shards that cannot be divided equally are left out with their
    samples.
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
        # This has the same distribution as shuffling the labels and taking a random shard of each.
        rows = rng.permutation(len(sizes))[: each * clients].reshape(clients, each)
        return assign_runs(stable_argsort(pool.labels), offsets_of(sizes)[:-1], sizes, rows)

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
    """Every client has exactly ``classes`` classes; a class is divided equally among the clients that have it.

    Client i has class i mod C and random others. With fewer clients than classes, a class may be assigned to no
    client; its samples are left out.
    ::

        client 0   ## .. ## ..
        client 1   .. ## .. ##
        client 2   .. ## ## ..

    Used by NIID-Bench, and by FedFA on Mixed Digits.
    """

    name = "classes"
    classes: PositiveCount = 2

    def assign(self, pool: SamplePool, clients: int, rng: np.random.Generator) -> Assignment:
        need_enough(len(pool.labels), clients, self.classes)
        counts = np.bincount(pool.labels)
        counts = counts[counts > 0]
        need(
            self.classes <= len(counts),
            f"a client cannot hold {self.classes} classes: the data has {len(counts)}",
        )
        keys = rng.random((clients, len(counts)), np.float32)
        keys[np.arange(clients), np.arange(clients) % len(counts)] = -1
        chosen = np.argpartition(keys, self.classes - 1, axis=1)[:, : self.classes]  # the clients' classes
        owners = np.bincount(chosen.ravel(), minlength=len(counts))
        short = np.flatnonzero(owners > counts)
        if len(short):
            raise HoldfastError(
                f"a class of {counts[short[0]]} samples cannot be shared by {owners[short[0]]} clients; use fewer "
                "clients or fewer classes per client"
            )
        classes = np.flatnonzero(owners)
        sizes = [even_sizes(int(counts[c]), int(owners[c])) for c in classes]
        starts = [offsets_of(counts)[c] + offsets_of(s)[:-1] for c, s in zip(classes, sizes, strict=True)]
        # Parts are numbered class by class; the owners of a class get its parts in order.
        rows = np.empty(chosen.size, np.int64)
        rows[stable_argsort(chosen.ravel())] = np.arange(chosen.size)
        order = shuffled_by_class(pool.labels, rng)
        return assign_runs(order, np.concatenate(starts), np.concatenate(sizes), rows.reshape(chosen.shape))
