"""Label counts and samples that a method may not read."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from holdfast.core.errors import HoldfastError
from holdfast.methods.context import Client

_OF_SAMPLES = {
    "read", "ids", "labels", "targets", "y", "x", "label_counts", "owned",
    "heldout_ids", "heldout_targets", "heldout_x", "heldout_y",
}  # fmt: skip

_READABLE = {
    Tensor.shape.__get__,  # type: ignore[attr-defined, unused-ignore]
    Tensor.dtype.__get__,  # type: ignore[attr-defined, unused-ignore]
    Tensor.device.__get__,  # type: ignore[attr-defined, unused-ignore]
    Tensor.__len__,
    Tensor.size,
    Tensor.numel,
    Tensor.dim,
    Tensor.__reduce_ex__,
    torch.zeros_like,
    torch.ones_like,
    torch.empty_like,
    Tensor.new_zeros,
    Tensor.new_ones,
}


def no_samples() -> np.ndarray:
    """Raise an error for a method that requests one sample of each class."""
    raise HoldfastError(
        "the method sends samples of the clients to others, which neither dp nor secure protects; choose another "
        "method, or give samples of the server by fedka:shared=..."
    )


class WithheldClient(Client):
    """A client whose samples a method may not read outside of its loss; the number of samples is public."""

    reader: str

    @staticmethod
    def of(client: Client, reader: str) -> Client:
        """The client without its samples, for the method ``reader``; its notes are the same object."""
        shown = copy.copy(client)
        shown.__class__ = WithheldClient
        shown.reader = reader  # type: ignore[attr-defined]
        return shown

    @property
    def samples(self) -> int:
        return len(cast("np.ndarray", object.__getattribute__(self, "ids")))

    def __getattribute__(self, name: str) -> Any:
        if name in _OF_SAMPLES:
            raise HoldfastError(
                f"dp_samples: {self.reader} reads a client's samples (client.{name}) outside of its loss, where "
                "neither clipping nor noise reaches them; choose another method"
            )
        return super().__getattribute__(name)


class WithheldCounts(Tensor):
    """Zeros in place of the federation's label counts; a method may read their shape, and nothing else."""

    @staticmethod
    def like(counts: Tensor) -> Tensor:
        return torch.zeros_like(counts).as_subclass(WithheldCounts)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func is Tensor.to:
                return func(*args, **kwargs or {}).as_subclass(WithheldCounts)
            if func in _READABLE:
                return func(*args, **kwargs or {})
        raise HoldfastError(
            "the method reads how many samples of each class the clients hold, which neither dp nor secure protects; "
            "choose a method that does not need these counts"
        )
