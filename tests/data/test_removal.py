"""Streams in which a client loses samples of a class."""

import numpy as np
import pytest
import torch

import holdfast as hf
from holdfast.core.errors import HoldfastError
from holdfast.data.dataset import Dataset
from holdfast.data.federation import Federation
from holdfast.training.experiment import Experiment


@pytest.fixture
def federation() -> Federation:
    """Four clients with about a quarter of six classes each."""
    y = torch.as_tensor(np.arange(600) % 6)
    test = torch.as_tensor(np.arange(60) % 6)
    data = Dataset("toy", torch.zeros(600, 1), y, torch.zeros(60, 1), test, tuple("abcdef"))
    return hf.federate(data, hf.IID(), clients=4, seed=3)


def test_the_client_keeps_the_given_numbers_of_samples_of_the_class_and_all_others(federation):
    labels = federation.dataset.y_train.numpy()
    held = int((labels[federation.client(2)] == 4).sum())
    less = hf.remove_samples(federation, client=2, label=4, keeps=[held, 10, 3, 0])
    before = federation.label_counts()
    for stage, kept in enumerate([held, 10, 3, 0]):
        expected = before.copy()
        expected[2, 4] = kept
        np.testing.assert_array_equal(less.label_counts(stage=stage), expected)
        own = less.client(2, stage)
        np.testing.assert_array_equal(own[labels[own] != 4], (f := federation.client(2))[labels[f] != 4])
        for other in (0, 1, 3):
            np.testing.assert_array_equal(less.client(other, stage), federation.client(other))
        if stage:  # what is gone does not come back
            assert np.isin(own, less.client(2, stage - 1)).all()


def test_the_schedule_determines_the_round_of_the_removal(federation):
    less = hf.remove_samples(federation, client=0, label=1, keeps=[5, 0], schedule=hf.EveryN(10, 2))
    assert [less.schedule.stage(round) for round in (1, 10, 11, 40)] == [0, 0, 1, 1]
    default = hf.remove_samples(federation, client=0, label=1, keeps=[5, 3, 0])
    assert [default.schedule.stage(round) for round in (1, 2, 3, 4)] == [0, 1, 2, 2]


def test_the_seed_of_the_federation_decides_which_samples_go(federation):
    one, same = (hf.remove_samples(federation, client=1, label=0, keeps=[7, 2]) for _ in range(2))
    assert one.hash == same.hash
    other = hf.remove_samples(
        hf.federate(federation.dataset, hf.IID(), clients=4, seed=4), client=1, label=0, keeps=[7, 2]
    )
    assert one.hash != other.hash


def test_a_saved_federation_is_loaded_unchanged(federation, tmp_path):
    made = hf.remove_samples(federation, client=1, label=0, keeps=[7, 2], schedule=hf.EveryN(3, 2))
    made.save(tmp_path / "less.json")
    loaded = Federation.load(tmp_path / "less.json", federation.dataset)
    assert (loaded.hash, loaded.schedule) == (made.hash, made.schedule)


def test_an_experiment_trains_with_fewer_samples_and_its_file_repeats_it(tmp_path):
    given = {
        "data": "digits", "partition": "iid", "clients": 3, "model": "mlp:8", "rounds": 3,
        "stream": "removal:client=1,label=2,keeps=[20,0],schedule=every-n:2",
    }  # fmt: skip
    run = Experiment.from_mapping(given).run(tmp_path / "run", progress=False)
    sizes = [record["samples"][record["participants"].index(1)] for record in run.records]
    assert sizes[0] == sizes[1] == sizes[2] + 20
    again = Experiment.from_file(tmp_path / "run" / "experiment.yaml")
    assert again.build_federation().hash == Experiment.from_mapping(given).build_federation().hash


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"client": 4}, "client is 4; it must be from 0 to 3"),
        ({"label": -1}, "label is -1; it must be from 0 to 5"),
        ({"keeps": [3, 5]}, r"keeps is \[3, 5\]; its numbers must not increase, and must be from 0 to"),
        ({"keeps": [500, 0]}, "of samples of class 0 that client 1 holds"),
        ({"keeps": [1, -1]}, "must be from 0 to"),
        ({"keeps": []}, "its numbers must not increase"),
        ({"keeps": "all"}, "keeps is 'all'; it must be a list of whole numbers"),
    ],
)
def test_what_cannot_be_removed_is_one_sentence(federation, options, sentence):
    with pytest.raises(HoldfastError, match=sentence):
        hf.remove_samples(federation, **{"client": 1, "label": 0, "keeps": [5, 0], **options})


def test_a_stream_loses_no_samples(federation):
    made = hf.remove_samples(federation, client=1, label=0, keeps=[5])
    with pytest.raises(HoldfastError, match="samples cannot be removed from a stream"):
        hf.remove_samples(made, client=1, label=0, keeps=[5])


@pytest.mark.parametrize(
    ("stream", "sentence"),
    [
        ("removal:client=1,label=2", r"stream removal needs keeps, such as removal:client=0,label=1,keeps="),
        ("removal:client=1,label=2,keeps=3", "keeps of a stream is a list"),
        ("removal:client=1,label=2,keeps=[3],chunks=true", "unknown option of stream removal 'chunks'"),
    ],
)
def test_an_experiment_with_an_incomplete_removal_is_refused(stream, sentence):
    with pytest.raises(HoldfastError, match=sentence):
        Experiment.from_mapping({"data": "digits", "stream": stream})


def test_validation_samples_leave_every_stage(federation):
    from holdfast.data.validation import hold_out

    less = hf.remove_samples(federation, client=1, label=0, keeps=[20, 5, 0])
    held = hold_out(less, 0.2, seed=0)
    assert not np.isin(held.validation, held.indices).any()
    assert len(np.unique(held.validation)) == len(held.validation)
    for client in range(4):
        own = held.validation[held.validation_offsets[client] : held.validation_offsets[client + 1]]
        assert np.isin(own, federation.client(client)).all()
        assert len(own) == round(0.2 * len(less.client(client, 0)))
        for stage in range(3):
            kept = np.setdiff1d(less.client(client, stage), own)
            np.testing.assert_array_equal(np.sort(held.client(client, stage)), kept)


def test_numbers_of_numpy_and_schedules_as_text(federation, tmp_path):
    numbers = {"client": np.int64(1), "label": np.int64(0), "keeps": np.array([7, 2])}
    made = hf.remove_samples(federation, **numbers, schedule="every-n:3")
    assert made.schedule == hf.EveryN(3, 2)
    made.save(tmp_path / "less.json")
    assert Federation.load(tmp_path / "less.json", federation.dataset).hash == made.hash
    with pytest.raises(HoldfastError, match="its numbers must not increase, and must be from 0 to"):
        hf.remove_samples(federation, client=1, label=0, keeps=[2, 7])
