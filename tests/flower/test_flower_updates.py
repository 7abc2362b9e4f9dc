"""Compression, robust means, limits and differential privacy of clients at their sites."""

from __future__ import annotations

import json
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from flower_world import SIZES, World, apart, reference

from holdfast.core.errors import HoldfastError
from holdfast.core.settings import Settings
from holdfast.flower.accounts import SiteAccount
from holdfast.methods.registry import parse_method


@pytest.mark.parametrize("compress", ["int8", "topk:0.1+int4"])
@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fednova"])
def test_compressed_updates(method: str, compress: str, tmp_path: Path) -> None:
    """With error feedback, which stays at the site, over several rounds."""
    world = World(tmp_path, method=method, compress=compress, clients_per_round=4).run()
    run = reference(parse_method(method), compress=compress, clients_per_round=4)
    assert apart(world.model, run.model.state_dict()) <= 1e-9
    assert [r["bytes_up"] for r in world.records] == [r["bytes_up"] for r in run.records]


def test_robust_means_and_limits(tmp_path: Path) -> None:
    options = {"robust": "multi-krum:1", "max_update_ratio": 4.0}
    world = World(tmp_path, **options).run()
    run = reference(parse_method("fedavg"), **options)
    assert apart(world.model, run.model.state_dict()) <= 1e-9
    assert [r["rejected"] for r in world.records] == [r["rejected"] for r in run.records]


def test_attacks_are_simulations(tmp_path: Path) -> None:
    with pytest.raises(HoldfastError, match="attack is for simulations"):
        World(tmp_path, attack="sign-flip:0.2").run()


def test_noise_follows_from_no_seed_that_sites_have(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting")
    dp = "epsilon=60,delta=1e-2,noise_multiplier=0.7"
    one, other = (World(tmp_path / name, dp=dp, clients_per_round=3).run() for name in ("a", "b"))
    assert all(0 < record["epsilon"] <= 60 for record in one.records)
    assert apart(one.model, other.model) > 1e-3
    with pytest.raises(HoldfastError, match="every site knows the run's seed"):
        World(tmp_path / "c", dp=f"{dp},noise_seed=run").run()
    with pytest.raises(HoldfastError, match="reads how many samples of each class"):
        World(tmp_path / "d", dp=f"{dp},clip_sums=1", method="fedmlp").run()
    assert all(torch.isfinite(value).all() for value in one.model.values())


SAMPLES = "epsilon=300,delta=1e-2,noise_multiplier=0.7"


def test_sites_protect_their_samples(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting")
    one, other = (
        World(tmp_path / name, dp_samples=SAMPLES, clients_per_round=3).run() for name in ("a", "b")
    )
    assert apart(one.model, other.model) > 1e-3  # noise from a secret of the sites
    run = reference(parse_method("fedavg"), dp_samples=SAMPLES, clients_per_round=3)
    for mine, theirs in zip(one.records, run.records, strict=True):
        assert mine["participants"] == theirs["participants"]
        assert mine["sample_privacy"] == theirs["sample_privacy"]
        assert mine["train_loss"] is None  # it has no noise
    counts = json.loads((one.out / "federation.json").read_text())["label_counts"]
    assert counts == [[size, 0, 0, 0] for size in SIZES]  # no site tells its classes
    participants = [client for record in one.records for client in record["participants"]]
    for client in set(participants):
        (spent,) = (tmp_path / "a").glob(f"state/*/{client}/sample-privacy.json")
        assert json.loads(spent.read_text())["rounds"] == participants.count(client)
    with pytest.raises(HoldfastError, match="every site knows the run's seed"):
        World(tmp_path / "c", dp_samples=f"{SAMPLES},noise_seed=run").run()
    with pytest.raises(HoldfastError, match="fedfa keeps what the model computes"):
        World(tmp_path / "d", dp_samples=SAMPLES, method="fedfa").run()


def test_a_site_stops_before_its_budget_is_passed(tmp_path: Path) -> None:
    """Whatever the server asks for: noise of its own choice, or more rounds."""
    pytest.importorskip("dp_accounting")
    settings = Settings(rounds=3, batch_size=5, dp_samples="epsilon=3,delta=1e-3")
    account = SiteAccount(tmp_path, 4, settings)
    assert [account.spend(20, 1.5) for _ in range(3)] == [1, 2, 3]
    for multiplier in (0.0, 1.4):
        with pytest.raises(HoldfastError, match="must be above 0 and the same in every round"):
            SiteAccount(tmp_path, 4, settings).spend(20, multiplier)
    spent = partial(deque, (account.spend(20, 1.5) for _ in range(1000)), maxlen=0)
    with pytest.raises(
        HoldfastError, match=r"client 4 would spend a total epsilon .* more than its budget of 3"
    ):
        spent()
    assert SiteAccount(tmp_path, 5, settings).spend(20, 1.5) == 1  # each client has its own
    account.path.write_text("[1]")
    with pytest.raises(HoldfastError, match="is damaged"):
        account.spend(20, 1.5)


@pytest.mark.parametrize(
    "options",
    [
        {"robust": "median", "compress": "topk:0.5+int8", "max_update_norm": 1.0, "max_update_ratio": 3.0},
        {
            "dp": "epsilon=1e4,delta=1e-2,noise_multiplier=0.3",
            "dp_samples": SAMPLES,
            "compress": "int8",
            "max_update_norm": 5.0,
        },
    ],
    ids="+".join,
)
def test_together(options: dict[str, Any], tmp_path: Path) -> None:
    """All combinations that are not refused, without secure; as in tests/training/test_combined_updates.py."""
    pytest.importorskip("dp_accounting")
    world = World(tmp_path, rounds=2, **options).run()
    run = reference(parse_method("fedavg"), rounds=2, **options)
    if "dp" not in options:
        assert apart(world.model, run.model.state_dict()) <= 1e-9
        assert [r["incidents"] for r in world.records] == [r["incidents"] for r in run.records]
    for mine, theirs in zip(world.records, run.records, strict=True):
        assert mine.get("epsilon") == theirs.get("epsilon")
        assert mine.get("sample_privacy") == theirs.get("sample_privacy")
        assert mine["bytes_up"] == theirs["bytes_up"]
    assert all(torch.isfinite(value).all() for value in world.model.values())
