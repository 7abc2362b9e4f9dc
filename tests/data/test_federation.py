"""Federations: queries, hash, files and validation."""

import json
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.errors import HoldfastError
from holdfast.data.dataset import Dataset
from holdfast.data.federation import Federation, federate
from holdfast.data.partitions import IID, ClassShards, Dirichlet, DirichletUncapped
from holdfast.data.skew import FeatureSkew, LongTail
from holdfast.data.streams import federation_from, stream


def dataset_of(labels, classes=None) -> Dataset:
    y = torch.as_tensor(np.asarray(labels), dtype=torch.int64)
    count = classes or int(y.max()) + 1
    x = torch.arange(len(y) * 16, dtype=torch.int64).remainder(251).byte().reshape(-1, 1, 4, 4)
    return Dataset("toy", x, y, x[:8], y[:8], tuple(map(str, range(count))))


@pytest.fixture
def toy() -> Dataset:
    return dataset_of(np.arange(400) % 4)


def test_clients_sizes_and_counts_agree_with_counting(toy):
    federation = federate(toy, Dirichlet(0.3, min_size=1), clients=12, seed=3)
    assert federation.clients == 12
    naive = np.zeros((12, 4), int)
    for k in range(12):
        for i in federation.client(k):
            naive[k, int(toy.y_train[i])] += 1
    np.testing.assert_array_equal(federation.label_counts(), naive)
    np.testing.assert_array_equal(federation.label_counts([7, 2, 7]), naive[[7, 2, 7]])
    np.testing.assert_array_equal(federation.sizes(), naive.sum(1))
    np.testing.assert_array_equal(federation.class_counts, naive.sum(0))


def test_classes_without_samples_keep_their_column():
    federation = federate(dataset_of([0, 1, 0, 1], classes=5), IID(), clients=2)
    assert federation.label_counts().shape == (2, 5)
    assert federation.class_counts.tolist() == [2, 2, 0, 0, 0]


def stream_by_hand(toy, **more):
    return Federation(toy, np.arange(10), np.array([0, 2, 5, 5, 5, 6, 10]), stages=3, **more)


def test_stages_are_ordered_within_clients(toy):
    federation = stream_by_hand(toy)
    assert federation.clients == 2
    assert [federation.client(0, s).tolist() for s in range(3)] == [[0, 1], [2, 3, 4], []]
    assert federation.sizes(2).tolist() == [0, 4]
    assert federation.label_counts(stage=1).tolist() == [[1, 0, 1, 1], [0, 1, 0, 0]]
    assert federation.label_counts().sum() == 10


def test_cumulative_clients_keep_what_they_had_until_they_leave(toy):
    federation = stream_by_hand(toy, cumulative=True, leaves=np.array([3, 2]))
    assert [federation.client(0, s).tolist() for s in range(3)] == [[0, 1], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]
    assert federation.sizes(1).tolist() == [5, 1]
    assert federation.sizes(2).tolist() == [5, 0]
    assert federation.label_counts(stage=2)[1].sum() == 0


def test_a_missing_stage_is_refused(toy):
    with pytest.raises(HoldfastError, match="there is no stage 3: the stages are 0 to 2"):
        stream_by_hand(toy).client(0, 3)


@pytest.mark.parametrize(
    ("indices", "offsets", "stages"),
    [
        ([0, 1], [0, 1], 1),
        ([0, 1], [1, 2], 1),
        ([0, 1], [0, 2, 1, 2], 1),
        ([0, 1], [0, 1, 2], 3),
        ([400], [0, 1], 1),
    ],
)
def test_invalid_indices_and_offsets_raise_errors(toy, indices, offsets, stages):
    with pytest.raises(HoldfastError):
        Federation(toy, np.array(indices), np.array(offsets), stages=stages)


