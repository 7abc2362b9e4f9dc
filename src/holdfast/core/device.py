"""Devices: which one to compute on, in which precision, and how much memory there is."""

from __future__ import annotations

import mmap
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

from holdfast.core.errors import HoldfastError, unknown

PRECISIONS = ("auto", "float32", "tf32", "float64", "bfloat16", "float16")
MPS_COMMAND = "nvidia-cuda-mps-control -d"  # starts CUDA's multi-process service

_gpu_processes = 1
_onednn_off = False  # by `_use_onednn`


def choose_device(name: str) -> torch.device:
    """The device by name, ``auto``, ``cpu``, ``cuda`` or ``cuda:1``; ``auto`` is the GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = None
    with suppress(RuntimeError):
        device = torch.device(name)
    if device is None or device.type not in ("cpu", "cuda"):
        raise HoldfastError(f"device is '{name}'; it must be auto, cpu or cuda")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if not count:
            raise HoldfastError("device is 'cuda', but PyTorch finds no CUDA device; use --device cpu")
        if device.index is not None:
            if device.index >= count:
                raise HoldfastError(
                    f"device is '{name}', but PyTorch finds {count} CUDA device(s), numbered from 0"
                )
            torch.cuda.set_device(device)  # streams, graphs and kernels use the current device
    return device


class Precision(NamedTuple):
    """The dtype of a run's weights, losses and states, and that of ``torch.autocast`` in local training, if any."""

    dtype: torch.dtype
    autocast: torch.dtype | None = None


def choose_precision(name: str, device: torch.device) -> Precision:
    """The dtypes of a precision by name; sets torch's matrix products and deterministic algorithms for it.

    ``auto`` is TF32 on a GPU and float32 elsewhere. Outside of local training, ``bfloat16`` and ``float16`` are as
    ``auto``.
    """
    if name not in PRECISIONS:
        raise unknown("precision", name, PRECISIONS)
    if name == "bfloat16" and (reason := bfloat16_unavailable(device)) is not None:
        raise HoldfastError(f"precision is 'bfloat16', but {reason}; use float16 or tf32")
    tf32 = device.type == "cuda" and name not in ("float32", "float64")
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cudnn.deterministic = True  # the same seed must give the same bits
    torch.backends.cudnn.benchmark = False
    half = name in ("bfloat16", "float16")
    _use_onednn(not (half and device.type == "cpu"))
    if half:
        return Precision(torch.float32, getattr(torch, name))
    return Precision(torch.float64 if name == "float64" else torch.float32)


def _use_onednn(use: bool) -> None:
    """Switch oneDNN off, or on again if this function has switched it off.

    In bfloat16 it leaves gradients of filters uninitialised where these meet only padding.
    """
    global _onednn_off
    if (use and _onednn_off) or (not use and torch.backends.mkldnn.enabled):
        torch.backends.mkldnn.enabled = use  # type: ignore[assignment]
        _onednn_off = not use


def restore_onednn() -> None:
    """Switch oneDNN on again after a run in half precision."""
    _use_onednn(True)


def bfloat16_unavailable(device: torch.device) -> str | None:
    """The reason why the device does not compute in bfloat16, or None if it does, as every CPU."""
    if device.type == "cpu" or torch.cuda.is_bf16_supported(including_emulation=False):
        return None
    return f"the GPU {torch.cuda.get_device_name(device)} does not support it"


# GPU memory ---------------------------------------------------------------------------------------------------


def share_gpu(processes: int) -> None:
    """Limit this process to an equal share of the GPU's memory, as one of ``processes`` on it."""
    global _gpu_processes
    _gpu_processes = processes
    torch.cuda.set_per_process_memory_fraction(1 / processes)


def gpu_share_bytes(device: torch.device) -> int:
    """This process's share of the GPU's memory, whether allocated or free."""
    return int(torch.cuda.get_device_properties(device).total_memory) // _gpu_processes


def free_gpu_bytes(device: torch.device) -> int:
    """GPU memory that this process can still allocate."""
    allocated = torch.cuda.memory_allocated(device)
    cached = torch.cuda.memory_reserved(device) - allocated  # by torch, for this process alone
    free = torch.cuda.mem_get_info(device)[0] + cached
    return max(0, min(free, gpu_share_bytes(device) - allocated))


def gpu_is_time_sliced() -> bool:
    """Whether processes run on the GPU in turns, as they do without CUDA's multi-process service."""
    pipes = os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps"  # noqa: S108 (where its daemon listens)
    return not Path(pipes, "control").exists()


# RAM ----------------------------------------------------------------------------------------------------------


def available_ram_bytes() -> int:
    """RAM that this process can still allocate: what is free on the machine, or in its container if that is less."""
    limits = [_free_ram_bytes()]
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = ((group / name).read_text("utf-8").strip() for name in ("memory.max", "memory.current"))
        limits += [] if limit == "max" else [int(limit) - int(used)]
    except (OSError, ValueError):
        pass  # no control groups here
    return max(0, min(limits))


def _free_ram_bytes() -> int:
    free = _kilobytes("/proc/meminfo", "MemAvailable")
    return 4 << 30 if free is None else 1024 * free  # a cautious guess where there is no /proc


def _kilobytes(path: str, name: str) -> int | None:
    """An entry of one of Linux's /proc files; None elsewhere."""
    try:
        lines = dict(line.split(":", 1) for line in Path(path).read_text(encoding="utf-8").splitlines())
        return int(lines[name].split()[0])
    except (OSError, KeyError, ValueError):
        return None


def keep_freed_memory() -> None:
    """Make malloc reuse the memory that a step frees, instead of returning it to the system and faulting it in again.

    The GNU C library keeps blocks up to the largest that was freed before, 32 MiB at most; others ignore this.
    """
    torch.empty((32 << 20) - 2 * mmap.PAGESIZE, dtype=torch.uint8)


def peak_bytes(device: torch.device) -> int | None:
    """The most memory that this process has held so far: GPU memory if ``device`` is a GPU, else RAM.

    None on Windows, for RAM.
    """
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    if sys.platform == "win32":
        return None
    import resource

    peak = _kilobytes("/proc/self/status", "VmHWM")  # ru_maxrss would count the parent process too
    if peak is None:
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else 1024 * most
    return 1024 * peak
