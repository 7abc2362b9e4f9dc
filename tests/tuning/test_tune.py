"""Searches on small data: what is tried, what it is judged on, and what is left after a kill."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tune_worker import search

import holdfast as hf
from holdfast.core.errors import HoldfastError
from holdfast.data.validation import hold_out
from holdfast.tuning.results import mean_of_last, score
from holdfast.tuning.search import Search
from holdfast.tuning.space import parse_space
from holdfast.tuning.validation import judged_on_validation

WORKER = Path(__file__).with_name("tune_worker.py")


pytestmark = pytest.mark.filterwarnings("ignore::holdfast.HoldfastWarning")  # tiny runs do not learn much


def data(test_seed: int = 0, samples: int = 240) -> hf.Dataset:
    rng = np.random.default_rng(0)
    y = np.arange(samples) % 4
    x = rng.normal(size=(samples, 6)).astype(np.float32) + np.eye(4, 6, dtype=np.float32)[y]
    other = np.random.default_rng(test_seed)
    return hf.Dataset.from_arrays(x, y, other.normal(size=(40, 6)).astype(np.float32), np.arange(40) % 4)


def federation(test_seed: int = 0) -> hf.Federation:
    return hf.federate(data(test_seed), "dirichlet:0.5", clients=4, seed=1)


def tune(**changes: Any) -> hf.Tuning:
    given = {"space": ["lr=0.01..1:log"], "budget": 9, "rounds": 9, "engine": "sequential", "progress": False}
    return hf.tune("fedavg", "linear", federation(), **(given | changes))


def values(tuning: hf.Tuning) -> list[tuple[int, dict[str, Any], int, float]]:
    return [(row.trial, row.settings, row.rounds, row.value) for row in tuning.table]


def test_validation_samples_are_a_share_of_each_class_of_each_client() -> None:
    whole = hf.federate(data(samples=2000), "dirichlet:0.5", clients=6, seed=2)
    judged = judged_on_validation(whole, 0.25, seed=3)
    counts, kept = whole.label_counts(), judged.label_counts()
    held = counts - kept
    assert np.abs(held - 0.25 * counts).max() <= 1 + 1e-9
    assert np.abs(held.sum(1) - 0.25 * counts.sum(1)).max() <= 1
    samples = whole.dataset.x_train.numpy()
    test = {row.tobytes() for row in judged.dataset.x_test.numpy()}
    train = {samples[i].tobytes() for i in judged.indices}
    assert not test & train
    assert test | train == {samples[i].tobytes() for i in whole.indices}
    by_sample = {
        row.tobytes(): label for row, label in zip(samples, whole.dataset.y_train.tolist(), strict=True)
    }
    assert [
        by_sample[row.tobytes()] for row in judged.dataset.x_test.numpy()
    ] == judged.dataset.y_test.tolist()
    assert judged.hash == judged_on_validation(whole, 0.25, seed=3).hash
    assert judged.hash != judged_on_validation(whole, 0.25, seed=4).hash


def test_given_validation_samples_are_those_that_trials_are_judged_on() -> None:
    given = hold_out(federation(), 0.2, seed=9)
    judged = judged_on_validation(given, 0.1, seed=0)
    assert judged.indices.tolist() == given.indices.tolist()
    assert torch.equal(judged.dataset.x_test, given.dataset.x_train[given.validation])


def test_final_runs_stop_early_if_the_experiment_does() -> None:
    stopping = tune(budget=1, rounds=3, final_seeds=1, validation=0.2, patience=1)
    assert (stopping.experiment.validation, stopping.experiment.patience) == (0.2, 1)
    whole = tune(budget=1, rounds=3, validation=0.2)
    assert (whole.experiment.validation, whole.experiment.patience) == (None, None)
    assert whole.best.value == stopping.best.value


def test_a_search_has_the_trials_and_scores_of_runs_made_one_by_one(tmp_path: Path) -> None:
    tuning = tune(out=tmp_path)
    assert sorted(row.rounds for row in tuning.table) == [1] * 6 + [3] * 2 + [9]
    judged = judged_on_validation(federation(), 0.1, seed=0)
    expected = {}
    for row in tuning.table:
        run = hf.train(
            "fedavg", "linear", judged, rounds=9, engine="sequential", progress=False, **row.settings
        )
        curve = [record["accuracy"] for record in run.records]
        expected[row.trial] = [
            np.mean(curve[:1]),
            np.mean(curve[2:3]),
            np.mean(curve[6:9]),
        ]  # a quarter, rounded up
    for row in tuning.table:
        assert row.value == pytest.approx(expected[row.trial][(1, 3, 9).index(row.rounds)], abs=1e-5)
    first = sorted(range(9), key=lambda trial: (-expected[trial][0], trial))[:3]
    assert {row.trial for row in tuning.table[:3]} == set(first)
    assert tuning.best.trial == max(first, key=lambda trial: (expected[trial][1], -trial))
    assert tuning.experiment.lr == tuning.best.settings.get("lr", 0.1)
    assert (tmp_path / "runs" / f"trial-{tuning.best.trial:03d}" / "model.safetensors").exists()
    left = [p.parent.name for p in (tmp_path / "runs").glob("*/checkpoint")]
    assert left == [f"trial-{tuning.best.trial:03d}"]  # those that are out need none


def test_the_test_set_has_no_part_in_a_search() -> None:
    one, other = (
        hf.tune("fedavg", "linear", federation(seed), space=["lr=0.01..1:log"], budget=3, rounds=3, device="cpu",
                progress=False)
        for seed in (0, 1)
    )  # fmt: skip
    assert values(one) == values(other)


def test_final_runs_have_seeds_of_their_own_and_all_samples(tmp_path: Path) -> None:
    tuning = tune(budget=3, rounds=3, final_seeds=2, seed=5, out=tmp_path)
    assert [run.seed for run in tuning.final] == [6, 7]
    for run in tuning.final:
        lr = tuning.best.settings.get("lr", 0.1)
        alone = hf.train(
            "fedavg", "linear", federation(), rounds=3, lr=lr, seed=run.seed, device="cpu", progress=False
        )
        assert run.value == pytest.approx(alone.accuracy, abs=1e-5)
    again = tune(budget=3, rounds=3, final_seeds=3, seed=5, out=tmp_path)
    assert [run.seed for run in again.final] == [6, 7, 8]
    assert again.final[:2] == tuning.final


def test_a_finished_search_is_read_and_a_larger_budget_reuses_it(tmp_path: Path) -> None:
    lines: list[str] = []
    first = tune(budget=3, out=tmp_path, log=lines.append)
    assert len(lines) == 4
    assert values(tune(budget=3, out=tmp_path, log=lines.append)) == values(first)
    assert len(lines) == 4
    larger = tune(budget=4, out=tmp_path, log=lines.append)
    assert 5 <= len(lines) <= 6  # one more trial, which may be the best one and be trained for all rounds
    assert {(row.trial, row.value) for row in first.table[1:]} < {
        (row.trial, row.value) for row in larger.table
    }


def test_a_folder_holds_one_search(tmp_path: Path) -> None:
    tune(budget=1, out=tmp_path)
    for changes, told in (
        ({"batch_size": 8}, "another batch_size: 32, not 8"),
        ({"space": ["lr=0.01..2:log"]}, "another space"),
        ({"validation": 0.2}, "another validation: None, not 0.2"),
        ({"seed": 1}, "another seed"),
    ):
        with pytest.raises(HoldfastError, match=told):
            tune(budget=1, out=tmp_path, **changes)
    with pytest.raises(HoldfastError, match="a search on another federation"):
        hf.tune("fedavg", "linear", hf.federate(data(), "iid", clients=4), space=["lr=0.01..1:log"], budget=1, rounds=9,
                device="cpu", progress=False, out=tmp_path)  # fmt: skip
    (tmp_path / "search.yaml").write_text("[")
    with pytest.raises(HoldfastError, match="does not describe a search"):
        tune(budget=1, out=tmp_path)


def plan(**changes: Any) -> Search:
    experiment = hf.Experiment(data="digits", clients=5, rounds=30, method="fedntd+fedavgm", device="cpu")
    space = changes.pop("space", ["method.beta=0.1..10:log", "lr=0.01..1:log"])
    budget = changes.pop("budget", 9)
    return Search(replace(experiment, **changes), parse_space(space), budget)


def test_the_same_seed_has_the_same_trials() -> None:
    one, same, other = plan(), plan(), plan(seed=1)
    assert [trial.changes for trial in one.trials] == [trial.changes for trial in same.trials]
    assert [trial.changes for trial in one.trials[1:]] != [trial.changes for trial in other.trials[1:]]
    assert [trial.changes for trial in plan(budget=5).trials] == [trial.changes for trial in one.trials[:5]]
    assert one._hashes == same._hashes
    methods: list[Any] = [trial.experiment.method for trial in one.trials]
    assert [m["fedntd"]["beta"] for m in methods[1:]] == [
        trial.changes["method.beta"] for trial in one.trials[1:]
    ]
    assert {m["fedavgm"]["beta"] for m in methods} == {0.7}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"budget": 0}, "budget is 0; it is the number of settings to try, at least 1"),
        ({"validation": 0.0}, "validation is 0.0; it must be above 0 and below 1"),
        ({"validation": 1.0}, "validation is 1.0; it must be above 0 and below 1"),
        ({"space": ["validation=0.1..0.5"]}, "validation cannot be part of the space"),
        ({"space": ["momentun=0..0.9"]}, "unknown setting 'momentun'; did you mean momentum"),
        ({"space": ["momentum=0..1"]}, r"momentum=0..1 is not possible: momentum is 1.0; it must be from 0"),
        ({"space": ["method.gamma=0..1"]}, "gamma=0..1 is not possible: unknown option of fedntd.fedavgm 'gamma'"),
        ({"space": ["method.fedavgm.beta=0.5..1"]}, "fedavgm: beta is 1.0"),
        ({"space": ["batch_size=1.5..9"]}, "batch_size is 1.5; it must be a whole number"),
        ({"space": ["method.fedprox.mu=0..1"]}, "unknown setting 'fedprox'"),
        ({"space": ["rounds=1..10"]}, "rounds cannot be part of the space"),
        ({"space": ["seed=1..10"]}, "seed cannot be part of the space"),
        ({"space": ["partition.alpha=0.1..1"]}, "partition cannot be part of the space"),
        ({"space": ["engine=[sequential,vectorized]"]}, "engine cannot be part of the space"),
        ({"evaluate_every": 20}, "evaluate_every is 20, and settings are compared after 4 rounds"),
        ({"space": ["method=[fedavg,fednope]"]}, "unknown method 'fednope'"),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence_before_training(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(HoldfastError, match=told):
        plan(**changes)


def test_what_no_run_can_be_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(HoldfastError, match="feddf trains on the server with a public set"):
        tune(space=["method=[fedavg,feddf]"], out=tmp_path)
    assert not list(tmp_path.iterdir())
    with pytest.raises(HoldfastError, match="model is missing"):
        hf.tune("fedavg", space=["lr=0.1..1"])
    with pytest.raises(HoldfastError, match="rounds is given together with an Experiment"):
        hf.tune(hf.Experiment(), space=["lr=0.1..1"], rounds=3)
    with pytest.raises(HoldfastError, match="final_seeds is -1"):
        tune(final_seeds=-1)
    with pytest.raises(HoldfastError, match="at least 1 worker"):
        tune(workers=0)


def test_settings_that_diverge_are_last_and_search_of_these_alone_fails() -> None:
    tuning = tune(space={"lr": [0.1, 1e30]}, budget=3, rounds=2, max_update_norm=100.0)
    assert tuning.table[-1].failed is not None
    assert math.isnan(tuning.table[-1].value)
    assert "no usable update" in tuning.table[-1].failed
    with pytest.raises(HoldfastError, match="training diverged with all"):
        tune(space={"lr": [1e30, 1e29]}, budget=3, rounds=2, lr=1e30, max_update_norm=100.0)


def test_scores_are_means_of_the_last_rounds() -> None:
    def entry(rounds: int, tested: list[int], less: bool = False) -> dict[str, Any]:
        return {"rounds": rounds, "tested": tested, "curve": [float(round) for round in tested], "measure": "m",
                "less_is_better": less}  # fmt: skip

    assert mean_of_last(entry(100, list(range(1, 101)))) == np.mean(range(91, 101))
    assert mean_of_last(entry(9, list(range(1, 10)))) == 8  # of 7, 8 and 9
    assert mean_of_last(entry(12, [5, 10])) == 10
    assert mean_of_last(entry(12, [5, 8])) == 8
    assert score(entry(9, list(range(1, 10)), less=True)) == -8
    assert score({"rounds": 3, "measure": "m", "less_is_better": True, "failed": "x"}) == -math.inf


def test_a_search_of_an_error_takes_the_least() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 3)).astype(np.float32)
    made = hf.Dataset.from_arrays(x, x @ np.array([1.0, 2.0, 3.0]) + 0.5, task="regression")
    tuning = hf.tune("fedavg", "linear", hf.federate(made, "iid", clients=3), space={"lr": [0.001, 0.1]}, lr=1e-5,
                     budget=3, rounds=3, device="cpu", progress=False)  # fmt: skip
    assert tuning.measure.less_is_better
    assert tuning.best.settings == {"lr": 0.1}


def test_the_frame_has_a_column_for_each_setting() -> None:
    pandas = pytest.importorskip("pandas")
    frame = tune(budget=3, rounds=3).to_frame()
    assert list(frame.columns) == ["trial", "lr", "rounds", "accuracy", "seconds", "path"]
    assert pandas.isna(frame.set_index("trial").lr[0])


def test_a_method_from_python_is_tuned_by_its_fields() -> None:
    from dataclasses import dataclass

    @dataclass(frozen=True)
    class Mine(hf.FedProx):
        name = "mine"

    tuning = hf.tune(Mine(), "linear", federation(), space=["method.mu=0.1..1"], budget=2, rounds=1, device="cpu",
                     progress=False)  # fmt: skip
    assert {row.trial for row in tuning.table} == {0, 1}
    with pytest.raises(HoldfastError, match="unknown option of mine 'beta'"):
        hf.tune(Mine(), "linear", federation(), space=["method.beta=0.1..1"], rounds=1, device="cpu")


def test_a_killed_search_continues_and_ends_with_the_same_table(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, WORKER, tmp_path / "killed", "2"])
    stored = tmp_path / "killed" / "trials.json"
    while process.poll() is None and (not stored.exists() or stored.read_text().count('"hash"') < 4):
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = {run["hash"]: run for run in json.loads(stored.read_text())["runs"]}
    assert 4 <= len(before) < 13
    continued, whole = search(str(tmp_path / "killed"), 1), search(str(tmp_path / "whole"), 1)
    assert values(continued) == values(whole)
    after = {run["hash"]: run for run in json.loads(stored.read_text())["runs"]}
    assert len(after) == 13
    assert all(after[hash] == run for hash, run in before.items())  # finished trials were read


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from typer.testing import CliRunner

    from holdfast.cli import app

    os.chdir(tmp_path)
    common = [
        "tune",
        "fedavg",
        "--data",
        "digits",
        "--clients",
        "3",
        "--model",
        "linear",
        "--rounds",
        "3",
        "--device",
    ]
    words = [
        *common,
        "cpu",
        "--budget",
        "3",
        "--space",
        "lr=0.01..1:log",
        "momentum=[0.0,0.5]",
        "--final-seeds",
        "1",
    ]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "Best: " in result.output
    assert "On the test set, trained on all samples with seeds 1: accuracy " in result.output
    described = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    assert [set(row["settings"]) for row in described["table"] if row["trial"]] == [{"lr", "momentum"}] * 2
    best = hf.Experiment.from_file(tmp_path / "runs" / "tune" / "best.yaml")
    assert {key: getattr(best, key) for key in described["table"][0]["settings"]} == described["table"][0][
        "settings"
    ]
    for more, told in (
        (["fedprox"], "fedavg and fedprox are two methods"),
        (["--method", "fedprox"], "the method is given twice"),
        (["--budget", "0"], "budget is 0"),
        (["lr=0..1:log"], "given twice"),
    ):
        failed = CliRunner().invoke(app, [*words, *more])
        assert failed.exit_code == 2
        assert told in failed.output + failed.stderr


def test_data_without_test_samples_is_tuned_on_validation_samples():
    x = np.random.default_rng(0).normal(size=(90, 3)).astype(np.float32)
    federation = hf.federate(hf.Dataset.from_arrays(x, np.arange(90) % 3, test=0), "iid", clients=3)
    options = {"rounds": 2, "progress": False}
    tuned = hf.tune(
        "fedavg",
        "linear",
        federation,
        space={"lr": [0.1, 0.2]},
        budget=2,
        validation=0.2,
        final_seeds=1,
        **options,
    )
    assert len(tuned.final) == 1
    assert 0 <= tuned.final[0].value <= 1
    assert hf.train(**tuned_arguments(tuned)).validation().shape == (2,)
    recommended = hf.recommend("linear", federation, lr=0.1, seeds=2, **options)
    assert not recommended.left_out


def tuned_arguments(tuned):
    return {"method": "fedavg", "model": "linear", "federation": tuned.experiment.build_federation(), "rounds": 2,
            "validation": tuned.experiment.validation, "progress": False}  # fmt: skip