def test_the_hash_is_of_the_content(toy):
    one = federate(toy, IID(), clients=4, seed=1)
    assert one.hash == federate(toy, IID(), clients=4, seed=1).hash
    lists = [one.client(k) for k in range(4)]
    assert federate(toy, lists).hash == one.hash
    swapped = [lists[1], lists[0], *lists[2:]]
    relabelled = dataset_of((np.arange(400) + 1) % 4)
    others = [
        federate(toy, IID(), clients=4, seed=2),
        federate(toy, swapped),
        federate(toy, lists[:3], public=lists[3]),
        federate(toy, lists[:3]),
        federate(relabelled, lists),
        Federation(toy, one.indices, one.offsets, stages=2),
        Federation(toy, one.indices, one.offsets, stages=2, cumulative=True),
    ]
    hashes = [one.hash, *(other.hash for other in others)]
    assert len(set(hashes)) == len(hashes)
    assert len(one.hash) == 64


def test_the_hash_depends_on_the_lengths_of_arrays(toy):
    held = Federation(toy, np.array([0]), np.array([0, 1]))
    public = Federation(toy, np.array([], int), np.array([0, 0]), public=np.array([1]))
    assert held.hash != public.hash


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 2**32), alpha=st.sampled_from([0.1, 1.0]), clients=st.integers(1, 30))
def test_the_same_seed_gives_the_same_hash(seed, alpha, clients):
    toy = dataset_of(np.arange(300) % 3)
    one, again = (
        federate(
            toy, DirichletUncapped(alpha, 0), clients=clients, seed=seed, public=0.1, long_tail=LongTail(0.3)
        )
        for _ in range(2)
    )
    assert one.hash == again.hash
    assert federation_from(toy, one.partition).hash == one.hash


def test_repr_of_a_federation_is_one_line(toy):
    dealt = federate(toy, Dirichlet(0.5, min_size=0), clients=3, seed=7)
    assert repr(dealt) == f"Federation({toy!r}, 3 clients, name=dirichlet, alpha=0.5, min_size=0, seed=7)"
    staged = stream(toy, IID(), clients=2, tasks_per_client=2)
    assert "\n" not in repr(staged)
    assert "2 clients over 2 stages, name=iid" in repr(staged)


def test_a_partition_may_be_named(toy):
    assert federate(toy, "dirichlet:0.5", clients=3).hash == federate(toy, Dirichlet(0.5), clients=3).hash
    assert stream(toy, "iid", clients=3).hash == stream(toy, IID(), clients=3).hash
    with pytest.raises(HoldfastError, match="unknown partition 'dirichlt'"):
        federate(toy, "dirichlt:0.5", clients=3)


def test_a_saved_federation_is_loaded_unchanged(toy, tmp_path):
    path = tmp_path / "federation.json"
    made = federate(toy, Dirichlet(0.5, min_size=1), clients=5, seed=1, public=0.2)
    made.save(path)
    content = json.loads(path.read_text())
    assert content["partition"]["alpha"] == 0.5
    assert content["clients"] == 5
    read = Federation.load(path, toy)
    assert read.hash == made.hash == content["hash"]
    assert read.partition == made.partition
    np.testing.assert_array_equal(read.public, made.public)


def test_loading_applies_the_feature_skew_again(toy, tmp_path):
    path = tmp_path / "federation.json"
    made = federate(toy, IID(), clients=4, skew=FeatureSkew(noise=0.3, contrast=0.5, groups=2))
    made.save(path)
    read = Federation.load(path, toy)
    assert torch.equal(read.dataset.x_train, made.dataset.x_train)
    assert not torch.equal(read.dataset.x_train, toy.x_train)


