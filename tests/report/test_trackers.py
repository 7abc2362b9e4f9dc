"""Trackers: each logs records, which are read back with its own reader."""

import csv
import sys

import numpy as np
import pytest
from synthetic_runs import CLASSES, synthetic_records

from holdfast.core.errors import HoldfastError
from holdfast.report.trackers import CsvTracker, scalars, tracker


@pytest.fixture
def records():
    counts = np.full((1, 6, 10), 20)
    return list(synthetic_records(counts, 0.5, 0, rounds=12, clients_per_round=3, total=10))


EXPERIMENT = {"name": "demo", "method": {"name": "fedavg"}, "seed": 0, "classes": CLASSES}


def follow(made, records):
    made.start(EXPERIMENT)
    for record in records:
        made.log(record)
    made.finish()


def test_scalars_name_every_number():
    found = scalars(
        {
            "round": 3,
            "accuracy": 0.5,
            "forgetting": None,
            "class_accuracy": [0.25, None],
            "local_forgetting": [0.1, 0.3],
            "seconds": {"train": 2.0},
            "probe": {"alignment": {"local": 0.7}},
            "participants": [4, 5],
        },
        ["cat", "dog"],
    )
    assert found == {
        "accuracy": 0.5,
        "class_accuracy/cat": 0.25,
        "local_forgetting": pytest.approx(0.2),
        "seconds/train": 2.0,
        "probe/alignment/local": 0.7,
    }


def test_csv_has_a_row_a_round_and_grows_columns(tmp_path, records):
    follow(tracker("csv", tmp_path), records)
    rows = list(csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines()))
    assert [int(row["round"]) for row in rows] == list(range(1, 13))
    assert float(rows[4]["accuracy"]) == records[4]["accuracy"]
    assert rows[0]["probe/gradient_diversity"] == ""  # the first probe is in round 10
    assert float(rows[9]["probe/gradient_diversity"]) == records[9]["probe"]["gradient_diversity"]


def test_csv_of_a_resumed_run_has_no_round_twice(tmp_path, records):
    follow(CsvTracker(tmp_path), records[:8])
    follow(CsvTracker(tmp_path), records[5:])
    rows = list(csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines()))
    assert [int(row["round"]) for row in rows] == list(range(1, 13))
    assert [float(row["accuracy"]) for row in rows] == [record["accuracy"] for record in records]


def test_tensorboard_reads_back(tmp_path, records):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    follow(tracker("tensorboard", tmp_path), records)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    accuracy = events.Scalars("accuracy")
    assert [event.step for event in accuracy] == list(range(1, 13))
    assert [event.value for event in accuracy] == pytest.approx([record["accuracy"] for record in records])
    assert "class_accuracy/cat" in events.Tags()["scalars"]


def test_wandb_writes_offline(tmp_path, records):
    pytest.importorskip("wandb")
    follow(tracker("wandb", tmp_path), records)
    (written,) = (tmp_path / "wandb").glob("offline-run-*")
    assert any(file.suffix == ".wandb" and file.stat().st_size > 0 for file in written.iterdir())


def test_mlflow_reads_back(tmp_path, records):
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    follow(tracker("mlflow", tmp_path), records)
    client = MlflowClient((tmp_path / "mlruns").as_uri())
    (experiment,) = (one for one in client.search_experiments() if one.name == "holdfast")
    (run,) = client.search_runs([experiment.experiment_id])
    history = sorted(client.get_metric_history(run.info.run_id, "accuracy"), key=lambda metric: metric.step)
    assert [metric.value for metric in history] == [record["accuracy"] for record in records]
    assert run.data.params["seed"] == "0"
    assert run.info.status == "FINISHED"


def test_a_misspelt_or_missing_tracker_is_one_sentence(tmp_path, monkeypatch):
    with pytest.raises(HoldfastError, match="did you mean tensorboard"):
        tracker("tensorbord", tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(HoldfastError, match="pip install wandb"):
        tracker("wandb", tmp_path)


def test_a_tracker_that_cannot_write_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    started = tracker("csv", tmp_path / "file")
    with pytest.raises(HoldfastError, match=r"cannot write .*metrics.csv"):
        started.log({"round": 1})
