"""What a record says of local models, against arithmetic done here."""

import numpy as np
import pytest

import holdfast as hf
from holdfast.engine.local_records import LocalRecords

# Samples of each of 3 classes at each client: unequal sizes, unequal distributions.
COUNTS = [[30, 2, 1], [3, 9, 0], [1, 1, 4]]


@pytest.fixture(scope="module")
def federation():
    rng = np.random.default_rng(0)
    labels = np.concatenate([np.repeat(range(3), held) for held in COUNTS])
    x = rng.normal(size=(len(labels), 6)) + 1.5 * np.eye(3, 6)[labels]
    test = np.repeat(range(3), 20)
    x_test = rng.normal(size=(60, 6)) + 1.5 * np.eye(3, 6)[test]
    ends = np.cumsum([sum(held) for held in COUNTS])
    parts = np.split(np.arange(len(labels)), ends[:-1])
    return hf.federate(hf.Dataset.from_arrays(x, labels, x_test, test), parts)


def train(federation):
    settings = {"rounds": 3, "local_epochs": 2, "batch_size": 8, "lr": 0.05, "device": "cpu"}
    return hf.train("fedavg", "linear", federation, **settings).records


def test_train_loss_is_weighted_by_samples(federation, monkeypatch):
    results = []
    add = LocalRecords.add

    def spy(self, result, server):
        results.append((result.samples, float(result.loss)))
        add(self, result, server)

    monkeypatch.setattr(LocalRecords, "add", spy)
    for number, record in enumerate(train(federation)):
        of_round = results[3 * number : 3 * number + 3]
        assert [samples for samples, _ in of_round] == record["samples"]
        assert sorted(record["samples"]) == [6, 12, 33]
        expected = sum(samples * loss for samples, loss in of_round) / 51
        assert record["train_loss"] == pytest.approx(expected, rel=1e-6)
        assert abs(expected - sum(loss for _, loss in of_round) / 3) > 1e-3  # the weights make a difference


def test_in_and_out_local_accuracy_are_weighted_by_label_counts_and_samples(federation):
    for record in train(federation):
        counts = [COUNTS[client] for client in record["participants"]]
        sizes = [sum(held) for held in counts]
        shares = [[n / size for n in held] for held, size in zip(counts, sizes, strict=True)]
        by_client = {"local_in": [], "local_out": [], "global_in": [], "global_out": []}
        before = record["locals"]["global_before"]
        for held, local in zip(shares, record["locals"]["class_accuracy"], strict=True):
            for model, accuracy in (("local", local), ("global", before)):
                inside = sum(p * a for p, a in zip(held, accuracy, strict=True))
                outside = sum((1 - p) / 2 * a for p, a in zip(held, accuracy, strict=True))
                by_client[f"{model}_in"].append(inside)
                by_client[f"{model}_out"].append(outside)
        assert record["local_in"] == pytest.approx(by_client["local_in"])
        assert record["local_out"] == pytest.approx(by_client["local_out"])
        for key, per_client in (("in_local", "global_in"), ("out_local", "global_out")):
            values = by_client[per_client]
            expected = sum(size * value for size, value in zip(sizes, values, strict=True)) / 51
            assert record[key] == pytest.approx(expected)
            assert abs(expected - sum(values) / 3) > 1e-3
