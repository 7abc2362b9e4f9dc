"""Layers over the kernels: differentiable, and with rules of their own for ``vmap``."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import Function
from torch.nn import functional as F

from holdfast.kernels import conv, is_plain
from holdfast.kernels import conv_relu_maxpool as conv_pool
from holdfast.kernels import relu_maxpool as pool
from holdfast.kernels import small_linear as narrow
from holdfast.kernels.autograd import Gradient, apply, as_lane, with_lanes
from holdfast.kernels.bias_relu import add_bias
from holdfast.kernels.conv_geometry import Geometry
from holdfast.kernels.groupnorm import group_norm
from holdfast.kernels.maxpool import LaneMaxPool2d
from holdfast.kernels.padded_images import Padded, pad, unpool


class LaneConv2d(nn.Module):
    """A Conv2d that is fast for many lanes at once, and the ReLU and 2x2 max-pooling behind it if ``pooled``."""

    def __init__(self, conv2d: nn.Conv2d) -> None:
        super().__init__()
        self.weight, self.bias = conv2d.weight, conv2d.bias
        self.stride, self.padding = int(conv2d.stride[0]), int(conv2d.padding[0])

    @staticmethod
    def serves(module: nn.Conv2d) -> bool:
        """Whether the kernels cover this layer: less padding than the kernel is wide, and with zeros, no groups, no
        dilation, the same both ways."""
        return (
            module.groups == 1
            and module.kernel_size[0] == module.kernel_size[1]
            and module.padding_mode == "zeros"
            and not isinstance(module.padding, str)
            and module.dilation == (1, 1)
            and module.stride[0] == module.stride[1]
            and module.padding[0] == module.padding[1]
            and module.padding[0] < module.kernel_size[0]
        )

    def forward(self, x: Tensor, pooled: bool = False, flat: bool = False) -> Tensor:
        """``[B, O, OH, OW]`` from ``[B, C, H, W]``; half as high and wide if ``pooled``, and ``flat`` soon if so."""
        size = (x.shape[-2], x.shape[-1])
        geometry = Geometry(size, self.weight.shape[-1], self.stride, self.padding)
        at_once = pooled and not (geometry.out[0] % 2 or geometry.out[1] % 2)
        if at_once and not torch.is_grad_enabled() and conv_pool.serves(len(self.weight), geometry):
            return conv_pool.convolve_and_pool(x, self.weight, self.bias, geometry, flat)
        y = cast(Tensor, apply(_Convolve, x, self.weight, self.bias, geometry, at_once, flat)[0])
        return F.max_pool2d(F.relu(y), 2) if pooled and not at_once else y


class LaneLinear(nn.Linear):
    """A linear layer with a bias, and the ReLU behind it if ``rectified``."""

    rectifies = True

    def forward(self, x: Tensor, rectified: bool = False) -> Tensor:
        """``[B, O]`` from ``[B, I]``; other shapes go torch's way."""
        if x.dim() == 2 and not rectified and narrow.serves(self.weight):
            return narrow.linear(x, self.weight, self.bias)
        if x.dim() == 2:
            return add_bias(x @ self.weight.mT, self.bias, rectified)
        y = super().forward(x)
        return F.relu(y) if rectified else y


class LaneGroupNorm(nn.GroupNorm):
    """A group normalisation with weights, and the ReLU behind it if ``rectified``, or that of the sum with what is
    ``added``."""

    rectifies = adds = True

    def forward(self, x: Tensor, rectified: bool = False, added: Tensor | None = None) -> Tensor:
        """Images ``[B, C, H, W]``; other shapes go torch's way."""
        if x.dim() == 4 and (added is None or added.shape == x.shape):
            return group_norm(x, self.weight, self.bias, self.num_groups, self.eps, rectified, added)
        y = super().forward(x)
        if added is not None:
            return F.relu(y + added)
        return F.relu(y) if rectified else y


class LaneMean(nn.Module):
    """Each channel's mean; torch's adaptive pooling does one lane after another where channels lie last."""

    def forward(self, x: Tensor) -> Tensor:
        """``[..., C, 1, 1]`` from ``[..., C, H, W]``."""
        return x.mean((-2, -1), keepdim=True)


