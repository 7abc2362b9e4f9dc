"""How much memory there is, and how much a run has taken."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import torch


def available_bytes() -> int:
    """RAM that this process may still take: what the machine has left, or its container if that is less."""
    rooms = [_machine_bytes()]
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
        rooms += [] if limit == "max" else [int(limit) - int(used)]
    except (OSError, ValueError):
        pass  # no control groups here
    return max(0, min(rooms))


def _machine_bytes() -> int:
    free = _kilobytes("/proc/meminfo", "MemAvailable")
    return 4 << 30 if free is None else 1024 * free  # not Linux: what any machine of today can spare


def _kilobytes(path: str, name: str) -> int | None:
    """A line of one of Linux's tables."""
    try:
        lines = dict(line.split(":", 1) for line in Path(path).read_text().splitlines())
        return int(lines[name].split()[0])
    except (OSError, KeyError, ValueError):
        return None


def keep_freed_memory() -> None:
    """Keep the memory that a step frees for the next one, instead of handing it back and faulting it in again.

    The GNU C library keeps blocks up to the largest that it has seen freed, 32 MiB at most; others ignore this.
    """
    torch.empty((32 << 20) - 2 * mmap.PAGESIZE, dtype=torch.uint8)


def peak_bytes(device: torch.device) -> int | None:
    """The peak memory of this process so far: of the GPU if it works there, else RAM; None on Windows."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    if sys.platform == "win32":
        return None
    import resource

    peak = _kilobytes("/proc/self/status", "VmHWM")  # ru_maxrss would count the process that started this one
    if peak is None:
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else 1024 * most
    return 1024 * peak
