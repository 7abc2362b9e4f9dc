"""Triton kernels for the layers, losses and optimiser steps of many clients at once: NVIDIA GPUs, float32.

The vectorized engine uses them where PyTorch's own kernels are slow. Their tensors have an additional first dimension,
[L, ...], the lanes. A lane is one client of the batched program.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any, TypeGuard

import torch
from torch import nn


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def unavailable(device: torch.device, dtype: torch.dtype) -> str | None:
    """The reason why the kernels cannot run on the device with this dtype, or None if they can."""
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
    """Whether a module is of one of these PyTorch classes, not of a subclass, and has no forward hooks.

    Only such modules may be replaced by another implementation. For example, spectral norm is a hook.
    """
    return type(module) in kinds and not (module._forward_hooks or module._forward_pre_hooks)


def install(net: nn.Module) -> None:
    """Replace a network's convolutions, group norms, pooling and linear layers by layers that run these kernels.

    The operations that follow these layers are fused into the kernels.
    """
    from holdfast.kernels.layers import LaneConv2d, LaneGroupNorm, LaneLinear, LaneMean, LaneSequential
    from holdfast.kernels.maxpool import LaneMaxPool2d

    for parent in list(net.modules()):
        for name, module in list(parent.named_children()):
            if is_plain(module, nn.Conv2d) and LaneConv2d.supports(module):
                setattr(parent, name, LaneConv2d(module))
            elif is_plain(module, nn.MaxPool2d) and LaneMaxPool2d.supports(module):
                setattr(parent, name, LaneMaxPool2d(module))
            elif is_plain(module, nn.AdaptiveAvgPool2d) and module.output_size in (1, (1, 1)):
                setattr(parent, name, LaneMean())
            elif type(module) is nn.Linear and module.bias is not None:
                module.__class__ = LaneLinear  # keeps its hooks
            elif type(module) is nn.GroupNorm and module.affine:
                module.__class__ = LaneGroupNorm
        if is_plain(parent, nn.Sequential):  # the only module whose layers are known to apply in order
            parent.__class__ = LaneSequential
