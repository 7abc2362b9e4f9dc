"""Streams: tasks that arrive in stages, joining and leaving clients, and stage schedules."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.errors import HoldfastError
from holdfast.core.random import generator
from holdfast.data.dataset import Dataset
from holdfast.data.federation import Federation
from holdfast.data.partitions import IID, ClassShards, Dirichlet, DirichletTwoStage, SamplePool
from holdfast.data.schedules import EveryN, GlobalEpochs, check_schedule, describe_schedule, schedule_from
from holdfast.data.skew import LongTail
from holdfast.data.streams import federation_from, stream


def dataset_of(labels, test_labels=(0, 1)) -> Dataset:
    y, y_test = (torch.as_tensor(np.asarray(values)) for values in (labels, test_labels))
    names = tuple(map(str, range(int(y.max()) + 1)))
    return Dataset("toy", torch.zeros(len(y), 1), y, torch.zeros(len(y_test), 1), y_test, names)


@pytest.fixture
def cifar() -> Dataset:
    """CIFAR-10's labels."""
    return dataset_of(np.arange(50_000) % 10, np.arange(10_000) % 10)


@pytest.fixture
def toy() -> Dataset:
    return dataset_of(np.arange(600) % 6, np.arange(60) % 6)


def tasks(federation: Federation) -> list[np.ndarray]:
    """Every task's own samples, without those of earlier stages."""
    return [federation.indices[a:b] for a, b in zip(federation.offsets, federation.offsets[1:], strict=False)]


def test_the_papers_stream_has_100_tasks_of_s_classes(cifar):
    federation = stream(
        cifar, ClassShards(2), clients=20, tasks_per_client=5, long_tail=LongTail(0.5), seed=1
    )
    assert (federation.clients, federation.stages, len(tasks(federation))) == (20, 5, 100)
    assert federation.class_counts.tolist() == [int(5000 * 0.5 ** (i / 9) + 1e-9) for i in range(10)]
    counts = np.array([np.bincount(cifar.y_train[task], minlength=10) for task in tasks(federation)])
    # 20 shards a class, 2 shards a task.
    shards = np.rint(counts / (federation.class_counts / 20)).astype(int)
    assert (shards.sum(0) == 20).all()
    assert (shards.sum(1) == 2).all()
    assert isinstance(federation.schedule, GlobalEpochs)


def test_task_j_is_stage_j_mod_T_of_client_j_div_T(toy):
    partition, rng = Dirichlet(0.5, min_size=1), generator(7, "partition")
    federation = stream(toy, partition, clients=4, tasks_per_client=5, seed=7)
    indices, offsets = partition.assign(SamplePool(toy.y_train.numpy()), 20, rng)
    for j in range(20):
        np.testing.assert_array_equal(federation.client(j // 5, j % 5), indices[offsets[j] : offsets[j + 1]])


@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 2**32),
    clients=st.integers(1, 6),
    stages=st.integers(1, 5),
    kind=st.sampled_from(["tasks", "chunks", "stage_classes"]),
    cumulative=st.booleans(),
    data=st.data(),
)
def test_no_sample_is_in_two_tasks(seed, clients, stages, kind, cumulative, data):
    toy = dataset_of(np.arange(600) % 6)
    joins = data.draw(st.lists(st.integers(0, stages - 1), min_size=clients, max_size=clients))
    leaves = [data.draw(st.integers(join + 1, stages)) for join in joins]
    declared = [data.draw(st.lists(st.integers(0, 5), min_size=1, unique=True)) for _ in range(stages)]
    more = {"tasks": {}, "chunks": {"chunks": True}, "stage_classes": {"stage_classes": declared}}[kind]
    federation = stream(
        toy,
        Dirichlet(1.0, min_size=0) if kind != "chunks" else IID(),
        clients=clients,
        tasks_per_client=stages,
        joins=joins,
        leaves=leaves,
        cumulative=cumulative,
        seed=seed,
        **more,
    )
    given_out = federation.indices.tolist()
    assert len(set(given_out)) == len(given_out)
    if kind != "stage_classes":
        assert len(given_out) == 600
    own = np.diff(federation.offsets).reshape(clients, stages)
    for k in range(clients):
        for s in range(stages):
            mine = federation.client(k, s).tolist()
            if not joins[k] <= s < leaves[k]:
                assert own[k, s] == 0
                assert not mine
            elif cumulative:
                assert mine == [
                    i for earlier in range(s + 1) for i in tasks(federation)[k * stages + earlier]
                ]
            if kind == "stage_classes":
                held = set((np.array(tasks(federation)[k * stages + s], int) % 6).tolist())
                assert held <= set(declared[s])
    assert federation_from(toy, federation.partition).hash == federation.hash


def test_a_class_of_several_stages_is_shared_equally(toy):
    federation = stream(
        toy, IID(), clients=4, tasks_per_client=3, stage_classes=[[0, 1], [1, 2], [1, 5]], seed=2
    )
    counts = np.array([federation.label_counts(stage=s).sum(0) for s in range(3)])
    assert counts[0].tolist() == [100, 34, 0, 0, 0, 0]
    assert counts[1].tolist() == [0, 33, 100, 0, 0, 0]
    assert counts[2].tolist() == [0, 33, 0, 0, 0, 100]


def test_chunks_cut_each_clients_classes_in_order(cifar):
    federation = stream(cifar, DirichletTwoStage(0.1), clients=20, chunks=True)
    labels = cifar.y_train.numpy()
    for k in range(20):
        whole = np.concatenate([labels[federation.client(k, s)] for s in range(5)])
        assert (np.diff(whole) >= 0).all()
        assert len(whole) == 2500
    assert (np.diff(federation.offsets) == 500).all()


