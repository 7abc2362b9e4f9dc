"""Compression, robust means, limits and differential privacy of clients at their sites."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from flower_world import World, apart, reference

from holdfast.core.errors import HoldfastError
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
