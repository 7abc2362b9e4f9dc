"""Runs with compressed updates: engines, error feedback, bytes, resuming."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.updates.compression import parse_compression

PARAMETERS = 5 * 8 + 8 + 8 * 3 + 3


def federation(clients: int = 6) -> hf.Federation:
    rng = np.random.default_rng(1)
    y = np.arange(12 * clients) % 3
    x = (rng.normal(size=(len(y), 5)) + 2 * y[:, None] * np.array([1, 0, 0, 0, 0])).astype(np.float32)
    return hf.federate(hf.Dataset.from_arrays(x, y, x, y), np.split(rng.permutation(len(y)), clients))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))


def train(method: str = "fedavg", **changes: Any) -> hf.Run:
    given: dict[str, Any] = {
        "rounds": 4,
        "clients_per_round": 3,
        "batch_size": 6,
        "lr": 0.1,
        "engine": "sequential",
        "device": "cpu",
        "precision": "float64",
        "evaluate_locals": False,
    }
    return hf.train(method, net(), federation(), **given | changes)


def weights(run: hf.Run) -> list[torch.Tensor]:
    return list(run.model.state_dict().values())


@pytest.mark.parametrize("compress", ["int8", "int4", "topk:0.2", "topk:0.5+int4"])
def test_engines_agree(compress: str) -> None:
    one, other = (train("scaffold", compress=compress, engine=e) for e in ("sequential", "vectorized"))
    for a, b in zip(weights(one), weights(other), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_everything_sent_changes_nothing() -> None:
    """But for rounding: w + (w_k - w) is not w_k to the last bit."""
    for a, b in zip(weights(train()), weights(train(compress="topk:1.0")), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("compress", ["int8", "int4", "topk:0.1", "topk:0.1+int8"])
def test_bytes_are_those_of_the_encoded_updates(compress: str) -> None:
    encoded = parse_compression(compress).encode(torch.zeros(PARAMETERS, dtype=torch.float64), 0, 1, 0)
    size = sum(value.numel() * value.element_size() for value in encoded.values())
    plain, small = train(rounds=1).records[0], train(rounds=1, compress=compress).records[0]
    assert plain["bytes_up"] == 3 * PARAMETERS * 8
    assert small["bytes_up"] == 3 * size
    assert small["bytes_down"] == plain["bytes_down"]


def test_a_client_adds_what_it_could_not_send_to_its_next_update() -> None:
    """One client, one step on all its samples: by hand, from the gradients at the server's weights."""
    data = federation(1)
    how: dict[str, Any] = {"lr": 0.1, "batch_size": 10**6, "precision": "float64", "device": "cpu",
                           "engine": "sequential", "momentum": 0.0}  # fmt: skip
    model = net().double()
    x, y = data.dataset.x_train.double(), data.dataset.y_train
    kept, k = torch.zeros(PARAMETERS, dtype=torch.float64), -(-PARAMETERS // 10)
    for _ in range(3):
        model.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        update = kept + torch.cat([-0.1 * p.grad.flatten() for p in model.parameters() if p.grad is not None])
        sent = torch.zeros_like(update)
        largest = update.abs().argsort(descending=True)[:k]
        sent[largest] = update[largest]
        kept = update - sent
        at = 0
        for p in model.parameters():
            p.data += sent[at : at + p.numel()].view_as(p)
            at += p.numel()
    run = hf.train("fedavg", net(), data, rounds=3, compress="topk:0.1", **how)
    for a, b in zip(weights(run), model.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


class Killed(BaseException):
    pass


def kill(record: dict[str, Any]) -> None:
    if record["round"] == 2:
        raise Killed


def test_a_resumed_run_has_the_same_bits(tmp_path: Path) -> None:
    how: dict[str, Any] = {"compress": "topk:0.2+int4", "robust": "norm-bound", "attack": "scaled:0.2"}
    calm = train("scaffold", **how)
    with pytest.raises(Killed):
        train("scaffold", **how, out=tmp_path, on_round=kill, checkpoint_seconds=0)
    resumed = train("scaffold", **how, out=tmp_path, resume=True)
    assert all(torch.equal(a, b) for a, b in zip(weights(calm), weights(resumed), strict=True))
    assert calm.records[-1]["bytes_up"] == resumed.records[-1]["bytes_up"]


def test_a_method_without_shared_weights_has_nothing_to_compress() -> None:
    with pytest.raises(hf.HoldfastError, match="fedproto exchanges no weights"):
        train("fedproto", compress="int8")


def test_clipping_comes_after_decompression() -> None:
    """The bound holds for what is added up, whatever rounding has done to it."""
    dp = {"epsilon": 1e4, "delta": 1e-3, "clip": 1e-3, "noise_multiplier": 0.2, "sampling": "fixed"}
    run = train(compress="int4", dp=dp, rounds=1)
    assert run.records[0]["privacy"]["clipped"] == 1.0
