"""Kernels of our own for clients as lanes, where PyTorch's are slow: NVIDIA GPUs with Triton, float32."""

from __future__ import annotations

import importlib.util
import os
from contextlib import suppress
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import nn

REPAID_AFTER = 1_000_000  # samples to train on, before which compiling them takes longer than it saves


def worthwhile(net: nn.Module, shape: tuple[int, ...], batch_size: int, samples: float) -> bool:
    """Whether a run that trains on so many samples in all gains by the kernels, or has them compiled already."""
    return samples >= REPAID_AFTER or _note(net, shape, batch_size).exists()


def remember(net: nn.Module, shape: tuple[int, ...], batch_size: int) -> None:
    """Note, beside Triton's compiled kernels, that those of such a network are among them."""
    note = _note(net, shape, batch_size)
    with suppress(OSError):  # then they will be thought of as not compiled
        note.parent.mkdir(parents=True, exist_ok=True)
        note.touch()


def _note(net: nn.Module, shape: tuple[int, ...], batch_size: int) -> Path:
    kinds = (nn.Conv2d, nn.Linear, nn.GroupNorm, nn.BatchNorm2d)
    layers = [str(module) for module in net.modules() if isinstance(module, kinds)]
    what = repr((layers, shape, batch_size, torch.__version__)).encode() + _source()
    root = os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache"
    return Path(root) / "holdfast" / blake2b(what, digest_size=16).hexdigest()


@cache
def _source() -> bytes:
    return b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def unavailable(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the kernels cannot be used here, or None if they can."""
    if device.type != "cuda":
        return "no CUDA device"
    if dtype != torch.float32:
        return f"{dtype} instead of float32"
    if not _has_triton():
        return "Triton is not installed"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "the GPU is older than compute capability 8.0"
    return None


def is_plain(module: nn.Module, *kinds: type[nn.Module]) -> TypeGuard[Any]:
    """Whether a module is torch's own of one of these kinds: no subclass, and nothing hooked to it, as spectral norms
    are. What a user made of torch's layers must not be replaced by ours."""
    return type(module) in kinds and not (module._forward_hooks or module._forward_pre_hooks)


def install(net: nn.Module) -> None:
    """Let a network's convolutions, group norms, pooling and linear layers, with what follows them, run as kernels of
    ours."""
    from holdfast.kernels.layers import LaneConv2d, LaneGroupNorm, LaneLinear, LaneMean, LaneSequential
    from holdfast.kernels.maxpool import LaneMaxPool2d

    for parent in list(net.modules()):
        for name, module in list(parent.named_children()):
            if is_plain(module, nn.Conv2d) and LaneConv2d.serves(module):
                setattr(parent, name, LaneConv2d(module))
            elif is_plain(module, nn.MaxPool2d) and LaneMaxPool2d.serves(module):
                setattr(parent, name, LaneMaxPool2d(module))
            elif is_plain(module, nn.AdaptiveAvgPool2d) and module.output_size in (1, (1, 1)):
                setattr(parent, name, LaneMean())
            elif type(module) is nn.Linear and module.bias is not None:
                module.__class__ = LaneLinear  # so it keeps its hooks
            elif type(module) is nn.GroupNorm and module.affine:
                module.__class__ = LaneGroupNorm
        if is_plain(parent, nn.Sequential):  # the only module that says in which order its children apply
            parent.__class__ = LaneSequential