def test_clients_have_no_tasks_before_joining_or_after_leaving(toy):
    federation = stream(toy, IID(), clients=3, tasks_per_client=4, joins=[0, 2, 0], leaves=[4, 4, 1])
    has_data = np.diff(federation.offsets).reshape(3, 4) > 0
    assert has_data.tolist() == [[True] * 4, [False, False, True, True], [True, False, False, False]]
    assert len(federation.indices) == 600


def test_a_hundred_thousand_clients_stream_from_50000_samples(cifar):
    federation = stream(cifar, Dirichlet(0.1, min_size=0), clients=100_000)
    assert len(federation.offsets) == 500_001
    assert sorted(federation.indices.tolist()) == list(range(50_000))


def test_the_papers_schedule_runs_all_stages_every_epoch():
    schedule = GlobalEpochs(3)
    assert [schedule.stage(r) for r in range(1, 8)] == [0, 1, 2, 0, 1, 2, 0]
    assert [schedule.epoch(r) for r in range(1, 8)] == [0, 0, 0, 1, 1, 1, 2]


def test_the_simple_schedule_never_goes_back():
    schedule = EveryN(2, stages=3)
    assert [schedule.stage(r) for r in range(1, 10)] == [0, 0, 1, 1, 2, 2, 2, 2, 2]
    assert len({schedule.epoch(r) for r in range(1, 10)}) == 9


@pytest.mark.parametrize(("kind", "given"), [(GlobalEpochs, [0]), (EveryN, [0, 3]), (EveryN, [3, 0])])
def test_a_schedule_has_a_stage_at_least_and_rounds_for_it(kind, given):
    with pytest.raises(HoldfastError, match=r"is 0; it must be at least 1"):
        kind(*given)


class Backwards:
    def stage(self, round):
        return 3 - round

    def epoch(self, round):
        return round


def test_a_users_schedule_is_checked_before_training(toy, tmp_path):
    check_schedule(Backwards(), stages=3, rounds=3)
    with pytest.raises(HoldfastError, match="trains stage -1 in round 4, but the stages are 0 to 2"):
        check_schedule(Backwards(), stages=3, rounds=4)
    mine = stream(toy, IID(), clients=2, tasks_per_client=3, schedule=Backwards())
    assert mine.schedule.stage(1) == 2
    mine.save(tmp_path / "stream.json")
    with pytest.raises(HoldfastError, match="unknown stage schedule 'Backwards'"):
        Federation.load(tmp_path / "stream.json", toy)
    assert Federation.load(tmp_path / "stream.json", toy, schedule=Backwards()).hash == mine.hash


@pytest.mark.parametrize(
    ("described", "message"),
    [
        ({"name": "every-n", "stages": 5}, "stage schedule every-n needs n, such as every-n:10"),
        ({"name": "every-n", "stages": 5, "n": "ten"}, "every-n: n is 'ten'; it must be a whole number"),
        (
            {"name": "global-epochs", "stages": 5, "n": 3},
            "unknown option of global-epochs 'n'",
        ),
    ],
)
def test_a_schedule_that_cannot_be_read_is_refused(described, message):
    with pytest.raises(HoldfastError, match=message):
        schedule_from(described)


@pytest.mark.parametrize("schedule", [GlobalEpochs(5), EveryN(3, 5)])
def test_a_saved_stream_is_loaded_unchanged(toy, tmp_path, schedule):
    assert schedule_from(describe_schedule(schedule)) == schedule
    made = stream(toy, IID(), clients=4, cumulative=True, leaves=[5, 5, 5, 2], schedule=schedule)
    made.save(tmp_path / "stream.json")
    read = Federation.load(tmp_path / "stream.json", toy)
    assert (read.hash, read.stages, read.cumulative, read.schedule) == (made.hash, 5, True, schedule)
    assert read.sizes(3)[3] == 0


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"clients": 0}, "at least 1 client"),
        ({"tasks_per_client": 0}, "1 task"),
        (
            {"clients": 200},
            "each of the 1000 tasks counts as a client: .* need 1000 samples, but there are 600",
        ),
        ({"clients": 200, "chunks": True}, "has 3 samples, too few for 5 tasks"),
        ({"joins": [0]}, "'joins' must hold one stage for each of 4 clients"),
        ({"leaves": [5, 5, 5, 6]}, "'leaves' must hold one stage"),
        ({"joins": [0, 3, 0, 0], "leaves": [5, 3, 5, 5]}, "client 1 leaves before it has joined"),
        ({"joins": ["a", 0, 0, 0]}, "'joins' must hold one stage"),
        ({"stage_classes": [0, 1, 2, 3, 4]}, r"must look like \[\[0, 1\], \[2\]\], a list for each stage"),
        ({"stage_classes": [[0]]}, "classes of 5 stages, not 1"),
        ({"stage_classes": [[0], [1], [2], [3], [6]]}, "stage 4 names a class outside 0 to 5"),
        ({"stage_classes": [[0]] * 5, "chunks": True}, "cannot be combined with stage_classes"),
        ({"stage_classes": [[0], [1], [2], [3], [4]], "clients": 101}, "stage 0 of the stream: 101 clients"),
    ],
)
def test_invalid_streams_raise_errors(toy, more, message):
    with pytest.raises(HoldfastError, match=message):
        stream(toy, IID(), **{"clients": 4, **more})
