"""Layers that take the place of torch's in a network: the same arithmetic, decided by the seed, and fit for lanes."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor, nn

from holdfast import kernels

CHANNEL_DROPOUTS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


class BatchNorm(nn.Module):
    """BatchNorm in two forms with the same arithmetic: torch's own, which updates its statistics in place, and a
    pure one for ``vmap`` and ``grad``, which ignores padding and leaves the new statistics in ``fresh``.

    Unlike torch's, it takes a batch of one value a channel, whose variance is 0.
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor
    rectifies = adds = True

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
        """Whether this can take the place of a batch norm: one of torch's own, with statistics that move as usual."""
        return kernels.is_plain(norm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm) and (
            norm.momentum is not None
        )

    def forward(self, x: Tensor, rectified: bool = False, added: Tensor | None = None) -> Tensor:
        """Normalise each channel of ``[B, C, ...]``; a pure one does the ReLU behind it too, if ``rectified``, or that
        of the sum with what is ``added``."""
        if self.pure or x.numel() == x.shape[1]:
            y = self._pure_forward(x, rectified, added)
            if not self.pure:
                for name, value in self.fresh.items():
                    self.get_buffer(name).copy_(value)
                self.fresh = {}  # else a later sample in evaluation mode would write them again
            return y
        if self.training and self.tracks:
            self.num_batches_tracked += 1
        batch_statistics = self.training or not self.tracks
        return nn.functional.batch_norm(
            x, self.running_mean if self.tracks else None, self.running_var if self.tracks else None,
            self.weight, self.bias, batch_statistics, self.momentum, self.eps,
        )  # fmt: skip

    def _pure_forward(self, x: Tensor, rectified: bool, added: Tensor | None) -> Tensor:
        by_batch = self.training or not self.tracks
        affine = self.weight is not None and self.bias is not None
        alike = added is None or added.shape == x.shape
        if self.own_kernels and by_batch and x.dim() == 4 and affine and alike:
            return self._by_kernels(x, rectified, added)
        y = self._by_torch(x)
        if added is not None:
            return (y + added).relu()
        return y.relu() if rectified else y

    def _by_kernels(self, x: Tensor, rectified: bool, added: Tensor | None) -> Tensor:
        from holdfast.kernels.batchnorm import batch_norm

        names = ("running_mean", "running_var", "num_batches_tracked")
        running = tuple(self.get_buffer(name) for name in names) if self.tracks else (None,) * 3
        y, *after = batch_norm(
            x, self.weight, self.bias, running, self.mask, self.eps, self.momentum, rectified, added
        )
        if self.training and self.tracks:
            self.fresh = dict(zip(names, after, strict=True))
        return y

    def _by_torch(self, x: Tensor) -> Tensor:
        shape = [1, -1] + [1] * (x.dim() - 2)
        if not self.training and self.tracks:
            return self._by_running(x, shape)
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

    def _by_running(self, x: Tensor, shape: list[int]) -> Tensor:
        """x scale + shift: through the images once."""
        scale = torch.rsqrt(self.running_var + self.eps)
        if self.weight is not None:
            scale = scale * self.weight
        shift = -self.running_mean * scale
        if self.bias is not None:
            shift = shift + self.bias
        return torch.addcmul(shift.view(shape), x, scale.view(shape))


class CounterDropout(nn.Module):
    """Dropout whose masks are a hash of (key, layer, position): the same on every engine, and resumable."""

    def __init__(self, p: float, layer: int, whole_channels: bool) -> None:
        super().__init__()
        self.p, self.layer, self.whole_channels = p, layer, whole_channels
        self.key: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Zero entries (or whole channels) with probability p and scale the rest."""
        if not self.training or self.p == 0 or self.key is None:
            return x
        shape = (*x.shape[:2], *[1] * (x.dim() - 2)) if self.whole_channels else x.shape
        place = torch.arange(math.prod(shape), device=x.device).view(shape)
        kept = _hash_uniform(place, self.key + 0x9E3779B9 * self.layer) >= self.p
        return x * (kept.to(x.dtype) / (1 - self.p))


def _hash_uniform(place: Tensor, key: Tensor) -> Tensor:
    """Numbers in [0, 1) from positions and a key: the 32-bit finaliser of MurmurHash3, twice."""
    low = 0xFFFFFFFF
    h = (place * 0x9E3779B1 + key) & low
    for multiplier in (0x85EBCA6B, 0xC2B2AE35, 0x27D4EB2F, 0x165667B1):
        h = ((h ^ (h >> 15)) * multiplier) & low
    return (h ^ (h >> 16)).to(torch.float64) / 2**32


class VmapLinear(nn.Linear):
    """A linear layer for ``vmap`` on a CPU, which otherwise multiplies the bias by 1 first."""

    def forward(self, x: Tensor) -> Tensor:
        """``[B, O]`` from ``[B, I]``."""
        y = x @ self.weight.mT
        return y if self.bias is None else y + self.bias


class PoolingFirst(nn.Sequential):
    """A Sequential in which max-pooling that follows a ReLU comes before it: the same bits, gradients too, and less to
    rectify. Taken apart, its layers are in their own order."""

    def forward(self, x: Tensor) -> Tensor:
        """One after another."""
        layers = list(self)
        for at, pair in enumerate(pairwise(self)):
            if _commute(*pair):
                layers[at : at + 2] = reversed(pair)
        for layer in layers:
            x = layer(x)
        return x


def _commute(relu: nn.Module, pool: nn.Module) -> bool:
    """Whether these are a ReLU and max-pooling, which may change places."""
    return (
        kernels.is_plain(relu, nn.ReLU) and kernels.is_plain(pool, nn.MaxPool2d) and not pool.return_indices
    )


def pool_first(net: nn.Module) -> None:
    """Let max-pooling that follows a ReLU come before it."""
    for sequence in net.modules():
        if kernels.is_plain(sequence, nn.Sequential) and any(map(_commute, sequence, list(sequence)[1:])):
            sequence.__class__ = PoolingFirst
