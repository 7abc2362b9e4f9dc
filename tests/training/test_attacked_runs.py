"""Runs under attack, with robust means and bounds: engines, resuming, records, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.report.tables import table

KINDS = ["median", "trimmed-mean:0.2", "krum:2", "multi-krum:2", "bulyan:1", "geometric-median", "norm-bound",
         "centred-clipping"]  # fmt: skip


ENGINES = ("sequential", "vectorized")


def federation(clients: int = 10) -> hf.Federation:
    rng = np.random.default_rng(1)
    y = np.arange(12 * clients) % 3
    x = (rng.normal(size=(len(y), 5)) + 2 * y[:, None] * np.array([1, 0, 0, 0, 0])).astype(np.float32)
    return hf.federate(hf.Dataset.from_arrays(x, y, x, y), np.split(rng.permutation(len(y)), clients))


def net(norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(5, 8), nn.BatchNorm1d(8)] if norm else [nn.Linear(5, 8)]
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(8, 3))


def train(method: str = "fedavg", model: nn.Module | None = None, **changes: Any) -> hf.Run:
    given: dict[str, Any] = {
        "rounds": 3,
        "batch_size": 6,
        "lr": 0.1,
        "engine": "sequential",
        "device": "cpu",
        "precision": "float64",
        "evaluate_locals": False,
    }
    return hf.train(method, model or net(), federation(), **given | changes)


def weights(run: hf.Run) -> list[torch.Tensor]:
    return list(run.model.state_dict().values())


def close(one: hf.Run, other: hf.Run) -> None:
    for a, b in zip(weights(one), weights(other), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("robust", KINDS)
def test_engines_agree(robust: str) -> None:
    run = [train("scaffold", robust=robust, attack="gaussian:0.2", engine=e, rounds=2) for e in ENGINES]
    close(*run)
    assert run[0].records[-1]["rejected"] == run[1].records[-1]["rejected"]


@pytest.mark.parametrize("attack", ["sign-flip:0.3", "scaled:0.2", "little-is-enough:0.3", "label-flip:0.3"])
def test_engines_agree_under_attack(attack: str) -> None:
    one, other = (train(attack=attack, engine=engine) for engine in ENGINES)
    close(one, other)
    assert sorted(one.records[0]["attackers"]) == sorted(other.records[0]["attackers"]) != []


def test_without_attackers_waiting_for_all_changes_nothing_but_the_order_of_sums() -> None:
    close(train(), train(max_update_ratio=1e6))
    close(train(), train(attack="scaled:0.2,scale=1"))


@pytest.mark.parametrize("method", ["fedavg", "fednova", "scaffold", "fedfa", "fedrep"])
def test_without_a_bound_it_is_the_mean_of_clients_of_equal_size(method: str) -> None:
    """Also of buffers, of what methods upload besides, and for methods that aggregate in their own way."""
    plain, robust = (
        train(method, net(norm=True), local_epochs=2, robust=r) for r in (None, "norm-bound:1e9")
    )
    close(plain, robust)


def test_defences_withstand_what_the_mean_does_not() -> None:
    settings: dict[str, Any] = {"rounds": 8, "attack": "sign-flip:0.3,scale=5"}
    attacked = train(**settings).accuracy
    for robust in ("median", "multi-krum:3", "geometric-median"):
        assert train(**settings, robust=robust).accuracy > attacked + 0.1, robust


def test_rejected_attackers_are_in_the_record() -> None:
    run = train(robust="multi-krum:2", attack="gaussian:0.2,std=50")
    assert all(sorted(r["rejected"]) == sorted(r["attackers"]) for r in run.records)


def test_a_backdoor_is_measured(tmp_path: Path) -> None:
    attack = "backdoor:0.4,target=1,size=1,samples=1.0,scale=3"
    run = train(rounds=10, attack=attack, out=tmp_path / "run")
    clean = train(rounds=10, attack=attack + "e-9")  # its updates vanish
    assert run.records[-1]["attack_success"] > clean.records[-1]["attack_success"] + 0.3
    assert "attack success" in table([tmp_path / "run"])


class Killed(BaseException):
    pass


def kill(record: dict[str, Any]) -> None:
    if record["round"] == 2:
        raise Killed


def test_a_resumed_run_has_the_same_bits(tmp_path: Path) -> None:
    how = {"attack": "backdoor:0.2", "robust": "trimmed-mean:0.2", "max_update_ratio": 50.0}
    calm = train("scaffold", **how)
    with pytest.raises(Killed):
        train("scaffold", **how, out=tmp_path, on_round=kill, checkpoint_seconds=0)
    with pytest.raises(hf.HoldfastError, match="another robust"):
        train("scaffold", **how | {"robust": "median"}, out=tmp_path, resume=True)
    resumed = train("scaffold", **how, out=tmp_path, resume=True)
    assert all(torch.equal(a, b) for a, b in zip(weights(calm), weights(resumed), strict=True))


# Bounds -------------------------------------------------------------------------------------------------


def test_an_update_out_of_all_proportion_is_an_incident_and_stays() -> None:
    run = train(attack="scaled:0.1,scale=100", rounds=1)
    (hostile,) = run.records[0]["attackers"]
    (incident,) = run.records[0]["incidents"]
    assert (incident["client"], incident["kind"]) == (hostile, "large update")
    assert "times the median" in incident["detail"]
    assert not train(rounds=1).records[0]["incidents"]


@pytest.mark.parametrize("limit", [{"max_update_ratio": 5.0}, {"max_update_norm": 1.0}])
def test_a_limit_leaves_it_out(limit: dict[str, float]) -> None:
    run = train(attack="scaled:0.1,scale=100", rounds=1, **limit)
    (hostile,) = run.records[0]["attackers"]
    (incident,) = run.records[0]["incidents"]
    assert incident["client"] == hostile
    assert incident["detail"].startswith("left out: norm ")
    data = federation()
    honest = hf.federate(data.dataset, [data.client(k) for k in range(10) if k != hostile])
    alone = hf.train(
        "fedavg", net(), honest, rounds=1, batch_size=10**6, lr=0.1, precision="float64", device="cpu"
    )
    whole = train(attack="scaled:0.1,scale=100", rounds=1, batch_size=10**6, **limit)
    close(whole, alone)


def test_a_limit_that_leaves_nobody_stops_the_run() -> None:
    with pytest.raises(hf.HoldfastError, match=r"round 1: no usable update is left .*large update"):
        train(max_update_norm=1e-6)


# Refusals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"robust": "krum:4"}, "krum:attackers=4 needs 11 updates in a round, but there are 10"),
        ({"robust": "bulyan:1", "clients_per_round": 6}, "bulyan:attackers=1 needs 7"),
        ({"robust": "median", "dp": "epsilon=8,delta=1e-3"}, "robust=median cannot be combined with dp"),
        ({"robust": "median", "method": "fedfomo"}, "fedfomo also uses individual uploads"),
        ({"attack": "backdoor:0.2,target=3"}, "target is 3, but custom has 3 classes"),
        ({"max_update_norm": 0.0}, "max_update_norm is 0.0; it must be above 0"),
        ({"max_update_ratio": 0.5}, "max_update_ratio is 0.5; it must be at least 1"),
    ],
)
def test_what_cannot_work_is_a_sentence(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(hf.HoldfastError, match=sentence):
        train(**changes)


def test_more_attackers_than_a_defence_withstands_are_warned_of() -> None:
    with pytest.warns(hf.HoldfastWarning, match="about 3 attackers are expected .* krum tolerates 1"):
        train(attack="sign-flip:0.3", robust="krum:1", rounds=1)


def test_an_experiment_file_holds_them() -> None:
    experiment = hf.Experiment(robust="krum:2", attack="sign-flip:0.2", max_update_norm=3)
    assert experiment == hf.Experiment.from_mapping(experiment.describe())
    assert experiment.describe()["robust"] == {"name": "krum", "attackers": 2}
