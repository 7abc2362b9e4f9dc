"""Partitions by a group of the samples: their domain, their writer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from holdfast.core.spec import Count, PositiveCount
from holdfast.data.indexing import Ints, even_sizes, offsets_of, ranges, shuffled_by_class
from holdfast.data.partitions.base import (
    Assignment,
    Partition,
    SamplePool,
    assign_by_counts,
    need,
    need_enough,
)
from holdfast.data.partitions.draws import cut_points
from holdfast.data.partitions.shards import IID


@dataclass(frozen=True)
class ByDomain(Partition):
    """Every domain has the same number of clients; the partition ``inside`` divides the domain among them.

    The first clients belong to the first domain, and so on. By default there is one client per domain.
    ::

                   mnist  usps  svhn
        client 0    ##     ..    ..
        client 1    ##     ..    ..
        client 2    ..     ##    ..
        client 3    ..     ##    ..

    The data set must have a group ``domain``. Used by FedFA on Mixed Digits.
    """

    name = "by-domain"
    group: ClassVar[str] = "domain"
    inside: Partition = IID()  # noqa: RUF009 (it is frozen)

    def default_clients(self, pool: SamplePool) -> int:
        return len(np.unique(pool.group(self.group)[1]))

    def assign(self, pool: SamplePool, clients: int, rng: np.random.Generator) -> Assignment:
        domains = pool.group(self.group)[1]
        present = np.unique(domains)
        each, left = divmod(clients, len(present))
        need(
            each >= 1 and not left,
            f"{clients} clients cannot be shared equally by {len(present)} {self.group}s; take a multiple of it",
        )
        ids, sizes = [], []
        for domain in present:
            members = np.flatnonzero(domains == domain)
            assignment = self.inside.assign(pool.subset(members), each, rng)
            ids.append(members[assignment.indices])
            sizes.append(np.diff(assignment.offsets))
        return Assignment(np.concatenate(ids), offsets_of(np.concatenate(sizes)))


@dataclass(frozen=True)
class BySite(ByDomain):
    """Every site is a client: the natural partition of data that is stored at several sites.

    If ``clients`` is a multiple of the number of sites, each site has the same number of clients, and the partition
    ``inside`` divides the site's samples among them.
    ::

                   Bern  Oslo  Rome
        client 0    ##    ..    ..
        client 1    ..    ##    ..
        client 2    ..    ..    ##

    The data set must have a group ``site``. The default for real federations and for data from several sites.
    """

    name = "by-site"
    group: ClassVar[str] = "site"


@dataclass(frozen=True)
class ByWriter(Partition):
    """A client holds the samples of its writers: the natural partition of handwriting.

    All writers are divided among the clients; their numbers of writers differ by one at most. With
    ``per_client``, each client gets that many random writers and the other writers are left out. Writers with fewer
    than ``min_samples`` samples are left out too. By default there is one client per writer.
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
        writers = np.bincount(pool.group("writer")[1])
        return int((writers >= max(1, self.min_samples)).sum()) // (self.per_client or 1)

    def assign(self, pool: SamplePool, clients: int, rng: np.random.Generator) -> Assignment:
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
    """Clients have the class distributions of real writers, with samples of any writer.

    For every client a random writer is drawn; each class is split in proportion to how often the drawn writers wrote
    it (equally, where none did).
    ::

        Ann wrote  8 2 0 4    client 0   ## #. .. ##   samples of any writer
        Bob wrote  2 6 4 4    client 1   .. ## ## ##

    The data set must have a group ``writer``. Used by FedFA's EMNIST notebook.
    """

    name = "writer-transfer"

    def assign(self, pool: SamplePool, clients: int, rng: np.random.Generator) -> Assignment:
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
        ends = np.stack([cut_points(p, int(total)) for p, total in zip(shares, class_sizes, strict=True)])
        counts: Ints = np.diff(ends, axis=1, prepend=0).astype(np.int64)
        return assign_by_counts(shuffled_by_class(pool.labels, rng), counts)
