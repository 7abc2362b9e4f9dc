"""The gradient of a DP-SGD step: gradients of single samples, clipped and summed, plus noise."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from holdfast.core.trees import Tensors, Tree
from holdfast.methods.base import Batch, Local, Method
from holdfast.models.network import Network, Output, split_extra

CHUNK_BYTES = 256 << 20  # up to this size, the gradients of several samples are in memory at once
KEY_STRIDE = (
    0x9E3779B97F4A7  # distance between the dropout keys of a batch's samples, each of which has its own masks
)


def private_gradient(
    method: Method,
    network: Network,
    batch: Batch,
    key: Tensor,
    local: Local,
    buffers: Tensors,
    carry: Tree,
    bound: float,
    noise: Tensors,
    expected: Tensor,
) -> tuple[Tensors, Tensor]:
    """(Σ_i g_i min(1, C / ‖g_i‖) + ``noise``) / ``expected``, and the mean loss of the samples.

    g_i is the gradient at ``local.params`` of the method's objective on a batch of sample i alone; padding, by
    ``batch.mask``, is left out. Functional, also under ``vmap``.
    """
    keys = key + KEY_STRIDE * torch.arange(len(batch.x), device=batch.x.device)
    rows: Tree = {
        "x": batch.x,
        "y": batch.y,
        "key": keys,
        "table": dict(batch.table),
        "teacher": {name: {"f": out.features, "l": out.logits} for name, out in batch.teacher.items()},
    }

    def loss_of(params: Tensors, row: Tree) -> Tensor:
        alone: Tree = _alone(row)
        teacher = {name: Output(out["f"], out["l"]) for name, out in alone["teacher"].items()}
        one = Batch(alone["x"], alone["y"], batch.epoch, None, teacher, alone["table"], batch.task)
        extra = method.extra_inputs(carry)
        x = one.x if extra is None else torch.cat([extra, one.x])
        with network.autocast():
            out, _ = network.pure(params, buffers, x, None, row["key"])
        if extra is not None:
            out = split_extra(out, len(extra))
        loss = method.task_loss(out, one, carry)
        term = method.loss(out, one, carry, Local(params, local.global_params))
        return loss if term is None else loss + term

    total = {k: torch.zeros_like(v) for k, v in local.params.items()}
    losses = []
    one_bytes = sum(p.numel() * p.element_size() for p in local.params.values())
    chunk = max(1, CHUNK_BYTES // one_bytes)
    for start in range(0, len(batch.x), chunk):
        part = _part(rows, slice(start, start + chunk))
        grads, values = vmap(grad_and_value(loss_of), in_dims=(None, 0))(local.params, part)
        squares = torch.stack([g.flatten(1).square().sum(1) for g in grads.values()]).sum(0)
        factor = (bound / squares.sqrt()).clamp(max=1.0)
        if batch.mask is not None:
            factor = factor * batch.mask[start : start + chunk]
        total = {k: total[k] + torch.tensordot(factor, g, dims=([0], [0])) for k, g in grads.items()}
        losses.append(values)
    gradient = {k: (value + noise[k]) / expected for k, value in total.items()}
    mean = batch.mean(torch.cat(losses)) if losses else expected.new_zeros(())
    return gradient, mean


def _alone(row: Any) -> Any:
    """A sample's row as a batch of one."""
    return {k: _alone(v) for k, v in row.items()} if isinstance(row, dict) else row.unsqueeze(0)


def _part(rows: Tree, chosen: slice) -> Tree:
    return {k: _part(v, chosen) if isinstance(v, dict) else v[chosen] for k, v in rows.items()}
