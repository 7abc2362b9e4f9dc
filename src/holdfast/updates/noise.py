"""Counter-based noise of any shape, on any device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from holdfast.core.random import counter_key, generator


def gaussian(like: Tensor, seed: int, purpose: str, *counters: int) -> Tensor:
    """Independent standard normal values in the shape, dtype and device of ``like``.

    The same arguments give the same values on the same kind of device.
    """
    if like.is_cuda:
        source = torch.Generator(like.device).manual_seed(counter_key(seed, purpose, *counters) >> 1)
        return torch.randn(like.shape, dtype=like.dtype, device=like.device, generator=source)
    dtype = np.float64 if like.dtype == torch.float64 else np.float32
    values = generator(seed, purpose, *counters).standard_normal(tuple(like.shape), dtype=dtype)
    return torch.from_numpy(np.asarray(values)).to(like.dtype)


def uniform(like: Tensor, seed: int, purpose: str, *counters: int) -> Tensor:
    """Independent values from [0, 1), as `gaussian`."""
    if like.is_cuda:
        source = torch.Generator(like.device).manual_seed(counter_key(seed, purpose, *counters) >> 1)
        return torch.rand(like.shape, dtype=like.dtype, device=like.device, generator=source)
    dtype = np.float64 if like.dtype == torch.float64 else np.float32
    values = generator(seed, purpose, *counters).random(tuple(like.shape), dtype=dtype)
    return torch.from_numpy(np.asarray(values)).to(like.dtype)
