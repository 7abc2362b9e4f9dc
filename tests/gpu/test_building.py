"""Kernels are compiled ahead of a run, and the run finds all of them."""

import importlib.util
import os
from contextlib import suppress

import numpy as np
import pytest
import torch

import holdfast as hf
from holdfast.core.settings import Settings
from holdfast.data.federation import Federation
from holdfast.engine.state_cache import StateCache
from holdfast.kernels import building
from holdfast.models import parse_model
from holdfast.training.session import Training

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1",
    reason="needs Triton, and not its interpreter",
)


def make_training(monkeypatch, method, model):
    monkeypatch.setattr("holdfast.kernels.unavailable", lambda device, dtype: None)
    shape, samples, half = (3, 8, 8), 40, (0.5,) * 3
    x, y = np.zeros((samples, *shape), np.uint8), np.arange(samples) % 10
    dataset = hf.Dataset.from_arrays(x, y, x, y, preprocess=hf.Preprocess(half, half, crop=2, flip=True))
    federation = Federation(dataset, np.arange(samples), np.array([0, 10, 20, 40]))
    settings = Settings(rounds=1, batch_size=5, momentum=0.9)
    return Training(method, parse_model(model), federation, settings, engine="vectorized", device="cpu")


def test_a_run_finds_all_its_kernels_compiled(an_h200, monkeypatch, tmp_path):
    from triton import knobs

    method, model = hf.FedNTD(), "cnn"
    training = make_training(monkeypatch, method, model)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    loop = training.loop(StateCache(None, None))
    assert not an_h200  # the trial compiled nothing in this process
    assert sorted(tmp_path.glob("holdfast/*"))
    found = {}

    def note(*, src, cache_hit, **_):
        found[src.name] = found.get(src.name, True) and cache_hit

    monkeypatch.setattr(knobs.compilation, "listener", note)
    with suppress(hf.HoldfastError):  # nothing is computed: the uninitialised memory may hold NaN
        loop.round(1)
    assert {"_load_batch", "_conv", "_conv_weight_grad", "_sgd_step"} <= set(found)
    assert [name for name, was_found in found.items() if not was_found] == []
    assert make_training(monkeypatch, method, model)._builder is None  # the next run needs no trial


def test_what_a_trial_skips_is_zero_and_state_is_unchanged(an_h200, monkeypatch):
    training = make_training(monkeypatch, hf.FedAvg(), "cnn")
    before = {k: v.clone() for k, v in training.context.network.params.items()}
    with building.trial() as tried:
        assert torch.empty(3).tolist() == torch.empty_like(torch.ones(2)).new_empty(3).tolist() == [0] * 3
        training._new_loop(StateCache(None, None)).round(1)
    assert building.current_trial() is None
    assert {kernel.name for kernel in tried.kernels.values()} >= {"_conv", "_load_batch"}
    assert all(torch.equal(v, training.context.network.params[k]) for k, v in before.items())
    training._builder.close()


def test_a_kernel_that_cannot_be_compiled_leaves_the_run_as_it_was(an_h200, tmp_path):
    broken = building.Kernel("holdfast.kernels.sgd", "no_such_kernel", {}, {}, {}, {}, ("cuda", 90, 32))
    builder = building.KernelBuilder(tmp_path / "holdfast" / "marker")
    builder.build([broken])
    assert builder._process.poll() is not None


def test_a_read_only_cache_is_not_an_error(an_h200, tmp_path):
    (tmp_path / "file").write_text("")
    building.KernelBuilder(tmp_path / "file" / "marker").build([])
