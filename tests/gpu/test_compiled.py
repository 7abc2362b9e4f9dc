"""The kernels as Triton compiles them for an H200, checked without one: its interpreter shows neither races nor
compiler bugs.

A product on Hopper runs while the next operands are copied to shared memory. Triton gives an operand a second buffer
for that, unless the operand is also used elsewhere: then it is overwritten while it is multiplied.
"""

import importlib.util
import os
import re
from contextlib import suppress

import numpy as np
import pytest
import torch

import holdfast as hf
from holdfast.core.settings import Settings
from holdfast.data.federation import Federation
from holdfast.engine.state_cache import StateCache
from holdfast.models import parse_model
from holdfast.models.resnet import ResNet
from holdfast.training.session import Training

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1",
    reason="needs Triton, and not its interpreter",
)


@pytest.fixture
def compiled(an_h200):
    """The list of each launched kernel's name and intermediate code."""
    return an_h200


def assert_no_operand_is_overwritten(codes, *names):
    assert {name for name, _ in codes} >= set(names)
    for name, code in codes:
        if re.search(r"pendings = [1-9]", code["ttgir"]):  # products run asynchronously
            assert not re.search(r"local_alloc (: \(\) -> !ttg.memdesc<1x|%)", code["ttgir"]), name


def assert_no_constant_can_be_lost(codes):
    """ptxas 12 may treat a constant that is added to two 16-bit numbers at once as 0: no kernel may do that."""
    for name, code in codes:
        constants = set(re.findall(r"mov\.b32\s+(%r\d+), -?\d+;", code["ptx"]))
        for terms in re.findall(r"add\.s16x2\s+%r\d+, ([^,]+), ([^;]+);", code["ptx"]):
            assert all(term.startswith("%") and term not in constants for term in terms), name


@pytest.mark.parametrize(
    "shape",  # lanes, batch, channels, height and width, outputs, kernel, stride, padding
    [
        (10, 50, 3, 32, 32, 5, 1, 2),
        (10, 50, 32, 16, 64, 5, 1, 2),
        (10, 32, 64, 8, 64, 3, 1, 1),
        (10, 32, 256, 2, 512, 3, 2, 1),
        (10, 32, 512, 1, 512, 3, 1, 1),
        (2, 3, 128, 4, 192, 3, 1, 1),
    ],
)
def test_convolutions(shape, compiled, monkeypatch):
    from holdfast.kernels import conv, layers
    from holdfast.kernels.conv_geometry import Geometry

    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    lanes, batch, channels, size, outputs, kernel, stride, pad = shape
    geometry = Geometry((size, size), kernel, stride, pad)
    w = conv.empty_filters((lanes, outputs, channels, kernel, kernel), torch.device("cpu"))
    y, x, packed = conv.forward(torch.empty(lanes, batch, channels, size, size), w, None, geometry)
    layers._backward(geometry, True, torch.empty_like(y), w, x.values, x.amax, packed)
    assert_no_operand_is_overwritten(compiled, "_conv", "_conv_weight_grad")


@pytest.mark.parametrize(
    "shape", [(1, 500, 3, 32, 32, 5, 2), (1, 500, 32, 16, 64, 5, 2), (10, 50, 6, 8, 16, 3, 1)]
)
def test_convolution_relu_and_pooling_in_one_kernel(shape, compiled, monkeypatch):
    from holdfast.kernels import conv_relu_maxpool
    from holdfast.kernels.conv_geometry import Geometry

    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    lanes, batch, channels, size, outputs, kernel, pad = shape
    x, w = (
        torch.empty(lanes, batch, channels, size, size),
        torch.empty(lanes, outputs, channels, kernel, kernel),
    )
    conv_relu_maxpool._forward(x, w, None, Geometry((size, size), kernel, 1, pad), True)
    assert_no_operand_is_overwritten(compiled, "_conv_relu_maxpool")
    assert_no_constant_can_be_lost(compiled)


