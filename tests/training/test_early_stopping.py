"""Early stopping and the best round's model: chosen on validation samples, the same after interruptions."""

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

import holdfast as hf
from holdfast.core.errors import HoldfastError
from holdfast.core.measures import Measure
from holdfast.runs import RunDirectory
from holdfast.training.best_round import BestRound

SETTINGS = {
    "lr": 0.5, "batch_size": 4, "local_epochs": 3, "device": "cpu", "progress": False, "validation": 0.3,
    "clients_per_round": 2,
}  # fmt: skip
ROUNDS = 30


@pytest.fixture(scope="module")
def federation():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(240, 6))
    y = np.digitize(x[:, 0] + x[:, 1] + rng.normal(size=240), [-1, 1])  # noisy: the metric goes up and down
    data = hf.Dataset.from_arrays(x, y, x[:60], y[:60])
    return hf.federate(data, hf.Dirichlet(0.4, min_size=4), clients=6, seed=0)


def train(federation, rounds=ROUNDS, **more):
    return hf.train("fedavg", "mlp:8", federation, rounds=rounds, **SETTINGS | more)


def without_seconds(records):
    return [
        {key: value for key, value in json.loads(json.dumps(r)).items() if key != "seconds"} for r in records
    ]


def same_weights(one, other):
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.fixture(scope="module")
def whole(federation):
    """The run without early stopping."""
    return train(federation)


def test_the_best_round_is_the_first_with_the_highest_validation_metric(federation, whole):
    values = [record["validation"]["accuracy"] for record in whole.records]
    assert whole.best_round == 1 + int(np.argmax(values))
    assert 1 < whole.best_round < ROUNDS
    assert whole.best_round != 1 + int(
        np.argmax(whole.metric("accuracy"))
    )  # that would be chosen on the test set
    assert same_weights(whole.best_model, train(federation, rounds=whole.best_round).model)
    assert not same_weights(whole.best_model, whole.model)


@pytest.mark.parametrize("patience", [1, 3, 5])
def test_a_run_stops_after_so_many_rounds_without_a_better_model(federation, whole, patience):
    values = [record["validation"]["accuracy"] for record in whole.records]
    best = last = 0
    while last + 1 < ROUNDS and last - best < patience:
        last += 1
        best = last if values[last] > values[best] else best
    run = train(federation, patience=patience)
    assert run.stopped_early
    assert not run.interrupted
    assert (len(run.records), run.best_round) == (last + 1, best + 1)
    assert run.records[-1].pop("stopped_early") is True
    assert without_seconds(run.records) == without_seconds(whole.records[: last + 1])
    assert same_weights(run.model, train(federation, rounds=last + 1).model)


def test_rounds_without_a_test_do_not_count(federation):
    every = train(federation, evaluate_every=3, patience=2)
    validated = [r["round"] for r in every.records if "validation" in r]
    assert every.stopped_early
    assert len(every.records) == validated[-1]
    assert validated.index(every.best_round) == len(validated) - 3


def test_errors_are_better_when_they_are_smaller():
    best = BestRound(Measure("rmse", less_is_better=True))
    found = [3.0, 2.0, float("nan"), None, 2.0, 1.5]
    improved = [best.add({"round": n, "validation": {"rmse": v}}) for n, v in enumerate(found, 1)]
    assert improved == [True, True, False, False, False, True]
    assert (best.round, best.waited) == (6, 0)
    assert not best.add({"round": 7})  # not tested
    assert best.waited == 0
    assert best.stops({"round": 8, "validation": {"rmse": 1.5}}, patience=1)
    assert not best.stops({"round": 8, "validation": {"rmse": 1.4}}, patience=1)
    assert not best.stops({"round": 8, "validation": {"rmse": 1.5}}, patience=2)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_left_after_any_round_and_resumed_the_bits_are_the_same(federation, tmp_path, engine):
    calm = train(federation, patience=4, engine=engine, out=tmp_path / "calm")
    assert calm.stopped_early
    for leave in {1, calm.best_round, calm.best_round + 1, len(calm.records) - 1}:
        out = tmp_path / f"left-{leave}"
        left = train(federation, patience=4, engine=engine, out=out, stop_after=leave)
        assert left.interrupted
        resumed = train(federation, patience=4, engine=engine, out=out, resume=True)
        assert without_seconds(resumed.records) == without_seconds(calm.records)
        assert resumed.best_round == calm.best_round
        for name in ("model.safetensors", "model-best.safetensors"):
            assert (out / name).read_bytes() == (tmp_path / "calm" / name).read_bytes()


