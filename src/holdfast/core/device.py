"""Several processes on one GPU: how much of its memory is this one's own, and whether they take turns."""

from __future__ import annotations

import os
from pathlib import Path

import torch

SIDE_BY_SIDE = "nvidia-cuda-mps-control -d"  # starts CUDA's multi-process service

_processes = 1


def share_with(processes: int) -> None:
    """This process is one of so many on its GPU: it takes no more than an equal share of the memory."""
    global _processes
    _processes = processes
    torch.cuda.set_per_process_memory_fraction(1 / processes)


def share_bytes(device: torch.device) -> int:
    """The share, taken and free."""
    return int(torch.cuda.get_device_properties(device).total_memory) // _processes


def free_bytes(device: torch.device) -> int:
    """What this process may still take."""
    taken = torch.cuda.memory_allocated(device)
    kept = torch.cuda.memory_reserved(device) - taken  # by torch, for this process alone
    return max(0, min(torch.cuda.mem_get_info(device)[0] + kept, share_bytes(device) - taken))


def takes_turns() -> bool:
    """Whether processes get the GPU one after another, as they do where CUDA's multi-process service is not at work."""
    pipes = os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps"  # noqa: S108 (where its daemon listens)
    return not Path(pipes, "control").exists()
