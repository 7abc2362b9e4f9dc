"""An attack on whole runs: whether a client took part is told from the published model no better than ε allows."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

import holdfast as hf
from holdfast.core.settings import Settings
from holdfast.engine import aggregation
from holdfast.engine.rounds import RoundLoop
from holdfast.engine.state_cache import StateCache
from holdfast.methods.fedavg import FedAvg
from holdfast.training.session import Training
from holdfast.updates import privacy

RUNS, CLIENTS, DELTA = 120, 2, 1e-2
CANARY = CLIENTS - 1  # the only client whose samples have a value in the last input


def loop(with_canary: bool, noise: float) -> RoundLoop:
    """The rounds of a run in which the canary has samples, or none."""
    x, y = np.zeros((8, 3), np.float32), np.arange(8) % 2
    x[:4, :2] = np.random.default_rng(0).normal(size=(4, 2))
    x[4:], y[4:] = [0, 0, 20], 0
    parts = [np.arange(4), np.arange(4, 8 if with_canary else 4)]
    model = nn.Sequential(nn.Linear(3, 2))
    nn.init.zeros_(model[0].weight)
    training = Training(
        FedAvg(),
        model,
        hf.federate(hf.Dataset.from_arrays(x, y, x, y), parts),
        Settings(rounds=1, batch_size=4, lr=1.0, evaluate_locals=False, dp=budget(noise).describe()),
        engine="sequential",
        device="cpu",
    )
    rounds = training.loop(StateCache(None, None))
    assert rounds.privacy is not None
    rounds.privacy.per_round = CLIENTS  # the divisor is public, and the same in both worlds
    return rounds


def budget(noise: float) -> privacy.DP:
    return privacy.parse_dp(f"epsilon=50,delta={DELTA},clip=0.5,noise_multiplier={noise}")


def claimed(noise: float) -> float:
    return privacy.ClientPrivacy(budget(noise), CLIENTS, CLIENTS, 1, 0).epsilon(1)


def scores(with_canary: bool, noise: float) -> np.ndarray:
    """The attack's statistic in many runs: how far the model moves along the canary's input, towards its class."""
    rounds, found = loop(with_canary, noise), []
    begun = rounds.server
    name = next(name for name, value in begun.params.items() if value.ndim == 2)
    for run in range(RUNS):
        rounds.server = begun
        assert rounds.privacy is not None
        rounds.privacy.secret = 2 * run + with_canary  # independent noise in every run
        rounds.start_round(1)
        found.append(float(rounds.server.params[name][0, 2] - rounds.server.params[name][1, 2]))
    return np.array(found)


def lower_bound(present: np.ndarray, absent: np.ndarray) -> float:
    """ε ≥ ln((TPR - δ) / FPR), at the threshold that half of the runs choose, tested on the others (99.9 % each)."""

    def bound(present: np.ndarray, absent: np.ndarray, threshold: float, error: float) -> float:
        n, hits, alarms = len(present), int((present > threshold).sum()), int((absent > threshold).sum())
        tpr = stats.beta.ppf(error, hits, n - hits + 1) if hits else 0.0
        fpr = stats.beta.ppf(1 - error, alarms + 1, n - alarms) if alarms < n else 1.0
        return math.log((tpr - DELTA) / fpr) if tpr > DELTA else 0.0

    half = len(present) // 2
    candidates = np.quantile(np.concatenate([present[:half], absent[:half]]), np.linspace(0.05, 0.95, 19))
    chosen = max(candidates, key=lambda t: bound(present[:half], absent[:half], t, 0.001))
    return bound(present[half:], absent[half:], chosen, 0.001)


def attack(noise: float) -> float:
    return lower_bound(scores(True, noise), scores(False, noise))


def test_the_attack_stays_below_the_claimed_epsilon() -> None:
    assert 0 < attack(0.5) < claimed(0.5)


def test_the_attack_finds_a_run_whose_noise_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mechanism that does not do what its account assumes is found out by the same attack."""
    monkeypatch.setattr(privacy, "gaussian", lambda like, *key: torch.zeros_like(like))
    assert attack(1.5) > claimed(1.5)


def test_the_attack_finds_a_run_whose_updates_are_not_clipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aggregation, "clip_factor", lambda norm, bound: torch.ones_like(norm))
    assert attack(1.5) > claimed(1.5)
