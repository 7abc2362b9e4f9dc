"""Runs under secure aggregation: their sums are the plain ones to quantisation, and what they refuse."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_compressed_runs import Killed, federation, kill, net, train, weights
from torch import nn

import holdfast as hf
from holdfast.engine.clients import ClientResult, Job
from holdfast.engine.secure_sums import SecureSums
from holdfast.methods.base import Server
from holdfast.updates.privacy import DP, ClientPrivacy
from holdfast.updates.secure import SecAggPlus

METHODS = [
    "fedavg",
    "scaffold",
    "fednova",
    "feddyn",
    "fedfa",
    "fedcurv",
    "fedproc",
    "creff",
    "ccvr",
    "fedrep",
]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("bits", [64, 32])
def test_secure_sums_are_plain_sums_to_quantisation(method: str, bits: int) -> None:
    """Weights, and everything that a method derives from sums, over three rounds."""
    how: dict[str, Any] = {"rounds": 3, "local_epochs": 2}
    secure = f"secagg+:bits={bits},range=4096" if bits == 32 else "secagg+"
    plain, hidden = train(method, **how), train(method, secure=secure, **how)
    error = sum(record["secure"]["error"] for record in hidden.records)
    assert 0 < error < (1e-3 if bits == 32 else 1e-11)
    names = dict(plain.model.state_dict())
    own = {"6.weight", "6.bias", "2.weight", "2.bias"} if method == "fedrep" else set()  # it keeps its head
    for (name, a), b in zip(names.items(), weights(hidden), strict=True):
        if name not in own:
            # Later rounds train from other weights, and methods scale what sums give them.
            torch.testing.assert_close(a, b, rtol=0, atol=100 * error)
    assert [r["participants"] for r in plain.records] == [r["participants"] for r in hidden.records]


def test_the_error_of_a_round_is_bounded_by_the_record() -> None:
    """One round: the whole difference to the plain run is quantisation, and the bound is not far from it."""
    for bits in (32, 64):
        plain = train(rounds=1)
        hidden = train(rounds=1, secure=f"secagg+:bits={bits}")
        apart = max(float((a - b).abs().max()) for a, b in zip(weights(plain), weights(hidden), strict=True))
        record = hidden.records[0]["secure"]
        assert record["clients"] == 3
        assert apart <= record["error"] + 1e-14
        assert record["error"] < 40 * apart + 1e-12


def test_buffers_are_averaged_and_counters_stay() -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))

    how: dict[str, Any] = {"rounds": 2, "engine": "sequential", "device": "cpu", "precision": "float64", "lr": 0.1,
                           "evaluate_locals": False}  # fmt: skip
    plain, hidden = (
        hf.train("fedavg", model(), federation(), **how, **more).model.state_dict()
        for more in ({}, {"secure": "secagg+"})
    )
    for name, value in plain.items():
        if name.endswith("num_batches_tracked"):
            assert int(hidden[name]) == 0 < int(value)
        else:
            torch.testing.assert_close(value, hidden[name], rtol=0, atol=1e-10)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_dropouts_up_to_the_threshold_change_nothing_but_who_takes_part(engine: str) -> None:
    how: dict[str, Any] = {
        "clients_per_round": 6,
        "client_dropout": 0.2,
        "rounds": 5,
        "engine": engine,
        "seed": 3,
    }
    plain, hidden = train(**how), train(secure="secagg+:threshold=0.51", **how)
    assert any(len(record["participants"]) < 6 for record in hidden.records)
    for a, b in zip(weights(plain), weights(hidden), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


def test_more_dropouts_stop_the_run_and_lose_nothing(tmp_path: Path) -> None:
    how: dict[str, Any] = {"clients_per_round": 6, "client_dropout": 0.3, "rounds": 30, "seed": 1}
    sentence = r"secure aggregation needs 5 of 6 clients to the end, and \d remained \(client \d: dropout"
    with pytest.raises(hf.HoldfastError, match=sentence):
        train(secure="secagg+:threshold=0.8", out=tmp_path, checkpoint_seconds=0, **how)
    done = len(hf.RunDirectory.open(tmp_path).records())
    assert done >= 1
    checkpoint = hf.RunDirectory.open(tmp_path).load_checkpoint()
    assert checkpoint is not None
    assert checkpoint.round == done


def test_a_resumed_run_has_the_same_bits(tmp_path: Path) -> None:
    calm = train("scaffold", secure="secagg+")
    with pytest.raises(Killed):
        train("scaffold", secure="secagg+", out=tmp_path, on_round=kill, checkpoint_seconds=0)
    resumed = train("scaffold", secure="secagg+", out=tmp_path, resume=True)
    assert all(torch.equal(a, b) for a, b in zip(weights(calm), weights(resumed), strict=True))
    with pytest.raises(hf.HoldfastError, match="another secure"):
        train("scaffold", out=tmp_path, resume=True)


def test_bytes_are_those_of_the_masked_vectors() -> None:
    values = 5 * 8 + 8 + 8 * 3 + 3 + 2  # the weights, the client's weight and its loss
    assert train(rounds=1, secure="secagg+").records[0]["bytes_up"] == 3 * values * 8
    assert train(rounds=1, secure="secagg+:bits=32").records[0]["bytes_up"] == 3 * values * 4


def test_a_client_whose_values_are_out_of_range_is_left_out() -> None:
    how: dict[str, Any] = {"clients_per_round": 6, "attack": "scaled:0.2,scale=1e9", "rounds": 1, "seed": 2}
    run = train(secure="secagg+", **how)
    found = {(i["client"], i["kind"]) for i in run.records[0]["incidents"]}
    assert found == {(client, "out of range") for client in run.records[0]["attackers"]}
    assert found


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"method": "fedfomo"}, "needs individual uploads"),
        ({"method": "fedmlp"}, "reads how many samples of each class the clients hold"),
        ({"method": "fedka"}, "sends samples of the clients to others"),
        ({"robust": "median"}, "cannot be combined with robust: a robust mean compares single updates"),
        ({"max_update_norm": 1.0}, "cannot be combined with max_update_norm"),
        ({"max_update_ratio": 2.0}, "cannot be combined with max_update_ratio"),
        ({"compress": "int8"}, "cannot be combined with compress"),
        ({"clients_per_round": 1}, "a round has one client, so the sum would reveal its upload"),
    ],
)
def test_what_needs_single_uploads_is_refused(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(hf.HoldfastError, match=sentence):
        train(**({"secure": "secagg+"} | given))


def test_too_few_clients_are_refused_before_training() -> None:
    """In all, or at one stage of a stream."""
    data = federation().dataset
    one = hf.federate(data, [np.arange(72)])
    with pytest.raises(
        hf.HoldfastError, match="there is 1 client with samples, and secure aggregation needs 2"
    ):
        hf.train("fedavg", net(), one, rounds=1, secure="secagg+")
    stream = hf.stream(data, hf.IID(), clients=3, tasks_per_client=2, seed=1)
    sizes = [12, 12, 12, 0, 12, 0]  # by client and stage: at the second stage two clients have nothing
    lacking = replace(stream, indices=np.arange(48), offsets=np.concatenate([[0], np.cumsum(sizes)]))
    assert [np.count_nonzero(lacking.sizes(stage)) for stage in range(2)] == [3, 1]
    with pytest.raises(
        hf.HoldfastError, match="a stage has 1 client with samples, and secure aggregation needs 2"
    ):
        hf.train("fedavg", net(), lacking, rounds=2, secure="secagg+")


def test_a_threshold_that_dropouts_will_miss_is_warned_of() -> None:
    with (
        pytest.warns(hf.HoldfastWarning, match="about 1 remain with client_dropout 0.5, and 2 are needed"),
        pytest.raises(hf.HoldfastError, match="secure aggregation needs 2 of 3 clients"),
    ):
        train(secure="secagg+", client_dropout=0.5, rounds=20)


# Differential privacy -----------------------------------------------------------------------------------------

DIMENSION, CLIENTS = 20_000, 10


def private_sums(threshold: float, **dp: Any) -> tuple[ClientPrivacy, SecureSums]:
    guarantee = DP(epsilon=1e4, delta=1e-3, clip=2.0, noise_multiplier=0.7, sampling="fixed", **dp)
    zeros = {"sums/s": torch.zeros(3)} if dp.get("clip_sums") else {}
    privacy = ClientPrivacy(guarantee, CLIENTS, CLIENTS, 5, 1, zeros)
    server = Server({"w": torch.zeros(DIMENSION)}, {}, {}, 1)
    jobs = [Job(k, np.arange(8)) for k in range(CLIENTS)]
    return privacy, SecureSums.of(SecAggPlus(threshold), jobs, [], server, (), 1, privacy)


def upload(client: int, change: torch.Tensor, **sums: torch.Tensor) -> ClientResult:
    params = {"w": change}
    return ClientResult(client, 8, np.array([8]), 8.0, params, {}, params, dict(sums), {}, 1.0, True)


@pytest.mark.parametrize("present", [10, 6])
def test_the_clients_shares_of_noise_have_the_wanted_variance_also_at_the_threshold(present: int) -> None:
    """σ = z C at six of ten clients, and more where more take part; a χ² test at four standard errors."""
    privacy, sums = private_sums(0.6)
    for client in range(present):
        sums.add(upload(client, torch.zeros(DIMENSION)))
    noise = sums.mean()[0]["w"].double() * privacy.per_round
    variance = (0.7 * 2.0) ** 2 * present / 6
    assert float(noise.square().mean()) == pytest.approx(variance, rel=4 * math.sqrt(2 / DIMENSION))
    assert abs(float(noise.mean())) < 4 * math.sqrt(variance / DIMENSION)


def test_clipping_is_done_by_the_clients_and_rounding_keeps_the_bound() -> None:
    _, sums = private_sums(0.6)
    row = torch.randn(DIMENSION, generator=torch.Generator().manual_seed(0))
    clipped = sums.upload.grid.decode(sums.upload.encode(upload(0, 100 * row)))
    assert 2.0 - 1e-6 < float(clipped.norm()) <= 2.0
    short = sums.upload.grid.decode(sums.upload.encode(upload(0, row / row.norm())))
    torch.testing.assert_close(short, (row / row.norm()).double(), rtol=0, atol=1e-10)


def test_noise_that_is_finer_than_the_step_is_refused() -> None:
    _, sums = private_sums(0.6)
    coarse = SecAggPlus(bits=32, range=2.0**23).grid(CLIENTS)
    sums.upload.grid = coarse
    with pytest.raises(hf.HoldfastError, match=r"too much for the bound 2 of dp; use bits=64"):
        sums.add(upload(0, torch.zeros(DIMENSION)))


@pytest.mark.parametrize("sampling", ["poisson", "fixed"])
def test_private_runs_on_both_engines(sampling: str, tmp_path: Path) -> None:
    dp = {"epsilon": 1e4, "delta": 1e-3, "clip": 0.3, "noise_multiplier": 0.2, "sampling": sampling,
          "clip_sums": 0.5, "adaptive": True}  # fmt: skip
    how: dict[str, Any] = {"dp": dp, "secure": "secagg+", "rounds": 5}
    one, other = (train("scaffold", engine=engine, **how) for engine in ("sequential", "vectorized"))
    for a, b in zip(weights(one), weights(other), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9)
    assert one.records[-1]["privacy"]["clip"] != 0.3
    plain = train("scaffold", **how | {"secure": None})
    assert [r["epsilon"] for r in one.records] == [r["epsilon"] for r in plain.records]
    with pytest.raises(Killed):
        train("scaffold", out=tmp_path, on_round=kill, checkpoint_seconds=0, **how)
    resumed = train("scaffold", out=tmp_path, resume=True, **how)
    assert all(torch.equal(a, b) for a, b in zip(weights(one), weights(resumed), strict=True))


def test_with_hardly_any_noise_a_private_secure_run_is_a_private_run() -> None:
    dp = {"epsilon": 1e9, "delta": 1e-3, "clip": 0.05, "noise_multiplier": 0.005, "sampling": "fixed"}
    plain, hidden = (train(dp=dp, lr=0.5, rounds=1, **more) for more in ({}, {"secure": "secagg+"}))
    start = torch.cat([value.double().flatten() for value in net().state_dict().values()])
    a, b = (torch.cat([v.flatten() for v in weights(run)]) - start for run in (plain, hidden))
    # The noise differs, and each has norm z C √d / 3.
    size = 2 * 0.005 * 0.05 * math.sqrt(len(start)) / 3
    assert float((a - b).norm()) < 3 * size < float(a.norm())


def test_a_settings_text_is_stored_as_a_mapping(tmp_path: Path) -> None:
    experiment = hf.Experiment(secure="secagg+:0.8", rounds=1)
    assert experiment == hf.Experiment.from_mapping(experiment.describe())
    assert experiment.describe()["secure"]["threshold"] == 0.8
    train(secure=SecAggPlus(0.7), out=tmp_path, rounds=1)
    assert hf.RunDirectory.open(tmp_path).experiment["secure"]["threshold"] == 0.7
