"""Loss scaling: keeps gradients that are too small for float16 by computing those of a multiple of the loss.

The scale is a power of two, so that it changes no digits. Every client begins every round with `FIRST_SCALE`; a step
whose gradient is not finite is skipped and halves the scale. The scale is thus a function of the client's own steps in
the round, and there is nothing to keep, send or resume. It does not grow, since a round is short.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from holdfast.core.trees import Tensors, Tree, where
from holdfast.models.network import Network

FIRST_SCALE = 2.0**12


def new_scaling(network: Network, lanes: int | None = None) -> Tensors:
    """The ``scale`` of a client's loss and the ``steps`` it has taken, or those of ``lanes``; {} without float16."""
    if network.autocast_dtype != torch.float16:
        return {}
    like, shape = next(iter(network.params.values())), () if lanes is None else (lanes,)
    return {"scale": like.new_full(shape, FIRST_SCALE), "steps": like.new_zeros(shape)}


def scaled(loss: Tensor, scaling: Tensors) -> Tensor:
    """The loss to differentiate."""
    return loss * scaling["scale"] if scaling else loss


def unscaled(value: Tensor, scaling: Tensors) -> Tensor:
    """A loss or a gradient from that of the scaled loss."""
    return value / scaling["scale"] if scaling else value


def all_finite(grads: Iterable[Tensor]) -> Tensor:
    """Whether a step with these gradients is taken, as a scalar tensor."""
    return torch.stack([g.isfinite().all() for g in grads]).all()


def unless_skipped(taken: Tensors, new: Tree, old: Tree) -> Tree:
    """Leaves of ``new``, or of ``old`` if the step is not ``taken``; {} is a step without loss scaling."""
    return where(taken["taken"], new, old) if taken else new


def counted(loss: Tensor, taken: Tensors) -> Tensor:
    """The loss, or 0 if the step is not ``taken``."""
    return torch.where(taken["taken"], loss, 0.0) if taken else loss


def after_step(scaling: Tensors, taken: Tensor | bool) -> Tensors:
    """The scaling after a step that was taken or skipped; both may have the dimension of lanes."""
    return {"scale": scaling["scale"] * (1 + taken) / 2, "steps": scaling["steps"] + taken}
