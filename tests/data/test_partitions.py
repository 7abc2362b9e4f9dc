"""Partitions: each sample once, expected counts, and the distributions of the published sequential procedures."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.errors import HoldfastError
from holdfast.core.random import generator
from holdfast.data.dataset import Dataset, Group
from holdfast.data.federation import federate
from holdfast.data.partitions import (
    IID,
    PARTITIONS,
    ByDomain,
    BySite,
    ByWriter,
    ClassesPerClient,
    ClassShards,
    Dirichlet,
    DirichletInner,
    DirichletTwoStage,
    DirichletUncapped,
    Partition,
    QuantitySkew,
    SamplePool,
    Shards,
    WriterTransfer,
    dirichlet,
    parse_partition,
    partition_from,
)
from holdfast.data.partitions import draws as candidates
from holdfast.data.skew import LongTail
from holdfast.data.streams import stream


def pool_of(samples: int, classes: int, seed: int = 0) -> SamplePool:
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.arange(samples) % classes)
    groups = {
        "writer": (tuple(f"w{i}" for i in range(40)), rng.permutation(np.arange(samples) % 40)),
        "domain": (("a", "b"), rng.permutation(np.arange(samples) % 2)),
    }
    groups["site"] = groups["domain"]
    return SamplePool(labels, groups)


def table(partition: Partition, pool: SamplePool, clients: int, seed: int = 0) -> np.ndarray:
    """Samples per client and class, after a check that no sample is assigned twice."""
    indices, offsets = partition.assign(pool, clients, generator(seed, "test"))
    assert offsets[0] == 0
    assert offsets[-1] == len(indices)
    assert len(offsets) == clients + 1
    assert len(set(indices.tolist())) == len(indices)
    counts = np.zeros((clients, pool.labels.max() + 1), int)
    for k in range(clients):
        for i in indices[offsets[k] : offsets[k + 1]]:
            counts[k, pool.labels[i]] += 1
    return counts


COMPLETE = [
    IID(),
    Shards(2),
    ClassShards(2),
    Dirichlet(0.3, min_size=1),
    DirichletUncapped(0.3, min_size=0),
    DirichletInner(0.3),
    DirichletTwoStage(0.5),
    ClassesPerClient(2),
    QuantitySkew(1.0, min_size=1),
    ByDomain(Dirichlet(0.5, min_size=0)),
    BySite(),
    ByWriter(),
    WriterTransfer(),
]


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**40),
    samples=st.integers(400, 900),
    classes=st.sampled_from([2, 4, 5]),
    clients=st.sampled_from([10, 20, 40]),
)
@pytest.mark.parametrize("partition", COMPLETE, ids=lambda p: p.name)
def test_each_sample_is_assigned_once_and_the_seed_determines_everything(
    partition, seed, samples, classes, clients
):
    pool = pool_of(samples, classes)
    first = partition.assign(pool, clients, generator(seed, "test"))
    again = partition.assign(pool, clients, generator(seed, "test"))
    assert sorted(first.indices.tolist()) == list(range(samples))
    assert len(first.offsets) == clients + 1
    assert (np.diff(first.offsets) >= 0).all()
    np.testing.assert_array_equal(first.indices, again.indices)
    np.testing.assert_array_equal(first.offsets, again.offsets)


@pytest.mark.parametrize("partition", COMPLETE, ids=lambda p: p.name)
def test_another_seed_gives_another_assignment(partition):
    pool = pool_of(600, 4)
    one, two = (partition.assign(pool, 20, generator(seed, "test")).indices for seed in (1, 2))
    assert not np.array_equal(one, two)


@pytest.mark.parametrize("partition", [*COMPLETE, Shards(1)], ids=lambda p: p.name)
def test_classes_without_samples_are_skipped(partition):
    pool = pool_of(600, 3)
    counts = table(partition, SamplePool(np.array([0, 2, 3])[pool.labels], pool.groups), 30)
    assert counts.sum(0).tolist() == [200, 0, 200, 200]


def test_every_registered_partition_is_tested_here():
    assert {partition.name for partition in COMPLETE} == set(PARTITIONS)


@settings(deadline=None)
@given(samples=st.integers(50, 300), clients=st.integers(1, 50), seed=st.integers(0, 99))
def test_iid_sizes_differ_by_one_at_most(samples, clients, seed):
    sizes = table(IID(), pool_of(samples, 5), clients, seed).sum(1)
    assert sizes.max() - sizes.min() <= 1


def test_iid_mixes_the_classes():
    counts = table(IID(), pool_of(10_000, 4), 5)
    # A client's count of a class is hypergeometric with mean 500 and deviation about 17.
    assert np.abs(counts - 500).max() < 5 * 17


def test_shards_are_runs_of_the_sorted_labels():
    pool = pool_of(600, 5)
    clients, per_client = 15, 2
    indices, offsets = Shards(per_client).assign(pool, clients, generator(0, "test"))
    assert (np.diff(offsets) == 40).all()
    place = np.empty(600, int)
    place[np.argsort(pool.labels, kind="stable")] = np.arange(600)
    shards = place[indices].reshape(clients * per_client, 20)
    assert sorted(shards[:, 0].tolist()) == list(range(0, 600, 20))
    assert (np.diff(shards, axis=1) == 1).all()


@settings(deadline=None)
@given(s=st.sampled_from([1, 2, 3, 5]), seed=st.integers(0, 999))
def test_class_shards_have_the_expected_counts(s, seed):
    classes, clients, per_class = 5, 20, 120
    counts = table(ClassShards(s), pool_of(classes * per_class, classes), clients, seed)
    shard = per_class * classes // (s * clients)
    assert (counts % shard == 0).all()
    assert (counts.sum(1) == s * shard).all()
    assert ((counts > 0).sum(1) <= s).all()
    assert (counts.sum(0) == per_class).all()


def test_class_shards_distribute_remainders_one_by_one():
    labels = np.array([0] * 23 + [1] * 21)
    counts = table(ClassShards(1), SamplePool(labels), 10)
    assert sorted(counts[:, 0].tolist()) == [0] * 5 + [4, 4, 5, 5, 5]
    assert sorted(counts[:, 1].tolist()) == [0] * 5 + [4, 4, 4, 4, 5]
    assert (table(ClassShards(1), pool_of(40, 4), 40).sum(1) == 1).all()  # shards of one sample


def test_class_shards_of_62_classes_drop_what_cannot_be_shared():
    pool = SamplePool(np.repeat(np.arange(62), 60))
    with pytest.raises(HoldfastError, match="take 93 or 124 clients"):
        ClassShards(4).assign(pool, 100, generator(0, "test"))
    counts = table(ClassShards(4, drop=True), pool, 100)
    # floor(400 / 62) = 6 shards of 10 a class, 372 in all, 3 a client.
    assert (counts.sum(1) == 30).all()
    assert (counts.sum(0) <= 60).all()


def sequential_dirichlet(labels, clients, alpha, min_size, capped, rng):
    """The published procedure: class by class, repeated until all clients have ``min_size`` samples."""
    classes = labels.max() + 1
    while True:
        counts = np.zeros((clients, classes), int)
        for c in range(classes):
            size = int((labels == c).sum())
            p = rng.dirichlet(np.full(clients, alpha))
            if capped:
                p = p * (counts.sum(1) < len(labels) / clients)
            p = p / p.sum()
            cuts = (np.cumsum(p) * size).astype(int)[:-1]
            counts[:, c] = np.diff(np.concatenate([[0], cuts, [size]]))
        if counts.sum(1).min() >= min_size:
            return counts


def statistics(counts):
    sizes = np.sort(counts.sum(1))
    return [
        sizes[0],
        sizes[-1],
        (sizes**2).sum(),
        (counts > 0).sum(),
        (counts.max(1) ** 2).sum(),
        counts[-1].sum(),
    ]


@pytest.mark.parametrize(
    ("partition", "alpha", "min_size", "capped"),
    [
        (Dirichlet(0.2, min_size=5), 0.2, 5, True),
        (Dirichlet(1.0, min_size=0), 1.0, 0, True),
        (DirichletUncapped(0.3, min_size=3), 0.3, 3, False),
    ],
)
def test_dirichlet_has_the_law_of_the_sequential_procedure(partition, alpha, min_size, capped):
    labels = np.repeat(np.arange(4), [60, 100, 40, 80])
    draws, clients = 400, 8
    ours = np.array(
        [statistics(table(partition, SamplePool(labels), clients, seed)) for seed in range(draws)]
    )
    rng = np.random.default_rng(0)
    theirs = np.array(
        [
            statistics(sequential_dirichlet(labels, clients, alpha, min_size, capped, rng))
            for _ in range(draws)
        ]
    )
    error = np.sqrt((ours.var(0) + theirs.var(0)) / draws)
    assert np.all(np.abs(ours.mean(0) - theirs.mean(0)) < 4 * error)


@settings(deadline=None)
@given(seed=st.integers(0, 999))
def test_dirichlet_stops_giving_to_clients_with_a_fair_share(seed):
    counts = table(Dirichlet(0.1, min_size=0), pool_of(500, 5), 10, seed)
    before = np.cumsum(counts, axis=1)[:, :-1]
    # Floor leaves the last client of a class what rounding took from the others, one sample at most.
    assert (counts[:, 1:][before >= 50] <= 1).all()
    assert (counts[:-1, 1:][before[:-1] >= 50] == 0).all()


def test_dirichlet_uncapped_has_the_variance_of_the_distribution():
    alpha, clients, size = 0.5, 5, 1000
    pool = SamplePool(np.zeros(size, int))
    counts = np.array([table(DirichletUncapped(alpha, 0), pool, clients, seed)[:, 0] for seed in range(800)])
    expected = (clients - 1) / (clients**2 * (clients * alpha + 1))
    assert counts.mean(0) == pytest.approx(np.full(clients, size / clients), rel=0.15)
    assert (counts / size).var(0) == pytest.approx(np.full(clients, expected), rel=0.2)


def test_dirichlet_005_on_cifar10_sizes_is_found():
    # One draw in 27,000 or so gives all of 100 clients 10 samples; with this seed, one of the first 2,100.
    indices, offsets = Dirichlet(0.05).assign(pool_of(50_000, 10), 100, generator(12, "partition"))
    assert np.diff(offsets).min() >= 10
    assert len(np.unique(indices)) == 50_000


@pytest.mark.parametrize("kind", [Dirichlet, DirichletUncapped, QuantitySkew])
def test_a_tiny_alpha_gives_everything_to_one_client(kind):
    counts = table(kind(1e-6, min_size=0), pool_of(300, 3), 4)
    assert counts.sum() == 300
    sizes = counts.sum(1) if kind is QuantitySkew else counts.max(0)
    assert sizes.max() >= 100


def test_unreachable_min_size_raises_an_error_after_bounded_work(monkeypatch):
    monkeypatch.setattr(candidates, "MAX_SHARES", 100_000)
    with pytest.raises(HoldfastError, match=r"none of \d+ draws gave every client 28 samples .* min_size="):
        Dirichlet(0.05, min_size=28).assign(pool_of(300, 3), 10, generator(0, "test"))


@pytest.mark.parametrize("cores", [1, 3])
def test_redrawing_takes_the_first_candidate_that_has_enough_not_the_best(monkeypatch, cores):
    blocks = {1: [[1, 9]], 2: [[2, 8], [1, 9]], 4: [[0, 10], [3, 7], [5, 5], [4, 6]]}

    def tables(alpha, class_sizes, clients, capped, n, rng):
        sizes = np.array(blocks.get(n, [[5, 5]] * n))
        return candidates.Tables(sizes.astype(float), np.cumsum(sizes, axis=1)[None])

    monkeypatch.setattr(candidates, "dirichlet_tables", tables)
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    assert candidates.dirichlet_counts(1.0, np.array([10]), 2, 3, True, generator(0, "")).tolist() == [[3, 7]]


def test_a_partition_does_not_depend_on_the_number_of_cores(monkeypatch):
    def deal(cores):
        monkeypatch.setattr("os.cpu_count", lambda: cores)
        return Dirichlet(0.1, min_size=4).assign(pool_of(600, 6), 20, generator(0, "test")).indices

    np.testing.assert_array_equal(deal(1), deal(5))


def test_samples_of_a_class_are_assigned_in_random_order():
    pool = SamplePool(np.arange(400) % 2)
    indices, _ = Dirichlet(1.0, min_size=1).assign(pool, 1, generator(0, "test"))
    assert not np.array_equal(np.sort(indices[:200]), indices[:200])
    assert (pool.labels[indices] == np.repeat([0, 1], 200)).all()


def sequential_inner(labels, clients, alpha, rng):
    """FedDyn's loop: a random client that is not full draws classes from its prior until one has samples left."""
    classes = labels.max() + 1
    prior = rng.dirichlet(np.full(classes, alpha), clients)
    left, room = np.bincount(labels), np.full(clients, len(labels) // clients)
    counts = np.zeros((clients, classes), int)
    for k in rng.permutation(np.repeat(np.arange(clients), room)):
        p = prior[k] * (left > 0)
        c = rng.choice(classes, p=p / p.sum())
        left[c] -= 1
        counts[k, c] += 1
    return counts


def test_dirichlet_inner_has_the_law_of_the_sequential_procedure(monkeypatch):
    # Blocks of a few draws, so that used-up classes fall in the middle and at the ends of blocks.
    monkeypatch.setattr(dirichlet, "SHARES_AT_ONCE", 50)
    labels = np.repeat(np.arange(4), [40, 60, 30, 30])
    draws, clients = 250, 8
    ours = np.array(
        [statistics(table(DirichletInner(0.5), SamplePool(labels), clients, s))[3:] for s in range(draws)]
    )
    rng = np.random.default_rng(0)
    theirs = np.array([statistics(sequential_inner(labels, clients, 0.5, rng))[3:] for _ in range(draws)])
    error = np.sqrt((ours.var(0) + theirs.var(0)) / draws)
    assert np.all(np.abs(ours.mean(0) - theirs.mean(0)) <= 4 * error)


def test_dirichlet_inner_keeps_sizes_and_skews_classes():
    counts = table(DirichletInner(0.05), pool_of(2000, 10), 20)
    assert (counts.sum(1) == 100).all()
    assert (np.sort(counts, 1)[:, -2:].sum(1) > 70).mean() > 0.5


def test_dirichlet_two_stage_assigns_groups_of_ten_separately():
    pool = pool_of(2500, 5)
    indices, offsets = DirichletTwoStage(0.3).assign(pool, 25, generator(0, "test"))
    assert (np.diff(offsets) == 100).all()
    # Inside a group lists are class-ordered client by client, so a client has few classes; a group has all.
    held = [np.unique(pool.labels[indices[offsets[k] : offsets[k + 1]]]) for k in range(25)]
    assert np.mean([len(classes) for classes in held]) < 4.5
    for group in (range(10), range(10, 20), range(20, 25)):
        assert len(np.unique(np.concatenate([held[k] for k in group]))) == 5


def test_dirichlet_two_stage_requires_half_the_mean_within_a_group(monkeypatch):
    asked = []
    inner = dirichlet._dirichlet

    def spy(pool, clients, alpha, min_size, capped, rng):
        asked.append((len(pool.labels), clients, min_size, capped))
        return inner(pool, clients, alpha, min_size, capped, rng)

    monkeypatch.setattr(dirichlet, "_dirichlet", spy)
    DirichletTwoStage(1.0).assign(pool_of(2500, 5), 25, generator(0, "test"))
    assert asked == [(1000, 10, 50, True), (1000, 10, 50, True), (500, 5, 50, True)]


@settings(deadline=None)
@given(classes=st.integers(1, 6), seed=st.integers(0, 999))
def test_classes_per_client_is_exact(classes, seed):
    counts = table(ClassesPerClient(classes), pool_of(1200, 6), 20, seed)
    assert ((counts > 0).sum(1) == classes).all()
    assert (counts[np.arange(20), np.arange(20) % 6] > 0).all()
    for column in counts.T:
        owned = column[column > 0]
        assert owned.max() - owned.min() <= 1
        assert owned.sum() == 200


def test_classes_per_client_leaves_out_unassigned_classes():
    counts = table(ClassesPerClient(2), pool_of(600, 6), 2)
    assert ((counts == 0) | (counts == 100) | (counts == 50)).all()
    assert (counts.sum(0) > 0).sum() <= 4


def test_quantity_skew_skews_sizes_only():
    counts = table(QuantitySkew(0.5, min_size=50), pool_of(20_000, 4), 10)
    sizes = counts.sum(1)
    assert sizes.min() >= 50
    assert sizes.max() > 2 * sizes.mean()
    assert np.abs(counts / sizes[:, None] - 0.25).max() < 5 * np.sqrt(0.25 * 0.75 / 50)


def test_by_domain_gives_every_client_one_domain():
    pool = pool_of(600, 5)
    indices, offsets = ByDomain(ClassesPerClient(2)).assign(pool, 6, generator(0, "test"))
    domains = pool.groups["domain"][1]
    for k in range(6):
        mine = indices[offsets[k] : offsets[k + 1]]
        assert (domains[mine] == k // 3).all()
        assert len(np.unique(pool.labels[mine])) == 2
    assert ByDomain().default_clients(pool) == 2
    with pytest.raises(HoldfastError, match="5 clients cannot be shared equally by 2 domains"):
        ByDomain().assign(pool, 5, generator(0, "test"))


def test_by_site_gives_every_site_a_client():
    pool = SamplePool(np.arange(7) % 2, {"site": (("oslo", "bern", "rome"), np.array([2, 0, 0, 1, 2, 2, 0]))})
    indices, offsets = BySite().assign(pool, BySite().default_clients(pool), generator(0, "test"))
    clients = [sorted(indices[start:end].tolist()) for start, end in pairwise(offsets)]
    assert clients == [[1, 2, 6], [3], [0, 4, 5]]
    with pytest.raises(HoldfastError, match="4 clients cannot be shared equally by 3 sites"):
        BySite().assign(pool, 4, generator(0, "test"))


def test_by_writer_assigns_whole_writers():
    pool = pool_of(600, 5)
    writers = pool.groups["writer"][1]
    indices, offsets = ByWriter().assign(pool, 12, generator(0, "test"))
    held = [set(writers[indices[offsets[k] : offsets[k + 1]]].tolist()) for k in range(12)]
    assert sum(map(len, held)) == 40
    assert len(set.union(*held)) == 40
    assert {len(mine) for mine in held} == {3, 4}
    assert ByWriter().default_clients(pool) == 40


def test_by_writer_can_draw_some_writers():
    writers = np.repeat(np.arange(6), [1, 2, 3, 40, 50, 60])
    pool = SamplePool(np.zeros(156, int), {"writer": (tuple("abcdef"), writers)})
    one_each = ByWriter(per_client=1, min_samples=3)
    assert one_each.default_clients(pool) == 4
    indices, offsets = one_each.assign(pool, 3, generator(0, "test"))
    assert len(indices) < 153
    for k in range(3):
        mine = writers[indices[offsets[k] : offsets[k + 1]]]
        assert len(set(mine)) == 1
        assert len(mine) == np.count_nonzero(writers == mine[0]) >= 3
    with pytest.raises(HoldfastError, match="there are 4"):
        one_each.assign(pool, 5, generator(0, "test"))


def test_writer_transfer_copies_the_mixtures_of_writers():
    rng = np.random.default_rng(1)
    writers, labels = rng.integers(0, 10, 4000), rng.integers(0, 3, 4000)
    wrote = np.array(
        [[np.count_nonzero((writers == w) & (labels == c)) for c in range(3)] for w in range(10)]
    )
    pool = SamplePool(labels, {"writer": (tuple("abcdefghij"), writers)})
    # With as many clients as writers, everybody's share is what some writer wrote, up to rounding.
    counts = table(WriterTransfer(), pool, 10)
    distance = np.abs(counts[:, None] - wrote[None]).max(2)
    assert (distance.min(1) <= 1).all()
    assert sorted(distance.argmin(1).tolist()) == list(range(10))


def test_writer_transfer_splits_a_class_without_writers_equally():
    labels, writers = np.array([0] * 90 + [1] * 10), np.array([0] * 45 + [1] * 45 + [2] * 10)
    pool = SamplePool(labels, {"writer": (tuple("abc"), writers)})
    tables = [table(WriterTransfer(), pool, 2, seed) for seed in range(12)]
    assert all(counts.sum() == 100 for counts in tables)
    assert any(counts.tolist() == [[45, 5], [45, 5]] for counts in tables)


@pytest.mark.parametrize("partition", [*COMPLETE, ClassShards(4, drop=True), ByWriter(1, 20)], ids=str)
def test_a_description_makes_the_same_partition(partition):
    assert partition_from(partition.describe()) == partition


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("iid", IID()),
        ("shards:2", Shards(2)),
        ("class-shards:3", ClassShards(3)),
        ("class-shards:4,drop=true", ClassShards(4, drop=True)),
        ("dirichlet:0.1", Dirichlet(0.1)),
        ("dirichlet:0.1,min_size=1", Dirichlet(0.1, min_size=1)),
        ("dirichlet:alpha=1e-3", Dirichlet(0.001)),
        ("classes:3", ClassesPerClient(3)),
        ("by-domain", ByDomain(IID())),
        ("by-domain:dirichlet:0.5,min_size=2", ByDomain(Dirichlet(0.5, min_size=2))),
        ("by-writer:1,min_samples=10", ByWriter(1, 10)),
        ("by-site", BySite()),
        ("by-site:iid", BySite(IID())),
    ],
)
def test_partitions_are_parsed_from_text(text, expected):
    assert parse_partition(text) == expected


