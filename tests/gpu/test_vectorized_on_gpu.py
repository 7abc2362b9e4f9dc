"""The vectorized engine on a GPU: CUDA graphs and kernels must not change results."""

import numpy as np
import pytest
import torch

import holdfast as hf
from holdfast.data.federation import Federation
from holdfast.models.resnet import ResNet

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def unequal_federation(augment):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (600, 3, 32, 32), dtype=np.uint8)
    y = rng.integers(0, 10, 600)
    preprocess = hf.Preprocess((0.5,) * 3, (0.5,) * 3, crop=4 if augment else 0, flip=augment)
    dataset = hf.Dataset.from_arrays(x, y, x[:100], y[:100], preprocess=preprocess)
    offsets = np.cumsum([0, 100, 37, 205, 11, 1, 150])
    return Federation(dataset, np.arange(offsets[-1]), offsets.astype(np.int64))


def small_resnet(norm):
    torch.manual_seed(0)
    return ResNet((1, 1), (3, 3), 1, norm=norm).build((3, 32, 32), 10)


def weights(method, engine, precision, augment=False, rounds=2, lr=0.02, model=None):
    run = hf.train(
        method,
        model or hf.models.cnn(),
        unequal_federation(augment),
        rounds=rounds,
        local_epochs=2,
        batch_size=16,
        lr=lr,
        momentum=0.9,
        engine=engine,
        device="cuda",
        precision=precision,
        evaluate_locals=False,
        parallel_clients=3 if engine == "vectorized" else None,
    )
    return torch.cat([p.flatten().double() for p in run.model.state_dict().values()])


@pytest.mark.parametrize("name", sorted(set(hf.methods.METHODS) - {"ccvr"}))
def test_every_method_agrees_with_sequential_in_float64(name):
    kind = hf.methods.METHODS[name]
    if kind.needs_public is True or name in ("flashback", "feddf"):
        pytest.skip("learns from public data: covered on the CPU")
    a, b = (weights(kind(), engine, "float64") for engine in ("sequential", "vectorized"))
    assert float((a - b).norm() / a.norm()) < 1e-9


@pytest.mark.parametrize("augment", [False, True])
def test_kernels_agree_with_sequential_in_float32(augment):
    # With a small learning rate: with a large one the rounding of float32 alone grows to 1e-3.
    a, b = (
        weights(hf.FedNTD(), engine, "float32", augment, rounds=1, lr=0.002)
        for engine in ("sequential", "vectorized")
    )
    assert float((a - b).norm() / a.norm()) < 1e-4


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_residual_networks_agree_with_sequential_in_float32(norm):
    model = small_resnet(norm)
    a, b = (
        weights(hf.FedAvg(), engine, "float32", rounds=1, lr=0.0002, model=model)
        for engine in ("sequential", "vectorized")
    )
    assert float((a - b).norm() / a.norm()) < 1e-4


@pytest.mark.parametrize("norm", [None, "batch"])
def test_same_seed_same_bits(norm):
    model = norm and small_resnet(norm)
    a, b = (weights(hf.FedAvg(), "vectorized", "tf32", model=model) for _ in range(2))
    assert torch.equal(a, b)


@pytest.mark.parametrize("method", [hf.Scaffold(), hf.Moon()])
def test_a_run_does_not_depend_on_where_client_state_is_kept(method, monkeypatch):
    on_gpu = weights(method, "vectorized", "tf32", rounds=3)
    monkeypatch.setattr("holdfast.engine.state_cache.GPU_FRACTION", 0.0)
    assert torch.equal(on_gpu, weights(method, "vectorized", "tf32", rounds=3))
