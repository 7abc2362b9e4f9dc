"""Replacements for PyTorch's layers: the same arithmetic, reproducible from a seed, and usable under ``vmap``."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor, nn

from holdfast import kernels

CHANNEL_DROPOUTS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


class BatchNorm(nn.Module):
    """BatchNorm in two forms with the same arithmetic.

    The usual form is PyTorch's, which updates its statistics in place. The pure form, for ``vmap`` and ``grad``,
    ignores padding and leaves the new statistics in ``fresh``. Unlike PyTorch's, both accept a batch with a single
    value per channel, whose variance is 0.
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor
    fuses_relu = fuses_residual = True

    def __init__(self, norm: nn.modules.batchnorm._BatchNorm, tracks: bool) -> None:
        super().__init__()
        self.weight, self.bias = norm.weight, norm.bias
        assert norm.momentum is not None
        self.eps, self.momentum = norm.eps, norm.momentum
        self.tracks = tracks and norm.running_mean is not None
        for name, buffer in norm.named_buffers(recurse=False):
            self.register_buffer(name, buffer if self.tracks else None)
        self.pure = self.own_kernels = False
        self.mask: Tensor | None = None
        self.fresh: dict[str, Tensor] = {}

    @staticmethod
    def can_replace(norm: nn.Module) -> bool:
        """Whether ``norm`` is exactly one of PyTorch's batch norms, with exponential running averages."""
        return kernels.is_plain(norm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm) and (
            norm.momentum is not None
        )

    def forward(self, x: Tensor, relu: bool = False, residual: Tensor | None = None) -> Tensor:
        """Normalise each channel of ``[B, C, ...]``.

        The pure form can also apply the ReLU after it, or add a ``residual`` and apply the ReLU to the sum.
        """
        if self.pure or x.numel() == x.shape[1]:
            y = self._pure_forward(x, relu, residual)
            if not self.pure:
                for name, value in self.fresh.items():
                    self.get_buffer(name).copy_(value)
                self.fresh = {}  # otherwise a later sample in evaluation mode would write them again
            return y
        if self.training and self.tracks:
            self.num_batches_tracked += 1
        batch_statistics = self.training or not self.tracks
        return nn.functional.batch_norm(
            x, self.running_mean if self.tracks else None, self.running_var if self.tracks else None,
            self.weight, self.bias, batch_statistics, self.momentum, self.eps,
        )  # fmt: skip

    def _pure_forward(self, x: Tensor, relu: bool, residual: Tensor | None) -> Tensor:
        batch_statistics = self.training or not self.tracks
        affine = self.weight is not None and self.bias is not None
        same_shape = residual is None or residual.shape == x.shape
        if self.own_kernels and batch_statistics and x.dim() == 4 and affine and same_shape:
            return self._kernel_forward(x, relu, residual)
        y = self._torch_forward(x.to(torch.promote_types(x.dtype, torch.float32))).to(x.dtype)
        if residual is not None:
            return (y + residual).relu()
        return y.relu() if relu else y

    def _kernel_forward(self, x: Tensor, relu: bool, residual: Tensor | None) -> Tensor:
        from holdfast.kernels.batchnorm import batch_norm

        names = ("running_mean", "running_var", "num_batches_tracked")
        running = tuple(self.get_buffer(name) for name in names) if self.tracks else (None,) * 3
        y, *updated = batch_norm(
            x, self.weight, self.bias, running, self.mask, self.eps, self.momentum, relu, residual
        )
        if self.training and self.tracks:
            self.fresh = dict(zip(names, updated, strict=True))
        return y

    def _torch_forward(self, x: Tensor) -> Tensor:
        shape = [1, -1] + [1] * (x.dim() - 2)
        if not self.training and self.tracks:
            return self._eval_forward(x, shape)
        axes = [0, *range(2, x.dim())]
        weight = torch.ones_like(x[:, :1])
        if self.mask is not None:
            weight = weight * self.mask.view(-1, *[1] * (x.dim() - 1))
        count = weight.sum()
        mean = (x * weight).sum(axes) / count
        centred = x - mean.view(shape)
        var = (centred.square() * weight).sum(axes) / count
        if self.training and self.tracks:
            unbiased = var * (count / (count - 1).clamp(min=1))
            keep = 1 - self.momentum
            self.fresh = {
                "running_mean": keep * self.running_mean + self.momentum * mean.detach(),
                "running_var": keep * self.running_var + self.momentum * unbiased.detach(),
                "num_batches_tracked": self.num_batches_tracked + 1,
            }
        y = centred * torch.rsqrt(var + self.eps).view(shape)
        if self.weight is not None:
            y = y * self.weight.view(shape)
        return y if self.bias is None else y + self.bias.view(shape)

    def _eval_forward(self, x: Tensor, shape: list[int]) -> Tensor:
        """x scale + shift from the running statistics, in one pass over the images."""
        scale = torch.rsqrt(self.running_var + self.eps)
        if self.weight is not None:
            scale = scale * self.weight
        shift = -self.running_mean * scale
        if self.bias is not None:
            shift = shift + self.bias
        return torch.addcmul(shift.view(shape), x, scale.view(shape))


