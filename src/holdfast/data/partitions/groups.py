"""Partitions by what a sample says of itself: its domain, its writer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from holdfast.core.spec import Count, PositiveCount
from holdfast.data.dealing import Ints, even_sizes, offsets_of, ranges, shuffled_by_class
from holdfast.data.partitions.base import Assignment, Partition, SamplePool, deal, need, need_enough
from holdfast.data.partitions.draws import cut
from holdfast.data.partitions.shards import IID


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
    inside: Partition = IID()  # noqa: RUF009 (it is frozen)

    def default_clients(self, pool: SamplePool) -> int:
        """One per domain."""
        return len(np.unique(pool.group("domain")[1]))

    def assign(self, pool: SamplePool, clients: int, rng: np.random.Generator) -> Assignment:
        """Deal the pool to ``clients`` clients."""
        domains = pool.group("domain")[1]
        present = np.unique(domains)
        each, left = divmod(clients, len(present))
        need(
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
    per_client: PositiveCount | None = None
    min_samples: Count = 1

    def default_clients(self, pool: SamplePool) -> int:
        """As many as there are writers for."""
        writers = np.bincount(pool.group("writer")[1])
        return int((writers >= max(1, self.min_samples)).sum()) // (self.per_client or 1)

    def assign(self, pool: SamplePool, clients: int, rng: np.random.Generator) -> Assignment:
        """Deal the pool to ``clients`` clients."""
        writer = pool.group("writer")[1]
        sizes = np.bincount(writer)
        active = rng.permutation(np.flatnonzero(sizes >= max(1, self.min_samples)))
        needed = clients * (self.per_client or 1)
        need(
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

    def assign(self, pool: SamplePool, clients: int, rng: np.random.Generator) -> Assignment:
        """Deal the pool to ``clients`` clients."""
        need_enough(len(pool.labels), clients)
        names, writer = pool.group("writer")
        class_sizes = np.bincount(pool.labels)
        classes = len(class_sizes)
        wrote = np.bincount(writer * classes + pool.labels, minlength=len(names) * classes)
        active = np.flatnonzero(np.bincount(writer))
        need(
            clients <= len(active),
            f"{clients} clients need as many writers, but there are {len(active)}",
        )
        mixture = wrote.reshape(-1, classes)[rng.permutation(active)[:clients]].T.astype(np.float64)
        mixture[mixture.sum(1) == 0] = 1
        shares = mixture / mixture.sum(1, keepdims=True)
        ends = np.stack([cut(p, int(total)) for p, total in zip(shares, class_sizes, strict=True)])
        counts: Ints = np.diff(ends, axis=1, prepend=0).astype(np.int64)
        return deal(shuffled_by_class(pool.labels, rng), counts)