class LaneSequential(nn.Sequential):
    """A Sequential whose layers do the ReLU, or the ReLU and pooling, that follow them; taken apart, they do not."""

    @property
    def adds(self) -> bool:
        """Whether its last layer can add something to what it gives and rectify the sum, with no hook to see it."""
        last = [nn.Identity(), *self][-1]
        return getattr(last, "adds", False) and not last._forward_hooks

    def forward(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        """One after another; the last with what is to be ``added``, which only one that ``adds`` can be given."""
        layers, at = [*self, *[nn.Identity()] * 3], 0
        while at < len(self) - (added is not None):
            layer, relu, pool, flatten = layers[at : at + 4]
            follows = is_plain(relu, nn.ReLU)
            if follows and isinstance(layer, LaneConv2d) and isinstance(pool, LaneMaxPool2d) and pool.halves:
                x, done = layer(x, pooled=True, flat=is_plain(flatten, nn.Flatten)), 3
            elif follows and getattr(layer, "rectifies", False):  # it knows how to
                x, done = layer(x, rectified=True), 2
            else:
                x, done = layer(x), 1
            at += done
        return x if added is None else layers[at](x, added=added)


class _Convolve(Function):
    """y = x * w + bias, with ReLU and pooling behind it if ``pooled``; also what the gradients need of it."""

    @staticmethod
    def forward(
        x: Tensor, w: Tensor, bias: Tensor | None, geometry: Geometry, pooled: bool, flat: bool
    ) -> tuple[Tensor, ...]:
        x, w, bias = as_lane((x, w, bias))
        y, *kept = _forward(x, w, bias, geometry, pooled, flat)
        return y[0], *(t[0] for t in kept)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _, w, bias, ctx.geometry, *_ = inputs
        ctx.biased = bias is not None
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)  # or zeros would be written as the gradients of what is only kept
        ctx.save_for_backward(w, *output[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        of_input = ctx.needs_input_grad[0]
        found = apply(_ConvolveBack, ctx.geometry, of_input, grads[0], *ctx.saved_tensors)
        dx, dw, db = found if of_input else (None, *found)
        return dx, dw, db if ctx.biased else None, None, None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], x: Tensor, w: Tensor, bias: Tensor | None, geometry: Geometry,
        pooled: bool, flat: bool,
    ) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:  # fmt: skip
        x, w = (with_lanes(t, dim) for t, dim in zip((x, w), in_dims, strict=False))
        bias = None if bias is None else with_lanes(bias, in_dims[2])
        y, *kept = _forward(x, w, bias, geometry, pooled, flat)
        shared = [len(t) < len(y) for t in kept]  # all lanes have the same images, or weights
        found = [t[0] if same else t for t, same in zip(kept, shared, strict=True)]
        return (y, *found), (0, *(None if same else 0 for same in shared))


def _forward(
    x: Tensor, w: Tensor, bias: Tensor | None, geometry: Geometry, pooled: bool, flat: bool
) -> tuple[Tensor, ...]:
    """Output, padded images, their largest values, spread weights and, with pooling, its code: all with lanes first."""
    y, padded, spread = conv.forward(x, w, None if bias is None else bias.contiguous(), geometry)
    if not pooled:
        return y, padded.values, padded.largest, spread
    y, code = pool.forward(y, flat)
    return y, padded.values, padded.largest, spread, code


class _ConvolveBack(Gradient):
    """The gradients of `_Convolve` in x (if wanted), w and bias."""

    @staticmethod
    def forward(geometry: Geometry, of_input: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(g[0] for g in _backward(geometry, of_input, *(t.unsqueeze(0) for t in tensors)))

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], geometry: Geometry, of_input: bool, *tensors: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        dy, *others = (with_lanes(t, dim) for t, dim in zip(tensors, in_dims[2:], strict=True))
        found = _backward(geometry, of_input, dy.expand(info.batch_size, *dy.shape[1:]), *others)
        return found, (0,) * len(found)


def _backward(
    geometry: Geometry, of_input: bool, dy: Tensor, w: Tensor, values: Tensor, largest: Tensor, spread: Tensor,
    code: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The gradients in x (if wanted), w and bias; with a ``code``, dy is that behind ReLU and pooling."""
    frame = geometry.frame_of_gradient(of_input)
    framed = pad(dy, frame) if code is None else unpool(dy, code.expand(len(dy), *code.shape[1:]), frame)
    # Behind pooling are networks without norms: the layer below is one of these too, and wants the peaks.
    return conv.gradients(
        framed, Padded(values, largest), w, spread, geometry, of_input, noted=code is not None
    )
