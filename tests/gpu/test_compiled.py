"""What Triton makes of the matrix products for an H200, read without one: its interpreter cannot show races.

A product on Hopper goes on while the next operands are copied to shared memory. Triton gives an operand a second
buffer for that, but not one that is also used otherwise, which is then overwritten while it is multiplied.
"""

import importlib.util
import os
import re
from types import SimpleNamespace

import pytest
import torch

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1",
    reason="needs Triton, and not its interpreter",
)


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """Launches only compile, for an H200; the list has each kernel's name and its intermediate code."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    machine = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: "an H200",
        get_current_stream=lambda device: 0,
    )
    monkeypatch.setattr(driver, "_active", machine)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    codes, launch = [], JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        codes.append((self.__name__, launch(self, *args, grid=grid, warmup=True, **kwargs).asm["ttgir"]))

    monkeypatch.setattr(JITFunction, "run", compile_only)
    return codes


def assert_nothing_is_overwritten(codes, *names):
    assert {name for name, _ in codes} >= set(names)
    for name, code in codes:
        if re.search(r"pendings = [1-9]", code):  # products are left to go on
            assert not re.search(r"local_alloc (: \(\) -> !ttg.memdesc<1x|%)", code), name


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
    from holdfast.kernels.geometry import Geometry

    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    lanes, batch, channels, size, outputs, kernel, stride, pad = shape
    geometry = Geometry((size, size), kernel, stride, pad)
    w = conv.filters((lanes, outputs, channels, kernel, kernel), torch.device("cpu"))
    y, x, spread = conv.forward(torch.empty(lanes, batch, channels, size, size), w, None, geometry)
    layers._backward(geometry, True, torch.empty_like(y), w, x.values, x.largest, spread)
    assert_nothing_is_overwritten(compiled, "_windows", "_window_sums")


@pytest.mark.parametrize("outputs", [10, 64])
def test_classifiers(outputs, compiled, monkeypatch):
    from holdfast.kernels import narrow

    monkeypatch.setattr(narrow, "_precision", lambda: "tf32")
    x, w = torch.empty(10, 50, 512), torch.empty(10, outputs, 512)
    y = narrow._forward(x, w, torch.empty(10, outputs))
    narrow._backward(torch.empty_like(y), x, w)
    assert_nothing_is_overwritten(compiled, "_outputs", "_gradients")


def test_pooling_by_overlapping_windows(compiled):
    from holdfast.kernels import maxpool
    from holdfast.kernels.geometry import Geometry

    window = Geometry((16, 16), 3, 2, 1)
    y, code = maxpool._forward(torch.empty(10, 32, 64, 16, 16), window)
    maxpool._backward(window, torch.empty_like(y), code)
    assert [name for name, _ in compiled] == ["_pool", "_pool_back"]
