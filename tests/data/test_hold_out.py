"""Held-out samples: how many of which class, for which client, and the same wherever they are drawn."""

import numpy as np
import pytest
import torch

from holdfast.core.errors import HoldfastError
from holdfast.data.dataset import Dataset
from holdfast.data.federation import Federation, federate
from holdfast.data.partitions import Dirichlet
from holdfast.data.validation import hold_out


def dataset_of(labels) -> Dataset:
    y = torch.as_tensor(np.asarray(labels), dtype=torch.int64)
    x = torch.arange(len(y) * 2.0).reshape(-1, 2)
    return Dataset("toy", x, y, x[:4], y[:4], tuple(map(str, range(int(y.max()) + 1))))


def uneven(clients=9, samples=600) -> Federation:
    rng = np.random.default_rng(5)
    return federate(
        dataset_of(rng.integers(0, 4, samples)), Dirichlet(0.4, min_size=2), clients=clients, seed=2
    )


@pytest.mark.parametrize("share", [0.01, 0.1, 1 / 3, 0.5, 0.9])
def test_each_class_of_each_client_gives_its_share(share):
    federation = uneven()
    held = hold_out(federation, share, seed=3)
    labels = federation.dataset.strata_train
    for k in range(federation.clients):
        mine = federation.client(k)
        kept = held.client(k)
        own = held.validation[held.validation_offsets[k] : held.validation_offsets[k + 1]]
        assert sorted([*kept, *own]) == sorted(mine)
        assert len(own) == min(max(1, round(share * len(mine))), len(mine) - 1)
        exact = np.bincount(labels[mine], minlength=4) * len(own) / len(mine)
        drawn = np.bincount(labels[own], minlength=4)
        assert (drawn >= np.floor(exact)).all()
        assert (drawn <= np.ceil(exact)).all()


def test_the_order_of_training_samples_is_kept():
    federation = uneven()
    held = hold_out(federation, 0.2, seed=0)
    for k in range(federation.clients):
        kept = held.client(k)
        assert kept.tolist() == [i for i in federation.client(k).tolist() if i in set(kept.tolist())]


def test_the_seed_decides_and_the_other_clients_do_not():
    federation = uneven()
    held = hold_out(federation, 0.3, seed=1)
    assert (hold_out(federation, 0.3, seed=1).validation == held.validation).all()
    assert (hold_out(federation, 0.3, seed=2).validation != held.validation).any()
    for k in range(federation.clients):  # as at a site, which has its own samples alone
        ids = federation.client(k)
        alone = Federation(
            dataset_of(federation.dataset.y_train[ids]), np.arange(len(ids)), np.array([0, len(ids)])
        )
        alone_held = hold_out(alone, 0.3, seed=1, clients=np.array([k]))
        expected = held.validation[held.validation_offsets[k] : held.validation_offsets[k + 1]]
        assert ids[alone_held.validation].tolist() == expected.tolist()


def test_every_sample_of_a_class_can_be_held_out():
    federation = federate(dataset_of(np.arange(40) % 2), [np.arange(40)])
    times = np.zeros(40)
    for seed in range(300):
        times[hold_out(federation, 0.1, seed).validation] += 1
    assert abs(times.mean() - 30) < 1e-9
    assert times.min() > 10
    assert times.max() < 55


def test_stages_of_a_stream_give_their_share_too():
    ids = np.arange(60)
    federation = Federation(dataset_of(ids % 3), ids, np.array([0, 30, 40, 50, 60]), stages=2)
    held = hold_out(federation, 0.2, seed=0)
    assert [len(held.client(k, s)) for k in (0, 1) for s in (0, 1)] == [24, 8, 8, 8]
    assert held.validation_sizes().tolist() == [8, 4]
    assert set(held.validation[:8]) <= set(range(40))
    assert set(held.validation[8:]) <= set(range(40, 60))


def test_clients_without_samples_stay_without():
    federation = Federation(dataset_of(np.arange(10) % 2), np.arange(10), np.array([0, 4, 4, 10]))
    held = hold_out(federation, 0.5, seed=0)
    assert held.sizes().tolist() == [2, 0, 3]
    assert held.validation_sizes().tolist() == [2, 0, 3]
    assert federation.validation_sizes().tolist() == [0, 0, 0]


def test_a_client_with_one_sample_is_refused():
    federation = federate(dataset_of(np.arange(7) % 2), [[0, 1, 2], [3], [4, 5], [6]])
    with pytest.raises(HoldfastError, match=r"2 of 4 clients, such as client 1, have a single sample"):
        hold_out(federation, 0.1, seed=0)


def test_validation_data_are_part_of_the_hash_and_never_training_data():
    federation = uneven()
    held = hold_out(federation, 0.2, seed=0)
    assert len({federation.hash, held.hash, hold_out(federation, 0.2, seed=1).hash}) == 3
    with pytest.raises(HoldfastError, match="in both the training and the validation data of a client"):
        Federation(
            federation.dataset, np.arange(4), np.array([0, 4]),
            validation=np.array([3]), validation_offsets=np.array([0, 1]),
        )  # fmt: skip
    with pytest.raises(HoldfastError, match="clients already have validation data"):
        hold_out(held, 0.1, seed=0)


def test_given_samples_are_held_out_where_they_are():
    federation = federate(dataset_of(np.arange(20) % 2), [[3, 1, 4, 15], [9, 2, 6, 5], []])
    held = federation.holding_out([5, 1, 9])
    assert [held.client(k).tolist() for k in range(3)] == [[3, 4, 15], [2, 6], []]
    assert held.validation.tolist() == [1, 9, 5]
    assert held.validation_sizes().tolist() == [1, 2, 0]
    for ids, sentence in (
        ([5], "client 0 would have no validation samples"),
        ([5, 1, 3, 4, 15], "client 0 would have no training samples; of its 4 samples, 4"),
        ([5, 1, 0], "sample 0 of the validation data is not among the training samples of any client"),
        ([5, 1, 1], "sample 1 occurs 2 times"),
        ([5, 1, 99], "must be between 0 and 19"),
    ):
        with pytest.raises(HoldfastError, match=sentence):
            federation.holding_out(ids)
    with pytest.raises(HoldfastError, match="clients already have validation data"):
        held.holding_out([3])


def test_a_file_keeps_validation_data(tmp_path):
    held = hold_out(uneven(), 0.2, seed=0)
    held.save(tmp_path / "held.json")
    loaded = Federation.load(tmp_path / "held.json", held.dataset)
    assert loaded.hash == held.hash
    assert (loaded.validation == held.validation).all()
    assert (loaded.validation_offsets == held.validation_offsets).all()
    uneven().save(tmp_path / "plain.json")
    assert "validation" not in (tmp_path / "plain.json").read_text()
