"""Differentiable layers that run the kernels, with their own ``vmap`` rules."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import Function
from torch.nn import functional as F

from holdfast.kernels import conv, conv_relu_maxpool, is_plain, relu_maxpool, small_linear
from holdfast.kernels.autograd import NonDifferentiable, add_lane_dim, apply, lanes_first
from holdfast.kernels.bias_relu import add_bias
from holdfast.kernels.conv_geometry import Geometry
from holdfast.kernels.groupnorm import group_norm
from holdfast.kernels.maxpool import LaneMaxPool2d
from holdfast.kernels.padded_images import Padded, pad, relu_maxpool_backward


class LaneConv2d(nn.Module):
    """nn.Conv2d for many lanes at once, with the ReLU and 2x2 max-pooling after it if ``pool``."""

    def __init__(self, conv2d: nn.Conv2d) -> None:
        super().__init__()
        self.weight, self.bias = conv2d.weight, conv2d.bias
        self.stride, self.padding = int(conv2d.stride[0]), int(conv2d.padding[0])

    @staticmethod
    def supports(module: nn.Conv2d) -> bool:
        """Whether the kernels support this layer.

        They support layers with the same parameters in both dimensions and with zero padding smaller than the kernel,
        without groups and dilation.
        """
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

    def forward(self, x: Tensor, pool: bool = False, channels_first: bool = False) -> Tensor:
        """``[B, O, OH, OW]`` from ``[B, C, H, W]``, or ``[B, O, OH/2, OW/2]`` if ``pool``.

        ``channels_first`` is the memory order of pooled outputs if they are flattened next.
        """
        size = (x.shape[-2], x.shape[-1])
        geometry = Geometry(size, self.weight.shape[-1], self.stride, self.padding)
        fused = pool and not (geometry.out[0] % 2 or geometry.out[1] % 2)
        if fused and not torch.is_grad_enabled() and conv_relu_maxpool.supported(len(self.weight), geometry):
            return conv_relu_maxpool.conv_relu_maxpool(x, self.weight, self.bias, geometry, channels_first)
        y = cast(Tensor, apply(_Conv, x, self.weight, self.bias, geometry, fused, channels_first)[0])
        return F.max_pool2d(F.relu(y), 2) if pool and not fused else y


class LaneLinear(nn.Linear):
    """nn.Linear with a bias, and the ReLU after it if ``relu``."""

    fuses_relu = True

    def forward(self, x: Tensor, relu: bool = False) -> Tensor:
        """``[B, O]`` from ``[B, I]``; other shapes use PyTorch's own kernels."""
        if x.dim() == 2 and not relu and small_linear.supported(self.weight):
            return small_linear.linear(x, self.weight, self.bias)
        if x.dim() == 2:
            return add_bias(x @ self.weight.mT, self.bias, relu)
        y = super().forward(x)
        return F.relu(y) if relu else y


class LaneGroupNorm(nn.GroupNorm):
    """nn.GroupNorm with weights, and the ReLU after it if ``relu``, or the addition of a ``residual`` and a ReLU."""

    fuses_relu = fuses_residual = True

    def forward(self, x: Tensor, relu: bool = False, residual: Tensor | None = None) -> Tensor:
        """Normalise images ``[B, C, H, W]``; other shapes use PyTorch's own kernels."""
        if x.dim() == 4 and (residual is None or residual.shape == x.shape):
            return group_norm(x, self.weight, self.bias, self.num_groups, self.eps, relu, residual)
        y = super().forward(x)
        if residual is not None:
            return F.relu(y + residual)
        return F.relu(y) if relu else y


class LaneMean(nn.Module):
    """Global average pooling; PyTorch's adaptive pooling processes channels-last lanes sequentially."""

    def forward(self, x: Tensor) -> Tensor:
        """``[..., C, 1, 1]`` from ``[..., C, H, W]``."""
        return x.mean((-2, -1), keepdim=True)


