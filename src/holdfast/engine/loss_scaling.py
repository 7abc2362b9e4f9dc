"""Loss scaling: keeps gradients that are too small for float16 by computing those of a multiple of the loss.

The scale is a power of two, so that it changes no digits. Every client begins every round with `FIRST_SCALE`; a step
whose gradient is not finite is skipped and halves the scale. The scale is thus a function of the client's own steps in
the round, and there is nothing to keep, send or resume. It does not grow, since a round is short.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from holdfast.core.trees import Tensors
from holdfast.models.network import Network

FIRST_SCALE = 2.0**12


def new_scaling(network: Network, lanes: int | None = None) -> Tensors:
    """The ``scale`` of a client's loss and its number of ``steps`` not skipped, or those of ``lanes``; {} if not used."""
    if network.autocast_dtype != torch.float16:
        return {}
    shape, device = () if lanes is None else (lanes,), next(iter(network.params.values())).device
    return {
        "scale": torch.full(shape, FIRST_SCALE, device=device),
        "steps": torch.zeros(shape, device=device),
    }


def scaled(loss: Tensor, scaling: Tensors) -> Tensor:
    """The loss to differentiate."""
    return loss * scaling["scale"] if scaling else loss


def unscaled(value: Tensor, scaling: Tensors) -> Tensor:
    """A loss or a gradient from that of the scaled loss."""
    return value / scaling["scale"] if scaling else value


def all_finite(grads: Iterable[Tensor]) -> Tensor:
    """Whether a step with these gradients is taken: a bool scalar."""
    return torch.stack([g.isfinite().all() for g in grads]).all()


def after_step(scaling: Tensors, finite: Tensor) -> Tensors:
    """The scaling after a step whose gradients were ``finite`` or not; both may have the dimension of lanes."""
    return {
        "scale": torch.where(finite, scaling["scale"], scaling["scale"] / 2),
        "steps": scaling["steps"] + finite,
    }