@pytest.mark.parametrize(
    ("text", "parameters"),
    [
        ("shards", {"per_client": 2}),
        ("class-shards", {"s": 2, "drop": False}),
        ("classes", {"classes": 2}),
        ("dirichlet:1", {"alpha": 1, "min_size": 10}),
        ("dirichlet-uncapped:1", {"alpha": 1, "min_size": 10}),
        ("quantity:1", {"alpha": 1, "min_size": 10}),
        ("by-domain", {"inside": {"name": "iid"}}),
        ("by-site", {"inside": {"name": "iid"}}),
        ("by-writer", {"per_client": None, "min_samples": 1}),
    ],
)
def test_default_parameters(text, parameters):
    assert parse_partition(text).describe() == {"name": text.split(":")[0]} | parameters


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dirichlt:0.1", "did you mean dirichlet"),
        ("dirichlet", "needs alpha"),
        ("dirichlet:0", "alpha is 0.0; it must be above 0"),
        ("dirichlet:nan", "alpha is nan; it must be a number"),
        ("dirichlet:0.1,minsize=3", "did you mean min_size"),
        ("dirichlet:much", "must be a number"),
        ("shards:2.5", "must be a whole number"),
        ("shards:inf", "must be a whole number"),
        ("shards:0", "per_client is 0; it must be at least 1"),
        ("class-shards:0", "s is 0; it must be at least 1"),
        ("classes:0", "classes is 0; it must be at least 1"),
        ("by-writer:0", "per_client is 0; it must be at least 1"),
        ("class-shards:2,drop=perhaps", "must be true or false"),
        ("iid:3", "not of the form option=value"),
        ("dirichlet:0.1,alpha=0.2", "alpha is given twice"),
        ("dirichlet:0.1,5,7", "takes at most 2 values without a name"),
        ("by-domain:nonsense", "unknown partition"),
    ],
)
def test_invalid_text_raises_errors(text, message):
    with pytest.raises(HoldfastError, match=message):
        parse_partition(text)