def test_a_run_that_stopped_early_is_finished(federation, tmp_path):
    out = tmp_path / "run"
    run = train(federation, patience=2, out=out)
    directory = RunDirectory.open(out)
    assert directory.finished
    again = train(federation, patience=2, out=out, resume=True)
    assert without_seconds(again.records) == without_seconds(run.records)
    assert not again.interrupted
    assert same_weights(again.model, run.model)
    assert same_weights(again.best_model, run.best_model)
    opened = hf.Run.open(out)
    assert (opened.best_round, opened.stopped_early) == (run.best_round, True)
    assert same_weights(opened.best_model, run.best_model)
    with pytest.raises(HoldfastError, match=r"stopped early, after round \d+ \(patience=2\)"):
        train(federation, rounds=2 * ROUNDS, patience=2, out=out, resume=True)


def test_a_finished_run_with_validation_can_be_trained_further(federation, tmp_path):
    train(federation, rounds=8, out=tmp_path / "run")
    longer = train(federation, rounds=14, out=tmp_path / "run", resume=True)
    calm = train(federation, rounds=14, out=tmp_path / "calm")
    assert without_seconds(longer.records) == without_seconds(calm.records)
    for name in ("model.safetensors", "model-best.safetensors"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "calm" / name).read_bytes()


def test_tests_of_a_last_round_are_dropped_when_it_is_not_the_last_any_more(tmp_path):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(90, 3))
    given = hf.federate(hf.Dataset.from_arrays(x, x.sum(1) + rng.normal(size=90)), hf.IID(), clients=3)
    settings = {"lr": 0.02, "device": "cpu", "progress": False, "validation": 0.2, "evaluate_every": 3}

    def run(rounds, **more):
        return hf.train("fedavg", "linear", given, rounds=rounds, **settings, **more)

    run(4, out=tmp_path / "run")  # round 4 is the best so far
    with pytest.raises(
        HoldfastError, match="its best model is that of round 4, which was tested only because"
    ):
        run(6, out=tmp_path / "run", resume=True)
    without = settings.pop("validation")
    assert without
    run(4, out=tmp_path / "plain")
    longer = run(6, out=tmp_path / "plain", resume=True)
    assert without_seconds(longer.records) == without_seconds(run(6).records)


def test_methods_that_calibrate_the_final_model_do_so_when_a_run_stops_early(federation, tmp_path):
    settings = SETTINGS | {"patience": 2}
    run = hf.train("ccvr", "mlp:8", federation, rounds=ROUNDS, **settings, out=tmp_path / "run")
    plain = train(federation, patience=2)
    assert run.stopped_early
    assert len(run.records) == len(plain.records)
    assert not same_weights(run.model, plain.model)  # calibrated
    short = hf.train("ccvr", "mlp:8", federation, rounds=len(run.records), **SETTINGS)
    assert same_weights(run.model, short.model)
    again = hf.train(
        "ccvr", "mlp:8", federation, rounds=ROUNDS, **settings, out=tmp_path / "run", resume=True
    )
    assert same_weights(again.model, run.model)


def test_patience_needs_validation_and_all_data_at_once(federation):
    with pytest.raises(HoldfastError, match="patience is 3, but no client has validation samples"):
        train(federation, patience=3, validation=None)
    streaming = hf.stream(federation.dataset, hf.IID(), clients=2, tasks_per_client=2)
    with pytest.raises(HoldfastError, match="training cannot stop early"):
        train(streaming, patience=3)


def test_readers_cope_with_unequal_numbers_of_rounds(federation, tmp_path, capsys):
    from holdfast.cli import app
    from holdfast.report import figure, table, write_report

    settings = SETTINGS | {"patience": 2, "progress": False}
    methods = {"fedavg": hf.FedAvg(), "fedprox": hf.FedProx(mu=1.0)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first = hf.compare(methods, "mlp:8", federation, 2, rounds=ROUNDS, out=tmp_path, **settings)
        again = hf.compare(methods, "mlp:8", federation, 2, rounds=ROUNDS, out=tmp_path, **settings)
    assert first.rows == again.rows  # read, not trained again
    rounds = {len(RunDirectory.open(path).records()) for path in first.paths}
    assert len(rounds) > 1
    assert max(rounds) < ROUNDS
    write_report(first.paths, tmp_path / "report.html")
    figure("accuracy", first.paths, tmp_path / "accuracy.svg")
    assert "fedprox" in table(first.paths)
    app(["show", str(first.paths[0])], standalone_mode=False)
    assert "finished" in capsys.readouterr().out
    assert Path(first.paths[0], "model-best.safetensors").exists()
