"""What a run held is free when it is over, without Python having to look for cycles: on a GPU that is gigabytes."""

import gc

import numpy as np
import pytest
import torch

import holdfast as hf


def federation(stages=1, public=0.0):
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (120, 12, 12, 3), np.uint8), np.arange(120) % 3
    data = hf.Dataset.from_arrays(x, y, x[:30], y[:30])
    if stages > 1:
        return hf.stream(data, hf.IID(), clients=4, tasks_per_client=stages, seed=0)
    return hf.federate(data, hf.IID(), clients=4, public=public, seed=0)


def living_bytes():
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.fixture
def uncollected():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize(
    ("method", "options"),
    [("fedavg", {}), ("moon+fedfa", {}), ("flashback", {"public": 0.2}), ("fedmlp", {"stages": 2})],
)  # fmt: skip
def test_a_run_that_is_over_holds_no_tensor(uncollected, tmp_path, engine, method, options):
    data = federation(**options)
    settings = {"rounds": 3, "local_epochs": 2, "batch_size": 8, "momentum": 0.9, "engine": engine}
    hf.train(method, "cnn", data, **settings)  # what is kept for every run
    before = living_bytes()
    run = hf.train(method, "cnn", data, probe_every=2, out=tmp_path / "run", **settings)
    kept = sum(t.numel() * t.element_size() for t in run.model.state_dict().values())
    assert living_bytes() - before == kept
    del run
    assert living_bytes() == before


def test_a_run_that_breaks_holds_none_either(uncollected):
    data = federation()
    hf.train("fedavg", "cnn", data, rounds=1)
    before = living_bytes()
    broken = False
    try:
        hf.train("fedavg", "cnn", data, rounds=2, lr=1e30)
    except hf.HoldfastError:  # pytest.raises would keep it, and with it all that was in sight
        broken = True
    assert broken
    assert living_bytes() == before