@pytest.mark.parametrize("outputs", [10, 64])
def test_classifiers(outputs, compiled, monkeypatch):
    from holdfast.kernels import small_linear

    monkeypatch.setattr(small_linear, "_precision", lambda: "tf32")
    x, w = torch.empty(10, 50, 512), torch.empty(10, outputs, 512)
    y = small_linear._forward(x, w, torch.empty(10, outputs))
    small_linear._backward(torch.empty_like(y), x, w)
    assert_no_operand_is_overwritten(compiled, "_linear_forward", "_linear_backward")


def test_recurrent_layers(compiled):
    from holdfast.kernels import recurrent

    torch.backends.cuda.matmul.allow_tf32 = True  # set back by the next test
    w, x = torch.empty(10, 4 * 256, 256), torch.empty(10, 2, 32, 4 * 256)
    y, c, gates = recurrent._lstm(False, x, w)
    recurrent._lstm_grad(False, y, c[:, 0], w, y, c, gates)
    y, gates = recurrent._gru(False, x[..., : 3 * 256], w[:, : 3 * 256], w[:, 0])
    recurrent._gru_grad(False, y, w[:, : 3 * 256], y, gates)
    assert_no_operand_is_overwritten(
        compiled, "_lstm_forward", "_lstm_backward", "_gru_forward", "_gru_backward"
    )


def test_adam(compiled):
    from holdfast.kernels.adam import adam_step_

    tensors = [torch.empty(10, 5000), torch.empty(10, 512, 20)]
    steps = [torch.empty(10) for _ in tensors]
    options = ((0.9, 0.999), 1e-8, 0.01, True, [None, None])
    adam_step_(tensors, tensors, tensors, tensors, steps, torch.tensor(0.1), *options)
    assert [name for name, _ in compiled] == ["_adam_step"]


@pytest.mark.parametrize("shape", [(10, 32, 64, 16, 16), (1, 2, 5, 9, 7), (2, 1, 6, 11, 13)])
def test_pooling_with_overlapping_windows(shape, compiled):
    from holdfast.kernels import maxpool
    from holdfast.kernels.conv_geometry import Geometry

    window = Geometry(shape[-2:], 3, 2, 1)
    y, argmax = maxpool._forward(torch.empty(shape), window)
    maxpool._backward(window, torch.empty_like(y), argmax)
    assert [name for name, _ in compiled] == ["_maxpool_forward", "_maxpool_backward"]
    assert_no_constant_can_be_lost(compiled)


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        ("ntd-cifar", (3, 32, 32)),
        ("cnn", (3, 9, 7)),
        (ResNet((1, 1), (3, 3), 1), (3, 32, 32)),
        (ResNet((1, 1), (3, 3), 1, norm="group"), (3, 32, 32)),
    ],
)
def test_training_and_evaluation_of_networks(model, shape, compiled, monkeypatch):
    """Nothing is computed, so all values are uninitialised memory."""
    monkeypatch.setattr("holdfast.kernels.unavailable", lambda device, dtype: None)
    samples, half = 20, (0.5,) * 3
    x, y = np.zeros((samples, *shape), np.uint8), np.arange(samples) % 10
    dataset = hf.Dataset.from_arrays(x, y, x, y, preprocess=hf.Preprocess(half, half, crop=2, flip=True))
    federation = Federation(dataset, np.arange(samples), np.array([0, 10, 20]))
    settings = Settings(rounds=1, batch_size=5, momentum=0.9, evaluate_locals=False)
    net = parse_model(model) if isinstance(model, str) else model.build(shape, 10)
    training = Training(
        hf.FedAvg(), net, federation, settings, engine="vectorized", device="cpu", own_kernels=True
    )
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    with suppress(hf.HoldfastError):  # the uninitialised memory may hold NaN
        training.loop(StateCache(None, None)).round(1)
    assert {name for name, _ in compiled} >= {
        "_load_batch",
        "_pad_images",
        "_conv",
        "_conv_weight_grad",
        "_sgd_step",
        "_count_step",
    }
    assert_no_constant_can_be_lost(compiled)
