"""What differentiable kernels with rules of their own for ``vmap`` share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.function import Function


def apply(function: type[Function], *arguments: Any) -> Any:
    """``function.apply``, which torch leaves untyped."""
    return function.apply(*arguments)  # type: ignore[no-untyped-call]


def in_lanes(info: Any, dims: Sequence[int | None], tensors: Sequence[Tensor | None]) -> list[Any]:
    """The operands of a ``vmap`` rule with their lanes first; what all lanes share is repeated for each."""
    return [
        None if t is None else t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)
        for t, dim in zip(tensors, dims, strict=True)
    ]


def with_lanes(tensor: Tensor, dim: int | None) -> Tensor:
    """The tensor with its lanes first; one lane, where it is the same for all."""
    return tensor.unsqueeze(0) if dim is None else tensor.movedim(dim, 0)


def as_lane(tensors: Iterable[Tensor | None]) -> list[Any]:
    """Operands as those of a single lane."""
    return [None if t is None else t.unsqueeze(0) for t in tensors]


class Gradient(Function):
    """The gradient of a kernel, as a kernel: it has none itself."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Nothing is kept."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Say so."""
        raise RuntimeError("second derivatives of the lanes' kernels are not defined")