class CounterDropout(nn.Module):
    """Dropout whose masks are a hash of (key, layer, position), so they are the same on every engine and resumable."""

    def __init__(self, p: float, layer: int, channelwise: bool) -> None:
        super().__init__()
        self.p, self.layer, self.channelwise = p, layer, channelwise
        self.key: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Zero entries (or whole channels) with probability p and scale the rest."""
        if not self.training or self.p == 0 or self.key is None:
            return x
        shape = (*x.shape[:2], *[1] * (x.dim() - 2)) if self.channelwise else x.shape
        position = torch.arange(math.prod(shape), device=x.device).view(shape)
        kept = _hash_uniform(position, self.key + 0x9E3779B9 * self.layer) >= self.p
        return x * (kept.to(x.dtype) / (1 - self.p))


def _hash_uniform(position: Tensor, key: Tensor) -> Tensor:
    """Numbers in [0, 1) from positions and a key: the 32-bit finaliser of MurmurHash3, twice."""
    low = 0xFFFFFFFF
    h = (position * 0x9E3779B1 + key) & low
    for multiplier in (0x85EBCA6B, 0xC2B2AE35, 0x27D4EB2F, 0x165667B1):
        h = ((h ^ (h >> 15)) * multiplier) & low
    return (h ^ (h >> 16)).to(torch.float64) / 2**32


class VmapLinear(nn.Linear):
    """A linear layer for ``vmap`` on a CPU, where PyTorch's multiplies the bias by 1 first."""

    def forward(self, x: Tensor) -> Tensor:
        """``[B, O]`` from ``[B, I]``."""
        y = x @ self.weight.mT
        return y if self.bias is None else y + self.bias.to(y.dtype)  # under autocast not that of the weights


class PoolBeforeRelu(nn.Sequential):
    """A Sequential that applies max-pooling before the ReLU in front of it.

    Outputs and gradients have the same bits, and fewer values are rectified. Indexing and iterating give the layers in
    their original order.
    """

    def forward(self, x: Tensor) -> Tensor:
        layers = list(self)
        for i, pair in enumerate(pairwise(self)):
            if _are_relu_and_maxpool(*pair):
                layers[i : i + 2] = reversed(pair)
        for layer in layers:
            x = layer(x)
        return x


def _are_relu_and_maxpool(relu: nn.Module, pool: nn.Module) -> bool:
    return (
        kernels.is_plain(relu, nn.ReLU) and kernels.is_plain(pool, nn.MaxPool2d) and not pool.return_indices
    )


def pool_before_relu(net: nn.Module) -> None:
    """Replace the Sequentials in which max-pooling follows a ReLU by `PoolBeforeRelu`."""
    for sequence in net.modules():
        if kernels.is_plain(sequence, nn.Sequential) and any(
            map(_are_relu_and_maxpool, sequence, list(sequence)[1:])
        ):
            sequence.__class__ = PoolBeforeRelu
