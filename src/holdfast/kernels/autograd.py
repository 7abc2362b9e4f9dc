"""Helpers for differentiable kernels that have their own ``vmap`` rules."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.function import Function


def apply(function: type[Function], *arguments: Any) -> Any:
    """``function.apply``, which torch leaves untyped."""
    return function.apply(*arguments)  # type: ignore[no-untyped-call]


def expand_to_lanes(info: Any, dims: Sequence[int | None], tensors: Sequence[Tensor | None]) -> list[Any]:
    """The operands of a ``vmap`` rule with the lanes first; those without lanes are expanded to all lanes."""
    return [
        None if t is None else t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)
        for t, dim in zip(tensors, dims, strict=True)
    ]


def lanes_first(tensor: Tensor, dim: int | None) -> Tensor:
    """The tensor with its lanes, dimension ``dim``, first; with a single lane if it has none."""
    return tensor.unsqueeze(0) if dim is None else tensor.movedim(dim, 0)


def add_lane_dim(tensors: Iterable[Tensor | None]) -> list[Any]:
    """The operands of one lane, with the lane dimension in front."""
    return [None if t is None else t.unsqueeze(0) for t in tensors]


class NonDifferentiable(Function):
    """Base class of kernels without a gradient, such as those that compute the gradient of another kernel."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError("second derivatives of the vectorized engine's kernels are not defined")
