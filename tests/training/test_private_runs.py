"""Runs with differential privacy: engines, resuming, what is recorded, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.report.tables import table
from holdfast.runs import RunDirectory

ROUNDS = 4
DP = {"epsilon": 30.0, "delta": 1e-3, "clip": 0.3, "noise_multiplier": 0.8}


def federation(clients: int = 12) -> hf.Federation:
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(10 * clients, 5)).astype(np.float32), np.arange(10 * clients) % 3
    return hf.federate(hf.Dataset.from_arrays(x, y, x, y), np.split(rng.permutation(10 * clients), clients))


def net(norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(5, 8), nn.BatchNorm1d(8)] if norm else [nn.Linear(5, 8)]
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(8, 3))


def train(method: str = "fedavg", model: nn.Module | None = None, **changes: Any) -> hf.Run:
    given: dict[str, Any] = {
        "rounds": ROUNDS,
        "clients_per_round": 4,
        "batch_size": 5,
        "lr": 0.1,
        "engine": "sequential",
        "device": "cpu",
        "precision": "float64",
        "evaluate_locals": False,
        "dp": DP,
    }
    return hf.train(method, model or net(), federation(), **given | changes)


def weights(run: hf.Run) -> list[torch.Tensor]:
    return list(run.model.state_dict().values())


@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
@pytest.mark.parametrize("sampling", ["poisson", "fixed"])
def test_engines_agree_and_repeat(method: str, sampling: str) -> None:
    dp = DP | {"sampling": sampling, "adaptive": True} | ({"clip_sums": 0.5} if method == "scaffold" else {})
    one, other = (train(method, dp=dp, engine=engine) for engine in ("sequential", "vectorized"))
    for a, b in zip(weights(one), weights(other), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    assert all(torch.equal(a, b) for a, b in zip(weights(one), weights(train(method, dp=dp)), strict=True))
    for a, b in zip(one.records, other.records, strict=True):
        assert sorted(a["participants"]) == sorted(b["participants"])
        assert a["epsilon"] == b["epsilon"]


def test_samples_are_poisson_or_of_a_fixed_size() -> None:
    sizes = {len(record["participants"]) for record in train(rounds=6).records}
    assert len(sizes) > 1
    fixed = train(dp=DP | {"sampling": "fixed"})
    assert {len(record["participants"]) for record in fixed.records} == {4}


def test_every_record_has_the_epsilon_spent_and_the_last_one_keeps_the_budget(tmp_path: Path) -> None:
    run = train(out=tmp_path / "run", dp=DP | {"noise_multiplier": None})
    spent = [record["epsilon"] for record in run.records]
    assert spent == sorted(set(spent))
    assert 0.9 * 30 < spent[-1] <= 30
    assert all(record["privacy"]["clip"] == 0.3 for record in run.records)
    assert "epsilon" in table([tmp_path / "run"])
    assert run.experiment["dp"]["sampling"] == "poisson"


def test_a_round_without_clients_is_a_round() -> None:
    run = train(clients_per_round=1, rounds=8, engine="vectorized")
    assert any(not record["participants"] for record in run.records)
    assert all(record["epsilon"] > 0 for record in run.records)


class Killed(BaseException):
    pass


def kill(record: dict[str, Any]) -> None:
    if record["round"] == 2:
        raise Killed


def test_a_resumed_run_has_the_same_bits_and_spends_nothing_twice(tmp_path: Path) -> None:
    dp = DP | {"adaptive": True, "clip_sums": 0.5}
    calm = train("scaffold", dp=dp)
    with pytest.raises(Killed):
        train("scaffold", dp=dp, out=tmp_path, on_round=kill, checkpoint_seconds=0)
    resumed = train("scaffold", dp=dp, out=tmp_path, resume=True, checkpoint_seconds=0)
    assert all(torch.equal(a, b) for a, b in zip(weights(calm), weights(resumed), strict=True))
    for one, other in zip(calm.records, resumed.records, strict=True):
        assert one | {"seconds": 0} == other | {"seconds": 0}


def test_the_guarantee_cannot_change_on_resuming(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        train(out=tmp_path, on_round=kill, checkpoint_seconds=0)
    with pytest.raises(hf.HoldfastError, match="another dp"):
        train(out=tmp_path, resume=True, dp=DP | {"epsilon": 31.0})
    with pytest.raises(hf.HoldfastError, match="another dp"):
        train(out=tmp_path, resume=True, dp=None)


def test_an_experiment_file_holds_the_guarantee(tmp_path: Path) -> None:
    experiment = hf.Experiment(dp="epsilon=8,delta=1e-5", rounds=1)
    assert experiment == hf.Experiment.from_mapping(experiment.describe())
    assert experiment.with_settings(["dp.clip=0.2"]).describe()["dp"]["clip"] == 0.2
    train(dp=hf.DP(epsilon=30, delta=1e-3), out=tmp_path, rounds=1)
    assert RunDirectory.open(tmp_path).experiment["dp"]["epsilon"] == 30


def test_delta_of_one_client_in_n_is_warned_of() -> None:
    with pytest.warns(hf.HoldfastWarning, match=r"delta is 0.1, which is not below 1 / 12 clients"):
        train(dp=DP | {"delta": 0.1}, rounds=1)


@pytest.mark.parametrize(
    ("method", "options", "sentence"),
    [
        ("fedfomo", {}, "needs individual uploads"),
        ("ccvr", {}, "collects statistics of all clients' data"),
        ("scaffold", {}, "uploads sums in addition to the weights .* set clip_sums"),
        ("fedavg", {"clip_sums": 1.0}, "clip_sums is given, but fedavg uploads only weights"),
        ("feddyn:variant=official", {"clip_sums": 1.0}, "reads how many samples of each class"),
        ("fedka", {"clip_sums": 1.0}, "sends samples of the clients to others"),
    ],
)
def test_what_cannot_be_protected_is_refused(method: str, options: dict[str, float], sentence: str) -> None:
    with pytest.raises(hf.HoldfastError, match=sentence):
        train(method, dp=DP | options)


def test_running_statistics_are_refused_unless_they_stay_with_the_clients() -> None:
    with pytest.raises(hf.HoldfastError, match=r"running statistics .* are averaged without bound"):
        train(model=net(norm=True))
    run = train(model=net(norm=True), batchnorm="local", rounds=2)
    assert run.records[-1]["epsilon"] > 0


def test_a_limit_by_the_median_is_refused() -> None:
    with pytest.raises(hf.HoldfastError, match="one client could change the median"):
        train(max_update_ratio=3.0)
    assert train(max_update_norm=3.0, rounds=1).records


def test_streams_are_refused() -> None:
    data = federation().dataset
    streamed = hf.stream(data, "iid", clients=4, tasks_per_client=2)
    with pytest.raises(hf.HoldfastError, match="clients of a stream take part in all stages"):
        hf.train("fedavg", net(), streamed, rounds=2, dp=DP)
