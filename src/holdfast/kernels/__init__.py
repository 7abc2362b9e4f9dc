"""Kernels of our own for clients as lanes, where PyTorch's are slow: NVIDIA GPUs with Triton, float32."""

from __future__ import annotations

import importlib.util

import torch
from torch import nn

REPAID_AFTER = 1_000_000  # samples to train on, before which compiling them takes longer than it saves


def unavailable(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the kernels cannot be used here, or None if they can."""
    if device.type != "cuda":
        return "no CUDA device"
    if dtype != torch.float32:
        return f"{dtype} instead of float32"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "the GPU is older than compute capability 8.0"
    return None


def install(net: nn.Module) -> None:
    """Let a network's convolutions, with ReLU and 2x2 pooling where they follow, run as kernels of ours."""
    from holdfast.kernels.layers import LaneConv2d, LaneConvReLUPool

    for parent in list(net.modules()):
        children = dict(parent.named_children())
        served = {n: m for n, m in children.items() if isinstance(m, nn.Conv2d) and LaneConv2d.serves(m)}
        for name, module in served.items():
            setattr(parent, name, LaneConv2d(module))
        if isinstance(parent, nn.Sequential):  # the only module that says in which order its children apply
            names = list(children)
            for name, relu, below in zip(names, names[1:], names[2:], strict=False):
                if name in served and isinstance(children[relu], nn.ReLU) and _halves(children[below]):
                    setattr(parent, name, LaneConvReLUPool(served[name]))
                    setattr(parent, relu, nn.Identity())
                    setattr(parent, below, nn.Identity())


def _halves(module: nn.Module) -> bool:
    """Whether a layer is plain 2x2 max-pooling."""
    return isinstance(module, nn.MaxPool2d) and (
        (
            module.kernel_size,
            module.stride,
            module.padding,
            module.dilation,
            module.ceil_mode,
            module.return_indices,
        )
        in [(2, 2, 0, 1, False, False), ((2, 2), (2, 2), 0, 1, False, False)]
    )