class LaneSequential(nn.Sequential):
    """An nn.Sequential whose layers also apply the ReLU, or ReLU and pooling, that follow them.

    A layer that is called directly does not apply them.
    """

    @property
    def fuses_residual(self) -> bool:
        """Whether its last layer can add a residual, and has no hook that needs the output before the addition."""
        last = [nn.Identity(), *self][-1]
        return getattr(last, "fuses_residual", False) and not last._forward_hooks

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Apply the layers in order; the last adds the ``residual``, which needs `fuses_residual`."""
        layers, index = [*self, *[nn.Identity()] * 3], 0
        while index < len(self) - (residual is not None):
            layer, relu, pool, flatten = layers[index : index + 4]
            has_relu = is_plain(relu, nn.ReLU)
            if has_relu and isinstance(layer, LaneConv2d) and isinstance(pool, LaneMaxPool2d) and pool.is_2x2:
                x, applied = layer(x, pool=True, channels_first=is_plain(flatten, nn.Flatten)), 3
            elif has_relu and getattr(layer, "fuses_relu", False):
                x, applied = layer(x, relu=True), 2
            else:
                x, applied = layer(x), 1
            index += applied
        return x if residual is None else layers[index](x, residual=residual)


class _Conv(Function):
    """The outputs of `_forward` for one lane."""

    @staticmethod
    def forward(
        x: Tensor, w: Tensor, bias: Tensor | None, geometry: Geometry, pool: bool, channels_first: bool
    ) -> tuple[Tensor, ...]:
        x, w, bias = add_lane_dim((x, w, bias))
        return tuple(t[0] for t in _forward(x, w, bias, geometry, pool, channels_first))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _, w, bias, ctx.geometry, *_ = inputs
        ctx.has_bias = bias is not None
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)  # otherwise zeros are written as gradients of the saved tensors
        ctx.save_for_backward(w, *output[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        needs_dx = ctx.needs_input_grad[0]
        input_grads = apply(_ConvBackward, ctx.geometry, needs_dx, grads[0], *ctx.saved_tensors)
        dx, dw, db = input_grads if needs_dx else (None, *input_grads)
        return dx, dw, db if ctx.has_bias else None, None, None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], x: Tensor, w: Tensor, bias: Tensor | None, geometry: Geometry,
        pool: bool, channels_first: bool,
    ) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:  # fmt: skip
        x, w = (lanes_first(t, dim) for t, dim in zip((x, w), in_dims, strict=False))
        bias = None if bias is None else lanes_first(bias, in_dims[2])
        y, *saved = _forward(x, w, bias, geometry, pool, channels_first)
        shared = [len(t) < len(y) for t in saved]  # all lanes have the same images, or weights
        outputs = [t[0] if is_shared else t for t, is_shared in zip(saved, shared, strict=True)]
        return (y, *outputs), (0, *(None if is_shared else 0 for is_shared in shared))


def _forward(
    x: Tensor, w: Tensor, bias: Tensor | None, geometry: Geometry, pool: bool, channels_first: bool
) -> tuple[Tensor, ...]:
    """Output, padded images, their amax, packed filters and, if ``pool``, the argmax of pooling; all lanes first."""
    y, padded, packed = conv.forward(x, w, None if bias is None else bias.contiguous(), geometry)
    if not pool:
        return y, padded.values, padded.amax, packed
    y, argmax = relu_maxpool.forward(y, channels_first)
    return y, padded.values, padded.amax, packed, argmax


class _ConvBackward(NonDifferentiable):
    """The gradients of `_Conv` with respect to x (if needed), w and bias."""

    @staticmethod
    def forward(geometry: Geometry, needs_dx: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(g[0] for g in _backward(geometry, needs_dx, *add_lane_dim(tensors)))

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], geometry: Geometry, needs_dx: bool, *tensors: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        dy, *saved = (lanes_first(t, dim) for t, dim in zip(tensors, in_dims[2:], strict=True))
        grads = _backward(geometry, needs_dx, dy.expand(info.batch_size, *dy.shape[1:]), *saved)
        return grads, (0,) * len(grads)


def _backward(
    geometry: Geometry, needs_dx: bool, dy: Tensor, w: Tensor, values: Tensor, amax: Tensor, packed: Tensor,
    argmax: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The gradients of x (if ``needs_dx``), w and bias; with ``argmax``, dy is the gradient of the pooled output."""
    layout = geometry.gradient_layout(needs_dx)
    if argmax is None:
        padded_dy = pad(dy, layout)
    else:
        padded_dy = relu_maxpool_backward(dy, argmax.expand(len(dy), *argmax.shape[1:]), layout)
    # Networks with pooled convolutions have no norms, so the layer before is a convolution, which needs the amax of dx.
    return conv.backward(
        padded_dy, Padded(values, amax), w, packed, geometry, needs_dx, stores_amax=argmax is not None
    )
