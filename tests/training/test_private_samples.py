"""Runs whose clients protect their samples: arithmetic, engines, accounts, resuming, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.core.random import generator
from holdfast.report.tables import table
from holdfast.updates.accounting import Sampling, epsilon_after

DP = {"epsilon": 200.0, "delta": 1e-3, "clip": 0.3, "noise_multiplier": 0.8}
CLIENTS, SAMPLES, BATCH = 6, 20, 5


def federation(clients: int = CLIENTS) -> hf.Federation:
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(SAMPLES * clients, 5)), np.arange(SAMPLES * clients) % 3
    parts = np.split(rng.permutation(len(x)), clients)
    return hf.federate(hf.Dataset.from_arrays(x.astype(np.float32), y, x.astype(np.float32), y), parts)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))


def train(method: Any = "fedavg", model: nn.Module | None = None, **changes: Any) -> hf.Run:
    given: dict[str, Any] = {
        "rounds": 3, "clients_per_round": 3, "batch_size": BATCH, "lr": 0.1, "engine": "sequential", "device": "cpu",
        "precision": "float64", "evaluate_locals": False, "dp_samples": DP,
    }  # fmt: skip
    return hf.train(method, model or net(), federation(), **given | changes)


def weights(run: hf.Run) -> torch.Tensor:
    return torch.cat([value.flatten() for value in run.model.state_dict().values()])


def test_a_round_of_softmax_regression_by_hand() -> None:
    """w ← w - lr (Σ_i clip(g_i) + N(0, (z C)²)) / B at each client, then the mean."""
    federated, linear = federation(2), nn.Linear(5, 3, bias=False)
    run = hf.train(
        "fedavg", linear, federated, rounds=1, batch_size=BATCH, lr=0.1, dp_samples=DP, precision="float64",
        engine="sequential", device="cpu", evaluate_locals=False,
    )  # fmt: skip
    start = linear.weight.detach().double().numpy()
    data, finals = federated.dataset, []
    for client in range(2):
        ids, w = federated.client(client), start
        sizes = generator(0, "private sizes", 1, client).binomial(SAMPLES, BATCH / SAMPLES, size=4)
        for step, size in enumerate(sizes):
            rows = ids[generator(0, "private batches", 1, client, step).choice(SAMPLES, size, replace=False)]
            x, y = data.x_train[rows].double().numpy(), data.y_train[rows].numpy()
            logits = x @ w.T
            p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
            grads = (p - np.eye(3)[y])[:, :, None] * x[:, None, :]
            norms = np.sqrt((grads**2).sum((1, 2)))
            total = (grads * np.minimum(1, 0.3 / norms)[:, None, None]).sum(0)
            drawn = generator(0, "dp noise of samples", 1, client, step).standard_normal(15).reshape(3, 5)
            w = w - 0.1 * (total + 0.8 * 0.3 * drawn) / BATCH
        finals.append(w)
    np.testing.assert_allclose(run.model.weight.detach().double().numpy(), np.mean(finals, 0), rtol=1e-6)


@pytest.mark.parametrize("method", ["fedavg", "fedntd", "moon", "scaffold", "fedprox", "fedlesam"])
@pytest.mark.parametrize("sampling", ["poisson", "fixed"])
def test_engines_agree_and_repeat(method: str, sampling: str) -> None:
    dp = DP | {"sampling": sampling, "epsilon": 1e4}
    given = {"momentum": 0.9, "max_grad_norm": 1.0, "dp_samples": dp}
    one, other = (train(method, engine=engine, **given) for engine in ("sequential", "vectorized"))
    torch.testing.assert_close(weights(one), weights(other), rtol=1e-9, atol=1e-12)
    assert torch.equal(weights(one), weights(train(method, **given)))
    for a, b in zip(one.records, other.records, strict=True):
        assert a["participants"] == b["participants"]
        assert a["sample_privacy"] == b["sample_privacy"]
        np.testing.assert_allclose(a["train_loss"], b["train_loss"], rtol=1e-9)


def test_convolutions_dropout_and_augmentation_agree_on_both_engines() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 255, (60, 1, 8, 8)).astype(np.uint8), np.arange(60) % 3
    data = hf.Dataset.from_arrays(x, y, x, y, preprocess=hf.Preprocess(crop=1, flip=True))
    layers = [
        nn.Conv2d(1, 4, 3),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(144, 3),
    ]
    runs = [
        hf.train(
            "fedntd",
            nn.Sequential(*layers),
            hf.federate(data, np.split(np.arange(60), 3)),
            rounds=2,
            batch_size=6,
            lr=0.1,
            precision="float64",
            device="cpu",
            evaluate_locals=False,
            dp_samples=DP,
            engine=engine,
        )
        for engine in ("sequential", "vectorized")
    ]
    torch.testing.assert_close(weights(runs[0]), weights(runs[1]), rtol=1e-7, atol=1e-9)


def test_every_client_has_an_account_of_its_own_in_every_record(tmp_path: Path) -> None:
    run = train(rounds=4, out=tmp_path / "run")
    rounds = dict.fromkeys(range(CLIENTS), 0)
    for record in run.records:
        entry = record["sample_privacy"]
        for client, spent in zip(record["participants"], entry["epsilons"], strict=True):
            rounds[client] += 1
            steps = rounds[client] * math.ceil(SAMPLES / BATCH)
            assert spent == epsilon_after(steps, 1e-3, 0.8, Sampling("poisson", BATCH, SAMPLES))
        most = max(rounds.values()) * math.ceil(SAMPLES / BATCH)
        assert entry["epsilon"] == epsilon_after(most, 1e-3, 0.8, Sampling("poisson", BATCH, SAMPLES))
    assert "sample epsilon" in table([tmp_path / "run"])


def test_the_noise_follows_from_the_budget_and_no_client_exceeds_it() -> None:
    run = train(dp_samples="epsilon=5,delta=1e-3", rounds=4)
    spent: dict[int, float] = {}
    for record in run.records:
        spent |= dict(zip(record["participants"], record["sample_privacy"]["epsilons"], strict=True))
    assert all(4.9 < epsilon <= 5 for epsilon in spent.values())  # each has used its own budget
    multipliers = {z for record in run.records for z in record["sample_privacy"]["noise_multipliers"]}
    assert len(multipliers) > 1  # clients that take part more often add more noise


class Killed(BaseException):
    pass


def kill(record: dict[str, Any]) -> None:
    if record["round"] == 2:
        raise Killed


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_a_resumed_run_has_the_same_bits_and_spends_nothing_twice(tmp_path: Path, engine: str) -> None:
    given = {"engine": engine, "dp": {"epsilon": 60.0, "delta": 1e-2, "clip_sums": 1.0}, "rounds": 4}
    calm = train("scaffold", **given)
    with pytest.raises(Killed):
        train("scaffold", out=tmp_path, on_round=kill, checkpoint_seconds=0, **given)
    resumed = train("scaffold", out=tmp_path, resume=True, checkpoint_seconds=0, **given)
    assert torch.equal(weights(calm), weights(resumed))
    for one, other in zip(calm.records, resumed.records, strict=True):
        assert one | {"seconds": 0} == other | {"seconds": 0}


def test_a_secret_seed_changes_the_noise_and_the_batches() -> None:
    secret = DP | {"noise_seed": "system"}
    assert not torch.equal(weights(train(dp_samples=secret)), weights(train(dp_samples=secret)))


def test_a_run_that_exceeds_a_clients_budget_does_not_begin() -> None:
    with pytest.raises(
        hf.HoldfastError,
        match=r"client \d with 20 samples would spend epsilon .* in its \d rounds .* more than 3",
    ):
        train(dp_samples=DP | {"epsilon": 3.0})


def test_the_number_of_rounds_cannot_change_under_noise_that_follows_from_it(tmp_path: Path) -> None:
    derived = DP | {"noise_multiplier": None}
    train(dp_samples=derived, out=tmp_path, rounds=2)
    with pytest.raises(hf.HoldfastError, match="noise of dp_samples follows from the number of rounds"):
        train(dp_samples=derived, out=tmp_path, rounds=3, resume=True)


def test_delta_of_one_sample_in_n_is_warned_of() -> None:
    with pytest.warns(hf.HoldfastWarning, match=r"delta is 0.05, which is not below 1 / 20, the samples"):
        train(dp_samples=DP | {"delta": 0.05}, rounds=1)


def test_an_experiment_file_holds_the_guarantee() -> None:
    experiment = hf.Experiment(dp_samples="epsilon=8,delta=1e-5", rounds=1)
    assert experiment == hf.Experiment.from_mapping(experiment.describe())
    assert experiment.with_settings(["dp_samples.clip=0.2"]).describe()["dp_samples"]["clip"] == 0.2


@pytest.mark.parametrize(
    ("written", "sentence"),
    [
        ("epsilon=0,delta=1e-5", "dp_samples: epsilon is 0.0; it must be above 0"),
        ("epsilon=1,delta=1", "dp_samples: delta is 1.0; it must be above 0 and below 1"),
        ("epsilon=1,delta=1e-5,clip=0", "dp_samples: clip is 0.0; it must be above 0"),
        ("epsilon=1", "dp_samples needs delta"),
        ("epsilon=1,delta=1e-5,adaptive=true", "unknown option of dp_samples 'adaptive'"),
    ],
)
def test_options_that_make_no_sense_are_sentences(written: str, sentence: str) -> None:
    with pytest.raises(hf.HoldfastError, match=sentence):
        train(dp_samples=written)


@pytest.mark.parametrize(
    ("method", "sentence"),
    [
        ("fedsam", "fedsam moves the weights by a gradient of the batch"),
        ("fedfa", "fedfa keeps what the model computes for a batch"),
        ("fedreg", "fedreg computes whole steps itself"),
        ("ccvr", "ccvr collects statistics of the clients' data after the last round"),
        ("fedfomo", "fedfomo measures the model on held-out samples"),
        ("fedlc", r"fedlc reads a client's samples \(client.label_counts\)"),
        ("fedproc", r"fedproc reads a client's samples \(client.x\)"),
        ("fedmlp", "reads how many samples of each class"),
        ("fedka", "sends samples of the clients to others"),
        ("feddecorr", "the loss of feddecorr compares the samples of a batch with each other"),
    ],
)
def test_what_cannot_be_protected_is_refused(method: str, sentence: str) -> None:
    with pytest.raises(hf.HoldfastError, match=sentence):
        train(method)


def test_batch_statistics_are_refused() -> None:
    normed = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    for policy in ("average", "local", "drop"):
        with pytest.raises(hf.HoldfastError, match="depends on the other samples of its batch"):
            train(model=normed, batchnorm=policy)


class CentredNet(nn.Module):
    """A network of the user's own that subtracts the mean of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits."""
        return self.head(x - x.mean(0))


def test_an_own_network_that_mixes_samples_is_refused() -> None:
    with pytest.raises(hf.HoldfastError, match="depends on the other samples of its batch"):
        train(model=CentredNet())


def test_streams_and_drop_last_are_refused() -> None:
    streamed = hf.stream(federation().dataset, "iid", clients=4, tasks_per_client=2)
    with pytest.raises(hf.HoldfastError, match="have different samples in each stage"):
        hf.train("fedavg", net(), streamed, rounds=2, dp_samples=DP)
    with pytest.raises(hf.HoldfastError, match="which draws every batch from all samples"):
        train(drop_last=True)
