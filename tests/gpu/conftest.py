import sys
from types import SimpleNamespace

import pytest
import torch


@pytest.fixture(autouse=True)
def no_tf32():
    """Start each test without TF32, whatever precision an earlier run has set for the process."""
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False


@pytest.fixture
def an_h200(monkeypatch, tmp_path):
    """Make Triton compile for an H200, into a cache of the test's own, and launch nothing."""
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
    compiled, launch = [], JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        kernel = launch(self, *args, grid=grid, warmup=True, **kwargs)
        if kernel is not None:  # None in a trial
            compiled.append((self.__name__, kernel.asm))

    monkeypatch.setattr(JITFunction, "run", compile_only)
    yield compiled
    for module in [m for name, m in sys.modules.items() if name.startswith("holdfast.kernels.")]:
        for function in vars(module).values():
            if isinstance(function, JITFunction):
                function.device_caches.clear()  # the next test compiles it again