@pytest.mark.parametrize(
    ("partition", "clients", "message"),
    [
        (IID(), 101, "101 clients with at least 1 sample each need 101 samples, but there are 100"),
        (IID(), 0, "at least 1 client"),
        (Shards(2), 51, "need 102 samples"),
        (Dirichlet(0.1), 11, "need 110 samples"),
        (ClassShards(3), 7, "cannot be shared equally by 4 classes; take 4 or 8 clients"),
        (ClassesPerClient(5), 4, "cannot hold 5 classes: the data has 4"),
        (ByWriter(), 5, "this data set has no group 'writer'"),
        (ByDomain(), 5, "this data set has no group 'domain'"),
        (BySite(), 5, "this data set has no group 'site'; heart-disease has one"),
    ],
)
def test_impossible_partitions_raise_errors(partition, clients, message):
    with pytest.raises(HoldfastError, match=message):
        partition.assign(SamplePool(np.arange(100) % 4), clients, generator(0, "test"))


def test_the_number_of_clients_is_required():
    with pytest.raises(HoldfastError, match="needs the number of clients"):
        IID().default_clients(pool_of(10, 2))


@pytest.mark.parametrize(
    "text",
    [
        "iid", "shards:2", "class-shards:2", "dirichlet:0.5,min_size=1", "dirichlet-uncapped:0.5,min_size=1",
        "dirichlet-inner:0.5", "dirichlet-two-stage:5", "classes:2", "quantity:1,min_size=1", "by-domain:iid",
        "by-site", "by-writer", "writer-transfer",
    ],
)  # fmt: skip
def test_a_long_tail_goes_with_every_partition_and_with_streams(text):
    assert text.split(":")[0] in PARTITIONS
    samples, classes = 4000, 10
    writers = np.random.default_rng(0).integers(0, 40, samples)
    groups = {
        "writer": Group(tuple(map(str, range(40))), writers, np.zeros(classes, int)),
        "domain": Group(("a", "b"), np.arange(samples) % 2, np.zeros(classes, int)),
        "site": Group(("a", "b"), np.arange(samples) % 2, np.zeros(classes, int)),
    }
    y = torch.arange(samples) % classes
    data = Dataset(
        "toy", torch.zeros(samples, 1), y, torch.zeros(classes, 1), y[:classes], tuple("abcdefghij"),
        groups=groups,
    )  # fmt: skip
    tail, partition = LongTail(0.05), parse_partition(text)
    expected = [int(400 * 0.05 ** (i / 9) + 1e-6) for i in range(classes)]
    assert federate(data, partition, clients=10, long_tail=tail).class_counts.tolist() == expected
    assert stream(data, partition, clients=4, long_tail=tail).class_counts.tolist() == expected
