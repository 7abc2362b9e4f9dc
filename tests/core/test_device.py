"""Several processes on one GPU limit themselves to equal shares of its memory."""

from types import SimpleNamespace

import pytest
import torch

from holdfast.core import device
from holdfast.core.errors import HoldfastError

GIB = 2**30
CUDA = torch.device("cuda")


@pytest.fixture
def card(monkeypatch):
    """A GPU of 80 GiB, of which others use 20; torch has allocated 4 and reserved 6 for this process."""
    limits = []
    monkeypatch.setattr(device, "_gpu_processes", 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 * GIB))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (54 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 4 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 6 * GIB)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", limits.append)
    return limits


def test_a_single_process_may_use_free_and_cached_memory(card):
    assert device.gpu_share_bytes(CUDA) == 80 * GIB
    assert device.free_gpu_bytes(CUDA) == (54 + 2) * GIB


def test_eight_processes_have_equal_shares(card):
    device.share_gpu(8)
    assert card == [1 / 8]  # torch holds it to that
    assert device.gpu_share_bytes(CUDA) == 10 * GIB
    assert device.free_gpu_bytes(CUDA) == 6 * GIB  # four of the ten are taken


@pytest.fixture
def work(monkeypatch):
    """A function that starts a sweep's worker without work on a device, and the list of shares it takes."""
    from types import SimpleNamespace

    from holdfast.sweeps import workers

    shares = []
    monkeypatch.setattr(device, "choose_device", torch.device)
    monkeypatch.setattr(device, "share_gpu", shares.append)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(workers, "work_off", lambda *_: True)

    def work(name, tell=print, speaks=False):
        workers._worker(SimpleNamespace(device=name, workers=12), tell, 1, speaks)

    return work, shares


def test_workers_of_a_sweep_on_a_gpu_share_it(work):
    begin, shares = work
    for name in ("cpu", "cuda"):
        begin(name)
    assert shares == [12]


def test_one_worker_reports_time_slicing(work, monkeypatch, tmp_path):
    begin, _ = work
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))  # where no daemon listens
    told = []
    begin("cuda", told.append)
    begin("cpu", told.append, speaks=True)
    assert told == []
    begin("cuda", told.append, speaks=True)
    assert len(told) == 1
    assert "take turns" in told[0]
    assert device.MPS_COMMAND in told[0]
    (tmp_path / "control").touch()  # as the daemon makes it
    begin("cuda", told.append, speaks=True)
    assert len(told) == 1


@pytest.fixture
def backends():
    """The settings of torch's backends, restored after the test."""
    cuda, cudnn, mkldnn = torch.backends.cuda.matmul, torch.backends.cudnn, torch.backends.mkldnn
    names = [(cuda, "allow_tf32"), (mkldnn, "enabled")]
    names += [(cudnn, name) for name in ("allow_tf32", "deterministic", "benchmark")]
    before = [getattr(*place) for place in names]
    yield torch.backends
    for place, value in zip(names, before, strict=True):
        setattr(*place, value)


def test_a_gpu_without_bfloat16_refuses_it(backends, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    with pytest.raises(HoldfastError, match=r"the GPU Tesla T4 does not support it; use float16 or tf32"):
        device.choose_precision("bfloat16", CUDA)
    assert device.choose_precision("float16", CUDA) == (torch.float32, torch.float16)
    assert device.bfloat16_unavailable(torch.device("cpu")) is None


def test_half_precision_is_without_onednn_on_a_cpu_and_with_tf32_on_a_gpu(backends, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    for name in ("bfloat16", "float16", "float32"):
        half = name != "float32"
        dtype = getattr(torch, name) if half else None
        assert device.choose_precision(name, torch.device("cpu")) == (torch.float32, dtype)
        assert backends.mkldnn.enabled is not half
        assert not backends.cudnn.allow_tf32
        device.choose_precision(name, CUDA)
        assert backends.mkldnn.enabled
        assert backends.cudnn.allow_tf32 is half
