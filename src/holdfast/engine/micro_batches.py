"""Gradient accumulation: micro-batches whose losses and gradients add up to those of the batch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from holdfast.core.trees import Tensors
from holdfast.engine.sample_gradients import KEY_STRIDE
from holdfast.methods.base import Batch
from holdfast.models.network import Output


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """A part of a batch.

    ``loss_share`` is the part's share of the task's loss, which is a mean over samples or positions. ``share`` is its
    share of the samples. Both are None if the part is the whole batch.
    """

    number: int
    batch: Batch
    loss_share: Tensor | None = None
    share: Tensor | None = None

    def add(self, task_loss: Tensor, term: Tensor | None) -> Tensor:
        """The part's contribution to the batch's loss, from the task's loss and the method's term."""
        if self.share is None or self.loss_share is None:
            return task_loss if term is None else task_loss + term
        loss = self.loss_share.to(task_loss.dtype) * task_loss
        return loss if term is None else loss + self.share.to(term.dtype) * term

    def scaled(self, loss: Tensor) -> Tensor:
        """The part's contribution to a loss that replaces both terms."""
        return loss if self.share is None else self.share.to(loss.dtype) * loss

    def key(self, key: Tensor) -> Tensor:
        """The key of the part's dropout masks, from that of the step."""
        return key + KEY_STRIDE * self.number if self.number else key

    def buffers(self, new: Tensors, old: Tensors) -> Tensors:
        """The buffers after this part; ``old`` if the part contains only padding."""
        if self.share is None or self.batch.mask is None:
            return new
        changed = {k: torch.where(self.share > 0, new[k], v) for k, v in old.items() if new[k] is not v}
        return old | changed


def micro_batches(batch: Batch, size: int | None) -> list[MicroBatch]:
    """The parts of at most ``size`` samples, in their order; one part if it is None."""
    if size is None or len(batch.x) <= size:
        return [MicroBatch(0, batch)]
    mask = (
        torch.ones(len(batch.x), dtype=torch.float64, device=batch.x.device)
        if batch.mask is None
        else batch.mask
    )
    total, samples = (v.clamp(min=1) for v in (batch.task.loss_weight(batch.y, mask), mask.sum()))
    parts = []
    for number, start in enumerate(range(0, len(batch.x), size)):
        rows = slice(start, start + size)
        part = replace(
            batch,
            x=batch.x[rows],
            y=batch.y[rows],
            mask=None if batch.mask is None else batch.mask[rows],
            teacher={k: Output(out.features[rows], out.logits[rows]) for k, out in batch.teacher.items()},
            table={k: values[rows] for k, values in batch.table.items()},
        )
        loss_share = batch.task.loss_weight(part.y, mask[rows]) / total
        parts.append(MicroBatch(number, part, loss_share, mask[rows].sum() / samples))
    return parts


def joined(outputs: list[Output]) -> Output:
    """The outputs of all parts, without their gradients."""
    if len(outputs) == 1:
        return outputs[0]
    return Output(
        torch.cat([out.features.detach() for out in outputs]),
        torch.cat([out.logits.detach() for out in outputs]),
    )