def test_invalid_files_raise_errors(toy, tmp_path):
    path = tmp_path / "federation.json"
    made = federate(toy, IID(), clients=4)
    made.save(path)
    with pytest.raises(HoldfastError, match="its hash differs"):
        Federation.load(path, dataset_of((np.arange(400) + 1) % 4))
    content = json.loads(path.read_text())
    content["indices"][0], content["indices"][1] = content["indices"][1], content["indices"][0]
    path.write_text(json.dumps(content))
    with pytest.raises(HoldfastError, match="its hash differs"):
        Federation.load(path, toy)
    for text in ("{}", "[1, 2", '{"format": "holdfast-federation-1"}'):
        path.write_text(text)
        with pytest.raises(HoldfastError, match="not a complete federation file"):
            Federation.load(path, toy)
    with pytest.raises(HoldfastError, match="cannot read the federation"):
        Federation.load(tmp_path / "none.json", toy)
    for key, value, words in (
        ("indices", [0, "one"], r"indices\[1\] is 'one', not a whole number"),
        ("offsets", [0, [1]], r"offsets\[1\] is \[1\]"),
        ("public", [2**80], r"public\[0\] is \d+, not a whole number"),
        ("leaves", None, "'leaves' is missing or damaged"),
        ("stages", "2", "'stages' is missing or damaged"),
        ("stages", 0, "offsets must begin with 0"),
        ("partition", [], "'partition' is missing or damaged"),
    ):
        path.write_text(json.dumps(content | {key: value}))
        with pytest.raises(HoldfastError, match=words):
            Federation.load(path, toy)


def test_given_ids_are_kept(toy):
    federation = federate(toy, [[5, 3], [], np.array([7])], public=[9, 8])
    assert [federation.client(k).tolist() for k in range(3)] == [[5, 3], [], [7]]
    assert federation.public.tolist() == [8, 9]
    with pytest.raises(HoldfastError, match="load it from its own file"):
        federation_from(toy, federation.partition)


@pytest.mark.parametrize(
    ("parts", "more", "message"),
    [
        ([], {}, "at least 1 client"),
        ([[1, 2], [2, 3]], {}, "sample 2 occurs 2 times in the sample ids of the clients"),
        ([[1, 400]], {}, "between 0 and 399, but range from 1 to 400"),
        ([[-1]], {}, "between 0 and 399"),
        ([[0.5]], {}, "flat list of whole numbers"),
        ([[1], [2]], {"clients": 3}, "sample ids of 2 clients are given, but clients is 3"),
        ([[1], [2]], {"public": [2]}, "sample 2 is both public and assigned to a client"),
        ([[1], [2]], {"public": 0.1}, "public must be sample ids too"),
        ([[1], [2]], {"long_tail": LongTail(0.5)}, "would remove some"),
    ],
)
def test_invalid_given_ids_raise_errors(toy, parts, more, message):
    with pytest.raises(HoldfastError, match=message):
        federate(toy, parts, **more)


def test_public_data_is_drawn_by_class_and_no_client_has_it():
    toy = dataset_of(np.repeat(np.arange(3), [100, 60, 40]))
    federation = federate(toy, IID(), clients=5, public=0.1, seed=4)
    assert np.bincount(toy.y_train[federation.public]).tolist() == [10, 6, 4]
    assert sorted([*federation.public, *federation.indices]) == list(range(200))
    named = federate(toy, IID(), clients=5, public=[3, 1, 199])
    assert named.public.tolist() == [1, 3, 199]
    assert sorted([*named.public, *named.indices]) == list(range(200))


@pytest.mark.parametrize("public", [1.0, -0.1, [1, 1], [500]])
def test_invalid_public_data_raises_errors(toy, public):
    with pytest.raises(HoldfastError):
        federate(toy, IID(), clients=5, public=public)


def test_long_tail_composes_with_a_partition(toy):
    federation = federate(toy, ClassShards(2), clients=10, long_tail=LongTail(0.1))
    assert federation.class_counts.tolist() == [100, 46, 21, 10]
    assert federation.partition == {
        "name": "class-shards",
        "s": 2,
        "drop": False,
        "clients": 10,
        "seed": 0,
        "long_tail": 0.1,
    }


def test_a_million_clients_cost_megabytes():
    toy = dataset_of(np.arange(50_000) % 10)
    tracemalloc.start()
    federation = federate(toy, DirichletUncapped(1.0, min_size=0), clients=1_000_000)
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert federation.clients == 1_000_000
    assert federation.sizes().sum() == 50_000
    assert held < 20 * 2**20
    assert peak < 500 * 2**20
